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
//! called, is the group's business ([`crate::group::supervise::group`]).

pub(crate) mod deployment;
pub(crate) mod events;
mod in_process;
mod local;
mod place;
mod ports;
pub(crate) mod variables;
mod workers;

pub use deployment::{DEFAULT_START_TIMEOUT, Deployment, LaunchSpec, Provisioner};
pub use events::RankEvent;
pub use in_process::InProcessRanks;
pub use local::{Local, LocalOptions};
pub use place::{RankPlace, Rendezvous};
pub use ports::HeldPort;
pub use variables::Variables;
pub use workers::{RankOverrides, WorkerKind, Workers};
