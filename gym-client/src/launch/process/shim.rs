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

use rustix::process::Signal;

use crate::launch::process::roles::{SHIM_ROLE, parse_pid, tie_to};

/// What the controller sends through the shim's standard input when the watchdog knows the child.
pub(in crate::launch) const GATE_OPEN: u8 = b'g';
/// Exit status of a shim that could not become its program (the shell's number for "found, cannot execute").
const EXEC_FAILED: i32 = 126;
/// Exit status of a shim whose controller died or gave up first.
const ABANDONED: i32 = 125;

/// The arguments that start the shim: `become_program` reads them back.
pub(in crate::launch) fn shim_arguments<'a>(controller: u32, program: &'a Path) -> [OsString; 3] {
    let program: &'a OsStr = program.as_os_str();
    [SHIM_ROLE.into(), controller.to_string().into(), program.to_owned()]
}

/// The shim process itself.
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
        // The controller died, or dropped the child, before it was registered.
        _ => std::process::exit(ABANDONED),
    }
    let error = Command::new(&program).args(arguments).exec();
    fail(EXEC_FAILED, &format!("gym launch: execute {}: {error}", program.to_string_lossy()))
}

fn fail(status: i32, message: &str) -> ! {
    eprintln!("{message}");
    std::process::exit(status)
}
