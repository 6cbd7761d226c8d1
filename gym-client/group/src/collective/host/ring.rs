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
use super::participant::{Expected, Expecting, Participant, State, differ};
use super::pieces::{OperationMemory, Pieces, chunks_of};
use super::wire::{CHUNK_BYTES, CallPacket, ChunkPacket, GROUP, Packet, SMALL_BYTES, Stream, WINDOW};

/// One collective operation, as one rank performs it.
struct Round<'r> {
    participant: &'r Arc<Participant>,
    cx: &'r CallContext,
    number: u64,
    /// The chunks that this rank has sent to each other one, and received from it.
    sent: Vec<u64>,
    received: Vec<u64>,
}

/// A reduction, and how its memory is cut: each slice in chunks.
struct Slices {
    reduction: Reduction,
    /// The bytes of an element, and of a partial result.
    size: usize,
    wide: usize,
    /// The pieces of each slice.
    pieces: Vec<Range<usize>>,
    /// The bytes of each piece.
    lengths: Vec<usize>,
}

/// Some chunks of every slice, which are under way together.
#[derive(Clone, Copy)]
struct Group<'s> {
    slices: &'s Slices,
    first: usize,
}

/// The chunks of one slice that are under way.
type Chunks = [Bytes; GROUP];

impl Slices {
    fn new(call: Call, op: ReduceOp, world_size: usize) -> Result<Self> {
        let reduction = Reduction::new(call.dtype, op)?;
        let (size, wide) = (call.dtype.size(), reduction.partial_dtype().size());
        let chunk = CHUNK_BYTES / wide * size;
        let (mut pieces, mut lengths) = (Vec::with_capacity(world_size), Vec::new());
        for position in 0..world_size {
            let (first, bytes) = (lengths.len(), bytes_of(call, world_size, position).len());
            lengths.extend((0..bytes).step_by(chunk).map(|start| chunk.min(bytes - start)));
            pieces.push(first..lengths.len());
        }
        Ok(Self { reduction, size, wide, pieces, lengths })
    }

    /// Returns `true` if partial results are elements, so that they can take the place of what was added last.
    fn adds_in_place(&self) -> bool {
        self.size == self.wide
    }

    fn groups(&self) -> impl Iterator<Item = Group<'_>> {
        let longest = self.pieces.iter().map(ExactSizeIterator::len).max().unwrap_or_default();
        (0..longest).step_by(GROUP).map(|first| Group { slices: self, first })
    }
}

impl Group<'_> {
    /// Returns the pieces of a slice, each with its place among the chunks.
    fn of(self, slice: usize) -> impl Iterator<Item = (usize, usize)> {
        let pieces = &self.slices.pieces[slice];
        let start = (pieces.start + self.first).min(pieces.end);
        (start..(start + GROUP).min(pieces.end)).enumerate()
    }
}

/// Performs a collective operation.
pub(super) async fn round(
    participant: &Arc<Participant>,
    cx: &CallContext,
    call: Call,
    number: u64,
    held: &mut OperationMemory,
    answers: &mut Answers,
) -> Result<()> {
    let mut round = Round { participant, cx, number, sent: Vec::new(), received: Vec::new() };
    let memory = &mut held.whole;
    let (own, small) = (participant.position(), memory.len() <= SMALL_BYTES);
    let root = match call.operation {
        Collective::Broadcast { root } => participant.meeting.position_of(root),
        _ => None,
    };
    let carries = small && root.is_none_or(|root| root == own);
    let elements = if carries { Bytes::copy_from_slice(memory) } else { Bytes::new() };
    round.announce(call, &elements, answers).await;
    let mut heard = answers.during(participant, round.heard(call)).await?;
    match (call.operation, root) {
        (Collective::AllGather, _) => {
            heard[own] = Some((call, elements));
            *memory = round.gather(heard, memory, call.dtype.size(), answers).await?;
            Ok(())
        }
        (Collective::AllReduce(op), _) if small => {
            let parts = Parts::of(heard, own);
            let reduction = Reduction::new(call.dtype, op)?;
            for slice in 0..participant.world_size() {
                parts.reduce(reduction, slice, memory, call);
            }
            Ok(())
        }
        (Collective::ReduceScatter(op), _) if small => {
            Parts::of(heard, own).reduce(Reduction::new(call.dtype, op)?, own, memory, call);
            keep_slice(memory, bytes_of(call, participant.world_size(), own));
            Ok(())
        }
        (Collective::AllReduce(op), _) => round.reduce(call, op, true, held, answers).await,
        (Collective::ReduceScatter(op), _) => {
            round.reduce(call, op, false, held, answers).await?;
            keep_slice(&mut held.whole, bytes_of(call, participant.world_size(), own));
            Ok(())
        }
        (Collective::Broadcast { .. }, Some(root)) if small => {
            if let Some((_, elements)) = &heard[root] {
                memory.copy_from_slice(elements);
            }
            Ok(())
        }
        (Collective::Broadcast { .. }, Some(root)) => round.broadcast(root, held, answers).await,
        _ => Ok(()),
    }
}

