//! Both ends' parcels without a fabric.

mod answering;
mod calling;

use std::sync::LazyLock;

use bytes::{Buf, Bytes, BytesMut};
use gym_core::{ContentType, Message};

pub use answering::take_parcels;
pub use calling::take_answers;

use super::inbox;
use super::plan::Plan;
use super::wire::Wire;
use crate::fabric::Payload;
use crate::pool::{Buffer, Pool, PoolOptions};

static POOL: LazyLock<Pool> = LazyLock::new(|| Pool::new(PoolOptions::default()));

/// Where the made-up openings are cut: the least that is allowed.
const CUT: usize = 1 << 10;
/// The head and segments of a message that is made up are no more.
const PARTS_MAX: usize = 4;

/// The opening of a message with a head and segments of these lengths, as a peer of ours sends it, and the bytes of its pieces.
fn opening(wire: Wire, parts: &[usize], header: impl Fn(&Message) -> BytesMut) -> (Wire, Bytes, Vec<usize>) {
    let mut parts_of_zeros = parts.iter().map(|length| Bytes::from(vec![0; *length]));
    let head = parts_of_zeros.next().unwrap_or_default();
    let message = Message { content_type: ContentType::Json, head: head.into(), segments: parts_of_zeros.collect() };
    let mut payload = header(&message);
    let plan = Plan::new(payload.len(), parts.iter().copied(), CUT);
    let wire = Wire { first: payload.len() as u32, second: CUT as u32, ..wire };
    payload.resize(plan.pieces[0], 0);
    (wire, payload.freeze(), plan.pieces)
}

/// Lengths of the head and segments of a message.
fn parts(input: &mut &[u8]) -> Vec<usize> {
    let count = usize::from(byte(input)) % PARTS_MAX + 1;
    (0..count).map(|_| usize::from(byte(input)) * usize::from(byte(input)) / 16).collect()
}

/// What a payload that is wanted lands in.
fn land(payload: &Payload<'_>) -> Bytes {
    let length = usize::try_from(inbox::length(payload)).unwrap_or(usize::MAX);
    POOL.take(length).map(Buffer::freeze).expect("lengths that exceed the limits are refused before")
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
