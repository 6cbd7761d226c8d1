//! A message that is being received chunk by chunk.

use bytes::Bytes;
use gym_core::Result;
use gym_core::message::frame::{Lengths, MessageLimits};
use gym_core::transport::mux::{RequestHeader, ResponseHeader, malformed};

use crate::messaging::layout::{ALIGNMENT, ChunkLayout};

/// The header of a request or of a response.
pub(crate) trait Header: Sized {
    /// Reads the part of the header after the lengths.
    ///
    /// # Errors
    /// If the header is malformed.
    fn read(from: Bytes) -> Result<Self>;
}

impl Header for RequestHeader {
    fn read(from: Bytes) -> Result<Self> {
        Self::read(from)
    }
}

impl Header for ResponseHeader {
    fn read(from: Bytes) -> Result<Self> {
        Self::read(from)
    }
}

/// A message whose header has arrived.
#[derive(Debug)]
pub(crate) struct PartialMessage<H> {
    pub(crate) header: H,
    /// Total bytes of the head and segments.
    pub(crate) total: usize,
    parts: Vec<usize>,
    layout: ChunkLayout,
    chunks: Vec<ChunkState>,
    missing: usize,
}

#[derive(Clone, Debug)]
enum ChunkState {
    Awaited,
    Landing,
    Received(Bytes),
}

#[derive(Debug)]
pub(crate) struct CompleteMessage<H> {
    pub(crate) header: H,
    pub(crate) head: Bytes,
    pub(crate) segments: Vec<Bytes>,
}

impl<H: Header> PartialMessage<H> {
    /// Reads the first chunk, which begins with the header.
    ///
    /// # Errors
    /// If the header is malformed, a length exceeds its limit, or the first chunk does not have the length that follows
    /// from them.
    pub(crate) fn read(first_chunk: Bytes, header_bytes: usize, cut: usize, limits: &MessageLimits) -> Result<Self> {
        let mut header = first_chunk.slice(..header_bytes);
        let lengths = Lengths::take(&mut header, limits)
            .map_err(|error| gym_core::Error::from(error).with_execution(gym_core::Execution::Unknown))?;
        let header = H::read(header)?;
        let mut parts = lengths.segments;
        parts.insert(0, lengths.head);
        let layout = ChunkLayout::new(header_bytes, parts.iter().copied(), cut);
        if first_chunk.len() != layout.chunks[0] {
            let (found, expected) = (first_chunk.len(), layout.chunks[0]);
            return Err(malformed(format!("a first chunk of {found} bytes; its lengths require {expected}")));
        }
        let missing = layout.chunks.len() - 1;
        let mut chunks = vec![ChunkState::Awaited; layout.chunks.len()];
        chunks[0] = ChunkState::Received(first_chunk);
        Ok(Self { header, total: lengths.total, parts, layout, chunks, missing })
    }

    /// Starts to receive the chunk with this index. Returns its expected length.
    ///
    /// # Errors
    /// If there is no such chunk, or it has arrived before.
    pub(crate) fn begin(&mut self, place: usize) -> Result<usize> {
        let chunks = self.chunks.len();
        match self.chunks.get_mut(place) {
            Some(chunk @ ChunkState::Awaited) => {
                *chunk = ChunkState::Landing;
                Ok(self.layout.chunks[place])
            }
            Some(_) => Err(malformed(format!("chunk {place} came twice"))),
            None => Err(malformed(format!("chunk {place} of a message of {chunks} chunks"))),
        }
    }

    /// Stores a chunk that has been received.
    pub(crate) fn put(&mut self, place: usize, bytes: Bytes) {
        if let Some(chunk @ ChunkState::Landing) = self.chunks.get_mut(place) {
            *chunk = ChunkState::Received(bytes);
            self.missing -= 1;
        }
    }

    /// Returns the lengths of the chunks that are being received.
    pub(crate) fn landing(&self) -> impl Iterator<Item = usize> {
        let chunks = self.chunks.iter().zip(&self.layout.chunks);
        chunks.filter(|(chunk, _)| matches!(chunk, ChunkState::Landing)).map(|(_, bytes)| *bytes)
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Returns the message. Call it only when the message is complete.
    pub(crate) fn finish(self) -> CompleteMessage<H> {
        let part = |(length, (chunk, start)): (usize, &(usize, usize))| match &self.chunks[*chunk] {
            ChunkState::Received(chunk) if length > 0 => chunk.slice(*start..start + length),
            _ => Bytes::new(),
        };
        let mut parts = self.parts.iter().copied().zip(&self.layout.positions).map(part);
        let head = parts.next().unwrap_or_default();
        let segments = parts.collect();
        CompleteMessage { header: self.header, head, segments }
    }
}

/// Copies the bytes to an address that is a multiple of [`ALIGNMENT`].
pub(crate) fn aligned(bytes: &[u8]) -> Bytes {
    let mut copy = Vec::<u8>::with_capacity(bytes.len() + ALIGNMENT);
    let start = copy.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
    copy.resize(start, 0);
    copy.extend_from_slice(bytes);
    Bytes::from(copy).slice(start..)
}
