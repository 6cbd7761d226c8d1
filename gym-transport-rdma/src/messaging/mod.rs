//! Messages of many concurrent calls over one connection of a fabric.
//!
//! ```text
//!  CallingEnd ─ UcxSendQueue ─┐  first chunk: header ‖ head ‖ small segments  eager      ┌─ RequestQueue ─ AnsweringEnd ─ Handler
//!                             ├─ chunk:       one large segment, not copied   rendezvous ┤
//!             ◀─ Reassembly ──┘  cancel, failed, drain, ping, pong            urgent     └─ UcxSendQueue ◀─
//! ```
//!
//! [`gym_core::transport::mux`] implements the calls of both ends. This module carries their messages over a fabric. It
//! splits a message into chunks by a [layout] that both ends compute from the message's lengths, so the first chunk
//! describes the whole message. A large segment is sent without a copy and received into a buffer of the pool. Requests
//! are passed on in the order in which they were sent, whichever is complete first.

pub(crate) mod answering;
pub(crate) mod calling;
#[cfg(feature = "testing")]
pub(crate) mod fuzzing;
mod header;
pub(crate) mod layout;
mod reassembly;
pub(crate) mod round_trips;
pub(crate) mod send_queue;
#[cfg(test)]
mod tests;

/// Active messages of one connection that the fabric holds at a time.
///
/// Enough to keep any network busy. Few enough that hundreds of connections do not fill the fabric's queue. A request
/// that is cancelled early can then be removed from the send queue.
pub(crate) const IN_FLIGHT_MAX: usize = 128;
