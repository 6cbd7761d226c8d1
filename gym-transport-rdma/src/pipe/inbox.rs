//! What is on its way in over one connection: openings, and the pieces that belong to them.

use std::collections::HashMap;

use bytes::{Bytes, BytesMut};
use gym_core::frame::Limits;
use gym_core::mux::header::HEADER_BYTES_MAX;
use gym_core::mux::{Room, malformed};
use gym_core::{Code, Error, Result};

use super::assembly::{Assembly, Header, Landed, aligned};
use super::outbox::POSTED_MAX;
use super::wire::Wire;
use crate::fabric::{Arrived, Disposition, Payload};

/// What a peer may cut at: below, messages would be all pieces; above, everything would be copied.
pub(crate) const CUT_BYTES: std::ops::RangeInclusive<usize> = 1 << 10..=1 << 24;

/// Messages that may be incomplete at a time, and landings of messages that were given up: far more than a peer of ours, which has
/// [`POSTED_MAX`] parcels on their way, can bring about.
const UNDER_WAY_MAX: usize = 8 * POSTED_MAX;

/// An opening that is complete; its message is wanted if it is [kept](Inbox::keep).
pub(crate) type Opening<H> = (u64, Assembly<H>);

#[derive(Debug)]
pub(crate) struct Inbox<H> {
    limits: Limits,
    given_up_bytes_max: usize,
    begun: Option<Begun>,
    /// By call: the number of the message here, and the message.
    partial: HashMap<u64, (u64, Assembly<H>)>,
    /// Of every landing: its call, the number of its message, and its place in the plan. A call may be given up and, by a hostile
    /// peer, begun again while something of the first still lands.
    landings: HashMap<u64, (u64, u64, usize)>,
    given_up: GivenUp,
    next_key: u64,
}

/// What still lands of messages that nobody wants any more: its memory is taken until it has.
#[derive(Debug, Default)]
struct GivenUp {
    landings: usize,
    bytes: usize,
    /// By message: how many landings it has, and what room they keep.
    messages: HashMap<u64, (usize, Room)>,
}

impl GivenUp {
    /// These payloads of a message.
    fn add(&mut self, number: u64, landing: impl Iterator<Item = usize>, room: Room) {
        let mut landings = 0;
        for bytes in landing {
            landings += 1;
            self.bytes += bytes;
        }
        if landings > 0 {
            self.landings += landings;
            self.messages.insert(number, (landings, room));
        }
    }

    /// One of them has landed.
    fn landed(&mut self, number: u64, bytes: usize) {
        self.landings -= 1;
        self.bytes -= bytes;
        if let Some((landings, _)) = self.messages.get_mut(&number) {
            *landings -= 1;
            if *landings == 0 {
                self.messages.remove(&number);
            }
        }
    }
}

/// A header that is too long for one parcel.
#[derive(Debug)]
struct Begun {
    call: u64,
    header_bytes: usize,
    cut: usize,
    bytes: BytesMut,
}

impl<H: Header> Inbox<H> {
    /// `given_up_bytes_max`: bytes that may still land of messages that were given up without a room of their own.
    pub(crate) fn new(limits: Limits, given_up_bytes_max: usize) -> Self {
        Self {
            limits,
            given_up_bytes_max,
            begun: None,
            partial: HashMap::new(),
            landings: HashMap::new(),
            given_up: GivenUp::default(),
            next_key: 0,
        }
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
    ///
    /// # Errors
    /// When more are incomplete than a peer of ours sends at a time. Their headers are in nobody's room.
    pub(crate) fn keep(&mut self, (call, assembly): Opening<H>) -> Result<Option<Landed<H>>> {
        if assembly.is_complete() {
            return Ok(Some(assembly.finish()));
        }
        if self.partial.len() >= UNDER_WAY_MAX {
            return Err(too_much(format!("{UNDER_WAY_MAX} messages that do not go on")));
        }
        let number = self.number();
        self.partial.insert(call, (number, assembly));
        Ok(None)
    }

    /// A piece has come: where to put it. One of a message that is not wanted is not.
    pub(crate) fn piece(&mut self, wire: Wire, payload: &Payload<'_>) -> Result<Disposition> {
        let Some((number, assembly)) = self.partial.get_mut(&wire.call) else { return Ok(Disposition::Done) };
        let GivenUp { landings, bytes, .. } = self.given_up;
        if landings >= UNDER_WAY_MAX || bytes > self.given_up_bytes_max {
            return Err(too_much(format!("{landings} payloads of {bytes} bytes that do not come and were given up")));
        }
        let place = wire.first as usize;
        let expected = assembly.begin(place)?;
        let found = length(payload);
        if found != expected as u64 {
            return Err(malformed(format!("a piece of {found} bytes whose lengths say {expected}")));
        }
        let number = *number;
        let key = self.number();
        self.landings.insert(key, (wire.call, number, place));
        Ok(Disposition::Land { key })
    }

    /// A piece is there. Its message, if that is complete now and still wanted.
    pub(crate) fn landed(&mut self, key: u64, bytes: Bytes) -> Option<(u64, Landed<H>)> {
        let (call, number, place) = self.landings.remove(&key)?;
        let Some((_, assembly)) = self.partial.get_mut(&call).filter(|(here, _)| *here == number) else {
            self.given_up.landed(number, bytes.len());
            return None;
        };
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

    /// The message is not wanted any more; `room` is kept until what lands of it has. Whether there was one.
    pub(crate) fn forget(&mut self, call: u64, room: Room) -> bool {
        let Some((number, assembly)) = self.partial.remove(&call) else { return false };
        self.given_up.add(number, assembly.landing(), room);
        true
    }

    /// How many messages have begun, and are not complete.
    #[cfg(feature = "testing")]
    pub(crate) fn incomplete(&self) -> usize {
        self.partial.len()
    }

    /// Whether every message that began is complete.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.begun.is_none() && self.partial.is_empty()
    }
}

fn too_much(said: String) -> Error {
    Error::unknown(Code::ResourceExhausted, said)
}

/// The bytes of a payload of a kind that is never announced.
pub(crate) fn here<'a>(payload: &'a Payload<'_>) -> Result<&'a [u8]> {
    match payload {
        Payload::Here(Arrived::Borrowed(bytes)) => Ok(bytes),
        Payload::Here(Arrived::Owned(bytes)) => Ok(bytes),
        Payload::Announced(length) => Err(malformed(format!("{length} bytes are announced where only pieces are"))),
    }
}

pub(crate) fn length(payload: &Payload<'_>) -> u64 {
    match payload {
        Payload::Here(Arrived::Borrowed(bytes)) => bytes.len() as u64,
        Payload::Here(Arrived::Owned(bytes)) => bytes.len() as u64,
        Payload::Announced(length) => *length,
    }
}
