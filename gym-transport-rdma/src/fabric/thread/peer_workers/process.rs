//! Watches whether the process of a peer on this host has ended.
//!
//! The peer reports its own process id. If the report is false, or the id was reused before we opened it, an unrelated
//! process is watched. The end of the peer is then noticed too early or too late, and payloads may be freed that the
//! peer still copies. Only a process that may read and write our memory anyway can cause that. A process that calls
//! exec does not end.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

/// A process that is watched for its end.
pub(crate) enum PeerProcess {
    /// The process runs. The descriptor becomes readable when it has ended.
    Running(OwnedFd),
    /// The process has ended and reads or writes nothing any more.
    Ended,
    /// The end cannot be observed: it is this process, or it has no descriptor. The kernel is older than 5.3, seccomp
    /// forbids `pidfd_open`, or the limit on descriptors is reached.
    Unknown,
}

impl PeerProcess {
    /// Watches the process with this id.
    pub(crate) fn watch(number: u32) -> Self {
        let Some(pid) = i32::try_from(number).ok().and_then(Pid::from_raw).filter(|pid| *pid != getpid()) else {
            return Self::Unknown;
        };
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(descriptor) => Self::Running(descriptor),
            Err(Errno::SRCH) => Self::Ended,
            Err(Errno::NOSYS) => Self::Unknown,
            Err(error) => {
                tracing::warn!(%error, process = number, "cannot watch the process of a peer; its end will not be detected");
                Self::Unknown
            }
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(self, Self::Ended)
    }

    /// Descriptor that becomes readable when the process ends; `None` unless it is running.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Running(descriptor) => Some(descriptor.as_fd()),
            Self::Ended | Self::Unknown => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn the_end_of_another_process_is_told_and_our_own_is_not_awaited() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let watched = PeerProcess::watch(child.id());
        let descriptor = watched.descriptor().expect("it is there");
        child.kill().unwrap();
        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)], Some(&limit)), Ok(1));
        child.wait().unwrap();
        assert!(PeerProcess::watch(child.id()).has_ended());
        for unwatched in [std::process::id(), 0, u32::MAX] {
            let unknown = PeerProcess::watch(unwatched);
            assert!(!unknown.has_ended() && unknown.descriptor().is_none());
        }
    }
}
