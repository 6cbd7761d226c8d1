//! Messages as HTTP bodies. They are sent piece by piece without a copy, and received into one buffer with at most one copy.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use gym_core::message::ContentType;
use gym_core::message::frame::{FRAME_MEDIA_TYPE, FrameError, MessageLimits, decode, encode};
use gym_core::{Message, Rope};
use http_body::{Body, Frame, SizeHint};
use parking_lot::{Mutex, MutexGuard};

/// Capacity reserved at once for a body of announced length. A length that is announced but never sent must not cost memory. Beyond
/// this size, the buffer doubles as bytes arrive.
pub(crate) const PRESIZE_BYTES_MAX: usize = 4 << 20;

/// From this size on, a buffer is worth keeping. The allocator returns larger ones to the kernel on every free, and the kernel
/// clears their pages for the next one. That takes a third of the time of a body of one megabyte.
const SPARE_BUFFER_BYTES_MIN: usize = 128 << 10;

/// Maximum number of kept bytes: a handful of rollouts of 64k tokens, and acceptable for an idle process.
const SPARE_BYTES_MAX: usize = 16 << 20;

/// Buffers of large bodies that were dropped, for the next large bodies of this process.
static SPARE: Mutex<SpareBuffers> = Mutex::new(SpareBuffers { buffers: Vec::new(), bytes: 0 });

struct SpareBuffers {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

impl SpareBuffers {
    fn lock() -> MutexGuard<'static, Self> {
        SPARE.lock()
    }
}

/// Returns an empty buffer of at least this capacity; reuses a kept one that fits without waste, if there is one.
pub(crate) fn take_buffer(capacity: usize) -> Vec<u8> {
    if capacity >= SPARE_BUFFER_BYTES_MIN {
        let mut kept = SpareBuffers::lock();
        let fits = |kept: &Vec<u8>| (capacity..=2 * capacity).contains(&kept.capacity());
        if let Some(at) = kept.buffers.iter().position(fits) {
            let buffer = kept.buffers.swap_remove(at);
            kept.bytes -= buffer.capacity();
            return buffer;
        }
    }
    Vec::with_capacity(capacity)
}

/// A large body. Its buffer is kept when its last slice is dropped.
struct RecycledBody(Vec<u8>);

impl AsRef<[u8]> for RecycledBody {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for RecycledBody {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.0);
        let mut kept = SpareBuffers::lock();
        if kept.bytes + buffer.capacity() <= SPARE_BYTES_MAX {
            buffer.clear();
            kept.bytes += buffer.capacity();
            kept.buffers.push(buffer);
        }
    }
}

/// Converts a complete body into bytes.
pub(crate) fn freeze(body: Vec<u8>) -> Bytes {
    if body.capacity() < SPARE_BUFFER_BYTES_MIN { body.into() } else { Bytes::from_owner(RecycledBody(body)) }
}

/// Returns the size of a frame's prefix for a given number of segments.
const fn prefix_bytes(segments: usize) -> usize {
    16 + 8 * segments
}

/// The pieces of a rope, one frame each, with an exact length.
#[derive(Debug, Default)]
pub(crate) struct RopeBody {
    pieces: BodyPieces,
    left: u64,
}

#[derive(Debug, Default)]
enum BodyPieces {
    #[default]
    None,
    One(Bytes),
    Many(VecDeque<Bytes>),
}

impl RopeBody {
    /// Creates the body of a message: its head unchanged, or a frame if there are segments.
    pub(crate) fn of(message: &Message) -> Self {
        if message.segments.is_empty() { Self::new(&message.head) } else { Self::new(&encode(message)) }
    }

    fn new(rope: &Rope) -> Self {
        let pieces = match rope.pieces() {
            [one] if one.is_empty() => BodyPieces::None,
            [one] => BodyPieces::One(one.clone()),
            many => BodyPieces::Many(many.iter().cloned().collect()),
        };
        Self { pieces, left: rope.len() as u64 }
    }
}

impl Body for RopeBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = match &mut self.pieces {
            BodyPieces::None => None,
            BodyPieces::One(one) => {
                let one = std::mem::take(one);
                self.pieces = BodyPieces::None;
                Some(one)
            }
            BodyPieces::Many(many) => many.pop_front(),
        };
        self.left -= piece.as_ref().map_or(0, |piece| piece.len() as u64);
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// Returns the pieces of a message's body, in order: of its head unchanged, or of a frame if there are segments.
pub(crate) fn pieces(message: &Message) -> VecDeque<Bytes> {
    let pieces = |rope: &Rope| rope.pieces().iter().filter(|piece| !piece.is_empty()).cloned().collect();
    if message.segments.is_empty() { pieces(&message.head) } else { pieces(&encode(message)) }
}

