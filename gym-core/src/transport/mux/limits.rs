//! Limits of one connection, each with its reason, and the handshake that announces them.

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::header::{malformed, number32, number64, size};
use crate::base::error::Result;
use crate::message::frame;
use crate::transport::ConnectOptions;

const MAGIC: u32 = u32::from_le_bytes(*b"GYMC");
const VERSION: u32 = 1;

/// Limits of an ordered connection. Each end has its own; both ends use the smaller value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionLimits {
    /// Maximum concurrent calls on one connection; further calls wait for a slot within their deadline. The default is 16,384,
    /// the same as within a process, so that moving a worker into its own process does not change its capacity.
    pub calls_max: usize,
    /// Maximum bytes of the requests in flight on one connection, which the peer may have to hold. The default is 4 GiB, a few of
    /// the largest batches. A larger message is sent alone.
    pub request_bytes_in_flight_max: usize,
    /// Maximum sum of `reply_bytes_max` over the calls in flight on one connection, which this end may have to hold. Each call
    /// reserves its share before its request is sent, so that replies never wait for capacity that requests hold.
    ///
    /// The limit bounds reservations, not memory in use. The default is 4 TiB, which is `calls_max` replies of the default limit;
    /// lower both to make them effective. The answering end rejects calls while unread replies exceed its own limit.
    pub reply_bytes_in_flight_max: usize,
    /// Maximum bytes of one message, head and segments. The default is 4 GiB, the same as for all requests in flight.
    pub message_bytes_max: usize,
    /// Maximum bytes of one message head. The default is 256 MiB, as over HTTP.
    pub head_bytes_max: usize,
    /// Maximum binary segments of one message, in either direction: one per column and rank of a large batch. The default is
    /// 65,536.
    pub segments_max: usize,
    /// Time without any message after which the peer is considered dead: stopped, hung, or cut off. The default is 15 s, because
    /// a machine that swaps is slow, and a crash is detected at once anyway.
    ///
    /// Each end sends a heartbeat at least three times within this time. Values below 300 ms count as 300 ms at both ends, so
    /// that no peer can request more than ten heartbeats a second.
    ///
    /// [`Duration::MAX`] at either end: silence ends the connection at neither end. For a peer that is watched in another way
    /// ([`ConnectOptions::watched`](crate::transport::ConnectOptions::watched)).
    pub silence_max: Duration,
}

impl ConnectionLimits {
    /// Returns the limits of a connection with these options.
    #[must_use]
    pub fn of_channel(&self, options: &ConnectOptions) -> Self {
        let silence_max = if options.watched { Duration::MAX } else { self.silence_max };
        Self { silence_max, ..self.clone() }
    }

    /// Returns the limits of one message.
    #[must_use]
    pub fn message_limits(&self) -> frame::MessageLimits {
        frame::MessageLimits {
            head_bytes_max: self.head_bytes_max,
            segments_max: self.segments_max,
            message_bytes_max: self.message_bytes_max,
        }
    }
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            calls_max: 16_384,
            request_bytes_in_flight_max: 4 << 30,
            reply_bytes_in_flight_max: 16_384 * crate::message::DEFAULT_REPLY_BYTES_MAX,
            message_bytes_max: 4 << 30,
            head_bytes_max: 256 << 20,
            segments_max: 1 << 16,
            silence_max: Duration::from_secs(15),
        }
    }
}

/// The limits that each end announces to the other before any other data: 48 bytes, little endian.
///
/// ```text
/// magic u32 | version u32 | calls u32 | segments u32 | request bytes in flight u64 | message u64 | head u64 | silence u64, ms
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handshake {
    pub(super) calls_max: usize,
    pub(super) segments_max: usize,
    pub(super) request_bytes_in_flight_max: usize,
    pub(super) message_bytes_max: usize,
    pub(super) head_bytes_max: usize,
    pub(super) silence_max: Duration,
}

impl Handshake {
    /// Number of bytes on the wire.
    pub const BYTES: usize = 48;

    /// Creates the handshake of an end with these limits.
    #[must_use]
    pub fn of(limits: &ConnectionLimits) -> Self {
        Self {
            calls_max: limits.calls_max,
            segments_max: limits.segments_max,
            request_bytes_in_flight_max: limits.request_bytes_in_flight_max,
            message_bytes_max: limits.message_bytes_max,
            head_bytes_max: limits.head_bytes_max,
            silence_max: limits.silence_max,
        }
    }

    /// Writes the handshake.
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

    /// Reads the handshake of a peer.
    ///
    /// # Errors
    /// `DataLoss` if the bytes are not a handshake, have another version, or announce no calls or no `silence_max`.
    pub fn read(mut from: Bytes) -> Result<Self> {
        let (magic, version) = (number32(&mut from)?, number32(&mut from)?);
        if magic != MAGIC || version != VERSION {
            let said = format!("handshake {magic:#010x} of version {version}; this side speaks version {VERSION}");
            return Err(malformed(said));
        }
        let handshake = Self {
            calls_max: number32(&mut from)? as usize,
            segments_max: number32(&mut from)? as usize,
            request_bytes_in_flight_max: size(&mut from)?,
            message_bytes_max: size(&mut from)?,
            head_bytes_max: size(&mut from)?,
            silence_max: Duration::from_millis(number64(&mut from)?),
        };
        if handshake.calls_max == 0 || handshake.silence_max.is_zero() {
            return Err(malformed("a handshake that announces calls_max = 0 or silence_max = 0"));
        }
        if from.has_remaining() {
            return Err(malformed(format!("a handshake with {} bytes too many", from.len())));
        }
        Ok(handshake)
    }
}
