//! What stands on the wire around a message's header and bytes, which are [`gym_core::transport::mux`]'s.
//!
//! ```text
//! frame     kind u8 | zero u8 | zero u16 | length u32 | call u64 | length bytes
//! ```
//!
//! Little endian. The first [`CHUNK_BYTES`] of a message follow its header at once, the others in body frames.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use gym_core::Result;
use gym_core::transport::mux::header::{FAILED_BYTES_MAX, HEADER_BYTES_MAX};
use gym_core::transport::mux::{ConnectionLimits, Handshake, malformed};

/// Bytes of a frame before its own.
pub(crate) const FRAME_BYTES: usize = 16;
/// A message longer than this is cut, and what is urgent goes between the pieces: at 1 GB/s a heartbeat or a cancel waits a
/// millisecond, and the frame's own 16 bytes and the reads they cost are lost in the noise.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// The first one each way: versions and limits.
    Handshake,
    /// A call's header, its first chunk behind it.
    Request,
    /// An answer's header, its first chunk behind it.
    Response,
    /// A further chunk of the message that was begun last.
    Body,
    /// The caller has left.
    Cancel,
    /// The call has no answer, and why.
    Failed,
    /// I am here.
    Heartbeat,
    /// From the server: no new calls please. From the client: none will come.
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

    /// The longest that a frame of this kind may announce.
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

/// The first bytes of every frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub(crate) kind: FrameKind,
    pub(crate) length: usize,
    pub(crate) call: u64,
}

impl FrameHeader {
    /// Reads the first bytes of a frame; what it announces is within the bound of its kind.
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
        // Beyond it nothing is sent: `HEADER_BYTES_MAX` is far below.
        to.put_u32_le(u32::try_from(self.length).unwrap_or(u32::MAX));
        to.put_u64_le(self.call);
    }
}

/// A frame that is complete with its first bytes.
pub(crate) fn bare(kind: FrameKind, call: u64) -> Bytes {
    let mut bytes = BytesMut::with_capacity(FRAME_BYTES);
    FrameHeader { kind, length: 0, call }.write(&mut bytes);
    bytes.freeze()
}

/// The first bytes of a further chunk.
pub(crate) fn body_head(call: u64, length: usize) -> Bytes {
    let mut bytes = BytesMut::with_capacity(FRAME_BYTES);
    FrameHeader { kind: FrameKind::Body, length, call }.write(&mut bytes);
    bytes.freeze()
}

/// Puts the call's number into a frame that is written already.
pub(crate) fn number_frame(frame: &mut [u8], call: u64) {
    frame[FRAME_BYTES - 8..FRAME_BYTES].copy_from_slice(&call.to_le_bytes());
}

/// The frame of what was written behind `FRAME_BYTES` of headroom. What is beyond the bound of its kind is the writer's to
/// refuse.
pub(crate) fn framed(kind: FrameKind, call: u64, mut bytes: BytesMut) -> BytesMut {
    let length = bytes.len() - FRAME_BYTES;
    let mut head = BytesMut::with_capacity(FRAME_BYTES);
    FrameHeader { kind, length, call }.write(&mut head);
    bytes[..FRAME_BYTES].copy_from_slice(&head);
    bytes
}

/// The first frame each way.
pub(crate) fn greeting_frame(limits: &ConnectionLimits) -> Bytes {
    let mut bytes = BytesMut::with_capacity(FRAME_BYTES + Handshake::BYTES);
    bytes.put_bytes(0, FRAME_BYTES);
    Handshake::of(limits).put(&mut bytes);
    framed(FrameKind::Handshake, 0, bytes).freeze()
}
