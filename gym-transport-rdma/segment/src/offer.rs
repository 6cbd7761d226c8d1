//! The file descriptor of a segment, from the process that has created it to the others.
//!
//! ```text
//!   creator                          another process of the same user
//!   listen ◄──────── connect ──────── fetch(name)
//!   SO_PEERCRED: same user?          SO_PEERCRED: same user?
//!   a byte + SCM_RIGHTS ───────────►
//!          ◄──────────────── a byte   it has the file
//! ```
//!
//! The socket is abstract: it has no file, and ends with its process. Containers reach each other's only within one
//! network namespace.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gym_core::{Code, Error, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recv, recvmsg, send,
    sendmsg, socket_with,
};
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::segment::Segment;
use crate::time::{timespec, until};

/// Connections that wait for the creator. More processes than this wait in `connect`.
const BACKLOG: i32 = 128;
/// How long the creator waits for one process, which must not keep the others waiting.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest time until the creator notices an abort.
const WAIT_MAX: Duration = Duration::from_millis(100);

/// A socket at which other processes of the same user get the file of a segment. Its name is random, and it ends when
/// this is dropped.
#[derive(Debug)]
pub struct FdOffer {
    socket: OwnedFd,
    name: String,
    segment: Arc<Segment>,
}

impl FdOffer {
    /// Creates the socket. From now on, other processes can connect, and wait until they are [served](Self::serve).
    ///
    /// # Errors
    /// `ResourceExhausted` if no file descriptor is left; `Unavailable` if the kernel refuses the socket.
    pub fn new(segment: &Arc<Segment>) -> Result<Self> {
        let offer = || {
            let mut random = [0_u8; 16];
            // So few bytes never come in part, and never interrupted.
            getrandom(&mut random, GetRandomFlags::empty())?;
            let name = format!("gym-segment-{:032x}", u128::from_ne_bytes(random));
            let socket = new_socket()?;
            bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
            listen(&socket, BACKLOG)?;
            Ok((socket, name))
        };
        let (socket, name) = offer().map_err(|errno| failed(errno).about("offer a segment to other processes"))?;
        Ok(Self { socket, name, segment: Arc::clone(segment) })
    }

    /// Returns the name of the socket, for [`fetch`]. Whoever knows it, and is another user, gets nothing.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Gives the file to processes that connect, until `takers` of them have it. Blocks its thread. Processes of other
    /// users, and those that do not answer, are not counted.
    ///
    /// # Errors
    /// `DeadlineExceeded` if fewer processes have come by the deadline; `Unavailable` if the segment was aborted, or if
    /// the kernel refuses to wait.
    pub fn serve(&self, takers: usize, deadline: Instant) -> Result<()> {
        let mut served = 0;
        while served < takers {
            let subject = || format!("offer a segment to {takers} processes");
            if self.segment.is_aborted() {
                let why = format!("the segment was aborted; {served} have it");
                return Err(Error::not_started(Code::Unavailable, why).about(subject()));
            }
            let Some(left) = until(deadline) else {
                let why = format!("the deadline has passed; {served} have it");
                return Err(Error::not_started(Code::DeadlineExceeded, why).about(subject()));
            };
            match self.accept(left.min(WAIT_MAX)) {
                // One process that fails must not end the others.
                Ok(Some(peer)) => served += usize::from(self.give(&peer, left.min(ANSWER_TIMEOUT)).is_ok()),
                Ok(None) | Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => return Err(failed(errno).about(subject())),
            }
        }
        Ok(())
    }

    fn accept(&self, within: Duration) -> rustix::io::Result<Option<OwnedFd>> {
        let mut waits = [PollFd::new(&self.socket, PollFlags::IN)];
        if poll(&mut waits, Some(&timespec(within)))? == 0 {
            return Ok(None);
        }
        accept_with(&self.socket, SocketFlags::CLOEXEC).map(Some)
    }

    fn give(&self, peer: &OwnedFd, within: Duration) -> rustix::io::Result<()> {
        if socket_peercred(peer)?.uid != geteuid() {
            return Err(Errno::PERM);
        }
        bound(peer, within)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        let file = [self.segment.as_fd()];
        assert!(rights.push(SendAncillaryMessage::ScmRights(&file)), "the space is for one file");
        sendmsg(peer, &[IoSlice::new(&[1])], &mut rights, SendFlags::NOSIGNAL)?;
        let mut answer = [0];
        match recv(peer, &mut answer, RecvFlags::empty())? {
            (_, 1) => Ok(()),
            _ => Err(Errno::CONNRESET),
        }
    }
}

/// Gets the file of a segment that another process offers under this name. Blocks its thread.
///
/// # Errors
/// `Unavailable` if there is no such socket here: it has ended, or is in another network namespace. There is no shared
/// memory then, and another way to the ranks is needed. `FailedPrecondition` if it belongs to another user.
/// `DeadlineExceeded` if the file does not come in time.
pub fn fetch(name: &str, deadline: Instant) -> Result<OwnedFd> {
    let fetched = fetch_file(name, deadline).map_err(|errno| match errno {
        Errno::PERM => Error::not_started(Code::FailedPrecondition, "the socket belongs to another user"),
        Errno::AGAIN | Errno::TIMEDOUT => Error::not_started(Code::DeadlineExceeded, "the deadline has passed"),
        errno => failed(errno),
    });
    fetched.map_err(|error| error.about(format!("fetch a segment from the socket {name}")))
}

fn fetch_file(name: &str, deadline: Instant) -> rustix::io::Result<OwnedFd> {
    let left = || until(deadline).ok_or(Errno::TIMEDOUT);
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let socket = new_socket()?;
    // It also bounds the wait for a place in the creator's backlog.
    bound(&socket, left()?)?;
    connect(&socket, &address)?;
    if socket_peercred(&socket)?.uid != geteuid() {
        return Err(Errno::PERM);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let received = loop {
        bound(&socket, left()?)?;
        match recvmsg(&socket, &mut [IoSliceMut::new(&mut byte)], &mut rights, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    let files = rights.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    let file = files.last().filter(|_| received.bytes == 1).ok_or(Errno::CONNRESET)?;
    send(&socket, &[1], SendFlags::NOSIGNAL)?;
    Ok(file)
}

fn new_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

/// Bounds each later wait at a socket.
fn bound(socket: impl AsFd, within: Duration) -> rustix::io::Result<()> {
    // Zero would be no bound.
    let within = Some(within.max(Duration::from_millis(1)));
    set_socket_timeout(&socket, Timeout::Recv, within)?;
    set_socket_timeout(&socket, Timeout::Send, within)
}

fn failed(errno: Errno) -> Error {
    let exhausted = matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS);
    let code = if exhausted { Code::ResourceExhausted } else { Code::Unavailable };
    Error::not_started(code, "").caused_by(errno)
}
