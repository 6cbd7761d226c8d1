//! One connection: messages of many calls at a time as parcels over a fabric.
//!
//! ```text
//!  CallingEnd ─ Outbox ─┐  opening: header ‖ head ‖ small segments    eager      ┌─ Inbox ─ AnsweringEnd ─ Handler
//!                       ├─ piece:   one large segment, as it lies     rendezvous ┤
//!             ◀─ Inbox ─┘  cancel, failed, drain, ping, pong          urgent     └─ Outbox ◀─
//! ```
//!
//! What the calls of both ends need is [`gym_core::mux`]; this is what a fabric needs to carry them: a message is cut by a
//! plan that both ends make from its lengths, so the opening says everything, and a large segment leaves from where it
//! lies and lands in a buffer of the pool. Requests are handed over in order, whichever of them is complete first.

mod answerer;
mod assembly;
mod caller;
mod desk;
#[cfg(feature = "testing")]
pub(crate) mod fuzzing;
mod inbox;
mod outbox;
mod plan;
mod pulse;
#[cfg(test)]
mod tests;
mod wire;

pub(crate) use answerer::{Answerer, Opened};
pub(crate) use caller::{Caller, Greeted};
pub(crate) use inbox::CUT_BYTES;
pub(crate) use outbox::{Answers, Outbox, POSTED_MAX, Watched};
pub use pulse::RoundTrips;
