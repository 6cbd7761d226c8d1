//! The byte layout of a [`Message`] for stream transports, with every length checked before anything is allocated.
//!
//! ```text
//! magic u32 | version u8 | flags u8 | reserved u16 | head_len u32 | segment_count u32 | segment_len u64 × n | head | segments
//! ```
//!
//! Little endian. A message without segments needs no frame: over HTTP, it is just its head, so curl and Python can use it.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::base::error::{Code, Error};
use crate::message::{ContentType, Message, Rope};

/// `GYMF`, read as little endian.
const MAGIC: u32 = u32::from_le_bytes(*b"GYMF");
const VERSION: u8 = 1;
const FIXED_BYTES: usize = 16;

/// The media type of a framed message.
pub const FRAME_MEDIA_TYPE: &str = "application/x-gym-frame";

/// Limits on a received message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MessageLimits {
    /// Maximum bytes of the head. A head is readable text; a rollout with images in base64 stays below this limit. The default is
    /// 256 MiB.
    pub head_bytes_max: usize,
    /// Maximum number of segments: one per column and rank of a large batch. The default is 65,536.
    pub segments_max: usize,
    /// Maximum bytes of head and segments together. The default is 16 GiB.
    pub message_bytes_max: usize,
}

impl MessageLimits {
    /// Creates limits from the bytes of the head, the number of segments, and the bytes of head and segments together.
    #[must_use]
    pub const fn new(head_bytes_max: usize, segments_max: usize, message_bytes_max: usize) -> Self {
        Self { head_bytes_max, segments_max, message_bytes_max }
    }
}

impl Default for MessageLimits {
    /// Returns the limits: 256 MiB of head, 65,536 segments, 16 GiB in total.
    fn default() -> Self {
        Self { head_bytes_max: 256 << 20, segments_max: 1 << 16, message_bytes_max: 16 << 30 }
    }
}

/// The reason why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The first bytes are not those of a frame.
    #[error("not a frame: magic {0:#010x}")]
    Magic(u32),
    /// The version or a flag is unknown to this side.
    #[error("frame version {version} with flags {flags:#04x}; this side knows version {VERSION} without flags")]
    Version {
        /// The version found.
        version: u8,
        /// The flags found.
        flags: u8,
    },
    /// A length exceeds its limit.
    #[error("{what} of {length} exceeds {limit_name} = {limit}; raise it on the receiving side if this is wanted")]
    TooLarge {
        /// The name of the length.
        what: &'static str,
        /// The value of the length.
        length: u64,
        /// The field of [`MessageLimits`] to raise.
        limit_name: &'static str,
        /// The value of the limit.
        limit: usize,
    },
    /// The number of bytes differs from the sum of the lengths.
    #[error("frame of {found} bytes, its lengths say {expected}")]
    Length {
        /// Number of bytes found.
        found: usize,
        /// Number of bytes that the header announces.
        expected: usize,
    },
}

impl From<FrameError> for Error {
    fn from(error: FrameError) -> Self {
        let code = match error {
            FrameError::TooLarge { .. } => Code::ResourceExhausted,
            _ => Code::DataLoss,
        };
        Self::not_started(code, error.to_string())
    }
}

/// Encodes a message as a frame: a prefix, then head and segments, not copied.
#[must_use]
pub fn encode(message: &Message) -> Rope {
    let mut prefix = BytesMut::with_capacity(FIXED_BYTES + 8 * message.segments.len());
    put_prefix(message, &mut prefix);
    let pieces = message.head.pieces().iter().chain(&message.segments).cloned();
    std::iter::once(prefix.freeze()).chain(pieces).collect()
}

/// Writes only the prefix of a message, for transports that send the rest in parts.
pub fn put_prefix(message: &Message, to: &mut BytesMut) {
    to.put_u32_le(MAGIC);
    to.put_u8(VERSION);
    to.put_u8(0);
    to.put_u16_le(0);
    // Every receiver rejects a head beyond 4 GiB. The length saturates, so that the receiver reports the error.
    to.put_u32_le(u32::try_from(message.head.len()).unwrap_or(u32::MAX));
    to.put_u32_le(u32::try_from(message.segments.len()).unwrap_or(u32::MAX));
    for segment in &message.segments {
        to.put_u64_le(segment.len() as u64);
    }
}

/// The lengths that a prefix announces, all within the limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Bytes of the head.
    pub head: usize,
    /// Bytes of each segment, in order.
    pub segments: Vec<usize>,
    /// Bytes of head and segments together.
    pub total: usize,
}

