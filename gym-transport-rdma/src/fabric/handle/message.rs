//! Active messages that a caller posts.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use gym_core::Result;

#[cfg(doc)]
use crate::fabric::protocol::prefix::{HEADER_BYTES_MAX, URGENT_BYTES_MAX};

/// A header and a payload that are sent as one UCX active message.
pub struct ActiveMessage {
    /// Header of at most [`HEADER_BYTES_MAX`] bytes.
    pub header: Bytes,
    /// Payload, which is not copied if it is long. UCX reads it until `done` is called.
    pub payload: Bytes,
    /// Delivery class.
    pub delivery: Delivery,
    /// Called once, on the fabric's thread, when header and payload are no longer needed.
    ///
    /// `Ok`: the network or the peer has received the message, which does not mean that the peer has *processed* it.
    /// `Err`: the message will never be sent.
    pub done: Option<SentCallback>,
}

impl std::fmt::Debug for ActiveMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (header, payload) = (self.header.len(), self.payload.len());
        write!(f, "ActiveMessage({:?}, header {header}, payload {payload})", self.delivery)
    }
}

/// Callback of a sent message: see [`ActiveMessage::done`].
pub type SentCallback = Box<dyn FnOnce(Result<()>) + Send>;

/// The delivery class of an active message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Delivered in the order of posting.
    Ordered,
    /// Sent and delivered as soon as possible. At most [`URGENT_BYTES_MAX`] bytes.
    Urgent,
}

/// Calls `done`, and catches a panic, because the caller may be UCX and no panic may unwind through UCX.
pub(crate) fn finish(done: Option<SentCallback>, result: Result<()>) {
    if let Some(done) = done
        && catch_unwind(AssertUnwindSafe(|| done(result))).is_err()
    {
        tracing::error!("sent callback panicked");
    }
}
