//! What is on its way in over one connection: openings, and the pieces that belong to them.

use std::collections::HashMap;

use bytes::{Bytes, BytesMut};
use gym_core::Result;
use gym_core::frame::Limits;
use gym_core::mux::header::HEADER_BYTES_MAX;
use gym_core::mux::malformed;

use super::assembly::{Assembly, Header, Landed, aligned};
use super::wire::Wire;
use crate::fabric::{Arrived, Disposition, Payload};
use crate::pool::Pool;

/// What a peer may cut at: below, messages would be all pieces; above, everything would be copied.
pub(crate) const CUT_BYTES: std::ops::RangeInclusive<usize> = 1 << 10..=1 << 24;

/// An opening that is complete; its message is wanted if it is [kept](Inbox::keep).
pub(crate) type Opening<H> = (u64, Assembly<H>);

pub(crate) struct Inbox<H> {
    limits: Limits,
    pool: Pool,
    begun: Option<Begun>,
    /// By call: the number of the message here, and the message.
    partial: HashMap<u64, (u64, Assembly<H>)>,
    /// Of every landing: its call, the number of its message, and its place in the plan. A call may be given up and, by a hostile
    /// peer, begun again while something of the first still lands.
    landings: HashMap<u64, (u64, u64, usize)>,
    next_key: u64,
}

/// A header that is too long for one parcel.
struct Begun {
    call: u64,
    header_bytes: usize,
    cut: usize,
    bytes: BytesMut,
}

impl<H: Header> Inbox<H> {
    pub(crate) fn new(limits: Limits, pool: Pool) -> Self {
        Self { limits, pool, begun: None, partial: HashMap::new(), landings: HashMap::new(), next_key: 0 }
    }

    /// A message begins.
    pub(crate) fn begin(&mut self, wire: Wire, payload: &Payload<'_>) -> Result<Option<Opening<H>>> {
        let (call, header_bytes, cut) = (wire.call, wire.first as usize, wire.second as usize);
        if self.partial.contains_key(&call) {
            // Each time with memory of its own for what lands.
            return Err(malformed(format!("call {call} begins again while its message is on its way")));
        }
        if let Some(begun) = &self.begun {
            return Err(malformed(format!("call {call} begins within the header of call {}", begun.call)));
        }
        if header_bytes > HEADER_BYTES_MAX {
            return Err(malformed(format!("a header of {header_bytes} bytes; {HEADER_BYTES_MAX} is the most")));
        }
        if !CUT_BYTES.contains(&cut) {
            return Err(malformed(format!("messages cut at {cut} bytes; {CUT_BYTES:?} are allowed")));
        }
        let payload = here(payload)?;
        if payload.len() < header_bytes {
            // It grows as bytes come, not to what was announced.
            self.begun = Some(Begun { call, header_bytes, cut, bytes: BytesMut::from(payload) });
            return Ok(None);
        }
        Assembly::read(aligned(payload), header_bytes, cut, &self.limits).map(|assembly| Some((call, assembly)))
    }

    /// More of the header that was begun last.
    pub(crate) fn more(&mut self, wire: Wire, payload: &Payload<'_>) -> Result<Option<Opening<H>>> {
        let payload = here(payload)?;
        let Some(begun) = self.begun.as_mut().filter(|begun| begun.call == wire.call) else {
            return Err(malformed(format!("more of a header of call {} that was not begun", wire.call)));
        };
        if payload.is_empty() || begun.bytes.len() + payload.len() > begun.header_bytes {
            return Err(malformed(format!("a header of call {} that is longer than it says", wire.call)));
        }
        begun.bytes.extend_from_slice(payload);
        match self.begun.take_if(|begun| begun.bytes.len() == begun.header_bytes) {
            Some(Begun { call, header_bytes, cut, bytes }) => {
                Assembly::read(bytes.freeze(), header_bytes, cut, &self.limits).map(|assembly| Some((call, assembly)))
            }
            None => Ok(None),
        }
    }

    /// The message is wanted. It, if nothing of it is still to come.
    pub(crate) fn keep(&mut self, (call, assembly): Opening<H>) -> Option<Landed<H>> {
        if assembly.is_complete() {
            return Some(assembly.finish());
        }
        let number = self.number();
        self.partial.insert(call, (number, assembly));
        None
    }

    /// A piece has come: where to put it. One of a message that is not wanted is not.
    pub(crate) fn piece(&mut self, wire: Wire, payload: &Payload<'_>) -> Result<Disposition> {
        let Some((number, assembly)) = self.partial.get_mut(&wire.call) else { return Ok(Disposition::Done) };
        let place = wire.first as usize;
        let expected = assembly.begin(place)?;
        let found = length(payload);
        if found != expected as u64 {
            return Err(malformed(format!("a piece of {found} bytes whose lengths say {expected}")));
        }
        let number = *number;
        let key = self.number();
        self.landings.insert(key, (wire.call, number, place));
        Ok(Disposition::Land { key, buffer: self.pool.take(expected)? })
    }

    /// A piece is there. Its message, if that is complete now and still wanted.
    pub(crate) fn landed(&mut self, key: u64, bytes: Bytes) -> Option<(u64, Landed<H>)> {
        let (call, number, place) = self.landings.remove(&key)?;
        let (_, assembly) = self.partial.get_mut(&call).filter(|(here, _)| *here == number)?;
        assembly.put(place, bytes);
        if !assembly.is_complete() {
            return None;
        }
        self.partial.remove(&call).map(|(_, assembly)| (call, assembly.finish()))
    }

    fn number(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    /// The message is not wanted any more.
    pub(crate) fn forget(&mut self, call: u64) {
        self.partial.remove(&call);
    }

    /// Whether every message that began is complete.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.begun.is_none() && self.partial.is_empty()
    }
}

/// The bytes of a payload of a kind that is never announced.
pub(crate) fn here<'a>(payload: &'a Payload<'_>) -> Result<&'a [u8]> {
    match payload {
        Payload::Here(Arrived::Borrowed(bytes)) => Ok(bytes),
        Payload::Here(Arrived::Owned(bytes)) => Ok(bytes),
        Payload::Announced(length) => Err(malformed(format!("{length} bytes are announced where only pieces are"))),
    }
}

fn length(payload: &Payload<'_>) -> u64 {
    match payload {
        Payload::Here(Arrived::Borrowed(bytes)) => bytes.len() as u64,
        Payload::Here(Arrived::Owned(bytes)) => bytes.len() as u64,
        Payload::Announced(length) => *length,
    }
}
