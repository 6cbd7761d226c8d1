//! Where everything lies in a segment. All ranks compute it from the same four numbers, which the header has.
//!
//! ```text
//!   header │ generation │ arrived │ waiters │ two lines for each rank           one page or more
//!   half 0: one piece of each rank, one piece of results                        2 · (W + 1) pieces
//!   half 1: the same
//!   shared tensors of rank 0, of rank 1, …                                      W · shared_bytes
//! ```

use std::ops::Range;

use gym_core::{Error, Result};

/// Bytes of a cache line: words that different ranks write are on different ones.
const LINE: usize = 64;
/// Regions begin on a page, so that no two of them share one.
pub(crate) const PAGE: usize = 4_096;
/// Lines of the header and of the words of the barrier.
const COMMON_LINES: usize = 4;
/// Lines of each rank: its progress, and its calls.
const RANK_LINES: usize = 2;
/// The least bytes of a piece. A small tensor is one piece, and no more than that.
pub(crate) const PIECE_BYTES_MIN: usize = 64 << 10;
/// The most bytes of a piece. Larger ones leave every cache.
const PIECE_BYTES_MAX: usize = 64 << 20;
/// The most ranks, so that the part of a rank in the smallest piece has a cache line.
pub(crate) const WORLD_SIZE_MAX: usize = PIECE_BYTES_MIN / LINE;

/// Sizes of a segment. The creator chooses them, and the other ranks read them from its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of a piece, in which tensors outside the segment pass through it: a multiple of 4,096 from 64 KiB to 64
    /// MiB. The default is 256 KiB: 128 KiB needs a little less CPU time on contended cores, and 512 KiB less time on
    /// idle ones.
    pub piece_bytes: usize,
    /// Bytes that each rank can give to [`SharedBuffer`](crate::SharedBuffer)s. Rounded up to pages of 4,096 bytes. The
    /// default is 0.
    pub shared_bytes: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { piece_bytes: 256 << 10, shared_bytes: 0 }
    }
}

/// The arithmetic of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) world_size: usize,
    pub(crate) sizes: Sizes,
    total: usize,
}

impl Layout {
    /// # Errors
    /// `InvalidArgument` if a size is outside its limits, or all together are more than can be addressed.
    pub(crate) fn new(world_size: usize, sizes: Sizes) -> Result<Self> {
        if !(1..=WORLD_SIZE_MAX).contains(&world_size) {
            return Err(Error::invalid(format!("{world_size} ranks: a segment has 1 to {WORLD_SIZE_MAX}")));
        }
        let piece = sizes.piece_bytes;
        if !(PIECE_BYTES_MIN..=PIECE_BYTES_MAX).contains(&piece) || !piece.is_multiple_of(PAGE) {
            let why = format!(
                "pieces of {piece} bytes: they have a multiple of {PAGE} from {PIECE_BYTES_MIN} to {PIECE_BYTES_MAX}"
            );
            return Err(Error::invalid(why));
        }
        let total = sizes.shared_bytes.checked_next_multiple_of(PAGE).and_then(|shared_bytes| {
            let stages = piece.checked_mul(2 * (world_size + 1))?;
            let shared = shared_bytes.checked_mul(world_size)?;
            let total = control_bytes(world_size).checked_add(stages)?.checked_add(shared)?;
            // The file's length is signed.
            i64::try_from(total).is_ok().then_some((shared_bytes, total))
        });
        let Some((shared_bytes, total)) = total else {
            let why = format!(
                "{} bytes of shared tensors for each of {world_size} ranks: more than a file can have",
                sizes.shared_bytes
            );
            return Err(Error::invalid(why));
        };
        Ok(Self { world_size, sizes: Sizes { piece_bytes: piece, shared_bytes }, total })
    }

    /// Bytes of the segment.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// The number of the generation, on which ranks wait.
    pub(crate) fn generation(&self) -> usize {
        LINE
    }

    /// The number of ranks that have arrived at the barrier.
    pub(crate) fn arrived(&self) -> usize {
        2 * LINE
    }

    /// The number of ranks that sleep.
    pub(crate) fn waiters(&self) -> usize {
        3 * LINE
    }

    /// Whether a rank has its seat: one 32-bit word.
    pub(crate) fn claimed(&self, position: usize) -> usize {
        self.rank_line(position)
    }

    /// The barriers that a rank has come to: one 64-bit word.
    pub(crate) fn progress(&self, position: usize) -> usize {
        self.rank_line(position) + 8
    }

    /// The call of a rank, in one half: three 64-bit words.
    pub(crate) fn call(&self, position: usize, half: Half) -> usize {
        self.rank_line(position) + LINE + 24 * half.index()
    }

    fn rank_line(&self, position: usize) -> usize {
        assert!(position < self.world_size, "a position of the segment");
        (COMMON_LINES + RANK_LINES * position) * LINE
    }

    /// The piece of a rank.
    pub(crate) fn piece(&self, half: Half, position: usize) -> Range<usize> {
        assert!(position < self.world_size, "a position of the segment");
        self.piece_at(half, position)
    }

