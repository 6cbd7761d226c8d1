//! The answering end's parcels without a fabric.

use bytes::{Buf, Bytes};
use gym_core::frame::Limits;
use gym_core::mux::header::put_request;
use gym_core::{CallContext, Result, Route, Verb};

use super::super::desk::Desk;
use super::super::inbox::Inbox;
use super::super::wire::{Kind, Wire};
use super::{OnTheWay, POOL, byte, opening, parts, raw, raw_announced};
use crate::fabric::{Arrived, Disposition, Payload};

/// Pieces and cancels are of one of the last calls, or of the next.
const CALLS: u8 = 8;

/// What a fuzzer's bytes do to an answering end.
struct Session {
    desk: Desk,
    coming: OnTheWay,
    /// The last number that was made up.
    last: u64,
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
                if let Disposition::Land { key, buffer } = self.desk.piece(wire, payload)? {
                    self.coming.land(key, buffer);
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
                let (wire, payload) = raw(input)?;
                self.parcel(wire, &payload)
            }
            1 => {
                let (wire, payload) = raw_announced(input)?;
                self.parcel(wire, &payload)
            }
            2 => {
                // Seldom a number that was there already.
                self.last += u64::from(byte(input) > 8);
                let call = self.last;
                let (wire, payload, pieces) = request(call, &parts(input));
                self.coming.pieces.insert(call, pieces);
                self.parcel(wire, &Payload::Here(Arrived::Owned(payload)))
            }
            3 => {
                let call = self.call(input);
                let (wire, payload) = self.coming.piece(call, input);
                self.parcel(wire, &payload)
            }
            4 => {
                let cancel = Wire::bare(Kind::Cancel, self.call(input));
                self.parcel(cancel, &Payload::Here(Arrived::Borrowed(&[])))
            }
            _ => {
                if let Some((key, bytes)) = self.coming.landed(input) {
                    self.desk.landed(key, bytes);
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
    let desk = Desk::new(Inbox::new(limits.clone(), limits.message_bytes_max, POOL.clone()));
    let mut session = Session { desk, coming: OnTheWay::default(), last: 0 };
    while input.has_remaining() {
        session.step(&mut input)?;
    }
    Ok(session.coming.taken)
}

/// A request's opening with a head and segments of these lengths, as a peer of ours sends it, and the bytes of its pieces.
fn request(call: u64, parts: &[usize]) -> (Wire, Bytes, Vec<usize>) {
    let context = CallContext::default();
    let header = |message: &_| put_request(0, Verb::Post, &Route::from("/".to_owned()), &context, 0, message);
    opening(Wire::bare(Kind::Request, call), parts, header)
}
