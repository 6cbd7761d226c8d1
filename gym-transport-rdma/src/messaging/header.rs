//! Header of an active message (AM) in the protocol of this layer.
//!
//! ```text
//! kind u8 | zero u8 | zero u16 | first u32 | second u32 | call u64
//! ```
//!
//! Little endian.
//!
//! | kind | delivery | first | second | call | payload |
//! |---|---|---|---|---|---|
//! | handshake | ordered | | | | [`Handshake`](gym_core::transport::mux::Handshake) |
//! | request, response | ordered | length of the header | size at which messages are split | call number | as much of the header as fits, then the rest of the first chunk |
//! | header rest | ordered | | | call number | continuation of the last header |
//! | chunk | ordered | index in the layout | | call number | the chunk |
//! | failed | urgent | | | call number | the reason |
//! | cancel | urgent | | | call number | |
//! | drain | urgent | | | | |
//! | ping, pong | urgent | | | any number, which the response repeats | |

use bytes::{Buf, BufMut, Bytes, BytesMut};
use gym_core::Result;
use gym_core::transport::mux::malformed;

use crate::fabric::Delivery;

/// Length of the header.
pub(crate) const AM_HEADER_BYTES: usize = 20;

/// Kind of an active message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AmKind {
    Handshake,
    Request,
    Response,
    HeaderRest,
    Chunk,
    Failed,
    Cancel,
    Drain,
    Ping,
    Pong,
}

impl AmKind {
    const ALL: [Self; 10] = [
        Self::Handshake,
        Self::Request,
        Self::Response,
        Self::HeaderRest,
        Self::Chunk,
        Self::Failed,
        Self::Cancel,
        Self::Drain,
        Self::Ping,
        Self::Pong,
    ];

    /// Returns the delivery class of this kind.
    pub(crate) fn delivery(self) -> Delivery {
        match self {
            Self::Handshake | Self::Request | Self::Response | Self::HeaderRest | Self::Chunk => Delivery::Ordered,
            Self::Failed | Self::Cancel | Self::Drain | Self::Ping | Self::Pong => Delivery::Urgent,
        }
    }
}

/// The header of an active message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AmHeader {
    pub(crate) kind: AmKind,
    pub(crate) first: u32,
    pub(crate) second: u32,
    pub(crate) call: u64,
}

impl AmHeader {
    /// Creates a header with only a kind and a call number.
    pub(crate) fn bare(kind: AmKind, call: u64) -> Self {
        Self { kind, first: 0, second: 0, call }
    }

    /// Writes the header.
    pub(crate) fn write(self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(AM_HEADER_BYTES);
        bytes.put_u8(self.kind as u8);
        bytes.put_bytes(0, 3);
        bytes.put_u32_le(self.first);
        bytes.put_u32_le(self.second);
        bytes.put_u64_le(self.call);
        bytes.freeze()
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If the length is wrong or the kind is unknown.
    pub(crate) fn read(mut from: &[u8]) -> Result<Self> {
        if from.len() != AM_HEADER_BYTES {
            return Err(malformed(format!("a message header of {} bytes; expected {AM_HEADER_BYTES}", from.len())));
        }
        let (number, zeros) = (from.get_u8(), (from.get_u8(), from.get_u16_le()));
        let kind = AmKind::ALL.get(usize::from(number)).copied().filter(|_| zeros == (0, 0));
        let kind = kind.ok_or_else(|| malformed(format!("unknown message kind {number}")))?;
        Ok(Self { kind, first: from.get_u32_le(), second: from.get_u32_le(), call: from.get_u64_le() })
    }
}
