//! The peer of a connection, as each end knows it from the bootstrap.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;

use crate::fabric::handle::peer_worker::PeerWorker;
use crate::fabric::protocol::identity::{ConnectionId, Token};

/// The peer that an answering end expects.
#[derive(Clone, Debug)]
pub struct Expect {
    /// Id of this connection at this end, which the peer writes into every message.
    pub id: ConnectionId,
    /// One-time token that the peer must show.
    pub token: Token,
    /// Id of this connection at the peer, from the bootstrap.
    pub peer: ConnectionId,
    /// Workers for a peer on this host. `None`: the peer connects through the listener.
    pub shared_memory: Option<WorkerPair>,
    /// Time for the peer to connect.
    pub within: Duration,
}

/// The peer that a calling end connects to.
#[derive(Clone, Debug)]
pub struct Connect {
    /// Id of this connection at this end, which the peer writes into every message.
    pub id: ConnectionId,
    /// Token from the peer's bootstrap response.
    pub token: Token,
    /// Id of this connection at the peer, from the bootstrap.
    pub peer: ConnectionId,
    /// The address to connect to.
    pub target: Target,
    /// Time for the peer to accept.
    pub within: Duration,
}

/// The address to connect to.
#[derive(Clone, Debug)]
pub enum Target {
    /// The peer's listener, over a network. UCX reports the loss of such a peer.
    Network(SocketAddr),
    /// The peer's worker, over shared memory on one host. UCX does **not** report the loss of such a peer. The fabric
    /// detects the end of the peer's process; only heartbeats detect a process that is stopped.
    SharedMemory(WorkerPair),
}

/// The two workers of a connection over shared memory. UCX requires both processes to be in one PID namespace.
#[derive(Clone, Debug)]
pub struct WorkerPair {
    /// Worker of this end, whose address the peer has.
    pub local: PeerWorker,
    /// Address of the peer's worker.
    pub remote: Bytes,
}
