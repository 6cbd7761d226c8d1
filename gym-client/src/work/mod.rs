//! Pulled work: a pool hosts the work queue, and workers take rollouts and verifications from it when they have capacity.
//!
//! ```text
//!   driver ── Dispatch ──┬─ push: ServerClient ── by name ──────────────────────────────► server
//!                        └─ pull: WorkPool ◄── POST /work/next ── WorkPuller ── ServerClient ──► server
//!                                 (collector,     {done} → {items}   (worker, opens the connection)
//!                                  or a `pool` server)
//! ```
//!
//! A worker polls with the responses that it has finished, and gets as many items as it has capacity for. The poll waits while there
//! is no work. It is the worker's heartbeat too: a worker that stays silent is lost, and its rollouts end as
//! [`FailureClass::WorkerLost`](gym_core::rollout::FailureClass::WorkerLost). In a cluster, the head server usually notices it first:
//! the pool follows its members.

mod dispatch;
mod host;
mod members;
mod message;
mod pool;
mod pulled;
mod puller;
mod watch;

pub use dispatch::Dispatch;
pub use host::{COLLECTOR_POOL, PoolHost};
pub use message::WORK_ROUTE;
pub use pool::{WorkKind, WorkPool, WorkPoolOptions, WorkPoolSnapshot, WorkerSnapshot};
pub(crate) use pulled::PulledServers;
pub use puller::{PullingMember, WorkPuller, WorkPullerOptions};
pub use watch::{PULLS_LABEL, PoolWatch, WORK_LABEL};
