//! A memory limit that the kernel enforces, where the system allows it.
//!
//! Control groups of version 2 enforce a limit exactly and immediately. A process can create them only in a subtree that was
//! delegated to it. A control group that contains processes cannot pass its controllers on. So the workers' control groups are
//! created *next to* that of this process, if the parent has the memory controller enabled and is writable. `Delegate=` with
//! `DelegateSubgroup=` of systemd grants this, and so does a container whose root group is writable. Otherwise the memory is
//! sampled instead, and a worker can exceed its limit for up to one sampling period. What differs: the kernel also counts files that the worker left in `/dev/shm`,
//! and charges a page that others share to the group that touched it first.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gym_core::base::cgroup::{MemoryGroup, Version};

/// The control group of one worker; removed on drop, which succeeds once its processes have exited.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Returns the control group in which this process can create groups with a memory limit, if there is one.
    pub(crate) fn delegated() -> Option<PathBuf> {
        delegated(&MemoryGroup::of("self")?)
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
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Fails if a process is stuck in the kernel; an empty group that remains holds no memory.
        let _ = fs::remove_dir(&self.path);
    }
}

fn delegated(own: &MemoryGroup) -> Option<PathBuf> {
    if own.version != Version::Two {
        return None;
    }
    let mut parent = own.path.clone();
    if parent != own.mount {
        parent.pop();
    }
    let passes_on = fs::read_to_string(parent.join("cgroup.subtree_control")).ok()?;
    let may_write = |file: &str| rustix::fs::access(parent.join(file), rustix::fs::Access::WRITE_OK).is_ok();
    (passes_on.split_whitespace().any(|name| name == "memory") && may_write("") && may_write("cgroup.procs"))
        .then_some(parent)
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
        let delegated_in = |mount: &tempfile::TempDir, version, own: &str| {
            let mount = mount.path().to_owned();
            let path = mount.join(own);
            delegated(&MemoryGroup { version, mount, path })
        };
        let own = "user.slice/run.scope/controller";
        let on = mount(own, "cpu memory pids\n");
        assert_eq!(delegated_in(&on, Version::Two, own), Some(on.path().join("user.slice/run.scope")));
        assert_eq!(delegated_in(&on, Version::One, own), None);
        let off = mount(own, "cpu pids\n");
        assert_eq!(delegated_in(&off, Version::Two, own), None);
    }

    #[test]
    fn a_group_carries_its_limit() {
        let parent = tempfile::tempdir().expect("a folder");
        let group = Cgroup::create(parent.path(), "policy-0-1", 8_000_000).expect("made");
        assert_eq!(fs::read_to_string(group.path().join("memory.max")).expect("written"), "8000000");
        assert!(Cgroup::create(parent.path(), "policy-0-1", 8).is_err(), "the name is taken");
    }
}
