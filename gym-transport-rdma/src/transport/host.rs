//! Whether two processes can share memory: they need one boot of one kernel, one `/dev/shm` and one PID namespace.

use std::fs;
use std::os::linux::fs::MetadataExt;

/// Text that two processes have in common if they can share memory; empty if it cannot be told.
///
/// Containers on one machine differ in it unless they share `/dev/shm` and the process numbers, which UCX needs for its
/// segments and for reading from a peer's memory.
pub(crate) fn identity() -> String {
    let parts = (|| {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let memory = fs::metadata("/dev/shm").ok()?.st_dev();
        let numbers = fs::read_link("/proc/self/ns/pid").ok()?;
        Some(format!("{} shm:{memory} {}", boot.trim(), numbers.display()))
    })();
    parts.unwrap_or_default()
}

/// Why two processes of these identities cannot share memory.
pub(crate) fn why_apart(ours: &str, theirs: &str) -> Option<String> {
    if ours.is_empty() || theirs.is_empty() {
        return Some("a process that does not know its machine's boot id".to_owned());
    }
    (ours != theirs).then(|| format!("another host, or another container: `{theirs}` is not `{ours}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_apart_unless_they_say_the_same_and_say_something() {
        assert!(why_apart("", "").is_some());
        assert!(why_apart("a shm:1 pid:[1]", "a shm:2 pid:[1]").unwrap().contains("container"));
        let ours = identity();
        assert!(ours.contains("shm:") && why_apart(&ours, &identity()).is_none());
    }
}
