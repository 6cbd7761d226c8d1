//! Limits of the process, shared memory, and device nodes.

use super::{Chosen, list};
use crate::tuning::finding::Finding;
use crate::tuning::host::Host;

const CAP_IPC_LOCK: u32 = 14;
/// NCCL and UCX pin buffers of this size and more.
const LOCKED_BYTES_MIN: u64 = 1 << 30;
/// Docker's default is 64 MiB. Each pair of GPUs takes some MiB.
const SHM_BYTES_MIN: u64 = 256 << 20;
/// From this number of ranks on, the connections of one process need more than 1,024 descriptors.
const RANKS_OF_MANY_FILES: u64 = 32;
const FILES_MIN: u64 = 4_096;

pub(super) fn check(host: &Host<'_>, chosen: &Chosen<'_>, findings: &mut Vec<Finding>) {
    let limits = host.text("/proc/self/limits").unwrap_or_default();
    if !chosen.ports.is_empty() && host.may_use_rdma() {
        findings.extend(locked(host, &limits));
        findings.extend(nodes(host, chosen));
    }
    findings.extend(files(host, &limits));
    findings.extend(stack(host, &limits));
    findings.extend(shared(host));
}

/// Returns the soft limit of a kind; `None` if it is unlimited or unknown.
fn soft(limits: &str, title: &str) -> Option<u64> {
    let rest = limits.lines().find_map(|line| line.strip_prefix(title))?;
    rest.split_whitespace().next()?.parse().ok()
}

fn locked(host: &Host<'_>, limits: &str) -> Option<Finding> {
    let bytes = soft(limits, "Max locked memory").filter(|bytes| *bytes < LOCKED_BYTES_MIN)?;
    let status = host.text("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let capable = mask.is_some_and(|mask| mask >> CAP_IPC_LOCK & 1 == 1);
    let map = host.text("/proc/self/uid_map").unwrap_or_default();
    let fields: Vec<&str> = map.split_whitespace().collect();
    let in_namespace = !fields.is_empty() && fields != ["0", "0", "4294967295"];
    if capable && !in_namespace {
        return None;
    }
    let size =
        if bytes.is_multiple_of(1 << 20) { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) };
    let mut found = format!("only {bytes} bytes ({size}) of memory may be pinned for RDMA");
    if capable {
        found += ", and the capability CAP_IPC_LOCK of a user namespace (rootless container) does not count: the kernel asks the initial one";
    }
    let unlimited = host.text("/etc/security/limits.conf").is_some_and(|text| {
        text.lines()
            .filter(|line| !line.trim_start().starts_with('#'))
            .any(|line| line.contains("memlock") && (line.contains("unlimited") || line.contains("-1")))
    });
    let in_slurm = host.settings.variable("SLURM_JOB_ID").is_some();
    let fix = if unlimited || in_slurm {
        "limits.conf does not reach services: set LimitMEMLOCK=infinity in the systemd unit (of slurmd, and PropagateResourceLimits in slurm.conf), and check with ulimit -l"
    } else {
        "ulimit -l unlimited (limits.conf: memlock); for a container --ulimit memlock=-1, set where the container is started"
    };
    Some(Finding::error("memlock", found, fix).because("/proc/self/limits"))
}

fn files(host: &Host<'_>, limits: &str) -> Option<Finding> {
    let most = soft(limits, "Max open files").filter(|most| *most < FILES_MIN)?;
    let ranks: u64 = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"]
        .iter()
        .find_map(|name| host.settings.variable(name)?.parse().ok())?;
    (ranks >= RANKS_OF_MANY_FILES).then(|| {
        let found =
            format!("a process may open {most} files, and {ranks} ranks need more descriptors for their connections");
        Finding::warning("nofile", found, "ulimit -n 65536 (limits.conf: nofile; systemd: LimitNOFILE)")
            .because("/proc/self/limits")
    })
}

