//! The answering end's parcels without a fabric.

use std::collections::{HashMap, VecDeque};

use bytes::{Buf, Bytes};
use gym_core::frame::Limits;
use gym_core::mux::header::put_request;
use gym_core::{CallContext, Result, Route, Verb};

use super::super::desk::Desk;
use super::super::inbox::Inbox;
use super::super::wire::{Kind, WIRE_BYTES, Wire};
use super::{byte, land, opening, parts, take, take_some};
use crate::fabric::{Arrived, Disposition, Payload};

/// Pieces and cancels are of one of the last calls, or of the next.
const CALLS: u8 = 8;

/// What a fuzzer's bytes do to an answering end.
struct Session {
    desk: Desk,
    /// Payloads that were announced and taken, and are still on their way.
    landing: VecDeque<(u64, Bytes)>,
    /// Of every call that was made up last under a number: the bytes of its pieces.
    pieces: HashMap<u64, Vec<usize>>,
    /// The last number that was made up.
    last: u64,
    taken: usize,
}

impl Session {
    /// The number of a call that may be there.
    fn call(&self, input: &mut &[u8]) -> u64 {
        self.last.saturating_sub(u64::from(byte(input) % CALLS)) + 1
    }

    fn parcel(&mut self, wire: Wire, payload: &Payload<'_>) -> Result<()> {
        match wire.kind {
            Kind::Request | Kind::Header => {
                if let Some(opening) = self.desk.begin(wire, payload)? {
                    self.desk.keep(opening)?;
                }
            }
            Kind::Piece => {
                if let Disposition::Land { key } = self.desk.piece(wire, payload)? {
                    let landed = land(payload);
                    self.taken += landed.len();
                    self.landing.push_back((key, landed));
                }
            }
            Kind::Cancel => {
                self.desk.cancel(wire.call)?;
            }
            _ => {}
        }
        while self.desk.next().is_some() {}
        Ok(())
    }

    /// The next parcel of the input: raw, or one that a peer of ours would send, as its first byte says.
    fn step(&mut self, input: &mut &[u8]) -> Result<()> {
        match byte(input) % 6 {
            0 => {
                let header = take(input, WIRE_BYTES);
                let wire = Wire::read(header)?;
                let payload = take_some(input);
                self.parcel(wire, &Payload::Here(Arrived::Borrowed(payload)))
            }
            1 => {
                let wire = Wire::read(take(input, WIRE_BYTES))?;
                let announced = u64::from_le_bytes(take(input, 8).try_into().unwrap_or_default());
                self.parcel(wire, &Payload::Announced(announced))
            }
            2 => {
                // Seldom a number that was there already.
                self.last += u64::from(byte(input) > 8);
                let call = self.last;
                let (wire, payload, pieces) = request(call, &parts(input));
                self.pieces.insert(call, pieces);
                self.parcel(wire, &Payload::Here(Arrived::Owned(payload)))
            }
            3 => {
                let (call, place, wrong) = (self.call(input), byte(input) % 8, byte(input));
                let length = self.pieces.get(&call).and_then(|pieces| pieces.get(usize::from(place)));
                // Seldom of another length than its opening said.
                let length = length.map_or(0, |length| *length as u64) + u64::from(wrong.saturating_sub(250));
                let wire = Wire { first: u32::from(place), ..Wire::bare(Kind::Piece, call) };
                self.parcel(wire, &Payload::Announced(length))
            }
            4 => {
                let cancel = Wire::bare(Kind::Cancel, self.call(input));
                self.parcel(cancel, &Payload::Here(Arrived::Borrowed(&[])))
            }
            _ => {
                let at = usize::from(byte(input));
                if let Some((key, landed)) = self.landing.remove(at % self.landing.len().max(1)) {
                    self.desk.landed(key, landed);
                }
                Ok(())
            }
        }
    }
}

/// Hands an answering end the parcels that the input describes, with landings in any order. Returns the bytes of the buffers
/// that were taken for them.
///
/// # Errors
/// What would have ended the connection.
pub fn take_parcels(mut input: &[u8], limits: &Limits) -> Result<usize> {
    let desk = Desk::new(Inbox::new(limits.clone(), limits.message_bytes_max));
    let mut session = Session { desk, landing: VecDeque::new(), pieces: HashMap::new(), last: 0, taken: 0 };
    while input.has_remaining() {
        session.step(&mut input)?;
    }
    Ok(session.taken)
}

/// A request's opening with a head and segments of these lengths, as a peer of ours sends it, and the bytes of its pieces.
fn request(call: u64, parts: &[usize]) -> (Wire, Bytes, Vec<usize>) {
    let context = CallContext::default();
    let header = |message: &_| put_request(0, Verb::Post, &Route::from("/".to_owned()), &context, 0, message);
    opening(Wire::bare(Kind::Request, call), parts, header)
}
