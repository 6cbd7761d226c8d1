//! What an ordered transport does, whatever moves its messages: the material to build one from.
//!
//! ```text
//!  Channel ── MuxLink ── CallingEnd ──► Outbox ═══ the transport ═══► AnsweringEnd ── Handler
//!     ▲                 slot ▸ reply room ▸ bytes                     admission, one task a call │
//!     └── oneshot ◄── CallingEnd ◄═══ the transport ═══ Outbox ◄─────────────────────────────────┘
//! ```
//!
//! The transport brings an [`Outbox`] each way and reads what comes. It calls the two ends as plain objects: their `on_…`
//! methods neither wait nor block, so a task that reads a socket may call them, and so may a thread that polls a network card.
//!
//! | the transport | the ends |
//! |---|---|
//! | connects, exchanges [`Greeting`]s | keep to the limits of both |
//! | numbers requests, sends messages whole and in order | wait for room, write headers, know who awaits which answer |
//! | cuts messages, lets [what is urgent](Outbox#urgent) pass | cancel what is dropped, refuse what has no room |
//! | checks the lengths of a message, allocates what is wanted, and hands it over complete | say whether a message is wanted before it is there |
//! | hands requests over in the order in which they were sent | run them, and answer |
//! | says that the connection is over | tell everybody, once, what that means |
//!
//! On the calling end: [`CallingEnd::new`], [`heartbeat`] in a task that ends with [`CallingEnd::over`], and a [`MuxLink`] for
//! the channel. On the answering end: [`AnsweringEnd::new`], [`AnsweringEnd::end_on_drop`] held by the future that serves,
//! beside [`heartbeat`] and [`AnsweringEnd::drain_with`].

mod answering;
mod calling;
pub mod header;
mod limits;
mod link;
mod outbox;
mod pulse;
mod room;
#[cfg(test)]
mod tests;

pub use answering::{AnsweringEnd, EndOnDrop};
pub use calling::CallingEnd;
pub use header::{RequestHeader, ResponseHeader, malformed};
pub use limits::{Greeting, Limits};
pub use link::MuxLink;
pub use outbox::Outbox;
pub use pulse::{Heard, heartbeat};
pub use room::Room;

/// Calls under way from which on nobody waits for one message alone: better to send many at once.
const CROWD: usize = 8;
