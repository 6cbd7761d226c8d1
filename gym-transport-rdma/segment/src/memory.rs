//! How much memory there is. The kernel gives a file in memory more than that, and then ends processes.

use std::fs::read_to_string;
use std::path::Path;

/// Returns the bytes that this process can still get, as far as the kernel tells; `None` if it does not.
///
/// Of a control group, only its limit counts: what it uses contains files that the kernel can drop.
pub(crate) fn available() -> Option<u64> {
    let machine = read_to_string("/proc/meminfo").ok().and_then(|text| available_of(&text));
    let group = read_to_string("/proc/self/cgroup").ok().and_then(|text| limit_of(&text, Path::new("/sys/fs/cgroup")));
    machine.into_iter().chain(group).min()
}

fn available_of(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1_024)
}

/// Returns the least limit of the group and of those above it.
fn limit_of(groups: &str, root: &Path) -> Option<u64> {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let path = root.join(group);
    let limits = path.ancestors().take_while(|path| path.starts_with(root));
    limits.filter_map(|path| read_to_string(path.join("memory.max")).ok()?.trim().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        assert_eq!(available_of("MemTotal:  9 kB\nMemAvailable:   24 kB\n"), Some(24 << 10));
        assert_eq!(available_of("MemTotal:  9 kB\n"), None);
        assert!(available().is_some_and(|bytes| bytes > 1 << 20));
    }
}
