//! Child processes that cannot outlive us, without `unsafe`.
//!
//! ```text
//!   controller ──pipe──▶ watchdog        controller dies ─▶ pipe closes ─▶ SIGTERM, grace, SIGKILL to every family
//!       │
//!       └─ permanent thread ─▶ shim ─exec─▶ program ─▶ its own children
//!                              PDEATHSIG    restarted within a budget; stopped with SIGINT, SIGTERM, SIGKILL
//! ```
//!
//! A program that launches children calls [`enter`] as the first line of its `main`; then:
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
//! # What is promised, and what is not
//!
//! - However the controller ends (`kill -9` included), the child gets `SIGKILL` from the kernel, and everything it
//!   started is ended by the watchdog: process group, session, descendants, and whoever inherited the mark in its
//!   environment (`GYM_LAUNCH_MARK`), so `setsid` and double forks are no escape.
//! - Not found: a process that left group and session, whose parents are gone, *and* whose environment no longer shows
//!   the mark (cleared, or overwritten by a program that rewrites its title); one that runs as another user; one that
//!   somebody else started on request (a container daemon, a cluster scheduler).
//! - If controller and watchdog are both killed at the same instant, direct children still die, grandchildren may not.
//! - A watchdog that somebody killed is replaced at the next start or restart of a child, not before.
//! - A program with set-user-id bits or file capabilities loses the parent-death signal at `exec`; the watchdog still
//!   applies, as far as it may signal that user.
//! - A program that puts itself into the background counts as exited, and what it left is ended before a restart.
//! - A controller that is process 1 of a container inherits orphans as zombies: give the container an init.
//! - Children get no terminal and an empty standard input.
//!
//! Linux only.

mod child;
mod context;
mod error;
pub(crate) mod launcher;
mod lines;
mod prepare;
pub(crate) mod process;
mod spec;

#[cfg(feature = "rdma")]
pub use crate::transport::report::ucx_report;
pub use child::{ChildHandle, ChildState, ExitReport};
pub use error::LaunchError;
pub use launcher::{Launcher, LauncherBuilder};
pub use lines::{LineSink, Stream, prefixed};
pub use prepare::prepare;
pub use spec::{ChildSpec, RestartPolicy};

#[cfg(feature = "rdma")]
use crate::transport::report;
use process::{roles, shim, watchdog};

/// Must be the first line of `main` in every program that launches children.
///
/// Children and the watchdog are started by running the current executable again with a hidden first argument. In
/// such a process this function does not return: the process becomes the child's program, or the watchdog, or says what
/// UCX there is. In all others it returns at once, and [`Launcher`] knows from then on that the
/// executable is fit to be run again.
///
/// Call it before any thread is started and before arguments are parsed.
pub fn enter() {
    let mut arguments = std::env::args_os().skip(1);
    match arguments.next() {
        Some(role) if role == roles::SHIM_ROLE => shim::become_program(arguments),
        Some(role) if role == roles::WATCHDOG_ROLE => watchdog::run(arguments),
        #[cfg(feature = "rdma")]
        Some(role) if role == report::REPORT_ROLE => report::be_reporter(),
        _ => {
            roles::set_entered();
            #[cfg(feature = "rdma")]
            report::set_entered();
        }
    }
}
