//! Operations that add. The order of sums is that of [`reduction`](gym_core::group::collective::reduction): the rank at
//! position i adds slice i of all tensors, and its own part comes last.
//!
//! | tensor | path |
//! |---|---|
//! | up to 64 KiB | each rank writes its piece; one barrier; each rank adds everything |
//! | larger | a part of every slice for each rank, step by step; one barrier a step |
//! | in the segment, on every rank | each rank adds its slice in place, and writes it to all tensors; two barriers |

use std::ops::Range;
use std::time::Instant;

use gym_core::group::DType;
use gym_core::group::collective::reduction::{Reduction, order_of, slice_of};
use gym_core::group::collective::{Call, Collective, ReduceOp};
use gym_core::{Error, Result};

use super::{SegmentCommunicator, elements_of, first_of};
use crate::failure::Failure;
use crate::layout::PIECE_BYTES_MIN;
use crate::shared::SharedBuffer;

/// Tensors up to this size take one barrier.
const SMALL_BYTES: usize = PIECE_BYTES_MIN;
/// The bytes that are added and copied at once, so that their result is still in the first-level cache when it is copied.
const BLOCK_BYTES: usize = 8 << 10;

/// The detail of a rank whose tensor is not in the segment. Others tell where theirs is in their space.
const PRIVATE: u64 = u64::MAX;

/// The slices of a tensor, as bytes.
struct Slices {
    size: usize,
    slices: Vec<Range<usize>>,
    /// The most bytes of a slice.
    longest: usize,
}

/// A shared tensor during an operation. Leaves the segment unless the operation has succeeded: others may still write
/// to its place.
struct Lent<'b>(Option<&'b mut SharedBuffer>);

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(buffer) = self.0.take() {
            buffer.leave();
        }
    }
}

impl Slices {
    fn new(elements: usize, dtype: DType, world_size: usize) -> Self {
        let size = dtype.size();
        let slices: Vec<_> = (0..world_size)
            .map(|position| slice_of(elements, world_size, position))
            .map(|slice| slice.start * size..slice.end * size)
            .collect();
        let longest = slices.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        Self { size, slices, longest }
    }

    /// Returns the part of a slice from `first` on, of at most `bytes`. Empty if the slice is shorter.
    fn part(&self, slice: usize, first: usize, bytes: usize) -> Range<usize> {
        let slice = &self.slices[slice];
        let start = slice.start + first;
        start.min(slice.end)..(start + bytes).min(slice.end)
    }
}

impl SegmentCommunicator {
    /// Replaces the memory of every rank by the reduction of all. Every rank gets the same bits, which are those of
    /// every other backend.
    ///
    /// # Errors
    /// [`Failure`]; `Rejected` if there is no such reduction, or if the memory has no whole number of elements.
    pub fn all_reduce(
        &mut self,
        dtype: DType,
        op: ReduceOp,
        memory: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let reduction = Reduction::new(dtype, op)?;
        let call = Call::new(Collective::AllReduce(op), dtype, elements_of(memory, dtype)?);
        self.perform(|own| {
            if memory.len() <= SMALL_BYTES {
                return own.reduce_small(reduction, call, 0..own.world_size(), memory, deadline);
            }
            let slices = Slices::new(call.elements, dtype, own.world_size());
            own.put_parts(&slices, 0, memory);
            let shared = own.begin(call, PRIVATE, deadline)?;
            if shared.iter().any(|detail| *detail != PRIVATE) {
                // The ranks that share theirs have put nothing yet.
                own.put_parts(&slices, 0, memory);
                own.meet(deadline)?;
            }
            own.reduce_staged(reduction, &slices, true, memory, deadline)
        })
    }

    /// Like [`all_reduce`](Self::all_reduce), on a tensor that lives in this segment. If those of all ranks do, nothing
    /// is copied through pieces: one pass over the memory and two barriers.
    ///
    /// # Errors
    /// [`Failure`]; `Rejected` also if the buffer is not this rank's, of this segment. After another failure, it is no
    /// longer in the segment.
    pub fn all_reduce_shared(
        &mut self,
        dtype: DType,
        op: ReduceOp,
        buffer: &mut SharedBuffer,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let Some(at) = buffer.offset_in(&self.segment, self.position) else {
            return Err(Error::invalid("the buffer is not in the segment of this rank; create it there").into());
        };
        let (reduction, elements) = (Reduction::new(dtype, op)?, elements_of(buffer, dtype)?);
        if buffer.len() <= SMALL_BYTES {
            return self.all_reduce(dtype, op, buffer, deadline);
        }
        let call = Call::new(Collective::AllReduce(op), dtype, elements);
        let mut lent = Lent(Some(buffer));
        self.perform(|own| {
            let slices = Slices::new(elements, dtype, own.world_size());
            let details = own.begin(call, at as u64, deadline)?;
            if !details.contains(&PRIVATE) {
                let places: Vec<usize> = details.into_iter().map(|detail| detail as usize).collect();
                own.reduce_in_place(reduction, &slices, &places);
                own.meet(deadline)?;
            } else if let Some(buffer) = &mut lent.0 {
                own.put_parts(&slices, 0, buffer);
                own.meet(deadline)?;
                own.reduce_staged(reduction, &slices, true, &mut buffer[..], deadline)?;
            }
            lent.0 = None;
            Ok(())
        })
    }

