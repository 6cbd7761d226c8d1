//! Findings of the probe.

use std::fmt;

use serde::Serialize;

/// Subject of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Topic {
    /// RDMA ports in `/sys/class/infiniband`.
    RdmaDevices,
    /// Device nodes in `/dev/infiniband`.
    DeviceNodes,
    /// Whether this is a container, and which network interfaces it hides.
    Container,
    /// Source address of RoCE v2 on each port.
    RoceGid,
    /// Limit on pinned memory.
    LockedMemory,
    /// The library `libibverbs.so.1`.
    Verbs,
    /// The library `libucp.so.0` and its RDMA transport.
    Ucx,
    /// GPU driver, device nodes and `libcuda.so.1`.
    Gpu,
    /// The library `libnccl.so.2`.
    Nccl,
    /// RDMA directly to GPU memory.
    GpuDirect,
    /// Memory shared by processes on this host.
    SharedMemory,
}

impl Topic {
    /// Returns what decides the result: paths of the machine, or the library that is searched.
    #[must_use]
    pub fn source(self) -> &'static str {
        match self {
            Self::RdmaDevices => "/sys/class/infiniband/*/ports/*/state",
            Self::DeviceNodes => "/dev/infiniband",
            Self::Container => {
                "/.dockerenv, /run/.containerenv, /run/systemd/container, /proc/1/cgroup, /sys/class/net"
            }
            Self::RoceGid => "/sys/class/infiniband/*/ports/*/gids",
            Self::LockedMemory => "/proc/self/limits, /proc/self/status",
            Self::Verbs => "libibverbs.so.1",
            Self::Ucx => "libucp.so.0, ucx/libuct_ib*",
            Self::Gpu => "/proc/driver/nvidia/version, /dev/nvidia*, libcuda.so.1",
            Self::Nccl => "libnccl.so.2",
            Self::GpuDirect => "/sys/module/nvidia_peermem, /proc/driver/nvidia/version, /proc/sys/kernel/osrelease",
            Self::SharedMemory => "/proc/self/mounts, /proc/sys/kernel/yama/ptrace_scope",
        }
    }
}

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Available, and usable as far as files show.
    Ok,
    /// Available, but its use will fail or be slow.
    Warning,
    /// Not available or not usable.
    Missing,
    /// Irrelevant on this machine, because one of its requirements is missing.
    NotNeeded,
}

/// Result of one check, with its fix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// Subject of the check.
    pub topic: Topic,
    /// Result of the check.
    pub status: Status,
    /// Description of what is available and where, or of what is missing.
    pub found: String,
    /// Steps to fix the problem; `None` if there is none.
    pub fix: Option<String>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = match self.status {
            Status::Ok => "ok",
            Status::Warning => "warning",
            Status::Missing => "missing",
            Status::NotNeeded => "not needed",
        };
        write!(f, "{status}: {}", self.found)?;
        match &self.fix {
            Some(fix) => write!(f, "; fix: {fix}"),
            None => Ok(()),
        }
    }
}

pub(crate) fn finding(topic: Topic, status: Status, found: String) -> Finding {
    Finding { topic, status, found, fix: None }
}

impl Finding {
    pub(crate) fn fix(mut self, fix: &str) -> Self {
        self.fix = Some(fix.to_owned());
        self
    }

    /// What a recording lacks is neither absent nor a fault.
    pub(crate) fn unless_not_recorded(self, lacking: &[String]) -> Self {
        if lacking.is_empty() || self.status == Status::Ok {
            return self;
        }
        finding(self.topic, Status::NotNeeded, format!("not in the recording: {}", lacking.join(", ")))
    }
}
