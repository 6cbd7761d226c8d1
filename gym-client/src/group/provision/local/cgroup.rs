//! A memory limit that the kernel enforces, where the system allows it.
//!
//! Control groups of version 2 enforce a limit exactly and immediately. A process can create them only in a subtree that was
//! delegated to it. A control group that contains processes cannot pass its controllers on. So the workers' control groups are
//! created *next to* that of this process, if the parent has the memory controller enabled and is writable. `Delegate=` with
//! `DelegateSubgroup=` of systemd grants this, and so does a container whose root group is writable. Otherwise resident memory is
//! sampled instead, and a worker can exceed its limit for up to one sampling period.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The mount point of version 2.
const MOUNT: &str = "/sys/fs/cgroup";

/// The control group of one worker; removed on drop, which succeeds once its processes have exited.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Returns the control group in which this process can create groups with a memory limit, if there is one.
    pub(crate) fn delegated() -> Option<PathBuf> {
        delegated_below(Path::new(MOUNT), &fs::read_to_string("/proc/self/cgroup").ok()?)
    }

    /// Creates a group that may use `limit_bytes` of memory and no swap.
    pub(crate) fn create(parent: &Path, name: &str, limit_bytes: u64) -> io::Result<Self> {
        let path = parent.join(name);
        fs::create_dir(&path)?;
        let group = Self { path };
        fs::write(group.path.join("memory.max"), limit_bytes.to_string())?;
        // Absent on kernels without swap accounting, which then have no swap limit to set.
        let _ = fs::write(group.path.join("memory.swap.max"), "0");
        // The kernel kills the worker and its child processes together, never a single one of them.
        let _ = fs::write(group.path.join("memory.oom.group"), "1");
        Ok(group)
    }

    /// Returns the file to which a process is written to join the group.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns `true` if the kernel killed a process of this group because of its limit.
    pub(crate) fn killed_for_memory(&self) -> bool {
        fs::read_to_string(self.path.join("memory.events")).is_ok_and(|events| kills(&events) > 0)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Fails if a process is stuck in the kernel; an empty group that remains holds no memory.
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

    /// Creates a directory with the files of the mount that this module reads. The kernel's own behavior is not tested.
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
