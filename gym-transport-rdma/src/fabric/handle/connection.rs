//! Handle of a connection.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gym_core::{Code, Error, Result};

use crate::fabric::handle::command::{Command, FabricShared};
use crate::fabric::handle::message::{ActiveMessage, Delivery};
use crate::fabric::handle::stats::{ConnectionCounters, ConnectionStats};
use crate::fabric::lanes::Lanes;
use crate::fabric::protocol::identity::ConnectionId;
use crate::fabric::protocol::prefix::{HEADER_BYTES_MAX, URGENT_BYTES_MAX};

/// Handle of one connection. Cheap to clone.
///
/// Dropping it has no effect: the connection ends with [`Connection::close`], by the peer, or with the fabric.
#[derive(Clone)]
pub struct Connection(pub(crate) Arc<ConnectionShared>);

/// State of one connection that the thread and the handles share.
pub(crate) struct ConnectionShared {
    id: ConnectionId,
    shared: Arc<FabricShared>,
    pub(crate) ended: AtomicBool,
    /// An orderly close was requested.
    closing: AtomicBool,
    /// An abort was requested.
    aborting: AtomicBool,
    pub(crate) lanes: OnceLock<Lanes>,
    pub(crate) counters: ConnectionCounters,
}

impl ConnectionShared {
    pub(crate) fn new(id: ConnectionId, shared: Arc<FabricShared>) -> Self {
        Self {
            id,
            shared,
            ended: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            aborting: AtomicBool::new(false),
            lanes: OnceLock::new(),
            counters: ConnectionCounters::default(),
        }
    }

    pub(crate) fn id(&self) -> ConnectionId {
        self.id
    }
}

impl Connection {
    /// Posts a message to the fabric; never blocks. If it returns an error, `done` is not called.
    ///
    /// # Errors
    /// All `NotStarted`:
    /// - `ResourceExhausted` if the queue is full. Its bound is far above what bounded callers can fill, and a full
    ///   queue still accepts [`Connection::close`].
    /// - `InvalidArgument` if the header or an urgent payload is too long.
    /// - `Unavailable` if the connection or the fabric has ended.
    pub fn post(&self, message: ActiveMessage) -> Result<()> {
        let urgent = message.delivery == Delivery::Urgent;
        if message.header.len() > HEADER_BYTES_MAX {
            let found = message.header.len();
            return Err(Error::invalid(format!("header of {found} bytes; the maximum is {HEADER_BYTES_MAX}")));
        }
        if urgent && message.payload.len() > URGENT_BYTES_MAX {
            let found = message.payload.len();
            return Err(Error::invalid(format!("urgent payload of {found} bytes; the maximum is {URGENT_BYTES_MAX}")));
        }
        if self.0.ended.load(Ordering::Acquire) {
            return Err(connection_ended());
        }
        self.0.shared.queue.push(Command::Post(self.0.id, message), urgent).map_err(|(_, refused)| refused.into_error())
    }

    /// Closes the connection and calls `ended`.
    ///
    /// Messages posted before are sent within `grace`, then the peer is notified. After `grace` the connection is
    /// aborted. `Duration::ZERO` aborts at once and drops unsent messages. Only the first non-zero grace takes effect.
    pub fn close(&self, grace: Duration) {
        let at_once = grace.is_zero();
        let requested = if at_once { &self.0.aborting } else { &self.0.closing };
        // At most one command of each kind, which bounds their number. A second one would have no effect.
        if !requested.swap(true, Ordering::Relaxed) {
            // Fails only if the fabric has ended, and the connection with it.
            let _ = self.0.shared.queue.push_always(Command::Close(self.0.id, grace), at_once);
        }
    }

    /// Returns the id that this end has chosen.
    #[must_use]
    pub fn id(&self) -> ConnectionId {
        self.0.id
    }

    /// Returns the transports that UCX negotiated; `None` until the connection is open.
    #[must_use]
    pub fn lanes(&self) -> Option<&Lanes> {
        self.0.lanes.get()
    }

    /// Returns the counters of the connection.
    #[must_use]
    pub fn stats(&self) -> ConnectionStats {
        self.0.counters.read()
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("id", &self.0.id).field("lanes", &self.lanes()).finish_non_exhaustive()
    }
}

pub(crate) fn connection_ended() -> Error {
    Error::not_started(Code::Unavailable, "the connection has ended")
}