fn stack(host: &Host<'_>, limits: &str) -> Option<Finding> {
    let unlimited =
        limits.lines().find_map(|line| line.strip_prefix("Max stack size"))?.split_whitespace().next()? == "unlimited";
    (unlimited && host.nccl.is_some()).then(|| {
        let found = "the stack is unlimited, which gives threads only 2 MiB (glibc): smaller than the usual 8 MiB, and too small for NCCL's";
        Finding::warning("stack", found, "ulimit -s 8192").because("/proc/self/limits")
    })
}

fn shared(host: &Host<'_>) -> Option<Finding> {
    const ABOUT: &str = "/dev/shm";
    if host.gpus == 0 || host.settings.number("NCCL_SHM_DISABLE").is_some_and(|off| off != 0) {
        return None;
    }
    const MORE: &str = "for a container --shm-size=8g (compose: shm_size: 8gb) or --ipc=host; otherwise mount -o remount,size=8g /dev/shm";
    if host.lacks(ABOUT) {
        let found = "there is no /dev/shm: GPUs of this node cannot share memory";
        return Some(
            Finding::error(ABOUT, found, "mount a tmpfs at /dev/shm; for a container --shm-size=8g or --ipc=host")
                .because(ABOUT),
        );
    }
    let space = host.machine.space(ABOUT).ok()?;
    if space.total < SHM_BYTES_MIN {
        return Some(
            Finding::error(
                ABOUT,
                format!("/dev/shm holds {} MiB; each pair of GPUs takes some", space.total >> 20),
                MORE,
            )
            .because("/proc/self/mounts"),
        );
    }
    if space.free < SHM_BYTES_MIN.min(space.total / 4) {
        let names = host.machine.names(ABOUT).unwrap_or_default();
        let left: Vec<&String> =
            names.iter().filter(|name| name.starts_with("nccl-") || name.starts_with("cuda.shm")).collect();
        let found = match left.first() {
            Some(first) => format!(
                "/dev/shm is nearly full: {} MiB are free, and {} segments such as {first} are left over",
                space.free >> 20,
                left.len()
            ),
            None => format!("/dev/shm is nearly full: {} MiB are free", space.free >> 20),
        };
        return Some(
            Finding::warning(ABOUT, found, "when no job runs, remove them: rm /dev/shm/nccl-*").because(ABOUT),
        );
    }
    None
}

/// Each card needs its own node.
fn nodes(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    const VERBS: &str = "/sys/class/infiniband_verbs";
    let mut missing: Vec<(String, String)> = Vec::new();
    let mut closed: Vec<String> = Vec::new();
    for name in host.machine.names(VERBS).ok()?.iter().filter(|name| name.starts_with("uverbs")) {
        let Some(card) = host.text(&format!("{VERBS}/{name}/ibdev")) else { continue };
        if !chosen.ports.iter().any(|port| port.card == card) {
            continue;
        }
        let node = format!("/dev/infiniband/{name}");
        match host.machine.open_node(&node) {
            Err(unknown) if unknown.is_absent() => missing.push((name.clone(), card)),
            Err(crate::probe::machine::Unknown::Errno(_)) => closed.push(node),
            _ => {}
        }
    }
    if !missing.is_empty() {
        let words: Vec<String> = missing.iter().map(|(node, card)| format!("{node} of {card}")).collect();
        let fix = "pass all nodes to the container: docker run --device=/dev/infiniband, compose: devices: [/dev/infiniband]; or name the cards that have one in NCCL_IB_HCA; on the host: modprobe ib_uverbs";
        return Some(
            Finding::error(
                "/dev/infiniband",
                format!("no node for {} in /dev/infiniband, so the card cannot be opened", list(&words)),
                fix,
            )
            .because(VERBS),
        );
    }
    (!closed.is_empty()).then(|| {
        let fix = "add the user to the group of the nodes (often rdma), or open them by a udev rule";
        Finding::error("/dev/infiniband", format!("{} (uverbs) cannot be opened by this user", list(&closed)), fix)
            .because(VERBS)
    })
}
