//! Worker groups over real processes.
//!
//! No test harness: this executable is its own shim, watchdog and workers, so `Workers::enter()` has to be the first line of
//! `main`. It also runs itself as a controller that is killed.

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    linux::main();
}

#[cfg(target_os = "linux")]
#[path = "workers/mod.rs"]
mod linux;
