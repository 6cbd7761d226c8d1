//! Findings of the probe.

use std::fmt;

use serde::Serialize;

use crate::tuning::{self, Severity};

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
    /// Available, and its use fails, hangs, or silently takes something slower.
    Error,
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
    /// The source of the decision, if it was a rule about settings and machines: where a setting comes from, or a file. Otherwise empty:
    /// see [`Topic::source`].
    pub because: String,
    /// Whether RDMA cannot be used because of it. A fault of one port is none as long as another port is usable.
    #[serde(skip)]
    pub(crate) prevents: bool,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = match self.status {
            Status::Ok => "ok",
            Status::Warning => "warning",
            Status::Error => "error",
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
    let prevents = matches!(status, Status::Warning | Status::Error | Status::Missing);
    Finding { topic, status, found, fix: None, because: String::new(), prevents }
}

impl Finding {
    pub(crate) fn fix(mut self, fix: &str) -> Self {
        self.fix = Some(fix.to_owned());
        self
    }

    /// A finding in the words of a rule.
    pub(crate) fn of_rule(topic: Topic, rule: tuning::Finding) -> Self {
        let status = match rule.severity {
            Severity::Ok => Status::Ok,
            Severity::Warning => Status::Warning,
            Severity::Error => Status::Error,
        };
        let found = Self::words(&rule);
        let fix = Some(rule.fix).filter(|fix| !fix.is_empty());
        Self { fix, because: rule.because, ..finding(topic, status, found) }
    }

    /// Returns the fact of a rule, with the name of the setting that it is about: a topic does not tell it.
    pub(crate) fn words(rule: &tuning::Finding) -> String {
        let is_set = rule.because.starts_with("set in ") || rule.because.contains(" wins over ");
        if is_set && !rule.found.contains(&rule.about) {
            format!("{}: {}", rule.about, rule.found)
        } else {
            rule.found.clone()
        }
    }

    /// Sets whether RDMA cannot be used because of it.
    pub(crate) fn prevents(mut self, prevents: bool) -> Self {
        self.prevents = prevents;
        self
    }

    /// What a recording lacks is neither absent nor a fault.
    pub(crate) fn unless_not_recorded(self, lacking: &[String]) -> Self {
        // A rule has its facts.
        if lacking.is_empty() || self.status == Status::Ok || !self.because.is_empty() {
            return self;
        }
        // Without an answer, nothing is known to be usable.
        finding(self.topic, Status::NotNeeded, format!("not in the recording: {}", lacking.join(", "))).prevents(true)
    }
}
