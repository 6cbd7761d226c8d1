//! One thing that the probe looked for.

use std::fmt;

use serde::Serialize;

/// What a finding is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Topic {
    /// Ports in `/sys/class/infiniband`.
    RdmaDevices,
    /// `/dev/infiniband`.
    DeviceNodes,
    /// Whether this is a container, and what it keeps from its processes.
    Container,
    /// The address that RoCE v2 goes out from, for each port.
    RoceGid,
    /// How much memory may be pinned.
    LockedMemory,
    /// `libibverbs.so.1`.
    Verbs,
    /// `libucp.so.0` and its RDMA transport.
    Ucx,
    /// Driver, device nodes and `libcuda.so.1`.
    Gpu,
    /// `libnccl.so.2`.
    Nccl,
    /// RDMA straight to GPU memory.
    GpuDirect,
    /// Memory that processes of this host share.
    SharedMemory,
}

/// What a finding means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// There, and fit for use as far as looking can tell.
    Ok,
    /// There, but something will go wrong.
    Warning,
    /// Not there, or not usable.
    Missing,
    /// Makes no difference on this machine, because something that it needs is missing.
    NotNeeded,
}

/// One thing that was looked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// What it is about.
    pub topic: Topic,
    /// What it means.
    pub status: Status,
    /// What was found and where, or what was not.
    pub found: String,
    /// What to do about it; `None` when nothing is to be done.
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
}
