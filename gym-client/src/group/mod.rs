//! Worker groups whose ranks are kept alive: started by a provisioner, watched, and started again within a budget.
//!
//! ```text
//!   Deployment ── events ──► Supervisor ──► GroupView (ranks, incarnations, states, channels of one moment)
//!       ▲                      │   │  heartbeat: GET status on a channel of its own
//!       └───── restart ────────┘   └─ a restarted rank: Stale ─ on_restart succeeds ─► Healthy
//! ```
//!
//! Ranks that are tied ([`RankPlace::tied`](RankPlace)) are one model: when one ends, its calls and those of the
//! others fail at once and the others are ended too; they are counted, paused for, started, prepared and let serve as one, with
//! the same incarnation, which is the epoch of whatever they use to talk to each other.
//!
//! Calls are those of every group: [`gym_core::group::WorkerGroupExt`]. A call that failed is never repeated by itself; when it fails
//! because a rank ended, [`Group::restart_failed_workers`] brings the rank back:
//!
//! ```no_run
//! # use gym_core::group::{Method, WorkerGroupExt, GroupError}; use gym_core::{CallContext, Result};
//! # use gym_client::group::Group;
//! # #[derive(Clone, Copy, Debug)] struct Train;
//! # impl Method for Train { const NAME: &'static str = "train"; type Args = u64; type Reply = u64; }
//! # async fn example(group: &Group) -> Result<()> {
//! let gathered = match group.call(Train, 1).await {
//!     Ok(gathered) => gathered,
//!     Err(_failed) => {
//!         group.restart_failed_workers(&CallContext::default()).await?;
//!         group.call(Train, 1).await?
//!     }
//! };
//! # Ok(()) }
//! ```

mod cluster;
mod provision;
mod supervise;
pub mod train;
mod usage;

pub use cluster::{ClusterFile, GroupRequest, VirtualCluster};
pub use provision::{
    DEFAULT_START_TIMEOUT, Deployment, HeldPort, InProcessRanks, LaunchSpec, Local, LocalOptions, Provisioner,
    RankEvent, RankOverrides, RankPlace, Rendezvous, Variables, WorkerKind, Workers,
};
pub use supervise::{
    BundleId, DEFAULT_MAX_RESTARTS, Group, GroupMetrics, GroupOptions, RankStatus, RankUsage, StartError, StuckRank,
    StuckReason,
};
pub use usage::{GpuUsage, NodeUsage, ProcessUsage, visible_gpus};
