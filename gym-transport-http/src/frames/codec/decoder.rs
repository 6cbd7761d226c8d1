//! Decodes frames without a socket: returns the buffer for the next bytes, and the events of the bytes so far.
//!
//! Large parts of a message are read from the socket directly into their final buffer; all other bytes pass through a small
//! staging buffer. A length is checked before memory is allocated for it, and each part gets its buffer only when the previous part
//! is complete. A peer that announces much and sends little therefore costs little.

use std::sync::Arc;

use bytes::Bytes;
use gym_core::Result;
use gym_core::message::Loan;
use gym_core::message::frame::{Lengths, MessageLimits};
use gym_core::transport::mux::malformed;

use crate::frames::buffers::{ReceiveBuffer, ReceiveBufferPool};
use crate::frames::codec::frame::{CHUNK_BYTES, FRAME_BYTES, FrameHeader, FrameKind};

/// Size of the staging buffer: a few hundred small calls at a time.
const STAGING_BYTES: usize = 64 << 10;
/// From this size on, bytes of a part are read directly into its buffer; below, another system call costs more than the copy.
const DIRECT_BYTES_MIN: usize = 4 << 10;

/// An event of the decoder.
#[derive(Debug)]
pub(crate) enum Event {
    Handshake(Bytes),
    /// The start of a message. The message is skipped unless [`Decoder::keep`] is called before the next event.
    Start(MessageStart),
    /// A large segment of a kept request is about to arrive. It is received into memory of the pool, unless [`Decoder::place`] is called before the next
    /// event.
    Segment(SegmentStart),
    /// The kept message is complete.
    Complete(CompleteMessage),
    Cancel(u64),
    Failed(u64, Bytes),
    Heartbeat,
    Drain,
}

/// The start of a message.
#[derive(Debug)]
pub(crate) struct MessageStart {
    pub(crate) kind: FrameKind,
    pub(crate) call: u64,
    /// The rest of the header, after the lengths.
    pub(crate) header: Bytes,
    /// Number of bytes of its head and segments.
    pub(crate) total: usize,
}

/// The start of a segment.
#[derive(Debug)]
pub(crate) struct SegmentStart {
    /// The head of its message, whole.
    pub(crate) head: Bytes,
    pub(crate) segment: usize,
    pub(crate) length: usize,
}

#[derive(Debug)]
pub(crate) struct CompleteMessage {
    pub(crate) call: u64,
    pub(crate) head: Bytes,
    pub(crate) segments: Vec<Bytes>,
}

pub(crate) struct Decoder {
    limits: MessageLimits,
    pool: Arc<ReceiveBufferPool>,
    staging: Vec<u8>,
    start: usize,
    end: usize,
    stage: Stage,
    partial: Option<PartialMessage>,
    chunk_left: usize,
    /// `true` if the last returned space was a part's own buffer.
    direct: bool,
}

#[derive(Clone, Copy)]
enum Stage {
    Frame,
    Payload(FrameHeader),
    Body,
}

/// A message that is being received.
struct PartialMessage {
    call: u64,
    lengths: Lengths,
    left: usize,
    keep: bool,
    /// Whether the receiver is asked where its large segments are to go.
    asks: bool,
    /// The answer for the next segment.
    asked: Option<Option<Loan>>,
    /// Complete parts: the head, then the segments.
    parts: Vec<Bytes>,
    buffer: Option<ReceiveBuffer>,
    filled: usize,
}

