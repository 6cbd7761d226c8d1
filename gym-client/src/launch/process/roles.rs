//! What a process of this program was started as: first arguments, and the ties to the controller that all these processes have.

use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal};

/// First argument that makes a process the shim of one child.
pub(in crate::launch) const SHIM_ROLE: &str = "--gym-launch-shim";
/// First argument that makes a process the watchdog.
pub(in crate::launch) const WATCHDOG_ROLE: &str = "--gym-launch-watchdog";
static ENTERED: AtomicBool = AtomicBool::new(false);

/// Says that this executable is fit to be run again as one of these.
pub(in crate::launch) fn set_entered() {
    ENTERED.store(true, Ordering::Release);
}

/// Whether [`enter`](crate::launch::enter) ran in this process, so running the executable again will not run the user's `main` twice.
pub(in crate::launch) fn entered() -> bool {
    ENTERED.load(Ordering::Acquire)
}

/// Makes this process a session of its own that gets `signal` when `controller` dies.
pub(in crate::launch) fn tie_to(controller: Pid, signal: Signal) -> Result<(), String> {
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

pub(in crate::launch) fn parse_pid(text: &OsStr) -> Option<Pid> {
    text.to_str()?.parse().ok().and_then(Pid::from_raw)
}
