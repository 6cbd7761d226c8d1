//! Whether the ranks of a group have the same parameters after a step.

use std::collections::BTreeMap;

use gym_core::group::{Rank, Tensor};
use serde::{Deserialize, Serialize};

/// The answer of a rank about its parameters after a step of training. A collective operation that fails may have ended on some ranks, so that they have
/// taken a step which others have not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StepMark {
    /// The number of the step.
    pub step: u64,
    /// A digest of the parameters.
    pub digest: u64,
}

impl StepMark {
    /// Creates the mark of a step with the parameters after it, in a fixed order. The digest is CRC-32C over the bytes, and the number of the bytes.
    pub fn new<'t>(step: u64, parameters: impl IntoIterator<Item = &'t Tensor>) -> Self {
        let add = |(crc, bytes), tensor: &Tensor| {
            (crc32c::crc32c_append(crc, tensor.bytes()), bytes + tensor.bytes().len() as u64)
        };
        let (crc, bytes) = parameters.into_iter().fold((0, 0_u64), add);
        Self { step, digest: u64::from(crc) << 32 | bytes & u64::from(u32::MAX) }
    }

    /// Returns the ranks that differ from the newest step, ascending. If ranks differ within that step, the parameters that most of them have count, or else
    /// those of the lowest rank.
    ///
    /// Pass them to [`Group::mark_stale`](crate::Group::mark_stale).
    #[must_use]
    pub fn outdated(marks: &[(Rank, Self)]) -> Vec<Rank> {
        let newest = marks.iter().map(|(_, mark)| mark.step).max();
        let mut votes: BTreeMap<u64, (usize, Rank)> = BTreeMap::new();
        for (rank, mark) in marks.iter().filter(|(_, mark)| Some(mark.step) == newest) {
            let (count, lowest) = votes.entry(mark.digest).or_insert((0, *rank));
            (*count, *lowest) = (*count + 1, (*lowest).min(*rank));
        }
        let elected = votes.into_iter().max_by_key(|(_, (count, lowest))| (*count, std::cmp::Reverse(*lowest)));
        let current = |mark: &Self| Some(mark.step) == newest && Some(mark.digest) == elected.map(|(digest, _)| digest);
        let mut outdated: Vec<Rank> = marks.iter().filter(|(_, mark)| !current(mark)).map(|(rank, _)| *rank).collect();
        outdated.sort_unstable();
        outdated
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outdated(marks: &[(u64, u64)]) -> Vec<Rank> {
        let marks: Vec<_> =
            (0..).zip(marks).map(|(rank, (step, digest))| (rank, StepMark { step: *step, digest: *digest })).collect();
        StepMark::outdated(&marks)
    }

    #[test]
    fn the_newest_step_counts_and_within_it_the_most_ranks() {
        assert!(outdated(&[]).is_empty());
        assert!(outdated(&[(7, 1), (7, 1), (7, 1)]).is_empty());
        assert_eq!(outdated(&[(7, 1), (8, 2), (7, 1)]), [0, 2], "one rank has finished the step");
        assert_eq!(outdated(&[(8, 3), (8, 2), (8, 2), (7, 9)]), [0, 3]);
        assert_eq!(outdated(&[(8, 3), (8, 2)]), [1], "the lowest rank decides");
    }

    #[test]
    fn other_parameters_have_another_mark() {
        let tensor = |values: &[f32]| Tensor::from_vec([values.len()], values.to_vec()).expect("a shape");
        let (one, two) = (tensor(&[1.0, 2.0]), tensor(&[3.0]));
        let mark = StepMark::new(4, [&one, &two]);
        assert_eq!(mark, StepMark::new(4, [&one.clone(), &two]));
        for other in [StepMark::new(5, [&one, &two]), StepMark::new(4, [&one]), StepMark::new(4, [&two, &one])] {
            assert_ne!(mark, other);
        }
    }
}