impl PartialMessage {
    /// Freezes the full part and allocates the buffer of the next one. Returns a segment whose place must be asked for first.
    fn settle(&mut self, pool: &Arc<ReceiveBufferPool>) -> Result<Option<SegmentStart>> {
        loop {
            match self.buffer.take() {
                Some(buffer) if self.filled < buffer.len() => {
                    self.buffer = Some(buffer);
                    return Ok(None);
                }
                Some(buffer) => {
                    self.parts.push(buffer.freeze());
                    self.filled = 0;
                }
                None if self.parts.is_empty() => self.buffer = Some(pool.buffer(self.lengths.head)?),
                None if self.parts.len() <= self.lengths.segments.len() => {
                    let segment = self.parts.len() - 1;
                    let length = self.lengths.segments[segment];
                    if self.asks && length >= DIRECT_BYTES_MIN && self.asked.is_none() {
                        self.asked = Some(None);
                        return Ok(Some(SegmentStart { head: self.parts[0].clone(), segment, length }));
                    }
                    self.buffer = Some(match self.asked.take().flatten() {
                        Some(loan) => ReceiveBuffer::Lent(loan),
                        None => pool.buffer(length)?,
                    });
                }
                None => return Ok(None),
            }
        }
    }

    /// Returns the number of bytes that the current part still needs.
    fn part_left(&self) -> usize {
        self.buffer.as_ref().map_or(0, |buffer| buffer.len() - self.filled)
    }
}

impl Decoder {
    /// Creates a decoder; `already` holds bytes that were received before.
    pub(crate) fn new(limits: MessageLimits, pool: Arc<ReceiveBufferPool>, already: &[u8]) -> Self {
        let mut staging = vec![0; STAGING_BYTES.max(already.len())];
        staging[..already.len()].copy_from_slice(already);
        Self {
            limits,
            pool,
            staging,
            start: 0,
            end: already.len(),
            stage: Stage::Frame,
            partial: None,
            chunk_left: 0,
            direct: false,
        }
    }

