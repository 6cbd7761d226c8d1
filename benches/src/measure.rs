//! Reads the resource usage of processes from the kernel.

use std::fs;
use std::time::Duration;

/// Ticks per second in `/proc/PID/stat`, fixed in Linux's ABI.
const TICKS_PER_SECOND: u64 = 100;

/// Returns the user and system CPU time of a process, including its ended threads, or zero if the process has exited.
///
/// The kernel scales the two so that their sum is exact, in steps of 10 ms. The clocks of the live threads are finer, so the result
/// is the larger of the two.
#[must_use]
pub fn cpu(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<u64> = after_name(&stat).split_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
    let ticks = fields.get(11).unwrap_or(&0) + fields.get(12).unwrap_or(&0);
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let nanos: u64 = threads
        .filter_map(|thread| {
            let schedstat = fs::read_to_string(thread.path().join("schedstat")).ok()?;
            schedstat.split_whitespace().next()?.parse::<u64>().ok()
        })
        .sum();
    Duration::from_nanos(nanos).max(Duration::from_millis(ticks * 1_000 / TICKS_PER_SECOND))
}

/// Returns the CPU time of several processes.
#[must_use]
pub fn cpu_of(pids: &[u32]) -> Duration {
    pids.iter().map(|pid| cpu(*pid)).sum()
}

/// Returns the resident memory of a process in bytes, or 0 if it has exited.
#[must_use]
pub fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Returns a process and all its descendants.
#[must_use]
pub fn tree(root: u32) -> Vec<u32> {
    let parents: Vec<(u32, u32)> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
            let parent = after_name(&stat).split_whitespace().nth(1)?.parse().ok()?;
            Some((pid, parent))
        })
        .collect();
    let mut found = vec![root];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        found.extend(parents.iter().filter(|(pid, of)| *of == parent && *pid != parent).map(|(pid, _)| *pid));
        next += 1;
    }
    found
}

/// Returns the part after the process name, which can contain any characters, including brackets and spaces.
fn after_name(stat: &str) -> &str {
    stat.rsplit_once(')').map_or("", |(_, rest)| rest)
}

/// Returns the load average of the machine over the last minute.
#[must_use]
pub fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

/// Returns the median.
#[must_use]
pub fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => sorted[odd / 2],
        even => f64::midpoint(sorted[even / 2 - 1], sorted[even / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_cost_something_and_is_in_its_own_tree() {
        let mut sum = 0_u64;
        for number in 0..20_000_000_u64 {
            sum = std::hint::black_box(sum.wrapping_add(number));
        }
        let me = std::process::id();
        assert!(cpu(me) > Duration::ZERO && resident(me) > 0);
        assert_eq!(tree(me)[0], me);
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0])), (2.0, 2.5));
        assert!(median(&[]).is_nan());
    }
}
