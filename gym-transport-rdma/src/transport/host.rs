//! Determines whether two processes can share memory: they need the same kernel boot, `/dev/shm` and PID namespace.

use std::fs;
use std::os::linux::fs::MetadataExt;

/// Returns a string that two processes have in common if they can share memory. Empty if `/proc` or `/dev/shm` cannot
/// be read.
///
/// The strings of two containers on one machine differ unless they share `/dev/shm` and the PID namespace. UCX needs
/// both: for its segments and to read a peer's memory.
pub(crate) fn identity() -> String {
    let parts = (|| {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let memory = fs::metadata("/dev/shm").ok()?.st_dev();
        let numbers = fs::read_link("/proc/self/ns/pid").ok()?;
        Some(format!("{} shm:{memory} {}", boot.trim(), numbers.display()))
    })();
    parts.unwrap_or_default()
}

/// Returns the reason why processes with these identities cannot share memory, or `None` if they can.
pub(crate) fn why_not_shared(ours: &str, theirs: &str) -> Option<String> {
    if ours.is_empty() || theirs.is_empty() {
        return Some("one process cannot read its host identity (boot id, /dev/shm or PID namespace)".to_owned());
    }
    (ours != theirs).then(|| format!("another host, or another container: `{theirs}` is not `{ours}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_apart_unless_they_say_the_same_and_say_something() {
        assert!(why_not_shared("", "").is_some());
        assert!(why_not_shared("a shm:1 pid:[1]", "a shm:2 pid:[1]").unwrap().contains("container"));
        let ours = identity();
        assert!(ours.contains("shm:") && why_not_shared(&ours, &identity()).is_none());
    }
}
