//! Reassembles the messages of one connection from their chunks.

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

/// Maximum incomplete messages, and maximum chunks of abandoned messages that are still being received. Far more than a
/// peer of this crate can cause, which has [`IN_FLIGHT_MAX`] active messages in flight.
const INCOMPLETE_MAX: usize = 8 * IN_FLIGHT_MAX;

/// Call number and message of a first chunk. The message is received if it is [kept](Reassembly::keep).
pub(crate) type FirstChunk<H> = (u64, PartialMessage<H>);

#[derive(Debug)]
pub(crate) struct Reassembly<H> {
    limits: MessageLimits,
    abandoned_bytes_max: usize,
    begun: Option<PartialHeader>,
    /// Incomplete messages by call number, each with its number at this end.
    partial: HashMap<u64, (u64, PartialMessage<H>)>,
    /// Call number, message number and chunk index of every payload that is being received. A hostile peer can start a
    /// call again after it was abandoned, while a payload of the first message is still being received.
    landings: HashMap<u64, (u64, u64, usize)>,
    abandoned: Abandoned,
    next_key: u64,
}

/// Chunks of abandoned messages that are still being received, and whose memory is therefore in use.
#[derive(Debug, Default)]
struct Abandoned {
    landings: usize,
    bytes: usize,
    /// Number of chunks and held capacity, by message number.
    messages: HashMap<u64, (usize, CapacityPermit)>,
}

impl Abandoned {
    /// Adds the chunks of an abandoned message that are being received.
    fn add(&mut self, number: u64, landing: impl Iterator<Item = usize>, permit: CapacityPermit) {
        let mut landings = 0;
        for bytes in landing {
            landings += 1;
            self.bytes += bytes;
        }
        if landings > 0 {
            self.landings += landings;
            self.messages.insert(number, (landings, permit));
        }
    }

    /// Records that one of the chunks has been received.
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
    /// Creates a reassembly. `abandoned_bytes_max` limits the bytes that are still being received for abandoned
    /// messages.
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

    /// Receives the first chunk of a message. Returns the message if its header is complete.
    ///
    /// # Errors
    /// If the message is malformed or its call has an incomplete message already.
    pub(crate) fn begin(&mut self, am: AmHeader, payload: &Payload<'_>) -> Result<Option<FirstChunk<H>>> {
        let (call, header_bytes, cut) = (am.call, am.first as usize, am.second as usize);
        if self.partial.contains_key(&call) {
            // Each attempt would use memory of its own.
            return Err(malformed(format!("call {call} begins again before its message is complete")));
        }
        if let Some(begun) = &self.begun {
            return Err(malformed(format!("call {call} begins within the header of call {}", begun.call)));
        }
        if header_bytes > HEADER_BYTES_MAX {
            return Err(malformed(format!("a header of {header_bytes} bytes; the maximum is {HEADER_BYTES_MAX}")));
        }
        if !CUT_BYTES.contains(&cut) {
            return Err(malformed(format!("messages cut at {cut} bytes; expected {CUT_BYTES:?}")));
        }
        let payload = eager_bytes(payload)?;
        if payload.len() < header_bytes {
            // The buffer grows with the bytes that arrive, not to the announced length.
            self.begun = Some(PartialHeader { call, header_bytes, cut, bytes: BytesMut::from(payload) });
            return Ok(None);
        }
        PartialMessage::read(aligned(payload), header_bytes, cut, &self.limits)
            .map(|partial_message| Some((call, partial_message)))
    }

