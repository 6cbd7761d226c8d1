//! Composes the servers of a configuration: all in this process, or one of them alone, from the same file.
//!
//! ```text
//!   configuration ──► native implementation ──► role handler ──► mem://name  (callers of this process)
//!                 │                                          ├─► ucx://host:port   (where `transport` allows it)
//!                 │                                          └─► http://host:port  (all other callers)
//!                 └─► Python entrypoint ──────► child process ──► http://host:port
//!                                 all of them ──► registry ◄── head server
//! ```

mod builder;
#[cfg(feature = "cli")]
mod check;
mod instance;
mod join;
mod options;
mod python;
mod running;
mod schema;
mod servers;

pub use builder::StackBuilder;
#[cfg(feature = "cli")]
pub(crate) use check::{RunsAs, mismatched, runs_as, try_build};
pub use instance::RunningServer;
pub use join::JoinOptions;
#[cfg(feature = "cli")]
pub(crate) use join::takes_work;
pub use options::{HEAD_NAME, StackOptions};
pub use running::Stack;
#[cfg(feature = "cli")]
pub(crate) use running::live as live_servers;
pub use servers::{Build, Servers};
