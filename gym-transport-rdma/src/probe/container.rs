//! Checks shared memory, and network interfaces that a container hides.

use crate::probe::files::Files;
use crate::probe::finding::{Finding, Status, Topic, finding};
use crate::probe::machine::mount_bytes;
use crate::probe::ports::Port;

/// Minimum size of `/dev/shm`. Docker's default is 64 MiB. A UCX endpoint over shared memory takes a few MiB, so with
/// less than this some tens of endpoints do not fit.
const SHM_BYTES_MIN: u64 = 256 << 20;

/// Checks `/dev/shm`, and whether processes may read each other's memory (transport `cma`, which saves one copy of bulk
/// data).
pub(crate) fn shared_memory(files: &Files<'_>) -> Finding {
    let topic = Topic::SharedMemory;
    if !files.exists("/dev/shm") {
        return finding(topic, Status::Missing, "no /dev/shm: processes cannot share memory".to_owned())
            .fix("mount a tmpfs at /dev/shm; in a container: --shm-size=8g, or --ipc=host");
    }
    let size = shm_bytes(&files.text("/proc/self/mounts").unwrap_or_default());
    if let Some(bytes) = size.filter(|bytes| *bytes < SHM_BYTES_MIN) {
        let found = format!("/dev/shm holds only {} MiB", bytes >> 20);
        return finding(topic, Status::Warning, found).fix(
            "mount -o remount,size=8g /dev/shm; in a container: --shm-size=8g (compose: shm_size: 8gb), or --ipc=host",
        );
    }
    let bulk = match files.text("/proc/sys/kernel/yama/ptrace_scope").as_deref() {
        None | Some("0") => "",
        Some(_) => "; ptrace_scope prevents processes from reading each other's memory, so bulk data is copied twice",
    };
    finding(topic, Status::Ok, format!("memory may be shared through /dev/shm{bulk}"))
}

/// Checks whether this is a container, and whether it sees the network interfaces of the RDMA ports.
pub(crate) fn container(files: &Files<'_>, ports: &[Port]) -> Finding {
    let topic = Topic::Container;
    let kind = container_kind(files);
    let hidden: Vec<String> = ports
        .iter()
        .filter(|port| port.active)
        .filter_map(|port| port.gid.as_ref().map(|gid| (port, &gid.interface)))
        .filter(|(_, interface)| !interface.is_empty() && !files.exists(&format!("/sys/class/net/{interface}")))
        .map(|(port, interface)| format!("{interface} of {}", port.name()))
        .collect();
    let place = kind.map_or_else(|| "no container".to_owned(), |kind| format!("in a container ({kind})"));
    if hidden.is_empty() {
        return finding(topic, Status::Ok, place);
    }
    let found = format!("{place}: the network interface {} is not visible here", hidden.join(" and "));
    finding(topic, Status::Warning, found)
        .fix("give the container the host's network (docker: --network=host, compose: network_mode: host)")
}

/// Returns the kind of container, as far as files show it.
fn container_kind(files: &Files<'_>) -> Option<String> {
    if files.exists("/.dockerenv") {
        return Some("docker".to_owned());
    }
    if files.exists("/run/.containerenv") {
        return Some("podman".to_owned());
    }
    if let Some(kind) = files.text("/run/systemd/container").filter(|kind| !kind.is_empty()) {
        return Some(kind);
    }
    let cgroup = files.text("/proc/1/cgroup").unwrap_or_default();
    ["kubepods", "docker", "containerd", "lxc"].into_iter().find(|kind| cgroup.contains(kind)).map(str::to_owned)
}

/// Returns the `size=` of the mount at `/dev/shm`; `None` without one, which means half of the memory.
fn shm_bytes(mounts: &str) -> Option<u64> {
    let line = mounts.lines().find(|line| line.split_whitespace().nth(1) == Some("/dev/shm"))?;
    mount_bytes(line.split_whitespace().nth(3)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_shared_memory_is_that_of_its_mount() {
        let mounts = "proc /proc proc rw 0 0\nshm /dev/shm tmpfs rw,nosuid,size=65536k,inode64 0 0\n";
        assert_eq!(shm_bytes(mounts), Some(64 << 20));
        assert_eq!(shm_bytes("tmpfs /dev/shm tmpfs rw,size=8g 0 0"), Some(8 << 30));
        for none in [
            "",
            "tmpfs /dev/shm tmpfs rw,nosuid 0 0",
            "x /dev/shm tmpfs rw,size=50% 0 0",
            "x /dev/shm",
            "x /dev/shm t size=99999999999g",
        ] {
            assert_eq!(shm_bytes(none), None, "{none}");
        }
    }
}
