//! The header of a parcel, as this layer writes it.
//!
//! ```text
//! kind u8 | zero u8 | zero u16 | first u32 | second u32 | call u64
//! ```
//!
//! Little endian.
//!
//! | kind | lane | first | second | call | payload |
//! |---|---|---|---|---|---|
//! | greeting | ordered | | | | [`Greeting`](gym_core::mux::Greeting) |
//! | request, response | ordered | bytes of the header | where messages are cut | its number | the header, or as much of it as fits; then the first piece |
//! | header | ordered | | | its number | more of the header that was begun last |
//! | piece | ordered | its place in the plan | | its number | the piece |
//! | failed | urgent | | | its number | why |
//! | cancel | urgent | | | its number | |
//! | drain | urgent | | | | |
//! | ping, pong | urgent | | | any number, which comes back | |

use bytes::{Buf, BufMut, Bytes, BytesMut};
use gym_core::Result;
use gym_core::mux::malformed;

use crate::fabric::Lane;

/// Length of the header.
pub(crate) const WIRE_BYTES: usize = 20;

/// What a parcel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Greeting,
    Request,
    Response,
    Header,
    Piece,
    Failed,
    Cancel,
    Drain,
    Ping,
    Pong,
}

impl Kind {
    const ALL: [Self; 10] = [
        Self::Greeting,
        Self::Request,
        Self::Response,
        Self::Header,
        Self::Piece,
        Self::Failed,
        Self::Cancel,
        Self::Drain,
        Self::Ping,
        Self::Pong,
    ];

    /// Whether it keeps its place in line.
    pub(crate) fn lane(self) -> Lane {
        match self {
            Self::Greeting | Self::Request | Self::Response | Self::Header | Self::Piece => Lane::Ordered,
            Self::Failed | Self::Cancel | Self::Drain | Self::Ping | Self::Pong => Lane::Urgent,
        }
    }
}

/// The header of a parcel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wire {
    pub(crate) kind: Kind,
    pub(crate) first: u32,
    pub(crate) second: u32,
    pub(crate) call: u64,
}

impl Wire {
    /// One that says nothing but what it is, and of which call.
    pub(crate) fn bare(kind: Kind, call: u64) -> Self {
        Self { kind, first: 0, second: 0, call }
    }

    pub(crate) fn write(self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(WIRE_BYTES);
        bytes.put_u8(self.kind as u8);
        bytes.put_bytes(0, 3);
        bytes.put_u32_le(self.first);
        bytes.put_u32_le(self.second);
        bytes.put_u64_le(self.call);
        bytes.freeze()
    }

    pub(crate) fn read(mut from: &[u8]) -> Result<Self> {
        if from.len() != WIRE_BYTES {
            return Err(malformed(format!("a parcel whose header has {} bytes instead of {WIRE_BYTES}", from.len())));
        }
        let (number, zeros) = (from.get_u8(), (from.get_u8(), from.get_u16_le()));
        let kind = Kind::ALL.get(usize::from(number)).copied().filter(|_| zeros == (0, 0));
        let kind = kind.ok_or_else(|| malformed(format!("no parcel is of kind {number}")))?;
        Ok(Self { kind, first: from.get_u32_le(), second: from.get_u32_le(), call: from.get_u64_le() })
    }
}
