//! Ordered transport: many concurrent calls over one connection, delivered in the order in which they were sent.
//!
//! ```text
//!  Channel ── MuxLink ── FrameSendQueue ──► socket ──► Decoder ── serve ── Handler
//!     ▲     slot ▸ reply capacity ▸ request capacity                          │
//!     └── oneshot ◄── Decoder ◄── socket ◄── FrameSendQueue ◄─────────────────┘
//! ```
//!
//! Everything that calls need besides sockets is in [`gym_core::transport::mux`].
//!
//! | scheme | connection | for |
//! |---|---|---|
//! | `http+frames://host:port` | an upgraded HTTP/1.1 connection, on the port of [`HttpListener`](crate::http1::HttpListener) | workers on other machines |
//! | `unix+frames:///path` | the same frames over a Unix socket, from the first byte | processes of one machine and user |
//!
//! - **Order.** Requests arrive in the order in which `send` returned. Messages are sent whole, one after another.
//! - **Liveness.** Heartbeats, cancels and refusals are sent between the chunks of a message, so they never wait behind a gigabyte. A
//!   peer that is silent for `silence_max` counts as lost; one that crashed is noticed at once.
//! - **Capacity.** A call waits for a slot, for reply capacity and for request capacity, in this order, before it sends anything. Both
//!   ends always read, so two ends without capacity cannot block each other.
//! - **Copies.** Sending copies nothing above 2 KiB. Receiving copies once, in the kernel, into a reused buffer aligned to 64 bytes.
//! - **Hostile bytes** end the connection with `DataLoss`. Every length is checked before memory is allocated for it.

mod buffers;
mod codec;
pub(crate) mod config;
pub(crate) mod connection;
pub(crate) mod connector;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(test)]
mod tests;
mod unix;

pub use config::FramesConfig;
pub use connector::FramesConnector;
pub use unix::{UnixIncoming, UnixListener};

/// The scheme of framed connections over TCP: `http+frames://host:port`.
pub const FRAMES_SCHEME: &str = "http+frames";
/// The scheme of framed connections over a Unix socket: `unix+frames:///path`.
pub const UNIX_SCHEME: &str = "unix+frames";
