//! The collective operations of one rank.
//!
//! Every rank tells every other what it calls, with its elements if they are few, and performs an operation when it has heard all and all agree. So no rank
//! mixes data of different calls, and each knows which ranks have not called. Many elements go round the ring afterwards, a chunk through all steps before
//! the next, so that it stays in the cache:
//!
//! ```text
//!     reduce, step s:  p sends slice p−1−s to p+1, and adds its own part to slice p−2−s from p−1.  The last one is slice p, whole.
//!     gather, step s:  p sends slice p−s to p+1, and copies slice p−1−s from p−1.                  positions modulo W
//! ```
//!
//! That is the order of sums of [`reduction`](gym_core::group::collective::reduction).

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use gym_core::group::collective::reduction::{Reduction, order_of, slice_of};
use gym_core::group::collective::{Call, Collective, ReduceOp};
use gym_core::{CallContext, Result};

use super::lane::Answers;
use super::room::{Room, State, differ};
use super::wire::{CallPacket, ChunkPacket, Packet, Stream};

/// Buffers up to this size travel with the call, to every rank.
pub(super) const SMALL_BYTES: usize = 64 << 10;
/// The bytes of a chunk. It must stay in the cache while it is received, added and sent.
pub(super) const CHUNK_BYTES: usize = 256 << 10;
/// The chunks of one slice that are under way together. The second one hides the wait for the first.
const GROUP: usize = 2;
/// The chunks that a rank may send ahead where nothing else holds it back.
pub(super) const WINDOW: usize = 8;

/// Returns the number of chunks of one sender that may wait for this rank. In the ring, a rank is at most one step for each other rank ahead of the next.
pub(super) fn chunks_max(world_size: usize) -> usize {
    WINDOW + 2 * GROUP * world_size
}

/// One collective operation, as one rank performs it.
struct Round<'r> {
    room: &'r Arc<Room>,
    cx: &'r CallContext,
    number: u64,
    /// The chunks that this rank has sent to the next one, and received from the one before.
    sent: u64,
    received: u64,
}

/// Performs a collective operation.
pub(super) async fn round(
    room: &Arc<Room>,
    cx: &CallContext,
    call: Call,
    number: u64,
    memory: &mut BytesMut,
    answers: &mut Answers,
) -> Result<()> {
    let mut round = Round { room, cx, number, sent: 0, received: 0 };
    let (own, small) = (room.position(), memory.len() <= SMALL_BYTES);
    let root = match call.operation {
        Collective::Broadcast { root } => room.meeting.position_of(root),
        _ => None,
    };
    let carries = small && root.is_none_or(|root| root == own);
    let elements = if carries { Bytes::copy_from_slice(memory) } else { Bytes::new() };
    round.announce(call, &elements, answers).await;
    let mut heard = answers.during(room, round.heard(call)).await?;
    match (call.operation, root) {
        (Collective::AllGather, _) => {
            heard[own] = Some((call, elements));
            round.gather(heard, memory, call.dtype.size(), answers).await
        }
        (Collective::AllReduce(op), _) if small => {
            let parts = Parts::of(heard, own);
            let reduction = Reduction::new(call.dtype, op)?;
            for slice in 0..room.world_size() {
                parts.reduce(reduction, slice, memory, call);
            }
            Ok(())
        }
        (Collective::ReduceScatter(op), _) if small => {
            Parts::of(heard, own).reduce(Reduction::new(call.dtype, op)?, own, memory, call);
            keep_slice(memory, bytes_of(call, room.world_size(), own));
            Ok(())
        }
        (Collective::AllReduce(op), _) => round.reduce(call, op, true, memory, answers).await,
        (Collective::ReduceScatter(op), _) => {
            round.reduce(call, op, false, memory, answers).await?;
            keep_slice(memory, bytes_of(call, room.world_size(), own));
            Ok(())
        }
        (Collective::Broadcast { .. }, Some(root)) if small => {
            if let Some((_, elements)) = &heard[root] {
                memory.copy_from_slice(elements);
            }
            Ok(())
        }
        (Collective::Broadcast { .. }, Some(root)) => round.broadcast(root, memory, answers).await,
        _ => Ok(()),
    }
}

/// Returns the bytes of a slice of a call's buffer.
fn bytes_of(call: Call, world_size: usize, position: usize) -> Range<usize> {
    let slice = slice_of(call.elements, world_size, position);
    slice.start * call.dtype.size()..slice.end * call.dtype.size()
}

/// Moves a slice of a buffer to its front, and drops the rest. A copy, if little is left of much memory.
fn keep_slice(memory: &mut BytesMut, slice: Range<usize>) {
    *memory = BytesMut::from(&memory[slice]);
}

