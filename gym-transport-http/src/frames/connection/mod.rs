//! One framed connection over a stream socket: the calling and the answering end, their handshake, and the send queue.

pub(crate) mod answering;
pub(crate) mod calling;
mod handshake;
pub(crate) mod send_queue;
pub(crate) mod socket;
