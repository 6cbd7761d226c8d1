//! Whether the process of a peer on this host still is.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

/// A process that is watched for its end.
pub(super) enum Process {
    /// It is. The descriptor is readable when it has ended.
    There(OwnedFd),
    /// It has ended: it reads and writes nothing any more.
    Ended,
    /// Nobody tells: it is our own, or the kernel is older than 5.3.
    Unknown,
}

impl Process {
    /// By the number that it has said.
    pub(super) fn watch(number: u32) -> Self {
        let Some(pid) = i32::try_from(number).ok().and_then(Pid::from_raw).filter(|pid| *pid != getpid()) else {
            return Self::Unknown;
        };
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(descriptor) => Self::There(descriptor),
            Err(Errno::SRCH) => Self::Ended,
            Err(_) => Self::Unknown,
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        matches!(self, Self::Ended)
    }

    /// Readable when it has ended and that is not known yet.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::There(descriptor) => Some(descriptor.as_fd()),
            Self::Ended | Self::Unknown => None,
        }
    }
}
