//! Probe: reports the RDMA and NCCL support of this machine from files, without loading UCX.

mod container;
mod files;
mod finding;
pub mod machine;
mod ports;
mod versions;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::nccl::Nccl;
use crate::probe::files::Files;
use crate::probe::finding::finding;
pub use crate::probe::finding::{Finding, Status, Topic};
use crate::probe::machine::{Folder, Library, Live, Loaded, Machine};
use crate::probe::ports::ports;
pub use crate::probe::ports::{Gid, Port};

/// Bit of `CAP_IPC_LOCK` in a capability mask.
const CAP_IPC_LOCK: u32 = 14;
/// First kernel that exports GPU memory to RDMA devices through dma-buf.
const DMA_BUF_KERNEL: (u32, u32) = (5, 12);

/// Requirements of RDMA; each depends on the ones before it.
const RDMA_TOPICS: [Topic; 7] = [
    Topic::RdmaDevices,
    Topic::DeviceNodes,
    Topic::Container,
    Topic::RoceGid,
    Topic::LockedMemory,
    Topic::Verbs,
    Topic::Ucx,
];

/// Result of a probe. `Display` writes the summary and one line per finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Probe {
    /// The result in one sentence.
    pub summary: String,
    /// Whether device, nodes, pinned memory, verbs, and UCX with its RDMA transport are all available.
    pub rdma_usable: bool,
    /// Whether a GPU, its driver and NCCL are available.
    pub nccl_usable: bool,
    /// All findings; each depends on the ones before it.
    pub findings: Vec<Finding>,
    /// All ports of all RDMA devices.
    pub ports: Vec<Port>,
}

impl Probe {
    /// Returns the finding about `topic`.
    #[must_use]
    pub fn finding(&self, topic: Topic) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.topic == topic)
    }

    /// Returns the first finding that prevents RDMA; `None` if RDMA is usable.
    #[must_use]
    pub fn rdma_fault(&self) -> Option<&Finding> {
        let mut findings = RDMA_TOPICS.iter().filter_map(|topic| self.finding(*topic));
        findings.find(|finding| finding.status != Status::Ok)
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.summary)?;
        for finding in &self.findings {
            write!(f, "\n  {finding}")?;
        }
        Ok(())
    }
}

/// Options of a probe: root directory, library directories, and whether libraries are loaded.
#[derive(Debug, Clone)]
pub struct ProbeOptions {
    root: Option<PathBuf>,
    library_folders: Vec<PathBuf>,
    load: bool,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        Self { root: None, library_folders: Vec::new(), load: true }
    }
}

impl ProbeOptions {
    /// Probes this machine and searches the directories of `LD_LIBRARY_PATH` first.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Examines only files below `root`, such as a container's file system, and loads no library. Links are resolved within it.
    #[must_use]
    pub fn root(mut self, root: impl Into<PathBuf>) -> Self {
        self.root = Some(root.into());
        self.load = false;
        self
    }

    /// Examines only files. No library is loaded, so any process can call it.
    #[must_use]
    pub fn without_loading(mut self) -> Self {
        self.load = false;
        self
    }

    /// Searches `directory` before all directories named so far, for libraries from Python wheels such as
    /// `site-packages/nvidia/nccl/lib`. It is a path of the machine, so it is below the [`root`](Self::root) if there is one.
    #[must_use]
    pub fn library_folder(mut self, directory: impl Into<PathBuf>) -> Self {
        self.library_folders.push(directory.into());
        self
    }

    /// Runs the probe. Never fails or panics: what cannot be read is reported as missing.
    #[must_use]
    pub fn probe(&self) -> Probe {
        let folders = self.library_folders.iter().filter_map(|folder| folder.to_str());
        if let Some(root) = &self.root {
            let machine = folders.fold(Folder::new(root), Folder::library_folder);
            return Probe::of(&machine, &Loaded::default());
        }
        let machine = folders.fold(Live::new(), Live::library_folder);
        let loaded = if self.load { load(&machine) } else { Loaded::default() };
        Probe::of(&machine, &loaded)
    }
}

