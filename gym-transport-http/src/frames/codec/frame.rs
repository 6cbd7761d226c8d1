//! The frames on the wire around a message's header and bytes, which [`gym_core::transport::mux`] defines.
//!
//! ```text
//! frame     kind u8 | zero u8 | zero u16 | length u32 | call u64 | length bytes
//! ```
//!
//! Integers are little endian. The first [`CHUNK_BYTES`] of a message follow its header directly, the other bytes in body frames.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use gym_core::Result;
use gym_core::transport::mux::header::{FAILED_BYTES_MAX, HEADER_BYTES_MAX};
use gym_core::transport::mux::{ConnectionLimits, Handshake, malformed};

/// Size of a frame's own header.
pub(crate) const FRAME_BYTES: usize = 16;
/// A message longer than this is split, and urgent frames are sent between the chunks. At 1 GB/s, a heartbeat or a cancellation
/// waits one millisecond. The cost of the 16 bytes of each frame, and of reading them, is negligible.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// The first frame in each direction: versions and limits.
    Handshake,
    /// The header of a call, followed by its first chunk.
    Request,
    /// The header of a response, followed by its first chunk.
    Response,
    /// A further chunk of the message that was begun last.
    Body,
    /// The caller has cancelled the call.
    Cancel,
    /// The call has no response, with the reason.
    Failed,
    /// A heartbeat, without content.
    Heartbeat,
    /// From the server: requests that the client send no new calls. From the client: confirms that no new calls follow.
    Drain,
}

impl FrameKind {
    const ALL: [Self; 8] = [
        Self::Handshake,
        Self::Request,
        Self::Response,
        Self::Body,
        Self::Cancel,
        Self::Failed,
        Self::Heartbeat,
        Self::Drain,
    ];

    /// Returns the maximum length that a frame of this kind can announce.
    fn length_max(self) -> usize {
        match self {
            Self::Handshake => Handshake::BYTES,
            Self::Request | Self::Response => HEADER_BYTES_MAX,
            Self::Body => CHUNK_BYTES,
            Self::Failed => FAILED_BYTES_MAX,
            Self::Cancel | Self::Heartbeat | Self::Drain => 0,
        }
    }
}

/// The header of every frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub(crate) kind: FrameKind,
    pub(crate) length: usize,
    pub(crate) call: u64,
}

impl FrameHeader {
    /// Parses the header of a frame; its length is within the limit of its kind.
    pub(crate) fn read(bytes: [u8; FRAME_BYTES]) -> Result<Self> {
        let mut from = &bytes[..];
        let (number, zeros) = (from.get_u8(), (from.get_u8(), from.get_u16_le()));
        let (length, call) = (from.get_u32_le() as usize, from.get_u64_le());
        let kind = FrameKind::ALL.get(usize::from(number)).copied().filter(|_| zeros == (0, 0));
        let kind = kind.ok_or_else(|| malformed(format!("no frame begins with {:02x?}", &bytes[..4])))?;
        if length > kind.length_max() {
            return Err(malformed(format!("a {kind:?} frame of {length} bytes; {} is the most", kind.length_max())));
        }
        Ok(Self { kind, length, call })
    }

    pub(crate) fn write(self, to: &mut BytesMut) {
        to.put_u8(self.kind as u8);
        to.put_bytes(0, 3);
        // Longer frames are never sent: `HEADER_BYTES_MAX` is far below this limit.
        to.put_u32_le(u32::try_from(self.length).unwrap_or(u32::MAX));
        to.put_u64_le(self.call);
    }
}

/// Returns a frame that consists only of its header.
pub(crate) fn bare(kind: FrameKind, call: u64) -> Bytes {
    let mut bytes = BytesMut::with_capacity(FRAME_BYTES);
    FrameHeader { kind, length: 0, call }.write(&mut bytes);
    bytes.freeze()
}

/// Returns the header of a further chunk.
pub(crate) fn body_head(call: u64, length: usize) -> Bytes {
    let mut bytes = BytesMut::with_capacity(FRAME_BYTES);
    FrameHeader { kind: FrameKind::Body, length, call }.write(&mut bytes);
    bytes.freeze()
}

/// Writes the call's number into a frame that is already encoded.
pub(crate) fn number_frame(frame: &mut [u8], call: u64) {
    frame[FRAME_BYTES - 8..FRAME_BYTES].copy_from_slice(&call.to_le_bytes());
}

/// Fills in the frame header in the first `FRAME_BYTES` of `bytes`, which are reserved for it. The caller checks that the content
/// is within the limit of its kind.
pub(crate) fn framed(kind: FrameKind, call: u64, mut bytes: BytesMut) -> BytesMut {
    let length = bytes.len() - FRAME_BYTES;
    let mut head = BytesMut::with_capacity(FRAME_BYTES);
    FrameHeader { kind, length, call }.write(&mut head);
    bytes[..FRAME_BYTES].copy_from_slice(&head);
    bytes
}

/// Returns the first frame of each direction.
pub(crate) fn greeting_frame(limits: &ConnectionLimits) -> Bytes {
    let mut bytes = BytesMut::with_capacity(FRAME_BYTES + Handshake::BYTES);
    bytes.put_bytes(0, FRAME_BYTES);
    Handshake::of(limits).put(&mut bytes);
    framed(FrameKind::Handshake, 0, bytes).freeze()
}
