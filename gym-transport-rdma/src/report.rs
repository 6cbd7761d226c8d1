//! What a UCX says of itself when it is loaded: its version, its transports and devices, and what loading did to the process.
//!
//! Loading is for ever and patches libc, so who only wants to know does this in a child process: `rgym doctor` does.

use std::path::PathBuf;

use gym_core::Level;
use serde::{Deserialize, Serialize};

use crate::fabric::{FabricError, Lanes, Report, report};
use crate::sys::LoadOptions;

/// What was found by loading UCX and starting a context with its own defaults and the environment's `UCX_…` settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UcxReport {
    /// Such as `1.13.1`.
    pub version: String,
    /// The file of libucp.
    pub path: PathBuf,
    /// Every `transport/device`, as in `posix/memory`, `tcp/eth0`, `rc_mlx5/mlx5_0:1`.
    pub resources: Vec<String>,
    /// Signals whose handlers it had replaced, and that were given back.
    pub signals_restored: Vec<i32>,
    /// Functions of libc that it patched in memory.
    pub patched: Vec<String>,
}

impl UcxReport {
    /// Loads UCX into this process and asks it.
    ///
    /// # Errors
    /// When it cannot be loaded, or starts no context.
    pub fn take(options: &LoadOptions) -> Result<Self, FabricError> {
        let Report { library, devices } = report(options)?;
        Ok(Self {
            version: library.version,
            path: library.path,
            resources: devices,
            signals_restored: library.signals_restored,
            patched: library.patched.into_iter().map(str::to_owned).collect(),
        })
    }

    /// The resources of a rung of the ladder; none for those that are not UCX's.
    #[must_use]
    pub fn of(&self, level: Level) -> Vec<&str> {
        let is_of = |name: &str| {
            let lanes = Lanes::of(&[name.to_owned()]);
            match level {
                // `self` stays within a process, and `cma` moves bulk only.
                Level::SharedMemory => lanes.shared_memory() && !name.starts_with("self/") && !name.starts_with("cma/"),
                Level::Rdma => lanes.rdma(),
                Level::UcxTcp => name.starts_with("tcp/"),
                Level::InProcess | Level::Http => false,
            }
        };
        self.resources.iter().map(String::as_str).filter(|name| is_of(name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_sorted_onto_the_rungs_of_the_ladder() {
        let names = ["self/memory0", "tcp/lo", "posix/memory", "cma/memory", "rc_verbs/rxe0:1", "ud_verbs/rxe0:1"];
        let report = UcxReport {
            version: "1.13.1".to_owned(),
            path: PathBuf::new(),
            resources: names.map(str::to_owned).to_vec(),
            signals_restored: Vec::new(),
            patched: Vec::new(),
        };
        assert_eq!(report.of(Level::SharedMemory), ["posix/memory"]);
        assert_eq!(report.of(Level::Rdma), ["rc_verbs/rxe0:1", "ud_verbs/rxe0:1"]);
        assert_eq!(report.of(Level::UcxTcp), ["tcp/lo"]);
        assert!(report.of(Level::Http).is_empty());
    }
}
