//! Both ends without a fabric, for fuzzers.

mod answering;
mod calling;

use std::collections::{HashMap, VecDeque};
use std::sync::LazyLock;

use bytes::{Buf, Bytes, BytesMut};
use gym_core::message::ContentType;
use gym_core::{Message, Result};

pub use answering::take_requests;
pub use calling::take_responses;

use crate::fabric::{EagerBytes, Payload};
use crate::memory::{Buffer, Pool, PoolOptions};
use crate::messaging::header::{AM_HEADER_BYTES, AmHeader, AmKind};
use crate::messaging::layout::ChunkLayout;
use crate::messaging::reassembly::length;

static POOL: LazyLock<Pool> = LazyLock::new(|| Pool::new(PoolOptions::default()));

/// Split size of generated messages: the minimum.
const CUT: usize = 1 << 10;
/// Maximum number of parts (head and segments) of a generated message.
const PARTS_MAX: usize = 4;

/// Payloads in flight to an end.
#[derive(Default)]
struct PayloadsInFlight {
    /// Announced payloads that the end receives.
    landing: VecDeque<(u64, Buffer)>,
    /// Lengths of the chunks of the last generated message of each call.
    chunks: HashMap<u64, Vec<usize>>,
    /// Total bytes of the buffers that were taken.
    taken: usize,
}

impl PayloadsInFlight {
    /// Takes a buffer for an announced payload.
    ///
    /// # Errors
    /// If there is no memory for it, as a fabric would report.
    fn land(&mut self, key: u64, payload: &Payload<'_>) -> Result<()> {
        let buffer = POOL.take(usize::try_from(length(payload)).unwrap_or(usize::MAX))?;
        self.taken += buffer.len();
        self.landing.push_back((key, buffer));
        Ok(())
    }

    /// Generates a chunk of a call's message, seldom of another length than its first chunk specified.
    fn chunk(&self, call: u64, input: &mut &[u8]) -> (AmHeader, Payload<'static>) {
        let (place, wrong) = (byte(input) % 8, byte(input));
        let length = self.chunks.get(&call).and_then(|chunks| chunks.get(usize::from(place)));
        let length = length.map_or(0, |length| *length as u64) + u64::from(wrong.saturating_sub(250));
        (AmHeader { first: u32::from(place), ..AmHeader::bare(AmKind::Chunk, call) }, Payload::Announced(length))
    }

    /// Completes one of the payloads.
    fn landed(&mut self, input: &mut &[u8]) -> Option<(u64, Bytes)> {
        let at = usize::from(byte(input));
        let (key, buffer) = self.landing.remove(at % self.landing.len().max(1))?;
        Some((key, buffer.freeze()))
    }
}

/// Reads a message with an eager payload from the input.
fn raw<'a>(input: &mut &'a [u8]) -> Result<(AmHeader, Payload<'a>)> {
    let am = AmHeader::read(take(input, AM_HEADER_BYTES))?;
    Ok((am, Payload::Eager(EagerBytes::Borrowed(take_some(input)))))
}

/// Reads a message with an announced payload from the input.
fn raw_announced(input: &mut &[u8]) -> Result<(AmHeader, Payload<'static>)> {
    let am = AmHeader::read(take(input, AM_HEADER_BYTES))?;
    Ok((am, Payload::Announced(u64::from_le_bytes(take(input, 8).try_into().unwrap_or_default()))))
}

/// Generates a valid first chunk for a head and segments of these lengths. Returns it with the lengths of all chunks.
fn first_chunk(am: AmHeader, parts: &[usize], header: impl Fn(&Message) -> BytesMut) -> (AmHeader, Bytes, Vec<usize>) {
    let mut parts_of_zeros = parts.iter().map(|length| Bytes::from(vec![0; *length]));
    let head = parts_of_zeros.next().unwrap_or_default();
    let message = Message { content_type: ContentType::Json, head: head.into(), segments: parts_of_zeros.collect() };
    let mut payload = header(&message);
    let layout = ChunkLayout::new(payload.len(), parts.iter().copied(), CUT);
    let am = AmHeader { first: payload.len() as u32, second: CUT as u32, ..am };
    payload.resize(layout.chunks[0], 0);
    (am, payload.freeze(), layout.chunks)
}

/// Reads the lengths of the head and segments of a message.
fn parts(input: &mut &[u8]) -> Vec<usize> {
    let count = usize::from(byte(input)) % PARTS_MAX + 1;
    (0..count).map(|_| usize::from(byte(input)) * usize::from(byte(input)) / 16).collect()
}

fn byte(input: &mut &[u8]) -> u8 {
    input.try_get_u8().unwrap_or_default()
}

fn take<'a>(input: &mut &'a [u8], length: usize) -> &'a [u8] {
    let (taken, rest) = input.split_at(length.min(input.len()));
    *input = rest;
    taken
}

/// Takes as many bytes as the next two bytes specify.
fn take_some<'a>(input: &mut &'a [u8]) -> &'a [u8] {
    let length = usize::from(byte(input)) | usize::from(byte(input)) << 8;
    take(input, length)
}
