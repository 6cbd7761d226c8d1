//! Sequence packing: groups sequences into bins of fixed capacity, so that a micro-batch has little padding.
//!
//! The four algorithms produce exactly the bins of NeMo RL, ties included, so that a run trains on the same micro-batches in
//! both. The exception is `first_fit_shuffle`: it has its own seed, while the reference draws from a global one.
//!
//! First fit finds a bin in a tournament tree. Modified first fit searches sorted arrays and skips taken entries. Both need
//! `n log n` steps; the reference needs `n²`.

mod first_fit;
mod metrics;
mod modified;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod tests;

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::base::error::Error;

pub use metrics::{PackingMetrics, PackingTotals};

/// The algorithm that assigns sequences to bins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PackingAlgorithm {
    /// In the given order; opens a new bin if the next sequence does not fit. Keeps the order, but packs worst.
    Concatenative,
    /// Longest first (of equal lengths, the later one first), each into the first bin with enough capacity.
    FirstFitDecreasing,
    /// In random order, each into the first bin with enough capacity.
    FirstFitShuffle,
    /// The algorithm of Johnson and Garey. Each sequence longer than half a bin gets its own bin, which is filled up with medium,
    /// small and tiny sequences. The remaining sequences go to the least loaded of further bins. Packs best.
    ModifiedFirstFitDecreasing,
}

/// Options for packing: the algorithm, the capacity of a bin, and constraints on the number of bins.
///
/// ```
/// use gym_core::group::batch::packing::{Packing, PackingAlgorithm};
///
/// let packing = Packing::new(PackingAlgorithm::FirstFitDecreasing, 100);
/// assert_eq!(packing.pack(&[30, 30, 30, 30, 30])?, [vec![4, 3, 2], vec![1, 0]]);
/// # Ok::<(), gym_core::group::batch::packing::PackingError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Packing {
    /// The algorithm.
    pub algorithm: PackingAlgorithm,
    /// Maximum tokens in a bin.
    #[serde(rename = "bin_capacity")]
    pub capacity: usize,
    /// Minimum number of bins. Further bins are made by moving sequences one at a time. The default is 0.
    #[serde(default)]
    pub min_bin_count: usize,
    /// The number of bins is a multiple of this number. The default is 1.
    #[serde(default = "one")]
    pub bin_count_multiple: NonZeroUsize,
    /// Seed of the order in which `first_fit_shuffle` takes the sequences. The default is 0.
    #[serde(default)]
    pub seed: u64,
}

/// The reason why sequences cannot be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PackingError {
    /// A sequence is longer than a bin.
    #[error("sequence length {length} (of sequence {index}) exceeds bin capacity {capacity}")]
    TooLong {
        /// The position of the sequence in the input.
        index: usize,
        /// The length of the sequence.
        length: usize,
        /// The capacity of a bin.
        capacity: usize,
    },
    /// The modified algorithm does not accept empty sequences.
    #[error("sequence lengths must be positive; sequence {0} is empty")]
    Empty(usize),
    /// The capacity of a bin is 0.
    #[error("bin_capacity must be positive")]
    NoCapacity,
    /// There are fewer sequences than required bins; each bin must hold at least one.
    #[error(
        "cannot create {bins} bins with only {sequences} sequences; reduce min_bin_count or bin_count_multiple, or provide \
         more sequences"
    )]
    TooFewSequences {
        /// The number of bins that the constraints require.
        bins: usize,
        /// The number of sequences.
        sequences: usize,
    },
    /// No algorithm has this name.
    #[error(
        "unknown packing algorithm '{0}'; there are concatenative, first_fit_decreasing, first_fit_shuffle and \
         modified_first_fit_decreasing"
    )]
    UnknownAlgorithm(String),
}

impl From<PackingError> for Error {
    fn from(error: PackingError) -> Self {
        Self::invalid(error.to_string()).about("pack sequences")
    }
}

impl Packing {
    /// Creates options with this algorithm and capacity, and without constraints on the number of bins.
    #[must_use]
    pub fn new(algorithm: PackingAlgorithm, capacity: usize) -> Self {
        Self { algorithm, capacity, min_bin_count: 0, bin_count_multiple: one(), seed: 0 }
    }