impl Probe {
    /// Judges a machine. The result depends on its answers only; `loaded` is what its libraries said of themselves.
    #[must_use]
    pub fn of(machine: &dyn Machine, loaded: &Loaded) -> Self {
        let prober = Prober { files: Files::new(machine), loaded };
        let ports = ports(&prober.files);
        let judged = |finding: Finding| finding.unless_not_recorded(&prober.files.take_not_recorded());
        let devices = judged(prober.devices(&ports));
        let has_device = devices.status != Status::Missing;
        let nodes = judged(prober.nodes(has_device));
        let container = judged(container::container(&prober.files, &ports));
        let gid = judged(roce_gid(&ports));
        let locked_memory = judged(prober.locked_memory(has_device));
        let verbs = judged(prober.verbs());
        let ucx = judged(prober.ucx());
        let gpu = judged(prober.gpu());
        let has_gpu = gpu.status != Status::Missing;
        let nccl = judged(prober.nccl());
        let direct = judged(prober.gpu_direct(has_device && has_gpu));
        let shared_memory = judged(container::shared_memory(&prober.files));
        let findings = [devices, nodes, container, gid, locked_memory, verbs, ucx, gpu, nccl, direct, shared_memory];
        judge(findings.into(), ports)
    }
}

/// Loads the libraries of NCCL and CUDA on this machine and asks them for their versions. They stay loaded.
#[must_use]
pub fn load(machine: &Live) -> Loaded {
    let files = Files::new(machine);
    let nccl = files.library("libnccl.so.2").map(|library| {
        let version = Nccl::load(Path::new(&library.path)).and_then(|nccl| nccl.version());
        version.map(|version| version.to_string()).map_err(|error| error.to_string())
    });
    // Without a driver and a GPU, its version means nothing.
    let has_gpu = gpus(&files) > 0 && files.text("/proc/driver/nvidia/version").is_some();
    let cuda = files.library("libcuda.so.1").filter(|_| has_gpu);
    Loaded { nccl, cuda: cuda.map(|library| versions::cuda_driver_version(Path::new(&library.path))) }
}

/// Probes this machine. [`ProbeOptions`] select another root or more library directories.
#[must_use]
pub fn probe() -> Probe {
    ProbeOptions::new().probe()
}

fn judge(findings: Vec<Finding>, ports: Vec<Port>) -> Probe {
    let of = |topic| findings.iter().find(move |finding: &&Finding| finding.topic == topic);
    let first_fault = |topics: &[Topic]| {
        topics.iter().filter_map(|topic| of(*topic)).find(|finding| finding.status != Status::Ok).cloned()
    };
    let rdma_fault = first_fault(&RDMA_TOPICS);
    let nccl_fault = first_fault(&[Topic::Gpu, Topic::Nccl]);
    let found = |topic| of(topic).map(|finding| finding.found.clone()).unwrap_or_default();
    let rdma = match &rdma_fault {
        None => format!("RDMA is usable ({}, by {})", found(Topic::RdmaDevices), found(Topic::Ucx)),
        Some(fault) => format!("RDMA is not usable here: {}", fault.found),
    };
    let nccl = match &nccl_fault {
        None => format!("NCCL is usable ({} with {})", found(Topic::Nccl), found(Topic::Gpu)),
        Some(fault) => format!("NCCL is not usable here: {}", fault.found),
    };
    // UCX also connects processes on one host without an RDMA device, so both sentences name it.
    let ucx = match (of(Topic::Ucx), &rdma_fault) {
        (Some(ucx), Some(fault)) if fault.topic != Topic::Ucx => format!("; {}", ucx.found),
        _ => String::new(),
    };
    Probe {
        summary: format!("{rdma}{ucx}; {nccl}."),
        rdma_usable: rdma_fault.is_none(),
        nccl_usable: nccl_fault.is_none(),
        findings,
        ports,
    }
}

struct Prober<'a> {
    files: Files<'a>,
    loaded: &'a Loaded,
}