    /// Reduces the memory of all ranks, and gives each rank its slice: at position i of W, elements [i·n/W, (i+1)·n/W)
    /// of n, in their place in `memory`. The rest of `memory` is unspecified.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(
        &mut self,
        dtype: DType,
        op: ReduceOp,
        memory: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let reduction = Reduction::new(dtype, op)?;
        let call = Call::new(Collective::ReduceScatter(op), dtype, elements_of(memory, dtype)?);
        self.perform(|own| {
            if memory.len() <= SMALL_BYTES {
                return own.reduce_small(reduction, call, own.position..own.position + 1, memory, deadline);
            }
            let slices = Slices::new(call.elements, dtype, own.world_size());
            own.put_parts(&slices, 0, memory);
            own.begin(call, PRIVATE, deadline)?;
            own.reduce_staged(reduction, &slices, false, memory, deadline)
        })
    }

    /// Adds whole tensors: all ranks read the pieces of all, and so none of them is added in place.
    fn reduce_small(
        &mut self,
        reduction: Reduction,
        call: Call,
        wanted: Range<usize>,
        memory: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let (position, world_size) = (self.position, self.world_size());
        self.write(|layout, half| layout.piece(half, position), memory);
        self.begin(call, PRIVATE, deadline)?;
        let slices = Slices::new(call.elements, call.dtype, world_size);
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(world_size * BLOCK_BYTES, 0);
        for slice in wanted {
            for first in (0..slices.slices[slice].len()).step_by(BLOCK_BYTES) {
                let block = slices.part(slice, first, BLOCK_BYTES);
                let mut parts: Vec<&mut [u8]> = Vec::with_capacity(world_size);
                for (part, other) in scratch.chunks_exact_mut(BLOCK_BYTES).zip(order_of(world_size, slice)) {
                    let part = &mut part[..block.len()];
                    let within = block.clone();
                    self.read(|layout, half| within_piece(&layout.piece(half, other), &within), part);
                    parts.push(part);
                }
                reduction.reduce(&mut parts);
                if let Some(result) = parts.last() {
                    memory[block].copy_from_slice(result);
                }
            }
        }
        self.scratch = scratch;
        Ok(())
    }

    /// Writes the parts of the other ranks' slices, from `first` on, to the piece of this rank.
    fn put_parts(&self, slices: &Slices, first: usize, memory: &[u8]) {
        let (position, bytes) = (self.position, self.segment.layout().part_bytes());
        for slice in (0..self.world_size()).filter(|slice| *slice != position) {
            let part = &memory[slices.part(slice, first, bytes)];
            self.write(|layout, half| layout.part(half, position, slice), part);
        }
    }

    /// Adds the parts that [`put_parts`](Self::put_parts) of all ranks have written before the last barrier, and all
    /// further ones. The own slice is added in `memory`. With `gather`, it then goes to the other ranks.
    fn reduce_staged(
        &mut self,
        reduction: Reduction,
        slices: &Slices,
        gather: bool,
        memory: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let (position, bytes) = (self.position, self.segment.layout().part_bytes());
        debug_assert!(bytes.is_multiple_of(slices.size), "a part has whole elements");
        for first in (0..slices.longest).step_by(bytes) {
            self.add_part(reduction, &mut memory[slices.part(position, first, bytes)], gather);
            let next = first + bytes;
            let more = next < slices.longest;
            if more {
                self.put_parts(slices, next, memory);
            }
            if more || gather {
                self.meet(deadline)?;
            }
            if gather {
                for slice in (0..self.world_size()).filter(|slice| *slice != position) {
                    let part = &mut memory[slices.part(slice, first, bytes)];
                    self.read(|layout, half| layout.result(half, slice), part);
                }
            }
        }
        Ok(())
    }

    /// Adds the parts of all ranks to the part of this one, its own slice. With `publish`, writes the result for the
    /// others, too.
    fn add_part(&self, reduction: Reduction, own: &mut [u8], publish: bool) {
        let (position, world_size) = (self.position, self.world_size());
        let (layout, half) = (self.segment.layout(), self.half_to_read());
        for (index, own) in own.chunks_mut(BLOCK_BYTES).enumerate() {
            let block = index * BLOCK_BYTES..index * BLOCK_BYTES + own.len();
            let others = order_of(world_size, position).take(world_size - 1).map(|other| {
                let place = within_piece(&layout.part(half, other, position), &block);
                // SAFETY: no rank writes this half before this rank comes to the next barrier (the rule of `Half`), and
                // only the rank at the position of a slice reads the parts of it. Blocks of different ranks do not
                // overlap.
                unsafe { self.segment.mapping().bytes_mut(place) }
            });
            let mut parts: Vec<&mut [u8]> = others.collect();
            parts.push(&mut *own);
            reduction.reduce(&mut parts);
            if publish {
                self.write(|layout, half| within_piece(&layout.result(half, position), &block), own);
            }
        }
    }

    /// Adds the own slice of the tensors of all ranks, and writes the result to all. `places` has the offset of each in
    /// its rank's space.
    fn reduce_in_place(&self, reduction: Reduction, slices: &Slices, places: &[usize]) {
        let world_size = self.world_size();
        let slice = slices.part(self.position, 0, slices.longest);
        let parts = order_of(world_size, self.position).map(|other| {
            let space = self.segment.layout().shared(other);
            assert!(places[other] <= space.len(), "a rank shares a tensor in its space");
            let place = within_piece(&(space.start + places[other]..space.end), &slice);
            // SAFETY: between these two barriers of an operation, every rank is inside it, has lent its tensor to it,
            // and accesses the slice at its own position only. Spaces of different ranks do not overlap.
            unsafe { self.segment.mapping().bytes_mut(place) }
        });
        reduction.reduce_into_all(&mut parts.collect::<Vec<_>>());
    }
}

/// Returns a range of a place, counted from its start.
///
/// # Panics
/// If the place is shorter.
fn within_piece(place: &Range<usize>, range: &Range<usize>) -> Range<usize> {
    let start = first_of(place.clone(), range.end).start;
    start + range.start..start + range.end
}