/// What every rank calls, by position, with the elements that came with it. `None` for this rank.
type Heard = Vec<Option<(Call, Bytes)>>;

/// The whole buffers of all ranks.
struct Parts {
    /// Empty at `own`.
    others: Vec<Bytes>,
    own: usize,
}

impl Parts {
    fn of(heard: Heard, own: usize) -> Self {
        Self {
            others: heard.into_iter().map(|heard| heard.map(|(_, elements)| elements).unwrap_or_default()).collect(),
            own,
        }
    }

    /// Writes the reduction of a slice to its place in `memory`, which has the part of this rank.
    fn reduce(&self, reduction: Reduction, slice: usize, memory: &mut [u8], call: Call) {
        let world_size = self.others.len();
        let bytes = bytes_of(call, world_size, slice);
        let elements = bytes.len() / call.dtype.size();
        let mut partial = vec![0; elements * reduction.partial_dtype().size()];
        let part = |position: usize| {
            if position == self.own { &memory[bytes.clone()] } else { &self.others[position][bytes.clone()] }
        };
        for (step, position) in order_of(world_size, slice).enumerate() {
            match step {
                0 => reduction.begin(part(position), &mut partial),
                _ => reduction.fold(&mut partial, part(position)),
            }
        }
        reduction.finish(&partial, world_size, &mut memory[bytes]);
    }
}

