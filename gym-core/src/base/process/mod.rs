//! Facts about this machine and its processes, from `/proc` and the clocks of the kernel. The memory and CPU time of control groups is in [`cgroup`](crate::base::cgroup).

use std::fs;
use std::time::Duration;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::time::{ClockId, Timespec, clock_gettime};

mod stat;
mod system;
mod table;

pub use stat::{ProcessStat, exists, start_ticks, unusual_state};
pub use system::{SystemMemory, listener, since_boot, system_cpu};
pub use table::{FamilyUsage, MARK_VARIABLE, MemoryUsage, ProcessTable, add_descendants, family_usage};

const PROC: &str = "/proc";
/// The program of this process: also after its file was replaced or removed.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// Returns the user and system time of this process.
#[must_use]
pub fn process_cpu() -> Duration {
    duration(clock_gettime(ClockId::ProcessCPUTime))
}

/// Returns the resident memory of this process, or 0 if `/proc` does not report it.
#[must_use]
pub fn resident_bytes() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|statm| statm.split_whitespace().nth(1)?.parse::<u64>().ok())
        .unwrap_or(0);
    pages * page_size() as u64
}

/// Returns the kernel's record of a process's resident memory (`VmHWM`), in bytes.
#[must_use]
pub fn peak_resident_bytes(pid: i32) -> Option<u64> {
    kilobytes(&fs::read_to_string(format!("{PROC}/{pid}/status")).ok()?, "VmHWM:")
}

/// Returns `true` if this process ignores the signal with this number, as a program does that a shell has started with `&`.
#[must_use]
pub fn ignores_signal(signal: i32) -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|status| is_ignored(&status, signal))
}

fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    // proc_pid_status(5): bit 0 is signal 1.
    u32::try_from(signal - 1).ok().and_then(|bit| mask.checked_shr(bit)).is_some_and(|mask| mask & 1 == 1)
}

/// Returns the size in a line such as `Pss:   12 kB`, in bytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the time of clock ticks, the unit of `/proc`.
fn ticks(ticks: u64) -> Duration {
    Duration::from_millis(ticks.saturating_mul(1_000) / clock_ticks_per_second().max(1))
}

fn duration(time: Timespec) -> Duration {
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_their_bits() {
        // SIGINT is 2, SIGTERM 15.
        let status = "SigBlk:\t0000000000004002\nSigIgn:\t0000000000004000\nSigCgt:\t0000000000000002\n";
        assert_eq!(
            [2, 15, 0, -1, 64, 99].map(|signal| is_ignored(status, signal)),
            [false, true, false, false, false, false]
        );
        assert!(!is_ignored("", 15));
    }
}