impl Lengths {
    /// Removes a prefix from the front of `bytes` and returns its lengths.
    ///
    /// # Errors
    /// If `bytes` does not begin with a complete prefix, or if a length exceeds `limits`. Nothing has been allocated for it by
    /// then.
    pub fn take(bytes: &mut Bytes, limits: &MessageLimits) -> Result<Self, FrameError> {
        let found = bytes.len();
        let short = |expected| FrameError::Length { found, expected };
        if found < FIXED_BYTES {
            return Err(short(FIXED_BYTES));
        }
        let magic = bytes.get_u32_le();
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        let (version, flags, _reserved) = (bytes.get_u8(), bytes.get_u8(), bytes.get_u16_le());
        if version != VERSION || flags != 0 {
            return Err(FrameError::Version { version, flags });
        }
        let head = bytes.get_u32_le() as usize;
        check("a head", head as u64, "head_bytes_max", limits.head_bytes_max)?;
        let count = bytes.get_u32_le() as usize;
        check("a segment count", count as u64, "segments_max", limits.segments_max)?;
        if bytes.len() < 8 * count {
            return Err(short(FIXED_BYTES + 8 * count));
        }
        let mut total = head as u64;
        let mut segments = Vec::with_capacity(count);
        for _ in 0..count {
            let length = bytes.get_u64_le();
            total = total.saturating_add(length);
            check("a message", total, "message_bytes_max", limits.message_bytes_max)?;
            segments.push(usize::try_from(length).unwrap_or(usize::MAX));
        }
        check("a message", total, "message_bytes_max", limits.message_bytes_max)?;
        Ok(Self { head, segments, total: usize::try_from(total).unwrap_or(usize::MAX) })
    }
}

/// Decodes a whole frame; head and segments are slices of it.
///
/// # Errors
/// If the bytes are not a frame, or if a length exceeds `limits`. Nothing has been allocated for it by then.
pub fn decode(mut frame: Bytes, limits: &MessageLimits, content_type: ContentType) -> Result<Message, FrameError> {
    let found = frame.len();
    let lengths = Lengths::take(&mut frame, limits)?;
    if frame.len() != lengths.total {
        return Err(FrameError::Length { found, expected: lengths.total.saturating_add(found - frame.len()) });
    }
    let head = frame.split_to(lengths.head);
    let segments = lengths.segments.into_iter().map(|length| frame.split_to(length)).collect();
    Ok(Message { content_type, head: head.into(), segments })
}

fn check(what: &'static str, length: u64, limit_name: &'static str, limit: usize) -> Result<(), FrameError> {
    if length > limit as u64 {
        return Err(FrameError::TooLarge { what, length, limit_name, limit });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(head: Vec<u8>, segments: Vec<Vec<u8>>) -> Message {
        Message {
            content_type: ContentType::Json,
            head: head.into(),
            segments: segments.into_iter().map(Bytes::from).collect(),
        }
    }

    #[test]
    fn segments_are_slices_of_the_frame() {
        let frame = encode(&message(b"{}".to_vec(), vec![vec![1; 1000], vec![]])).to_bytes();
        let decoded = decode(frame.clone(), &MessageLimits::default(), ContentType::Json).unwrap();
        let inside = frame.as_ptr_range();
        assert!(inside.contains(&decoded.segments[0].as_ptr()));
    }

    #[test]
    fn a_length_above_its_limit_is_refused_by_name() {
        let limits = MessageLimits { head_bytes_max: 10, segments_max: 1, message_bytes_max: 20 };
        let refused = |head: usize, segments: Vec<Vec<u8>>| {
            decode(encode(&message(vec![b' '; head], segments)).to_bytes(), &limits, ContentType::Json)
                .unwrap_err()
                .to_string()
        };
        assert!(refused(11, vec![]).contains("head_bytes_max = 10"));
        assert!(refused(1, vec![vec![], vec![]]).contains("segments_max = 1"));
        assert!(refused(1, vec![vec![0; 20]]).contains("message_bytes_max = 20"));
    }

    proptest! {
        #[test]
        fn a_message_comes_back_as_it_went(
            head in prop::collection::vec(any::<u8>(), 0..50),
            segments in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..50), 0..6),
        ) {
            let sent = message(head, segments);
            let back = decode(encode(&sent).to_bytes(), &MessageLimits::default(), ContentType::Json).unwrap();
            prop_assert_eq!(back, sent);
        }

        #[test]
        fn no_bytes_make_it_panic_or_allocate_beyond_what_came(
            mut bytes in prop::collection::vec(any::<u8>(), 0..80), framed in any::<bool>(),
        ) {
            if framed && bytes.len() >= 8 {
                bytes[..8].copy_from_slice(&[b'G', b'Y', b'M', b'F', 1, 0, 0, 0]);
            }
            if let Ok(message) = decode(bytes.clone().into(), &MessageLimits::default(), ContentType::Json) {
                prop_assert!(message.len() <= bytes.len());
            }
        }
    }
}