    /// Returns the buffer for the next bytes, which is never empty. Call it when [`Decoder::next`] has returned `None`.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        let staged = self.end - self.start;
        if staged == 0 {
            (self.start, self.end) = (0, 0);
        }
        self.direct = false;
        let mut staging_max = usize::MAX;
        if let Some(partial) = &self.partial {
            let wanted = partial.part_left().min(self.chunk_left);
            if staged == 0 && wanted >= DIRECT_BYTES_MIN {
                self.direct = true;
            } else if matches!(self.stage, Stage::Frame) && partial.left >= DIRECT_BYTES_MIN {
                // Reads only the start of the frame, because the following bytes are read directly into the part's buffer.
                staging_max = FRAME_BYTES - staged;
            }
        }
        if self.direct {
            let partial = self.partial.as_mut().expect("it was there above");
            let wanted = partial.part_left().min(self.chunk_left);
            let buffer = partial.buffer.as_mut().expect("a part that wants bytes has a buffer");
            return &mut buffer.from(partial.filled)[..wanted];
        }
        let needed = match self.stage {
            Stage::Payload(head) => head.length,
            Stage::Frame => FRAME_BYTES,
            Stage::Body => 1,
        };
        if self.staging.len() - self.start < needed.max(staged + 1) {
            self.staging.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, staged);
            if self.staging.len() < needed {
                self.staging.resize(needed, 0);
            }
        }
        let until = self.staging.len().min(self.end.saturating_add(staging_max));
        &mut self.staging[self.end..until]
    }

    /// Records that `count` bytes were written into the space.
    pub(crate) fn advance(&mut self, count: usize) {
        match &mut self.partial {
            Some(partial) if self.direct => {
                partial.filled += count;
                partial.left -= count;
                self.chunk_left -= count;
            }
            _ => self.end += count,
        }
    }

    /// Returns `true` if the bytes so far end at the end of a frame.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.partial.is_none() && self.start == self.end && matches!(self.stage, Stage::Frame)
    }

    /// Keeps the message whose start was the last event.
    pub(crate) fn keep(&mut self) {
        if let Some(partial) = &mut self.partial {
            partial.keep = true;
            partial.parts.reserve_exact(1 + partial.lengths.segments.len());
        }
    }

    /// Receives the segment whose start was the last event into this memory, which has its length.
    pub(crate) fn place(&mut self, memory: Option<Loan>) {
        if let Some(partial) = &mut self.partial {
            partial.asked = Some(memory);
        }
    }

    /// Returns the next event of the bytes so far; `None` if more bytes are needed.
    pub(crate) fn next(&mut self) -> Result<Option<Event>> {
        loop {
            let staged = &self.staging[self.start..self.end];
            match self.stage {
                Stage::Frame => {
                    let Some(first) = staged.first_chunk() else { return Ok(None) };
                    let head = FrameHeader::read(*first)?;
                    self.start += FRAME_BYTES;
                    if let Some(event) = self.begin(head)? {
                        return Ok(Some(event));
                    }
                }
                Stage::Payload(head) => {
                    let Some(payload) = staged.get(..head.length) else { return Ok(None) };
                    let payload = Bytes::copy_from_slice(payload);
                    self.start += head.length;
                    self.stage = Stage::Frame;
                    return self.complete(head, payload).map(Some);
                }
                Stage::Body => {
                    let Some(partial) = &mut self.partial else { return Err(malformed("a body without a message")) };
                    if partial.keep
                        && let Some(start) = partial.settle(&self.pool)?
                    {
                        return Ok(Some(Event::Segment(start)));
                    }
                    if partial.left == 0 {
                        self.stage = Stage::Frame;
                        let done = self.partial.take().filter(|partial| partial.keep);
                        if let Some(mut done) = done {
                            let segments = done.parts.split_off(1);
                            let head = done.parts.pop().unwrap_or_default();
                            return Ok(Some(Event::Complete(CompleteMessage { call: done.call, head, segments })));
                        }
                        continue;
                    }
                    if self.chunk_left == 0 {
                        self.stage = Stage::Frame;
                        continue;
                    }
                    if staged.is_empty() {
                        return Ok(None);
                    }
                    let mut count = staged.len().min(self.chunk_left);
                    if let Some(buffer) = &mut partial.buffer {
                        count = count.min(buffer.len() - partial.filled);
                        buffer.from(partial.filled)[..count].copy_from_slice(&staged[..count]);
                        partial.filled += count;
                    }
                    partial.left -= count;
                    self.chunk_left -= count;
                    self.start += count;
                }
            }
        }
    }

    fn begin(&mut self, head: FrameHeader) -> Result<Option<Event>> {
        match (head.kind, &self.partial) {
            (FrameKind::Cancel, _) => return Ok(Some(Event::Cancel(head.call))),
            (FrameKind::Heartbeat, _) => return Ok(Some(Event::Heartbeat)),
            (FrameKind::Drain, _) => return Ok(Some(Event::Drain)),
            (FrameKind::Body, Some(partial)) => {
                if head.call != partial.call || head.length == 0 || head.length > partial.left {
                    let (call, left) = (partial.call, partial.left);
                    return Err(malformed(format!(
                        "{} bytes of call {} where {left} of call {call} are awaited",
                        head.length, head.call
                    )));
                }
                self.chunk_left = head.length;
                self.stage = Stage::Body;
            }
            (FrameKind::Failed, _) | (FrameKind::Handshake | FrameKind::Request | FrameKind::Response, None) => {
                self.stage = Stage::Payload(head);
            }
            (kind, _) => return Err(malformed(format!("a {kind:?} frame where none can be"))),
        }
        Ok(None)
    }

    fn complete(&mut self, head: FrameHeader, mut payload: Bytes) -> Result<Event> {
        match head.kind {
            FrameKind::Handshake => return Ok(Event::Handshake(payload)),
            FrameKind::Failed => return Ok(Event::Failed(head.call, payload)),
            _ => {}
        }
        let lengths = Lengths::take(&mut payload, &self.limits)
            .map_err(|error| gym_core::Error::from(error).with_execution(gym_core::Execution::Unknown))?;
        let total = lengths.total;
        self.chunk_left = total.min(CHUNK_BYTES);
        self.stage = Stage::Body;
        self.partial = Some(PartialMessage {
            call: head.call,
            lengths,
            left: total,
            keep: false,
            asks: head.kind == FrameKind::Request,
            asked: None,
            parts: Vec::new(),
            buffer: None,
            filled: 0,
        });
        Ok(Event::Start(MessageStart { kind: head.kind, call: head.call, header: payload, total }))
    }
}
