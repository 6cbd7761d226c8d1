//! The fabric: one thread that owns UCX's workers, and everything that happens on them.
//!
//! ```text
//!  any thread ── Connection::post ──▶ bounded queue ──▶ ┌ fabric thread ────────────┐ ◀──▶ UCX worker ◀──▶ tcp, rdma
//!  PeerEvents ◀── opened, message, landed, ended ────── └ spin, arm, wait with tick ┘ ◀──▶ a worker for each peer over shm
//! ```
//!
//! It moves *parcels*: a small header and one contiguous payload, in order within a connection, eager or by rendezvous as
//! UCX decides. What a parcel means is the business of the layer above. Two ends know each other from a bootstrap over
//! another transport: each tells the other its [`ConnectionId`], the answering end adds a one-time [`Token`] which the
//! calling end shows in its first message. Over shared memory each connection has a worker of its own at both ends, a
//! [`Berth`], so that a peer that dies while it writes blocks nobody else's queue.
//!
//! # Rules that it keeps
//! - Header and payload belong to the fabric from [`Connection::post`] until UCX has said that it is done with them,
//!   whatever becomes of the caller. What UCX or a peer may still read when the fabric ends is leaked, never freed.
//! - Nothing waits without bound: the queue has one, so have parcels that a peer does not take, parcels that came ahead of their
//!   turn (in number and in bytes), connections that have not said who they are, peers on this host, and memory that is
//!   registered. What ends something finds room in any queue.
//!   What UCX holds before it calls back is beyond these bounds: it assembles the fragments of an eager message itself, in memory of
//!   the length that the peer says, and has no hook before.
//! - A parcel for a connection that is not known is dropped and counted.
//! - [`Lane::Urgent`] parcels are outside of the order and have room of their own in the queue.

mod arrivals;
mod berth;
mod driver;
mod exit;
#[cfg(feature = "testing")]
pub(crate) mod fuzzing;
mod handle;
#[cfg(test)]
mod hostile;
mod identity;
mod inbox;
mod lanes;
mod options;
mod order;
mod peer;
mod process;
mod queue;
mod registered;
mod report;
mod state;
mod stats;
mod thread;
mod wire;

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use gym_core::{Error, Result};

pub use berth::Berth;
pub use driver::Driver;
use handle::{Command, Link, Opening, Shared};
pub use handle::{Connection, Fabric};
pub use identity::{ConnectionId, Token};
pub use lanes::Lanes;
pub use options::{FabricError, FabricOptions};
pub use report::{Report, report};
pub use stats::{ConnectionStats, FabricStats};

use crate::pool::Buffer;

/// The longest header of a parcel. Every one travels with its payload in one active message and is copied once.
pub const HEADER_BYTES_MAX: usize = 104;

/// The longest payload of an urgent parcel: it always travels eagerly.
pub const URGENT_BYTES_MAX: usize = 4096;

/// Whom an answering end awaits.
#[derive(Clone, Debug)]
pub struct Expect {
    /// Our own id of this connection, which the peer writes into everything it sends.
    pub id: ConnectionId,
    /// What the peer must show, once.
    pub token: Token,
    /// The peer's id, as it said in the bootstrap.
    pub peer: ConnectionId,
    /// Where it comes, when it is on this host. `None`: through the listener.
    pub alongside: Option<Alongside>,
    /// How long it may take.
    pub within: Duration,
}

/// Whom a calling end connects to.
#[derive(Clone, Debug)]
pub struct Connect {
    /// Our own id of this connection, which the peer writes into everything it sends.
    pub id: ConnectionId,
    /// What the peer gave us to show.
    pub token: Token,
    /// The peer's id, as it said in the bootstrap.
    pub peer: ConnectionId,
    /// The way.
    pub target: Target,
    /// How long it may take until the peer has answered.
    pub within: Duration,
}

/// The way to a peer.
#[derive(Clone, Debug)]
pub enum Target {
    /// Its listener: networks. UCX tells when such a peer is lost.
    Socket(SocketAddr),
    /// Its berth, from one of ours: shared memory on one host. UCX does **not** tell when such a peer is lost. The end of its
    /// process is noticed here; of one that stands still, heartbeats must tell.
    Alongside(Alongside),
}

