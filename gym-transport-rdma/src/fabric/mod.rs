//! Fabric: one thread that owns the UCX workers of a process, their connections and their memory.
//!
//! ```text
//!  any thread ── Connection::post ──▶ bounded queue ──▶ ┌ fabric thread ────────────┐ ◀──▶ UCX worker ◀──▶ tcp, rdma
//!  ConnectionEvents ◀── opened, message, landed, ended ─ └ spin, arm, wait with tick ┘ ◀──▶ a worker for each peer over shm
//! ```
//!
//! The fabric carries [`ActiveMessage`]s: a small header and one contiguous payload, ordered within a connection. UCX
//! sends them eagerly or by rendezvous. The layer above defines their content.
//!
//! Both ends of a connection know each other from a bootstrap over another transport. Each end gives the other its
//! [`ConnectionId`]. The answering end adds a one-time [`Token`], which the calling end shows in its first message.
//! Over shared memory, each connection has a dedicated UCX worker at both ends, a [`PeerWorker`]. A peer that dies
//! while it writes therefore blocks no other peer's queue.
//!
//! | module | purpose |
//! |---|---|
//! | `handle` | for other threads: connections, commands, the command queue, counters |
//! | `thread` | for the fabric's thread only: the event loop, the state of connections, peer workers, registrations |
//! | `protocol` | exchanged between two fabrics: ids and tokens, the prefix of each message, sequence numbers |
//! | `options`, `library` | options and their UCX settings; loading UCX, and why it refuses |
//! | `devices`, `lanes` | devices that UCX finds; transports that a connection uses |
//!
//! # Rules
//! - Header and payload belong to the fabric from [`Connection::post`] until UCX has finished with them, even if the
//!   caller is cancelled. Memory that UCX or a peer may still read when the fabric ends is leaked, never freed.
//! - Every wait and every queue is bounded. Bounds apply to commands, messages that a peer does not receive, and
//!   messages out of order (in number and bytes). They also apply to connections that have not shown a token, peers on
//!   this host, and registered memory. A full queue still accepts commands that end something.
//! - The bounds exclude memory that UCX holds before its callback. UCX assembles the fragments of an eager message
//!   itself, in memory of the length that the peer announces, and offers no earlier hook.
//! - A message for an unknown connection is dropped and counted.
//! - [`Delivery::Urgent`] messages are not ordered and have their own part of the queue.

mod devices;
mod handle;
#[cfg(test)]
mod hostile;
mod lanes;
mod library;
mod options;
pub(crate) mod protocol;
mod thread;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use gym_core::Result;
use tokio::sync::oneshot;
use tokio::time::Instant;

pub(crate) use devices::{DeviceReport, device_report};
pub use handle::connection::Connection;
pub use handle::events::{CloseReason, ConnectionEvents, Disposition, EagerBytes, Payload};
pub use handle::message::{ActiveMessage, Delivery, SentCallback};
pub use handle::peer_worker::PeerWorker;
pub use handle::stats::{ConnectionStats, FabricStats};
pub use handle::target::{Connect, Expect, Target, WorkerPair};
pub use lanes::Lanes;
pub use options::driver::Driver;
pub use options::{FabricError, FabricOptions};
pub use protocol::identity::{ConnectionId, Token};
pub use protocol::prefix::{HEADER_BYTES_MAX, URGENT_BYTES_MAX};

use crate::fabric::handle::command::{Command, FabricInfo, FabricShared, OpenRequest};
use crate::fabric::handle::connection::ConnectionShared;
use crate::fabric::handle::queue::PushError;
use crate::memory::Pool;
pub use crate::sys::{LIBRARY_VARIABLE, LibraryInfo, LoadError, LoadOptions};

/// Time for connections to close after the last handle is dropped.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);
/// Additional time to wait for a shutdown. The thread keeps the deadline itself, unless a callback blocks it.
const SHUTDOWN_MARGIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Handle to the fabric's thread.
///
/// The thread shuts down in order when the last handle is dropped or [`Fabric::shutdown`] is called. [`Connection`]s do
/// not keep it alive.
#[derive(Clone)]
pub struct Fabric(Arc<ShutdownOnDrop>);

struct ShutdownOnDrop(Arc<FabricShared>);

impl Fabric {
    /// Loads the library, starts the thread, and waits until its worker and listener are ready.
    ///
    /// Blocks for some ten milliseconds and reads files, so do not call it on an async worker thread.
    ///
    /// # Errors
    /// If UCX cannot be loaded or rejects a setting, no transport is available, or the address cannot be listened on.
    pub fn open(options: FabricOptions) -> Result<Self, FabricError> {
        let shared = Arc::new(FabricShared::new(&options)?);
        thread::start(options, &shared)?;
        Ok(Self(Arc::new(ShutdownOnDrop(shared))))
    }

