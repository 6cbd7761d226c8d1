//! Events that the fabric reports to the owner of a connection.

use bytes::Bytes;
use gym_core::{Error, Result};

use crate::fabric::handle::connection::Connection;
use crate::fabric::lanes::Lanes;

/// Receives the events of one connection. The fabric calls it on its thread.
///
/// - **Order.** `opened`, then `message` and `landed`, then `ended` exactly once. `ended` is called even if `opened`
///   never was.
/// - **Time.** Every method must return soon and must not block. Every method may post to any connection.
/// - **Errors.** A panic ends the connection.
pub trait ConnectionEvents: Send + Sync + 'static {
    /// The peer has shown its token, or has accepted this end's token.
    fn opened(&self, connection: &Connection, lanes: &Lanes);

    /// An active message has arrived. Ordered messages arrive in the order in which the peer posted them. An announced
    /// payload does not delay the messages behind it while it is received.
    ///
    /// # Errors
    /// An error ends the connection with [`CloseReason::Lost`].
    fn message(&self, header: &[u8], payload: Payload<'_>) -> Result<Disposition>;

    /// The payload of a message for which `message` returned [`Disposition::Land`] has been received completely.
    /// Payloads can complete in any order.
    fn landed(&self, key: u64, bytes: Bytes);

    /// The connection has ended; no event follows. `done` of every unsent message has been called with an error.
    fn ended(&self, why: CloseReason);
}

/// The payload of an active message that has arrived.
#[derive(Debug)]
pub enum Payload<'a> {
    /// The payload came with the header.
    Eager(EagerBytes<'a>),
    /// The peer announces a payload of this length in bytes. Nothing has been allocated for it.
    Announced(u64),
}

/// Bytes that arrived with their header.
#[derive(Debug)]
pub enum EagerBytes<'a> {
    /// Bytes in UCX's receive buffer, valid until `message` returns.
    Borrowed(&'a [u8]),
    /// A copy, made because the message arrived out of order.
    Owned(Bytes),
}

impl EagerBytes<'_> {
    /// Returns the bytes without a copy.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Owned(bytes) => bytes,
        }
    }

    /// Returns owned bytes, copied if they are borrowed.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        match self {
            Self::Borrowed(bytes) => Bytes::copy_from_slice(bytes),
            Self::Owned(bytes) => bytes,
        }
    }
}

/// Disposition of a payload by the fabric.
#[derive(Debug)]
pub enum Disposition {
    /// No further action: the payload was consumed or is not wanted. The sender's `done` is called in both cases.
    Done,
    /// Receive the payload into a buffer of the fabric's pool, then call `landed` with this key. The buffer is taken
    /// when receiving begins. Bytes that came with the header are copied, and `landed` is called at once.
    Land {
        /// Passed to `landed`.
        key: u64,
    },
}

/// Reason why a connection ended.
#[derive(Debug)]
pub enum CloseReason {
    /// This end called [`Connection::close`], or the fabric was shut down.
    Closed,
    /// The peer closed the connection, and everything that it posted before has arrived.
    ClosedByPeer,
    /// The connection broke: `Unavailable` if the peer is lost or never connected, `DataLoss` if it violated the
    /// protocol.
    Lost(Error),
}