    /// The part of a piece that holds elements of slice `position`.
    pub(crate) fn part(&self, half: Half, owner: usize, slice: usize) -> Range<usize> {
        self.part_of(self.piece(half, owner), slice)
    }

    /// The place of the results of a slice.
    pub(crate) fn result(&self, half: Half, slice: usize) -> Range<usize> {
        self.part_of(self.piece_at(half, self.world_size), slice)
    }

    /// Bytes of the part of a piece: a multiple of a cache line, and therefore of every element.
    pub(crate) fn part_bytes(&self) -> usize {
        self.sizes.piece_bytes / self.world_size / LINE * LINE
    }

    fn part_of(&self, piece: Range<usize>, slice: usize) -> Range<usize> {
        assert!(slice < self.world_size, "a slice of the tensor");
        let start = piece.start + slice * self.part_bytes();
        start..start + self.part_bytes()
    }

    fn piece_at(&self, half: Half, index: usize) -> Range<usize> {
        let at = half.index() * (self.world_size + 1) + index;
        let start = control_bytes(self.world_size) + at * self.sizes.piece_bytes;
        start..start + self.sizes.piece_bytes
    }

    /// The shared tensors of a rank.
    pub(crate) fn shared(&self, position: usize) -> Range<usize> {
        assert!(position < self.world_size, "a position of the segment");
        let stages = 2 * (self.world_size + 1) * self.sizes.piece_bytes;
        let start = control_bytes(self.world_size) + stages + position * self.sizes.shared_bytes;
        start..start + self.sizes.shared_bytes
    }
}

fn control_bytes(world_size: usize) -> usize {
    ((COMMON_LINES + RANK_LINES * world_size) * LINE).next_multiple_of(PAGE)
}

/// One of the two halves of the pieces and calls, which barriers take in turn.
///
/// **The rule that every operation obeys:** what a rank writes before barrier `b` lies in half `b % 2`, and is read
/// after barrier `b` and before the reader comes to barrier `b + 1`. So the next write to that half, which follows
/// barrier `b + 1`, meets no reader. A rank at whose barrier the segment was aborted writes nothing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Half(bool);

impl Half {
    /// The half that is written before the barrier of this number.
    pub(crate) fn before(barrier: u64) -> Self {
        Self(barrier % 2 == 1)
    }

    fn index(self) -> usize {
        usize::from(self.0)
    }
}

#[cfg(test)]
mod tests {
    use gym_core::Code;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn regions_lie_in_the_segment_and_do_not_overlap(
            world_size in 1..=WORLD_SIZE_MAX, pages in 16..64_usize, shared_bytes in 0..100_000_usize,
        ) {
            // Few ranks are likelier to be wrong than many, and those take long.
            let world_size = if world_size > 40 { world_size % 9 + 1 } else { world_size };
            let layout = Layout::new(world_size, Sizes { piece_bytes: pages * PAGE, shared_bytes }).unwrap();
            let word = |at: usize, bytes: usize| at..at + bytes;
            let mut regions = vec![word(0, 32), word(layout.generation(), 4)];
            regions.extend([word(layout.arrived(), 4), word(layout.waiters(), 4)]);
            for position in 0..world_size {
                regions.extend([word(layout.claimed(position), 4), word(layout.progress(position), 8)]);
                for half in [0, 1].map(Half::before) {
                    regions.push(word(layout.call(position, half), 24));
                    let piece = layout.piece(half, position);
                    for slice in 0..world_size {
                        let part = layout.part(half, position, slice);
                        prop_assert!(piece.start <= part.start && part.end <= piece.end);
                        prop_assert_eq!(part.len(), layout.part_bytes());
                    }
                    prop_assert!(layout.part_bytes() >= LINE && layout.part_bytes().is_multiple_of(LINE));
                    regions.extend([piece, layout.result(half, position)]);
                }
                let shared = layout.shared(position);
                prop_assert!(shared.len() >= shared_bytes && shared.start.is_multiple_of(PAGE));
                regions.push(shared);
            }
            regions.retain(|region| !region.is_empty());
            regions.sort_by_key(|region| region.start);
            prop_assert!(regions.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert!(regions.last().unwrap().end <= layout.total());
            prop_assert!(layout.total().is_multiple_of(PAGE));
        }
    }

    #[test]
    fn sizes_outside_their_limits_are_refused() {
        let fine = Sizes::default();
        for (world_size, sizes) in [
            (0, fine),
            (WORLD_SIZE_MAX + 1, fine),
            (2, Sizes { piece_bytes: 4_096, ..fine }),
            (2, Sizes { piece_bytes: 100_000, ..fine }),
            (2, Sizes { piece_bytes: 1 << 40, ..fine }),
            (2, Sizes { shared_bytes: usize::MAX, ..fine }),
            (2, Sizes { shared_bytes: usize::MAX / 2, ..fine }),
        ] {
            assert_eq!(Layout::new(world_size, sizes).unwrap_err().code(), Code::InvalidArgument, "{sizes:?}");
        }
    }
}
