//! Events that the fabric reports to the owner of a connection.

use bytes::Bytes;
use gym_core::{Error, Result};

use crate::fabric::handle::connection::Connection;
use crate::fabric::lanes::Lanes;

/// Receives the events of one connection, on the fabric's thread.
///
/// - **Order.** `opened`, then `message` and `landed`, then `ended` exactly once as the last, even if `opened` never came.
/// - **Time.** Every method must return soon and never block. All of them may post to any connection.
/// - **Errors.** A panic ends the connection.
pub trait ConnectionEvents: Send + Sync + 'static {
    /// The peer has shown its token, or has accepted ours.
    fn opened(&self, connection: &Connection, lanes: &Lanes);

    /// An active message has arrived. Ordered messages arrive in the order in which the peer posted them. An announced payload
    /// that is still being received does not delay the messages behind it.
    ///
    /// # Errors
    /// End the connection with [`CloseReason::Lost`].
    fn message(&self, header: &[u8], payload: Payload<'_>) -> Result<Disposition>;

    /// The payload of a message that was answered with [`Disposition::Land`] has been received completely. Several payloads may
    /// complete in another order than they began.
    fn landed(&self, key: u64, bytes: Bytes);

    /// The connection has ended; no event follows. For messages that were not sent yet, `done` has been called with an error.
    fn ended(&self, why: CloseReason);
}

/// The payload of an active message that has arrived.
#[derive(Debug)]
pub enum Payload<'a> {
    /// It came with the header.
    Eager(EagerBytes<'a>),
    /// The peer holds it ready and announces its length in bytes. Nothing has been allocated for it.
    Announced(u64),
}

/// Bytes that arrived with their header.
#[derive(Debug)]
pub enum EagerBytes<'a> {
    /// They lie in UCX's receive buffer until `message` returns.
    Borrowed(&'a [u8]),
    /// They were copied already, because they arrived out of order.
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

    /// Returns bytes to keep: a copy, unless they were copied already.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        match self {
            Self::Borrowed(bytes) => Bytes::copy_from_slice(bytes),
            Self::Owned(bytes) => bytes,
        }
    }
}

/// What the fabric does with a payload.
#[derive(Debug)]
pub enum Disposition {
    /// Nothing more: the payload was taken, or is not wanted. The sender's `done` is called either way.
    Done,
    /// Receive the payload into a buffer of the fabric's pool, which is taken when receiving begins, then call `landed` with this
    /// key. Bytes that came with the header are copied, and `landed` is called at once.
    Land {
        /// Passed to `landed`.
        key: u64,
    },
}

/// Why a connection ended.
#[derive(Debug)]
pub enum CloseReason {
    /// [`Connection::close`] was called here, or the fabric was shut down.
    Closed,
    /// The peer closed it in an orderly way: everything that it posted before has arrived.
    ClosedByPeer,
    /// It broke. `Unavailable` when the peer is lost or never came; `DataLoss` when it violated the protocol.
    Lost(Error),
}
