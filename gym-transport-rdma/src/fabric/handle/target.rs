//! The peer of a connection: what each end knows of the other from the bootstrap.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;

use crate::fabric::handle::peer_worker::PeerWorker;
use crate::fabric::protocol::identity::{ConnectionId, Token};

/// The peer that an answering end expects.
#[derive(Clone, Debug)]
pub struct Expect {
    /// Our id of this connection, which the peer writes into every message.
    pub id: ConnectionId,
    /// The token that the peer must show, once.
    pub token: Token,
    /// The peer's id, from the bootstrap.
    pub peer: ConnectionId,
    /// The workers of a peer on this host. `None`: the peer comes through the listener.
    pub shared_memory: Option<WorkerPair>,
    /// How long the peer may take.
    pub within: Duration,
}

/// The peer that a calling end connects to.
#[derive(Clone, Debug)]
pub struct Connect {
    /// Our id of this connection, which the peer writes into every message.
    pub id: ConnectionId,
    /// The token that the peer gave us to show.
    pub token: Token,
    /// The peer's id, from the bootstrap.
    pub peer: ConnectionId,
    /// The address to connect to.
    pub target: Target,
    /// How long the peer may take to accept.
    pub within: Duration,
}

/// The address to connect to.
#[derive(Clone, Debug)]
pub enum Target {
    /// The peer's listener, over a network. UCX reports when such a peer is lost.
    Network(SocketAddr),
    /// The peer's worker, over shared memory on one host. UCX does **not** report when such a peer is lost. The fabric notices the
    /// end of the peer's process; heartbeats must notice a process that is stopped.
    SharedMemory(WorkerPair),
}

/// The two workers of a connection over shared memory. Both processes must be in one PID namespace, which UCX needs too.
#[derive(Clone, Debug)]
pub struct WorkerPair {
    /// Our worker, whose address the peer has.
    pub local: PeerWorker,
    /// The address of the peer's worker.
    pub remote: Bytes,
}
