//! The launcher against real processes.
//!
//! No test harness: the launcher runs this executable again as shim and watchdog, so `launch::enter()` has to be the
//! first line of `main`. It also runs itself as a controller that is killed.

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    gym_client::launch::enter();
    linux::main();
}

#[cfg(target_os = "linux")]
#[path = "launch/cases.rs"]
mod linux;
