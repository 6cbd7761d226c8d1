//! Supervised worker groups: starts ranks in processes or in this one, probes them, and restarts them within a budget.
//!
//! ```text
//!   Deployment ── events ──► Supervisor ──► GroupView (ranks, incarnations, states and channels at one moment)
//!       ▲                      │   │  heartbeat: GET status on a separate channel, from a thread of its own
//!       └───── restart ────────┘   └─ a restarted rank: Stale ─ on_restart succeeds ─► Healthy
//! ```
//!
//! Tied ranks ([`RankPlace::tied`](RankPlace)) are one model. When one of them ends, the calls to all of them fail at once and the
//! others are killed. They share restarts, pauses, preparation and incarnation. A rank's states and their transitions are those of
//! [`gym_core::group::health`].
//!
//! Calls are those of every group: [`gym_core::group::WorkerGroupExt`]. A group never repeats a failed call. If a call fails because a
//! rank ended, [`Group::restart_failed_workers`] restarts the rank:
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
//!
//! A rank that hangs does not end. Its heartbeats come from a thread with I/O of its own, so a method that computes for minutes does not stop them, even if
//! it should have been declared `blocking`. A rank without a heartbeat for 15 s is silent ([`GroupOptions::silence_max`]): its process is stopped, hangs in the
//! kernel, or is cut off. Its calls fail, and the error says since when and why, as far as that can be seen. The supervisor also writes a warning when a call
//! makes no progress for 300 s ([`GroupOptions::stall`]); it kills no rank, because a long call may be right.
//!
//! The error of a failed call names the ranks that are late or silent. `group.restart_workers(cx, error.unanswered())` kills and restarts them
//! ([`Group::restart_workers`]). So does `restart_failed_workers`, for ranks that have been silent for 30 s ([`GroupOptions::silence_restart`]).
//!
//! | name | purpose |
//! |---|---|
//! | [`Group`], [`GroupOptions`] | a supervised group: calls, status, usage, metrics, restarts |
//! | [`VirtualCluster`], [`ClusterFile`] | bundles on nodes, and the groups that share them |
//! | [`Local`], [`InProcessRanks`] | provisioners: ranks in child processes, or in this process |
//! | [`Nodes`], [`NodeAgent`] | ranks on other machines: the provisioner, and the agent of a machine |
//! | `ray` | ranks on a Ray cluster (feature `ray`) |
//! | [`Workers`], [`WorkerKind`] | the worker types that a provisioner can start |
//! | [`RankEnvironment`], [`VariableSource`] | the environment variables of a rank, and where each is from |
//! | [`NodeUsage`], [`GpuUsage`], [`ProcessUsage`] | sampled usage of nodes, GPUs and worker processes |
//! | [`train`] | GRPO over a policy, a generation engine and an environment |

mod cluster;
mod provision;
#[cfg(feature = "ray")]
pub mod ray;
mod supervise;
pub mod train;
mod usage;

pub use cluster::{ClusterFile, GroupRequest, VirtualCluster};
pub use provision::{
    BundleId, DEFAULT_START_TIMEOUT, Deployment, HeldPort, InProcessRanks, JOIN_SECRET_VARIABLE, LaunchSpec, Local,
    LocalOptions, NODE_FIRST, NOT_INHERITED, NOT_SENT, NodeAgent, NodeEvent, NodeOptions, NodeState, NodeStatus, Nodes,
    NodesOptions, Provisioner, RankEnvironment, RankEvent, RankOverrides, RankPlace, RankVariable, Rendezvous,
    Reservation, ReserveRequest, VariableKind, VariableSource, Variables, WorkerKind, Workers,
};
pub use supervise::{
    DEFAULT_MAX_RESTARTS, Group, GroupMetrics, GroupOptions, RankStatus, RankUsage, StartError, StuckRank, StuckReason,
};
pub use usage::{GPU_METRICS, GpuMetrics, GpuUsage, NodeUsage, ProcessUsage, visible_gpus};
