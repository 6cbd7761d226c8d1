//! The seam between a group and what starts its ranks.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use gym_core::group::Rank;
use gym_core::transport::TransportPolicy;
use gym_core::{CallContext, Incarnation, Result};
use serde_json::value::RawValue;

use crate::group::provision::events::RankEvent;
use crate::group::provision::place::RankPlace;
use crate::group::provision::variables::Variables;
use crate::group::usage::process::ProcessUsage;

/// How long a rank may take from its start until it serves, unless told otherwise: loading weights takes minutes.
pub const DEFAULT_START_TIMEOUT: Duration = Duration::from_secs(600);

/// Starts the ranks of groups.
#[async_trait]
pub trait Provisioner: fmt::Debug + Send + Sync + 'static {
    /// Starts all ranks of `spec` in their first life and returns when they are started, which is before they serve: that, and
    /// a rank that failed to start, is in the deployment's events.
    ///
    /// # Errors
    /// What keeps all of them from starting: an unknown worker type, no port, a program that cannot be run.
    async fn launch(&self, cx: &CallContext, spec: LaunchSpec) -> Result<Box<dyn Deployment>>;
}

/// The ranks that one launch started. Dropping it ends them; [`Deployment::shutdown`] does so in order.
#[async_trait]
pub trait Deployment: fmt::Debug + Send + Sync + 'static {
    /// What has happened so far, then what happens. Ends when the deployment is dropped.
    fn events(&self) -> BoxStream<'static, RankEvent>;

    /// Starts another life of each of these ranks. Those that still live are killed first, all of them before any is started: an
    /// old life must not meet a new one at the rendezvous. Returns when they are started.
    ///
    /// # Errors
    /// `NotFound` for a rank that the launch had not. What keeps one from starting, a shutdown among it, is an error or in the events.
    async fn restart(&self, cx: &CallContext, lives: &[(Rank, Incarnation)]) -> Result<()>;

    /// Ends a rank as a crash would: this life of it, or whichever lives. One who has decided over a life does not end the next.
    ///
    /// # Errors
    /// `NotFound` for a rank that does not live, or lives another life.
    async fn kill(&self, rank: Rank, life: Option<Incarnation>) -> Result<()>;

    /// What each living rank used at the last sample. Never waits for a rank. Empty where ranks have no process of their own.
    fn usage(&self) -> BTreeMap<Rank, ProcessUsage>;

    /// Asks all ranks to end, kills after `grace` those that have not, and returns when they are gone. Again: nothing.
    ///
    /// # Errors
    /// A rank that could not even be killed.
    async fn shutdown(&self, grace: Duration) -> Result<()>;
}

/// Ranks to be started.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaunchSpec {
    /// The group's name.
    pub group: Arc<str>,
    /// The name under which the worker type is registered in [`Workers`](crate::group::Workers).
    pub worker: String,
    /// What each worker is made from, as JSON.
    pub init: Box<RawValue>,
    /// Where each rank goes; in rank order, from 0.
    pub ranks: Vec<RankPlace>,
    /// Environment variables of the group.
    pub variables: Variables,
    /// The most memory that one rank may use with all that it starts, in bytes.
    pub memory_limit_bytes: Option<u64>,
    /// How long a rank may take until it serves.
    pub start_timeout: Duration,
    /// Where ports for rendezvous are taken from.
    pub ports: Range<u16>,
    /// How the ranks are to be reached, if the configuration says so; ranks that may be reached by UCX offer it.
    pub transport_policy: Option<TransportPolicy>,
}

impl LaunchSpec {
    /// One rank for each place, with defaults for the rest.
    #[must_use]
    pub fn new(
        group: impl Into<Arc<str>>,
        worker: impl Into<String>,
        init: Box<RawValue>,
        ranks: Vec<RankPlace>,
    ) -> Self {
        Self {
            group: group.into(),
            worker: worker.into(),
            init,
            ranks,
            variables: Variables::new(),
            memory_limit_bytes: None,
            start_timeout: DEFAULT_START_TIMEOUT,
            ports: gym_core::group::cluster::MASTER_PORTS,
            transport_policy: None,
        }
    }
}
