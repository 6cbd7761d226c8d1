//! What sends.

use std::fmt;

use bytes::BytesMut;

use super::room::Room;
use crate::error::Result;
use crate::message::Message;

/// The sending half of one connection, which a transport implements. Nothing here waits: what cannot leave at once is kept,
/// which the limits of both ends bound. Nothing here fails either: a connection that breaks ends, and its end is told.
///
/// Messages arrive whole and in the order in which they were posted. After [`Outbox::close`] everything is dropped.
///
/// # Urgent
/// [`post_failed`](Outbox::post_failed), [`post_drain`](Outbox::post_drain), [`post_heartbeat`](Outbox::post_heartbeat) and
/// [`cancel`](Outbox::cancel) must not wait behind a message of a gigabyte: they may overtake messages that were posted before.
pub trait Outbox: fmt::Debug + Send + Sync + 'static {
    /// Bytes that stay free at the start of every header, for what the transport writes there.
    const HEADROOM: usize;

    /// Sends a request: `header` (after [`Outbox::HEADROOM`] bytes), then the message's head and segments as they are.
    ///
    /// It gets the next number, from 1 on, in the order of posting. `register` is told it before anybody else can learn it, and
    /// may refuse, which uses no number up. `room` is dropped when the last byte is on its way, or never will be. `crowded`:
    /// others will follow at once, so it may be left to whoever sends many together.
    ///
    /// # Errors
    /// What `register` returned.
    fn post_request(
        &self,
        header: BytesMut,
        message: &Message,
        room: Room,
        crowded: bool,
        register: impl FnOnce(u64) -> Result<()>,
    ) -> Result<u64>;

    /// Sends the answer of a call, in the same form.
    fn post_response(&self, call: u64, header: BytesMut, message: &Message, room: Room, crowded: bool);

    /// Sends, urgently, why a call has no answer; `reason` begins with headroom, as a header does. `room` is dropped when it is
    /// on its way, or never will be.
    fn post_failed(&self, call: u64, reason: BytesMut, room: Room);

    /// Takes back a request that has not begun to leave, or sends a cancel, which must arrive after the request's beginning.
    ///
    /// `reply` is the answer's room. Of an answer that is on its way already, what takes memory still takes it: a transport that
    /// cannot stop that drops the room when it has ended, any other at once.
    fn cancel(&self, call: u64, reply: Room);

    /// Sends, urgently, that this end takes no new calls.
    fn post_drain(&self);

    /// Sends, urgently, a sign of life; need not if anything else has left since the last time or is about to.
    fn post_heartbeat(&self);

    /// Drops what has not left and ends the connection. May be called more than once.
    fn close(&self);
}
