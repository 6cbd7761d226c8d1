//! Reassembles the messages that arrive over one connection from their chunks.

pub(crate) mod message;

use std::collections::HashMap;

use bytes::{Bytes, BytesMut};
use gym_core::message::frame::MessageLimits;
use gym_core::transport::mux::header::HEADER_BYTES_MAX;
use gym_core::transport::mux::{CapacityPermit, malformed};
use gym_core::{Code, Error, Result};

use crate::fabric::{Disposition, EagerBytes, Payload};
use crate::messaging::IN_FLIGHT_MAX;
use crate::messaging::header::AmHeader;
use crate::messaging::layout::CUT_BYTES;
use crate::messaging::reassembly::message::{CompleteMessage, Header, PartialMessage, aligned};

/// Messages that may be incomplete at a time, and chunks of abandoned messages that are still being received: far more than a peer
/// of ours, which has [`IN_FLIGHT_MAX`] active messages in flight, can cause.
const UNDER_WAY_MAX: usize = 8 * IN_FLIGHT_MAX;

/// Call and message of a first chunk; the message is received if it is [kept](Reassembly::keep).
pub(crate) type FirstChunk<H> = (u64, PartialMessage<H>);

#[derive(Debug)]
pub(crate) struct Reassembly<H> {
    limits: MessageLimits,
    abandoned_bytes_max: usize,
    begun: Option<PartialHeader>,
    /// By call: the number of the message here, and the message.
    partial: HashMap<u64, (u64, PartialMessage<H>)>,
    /// Of every landing: its call, the number of its message, and its place in the layout. A call may be given up and, by a hostile
    /// peer, begun again while something of the first still lands.
    landings: HashMap<u64, (u64, u64, usize)>,
    abandoned: Abandoned,
    next_key: u64,
}

/// Chunks of abandoned messages that are still being received. Their memory is in use until then.
#[derive(Debug, Default)]
struct Abandoned {
    landings: usize,
    bytes: usize,
    /// By message: the number of its chunks, and the capacity that they hold.
    messages: HashMap<u64, (usize, CapacityPermit)>,
}