    /// Packs the sequences. Returns, for each bin, the positions in `lengths` of its sequences, in the order in which they were
    /// added. Every sequence is in exactly one bin, and no bin is empty.
    ///
    /// # Errors
    /// If a sequence is longer than a bin, if one is empty (modified algorithm only), or if there are fewer sequences than
    /// required bins.
    pub fn pack(&self, lengths: &[usize]) -> Result<Vec<Vec<usize>>, PackingError> {
        if let Some((index, &length)) = lengths.iter().enumerate().find(|(_, length)| **length > self.capacity) {
            return Err(PackingError::TooLong { index, length, capacity: self.capacity });
        }
        let bins = match self.algorithm {
            PackingAlgorithm::Concatenative => concatenate(lengths, self.capacity),
            PackingAlgorithm::FirstFitDecreasing => {
                first_fit::pack(lengths, &longest_first(lengths, true), self.capacity)
            }
            PackingAlgorithm::FirstFitShuffle => {
                let mut order: Vec<usize> = (0..lengths.len()).collect();
                fastrand::Rng::with_seed(self.seed).shuffle(&mut order);
                first_fit::pack(lengths, &order, self.capacity)
            }
            PackingAlgorithm::ModifiedFirstFitDecreasing => {
                if self.capacity == 0 {
                    return Err(PackingError::NoCapacity);
                }
                if let Some(index) = lengths.iter().position(|length| *length == 0) {
                    return Err(PackingError::Empty(index));
                }
                modified::pack(lengths, self.capacity)
            }
        };
        self.adjust(bins, lengths.len())
    }

    /// Makes as many more bins as the constraints require, each with one sequence. Takes sequences from the end of the bin with
    /// the most sequences (of equal bins, the later one) until one is left there. Then continues with the next bin.
    fn adjust(&self, mut bins: Vec<Vec<usize>>, sequences: usize) -> Result<Vec<Vec<usize>>, PackingError> {
        let natural = bins.len();
        let least = natural.max(self.min_bin_count);
        let wanted = least.checked_next_multiple_of(self.bin_count_multiple.get()).unwrap_or(usize::MAX);
        if wanted > sequences {
            return Err(PackingError::TooFewSequences { bins: wanted, sequences });
        }
        let mut sources: Vec<usize> = (0..natural).collect();
        sources.sort_unstable_by_key(|bin| std::cmp::Reverse((bins[*bin].len(), *bin)));
        for source in sources {
            while bins.len() < wanted && bins[source].len() > 1 {
                let moved = bins[source].pop();
                bins.push(moved.into_iter().collect());
            }
        }
        Ok(bins)
    }
}

/// Returns the positions of all lengths, longest first; of equal lengths, the later or the earlier one first. Sorts the lengths
/// together with their positions, because looking up each length again would dominate the cost.
fn longest_first(lengths: &[usize], later_first: bool) -> Vec<usize> {
    let mut pairs: Vec<(usize, usize)> = lengths.iter().copied().zip(0..).collect();
    if later_first {
        pairs.sort_unstable_by(|a, b| b.cmp(a));
    } else {
        pairs.sort_unstable_by(|a, b| (b.0, a.1).cmp(&(a.0, b.1)));
    }
    pairs.into_iter().map(|(_, index)| index).collect()
}

fn one() -> NonZeroUsize {
    NonZeroUsize::MIN
}

fn concatenate(lengths: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    let mut bins: Vec<Vec<usize>> = Vec::new();
    let mut room = 0;
    for (index, &length) in lengths.iter().enumerate() {
        match bins.last_mut() {
            Some(bin) if length <= room => {
                bin.push(index);
                room -= length;
            }
            _ => {
                bins.push(vec![index]);
                room = capacity - length;
            }
        }
    }
    bins
}

impl PackingAlgorithm {
    /// All algorithms.
    pub const ALL: [Self; 4] =
        [Self::Concatenative, Self::FirstFitDecreasing, Self::FirstFitShuffle, Self::ModifiedFirstFitDecreasing];

    /// Returns the name in a configuration, such as `first_fit_decreasing`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Concatenative => "concatenative",
            Self::FirstFitDecreasing => "first_fit_decreasing",
            Self::FirstFitShuffle => "first_fit_shuffle",
            Self::ModifiedFirstFitDecreasing => "modified_first_fit_decreasing",
        }
    }
}

impl FromStr for PackingAlgorithm {
    type Err = PackingError;

    /// Parses a name in upper or lower case.
    fn from_str(name: &str) -> Result<Self, PackingError> {
        (Self::ALL.into_iter().find(|known| known.as_str().eq_ignore_ascii_case(name)))
            .ok_or_else(|| PackingError::UnknownAlgorithm(name.to_owned()))
    }
}

impl TryFrom<String> for PackingAlgorithm {
    type Error = PackingError;

    fn try_from(name: String) -> Result<Self, PackingError> {
        name.parse()
    }
}

impl From<PackingAlgorithm> for String {
    fn from(algorithm: PackingAlgorithm) -> Self {
        algorithm.as_str().to_owned()
    }
}

impl fmt::Display for PackingAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