/// The two ends of a connection over shared memory. Both processes must have one numbering of processes, as UCX needs too.
#[derive(Clone, Debug)]
pub struct Alongside {
    /// Ours, whose address the peer was told.
    pub berth: Berth,
    /// The address of the peer's.
    pub peer: Bytes,
}

/// What the fabric tells the owner of a connection, on the fabric's thread. Every method must return soon and never
/// block; all of them may post to any connection. A panic ends the connection.
///
/// Order: `opened`, then `message` and `landed`, then `ended` exactly once as the last (also when `opened` never came).
pub trait PeerEvents: Send + Sync + 'static {
    /// The peer has shown its token, or answered ours.
    fn opened(&self, connection: &Connection, lanes: &Lanes);

    /// A parcel. Ordered ones come in the order in which the peer posted them; an announced payload that is landing does
    /// not hold up those behind it.
    ///
    /// # Errors
    /// End the connection: they come back in [`End::Lost`].
    fn message(&self, header: &[u8], payload: Payload<'_>) -> Result<Disposition>;

    /// The payload of a parcel that was answered with [`Disposition::Land`] is here, whole. Several landings may end in
    /// another order than they began.
    fn landed(&self, key: u64, bytes: Bytes);

    /// Nothing comes any more. Parcels that were not sent yet have had their `done` called with an error by then.
    fn ended(&self, why: End);
}

/// The payload of a parcel that has arrived.
#[derive(Debug)]
pub enum Payload<'a> {
    /// It came with the header.
    Here(Arrived<'a>),
    /// The peer holds it ready: so many bytes, as it says. Nothing has been allocated for it.
    Announced(u64),
}

/// Bytes that arrived with their header.
#[derive(Debug)]
pub enum Arrived<'a> {
    /// They lie in UCX's receive buffer until `message` returns.
    Borrowed(&'a [u8]),
    /// They had to be copied already, because they came ahead of their turn.
    Owned(Bytes),
}

impl Arrived<'_> {
    /// The bytes, without a copy.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Owned(bytes) => bytes,
        }
    }

    /// The bytes to keep: a copy, unless one was made already.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        match self {
            Self::Borrowed(bytes) => Bytes::copy_from_slice(bytes),
            Self::Owned(bytes) => bytes,
        }
    }
}

/// What becomes of a payload.
#[derive(Debug)]
pub enum Disposition {
    /// Nothing more: it was taken, or is not wanted. The sender's `done` is called either way.
    Done,
    /// Put it here, then call `landed` with this key. The buffer must be exactly as long as the payload. Bytes that came
    /// with the header are copied, and `landed` is called at once.
    Land {
        /// Given back in `landed`.
        key: u64,
        /// From [`Pool::take`](crate::pool::Pool::take).
        buffer: Buffer,
    },
}

/// Why a connection ended.
#[derive(Debug)]
pub enum End {
    /// [`Connection::close`] was called here, or the fabric was shut down.
    Closed,
    /// The peer closed it in an orderly way: everything it posted before has come.
    ClosedByPeer,
    /// It broke. `Unavailable` when the peer is lost or never came; `DataLoss` when it spoke nonsense.
    Lost(Error),
}

/// What is sent in one active message.
pub struct Parcel {
    /// At most [`HEADER_BYTES_MAX`] bytes.
    pub header: Bytes,
    /// Not copied when it is long; read until `done` is called.
    pub payload: Bytes,
    /// In order or not.
    pub lane: Lane,
    /// Called once, on the fabric's thread, when header and payload are not needed any more: the parcel was taken by the
    /// network or the peer (`Ok`; it says nothing about the peer's having *seen* it) or will never be (`Err`).
    pub done: Option<Done>,
}

impl std::fmt::Debug for Parcel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Parcel({:?}, header {}, payload {})", self.lane, self.header.len(), self.payload.len())
    }
}

/// See [`Parcel::done`].
pub type Done = Box<dyn FnOnce(Result<()>) + Send>;

/// Whether a parcel keeps its place in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Handed up in the order in which they were posted.
    Ordered,
    /// Sent and handed up as soon as possible. At most [`URGENT_BYTES_MAX`] bytes.
    Urgent,
}
