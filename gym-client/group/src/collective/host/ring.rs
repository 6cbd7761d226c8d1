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

use super::answers::Answers;
use super::room::{Room, State, differ};
use super::wire::{CHUNK_BYTES, CallPacket, ChunkPacket, GROUP, Packet, SMALL_BYTES, Stream, WINDOW};

/// One collective operation, as one rank performs it.
struct Round<'r> {
    room: &'r Arc<Room>,
    cx: &'r CallContext,
    number: u64,
    /// The chunks that this rank has sent to each other one, and received from it.
    sent: Vec<u64>,
    received: Vec<u64>,
}

/// What is under way of a reduction: some chunks of every slice.
struct Part {
    reduction: Reduction,
    slices: Vec<Range<usize>>,
    /// The bytes of an element, and of a partial result.
    size: usize,
    wide: usize,
    /// The first element of each slice.
    first: usize,
}

/// The chunks of one slice that are under way.
type Chunks = [Bytes; GROUP];

impl Part {
    /// Returns the elements of a chunk.
    fn chunk(&self) -> usize {
        CHUNK_BYTES / self.wide
    }

    /// Returns the bytes of a chunk of a slice; none, if the slice is shorter.
    fn bytes(&self, slice: usize, at: usize) -> Range<usize> {
        let slice = &self.slices[slice];
        let start = (slice.start + self.first + at * self.chunk()).min(slice.end);
        start * self.size..(start + self.chunk()).min(slice.end) * self.size
    }
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
    let mut round = Round { room, cx, number, sent: Vec::new(), received: Vec::new() };
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
pub(super) fn bytes_of(call: Call, world_size: usize, position: usize) -> Range<usize> {
    let slice = slice_of(call.elements, world_size, position);
    slice.start * call.dtype.size()..slice.end * call.dtype.size()
}

/// Replaces a buffer by one of its slices, in memory of its own.
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
            if missing {
                return None;
            }
            state.heard = number + 1;
            let mut take = |position| {
                let taken = Room::take_call(state, position, Stream::Round, number);
                taken.map(|announced| (announced.call, announced.take()))
            };
            Some(Ok((0..world_size).map(&mut take).collect()))
        })
        .await
    }

    fn next(&self) -> usize {
        (self.room.position() + 1) % self.room.world_size()
    }

    fn previous(&self) -> usize {
        self.back(1)
    }

    /// Returns the position that is so many steps back in the ring; at most two rounds.
    fn back(&self, steps: usize) -> usize {
        (self.room.position() + 2 * self.room.world_size() - steps) % self.room.world_size()
    }

    async fn send(&mut self, to: usize, elements: Bytes, waits: bool, answers: &mut Answers) {
        let (from, number, at) = (self.room.position(), self.number, count(&mut self.sent, to));
        let packet = |to| Packet::Chunk(ChunkPacket { to, from, stream: Stream::Round, number, at, waits });
        answers.add(to, self.room.send(self.cx, to, packet, Some(elements)).await);
    }

    async fn receive(&mut self, from: usize) -> Result<Bytes> {
        let at = count(&mut self.received, from);
        self.room.chunk(from, Stream::Round, self.number, at).await
    }

    /// Reduces a large buffer. With `gather`, every rank gets the whole result; otherwise each has only its own slice.
    async fn reduce(
        &mut self,
        call: Call,
        op: ReduceOp,
        gather: bool,
        memory: &mut [u8],
        answers: &mut Answers,
    ) -> Result<()> {
        let world_size = self.room.world_size();
        let reduction = Reduction::new(call.dtype, op)?;
        let slices = (0..world_size).map(|position| slice_of(call.elements, world_size, position)).collect();
        let mut part =
            Part { reduction, slices, size: call.dtype.size(), wide: reduction.partial_dtype().size(), first: 0 };
        let longest = part.slices.iter().map(ExactSizeIterator::len).max().unwrap_or_default();
        while part.first < longest {
            let mut chunks = if part.wide == part.size {
                self.add_round_the_ring(&part, memory, answers).await?
            } else {
                self.add_at_the_owner(&part, memory, answers).await?
            };
            if gather {
                self.spread(&part, &mut chunks, memory, answers).await?;
            }
            part.first += part.chunk() * GROUP;
        }
        Ok(())
    }

    /// Passes partial results on, until those of this rank's slice are whole. Returns them.
    async fn add_round_the_ring(&mut self, part: &Part, memory: &mut [u8], answers: &mut Answers) -> Result<Chunks> {
        let (next, previous, world_size) = (self.next(), self.previous(), self.room.world_size());
        let mut chunks = Chunks::default();
        for step in 0..world_size - 1 {
            for (at, chunk) in chunks.iter_mut().enumerate() {
                let place = part.bytes(self.back(1 + step), at);
                if !place.is_empty() {
                    let own = step == 0;
                    let partial = if own { Bytes::copy_from_slice(&memory[place]) } else { std::mem::take(chunk) };
                    self.send(next, partial, false, answers).await;
                }
            }
            for (at, chunk) in chunks.iter_mut().enumerate() {
                let place = part.bytes(self.back(2 + step), at);
                if place.is_empty() {
                    continue;
                }
                let mut partial = into_mut(self.receive(previous).await?);
                let place = &mut memory[place];
                part.reduction.fold(&mut partial, place);
                *chunk = if step + 2 < world_size {
                    partial.freeze()
                } else {
                    part.reduction.finish(&partial, world_size, place);
                    Bytes::copy_from_slice(place)
                };
            }
        }
        Ok(chunks)
    }

    /// Sends elements to the owners of their slices as they are, because their partial results are twice as long. Returns this rank's.
    async fn add_at_the_owner(&mut self, part: &Part, memory: &mut [u8], answers: &mut Answers) -> Result<Chunks> {
        let (own, world_size) = (self.room.position(), self.room.world_size());
        let mut chunks = Chunks::default();
        for at in 0..GROUP {
            for to in self.room.others() {
                let place = part.bytes(to, at);
                if !place.is_empty() {
                    self.send(to, Bytes::copy_from_slice(&memory[place]), false, answers).await;
                }
            }
        }
        for (at, chunk) in chunks.iter_mut().enumerate() {
            let place = part.bytes(own, at);
            if place.is_empty() {
                continue;
            }
            let mut partial = BytesMut::zeroed(place.len() / part.size * part.wide);
            for (step, position) in order_of(world_size, own).enumerate() {
                let received = if position == own { Bytes::new() } else { self.receive(position).await? };
                let elements: &[u8] = if position == own { &memory[place.clone()] } else { &received };
                match step {
                    0 => part.reduction.begin(elements, &mut partial),
                    _ => part.reduction.fold(&mut partial, elements),
                }
            }
            let place = &mut memory[place];
            part.reduction.finish(&partial, world_size, place);
            *chunk = Bytes::copy_from_slice(place);
        }
        Ok(chunks)
    }

    /// Passes the whole chunks of every slice round the ring.
    async fn spread(
        &mut self,
        part: &Part,
        chunks: &mut Chunks,
        memory: &mut [u8],
        answers: &mut Answers,
    ) -> Result<()> {
        let (next, previous) = (self.next(), self.previous());
        for step in 0..self.room.world_size() - 1 {
            for (at, chunk) in chunks.iter_mut().enumerate() {
                if !part.bytes(self.back(step), at).is_empty() {
                    self.send(next, std::mem::take(chunk), false, answers).await;
                }
            }
            for (at, chunk) in chunks.iter_mut().enumerate() {
                let place = part.bytes(self.back(1 + step), at);
                if !place.is_empty() {
                    *chunk = self.receive(previous).await?;
                    memory[place].copy_from_slice(chunk);
                }
            }
        }
        Ok(())
    }

    /// Passes the root's buffer from rank to rank.
    async fn broadcast(&mut self, root: usize, memory: &mut [u8], answers: &mut Answers) -> Result<()> {
        let next = self.next();
        let last = next == root;
        for place in memory.chunks_mut(CHUNK_BYTES) {
            let chunk = if self.room.position() == root {
                Bytes::copy_from_slice(place)
            } else {
                let chunk = self.receive(self.previous()).await?;
                place.copy_from_slice(&chunk);
                chunk
            };
            if !last {
                answers.at_most(self.room, WINDOW - 1).await;
                self.send(next, chunk, true, answers).await;
            }
        }
        Ok(())
    }

    /// Collects the buffers of all ranks: those that came with the calls, and the larger ones round the ring.
    async fn gather(&mut self, heard: Heard, memory: &mut BytesMut, size: usize, answers: &mut Answers) -> Result<()> {
        let (own, world_size) = (self.room.position(), self.room.world_size());
        let (next, previous) = (self.next(), self.previous());
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
                let part = bytes(self.back(step));
                if !part.is_empty() {
                    let chunk =
                        if step == 0 { Bytes::copy_from_slice(&whole[part]) } else { std::mem::take(&mut underway) };
                    self.send(next, chunk, false, answers).await;
                }
                let part = bytes(self.back(1 + step));
                if !part.is_empty() {
                    underway = self.receive(previous).await?;
                    whole[part].copy_from_slice(&underway);
                }
            }
        }
        *memory = whole;
        Ok(())
    }
}

/// Returns the number of the next chunk to or from a rank.
fn count(chunks: &mut Vec<u64>, position: usize) -> u64 {
    if chunks.len() <= position {
        chunks.resize(position + 1, 0);
    }
    chunks[position] += 1;
    chunks[position] - 1
}

/// Returns received bytes as memory to write to: themselves, if nobody else has them.
fn into_mut(bytes: Bytes) -> BytesMut {
    bytes.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&shared[..]))
}
