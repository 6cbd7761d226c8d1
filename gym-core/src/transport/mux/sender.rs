//! The sending half of a connection, which a transport implements.

use std::fmt;

use bytes::BytesMut;

use super::capacity::CapacityPermit;
use crate::base::error::Result;
use crate::message::Message;

/// When a posted message is passed to the wire. Each message that is sent at once wakes the peer; messages that are sent together wake it
/// once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// At once.
    Now,
    /// After the tasks that are ready, which are about to post other messages.
    Soon,
    /// With the next message that does not wait, at the next [`MessageSender::flush`], when some dozens wait, or after a millisecond: the caller
    /// has started many calls and waits for none of them yet.
    Later,
}

/// The sending half of one connection, implemented by a transport and called by [`CallingEnd`](super::CallingEnd) and
/// [`AnsweringEnd`](super::AnsweringEnd).
///
/// - **Order.** Messages arrive whole and in the order in which they were posted, except urgent ones (below).
/// - **Waiting.** No method waits. Messages that cannot be sent at once are queued; the limits of both ends bound the queue.
/// - **Errors.** No method fails because of the connection. A broken connection ends, and the transport reports that to its end.
/// - **End.** After [`MessageSender::close`], everything posted is dropped.
///
/// # Urgent
/// [`post_failed`](MessageSender::post_failed), [`post_drain`](MessageSender::post_drain),
/// [`post_heartbeat`](MessageSender::post_heartbeat) and [`cancel`](MessageSender::cancel) must not wait behind a message of a
/// gigabyte: they may overtake messages that were posted before.
pub trait MessageSender: fmt::Debug + Send + Sync + 'static {
    /// Bytes that stay free at the start of every header, for the transport's own header.
    const HEADROOM: usize;

    /// Sends a request: `header` (after [`MessageSender::HEADROOM`] bytes), then the head and the segments of the message,
    /// unchanged.
    ///
    /// The request gets the next number, from 1 on, in the order of posting.
    /// - `register` receives the number before the peer can, and may reject the request, which then uses no number.
    /// - `permit` is dropped when the last byte has been passed to the wire, or never will be.
    ///
    /// # Errors
    /// The error that `register` returned.
    fn post_request(
        &self,
        header: BytesMut,
        message: &Message,
        permit: CapacityPermit,
        flush: Flush,
        register: impl FnOnce(u64) -> Result<()>,
    ) -> Result<u64>;

    /// Sends the response of a call, in the same form.
    fn post_response(&self, call: u64, header: BytesMut, message: &Message, permit: CapacityPermit, flush: Flush);

    /// Sends the requests that were posted with [`Flush::Later`]. The default does nothing, for transports that hold no message.
    fn flush(&self) {}

    /// Sends the reason why a call has no response, urgently. `reason` begins with headroom, as a header does. `permit` is
    /// dropped when the reason has been passed to the wire, or never will be.
    fn post_failed(&self, call: u64, reason: BytesMut, permit: CapacityPermit);

    /// Removes a request of which no byte was sent, or sends a cancel, which must arrive after the request's beginning.
    ///
    /// `reply` is the permit of the response. A response that is already arriving keeps its memory: a transport that cannot stop
    /// it drops the permit once the response has arrived. Any other transport drops the permit at once.
    fn cancel(&self, call: u64, reply: CapacityPermit);

    /// Announces that this end accepts no new calls, urgently.
    fn post_drain(&self);

    /// Sends a heartbeat, urgently, unless another message was sent since the last heartbeat or is about to be sent.
    fn post_heartbeat(&self);

    /// Drops everything that was not sent and ends the connection. May be called more than once.
    fn close(&self);
}