    /// Receives the continuation of the last header. Returns the message if its header is complete.
    ///
    /// # Errors
    /// If no header of this call is incomplete, or the continuation is empty or too long.
    pub(crate) fn more(&mut self, am: AmHeader, payload: &Payload<'_>) -> Result<Option<FirstChunk<H>>> {
        let payload = eager_bytes(payload)?;
        let Some(begun) = self.begun.as_mut().filter(|begun| begun.call == am.call) else {
            return Err(malformed(format!("a header continuation of call {} without a beginning", am.call)));
        };
        if payload.is_empty() || begun.bytes.len() + payload.len() > begun.header_bytes {
            return Err(malformed(format!("a header of call {} that exceeds its length", am.call)));
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

    /// Accepts a message. Returns the message if it is complete already.
    ///
    /// # Errors
    /// If more messages are incomplete than a peer of this crate sends at a time. No capacity accounts for their
    /// headers.
    pub(crate) fn keep(&mut self, (call, partial_message): FirstChunk<H>) -> Result<Option<CompleteMessage<H>>> {
        if partial_message.is_complete() {
            return Ok(Some(partial_message.finish()));
        }
        if self.partial.len() >= INCOMPLETE_MAX {
            return Err(too_much(format!("{INCOMPLETE_MAX} incomplete messages, which is the maximum")));
        }
        let number = self.number();
        self.partial.insert(call, (number, partial_message));
        Ok(None)
    }

    /// Receives a chunk. Returns where to receive its payload, or [`Disposition::Done`] if its message is not wanted.
    ///
    /// # Errors
    /// If the chunk does not match the layout, or too many payloads of abandoned messages are still being received.
    pub(crate) fn chunk(&mut self, am: AmHeader, payload: &Payload<'_>) -> Result<Disposition> {
        let Some((number, partial_message)) = self.partial.get_mut(&am.call) else { return Ok(Disposition::Done) };
        let Abandoned { landings, bytes, .. } = self.abandoned;
        if landings >= INCOMPLETE_MAX || bytes > self.abandoned_bytes_max {
            return Err(too_much(format!(
                "{landings} payloads of {bytes} bytes still arriving for abandoned messages"
            )));
        }
        let place = am.first as usize;
        let expected = partial_message.begin(place)?;
        let found = length(payload);
        if found != expected as u64 {
            return Err(malformed(format!("a chunk of {found} bytes; its lengths require {expected}")));
        }
        let number = *number;
        let key = self.number();
        self.landings.insert(key, (am.call, number, place));
        Ok(Disposition::Land { key })
    }

    /// Stores a chunk that has been received. Returns its message if it is complete now and still wanted.
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

    /// Abandons a message and holds `permit` until its chunks in flight have landed. Returns whether there was such a
    /// message.
    pub(crate) fn forget(&mut self, call: u64, permit: CapacityPermit) -> bool {
        let Some((number, partial_message)) = self.partial.remove(&call) else { return false };
        self.abandoned.add(number, partial_message.landing(), permit);
        true
    }

    /// Number of incomplete messages.
    #[cfg(feature = "testing")]
    pub(crate) fn incomplete(&self) -> usize {
        self.partial.len()
    }

    /// Whether no message is incomplete.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.begun.is_none() && self.partial.is_empty()
    }
}

fn too_much(reason: String) -> Error {
    Error::unknown(Code::ResourceExhausted, reason)
}

/// Returns the bytes of a payload whose kind is never announced.
///
/// # Errors
/// If the payload was announced.
pub(crate) fn eager_bytes<'a>(payload: &'a Payload<'_>) -> Result<&'a [u8]> {
    match payload {
        Payload::Eager(EagerBytes::Borrowed(bytes)) => Ok(bytes),
        Payload::Eager(EagerBytes::Owned(bytes)) => Ok(bytes),
        Payload::Announced(length) => Err(malformed(format!("{length} bytes are announced, but only chunks may be"))),
    }
}

pub(crate) fn length(payload: &Payload<'_>) -> u64 {
    match payload {
        Payload::Eager(EagerBytes::Borrowed(bytes)) => bytes.len() as u64,
        Payload::Eager(EagerBytes::Owned(bytes)) => bytes.len() as u64,
        Payload::Announced(length) => *length,
    }
}
