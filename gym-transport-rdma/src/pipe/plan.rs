//! How a message is cut into pieces: both ends work it out from its lengths alone.
//!
//! A part (the head, or a segment) of `cut` bytes or more is a piece of its own. Shorter ones are gathered, as long as they
//! stay below `cut` together: first behind the header in the opening, which is piece 0, then in pieces of their own. So
//! whatever is gathered travels eagerly and everything else by rendezvous, and nothing that travels eagerly is long.

/// Where segments begin within a piece: what vector units and typed views want.
pub(crate) const ALIGNMENT: usize = 64;

/// Where every part of a message lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Of every part, the head first: its piece, and where it begins there.
    pub(crate) spots: Vec<(usize, usize)>,
    /// Bytes of every piece. Those of the first include the header.
    pub(crate) pieces: Vec<usize>,
}

impl Plan {
    /// The plan of a message with a header and parts of these lengths.
    pub(crate) fn new(header: usize, parts: impl Iterator<Item = usize>, cut: usize) -> Self {
        let mut plan = Self { spots: Vec::with_capacity(parts.size_hint().0), pieces: vec![header] };
        let mut open = 0;
        for (part, length) in parts.enumerate() {
            if length >= cut {
                plan.spots.push((plan.pieces.len(), 0));
                plan.pieces.push(length);
                continue;
            }
            let filled = plan.pieces[open];
            let start = if part > 0 && length > 0 { filled.next_multiple_of(ALIGNMENT) } else { filled };
            if length == 0 || start + length < cut {
                plan.spots.push((open, start));
                plan.pieces[open] = start + length;
            } else {
                open = plan.pieces.len();
                plan.spots.push((open, 0));
                plan.pieces.push(length);
            }
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_part_lies_in_one_piece_apart_from_the_others_and_what_is_gathered_is_short(
            header in 30..400_usize,
            parts in prop::collection::vec(prop_oneof![3 => 0..300_usize, 1 => 900..3_000_usize], 1..40),
            cut in 100..2_000_usize,
        ) {
            let plan = Plan::new(header, parts.iter().copied(), cut);
            prop_assert_eq!(plan.spots.len(), parts.len());
            let mut filled = vec![0; plan.pieces.len()];
            filled[0] = header;
            for (at, (&length, &(piece, start))) in parts.iter().zip(&plan.spots).enumerate() {
                prop_assert!(start >= filled[piece] || length == 0, "parts do not overlap");
                prop_assert!(start - filled[piece] < ALIGNMENT, "little is lost");
                prop_assert!(at == 0 || length == 0 || start % ALIGNMENT == 0);
                filled[piece] = start + length;
                if length >= cut {
                    prop_assert_eq!((start, plan.pieces[piece]), (0, length), "alone");
                } else if piece > 0 {
                    prop_assert!(plan.pieces[piece] < cut);
                }
            }
            prop_assert_eq!(filled, plan.pieces.clone());
            prop_assert!(plan.pieces[0] == header || plan.pieces[0] < cut, "the opening is short");
        }
    }

    #[test]
    fn a_small_message_is_its_opening() {
        let plan = Plan::new(70, [2, 1_000].into_iter(), 64 << 10);
        assert_eq!(plan, Plan { spots: vec![(0, 70), (0, 128)], pieces: vec![1_128] });
    }
}
