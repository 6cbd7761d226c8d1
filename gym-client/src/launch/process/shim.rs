//! The process between fork and program: links a child to its controller, then becomes the program.
//!
//! Without `unsafe` there is no `pre_exec`. The steps before `exec` therefore run in this program, executed again with
//! a hidden first argument. The shim
//!
//! 1. starts its own session, so that the process tree can be signalled and the terminal's Ctrl-C reaches only the
//!    controller;
//! 2. requests `SIGKILL` for the death of the controller (`PDEATHSIG`), then checks that the controller still exists;
//! 3. waits for one byte on standard input, which the controller sends after it has registered this process with the
//!    watchdog; the watchdog can therefore end every grandchild;
//! 4. executes the program under the same process ID.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use gym_core::base::process::OWN_PROGRAM;
use rustix::process::Signal;

use crate::launch::process::roles::{SHIM_ROLE, parse_pid, tie_to};

/// The byte that the controller sends to the shim's standard input after the watchdog has registered the child.
pub(in crate::launch) const GATE_OPEN: u8 = b'g';
/// Exit status of a shim that could not execute its program (the shell's status for "found, but not executable").
const EXEC_FAILED: i32 = 126;
/// Exit status of a shim whose controller died or cancelled the start.
const ABANDONED: i32 = 125;

/// Returns the arguments that start the shim; `become_program` parses them.
pub(in crate::launch) fn shim_arguments<'a>(controller: u32, program: &'a Path) -> [OsString; 3] {
    let program: &'a OsStr = program.as_os_str();
    [SHIM_ROLE.into(), controller.to_string().into(), program.to_owned()]
}

/// Runs as the shim process.
pub(in crate::launch) fn become_program(mut arguments: impl Iterator<Item = OsString>) -> ! {
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
        // The controller died, or dropped the child, before the child was registered.
        _ => std::process::exit(ABANDONED),
    }
    let mut command = Command::new(&program);
    command.args(arguments);
    // The controller's own program. Its name is for people who list processes.
    if program == OWN_PROGRAM
        && let Ok(name) = std::env::current_exe()
    {
        command.arg0(name);
    }
    let error = command.exec();
    fail(EXEC_FAILED, &format!("gym launch: execute {}: {error}", program.to_string_lossy()))
}

fn fail(status: i32, message: &str) -> ! {
    eprintln!("{message}");
    std::process::exit(status)
}
