//! The ordered transport: many calls at a time over one connection, in the order in which they were sent.
//!
//! ```text
//!  Channel ── MuxLink ── FramesOutbox ──► socket ──► Decoder ── serve ── Handler
//!     ▲        slot ▸ reply room ▸ bytes                                     │
//!     └── oneshot ◄── Decoder ◄── socket ◄── FramesOutbox ◄──────────────────┘
//! ```
//!
//! What the calls of both ends need besides sockets is [`gym_core::mux`].
//!
//! | scheme | is | for |
//! |---|---|---|
//! | `http+frames://host:port` | an upgraded HTTP/1.1 connection, on the port of [`HttpListener`](crate::HttpListener) | workers on other machines |
//! | `unix+frames:///path` | the same frames over a Unix socket, from the first byte | processes of one machine and user |
//!
//! - **Order.** Requests arrive in the order in which `send` returned. Messages leave whole, one after another.
//! - **Liveness.** Heartbeats, cancels and refusals go between the chunks of a message: they never wait behind a gigabyte. A peer
//!   that is silent for `silence_max` is gone; one that crashed is at once.
//! - **Room.** A call waits for a slot, for room for its reply and for room for its request, in this order, before anything
//!   leaves. Both ends always read, so two full ends cannot block each other.
//! - **Copies.** Sent: none above 2 KiB. Received: one, by the kernel, into a buffer aligned to 64 bytes that is used again.
//! - **Hostile bytes** end the connection with `DataLoss`; every length is checked before anything is allocated for it.

mod config;
mod connector;
mod decode;
mod layout;
mod link;
mod outbox;
mod pool;
mod serve;
mod socket;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(test)]
mod tests;
mod unix;

pub use config::FramesConfig;
pub use connector::FramesConnector;
pub(crate) use connector::{ROUTE, UPGRADE};
pub(crate) use serve::{Hall, serve};
pub(crate) use socket::Socket;
pub use unix::{UnixIncoming, UnixListener};

/// The scheme of framed connections over TCP: `http+frames://host:port`.
pub const FRAMES_SCHEME: &str = "http+frames";
/// The scheme of framed connections over a Unix socket: `unix+frames:///path`.
pub const UNIX_SCHEME: &str = "unix+frames";
