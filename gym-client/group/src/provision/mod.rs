//! Provisioners: start ranks in child processes or in this process, with their ports and environment.
//!
//! ```text
//!   Provisioner ── reserve ──► Reservation ── launch ──► Deployment ── events ──► Started ▸ Ready(endpoints) ▸ MemoryHigh ▸ Exited(why)
//!     Local: child processes      │ placement()             ▲                    so far, then live
//!     InProcessRanks: tasks       │ nodes() · events()      └── restart(incarnations) · kill(rank) · usage() · shutdown(grace)
//!     Nodes: agents on machines   └ release(grace)
//! ```
//!
//! A provisioner finds room for bundles and holds it; the reservation starts and ends ranks on them and reports their events. The supervisor of
//! the group decides on restarts, and on the time from which a rank may be called.

pub(crate) mod deployment;
pub(crate) mod events;
mod in_process;
mod local;
mod machine;
mod nodes;
mod place;
pub(crate) mod variables;
mod workers;

pub use deployment::{DEFAULT_START_TIMEOUT, Deployment, LaunchSpec, Provisioner, Reservation, ReserveRequest};
pub use events::{NodeEvent, NodeState, NodeStatus, RankEvent};
pub use in_process::InProcessRanks;
pub use local::{Local, LocalOptions};
#[cfg(feature = "ray")]
pub(crate) use nodes::{AGENT_ROLE, AgentLines, BundleMoves, NodeSource, NodesReservation};
pub use nodes::{NodeAgent, NodeOptions, Nodes, NodesOptions};
pub(crate) use place::count_local;
pub use place::{BundleId, HeldPort, RankPlace, Rendezvous};
pub use variables::{
    JOIN_SECRET_VARIABLE, NODE_FIRST, NOT_INHERITED, NOT_SENT, RankEnvironment, RankVariable, VariableKind,
    VariableSource, Variables,
};
pub use workers::{RankOverrides, WorkerKind, Workers};