impl Prober<'_> {
    fn devices(&self, ports: &[Port]) -> Finding {
        let topic = Topic::RdmaDevices;
        let directory = "/sys/class/infiniband";
        let devices = self.files.names(directory);
        if devices.is_empty() {
            let state = if self.files.exists(directory) { "is empty" } else { "does not exist" };
            return finding(topic, Status::Missing, format!("no RDMA device ({directory} {state})")).fix(
                "install a network card with RDMA and load its driver (mlx5_ib, irdma, efa), or for tests emulate one: \
                 modprobe rdma_rxe && rdma link add rxe0 type rxe netdev INTERFACE; in a container, mount the host's /sys",
            );
        }
        let words = |port: &Port| format!("{} {}, {}, {}", port.name(), port.state, port.link_layer, port.rate);
        let of = |active| ports.iter().filter(move |port| port.active == active).map(words).collect::<Vec<_>>();
        let (active, down) = (of(true), of(false));
        if active.is_empty() {
            let what = if down.is_empty() { format!("{} without ports", devices.join(", ")) } else { down.join("; ") };
            return finding(topic, Status::Warning, format!("no active RDMA port ({what})"))
                .fix("bring the network interface of the port up (ip link set INTERFACE up) and check the cable");
        }
        finding(topic, Status::Ok, active.join("; "))
    }

    fn nodes(&self, has_device: bool) -> Finding {
        let topic = Topic::DeviceNodes;
        let directory = "/dev/infiniband";
        let nodes: Vec<String> = self
            .files
            .names(directory)
            .into_iter()
            .filter(|name| name.starts_with("uverbs") || name == "rdma_cm")
            .map(|name| format!("{directory}/{name}"))
            .collect();
        if !has_device {
            return finding(topic, Status::NotNeeded, "device nodes are needed only with an RDMA device".to_owned());
        }
        let missing: Vec<&str> = ["uverbs", "rdma_cm"]
            .into_iter()
            .filter(|kind| !nodes.iter().any(|node| node.starts_with(&format!("{directory}/{kind}"))))
            .collect();
        if !missing.is_empty() {
            return finding(topic, Status::Missing, format!("no {} in {directory}", missing.join(" and no "))).fix(
                "modprobe ib_uverbs rdma_ucm; in a container, pass the nodes (docker: --device=/dev/infiniband, \
                 compose: devices: [/dev/infiniband])",
            );
        }
        let closed: Vec<&str> = nodes.iter().filter(|node| !self.files.opens(node)).map(String::as_str).collect();
        if !closed.is_empty() {
            return finding(topic, Status::Missing, format!("{} cannot be opened", closed.join(", ")))
                .fix("add the user to the group of the nodes (often rdma), or chmod 666 them by a udev rule");
        }
        finding(topic, Status::Ok, nodes.join(", "))
    }

    /// Checks the limit on pinned memory, and the capability that overrides it.
    fn locked_memory(&self, has_device: bool) -> Finding {
        let topic = Topic::LockedMemory;
        let limits = self.files.text("/proc/self/limits").unwrap_or_default();
        let soft = limits
            .lines()
            .find_map(|line| line.strip_prefix("Max locked memory"))
            .and_then(|rest| rest.split_whitespace().next())
            .unwrap_or("unknown")
            .to_owned();
        let status = self.files.text("/proc/self/status").unwrap_or_default();
        let capable = status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
            .is_some_and(|mask| mask >> CAP_IPC_LOCK & 1 == 1);
        let what = match (soft.as_str(), capable) {
            ("unlimited", _) => "memory may be pinned without limit".to_owned(),
            (_, true) => {
                format!("memory may be pinned without limit (CAP_IPC_LOCK overrides the limit of {soft} bytes)")
            }
            (_, false) => format!("only {soft} bytes of memory may be pinned, and CAP_IPC_LOCK is not held"),
        };
        let enough = soft == "unlimited" || capable;
        if enough {
            finding(topic, Status::Ok, what)
        } else if has_device {
            finding(topic, Status::Warning, what).fix(
                "ulimit -l unlimited (limits.conf: memlock); in a container: --ulimit memlock=-1 --cap-add=IPC_LOCK",
            )
        } else {
            finding(topic, Status::NotNeeded, what)
        }
    }

    fn verbs(&self) -> Finding {
        let topic = Topic::Verbs;
        match self.files.library("libibverbs.so.1") {
            Some(Library { path, version }) => {
                finding(topic, Status::Ok, format!("libibverbs {} ({path})", or_unknown(version)))
            }
            None => finding(
                topic,
                Status::Missing,
                "libibverbs not found (no libibverbs.so.1 in the loader's directories)".to_owned(),
            )
            .fix("apt-get install libibverbs1 ibverbs-providers (dnf: libibverbs)"),
        }
    }

    fn ucx(&self) -> Finding {
        let topic = Topic::Ucx;
        let Some(Library { path, version }) = self.files.library("libucp.so.0") else {
            return finding(
                topic,
                Status::Missing,
                "UCX not found (no libucp.so.0 in the loader's directories)".to_owned(),
            )
            .fix("apt-get install libucx0 (dnf: ucx ucx-ib), or add the directory of a UCX to LD_LIBRARY_PATH");
        };
        let what = format!("UCX {} ({path})", or_unknown(version));
        // Transports are plug-ins in the directory `ucx` next to the library. A build without verbs has none for RDMA.
        if self.has_rdma_transport(&path) {
            finding(topic, Status::Ok, what)
        } else {
            finding(topic, Status::Warning, format!("{what} without RDMA transport (no ucx/libuct_ib* next to it)")).fix(
                "install a build with verbs: Debian's libucx0, dnf's ucx-ib, or the vendor's; the wheel libucx-cu12 has none",
            )
        }
    }

    fn has_rdma_transport(&self, libucp: &str) -> bool {
        let plugins = |path: &str| path.rsplit_once('/').map(|(folder, _)| format!("{folder}/ucx"));
        let has = |folder: String| {
            let names = self.files.names(&folder);
            names.iter().any(|name| name.starts_with("libuct_ib") && name.contains(".so"))
        };
        // The plug-ins may be next to the target of a link.
        plugins(libucp).is_some_and(has) || self.files.real(libucp).as_deref().and_then(plugins).is_some_and(has)
    }

    fn gpu(&self) -> Finding {
        let topic = Topic::Gpu;
        let driver = self.files.text("/proc/driver/nvidia/version").map(|text| driver_version(&text));
        let gpus = gpus(&self.files);
        let cuda = self.files.library("libcuda.so.1");
        let (Some(driver), true) = (&driver, gpus > 0) else {
            let what = match (driver, gpus) {
                (None, 0) => "no NVIDIA GPU (neither /proc/driver/nvidia/version nor /dev/nvidia0)".to_owned(),
                (None, _) => "/dev/nvidia0 without a driver (no /proc/driver/nvidia/version)".to_owned(),
                (Some(driver), _) => format!("NVIDIA driver {driver} without a GPU (no /dev/nvidia0)"),
            };
            return finding(topic, Status::Missing, what).fix(
                "install the NVIDIA driver; in a container use the NVIDIA container toolkit (docker: --gpus all)",
            );
        };
        let what = format!("{gpus} NVIDIA GPU{}, driver {driver}", if gpus == 1 { "" } else { "s" });
        let Some(cuda) = cuda else {
            return finding(topic, Status::Missing, format!("{what}, but no libcuda.so.1 in the loader's directories"))
                .fix(
                    "install the driver's user part (apt: libcuda1), or give the container the capability compute \
                 (NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
                );
        };
        let management = match self.files.library("libnvidia-ml.so.1") {
            Some(_) => "",
            None => ", no libnvidia-ml.so.1 for monitoring",
        };
        match &self.loaded.cuda {
            None => finding(topic, Status::Ok, format!("{what}{management}")),
            Some(Ok(version)) => finding(topic, Status::Ok, format!("{what}, up to CUDA {version}{management}")),
            Some(Err(error)) => finding(topic, Status::Missing, format!("{what}, but {}: {error}", cuda.path))
                .fix("reinstall the driver so that its kernel and user parts have one version"),
        }
    }

    fn nccl(&self) -> Finding {
        let topic = Topic::Nccl;
        let fix = "apt-get install libnccl2 (NVIDIA's repository) or pip install nvidia-nccl-cu12, and add its directory to LD_LIBRARY_PATH";
        let Some(Library { path, version }) = self.files.library("libnccl.so.2") else {
            let what = "NCCL not found (no libnccl.so.2 in the loader's directories)".to_owned();
            return finding(topic, Status::Missing, what).fix(fix);
        };
        match self.loaded.nccl.clone().unwrap_or_else(|| Ok(or_unknown(version))) {
            Ok(version) => finding(topic, Status::Ok, format!("NCCL {version} ({path})")),
            Err(error) => finding(topic, Status::Missing, error).fix(fix),
        }
    }

    fn gpu_direct(&self, needed: bool) -> Finding {
        let topic = Topic::GpuDirect;
        if !needed {
            let what = "GPUDirect RDMA needs an RDMA device and an NVIDIA GPU".to_owned();
            return finding(topic, Status::NotNeeded, what);
        }
        for module in ["nvidia_peermem", "nv_peer_mem"] {
            if self.files.exists(&format!("/sys/module/{module}")) {
                return finding(topic, Status::Ok, format!("GPUDirect RDMA by {module}"));
            }
        }
        let release = self.files.text("/proc/sys/kernel/osrelease").unwrap_or_default();
        let open =
            self.files.text("/proc/driver/nvidia/version").is_some_and(|text| text.contains("Open Kernel Module"));
        if open && kernel(&release).is_some_and(|version| version >= DMA_BUF_KERNEL) {
            return finding(topic, Status::Ok, format!("GPUDirect RDMA by dma-buf (kernel {release}, open driver)"));
        }
        finding(topic, Status::Warning, "no GPUDirect RDMA: transfers go through host memory".to_owned())
            .fix("modprobe nvidia_peermem, or use the open NVIDIA driver on kernel 5.12 or later")
    }
}

