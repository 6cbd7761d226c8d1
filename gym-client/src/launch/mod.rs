//! Child processes that cannot outlive their controller, without `unsafe`.
//!
//! ```text
//!   controller ──pipe──▶ watchdog        controller dies ─▶ pipe closes ─▶ SIGTERM, grace, SIGKILL to every family
//!       │
//!       └─ permanent thread ─▶ shim ─exec─▶ program ─▶ its own children
//!                              PDEATHSIG    restarted within a budget; stopped with SIGINT, SIGTERM, SIGKILL
//! ```
//!
//! A program that launches children calls [`enter`] as the first line of its `main`:
//!
//! ```no_run
//! use gym_client::launch::{self, ChildSpec, Launcher};
//! use std::time::Duration;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     launch::enter();
//!     tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
//!         let launcher = Launcher::builder().lines(launch::prefixed(std::io::stderr())).build()?;
//!         let spec = ChildSpec::new("math", "python3").arg("app.py").cwd("resources_servers/math");
//!         let child = launcher.spawn(spec).await?;
//!         println!("{:?}", *child.events().borrow());
//!         launcher.shutdown(Duration::from_secs(10)).await?;
//!         Ok(())
//!     })
//! }
//! ```
//!
//! # Guarantees and limits
//!
//! - However the controller ends (including `kill -9`), the kernel sends the child `SIGKILL`, and the watchdog ends
//!   everything that the child started: its process group, session, descendants, and all processes that inherited the
//!   mark in their environment (`GYM_LAUNCH_MARK`). `setsid` and double forks therefore do not escape.
//! - Not found: a process that left its group and session, whose parents have ended, *and* whose environment no longer
//!   contains the mark (cleared, or overwritten by a program that rewrites its title); a process of another user; a
//!   process that another service started on request (a container daemon, a cluster scheduler).
//! - If controller and watchdog are killed at the same instant, direct children still die, but grandchildren may
//!   survive.
//! - A killed watchdog is replaced at the next start or restart of a child, not earlier.
//! - A program with set-user-ID bits or file capabilities loses the parent-death signal at `exec`. The watchdog still
//!   applies if it may signal that user.
//! - A program that moves to the background counts as exited, and its remaining processes are ended before a restart.
//! - A controller that is process 1 of a container inherits orphans as zombies; run an init in the container.
//! - Children get no terminal and an empty standard input.
//!
//! [`LimitedProgram`] is for code that a model wrote: it runs once, within limits, and is not supervised.
//!
//! Supports only Linux.

mod child;
mod context;
mod error;
pub(crate) mod launcher;
mod limited;
mod lines;
mod prepare;
pub(crate) mod process;
mod spec;

#[cfg(feature = "rdma")]
pub use crate::transport::inquiry::{NcclMeeting, nccl_meeting, ucx_report};
pub use crate::transport::inquiry::{SelfTest, self_test};
pub use child::{ChildHandle, ChildState, ExitReport};
pub use error::LaunchError;
pub use launcher::{Launcher, LauncherBuilder};
pub use limited::{Limit, LimitedProgram, LimitedRun, Limits};
pub use lines::{LineSink, OutputTail, Stream, prefixed};
pub use prepare::prepare;
pub use process::tree::{ProcessTree, SessionLeader};
pub use spec::{ChildSpec, RestartPolicy};

use crate::transport::inquiry;
use process::{roles, shim, watchdog};

/// Turns the process into a shim or watchdog if it was started as one. Must be the first line of `main` in every
/// program that launches children.
///
/// Children and the watchdog are started by executing the current program again with a hidden first argument. In such a
/// process this function does not return: the process becomes the child's program or the watchdog, or answers a question
/// such as [`self_test`].
/// Otherwise it returns at once, and [`Launcher`] may execute the program again.
///
/// Call it before threads are started and before arguments are parsed.
pub fn enter() {
    let mut arguments = std::env::args_os().skip(1);
    match arguments.next() {
        Some(role) if role == roles::SHIM_ROLE => shim::become_program(arguments),
        Some(role) if role == roles::WATCHDOG_ROLE => watchdog::run(arguments),
        Some(role) => inquiry::enter(&role, arguments),
        None => {}
    }
    roles::set_entered();
    inquiry::set_entered();
}
