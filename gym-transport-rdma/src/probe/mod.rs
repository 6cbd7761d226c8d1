//! Probe: reports the RDMA and NCCL support of this machine from files, without loading UCX.

mod container;
mod files;
mod finding;
mod gpus;
mod ports;
mod rdma;

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

pub use crate::machine;
use crate::machine::{Attempt, Folder, Live, LoadOptions, Loaded, Machine};
use crate::nccl::{Nccl, NcclError, cuda_driver_version};
use crate::probe::files::Files;
pub use crate::probe::finding::{Finding, Status, Topic};
use crate::probe::ports::ports;
pub use crate::probe::ports::{Gid, Port};
use crate::probe::rdma::Usable;
use crate::tuning;
use crate::tuning::host::{Host, is_gpu_node};

/// Requirements of RDMA; each depends on the ones before it. A port must meet all of them.
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
    /// Whether device, nodes, pinned memory, verbs, and UCX with its RDMA transport are all available, for one port at least.
    pub rdma_usable: bool,
    /// Whether a GPU, its driver and NCCL are available.
    pub nccl_usable: bool,
    /// All findings; each depends on the ones before it.
    pub findings: Vec<Finding>,
    /// All ports of all RDMA devices.
    pub ports: Vec<Port>,
    #[serde(skip)]
    is_ucx_stopped: bool,
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
        first_fault(&self.findings)
    }

    /// Returns the finding about a setting with which UCX does not start, though it may be there.
    #[must_use]
    pub fn ucx_stopped(&self) -> Option<&Finding> {
        self.finding(Topic::Ucx).filter(|_| self.is_ucx_stopped)
    }

    /// Returns those of these findings that the probe does not tell: rules about settings also give it its verdicts, and each
    /// thing is to be said once.
    #[must_use]
    pub fn beside(&self, tuned: Vec<tuning::Finding>) -> Vec<tuning::Finding> {
        let is_told = |words: &str| self.findings.iter().any(|finding| finding.found == words);
        tuned.into_iter().filter(|rule| !is_told(&Finding::words(rule))).collect()
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
        let host = Host::of(machine);
        let files = Files::new(machine);
        let (mut findings, usable) = rdma::findings(&files, &host);
        let has_device = findings.first().is_some_and(|devices| devices.status != Status::Missing);
        let judged = |finding: Finding| finding.unless_not_recorded(&files.take_not_recorded());
        let gpu = judged(gpus::gpu(&files, &host, loaded));
        let has_gpu = gpu.status != Status::Missing;
        findings.push(gpu);
        findings.push(judged(gpus::nccl(&files, &host, loaded)));
        findings.push(judged(gpus::gpu_direct(&files, &host, has_device && has_gpu)));
        findings.push(judged(container::shared_memory(&files, &host)));
        judge(findings, &usable, ports(&host))
    }
}

/// Loads the libraries of NCCL and CUDA on this machine and asks them for their versions. They stay loaded.
#[must_use]
pub fn load(machine: &Live) -> Loaded {
    let files = Files::new(machine);
    let nccl = files.library("libnccl.so.2").map(|library| {
        let version = Nccl::load(&LoadOptions::at(&library.path)).and_then(|nccl| nccl.version());
        version.map(|version| version.to_string()).map_err(|error| match error {
            // The finding names the place, and what to install.
            NcclError::NotFound { tried } => Attempt::reasons(&tried),
            error => error.to_string(),
        })
    });
    // Without a driver and a GPU, its version means nothing.
    let has_node = files.names("/dev").iter().any(|name| is_gpu_node(name));
    let has_gpu = has_node && files.text("/proc/driver/nvidia/version").is_some();
    let cuda = files.library("libcuda.so.1").filter(|_| has_gpu);
    Loaded { nccl, cuda: cuda.map(|library| cuda_driver_version(&LoadOptions::at(library.path))) }
}

/// Probes this machine. [`ProbeOptions`] select another root or more library directories.
///
/// ```
/// let probe = gym_transport_rdma::probe();
/// match probe.rdma_fault() {
///     Some(fault) => println!("no RDMA here: {fault}"),
///     None => assert!(probe.rdma_usable),
/// }
/// ```
#[must_use]
pub fn probe() -> Probe {
    ProbeOptions::new().probe()
}

/// Returns the first finding that prevents RDMA, in the order of the requirements.
fn first_fault(findings: &[Finding]) -> Option<&Finding> {
    let of = |topic: &Topic| findings.iter().find(|finding| finding.topic == *topic && finding.prevents);
    RDMA_TOPICS.iter().find_map(of)
}

fn judge(findings: Vec<Finding>, usable: &Usable, ports: Vec<Port>) -> Probe {
    let of = |topic| findings.iter().find(move |finding: &&Finding| finding.topic == topic);
    let rdma_fault = first_fault(&findings);
    let nccl_topics = [Topic::Gpu, Topic::Nccl];
    let nccl_fault = nccl_topics.iter().filter_map(|topic| of(*topic)).find(|finding| finding.status != Status::Ok);
    let found = |topic| of(topic).map(|finding| finding.found.clone()).unwrap_or_default();
    let rdma = match rdma_fault {
        None => format!("RDMA is usable ({}, by {})", usable.ports, usable.ucx),
        Some(fault) => format!("RDMA is not usable here: {}", fault.found),
    };
    let nccl = match nccl_fault {
        None => format!("NCCL is usable ({} with {})", found(Topic::Nccl), found(Topic::Gpu)),
        Some(fault) => format!("NCCL is not usable here: {}", fault.found),
    };
    // UCX also connects processes on one host without an RDMA device, so both sentences name it.
    let ucx = match (of(Topic::Ucx), rdma_fault) {
        (Some(ucx), Some(fault)) if fault.topic != Topic::Ucx => format!("; {}", ucx.found),
        _ => String::new(),
    };
    Probe {
        summary: format!("{rdma}{ucx}; {nccl}."),
        rdma_usable: rdma_fault.is_none(),
        nccl_usable: nccl_fault.is_none(),
        findings,
        ports,
        is_ucx_stopped: usable.is_ucx_stopped,
    }
}

fn or_unknown(version: Option<String>) -> String {
    version.unwrap_or_else(|| "of unknown version".to_owned())
}
