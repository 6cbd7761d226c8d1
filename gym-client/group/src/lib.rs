//! Worker groups of the gym SDK: typed calls to the ranks of a group, with batches that are sharded over them; groups in this process, in worker processes,
//! on nodes and on Ray, which are probed and restarted within a budget; training loops.
//!
//! ```text
//!   group.call(method, args).batch(b).dispatch(d)
//!        │ layout: which ranks get which rows           │ health: which ranks accept calls
//!        ▼                                              ▼
//!   WorkerGroup ──► Channel of each rank ──► WorkerHost (queue) ──► Worker: exclusive, shared or blocking methods
//! ```
//!
//! ```
//! use gym_group::prelude::*;
//!
//! struct Scorer;
//! worker! {
//!     impl Worker for Scorer as scorer {
//!         fn start(_: WorkerEnv, _: ()) -> Result<Self> { Ok(Self) }
//!         /// Returns the sum of the rank's rewards.
//!         shared(idempotent) async fn sum(&self, _: &CallContext, call: Payload<()>) -> Result<Payload<f32>> {
//!             Ok(call.batch.column("reward")?.dense()?.view::<f32>()?.iter().sum::<f32>().into())
//!         }
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
//! let group = InProcessGroup::start::<Scorer>("scorers", RankLayout::new([("data", 2)])?, ()).await?;
//! let batch = Batch::empty().with("reward", Tensor::from_vec([4], vec![1.0_f32, 0.5, 0.0, 1.0])?)?;
//! let sums = group.call(scorer::sum, ()).batch(batch).dispatch(Dispatch::shard("data")).await?;
//! assert_eq!(sums.into_values(), [1.5, 1.0]);
//! # Ok(()) }
//! ```
//!
//! Workers, batches and layouts are in [`gym_core::group`]. This crate re-exports them, so that a program names one crate.
//!
//! # A supervised group
//!
//! ```text
//!   Deployment ── events ──► Supervisor ──► GroupView (ranks, incarnations, states and channels at one moment)
//!       ▲                      │   │  heartbeat: GET status on a separate channel, from a thread of its own
//!       └───── restart ────────┘   └─ a restarted rank: Stale ─ on_restart succeeds ─► Healthy
//! ```
//!
//! Tied ranks ([`RankPlace::tied`](RankPlace)) are one model. When one of them ends, the calls to all of them fail at once and the
//! others are killed. They share restarts, pauses, preparation and incarnation. A rank's states and their transitions are those of
//! [`health`].
//!
//! Calls are those of every group: [`WorkerGroupExt`]. A group never repeats a failed call. If a call fails because a
//! rank ended, [`Group::restart_failed_workers`] restarts the rank:
//!
//! ```no_run
//! # use gym_group::{Method, WorkerGroupExt, GroupError}; use gym_core::{CallContext, Result};
//! # use gym_group::Group;
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
//!
//! | module | purpose |
//! |---|---|
//! | [`prelude`] | the names that most programs need |
//! | [`call`] | calls to groups: replies, errors, load balancing, groups in this process |
//! | [`worker`], [`batch`], [`layout`] | workers and their methods; columns and tensors; named axes over ranks (of gym-core) |
//! | [`health`] | the state machine of ranks and replicas, failure classes, retry budgets |
//! | [`placement`] | bundles and ranks on nodes |
//! | [`train`] | advantages, message logs, and GRPO over a policy, a generation engine and an environment |
//! | `testing` | conformance suites, kills of ranks in this process (feature `testing`) |

#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod call;
#[cfg(target_os = "linux")]
mod cluster;
pub mod collective;
pub mod health;
pub mod placement;
pub mod prelude;
#[cfg(target_os = "linux")]
mod provision;
#[cfg(all(feature = "ray", target_os = "linux"))]
pub mod ray;
#[cfg(target_os = "linux")]
mod supervise;
#[cfg(feature = "testing")]
pub mod testing;
pub mod train;
#[cfg(target_os = "linux")]
mod usage;

pub use call::{
    Backlog, Balancer, BatchOptions, CallSupport, FailureKind, Gate, Gathered, GroupCall, GroupError, InProcessGroup,
    InProcessOptions, ItemError, Pending, Permit, RankMonitor, RankOutcome, RankReply, Submitted, WorkerGroupExt,
};
pub use gym_core::group::*;

#[cfg(target_os = "linux")]
pub use cluster::{ClusterFile, GroupRequest, VirtualCluster};
#[cfg(target_os = "linux")]
pub use provision::{
    BundleId, DEFAULT_START_TIMEOUT, Deployment, HeldPort, InProcessRanks, JOIN_SECRET_VARIABLE, LaunchSpec, Local,
    LocalOptions, NODE_FIRST, NOT_INHERITED, NOT_SENT, NodeAgent, NodeEvent, NodeOptions, NodeState, NodeStatus, Nodes,
    NodesOptions, Provisioner, RankEnvironment, RankEvent, RankOverrides, RankPlace, RankVariable, Rendezvous,
    Reservation, ReserveRequest, VariableKind, VariableSource, Variables, WorkerKind, Workers,
};
#[cfg(target_os = "linux")]
pub use supervise::{
    DEFAULT_MAX_RESTARTS, Group, GroupMetrics, GroupOptions, RankStatus, RankUsage, StartError, StuckRank, StuckReason,
};
#[cfg(target_os = "linux")]
pub use usage::{GPU_METRICS, GpuMetrics, GpuUsage, NodeUsage, ProcessUsage, visible_gpus};

/// The program of README.md, as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