/// Waits until all ranks have made a call on device memory. Returns the number of elements of each.
pub(super) async fn agree(
    participant: &Arc<Participant>,
    cx: &CallContext,
    call: Call,
    number: u64,
    answers: &mut Answers,
) -> Result<Vec<usize>> {
    let round = Round { participant, cx, number, sent: Vec::new(), received: Vec::new() };
    round.announce(call, &Bytes::new(), answers).await;
    let heard = answers.during(participant, round.heard(call)).await?;
    Ok(heard.into_iter().map(|heard| heard.map_or(call.elements, |(other, _)| other.elements)).collect())
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

/// The call of every rank, by position, with the elements that came with it. `None` for this rank.
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
        let (from, number) = (self.participant.position(), self.number);
        for to in self.participant.others() {
            let packet = |to| Packet::Call(CallPacket { to, from, stream: Stream::Round, number, call });
            answers.add(to, self.participant.send(self.cx, to, packet, Some(elements.clone())).await);
        }
    }

    /// Waits until all ranks have called the operation.
    async fn heard(&self, own: Call) -> Result<Heard> {
        let (participant, number) = (self.participant, self.number);
        let world_size = participant.world_size();
        participant
            .wait_until(move |state: &mut State| {
                let mut missing = false;
                for position in participant.others() {
                    match Participant::call_of(state, position, Stream::Round, number) {
                        Some(call) if !call.agrees_with(&own) => {
                            return Some(Err(differ(participant, own, position, call)));
                        }
                        Some(_) => {}
                        None => {
                            if let Some(absent) = participant.absent(state, position, number, |left| left.rounds) {
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
                    let taken = Participant::take_call(state, position, Stream::Round, number);
                    taken.map(|announced| (announced.call, announced.take()))
                };
                Some(Ok((0..world_size).map(&mut take).collect()))
            })
            .await
    }

    fn next(&self) -> usize {
        (self.participant.position() + 1) % self.participant.world_size()
    }

    fn previous(&self) -> usize {
        self.back(1)
    }

    /// Returns the position that is so many steps back in the ring; at most two rounds.
    fn back(&self, steps: usize) -> usize {
        (self.participant.position() + 2 * self.participant.world_size() - steps) % self.participant.world_size()
    }

    async fn send(&mut self, to: usize, elements: Bytes, waits: bool, answers: &mut Answers) {
        let (from, number, at) = (self.participant.position(), self.number, count(&mut self.sent, to));
        let packet = |to| Packet::Chunk(ChunkPacket { to, from, stream: Stream::Round, number, at, waits });
        answers.add(to, self.participant.send(self.cx, to, packet, Some(elements)).await);
    }

    async fn receive(&mut self, from: usize, length: usize) -> Result<Bytes> {
        let at = count(&mut self.received, from);
        self.participant.chunk(from, Stream::Round, self.number, at, length).await
    }

    /// Reduces a large buffer. With `gather`, every rank gets the whole result; otherwise each has only its own slice.
    async fn reduce(
        &mut self,
        call: Call,
        op: ReduceOp,
        gather: bool,
        held: &mut OperationMemory,
        answers: &mut Answers,
    ) -> Result<()> {
        let slices = Slices::new(call, op, self.participant.world_size())?;
        let pieces = held.cut(slices.lengths.iter().copied());
        let participant = Arc::clone(self.participant);
        let _expecting = gather.then(|| {
            let expected =
                Expected { number: self.number, pieces: pieces.clone(), places: self.places_of_previous(&slices) };
            Expecting::new(&participant, self.previous(), Stream::Round, expected)
        });
        for group in slices.groups() {
            if slices.adds_in_place() {
                self.add_round_the_ring(group, &pieces, answers).await?;
            } else {
                self.add_at_the_owner(group, &pieces, answers).await?;
            }
            if gather {
                self.spread(group, &pieces, answers).await?;
            }
        }
        held.join().await;
        Ok(())
    }

    /// Returns where the chunks go that the previous rank sends in a reduction, in their order.
    fn places_of_previous(&self, slices: &Slices) -> Vec<Option<usize>> {
        let (own, world_size) = (self.participant.position(), self.participant.world_size());
        let mut places = Vec::new();
        for group in slices.groups() {
            let added = if slices.adds_in_place() {
                (2..=world_size).map(|steps| group.of(self.back(steps)).count()).sum()
            } else {
                group.of(own).count()
            };
            places.extend(std::iter::repeat_n(None, added));
            for step in 1..world_size {
                places.extend(group.of(self.back(step)).map(|(_, piece)| Some(piece)));
            }
        }
        places
    }

    /// Passes partial results on, until those of this rank's slice are whole.
    async fn add_round_the_ring(&mut self, group: Group<'_>, pieces: &Pieces, answers: &mut Answers) -> Result<()> {
        let (next, previous, world_size) = (self.next(), self.previous(), self.participant.world_size());
        for step in 0..world_size - 1 {
            for (_, piece) in group.of(self.back(1 + step)) {
                self.send(next, pieces.send(piece).await, false, answers).await;
            }
            for (_, piece) in group.of(self.back(2 + step)) {
                let partial = self.receive(previous, pieces.length(piece)).await?;
                let ranks = (step + 2 == world_size).then_some(world_size);
                pieces.change(piece, |own| group.slices.reduction.fold_into(&partial, own, ranks)).await;
            }
        }
        Ok(())
    }

    /// Sends elements to the owners of their slices as they are, because their partial results are twice as long.
    async fn add_at_the_owner(&mut self, group: Group<'_>, pieces: &Pieces, answers: &mut Answers) -> Result<()> {
        let Slices { reduction, size, wide, .. } = group.slices;
        let (own, world_size) = (self.participant.position(), self.participant.world_size());
        for at in 0..GROUP {
            for to in self.participant.others() {
                if let Some((_, piece)) = group.of(to).nth(at) {
                    self.send(to, pieces.send(piece).await, false, answers).await;
                }
            }
        }
        for (_, piece) in group.of(own) {
            let length = pieces.length(piece);
            let mut partial = vec![0; length / size * wide];
            for (step, position) in order_of(world_size, own).enumerate() {
                let add = |elements: &[u8], partial: &mut [u8]| match step {
                    0 => reduction.begin(elements, partial),
                    _ => reduction.fold(partial, elements),
                };
                if position == own {
                    pieces.change(piece, |elements| add(elements, &mut partial)).await;
                } else {
                    add(&self.receive(position, length).await?, &mut partial);
                }
            }
            pieces.change(piece, |elements| reduction.finish(&partial, world_size, elements)).await;
        }
        Ok(())
    }

    /// Passes the whole chunks of every slice round the ring.
    async fn spread(&mut self, group: Group<'_>, pieces: &Pieces, answers: &mut Answers) -> Result<()> {
        let (next, previous, own) = (self.next(), self.previous(), self.participant.position());
        let mut chunks = Chunks::default();
        for (at, piece) in group.of(own) {
            chunks[at] = pieces.send(piece).await;
        }
        for step in 0..self.participant.world_size() - 1 {
            for (at, _) in group.of(self.back(step)) {
                self.send(next, std::mem::take(&mut chunks[at]), false, answers).await;
            }
            for (at, piece) in group.of(self.back(1 + step)) {
                chunks[at] = self.receive(previous, pieces.length(piece)).await?;
                pieces.receive(piece, &chunks[at]).await;
            }
        }
        Ok(())
    }

    /// Passes the root's buffer from rank to rank.
    async fn broadcast(&mut self, root: usize, held: &mut OperationMemory, answers: &mut Answers) -> Result<()> {
        let next = self.next();
        let (is_root, is_last) = (self.participant.position() == root, next == root);
        let pieces = held.cut(chunks_of(held.whole.len()));
        let participant = Arc::clone(self.participant);
        let places = (0..pieces.count()).map(Some).collect();
        let expected = Expected { number: self.number, pieces: pieces.clone(), places };
        let _expecting = (!is_root).then(|| Expecting::new(&participant, self.previous(), Stream::Round, expected));
        for piece in 0..pieces.count() {
            let chunk = if is_root {
                pieces.send(piece).await
            } else {
                let chunk = self.receive(self.previous(), pieces.length(piece)).await?;
                pieces.receive(piece, &chunk).await;
                chunk
            };
            if !is_last {
                answers.at_most(self.participant, WINDOW - 1).await;
                self.send(next, chunk, true, answers).await;
            }
        }
        held.join().await;
        Ok(())
    }

    /// Collects the buffers of all ranks: those that came with the calls, and the larger ones round the ring.
    async fn gather(&mut self, heard: Heard, memory: &[u8], size: usize, answers: &mut Answers) -> Result<BytesMut> {
        let (own, world_size) = (self.participant.position(), self.participant.world_size());
        let (next, previous) = (self.next(), self.previous());
        let lengths: Vec<usize> = heard.iter().flatten().map(|(call, _)| call.elements * size).collect();
        let mut whole = BytesMut::zeroed(lengths.iter().sum());
        let (mut cuts, mut chunked) = (Vec::new(), Vec::with_capacity(world_size));
        let mut start = 0;
        for (position, (_, elements)) in heard.iter().flatten().enumerate() {
            let (length, first) = (lengths[position], cuts.len());
            let place = &mut whole[start..start + length];
            if length <= SMALL_BYTES {
                place.copy_from_slice(elements);
                cuts.extend((length > 0).then_some(length));
                // It has come with the call.
                chunked.push(first..first);
            } else {
                if position == own {
                    place.copy_from_slice(memory);
                }
                cuts.extend(chunks_of(length));
                chunked.push(first..cuts.len());
            }
            start += length;
        }
        let mut gathered = OperationMemory::new(whole);
        let pieces = gathered.cut(cuts);
        let longest = chunked.iter().map(ExactSizeIterator::len).max().unwrap_or_default();
        // The chunk of a rank's buffer.
        let chunk_of = |at: usize, position: usize| chunked[position].clone().nth(at);
        let participant = Arc::clone(self.participant);
        let places = (0..longest).flat_map(|at| (1..world_size).map(move |step| (at, step)));
        let places = places.filter_map(|(at, step)| chunk_of(at, self.back(step))).map(Some).collect();
        let expected = Expected { number: self.number, pieces: pieces.clone(), places };
        let _expecting = Expecting::new(&participant, previous, Stream::Round, expected);
        for at in 0..longest {
            let mut underway = match chunk_of(at, own) {
                Some(piece) => pieces.send(piece).await,
                None => Bytes::new(),
            };
            for step in 0..world_size - 1 {
                if chunk_of(at, self.back(step)).is_some() {
                    self.send(next, std::mem::take(&mut underway), false, answers).await;
                }
                if let Some(piece) = chunk_of(at, self.back(1 + step)) {
                    underway = self.receive(previous, pieces.length(piece)).await?;
                    pieces.receive(piece, &underway).await;
                }
            }
        }
        gathered.join().await;
        Ok(gathered.whole)
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
