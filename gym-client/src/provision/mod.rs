//! Where workers run: ports held for them, the environment of a rank, and the ranks themselves, in this process or as children
//! of it.
//!
//! ```text
//!   Provisioner ── launch ──► Deployment ── events ──► Started ▸ Ready(endpoints) ▸ MemoryHigh ▸ Exited(why)
//!     Local: child processes      ▲                    so far, then live
//!     InProcess: tasks            └── restart(lives) · kill(rank) · usage() · shutdown(grace)
//! ```
//!
//! A provisioner starts and ends ranks and says what becomes of them. Whether a rank is started again, and when it may be
//! called, is the group's business ([`crate::group`]).

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use gym_core::{CallContext, Incarnation, Ladder, Rank, Result};
use serde_json::value::RawValue;

mod affinity;
mod cgroup;
mod cluster;
mod devices;
pub mod environment;
mod events;
mod file;
mod gpu;
mod handshake;
mod in_process;
mod listen;
mod local;
mod monitor;
pub mod ports;
mod process;
mod usage;
mod workers;

pub use cluster::{GroupRequest, VirtualCluster};
pub use devices::visible_gpus;
pub use environment::{RankPlace, Rendezvous, Variables};
pub use events::RankEvent;
pub use file::ClusterFile;
pub use in_process::InProcessRanks;
pub use listen::Listen;
pub use local::{Local, LocalOptions};
pub use monitor::{GpuUsage, NodeUsage};
pub use usage::Usage;
pub use workers::{Configured, WorkerKind, Workers};

pub(crate) use cluster::Tenancy;
pub(crate) use monitor::Monitor;

use environment::Layers;
use ports::{HeldPort, Tries};

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
    fn usage(&self) -> BTreeMap<Rank, Usage>;

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
    /// The name under which the worker type is registered in [`Workers`].
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
    pub ladder: Option<Ladder>,
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
            ports: gym_core::cluster::MASTER_PORTS,
            ladder: None,
        }
    }
}

/// Ports held for one group on this machine, and the meeting point made of them. They are held as long as this lives, over
/// all restarts.
#[derive(Debug)]
pub(crate) struct MeetingPoint {
    _held: Vec<HeldPort>,
    pub(crate) rendezvous: Rendezvous,
}

impl MeetingPoint {
    pub(crate) fn hold(ranks: usize, range: &Range<u16>) -> Result<Self> {
        let mut random = fastrand::Rng::new();
        let held = (0..=ranks)
            .map(|_| {
                ports::search(range, Tries::EachOnce, &std::collections::BTreeSet::new(), &mut random, HeldPort::bind)
            })
            .collect::<Result<Vec<_>>>()?;
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let available = held[1..].iter().map(|port| (here, port.port())).collect();
        let rendezvous = Rendezvous { master_address: here, master_port: held[0].port(), available };
        Ok(Self { _held: held, rendezvous })
    }
}

/// UCX reads some settings when it is loaded, so they must be there when a worker starts; the worker type's own win over them.
fn defaults(kind: &WorkerKind, ladder: Option<&Ladder>) -> Variables {
    let ucx = crate::launch::UCX_SETTINGS.iter().filter(|_| ladder.is_some_and(Ladder::uses_ucx));
    let mut defaults: Variables = ucx.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    defaults.extend(kind.defaults().clone());
    defaults
}

/// What a worker type and a launch make of one rank: its environment, and what it is made from.
pub(crate) fn of_rank(
    kind: &WorkerKind,
    spec: &LaunchSpec,
    place: &RankPlace,
    rendezvous: &Rendezvous,
) -> Result<(Variables, Box<RawValue>)> {
    let configured = kind.configured(place);
    let layers = Layers {
        defaults: defaults(kind, spec.ladder.as_ref()),
        process: environment::of_this_process(),
        group: Some(&spec.variables),
        configured: configured.variables.clone(),
    };
    Ok((layers.of_rank(place, rendezvous), configured.over(&spec.init)?))
}

#[cfg(test)]
mod tests {
    use gym_core::{Handles, Method, Methods, Payload, Worker, WorkerEnv};

    use super::*;

    /// A worker with a method that does nothing.
    pub(super) struct Idle;

    #[derive(Clone, Copy, Debug)]
    struct Nothing;

    impl Method for Nothing {
        const NAME: &'static str = "nothing";
        type Args = ();
        type Reply = ();
    }

    impl Worker for Idle {
        type Init = ();

        fn start(_: WorkerEnv, (): ()) -> Result<Self> {
            Ok(Self)
        }

        fn methods(methods: &mut Methods<Self>) {
            methods.exclusive(Nothing);
        }
    }

    impl Handles<Nothing> for Idle {
        async fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
            Ok(().into())
        }
    }

    #[test]
    fn a_rank_that_may_be_reached_by_ucx_starts_with_what_ucx_reads_at_its_load() {
        let own = Variables::from([("UCX_HANDLE_ERRORS".to_owned(), "bt".to_owned())]);
        let kind = WorkerKind::of::<Idle>().with_defaults(own);
        assert_eq!(defaults(&kind, Some(&Ladder::auto()))["UCX_MEM_MMAP_HOOK_MODE"], "none");
        assert_eq!(defaults(&kind, Some(&Ladder::auto()))["UCX_HANDLE_ERRORS"], "bt", "the worker type's own win");
        for without in [None, Some(Ladder::without_ucx())] {
            assert_eq!(defaults(&kind, without.as_ref()).len(), 1, "{without:?}");
        }
    }
}
