//! The step between fork and the program: ties a child to its controller, then becomes the program.
//!
//! Without `unsafe` there is no `pre_exec`, so what has to happen in the child before `exec` happens in our own binary,
//! started again with a hidden first argument. The shim
//!
//! 1. starts its own session, so the whole family can be signalled and the terminal's Ctrl-C goes to the controller only;
//! 2. asks the kernel for `SIGKILL` when the controller dies (`PDEATHSIG`), then checks that it is not already gone;
//! 3. waits on its standard input for one byte, which the controller sends after the watchdog knows this process: no
//!    grandchild can exist that nobody would kill;
//! 4. executes the program under the same process id.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal};

use super::watchdog;

/// First argument that makes a process the shim of one child.
pub(super) const SHIM_ROLE: &str = "--gym-launch-shim";
/// First argument that makes a process the watchdog.
pub(super) const WATCHDOG_ROLE: &str = "--gym-launch-watchdog";
/// What the controller sends through the shim's standard input when the watchdog knows the child.
pub(super) const GATE_OPEN: u8 = b'g';
/// Exit status of a shim that could not become its program (the shell's number for "found, cannot execute").
const EXEC_FAILED: i32 = 126;
/// Exit status of a shim whose controller died or gave up first.
const ABANDONED: i32 = 125;

static ENTERED: AtomicBool = AtomicBool::new(false);

/// Must be the first line of `main` in every program that launches children.
///
/// Children and the watchdog are started by running the current executable again with a hidden first argument. In
/// such a process this function does not return: the process becomes the child's program, or the watchdog, or says what
/// UCX there is. In all others it returns at once, and [`Launcher`](super::Launcher) knows from then on that the
/// executable is fit to be run again.
///
/// Call it before any thread is started and before arguments are parsed.
pub fn enter() {
    let mut arguments = std::env::args_os().skip(1);
    match arguments.next() {
        Some(role) if role == SHIM_ROLE => become_program(arguments),
        Some(role) if role == WATCHDOG_ROLE => watchdog::run(arguments),
        #[cfg(feature = "rdma")]
        Some(role) if role == super::ucx::REPORT_ROLE => super::ucx::be_reporter(),
        _ => ENTERED.store(true, Ordering::Release),
    }
}

/// Whether [`enter`] ran in this process, so running the executable again will not run the user's `main` twice.
pub(super) fn entered() -> bool {
    ENTERED.load(Ordering::Acquire)
}

/// The arguments that start the shim: `become_program` reads them back.
pub(super) fn shim_arguments<'a>(controller: u32, program: &'a Path) -> [OsString; 3] {
    let program: &'a OsStr = program.as_os_str();
    [SHIM_ROLE.into(), controller.to_string().into(), program.to_owned()]
}

fn become_program(mut arguments: impl Iterator<Item = OsString>) -> ! {
    let (Some(controller), Some(program)) = (arguments.next().and_then(|text| parse_pid(&text)), arguments.next())
    else {
        fail(EXEC_FAILED, "gym launch: the shim was started without controller and program")
    };
    if let Err(error) = tie_to(controller, Signal::KILL) {
        fail(ABANDONED, &format!("gym launch: {error}"));
    }
    let mut gate = [0_u8; 1];
    match std::io::stdin().read(&mut gate) {
        Ok(1) if gate[0] == GATE_OPEN => {}
        // The controller died, or dropped the child, before it was registered.
        _ => std::process::exit(ABANDONED),
    }
    let error = Command::new(&program).args(arguments).exec();
    fail(EXEC_FAILED, &format!("gym launch: execute {}: {error}", program.to_string_lossy()))
}

/// Makes this process a session of its own that gets `signal` when `controller` dies.
pub(super) fn tie_to(controller: Pid, signal: Signal) -> Result<(), String> {
    // Fails only for a group leader, which a freshly forked process is not; then it already has what it needs.
    let _ = rustix::process::setsid();
    rustix::process::set_parent_process_death_signal(Some(signal))
        .map_err(|error| format!("ask for a signal at the death of the controller: {error}"))?;
    // A controller that died before the line above sends no signal any more; we have been given to another parent.
    if rustix::process::getppid() == Some(controller) {
        Ok(())
    } else {
        Err(format!("controller {} is gone", controller.as_raw_nonzero()))
    }
}

pub(super) fn parse_pid(text: &OsStr) -> Option<Pid> {
    text.to_str()?.parse().ok().and_then(Pid::from_raw)
}

fn fail(status: i32, message: &str) -> ! {
    eprintln!("{message}");
    std::process::exit(status)
}