impl Abandoned {
    /// Adds these chunks of a message.
    fn add(&mut self, number: u64, landing: impl Iterator<Item = usize>, room: CapacityPermit) {
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

    /// One of the chunks has been received.
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

/// A header that is too long for one active message.
#[derive(Debug)]
struct PartialHeader {
    call: u64,
    header_bytes: usize,
    cut: usize,
    bytes: BytesMut,
}

impl<H: Header> Reassembly<H> {
    /// `abandoned_bytes_max`: bytes of abandoned messages without capacity of their own that may still be received.
    pub(crate) fn new(limits: MessageLimits, abandoned_bytes_max: usize) -> Self {
        Self {
            limits,
            abandoned_bytes_max,
            begun: None,
            partial: HashMap::new(),
            landings: HashMap::new(),
            abandoned: Abandoned::default(),
            next_key: 0,
        }
    }

    /// A message begins.
    pub(crate) fn begin(&mut self, am: AmHeader, payload: &Payload<'_>) -> Result<Option<FirstChunk<H>>> {
        let (call, header_bytes, cut) = (am.call, am.first as usize, am.second as usize);
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
        let payload = eager_bytes(payload)?;
        if payload.len() < header_bytes {
            // It grows as bytes come, not to what was announced.
            self.begun = Some(PartialHeader { call, header_bytes, cut, bytes: BytesMut::from(payload) });
            return Ok(None);
        }
        PartialMessage::read(aligned(payload), header_bytes, cut, &self.limits)
            .map(|partial_message| Some((call, partial_message)))
    }

    /// More of the header that was begun last.
    pub(crate) fn more(&mut self, am: AmHeader, payload: &Payload<'_>) -> Result<Option<FirstChunk<H>>> {
        let payload = eager_bytes(payload)?;
        let Some(begun) = self.begun.as_mut().filter(|begun| begun.call == am.call) else {
            return Err(malformed(format!("more of a header of call {} that was not begun", am.call)));
        };
        if payload.is_empty() || begun.bytes.len() + payload.len() > begun.header_bytes {
            return Err(malformed(format!("a header of call {} that is longer than it says", am.call)));
        }
        begun.bytes.extend_from_slice(payload);
        match self.begun.take_if(|begun| begun.bytes.len() == begun.header_bytes) {
            Some(PartialHeader { call, header_bytes, cut, bytes }) => {
                PartialMessage::read(bytes.freeze(), header_bytes, cut, &self.limits)
                    .map(|partial_message| Some((call, partial_message)))
            }
            None => Ok(None),
        }
    }

    /// The message is wanted. It, if nothing of it is still to come.
    ///
    /// # Errors
    /// When more are incomplete than a peer of ours sends at a time. Their headers are in nobody's room.
    pub(crate) fn keep(&mut self, (call, partial_message): FirstChunk<H>) -> Result<Option<CompleteMessage<H>>> {
        if partial_message.is_complete() {
            return Ok(Some(partial_message.finish()));
        }
        if self.partial.len() >= UNDER_WAY_MAX {
            return Err(too_much(format!("{UNDER_WAY_MAX} messages that do not go on")));
        }
        let number = self.number();
        self.partial.insert(call, (number, partial_message));
        Ok(None)
    }

    /// A chunk has come: where to put it. One of a message that is not wanted is not.
    pub(crate) fn chunk(&mut self, am: AmHeader, payload: &Payload<'_>) -> Result<Disposition> {
        let Some((number, partial_message)) = self.partial.get_mut(&am.call) else { return Ok(Disposition::Done) };
        let Abandoned { landings, bytes, .. } = self.abandoned;
        if landings >= UNDER_WAY_MAX || bytes > self.abandoned_bytes_max {
            return Err(too_much(format!("{landings} payloads of {bytes} bytes that do not come and were given up")));
        }
        let place = am.first as usize;
        let expected = partial_message.begin(place)?;
        let found = length(payload);
        if found != expected as u64 {
            return Err(malformed(format!("a chunk of {found} bytes whose lengths say {expected}")));
        }
        let number = *number;
        let key = self.number();
        self.landings.insert(key, (am.call, number, place));
        Ok(Disposition::Land { key })
    }

    /// A chunk is there. Its message, if that is complete now and still wanted.
    pub(crate) fn landed(&mut self, key: u64, bytes: Bytes) -> Option<(u64, CompleteMessage<H>)> {
        let (call, number, place) = self.landings.remove(&key)?;
        let Some((_, partial_message)) = self.partial.get_mut(&call).filter(|(here, _)| *here == number) else {
            self.abandoned.landed(number, bytes.len());
            return None;
        };
        partial_message.put(place, bytes);
        if !partial_message.is_complete() {
            return None;
        }
        self.partial.remove(&call).map(|(_, partial_message)| (call, partial_message.finish()))
    }

    fn number(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    /// The message is not wanted any more; `room` is kept until what lands of it has. Whether there was one.
    pub(crate) fn forget(&mut self, call: u64, room: CapacityPermit) -> bool {
        let Some((number, partial_message)) = self.partial.remove(&call) else { return false };
        self.abandoned.add(number, partial_message.landing(), room);
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
pub(crate) fn eager_bytes<'a>(payload: &'a Payload<'_>) -> Result<&'a [u8]> {
    match payload {
        Payload::Eager(EagerBytes::Borrowed(bytes)) => Ok(bytes),
        Payload::Eager(EagerBytes::Owned(bytes)) => Ok(bytes),
        Payload::Announced(length) => Err(malformed(format!("{length} bytes are announced where only chunks are"))),
    }
}

pub(crate) fn length(payload: &Payload<'_>) -> u64 {
    match payload {
        Payload::Eager(EagerBytes::Borrowed(bytes)) => bytes.len() as u64,
        Payload::Eager(EagerBytes::Owned(bytes)) => bytes.len() as u64,
        Payload::Announced(length) => *length,
    }
}
