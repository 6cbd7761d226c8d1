//! Limits of the process, shared memory, and device nodes.

use super::{Chosen, list};
use crate::tuning::finding::Finding;
use crate::tuning::host::Host;

const CAP_IPC_LOCK: u32 = 14;
/// NCCL and UCX pin buffers of this size and more.
const LOCKED_BYTES_MIN: u64 = 1 << 30;
/// Docker's default is 64 MiB. Each pair of GPUs takes some MiB.
pub(crate) const SHM_BYTES_MIN: u64 = 256 << 20;
/// From this number of ranks on, the connections of one process need more than 1,024 descriptors.
const RANKS_OF_MANY_FILES: u64 = 32;
const FILES_MIN: u64 = 4_096;
/// How to give `/dev/shm` more room.
pub(crate) const MORE: &str =
    "for a container --shm-size=8g (compose: shm_size: 8gb) or --ipc=host; otherwise mount -o remount,size=8g /dev/shm";

/// The same for a pod.
const MORE_OF_POD: &str = "mount an emptyDir with medium: Memory (and a sizeLimit) at /dev/shm in the pod";

/// Returns how to give `/dev/shm` of this machine more room.
pub(crate) fn more(host: &Host<'_>) -> &'static str {
    if is_pod(host) { MORE_OF_POD } else { MORE }
}

/// Returns `true` in a pod of Kubernetes.
fn is_pod(host: &Host<'_>) -> bool {
    ["/proc/1/cgroup", "/proc/self/cgroup"]
        .iter()
        .any(|path| host.text(path).is_some_and(|text| text.contains("kubepods")))
        || host.has("/var/run/secrets/kubernetes.io")
}

pub(super) fn check(host: &Host<'_>, chosen: &Chosen<'_>, findings: &mut Vec<Finding>) {
    let limits = host.text("/proc/self/limits").unwrap_or_default();
    if !chosen.ports.is_empty() && host.may_use_rdma() {
        findings.extend(locked(host));
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

/// How much memory a process may pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pinning {
    /// As much as it likes.
    Unlimited,
    /// As much as it likes, because a capability overrides the limit, in bytes.
    Capable(u64),
    /// So many bytes. A capability of a user namespace does not count: the kernel asks the initial one (`capable` in `umem.c`).
    Bytes { limit: u64, has_capability_of_namespace: bool },
    /// The machine does not tell.
    Unknown,
}

impl Pinning {
    pub(crate) fn of(host: &Host<'_>) -> Self {
        const TITLE: &str = "Max locked memory";
        let limits = host.text("/proc/self/limits").unwrap_or_default();
        let Some(limit) = soft(&limits, TITLE) else {
            let known = limits.lines().any(|line| line.starts_with(TITLE) && line.contains("unlimited"));
            return if known { Self::Unlimited } else { Self::Unknown };
        };
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
            return Self::Capable(limit);
        }
        Self::Bytes { limit, has_capability_of_namespace: capable }
    }
}

/// Says why the memory that a process may pin is too little.
pub(crate) fn locked(host: &Host<'_>) -> Option<Finding> {
    let (bytes, capable) = match Pinning::of(host) {
        Pinning::Bytes { limit, has_capability_of_namespace } if limit < LOCKED_BYTES_MIN => {
            (limit, has_capability_of_namespace)
        }
        _ => return None,
    };
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
    let fix = if is_pod(host) {
        "give the pod the capability IPC_LOCK (securityContext), or set LimitMEMLOCK=infinity in the unit of containerd on the node"
    } else if unlimited || in_slurm {
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

/// Returns a size for a text.
pub(crate) fn size(bytes: u64) -> String {
    if bytes >= 1 << 20 { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}

/// Says what is wrong with the memory that GPUs of one node share.
pub(crate) fn shared(host: &Host<'_>) -> Option<Finding> {
    const ABOUT: &str = "/dev/shm";
    if host.gpus == 0 || host.settings.number("NCCL_SHM_DISABLE").is_some_and(|off| off != 0) {
        return None;
    }
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
                format!("/dev/shm holds {}; each pair of GPUs takes some", size(space.total)),
                more(host),
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

/// The device node of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    Open,
    /// It is not here, under this name.
    Missing(String),
    /// It cannot be opened, at this path.
    Closed(String),
}

const VERBS: &str = "/sys/class/infiniband_verbs";

/// Returns the node of each card, as far as the machine tells which is whose.
pub(crate) fn nodes_of_cards(host: &Host<'_>) -> Vec<(String, Node)> {
    let names = host.machine.names(VERBS).unwrap_or_default();
    let of_card = |name: String| {
        let card = host.text(&format!("{VERBS}/{name}/ibdev"))?;
        let path = format!("/dev/infiniband/{name}");
        let node = match host.machine.open_node(&path) {
            Err(unknown) if unknown.is_absent() => Node::Missing(name),
            Err(crate::machine::Unknown::Errno(_)) => Node::Closed(path),
            _ => Node::Open,
        };
        Some((card, node))
    };
    names.into_iter().filter(|name| name.starts_with("uverbs")).filter_map(of_card).collect()
}

/// Each card needs its own node.
pub(crate) fn nodes(host: &Host<'_>, chosen: &Chosen<'_>) -> Option<Finding> {
    let (mut missing, mut closed): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    for (card, node) in nodes_of_cards(host) {
        if !chosen.ports.iter().any(|port| port.card == card) {
            continue;
        }
        match node {
            Node::Missing(name) => missing.push(format!("{name} of {card}")),
            Node::Closed(path) => closed.push(path),
            Node::Open => {}
        }
    }
    if !missing.is_empty() {
        let fix = "pass all nodes to the container: docker run --device=/dev/infiniband, compose: devices: [/dev/infiniband]; or name the cards that have one in NCCL_IB_HCA; on the host: modprobe ib_uverbs";
        return Some(
            Finding::error(
                "/dev/infiniband",
                format!("no node for {} in /dev/infiniband, so the card cannot be opened", list(&missing)),
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
