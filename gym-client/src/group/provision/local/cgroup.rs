//! A memory limit that the kernel enforces, where it lets us.
//!
//! Control groups of version 2 hold a worker to its limit exactly and at once, but a process may only make them where
//! somebody delegated a subtree to it, and a group with processes in it cannot pass its controllers on. So workers' groups are
//! made *beside* our own, when the group above has the memory controller on and is ours to write: that is what systemd's
//! `Delegate=` with `DelegateSubgroup=` gives, and a container whose root group is writable. Elsewhere resident memory is
//! sampled instead, which a worker can outrun for as long as one period.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where version 2 is mounted.
const MOUNT: &str = "/sys/fs/cgroup";

/// The control group of one worker; removed on drop, which succeeds once its processes are gone.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// The group under which this process may make groups with a memory limit, if there is one.
    pub(crate) fn delegated() -> Option<PathBuf> {
        delegated_below(Path::new(MOUNT), &fs::read_to_string("/proc/self/cgroup").ok()?)
    }

    /// Makes a group that may use `limit_bytes` of memory and no swap.
    pub(crate) fn create(parent: &Path, name: &str, limit_bytes: u64) -> io::Result<Self> {
        let path = parent.join(name);
        fs::create_dir(&path)?;
        let group = Self { path };
        fs::write(group.path.join("memory.max"), limit_bytes.to_string())?;
        // Absent on kernels without swap accounting; then there is nothing to forbid.
        let _ = fs::write(group.path.join("memory.swap.max"), "0");
        // The worker and what it started end together, never one process of them.
        let _ = fs::write(group.path.join("memory.oom.group"), "1");
        Ok(group)
    }

    /// What a process is written into to join.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the kernel killed in this group because of its limit.
    pub(crate) fn killed_for_memory(&self) -> bool {
        fs::read_to_string(self.path.join("memory.events")).is_ok_and(|events| kills(&events) > 0)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that is stuck in the kernel keeps it; an empty group left behind holds nothing.
        let _ = fs::remove_dir(&self.path);
    }
}

fn delegated_below(mount: &Path, own: &str) -> Option<PathBuf> {
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let mut parent = mount.join(own);
    if !own.is_empty() {
        parent.pop();
    }
    let passes_on = fs::read_to_string(parent.join("cgroup.subtree_control")).ok()?;
    let may_write = |file: &str| rustix::fs::access(parent.join(file), rustix::fs::Access::WRITE_OK).is_ok();
    (passes_on.split_whitespace().any(|name| name == "memory") && may_write("") && may_write("cgroup.procs"))
        .then_some(parent)
}

fn kills(events: &str) -> u64 {
    events.lines().filter_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that looks like the mount as far as it is read here; whether the kernel does its part is the kernel's.
    fn mount(own: &str, controllers: &str) -> tempfile::TempDir {
        let mount = tempfile::tempdir().expect("a folder");
        fs::create_dir_all(mount.path().join(own)).expect("groups");
        let above = mount.path().join(own).parent().expect("a parent").to_owned();
        fs::write(above.join("cgroup.subtree_control"), controllers).expect("writes");
        fs::write(above.join("cgroup.procs"), "").expect("writes");
        mount
    }

    #[test]
    fn groups_are_made_beside_our_own_where_the_memory_controller_is_on() {
        let own = "12:cpu:/elsewhere\n0::/user.slice/run.scope/controller\n";
        let on = mount("user.slice/run.scope/controller", "cpu memory pids\n");
        assert_eq!(delegated_below(on.path(), own), Some(on.path().join("user.slice/run.scope")));
        let off = mount("user.slice/run.scope/controller", "cpu pids\n");
        assert_eq!(delegated_below(off.path(), own), None);
        assert_eq!(delegated_below(on.path(), "4:memory:/version/one\n"), None);
    }

    #[test]
    fn a_group_carries_its_limit() {
        let parent = tempfile::tempdir().expect("a folder");
        let group = Cgroup::create(parent.path(), "policy-0-1", 8_000_000).expect("made");
        assert_eq!(fs::read_to_string(group.path().join("memory.max")).expect("written"), "8000000");
        assert!(!group.killed_for_memory());
        fs::write(group.path().join("memory.events"), "low 0\nmax 12\noom 1\noom_kill 1\n").expect("writes");
        assert!(group.killed_for_memory());
        assert!(Cgroup::create(parent.path(), "policy-0-1", 8).is_err(), "the name is taken");
    }
}
