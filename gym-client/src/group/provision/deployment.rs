//! The interface between a group and the provisioner that starts its ranks.

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

/// Default limit for a rank's start, until it accepts calls: loading weights takes minutes.
pub const DEFAULT_START_TIMEOUT: Duration = Duration::from_secs(600);

/// Starts the ranks of groups, called by the supervisor of a group.
#[async_trait]
pub trait Provisioner: fmt::Debug + Send + Sync + 'static {
    /// Starts the first incarnation of every rank of `spec`, and returns when they are started. The ranks may not accept calls
    /// yet: the deployment's events report when a rank accepts calls, and ranks that failed to start.
    ///
    /// # Errors
    /// If no rank can be started: an unknown worker type, no free port, or a program that cannot be executed.
    async fn launch(&self, cx: &CallContext, spec: LaunchSpec) -> Result<Box<dyn Deployment>>;
}

/// The ranks of one launch. Dropping it ends the ranks; [`Deployment::shutdown`] stops them in order.
#[async_trait]
pub trait Deployment: fmt::Debug + Send + Sync + 'static {
    /// Returns the events so far, then new events as they happen. The stream ends when the deployment is dropped.
    fn events(&self) -> BoxStream<'static, RankEvent>;

    /// Starts a new incarnation of each of these ranks, and returns when they are started. Kills all old incarnations that still
    /// run before any new one starts. So an old incarnation cannot meet a new one at the rendezvous.
    ///
    /// # Errors
    /// `NotFound` for a rank that was not launched. If a rank fails to start, for example after a shutdown, that is an error or
    /// an event.
    async fn restart(&self, cx: &CallContext, lives: &[(Rank, Incarnation)]) -> Result<()>;

    /// Kills a rank as a crash would. If `life` is given, kills only that incarnation, so a late decision cannot kill a restarted
    /// rank.
    ///
    /// # Errors
    /// `NotFound` if the rank does not run, or runs another incarnation.
    async fn kill(&self, rank: Rank, life: Option<Incarnation>) -> Result<()>;

    /// Returns the usage of each running rank at the last sample. Never waits for a rank. Empty if ranks have no process of their
    /// own.
    fn usage(&self) -> BTreeMap<Rank, ProcessUsage>;

    /// Asks all ranks to stop, kills ranks that still run after `grace`, and returns when all have exited. Later calls have no
    /// effect.
    ///
    /// # Errors
    /// If a rank could not be killed.
    async fn shutdown(&self, grace: Duration) -> Result<()>;
}

/// Specifies the ranks to start.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaunchSpec {
    /// The group's name.
    pub group: Arc<str>,
    /// Name under which the worker type is registered in [`Workers`](crate::group::Workers).
    pub worker: String,
    /// Value from which each worker is created, as JSON.
    pub init: Box<RawValue>,
    /// The place of each rank, in rank order, from 0.
    pub ranks: Vec<RankPlace>,
    /// Environment variables of the group. Default: none.
    pub variables: Variables,
    /// Memory limit of one rank, including its child processes, in bytes. Default: none.
    pub memory_limit_bytes: Option<u64>,
    /// Limit for a rank's start, until it accepts calls. Default: 600 s.
    pub start_timeout: Duration,
    /// Range of the ports for the rendezvous. Default: 1400 to 1998.
    pub ports: Range<u16>,
    /// Transport policy of the configuration, if it has one. Ranks advertise UCX if the policy allows it. Default: none.
    pub transport_policy: Option<TransportPolicy>,
}

impl LaunchSpec {
    /// Specifies one rank for each place, with defaults for the other fields.
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
