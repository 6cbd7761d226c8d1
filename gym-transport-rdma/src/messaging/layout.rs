//! Layout: splits a message into chunks. Both ends compute it from the lengths of the message alone.
//!
//! A part (the head or a segment) of `cut` bytes or more is a chunk of its own. Shorter parts are gathered as long as
//! their total is below `cut`. The first ones follow the header in the first chunk (chunk 0), the others form further
//! chunks. Gathered chunks are sent eagerly, all others by rendezvous, so every eager chunk is short.

/// Alignment of segments within a chunk, for vector units and typed views.
pub(crate) const ALIGNMENT: usize = 64;

/// Sizes at which a peer may split messages. Smaller ones would produce too many chunks; larger ones would copy
/// everything.
pub(crate) const CUT_BYTES: std::ops::RangeInclusive<usize> = 1 << 10..=1 << 24;

/// The position of every part of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChunkLayout {
    /// Chunk and offset of every part, starting with the head.
    pub(crate) positions: Vec<(usize, usize)>,
    /// Length of every chunk. The first includes the header.
    pub(crate) chunks: Vec<usize>,
}

impl ChunkLayout {
    /// Computes the layout of a message with a header and parts of these lengths.
    pub(crate) fn new(header: usize, parts: impl Iterator<Item = usize>, cut: usize) -> Self {
        let mut layout = Self { positions: Vec::with_capacity(parts.size_hint().0), chunks: vec![header] };
        let mut open = 0;
        for (part, length) in parts.enumerate() {
            if length >= cut {
                layout.positions.push((layout.chunks.len(), 0));
                layout.chunks.push(length);
                continue;
            }
            let filled = layout.chunks[open];
            let start = if part > 0 && length > 0 { filled.next_multiple_of(ALIGNMENT) } else { filled };
            if length == 0 || start + length < cut {
                layout.positions.push((open, start));
                layout.chunks[open] = start + length;
            } else {
                open = layout.chunks.len();
                layout.positions.push((open, 0));
                layout.chunks.push(length);
            }
        }
        layout
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_part_lies_in_one_chunk_apart_from_the_others_and_what_is_gathered_is_short(
            header in 30..400_usize,
            parts in prop::collection::vec(prop_oneof![3 => 0..300_usize, 1 => 900..3_000_usize], 1..40),
            cut in 100..2_000_usize,
        ) {
            let layout = ChunkLayout::new(header, parts.iter().copied(), cut);
            prop_assert_eq!(layout.positions.len(), parts.len());
            let mut filled = vec![0; layout.chunks.len()];
            filled[0] = header;
            for (at, (&length, &(chunk, start))) in parts.iter().zip(&layout.positions).enumerate() {
                prop_assert!(start >= filled[chunk] || length == 0, "parts do not overlap");
                prop_assert!(start - filled[chunk] < ALIGNMENT, "little is lost");
                prop_assert!(at == 0 || length == 0 || start % ALIGNMENT == 0);
                filled[chunk] = start + length;
                if length >= cut {
                    prop_assert_eq!((start, layout.chunks[chunk]), (0, length), "alone");
                } else if chunk > 0 {
                    prop_assert!(layout.chunks[chunk] < cut);
                }
            }
            prop_assert_eq!(filled, layout.chunks.clone());
            prop_assert!(layout.chunks[0] == header || layout.chunks[0] < cut, "the first chunk is short");
        }
    }

    #[test]
    fn a_small_message_is_its_first_chunk() {
        let layout = ChunkLayout::new(70, [2, 1_000].into_iter(), 64 << 10);
        assert_eq!(layout, ChunkLayout { positions: vec![(0, 70), (0, 128)], chunks: vec![1_128] });
    }
}
