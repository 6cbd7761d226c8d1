//! The frame decoder without a connection, for fuzzers.

use gym_core::Result;
use gym_core::message::frame::MessageLimits;
use gym_core::transport::mux::header::read_failed;
use gym_core::transport::mux::{Handshake, RequestHeader, ResponseHeader};

use crate::frames::buffers::ReceiveBufferPool;
use crate::frames::codec::decoder::{Decoder, Event};
use crate::frames::codec::frame::FrameKind;

/// Decodes bytes that a peer might have sent, in pieces of at most `at_a_time` bytes, and keeps every message that is within the
/// limits. Returns the number of bytes of the complete messages.
///
/// # Errors
/// The error that would have ended the connection.
pub fn read_frames(bytes: &[u8], limits: &MessageLimits, at_a_time: usize) -> Result<usize> {
    let mut decoder = Decoder::new(limits.clone(), ReceiveBufferPool::new(0), &[]);
    let (mut left, mut complete) = (bytes, 0);
    loop {
        while let Some(event) = decoder.next()? {
            match event {
                Event::Handshake(greeting) => {
                    Handshake::read(greeting)?;
                }
                Event::Start(start) => {
                    match start.kind {
                        FrameKind::Request => drop(RequestHeader::read(start.header)?),
                        _ => drop(ResponseHeader::read(start.header)?),
                    }
                    decoder.keep();
                }
                Event::Complete(message) => {
                    complete += message.head.len() + message.segments.iter().map(bytes::Bytes::len).sum::<usize>();
                }
                Event::Failed(_, reason) => drop(read_failed(reason)?),
                Event::Segment(_) | Event::Cancel(_) | Event::Heartbeat | Event::Drain => {}
            }
        }
        let space = decoder.space();
        let count = space.len().min(at_a_time).min(left.len());
        if count == 0 {
            return Ok(complete);
        }
        space[..count].copy_from_slice(&left[..count]);
        left = &left[count..];
        decoder.advance(count);
    }
}