    fn ready(&self) -> &FabricInfo {
        self.0.0.ready.get().expect("set before `open` returns")
    }

    /// Opens a dedicated worker for one peer on this host. It is kept for `within`, unless a connection takes it.
    ///
    /// # Errors
    /// Not started: `ResourceExhausted` beyond [`FabricOptions::shared_memory_peers_max`] or if the queue is full.
    /// `Unavailable` if the transports include no shared memory, UCX cannot open a worker, or the fabric has ended.
    pub async fn peer_worker(&self, within: Duration) -> Result<PeerWorker> {
        let (reply, opened) = oneshot::channel();
        self.0
            .0
            .queue
            .push(Command::OpenPeerWorker(within, reply), true)
            .map_err(|(_, refused)| refused.into_error())?;
        opened.await.unwrap_or_else(|_| Err(PushError::Closed.into_error()))
    }

    /// Returns the address for peers on any host, with the actual port; `None` without [`FabricOptions::listen`].
    #[must_use]
    pub fn listen_address(&self) -> Option<SocketAddr> {
        self.ready().listen_address
    }

    /// Returns the version and path of the loaded UCX, and the effects of loading it.
    #[must_use]
    pub fn library(&self) -> &LibraryInfo {
        &self.ready().library
    }

    /// Returns the resources that UCX can use with these options, as `transport/device`: `posix/memory`, `tcp/eth0`,
    /// `rc_verbs/mlx5_0:1`.
    #[must_use]
    pub fn devices(&self) -> &[String] {
        &self.ready().devices
    }

    /// Expects a peer that shows the token. Calls `opened` when it has, or `ended` with [`CloseReason::Lost`] after
    /// [`Expect::within`].
    ///
    /// # Errors
    /// `Unavailable` if the fabric has ended, `ResourceExhausted` if its queue is full.
    pub fn expect(&self, expected: Expect, events: Arc<dyn ConnectionEvents>) -> Result<Connection> {
        let until = Instant::now() + expected.within;
        self.begin(expected.id, OpenRequest::Expect(expected, until), events)
    }

    /// Connects to a peer that expects us. Calls `opened` when the peer has accepted, or `ended` with
    /// [`CloseReason::Lost`] if it cannot be reached or does not accept within [`Connect::within`]. Messages posted
    /// before `opened` are sent after it.
    ///
    /// # Errors
    /// `Unavailable` if the fabric has ended, `ResourceExhausted` if its queue is full.
    pub fn connect(&self, to: Connect, events: Arc<dyn ConnectionEvents>) -> Result<Connection> {
        let until = Instant::now() + to.within;
        self.begin(to.id, OpenRequest::Connect(to, until), events)
    }

    fn begin(&self, id: ConnectionId, request: OpenRequest, events: Arc<dyn ConnectionEvents>) -> Result<Connection> {
        let connection = Arc::new(ConnectionShared::new(id, Arc::clone(&self.0.0)));
        let command = Command::Open(Box::new((request, Arc::clone(&connection), events)));
        // The urgent queue, because urgent messages may be posted to the connection at once.
        self.0.0.queue.push(command, true).map_err(|(_, refused)| refused.into_error())?;
        Ok(Connection(connection))
    }

    /// Returns the memory pool.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.0.0.pool
    }

    /// Returns the counters of the fabric.
    #[must_use]
    pub fn stats(&self) -> FabricStats {
        self.0.0.counters.read()
    }

    /// Closes all connections, then worker, memory and context, and waits for the thread to finish.
    ///
    /// Every connection receives `ended`. Resources that UCX has not released `within` this time are leaked. Blocks, so
    /// do not call it on an async worker thread, and never from [`ConnectionEvents`].
    ///
    /// Returns `true` if everything was released.
    #[allow(clippy::must_use_candidate, reason = "callers seldom need to know whether resources were leaked")]
    pub fn shutdown(&self, within: Duration) -> bool {
        let shared = &self.0.0;
        // Fails only if the fabric has ended already.
        let _ = shared.queue.push_always(Command::Shutdown(within), true);
        shared.wait_for_end(within + SHUTDOWN_MARGIN_TIMEOUT).unwrap_or(false)
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric")
            .field("library", self.library())
            .field("listen_address", &self.listen_address())
            .finish_non_exhaustive()
    }
}

impl Drop for ShutdownOnDrop {
    fn drop(&mut self) {
        // Fails only if the fabric has ended already.
        let _ = self.0.queue.push_always(Command::Shutdown(DROP_TIMEOUT), true);
    }
}
