//! Functions of both ends of a connection: waits for the peer's handshake, and creates the error of a failed socket.

use gym_core::transport::mux::{Handshake, malformed};
use gym_core::{Code, Error, Result};
use tokio::io::AsyncReadExt;

use crate::frames::codec::decoder::{Decoder, Event};
use crate::frames::connection::socket::ReadHalf;

/// Reads until the peer's handshake has arrived.
pub(super) async fn greeting(read: &mut ReadHalf, decoder: &mut Decoder) -> Result<Handshake> {
    loop {
        match decoder.next()? {
            Some(Event::Handshake(payload)) => return Handshake::read(payload),
            Some(_) => return Err(malformed("the first frame is not a greeting")),
            None => {}
        }
        match read.read(decoder.space()).await {
            Ok(0) => return Err(Error::unknown(Code::Unavailable, "the peer left before its greeting")),
            Ok(count) => decoder.advance(count),
            Err(error) => {
                return Err(Error::unknown(Code::Unavailable, "no greeting came").caused_by(error));
            }
        }
    }
}

/// Returns the error of a failed or closed socket.
pub(super) fn broken(error: Option<std::io::Error>) -> Error {
    let said = Error::unknown(Code::Unavailable, "the connection broke");
    match error {
        Some(error) => said.caused_by(error),
        None => said,
    }
}