impl Round<'_> {
    /// Tells every other rank what this one calls.
    async fn announce(&self, call: Call, elements: &Bytes, answers: &mut Answers) {
        let (from, number) = (self.room.position(), self.number);
        for to in self.room.others() {
            let packet = |to| Packet::Call(CallPacket { to, from, stream: Stream::Round, number, call });
            answers.add(to, self.room.send(self.cx, to, packet, Some(elements.clone())).await);
        }
    }

    /// Waits until all ranks have called the operation.
    async fn heard(&self, own: Call) -> Result<Heard> {
        let (room, number) = (self.room, self.number);
        let world_size = room.world_size();
        room.wait_until(move |state: &mut State| {
            let mut missing = false;
            for position in room.others() {
                match Room::call_of(state, position, Stream::Round, number) {
                    Some(call) if !call.agrees_with(&own) => return Some(Err(differ(room, own, position, call))),
                    Some(_) => {}
                    None => {
                        if let Some(absent) = room.absent(state, position, number, |left| left.rounds) {
                            return Some(Err(absent));
                        }
                        missing = true;
                    }
                }
            }
            let mut take = |position| {
                let taken = Room::take_call(state, position, Stream::Round, number);
                taken.map(|announced| (announced.call, announced.take()))
            };
            (!missing).then(|| Ok((0..world_size).map(&mut take).collect()))
        })
        .await
    }

    fn next(&self) -> usize {
        (self.room.position() + 1) % self.room.world_size()
    }

    fn previous(&self) -> usize {
        (self.room.position() + self.room.world_size() - 1) % self.room.world_size()
    }

    async fn send(&mut self, elements: Bytes, waits: bool, answers: &mut Answers) {
        let (from, number, at, next) = (self.room.position(), self.number, self.sent, self.next());
        self.sent += 1;
        let packet = |to| Packet::Chunk(ChunkPacket { to, from, stream: Stream::Round, number, at, waits });
        answers.add(next, self.room.send(self.cx, next, packet, Some(elements)).await);
    }

    async fn receive(&mut self) -> Result<Bytes> {
        let chunk = self.room.chunk(self.previous(), Stream::Round, self.number, self.received).await?;
        self.received += 1;
        Ok(chunk)
    }

    /// Reduces a large buffer over the ring. With `gather`, every rank gets the whole result; otherwise each has only its own slice.
    async fn reduce(
        &mut self,
        call: Call,
        op: ReduceOp,
        gather: bool,
        memory: &mut [u8],
        answers: &mut Answers,
    ) -> Result<()> {
        let (own, world_size) = (self.room.position(), self.room.world_size());
        let reduction = Reduction::new(call.dtype, op)?;
        let (size, wide) = (call.dtype.size(), reduction.partial_dtype().size());
        let chunk = CHUNK_BYTES / wide;
        // The slice before `step` further ones, counted against the ring.
        let back = |steps: usize| (own + 2 * world_size - steps) % world_size;
        let slices: Vec<Range<usize>> =
            (0..world_size).map(|position| slice_of(call.elements, world_size, position)).collect();
        let longest = slices.iter().map(ExactSizeIterator::len).max().unwrap_or_default();
        for first in (0..longest).step_by(chunk * GROUP) {
            let bytes = |slice: usize, at: usize| {
                let slice = &slices[slice];
                let start = (slice.start + first + at * chunk).min(slice.end);
                start * size..(start + chunk).min(slice.end) * size
            };
            let mut underway: [Bytes; GROUP] = Default::default();
            for step in 0..world_size - 1 {
                for at in 0..GROUP {
                    let part = bytes(back(1 + step), at);
                    if part.is_empty() {
                        continue;
                    }
                    let partial = match step {
                        0 => begun(reduction, &memory[part], wide / size),
                        _ => std::mem::take(&mut underway[at]),
                    };
                    self.send(partial, false, answers).await;
                }
                for at in 0..GROUP {
                    let part = bytes(back(2 + step), at);
                    if part.is_empty() {
                        continue;
                    }
                    let mut partial = into_mut(self.receive().await?);
                    let part = &mut memory[part];
                    reduction.fold(&mut partial, part);
                    underway[at] = if step + 2 < world_size {
                        partial.freeze()
                    } else {
                        reduction.finish(&partial, world_size, part);
                        if gather { Bytes::copy_from_slice(part) } else { Bytes::new() }
                    };
                }
            }
            if !gather {
                continue;
            }
            for step in 0..world_size - 1 {
                for at in 0..GROUP {
                    if !bytes(back(step), at).is_empty() {
                        self.send(std::mem::take(&mut underway[at]), false, answers).await;
                    }
                }
                for at in 0..GROUP {
                    let part = bytes(back(1 + step), at);
                    if !part.is_empty() {
                        let whole = self.receive().await?;
                        memory[part].copy_from_slice(&whole);
                        underway[at] = whole;
                    }
                }
            }
        }
        Ok(())
    }

    /// Passes the root's buffer from rank to rank.
    async fn broadcast(&mut self, root: usize, memory: &mut [u8], answers: &mut Answers) -> Result<()> {
        let last = self.next() == root;
        for place in memory.chunks_mut(CHUNK_BYTES) {
            let chunk = if self.room.position() == root {
                Bytes::copy_from_slice(place)
            } else {
                let chunk = self.receive().await?;
                place.copy_from_slice(&chunk);
                chunk
            };
            if !last {
                answers.at_most(self.room, WINDOW - 1).await;
                self.send(chunk, true, answers).await;
            }
        }
        Ok(())
    }

    /// Collects the buffers of all ranks: those that came with the calls, and the larger ones round the ring.
    async fn gather(&mut self, heard: Heard, memory: &mut BytesMut, size: usize, answers: &mut Answers) -> Result<()> {
        let (own, world_size) = (self.room.position(), self.room.world_size());
        let back = |steps: usize| (own + 2 * world_size - steps) % world_size;
        let (mut ends, mut end) = (Vec::with_capacity(world_size), 0);
        let lengths: Vec<usize> = heard.iter().flatten().map(|(call, _)| call.elements * size).collect();
        for length in &lengths {
            end += length;
            ends.push(end);
        }
        let mut whole = BytesMut::zeroed(end);
        let mut longest = 0;
        for (position, (_, elements)) in heard.iter().flatten().enumerate() {
            let place = ends[position] - lengths[position]..ends[position];
            if lengths[position] > SMALL_BYTES {
                longest = longest.max(lengths[position]);
                if position == own {
                    whole[place].copy_from_slice(memory);
                }
            } else {
                whole[place].copy_from_slice(elements);
            }
        }
        for first in (0..longest).step_by(CHUNK_BYTES) {
            // The chunk of a rank's buffer; empty if it came with the call.
            let bytes = |position: usize| {
                let length = if lengths[position] > SMALL_BYTES { lengths[position] } else { 0 };
                let start = ends[position] - lengths[position];
                start + first.min(length)..start + (first + CHUNK_BYTES).min(length)
            };
            let mut underway = Bytes::new();
            for step in 0..world_size - 1 {
                let part = bytes(back(step));
                if !part.is_empty() {
                    let chunk =
                        if step == 0 { Bytes::copy_from_slice(&whole[part]) } else { std::mem::take(&mut underway) };
                    self.send(chunk, false, answers).await;
                }
                let part = bytes(back(1 + step));
                if !part.is_empty() {
                    underway = self.receive().await?;
                    whole[part].copy_from_slice(&underway);
                }
            }
        }
        *memory = whole;
        Ok(())
    }
}

/// Returns the first part of an order as a partial result.
fn begun(reduction: Reduction, part: &[u8], widening: usize) -> Bytes {
    if widening == 1 {
        return Bytes::copy_from_slice(part);
    }
    let mut partial = BytesMut::zeroed(part.len() * widening);
    reduction.begin(part, &mut partial);
    partial.freeze()
}

/// Returns received bytes as memory to write to: themselves, if nobody else has them.
fn into_mut(bytes: Bytes) -> BytesMut {
    bytes.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&shared[..]))
}
