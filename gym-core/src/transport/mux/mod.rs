//! Building blocks of an ordered transport: many concurrent calls over one connection, independent of the way in which bytes are
//! moved.
//!
//! ```text
//!  Channel ── MuxLink ── CallingEnd ──► MessageSender ═══ the transport ═══► AnsweringEnd ── Handler
//!     ▲                 slot ▸ reply bytes ▸ request bytes                 admission, one task per call │
//!     └── oneshot ◄── CallingEnd ◄═══ the transport ═══ MessageSender ◄─────────────────────────────────┘
//! ```
//!
//! The transport provides a [`MessageSender`] for each direction and reads incoming bytes. It calls the two ends as plain
//! objects: their `on_…` methods neither wait nor block. A task that reads a socket may therefore call them, and so may a thread
//! that polls a network card.
//!
//! | the transport | the ends |
//! |---|---|
//! | connects and exchanges [`Handshake`]s | keep to the limits of both sides |
//! | numbers requests, sends messages whole and in order | wait for capacity, write headers, match responses to callers |
//! | splits messages, lets [urgent ones](MessageSender#urgent) overtake | cancel dropped calls, reject calls beyond capacity |
//! | checks message lengths, allocates wanted messages, and passes them on complete | decide whether a message is wanted before it arrives |
//! | passes requests on in the order in which they were sent | run requests and send responses |
//! | reports that the connection has ended | report the end to every caller once |
//!
//! The calling side needs [`CallingEnd::new`], [`heartbeat`] in a task that ends with [`CallingEnd::over`], and a [`MuxLink`] for
//! the channel. The answering side needs [`AnsweringEnd::new`], [`AnsweringEnd::end_on_drop`] held by the future that serves,
//! [`heartbeat`] and [`AnsweringEnd::drain_with`].

mod answering;
mod calling;
mod capacity;
pub mod header;
mod heartbeat;
mod limits;
mod link;
mod sender;
#[cfg(test)]
mod tests;
mod waiting;

pub use answering::{AnsweringEnd, EndOnDrop};
pub use calling::CallingEnd;
pub use capacity::CapacityPermit;
pub use header::{RequestHeader, ResponseHeader, malformed};
pub use heartbeat::{PeerActivity, heartbeat};
pub use limits::{ConnectionLimits, Handshake};
pub use link::MuxLink;
pub use sender::{Flush, MessageSender};

/// Number of concurrent calls from which messages are sent in groups, because no single caller waits for one message alone.
const CROWD: usize = 8;
