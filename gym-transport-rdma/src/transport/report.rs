//! Report of what loading UCX finds: version, transports and devices, and its effects on the process.
//!
//! Loading is permanent and patches libc. To get only the report, load UCX in a child process, as `rgym doctor` does.

use std::path::PathBuf;

use gym_core::transport::Transport;
use serde::{Deserialize, Serialize};

use crate::fabric::{DeviceReport, FabricError, Lanes, device_report};
use crate::sys::LoadOptions;

/// Result of loading UCX and opening a context with its own defaults and the environment's `UCX_…` settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UcxReport {
    /// Version of UCX, such as `1.13.1`.
    pub version: String,
    /// Path of libucp.
    pub path: PathBuf,
    /// All resources as `transport/device`, such as `posix/memory`, `tcp/eth0`, `rc_mlx5/mlx5_0:1`.
    pub resources: Vec<String>,
    /// Signals whose handlers UCX had replaced and this crate restored.
    pub signals_restored: Vec<i32>,
    /// Functions of libc that UCX patched in memory.
    pub patched: Vec<String>,
    /// The warnings of UCX, in its words, such as a variable that it does not know.
    #[serde(default)]
    pub warnings: Vec<String>,
}

impl UcxReport {
    /// Loads UCX into this process and reports on it.
    ///
    /// # Errors
    /// If UCX cannot be loaded, or cannot open a context or a worker.
    pub fn take(options: &LoadOptions) -> Result<Self, FabricError> {
        let DeviceReport { library, devices } = device_report(options)?;
        Ok(Self {
            version: library.version,
            path: library.path,
            resources: devices,
            signals_restored: library.signals_restored,
            patched: library.patched.into_iter().map(str::to_owned).collect(),
            // They go to where UCX logs.
            warnings: Vec::new(),
        })
    }

    /// Returns the resources of a transport. Empty for transports that are not UCX's.
    #[must_use]
    pub fn of(&self, transport: Transport) -> Vec<&str> {
        let is_of = |name: &str| {
            let lanes = Lanes::of(&[name.to_owned()]);
            match transport {
                // `self` connects within one process, and `cma` carries only bulk data.
                crate::SHM => lanes.shared_memory() && !name.starts_with("self/") && !name.starts_with("cma/"),
                crate::RDMA => lanes.rdma(),
                crate::UCX_TCP => name.starts_with("tcp/"),
                _ => false,
            }
        };
        self.resources.iter().map(String::as_str).filter(|name| is_of(name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_sorted_by_transport() {
        let names = ["self/memory0", "tcp/lo", "posix/memory", "cma/memory", "rc_verbs/rxe0:1", "ud_verbs/rxe0:1"];
        let report = UcxReport {
            version: "1.13.1".to_owned(),
            path: PathBuf::new(),
            resources: names.map(str::to_owned).to_vec(),
            signals_restored: Vec::new(),
            patched: Vec::new(),
            warnings: Vec::new(),
        };
        assert_eq!(report.of(crate::SHM), ["posix/memory"]);
        assert_eq!(report.of(crate::RDMA), ["rc_verbs/rxe0:1", "ud_verbs/rxe0:1"]);
        assert_eq!(report.of(crate::UCX_TCP), ["tcp/lo"]);
        assert!(report.of(Transport::new("http", 400)).is_empty());
    }
}
