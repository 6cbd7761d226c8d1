//! Boundaries of the rows of a column with rows of unequal lengths.

use std::fmt;
use std::ops::Range;

use bytes::Bytes;

use crate::base::error::{Code, Error, Result};

const BYTES: usize = size_of::<u64>();

/// `rows + 1` boundaries, as little-endian `u64`, never decreasing. Row `i` lies between the boundaries `i` and `i + 1`.
///
/// The first boundary need not be 0, because a slice of rows shares the boundaries of the whole column. The data of a slice
/// begins at its first boundary.
#[derive(Clone)]
pub struct Offsets(Bytes);

impl Offsets {
    /// Creates the boundaries of rows with these lengths; the first boundary is 0.
    #[must_use]
    pub fn from_lengths(lengths: impl IntoIterator<Item = usize>) -> Self {
        let lengths = lengths.into_iter();
        let mut boundaries = Vec::with_capacity(BYTES * (lengths.size_hint().0 + 1));
        let mut at = 0_u64;
        boundaries.extend(at.to_le_bytes());
        for length in lengths {
            at += length as u64;
            boundaries.extend(at.to_le_bytes());
        }
        Self(boundaries.into())
    }

    /// Decodes the boundaries received from a peer.
    ///
    /// # Errors
    /// `DataLoss` if the bytes are not `rows + 1` numbers that never decrease.
    pub fn decode(bytes: Bytes, rows: usize) -> Result<Self> {
        let expected = rows.checked_add(1).and_then(|count| count.checked_mul(BYTES));
        if expected != Some(bytes.len()) {
            let found = bytes.len();
            return Err(lost(format!("{found} bytes of boundaries for {rows} rows; 8 each and one more are needed")));
        }
        let offsets = Self(bytes);
        if let Some(row) = (0..rows).find(|row| offsets.at(*row) > offsets.at(row + 1)) {
            return Err(lost(format!("boundaries decrease at row {row}")));
        }
        Ok(offsets)
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.0.len() / BYTES - 1
    }

    /// Returns the range of a row, counted from the first boundary.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> Range<usize> {
        self.rows_range(row..row + 1)
    }

    /// Returns the range of adjacent rows, counted from the first boundary.
    pub(crate) fn rows_range(&self, rows: Range<usize>) -> Range<usize> {
        let first = self.at(0);
        to_usize(self.at(rows.start) - first)..to_usize(self.at(rows.end) - first)
    }

    /// Returns the length of each row, in order.
    pub fn lengths(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        (0..self.rows()).map(|row| self.row(row).len())
    }

    /// Returns the distance from the first boundary to the last.
    #[must_use]
    pub fn total(&self) -> usize {
        self.rows_range(0..self.rows()).len()
    }

    /// Returns the boundaries of adjacent rows, sharing the memory.
    pub(crate) fn slice_rows(&self, rows: Range<usize>) -> Self {
        Self(self.0.slice(rows.start * BYTES..(rows.end + 1) * BYTES))
    }

    /// Returns the boundaries of the same rows with the first one at 0. Copies them unless it is 0 already.
    pub(crate) fn rebased(&self) -> Self {
        if self.at(0) == 0 { self.clone() } else { Self::from_lengths(self.lengths()) }
    }

    /// Returns the encoded boundaries.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.0
    }

    fn at(&self, index: usize) -> u64 {
        let bytes = &self.0[index * BYTES..(index + 1) * BYTES];
        u64::from_le_bytes(bytes.try_into().expect("eight bytes were sliced"))
    }
}

/// Compares the lengths of the rows, not the position of the first boundary.
impl PartialEq for Offsets {
    fn eq(&self, other: &Self) -> bool {
        self.rows() == other.rows() && self.lengths().eq(other.lengths())
    }
}

impl fmt::Debug for Offsets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Offsets({} rows, {} in all)", self.rows(), self.total())
    }
}

fn to_usize(distance: u64) -> usize {
    // No memory is larger than the address space: a slice by a larger distance fails its bounds check.
    usize::try_from(distance).unwrap_or(usize::MAX)
}

fn lost(message: String) -> Error {
    Error::not_started(Code::DataLoss, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_come_back_and_a_slice_counts_from_its_own_first_row() {
        let offsets = Offsets::from_lengths([3, 0, 2]);
        assert_eq!(offsets.lengths().collect::<Vec<_>>(), [3, 0, 2]);
        let tail = offsets.slice_rows(1..3);
        assert_eq!((tail.rows(), tail.row(1), tail.total()), (2, 0..2, 2));
        assert_eq!(tail, Offsets::from_lengths([0, 2]));
        assert_eq!(offsets.slice_rows(3..3).rows(), 0);
    }

    #[test]
    fn boundaries_from_a_peer_are_counted_and_must_not_decrease() {
        let bytes = |boundaries: &[u64]| -> Bytes { boundaries.iter().flat_map(|at| at.to_le_bytes()).collect() };
        assert!(Offsets::decode(bytes(&[5, 7, 7]), 2).is_ok());
        for (boundaries, rows) in [(vec![0, 3, 2], 2), (vec![0, 1], 2), (vec![], 0), (vec![0], usize::MAX)] {
            assert_eq!(Offsets::decode(bytes(&boundaries), rows).unwrap_err().code(), Code::DataLoss);
        }
        assert!(Offsets::decode(Bytes::from(vec![0; 9]), 0).is_err());
    }
}
