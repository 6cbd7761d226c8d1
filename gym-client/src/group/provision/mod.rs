//! Provisioners: start ranks in child processes or in this process, with their ports and environment.
//!
//! ```text
//!   Provisioner ── launch ──► Deployment ── events ──► Started ▸ Ready(endpoints) ▸ MemoryHigh ▸ Exited(why)
//!     Local: child processes      ▲                    so far, then live
//!     InProcess: tasks            └── restart(lives) · kill(rank) · usage() · shutdown(grace)
//! ```
//!
//! A provisioner starts and ends ranks and reports their events. The supervisor of the group decides on restarts, and on the time
//! from which a rank may be called.

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
