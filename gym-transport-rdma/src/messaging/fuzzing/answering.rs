//! Fuzz target: an answering end whose peer is the input.

use bytes::{Buf, Bytes};
use gym_core::message::frame::MessageLimits;
use gym_core::transport::mux::header::put_request;
use gym_core::{CallContext, Result, Route, Verb};

use crate::fabric::{Disposition, EagerBytes, Payload};
use crate::messaging::answering::request_queue::RequestQueue;
use crate::messaging::fuzzing::{PayloadsInFlight, byte, first_chunk, parts, raw, raw_announced};
use crate::messaging::header::{AmHeader, AmKind};
use crate::messaging::reassembly::Reassembly;

/// Chunks and cancellations refer to one of this many recent calls, or to the next one.
const CALLS: u8 = 8;

/// State of an answering end under fuzzing.
struct Session {
    requests: RequestQueue,
    in_flight: PayloadsInFlight,
    /// Last generated call number.
    last: u64,
}

impl Session {
    /// Returns the number of a recent call.
    fn call(&self, input: &mut &[u8]) -> u64 {
        self.last.saturating_sub(u64::from(byte(input) % CALLS)) + 1
    }

    fn message(&mut self, am: AmHeader, payload: &Payload<'_>) -> Result<()> {
        match am.kind {
            AmKind::Request | AmKind::HeaderRest => {
                if let Some(first_chunk) = self.requests.begin(am, payload)? {
                    self.requests.keep(first_chunk)?;
                }
            }
            AmKind::Chunk => {
                if let Disposition::Land { key } = self.requests.chunk(am, payload)? {
                    self.in_flight.land(key, payload)?;
                }
            }
            AmKind::Cancel => {
                self.requests.cancel(am.call)?;
            }
            _ => {}
        }
        while self.requests.next().is_some() {}
        Ok(())
    }

    /// Delivers the next message of the input, raw or valid, as its first byte selects.
    fn step(&mut self, input: &mut &[u8]) -> Result<()> {
        match byte(input) % 6 {
            0 => {
                let (am, payload) = raw(input)?;
                self.message(am, &payload)
            }
            1 => {
                let (am, payload) = raw_announced(input)?;
                self.message(am, &payload)
            }
            2 => {
                // Seldom a number that was used before.
                self.last += u64::from(byte(input) > 8);
                let call = self.last;
                let (am, payload, chunks) = request(call, &parts(input));
                self.in_flight.chunks.insert(call, chunks);
                self.message(am, &Payload::Eager(EagerBytes::Owned(payload)))
            }
            3 => {
                let call = self.call(input);
                let (am, payload) = self.in_flight.chunk(call, input);
                self.message(am, &payload)
            }
            4 => {
                let cancel = AmHeader::bare(AmKind::Cancel, self.call(input));
                self.message(cancel, &Payload::Eager(EagerBytes::Borrowed(&[])))
            }
            _ => {
                if let Some((key, bytes)) = self.in_flight.landed(input) {
                    self.requests.landed(key, bytes);
                }
                Ok(())
            }
        }
    }
}

/// Delivers the active messages that the input describes to an answering end, with payloads in any order. Returns the
/// total bytes of the buffers that were taken for them.
///
/// # Errors
/// The error that would have ended the connection.
pub fn take_requests(mut input: &[u8], limits: &MessageLimits) -> Result<usize> {
    let requests = RequestQueue::new(Reassembly::new(limits.clone(), limits.message_bytes_max));
    let mut session = Session { requests, in_flight: PayloadsInFlight::default(), last: 0 };
    while input.has_remaining() {
        session.step(&mut input)?;
    }
    Ok(session.in_flight.taken)
}

/// Generates a request's first chunk for a head and segments of these lengths, and the lengths of its chunks.
fn request(call: u64, parts: &[usize]) -> (AmHeader, Bytes, Vec<usize>) {
    let context = CallContext::default();
    let header = |message: &_| put_request(0, Verb::Post, &Route::from("/".to_owned()), &context, 0, message);
    first_chunk(AmHeader::bare(AmKind::Request, call), parts, header)
}
