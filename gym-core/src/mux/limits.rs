//! The bounds of one connection, each with its why, and what the ends tell each other of them.

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::header::{malformed, number32, number64, size};
use crate::error::Result;
use crate::frame;

const MAGIC: u32 = u32::from_le_bytes(*b"GYMC");
const VERSION: u32 = 1;

/// Limits of an ordered connection; each end has its own, and both keep to the smaller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Calls under way on one connection; further ones wait for room under their deadline. 16,384: the same as in a process,
    /// so that moving a worker out of it does not change how much it takes.
    pub calls_max: usize,
    /// Bytes of the requests under way on one connection: what the peer may have to hold. 4 GiB: a few batches of the largest
    /// kind. A larger message goes alone.
    pub request_bytes_in_flight_max: usize,
    /// Sum of `reply_bytes_max` over the calls under way on one connection: what this end may have to hold. Each call takes
    /// its part before its request leaves, so that replies never wait for room that requests hold. It bounds promises, not
    /// memory in use: 4 TiB is `calls_max` replies of the default limit; lower both on a machine where they are to bind. The end
    /// that answers refuses calls while answers of more bytes than its own limit wait for a peer that does not take them.
    pub reply_bytes_in_flight_max: usize,
    /// Bytes of one message, head and segments. 4 GiB, the same as in flight.
    pub message_bytes_max: usize,
    /// Bytes of the head of one message. 256 MiB, as over HTTP.
    pub head_bytes_max: usize,
    /// The most binary segments of one message, either way: one per column and rank of a large batch.
    pub segments_max: usize,
    /// A peer from which nothing comes for this long is gone: stopped, hung, or cut off. Each end sends at least a heartbeat
    /// every third of it. 15 s: a machine that swaps is slower than one expects; a crash is seen at once anyway. Less than 300 ms count as
    /// 300 ms, at both ends: no peer is to ask for more than ten heartbeats a second.
    pub silence_max: Duration,
}

impl Limits {
    /// What one message may announce.
    #[must_use]
    pub fn of_message(&self) -> frame::Limits {
        frame::Limits {
            head_bytes_max: self.head_bytes_max,
            segments_max: self.segments_max,
            message_bytes_max: self.message_bytes_max,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            calls_max: 16_384,
            request_bytes_in_flight_max: 4 << 30,
            reply_bytes_in_flight_max: 16_384 * crate::DEFAULT_REPLY_BYTES_MAX,
            message_bytes_max: 4 << 30,
            head_bytes_max: 256 << 20,
            segments_max: 1 << 16,
            silence_max: Duration::from_secs(15),
        }
    }
}

/// What each end tells the other before anything else: 48 bytes, little endian.
///
/// ```text
/// magic u32 | version u32 | calls u32 | segments u32 | request bytes in flight u64 | message u64 | head u64 | silence u64, ms
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    pub(super) calls_max: usize,
    pub(super) segments_max: usize,
    pub(super) request_bytes_in_flight_max: usize,
    pub(super) message_bytes_max: usize,
    pub(super) head_bytes_max: usize,
    pub(super) silence_max: Duration,
}

impl Greeting {
    /// Length on the wire.
    pub const BYTES: usize = 48;

    /// What an end with these limits says.
    #[must_use]
    pub fn of(limits: &Limits) -> Self {
        Self {
            calls_max: limits.calls_max,
            segments_max: limits.segments_max,
            request_bytes_in_flight_max: limits.request_bytes_in_flight_max,
            message_bytes_max: limits.message_bytes_max,
            head_bytes_max: limits.head_bytes_max,
            silence_max: limits.silence_max,
        }
    }

    /// Writes it.
    pub fn put(&self, to: &mut BytesMut) {
        to.put_u32_le(MAGIC);
        to.put_u32_le(VERSION);
        to.put_u32_le(u32::try_from(self.calls_max).unwrap_or(u32::MAX));
        to.put_u32_le(u32::try_from(self.segments_max).unwrap_or(u32::MAX));
        to.put_u64_le(self.request_bytes_in_flight_max as u64);
        to.put_u64_le(self.message_bytes_max as u64);
        to.put_u64_le(self.head_bytes_max as u64);
        to.put_u64_le(u64::try_from(self.silence_max.as_millis()).unwrap_or(u64::MAX));
    }

    /// Reads what a peer wrote.
    ///
    /// # Errors
    /// `DataLoss` when it is no greeting, of another version, or one that takes no calls or bears no silence.
    pub fn read(mut from: Bytes) -> Result<Self> {
        let (magic, version) = (number32(&mut from)?, number32(&mut from)?);
        if magic != MAGIC || version != VERSION {
            let said = format!("greeting {magic:#010x} of version {version}; this side speaks version {VERSION}");
            return Err(malformed(said));
        }
        let greeting = Self {
            calls_max: number32(&mut from)? as usize,
            segments_max: number32(&mut from)? as usize,
            request_bytes_in_flight_max: size(&mut from)?,
            message_bytes_max: size(&mut from)?,
            head_bytes_max: size(&mut from)?,
            silence_max: Duration::from_millis(number64(&mut from)?),
        };
        if greeting.calls_max == 0 || greeting.silence_max.is_zero() {
            return Err(malformed("a greeting that takes no calls or bears no silence"));
        }
        if from.has_remaining() {
            return Err(malformed(format!("a greeting with {} bytes too many", from.len())));
        }
        Ok(greeting)
    }
}
