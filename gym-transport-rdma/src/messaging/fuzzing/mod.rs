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

/// The size at which made-up messages are split: the least that is allowed.
const CUT: usize = 1 << 10;
/// The head and segments of a message that is made up are no more.
const PARTS_MAX: usize = 4;

/// What is on its way to an end, whichever it is.
#[derive(Default)]
struct OnTheWay {
    /// Payloads that were announced and taken.
    landing: VecDeque<(u64, Buffer)>,
    /// Of every message that was made up last under a number: the bytes of its chunks.
    chunks: HashMap<u64, Vec<usize>>,
    /// Bytes of the buffers that were taken.
    taken: usize,
}

impl OnTheWay {
    /// An announced payload is wanted.
    ///
    /// # Errors
    /// When there is no memory for it, as its fabric would say.
    fn land(&mut self, key: u64, payload: &Payload<'_>) -> Result<()> {
        let buffer = POOL.take(usize::try_from(length(payload)).unwrap_or(usize::MAX))?;
        self.taken += buffer.len();
        self.landing.push_back((key, buffer));
        Ok(())
    }

    /// A chunk of a call's message, seldom of another length than its first chunk said.
    fn chunk(&self, call: u64, input: &mut &[u8]) -> (AmHeader, Payload<'static>) {
        let (place, wrong) = (byte(input) % 8, byte(input));
        let length = self.chunks.get(&call).and_then(|chunks| chunks.get(usize::from(place)));
        let length = length.map_or(0, |length| *length as u64) + u64::from(wrong.saturating_sub(250));
        (AmHeader { first: u32::from(place), ..AmHeader::bare(AmKind::Chunk, call) }, Payload::Announced(length))
    }

    /// One of the payloads is there.
    fn landed(&mut self, input: &mut &[u8]) -> Option<(u64, Bytes)> {
        let at = usize::from(byte(input));
        let (key, buffer) = self.landing.remove(at % self.landing.len().max(1))?;
        Some((key, buffer.freeze()))
    }
}

/// A message of the input's bytes as they are.
fn raw<'a>(input: &mut &'a [u8]) -> Result<(AmHeader, Payload<'a>)> {
    let am = AmHeader::read(take(input, AM_HEADER_BYTES))?;
    Ok((am, Payload::Eager(EagerBytes::Borrowed(take_some(input)))))
}

/// One that announces whatever the input says.
fn raw_announced(input: &mut &[u8]) -> Result<(AmHeader, Payload<'static>)> {
    let am = AmHeader::read(take(input, AM_HEADER_BYTES))?;
    Ok((am, Payload::Announced(u64::from_le_bytes(take(input, 8).try_into().unwrap_or_default()))))
}

/// The first chunk of a message with a head and segments of these lengths, as a peer of ours sends it, and the bytes of its chunks.
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

/// Lengths of the head and segments of a message.
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

/// As many bytes as the next two say.
fn take_some<'a>(input: &mut &'a [u8]) -> &'a [u8] {
    let length = usize::from(byte(input)) | usize::from(byte(input)) << 8;
    take(input, length)
}
