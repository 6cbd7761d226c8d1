//! Roles in which this program is executed again, selected by the first argument, and the link of such a process to its
//! controller.

use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal};

/// First argument that makes a process the shim of one child.
pub(in crate::launch) const SHIM_ROLE: &str = "--gym-launch-shim";
/// First argument that makes a process the watchdog.
pub(in crate::launch) const WATCHDOG_ROLE: &str = "--gym-launch-watchdog";
/// First argument that makes a process load UCX and report the result.
#[cfg(feature = "rdma")]
pub(in crate::launch) const REPORT_ROLE: &str = "--gym-ucx-report";
static ENTERED: AtomicBool = AtomicBool::new(false);

/// Records that this executable can be executed again in one of these roles.
pub(in crate::launch) fn set_entered() {
    ENTERED.store(true, Ordering::Release);
}

/// Returns `true` if [`enter`](crate::launch::enter) ran in this process, so executing the program again does not run
/// the user's `main` twice.
pub(in crate::launch) fn entered() -> bool {
    ENTERED.load(Ordering::Acquire)
}

/// Moves this process into its own session and requests `signal` for the death of `controller`.
pub(in crate::launch) fn tie_to(controller: Pid, signal: Signal) -> Result<(), String> {
    // Fails only for a group leader. A freshly forked process is not one; a group leader already has its own group.
    let _ = rustix::process::setsid();
    rustix::process::set_parent_process_death_signal(Some(signal))
        .map_err(|error| format!("cannot request a signal for the death of the controller: {error}"))?;
    // If the controller died before the line above, no signal follows, and this process has another parent.
    if rustix::process::getppid() == Some(controller) {
        Ok(())
    } else {
        Err(format!("controller {} has ended", controller.as_raw_nonzero()))
    }
}

pub(in crate::launch) fn parse_pid(text: &OsStr) -> Option<Pid> {
    text.to_str()?.parse().ok().and_then(Pid::from_raw)
}
