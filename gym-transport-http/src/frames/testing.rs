//! A connection's reader without a connection, for fuzzers.

use gym_core::Result;
use gym_core::frame::Limits;
use gym_core::mux::header::read_failed;
use gym_core::mux::{Greeting, RequestHeader, ResponseHeader};

use super::decode::{Decoder, Event};
use super::layout::Kind;
use super::pool::LandingPool;

/// Reads what a peer might have sent, in pieces of at most `at_a_time` bytes, and keeps every message that is within the
/// limits. Returns the bytes of the messages that were complete.
///
/// # Errors
/// What would have ended the connection.
pub fn read_frames(bytes: &[u8], limits: &Limits, at_a_time: usize) -> Result<usize> {
    let mut decoder = Decoder::new(limits.clone(), LandingPool::new(0), &[]);
    let (mut left, mut landed) = (bytes, 0);
    loop {
        while let Some(event) = decoder.next()? {
            match event {
                Event::Greeting(greeting) => {
                    Greeting::read(greeting)?;
                }
                Event::Opening(opening) => {
                    match opening.kind {
                        Kind::Request => drop(RequestHeader::read(opening.header)?),
                        _ => drop(ResponseHeader::read(opening.header)?),
                    }
                    decoder.keep()?;
                }
                Event::Landed(message) => {
                    landed += message.head.len() + message.segments.iter().map(bytes::Bytes::len).sum::<usize>();
                }
                Event::Failed(_, reason) => drop(read_failed(reason)?),
                Event::Cancel(_) | Event::Heartbeat | Event::Drain => {}
            }
        }
        let space = decoder.space();
        let count = space.len().min(at_a_time).min(left.len());
        if count == 0 {
            return Ok(landed);
        }
        space[..count].copy_from_slice(&left[..count]);
        left = &left[count..];
        decoder.advance(count);
    }
}