/// The format of a body, according to its headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BodyFormat {
    framed: bool,
    head: ContentType,
}

impl BodyFormat {
    /// Determines the format from the media type of the body, and from that of the head if the body is a frame.
    pub(crate) fn of(media_type: Option<&str>, framed_head: Option<&str>) -> Self {
        let framed = media_type == Some(FRAME_MEDIA_TYPE);
        let head = if framed { framed_head } else { media_type };
        Self { framed, head: head.map_or(ContentType::Json, ContentType::from_media_type) }
    }

    /// Returns the number of bytes by which the body may exceed its message.
    pub(crate) fn prefix_bytes_max(&self) -> usize {
        if self.framed { prefix_bytes(1 << 16) } else { 0 }
    }

    /// Decodes the body into a message.
    pub(crate) fn message(self, body: Bytes, segments_max: usize) -> Result<Message, FrameError> {
        if self.framed {
            // The body is in memory, within its limit: only the number of segments still needs a limit.
            let limits = MessageLimits::new(body.len(), segments_max, body.len());
            decode(body, &limits, self.head)
        } else {
            Ok(Message { content_type: self.head, head: body.into(), segments: Vec::new() })
        }
    }
}

/// A body that is longer than its limit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

/// Collects an incoming body: a single frame is returned unchanged, several are copied into one buffer.
#[derive(Debug)]
pub(crate) struct BodyCollector {
    first: Bytes,
    rest: Vec<u8>,
    announced: usize,
    bytes_max: usize,
}

impl BodyCollector {
    /// Creates a collector for a body of this announced length.
    pub(crate) fn new(announced: Option<u64>, bytes_max: usize) -> Result<Self, TooLong> {
        let announced = usize::try_from(announced.unwrap_or(0)).unwrap_or(usize::MAX);
        if announced > bytes_max {
            return Err(TooLong);
        }
        Ok(Self { first: Bytes::new(), rest: Vec::new(), announced, bytes_max })
    }

    pub(crate) fn push(&mut self, piece: Bytes) -> Result<(), TooLong> {
        if self.rest.is_empty() && self.first.is_empty() {
            self.first = piece;
            return if self.first.len() > self.bytes_max { Err(TooLong) } else { Ok(()) };
        }
        if self.rest.is_empty() {
            self.rest = take_buffer(self.announced.min(PRESIZE_BYTES_MAX).max(self.first.len() + piece.len()));
            self.rest.extend_from_slice(&std::mem::take(&mut self.first));
        }
        if piece.len() > self.bytes_max - self.rest.len() {
            return Err(TooLong);
        }
        self.rest.extend_from_slice(&piece);
        Ok(())
    }

    pub(crate) fn finish(self) -> Bytes {
        if self.rest.is_empty() { self.first } else { freeze(self.rest) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_of_one_frame_is_not_copied() {
        let frame = Bytes::from(vec![1; 100]);
        let mut collector = BodyCollector::new(Some(100), 100).unwrap();
        collector.push(frame.clone()).unwrap();
        assert_eq!(collector.finish().as_ptr(), frame.as_ptr());
    }

    #[test]
    fn the_buffer_of_a_large_body_is_used_again_and_cleared() {
        let length = 3 * SPARE_BUFFER_BYTES_MIN;
        let gather = |byte: u8| {
            let mut gather = BodyCollector::new(Some(length as u64), length).unwrap();
            for _ in 0..3 {
                gather.push(vec![byte; SPARE_BUFFER_BYTES_MIN].into()).unwrap();
            }
            gather.finish()
        };
        let first = gather(1);
        let (place, part) = (first.as_ptr(), first.slice(1..));
        drop(first);
        let second = gather(2);
        assert_ne!(second.as_ptr(), place, "a part of the first is still held");
        drop((part, second));
        let third = gather(3);
        assert!(third.iter().all(|byte| *byte == 3) && third.len() == length);
        assert!(SpareBuffers::lock().bytes <= SPARE_BYTES_MAX);
    }

    #[test]
    fn frames_are_joined_in_order_up_to_the_limit() {
        let mut gather = BodyCollector::new(None, 5).unwrap();
        gather.push(Bytes::from_static(b"ab")).unwrap();
        gather.push(Bytes::from_static(b"cde")).unwrap();
        assert_eq!(gather.push(Bytes::from_static(b"f")), Err(TooLong));
        assert_eq!(gather.finish(), "abcde");
        assert!(BodyCollector::new(Some(6), 5).is_err());
        assert_eq!(BodyCollector::new(None, 5).unwrap().push(Bytes::from_static(b"abcdef")), Err(TooLong));
    }
}
