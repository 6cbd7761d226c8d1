//! The container that the process is in, and the memory that its processes share.

use crate::machine::Space;
use crate::probe::files::Files;
use crate::probe::finding::{Finding, Status, Topic, finding};
use crate::tuning::host::Host;
use crate::tuning::rules::limits;

/// Checks `/dev/shm`, and whether processes may read each other's memory (transport `cma`, which saves one copy of bulk
/// data). A UCX endpoint over shared memory takes a few MiB, so in less than the minimum some tens of them do not fit.
pub(crate) fn shared_memory(files: &Files<'_>, host: &Host<'_>) -> Finding {
    let topic = Topic::SharedMemory;
    if let Some(fault) = limits::shared(host) {
        return Finding::of_rule(topic, fault);
    }
    if !files.exists("/dev/shm") {
        return finding(topic, Status::Missing, "no /dev/shm: processes cannot share memory".to_owned())
            .fix("mount a tmpfs at /dev/shm; in a container: --shm-size=8g, or --ipc=host");
    }
    // A size that is not known is no fault.
    let size = host.machine.space("/dev/shm").ok().map(|Space { total, .. }| total);
    let is_used = host.gpus > 0 || host.has_nccl || host.has_ucx || !host.cards.is_empty();
    if let Some(bytes) = size.filter(|_| is_used).filter(|bytes| *bytes < limits::SHM_BYTES_MIN) {
        let found = format!("/dev/shm holds only {}", limits::size(bytes));
        return finding(topic, Status::Warning, found).fix(limits::more(host));
    }
    let bulk = match files.text("/proc/sys/kernel/yama/ptrace_scope").as_deref() {
        None | Some("0") => "",
        Some(_) => "; ptrace_scope prevents processes from reading each other's memory, so bulk data is copied twice",
    };
    finding(topic, Status::Ok, format!("memory may be shared through /dev/shm{bulk}"))
}

/// Returns the kind of container, as far as files show it.
pub(crate) fn kind(files: &Files<'_>) -> Option<String> {
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
