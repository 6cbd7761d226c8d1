//! Operations that only copy: broadcast and all-gather.

use std::time::Instant;

use gym_core::group::DType;
use gym_core::group::collective::{Call, Collective};
use gym_core::{Error, Result};

use super::{SegmentCommunicator, elements_of};
use crate::failure::Failure;

impl SegmentCommunicator {
    /// Fills the memory of every rank with that of the rank at position `root`. All have the same length.
    ///
    /// # Errors
    /// [`Failure`]; `Rejected` if there is no such position, or if the memory has no whole number of elements.
    pub fn broadcast(
        &mut self,
        dtype: DType,
        root: usize,
        memory: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let world_size = self.world_size();
        if root >= world_size {
            return Err(Error::invalid(format!("broadcast from position {root} of {world_size}")).into());
        }
        let elements = elements_of(memory, dtype)?;
        let call = Call::new(Collective::Broadcast { root: root as u32 }, dtype, elements);
        let is_root = root == self.position;
        let piece_bytes = self.segment.sizes().piece_bytes;
        self.perform(|own| {
            let mut pieces = memory.chunks_mut(piece_bytes);
            let mut piece = pieces.next();
            own.put_if(is_root, root, piece.as_deref());
            own.begin(call, 0, deadline)?;
            while let Some(current) = piece {
                piece = pieces.next();
                if is_root {
                    own.put_if(is_root, root, piece.as_deref());
                } else {
                    own.read(|layout, half| layout.piece(half, root), current);
                }
                if piece.is_some() {
                    own.meet(deadline)?;
                }
            }
            Ok(())
        })
    }

    /// Waits until every rank has made this call, whose elements go another way, or in a further operation. Returns the number of elements of each rank. The
    /// root of a broadcast is a position.
    ///
    /// # Errors
    /// [`Failure`].
    pub fn agree(&mut self, call: Call, deadline: Instant) -> Result<Vec<usize>, Failure> {
        let elements = self.perform(|own| own.begin_with(call, call.elements as u64, false, deadline))?;
        Ok(elements.into_iter().map(|elements| elements as usize).collect())
    }

    /// Fills `gathered` with the memory of all ranks, in the order of their positions. `lengths` are the bytes of each,
    /// which all ranks know, and which may differ.
    ///
    /// # Errors
    /// [`Failure`]; `Rejected` if the lengths do not fit `memory` and `gathered`, or are no whole numbers of elements.
    /// Ranks with different lengths make different calls.
    pub fn all_gather(
        &mut self,
        dtype: DType,
        memory: &[u8],
        lengths: &[usize],
        gathered: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let elements = elements_of(memory, dtype)?;
        self.check_lengths(dtype, memory, lengths, gathered)?;
        let call = Call::new(Collective::AllGather, dtype, elements);
        let (position, piece_bytes) = (self.position, self.segment.sizes().piece_bytes);
        let longest = lengths.iter().copied().max().unwrap_or(0);
        self.perform(|own| {
            let mut places = Vec::with_capacity(lengths.len());
            let mut rest = gathered;
            for length in lengths {
                let (place, more) = std::mem::take(&mut rest).split_at_mut(*length);
                places.push(place);
                rest = more;
            }
            places[position].copy_from_slice(memory);
            let range = |length: usize, first: usize| first.min(length)..(first + piece_bytes).min(length);
            let put = |own: &Self, first| {
                own.write(|layout, half| layout.piece(half, position), &memory[range(memory.len(), first)]);
            };
            put(own, 0);
            own.begin(call, digest(lengths), deadline)?;
            for first in (0..longest).step_by(piece_bytes) {
                let next = first + piece_bytes;
                if next < longest {
                    put(own, next);
                }
                for (other, place) in places.iter_mut().enumerate().filter(|(other, _)| *other != position) {
                    let range = range(place.len(), first);
                    own.read(|layout, half| layout.piece(half, other), &mut place[range]);
                }
                if next < longest {
                    own.meet(deadline)?;
                }
            }
            Ok(())
        })
    }

    /// Writes a piece of the root, if this rank is the root and has one.
    fn put_if(&self, is_root: bool, root: usize, piece: Option<&[u8]>) {
        if let Some(piece) = piece.filter(|_| is_root) {
            self.write(|layout, half| layout.piece(half, root), piece);
        }
    }

    fn check_lengths(&self, dtype: DType, memory: &[u8], lengths: &[usize], gathered: &[u8]) -> Result<()> {
        let world_size = self.world_size();
        if lengths.len() != world_size {
            return Err(Error::invalid(format!("{} lengths for {world_size} ranks", lengths.len())));
        }
        if let Some(odd) = lengths.iter().find(|length| !length.is_multiple_of(dtype.size())) {
            return Err(Error::invalid(format!("{odd} bytes are no whole number of {dtype}")));
        }
        if lengths[self.position] != memory.len() {
            let why = format!("{} bytes of this rank, and {} in the lengths", memory.len(), lengths[self.position]);
            return Err(Error::invalid(why));
        }
        let sum = lengths.iter().try_fold(0_usize, |sum, length| sum.checked_add(*length));
        if sum != Some(gathered.len()) {
            let why = format!("place for {} bytes, which the lengths of all ranks do not add up to", gathered.len());
            return Err(Error::invalid(why));
        }
        Ok(())
    }
}

/// Returns a digest (FNV-1a) of the lengths, by which ranks compare what they expect.
fn digest(lengths: &[usize]) -> u64 {
    let bytes = lengths.iter().flat_map(|length| (*length as u64).to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |digest, byte| (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