/// Checks the GIDs of RoCE ports: a port without an address of version 2 cannot send.
fn roce_gid(ports: &[Port]) -> Finding {
    let topic = Topic::RoceGid;
    let roce: Vec<&Port> = ports.iter().filter(|port| port.active && port.is_ethernet()).collect();
    if roce.is_empty() {
        let found = "no active RoCE port, so no GID is needed".to_owned();
        return finding(topic, if ports.is_empty() { Status::NotNeeded } else { Status::Ok }, found);
    }
    let without: Vec<String> = roce.iter().filter(|port| port.gid.is_none()).map(|port| port.name()).collect();
    let chosen: Vec<String> = roce
        .iter()
        .filter_map(|port| port.gid.as_ref().map(|gid| (port, gid)))
        .map(|(port, gid)| {
            format!("{}: GID index {} ({}, {}, {})", port.name(), gid.index, gid.kind, gid.address, gid.interface)
        })
        .collect();
    if without.is_empty() {
        return finding(topic, Status::Ok, chosen.join("; "));
    }
    let others = if chosen.is_empty() { String::new() } else { format!(" ({})", chosen.join("; ")) };
    finding(topic, Status::Warning, format!("no RoCE v2 address on {}{others}", without.join(" and "))).fix(
        "give the port's network interface an address and bring it up (ip addr add ADDRESS dev INTERFACE; ip link set \
         INTERFACE up)",
    )
}

fn or_unknown(version: Option<String>) -> String {
    version.unwrap_or_else(|| "of unknown version".to_owned())
}

/// Returns the number of device nodes of GPUs.
fn gpus(files: &Files<'_>) -> usize {
    files.names("/dev").iter().filter(|name| is_gpu_node(name)).count()
}

/// Returns `true` for the name of a device node of a GPU, such as `nvidia0`.
pub(crate) fn is_gpu_node(name: &str) -> bool {
    name.strip_prefix("nvidia").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Parses a driver version: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue …` → `550.54.15`.
fn driver_version(text: &str) -> String {
    let numbers = |word: &&str| word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.split_whitespace().find(numbers).unwrap_or("of unknown version").to_owned()
}

fn kernel(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_the_kernel_says() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build";
        assert_eq!(driver_version(open), "570.86.15");
        assert_eq!(driver_version("rubbish"), "of unknown version");
        assert_eq!(kernel("6.1.0-56-amd64"), Some((6, 1)));
        assert_eq!(kernel(""), None);
    }
}
