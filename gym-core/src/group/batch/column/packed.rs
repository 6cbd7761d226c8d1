//! Rows of tensors with individual shapes, which rows may share, such as the images of a prompt, kept once for all of its samples.
//!
//! A row refers to segments. A segment is a tensor with an identity. Segments are compared by identity, never by value. Rows that
//! refer to the same segment therefore share it, however often the column is sliced, repeated, concatenated or sent.

use std::collections::HashMap;

use crate::base::error::{Code, Error, Result};
use crate::group::batch::Offsets;
use crate::group::batch::tensor::{DType, Tensor, copy_into_block};

/// Identity of a segment: equal for two segments if one was derived from the other without a change. Drawn at random, so that
/// segments of different processes do not collide. A test that needs reproducible identities seeds `fastrand`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SegmentId(pub(in crate::group::batch) u128);

/// A tensor with an identity, which its clones keep.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    id: SegmentId,
    tensor: Tensor,
}

impl Segment {
    /// Creates a segment with a new identity.
    #[must_use]
    pub fn new(tensor: Tensor) -> Self {
        Self { id: SegmentId(fastrand::u128(..)), tensor }
    }

    /// Creates a segment that was received from a peer.
    pub(in crate::group::batch) fn known(id: SegmentId, tensor: Tensor) -> Self {
        Self { id, tensor }
    }

    /// Returns the identity.
    #[must_use]
    pub fn id(&self) -> SegmentId {
        self.id
    }

    /// Returns the elements.
    #[must_use]
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// A column whose rows are lists of segments.
#[derive(Clone, Debug)]
pub struct Packed {
    segments: Vec<Segment>,
    /// Row `i` refers to `references[ends[i - 1]..ends[i]]`.
    ends: Vec<usize>,
    references: Vec<usize>,
    dimension: isize,
    pad_to_max_shape: bool,
}

impl Packed {
    /// Creates a row of one segment, or none, for each entry. Rows are packed along `dimension`; a negative number counts from
    /// the last.
    #[must_use]
    pub fn new(rows: impl IntoIterator<Item = Option<Tensor>>, dimension: isize) -> Self {
        Self::from_segments(rows.into_iter().map(|row| row.map(Segment::new)), dimension)
    }

    /// Creates a row for each entry, with the segments that the entry lists. A repeated segment is kept once.
    #[must_use]
    pub fn from_segments<R>(rows: impl IntoIterator<Item = R>, dimension: isize) -> Self
    where
        R: IntoIterator<Item = Segment>,
    {
        let mut packed = Self::empty(dimension, false);
        let mut known = HashMap::new();
        for row in rows {
            for segment in row {
                packed.refer(segment, &mut known);
            }
            packed.ends.push(packed.references.len());
        }
        packed
    }

    /// Right-pads the other dimensions with zeros to the largest size. Without it, [`Self::to_tensor`] rejects different sizes.
    #[must_use]
    pub fn pad_to_max_shape(self) -> Self {
        Self { pad_to_max_shape: true, ..self }
    }

    /// Creates this many rows without segments, with the settings of this column.
    #[must_use]
    pub fn empty_rows_like(&self, rows: usize) -> Self {
        Self { ends: vec![0; rows], ..Self::empty(self.dimension, self.pad_to_max_shape) }
    }

    fn empty(dimension: isize, pad_to_max_shape: bool) -> Self {
        Self { segments: Vec::new(), ends: Vec::new(), references: Vec::new(), dimension, pad_to_max_shape }
    }

    /// Creates a column from parts that were received from a peer.
    pub(in crate::group::batch) fn decode(
        segments: Vec<Segment>,
        offsets: &Offsets,
        references: Vec<usize>,
        dimension: isize,
        pad_to_max_shape: bool,
    ) -> Result<Self> {
        if offsets.total() != references.len() {
            let (span, found) = (offsets.total(), references.len());
            return Err(Error::invalid(format!("the rows span {span} references to segments, there are {found}")));
        }
        if let Some(reference) = references.iter().find(|reference| **reference >= segments.len()) {
            return Err(Error::invalid(format!("a row refers to segment {reference} of {}", segments.len())));
        }
        let ends = (0..offsets.rows()).map(|row| offsets.row(row).end).collect();
        Ok(Self { segments, ends, references, dimension, pad_to_max_shape })
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.ends.len()
    }

    /// Returns the segments, each once, in the order in which rows first refer to them.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the positions in [`Self::segments`] to which the rows refer, row by row.
    #[must_use]
    pub fn references(&self) -> &[usize] {
        &self.references
    }

    /// Returns the number of segments of each row.
    #[must_use]
    pub fn counts(&self) -> impl ExactSizeIterator<Item = usize> + Clone + '_ {
        (0..self.rows()).map(|row| self.ends[row] - self.begin(row))
    }

    /// Returns the segments of one row, in order.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> impl ExactSizeIterator<Item = &Segment> {
        self.references[self.begin(row)..self.ends[row]].iter().map(|reference| &self.segments[*reference])
    }

    /// Returns the dimension along which segments are packed, as it was given.
    #[must_use]
    pub fn dimension(&self) -> isize {
        self.dimension
    }

    /// Returns `true` if the other dimensions are padded.
    #[must_use]
    pub fn pads_to_max_shape(&self) -> bool {
        self.pad_to_max_shape
    }

    /// Concatenates the segments of all rows along the packing dimension, in one copy. Returns `None` if no row has a segment.
    ///
    /// # Errors
    /// `InvalidArgument` in these cases:
    /// - segments differ in type or number of dimensions;
    /// - the packing dimension does not exist;
    /// - other dimensions differ and are not padded.
    pub fn to_tensor(&self) -> Result<Option<Tensor>> {
        let mut parts = self.references.iter().map(|reference| self.segments[*reference].tensor());
        let Some(first) = parts.next() else { return Ok(None) };
        let (rank, dimension) = (first.shape().len(), self.dimension_of(first)?);
        let mut shape = first.shape().to_vec();
        for part in parts {
            if part.dtype() != first.dtype() || part.shape().len() != rank {
                return Err(Error::invalid(format!(
                    "{part:?} beside {first:?}: packed tensors have the same rank and type"
                )));
            }
            for (at, (size, other)) in shape.iter_mut().zip(part.shape()).enumerate() {
                if at == dimension {
                    *size += other;
                } else if self.pad_to_max_shape {
                    *size = (*size).max(*other);
                } else if *size != *other {
                    return Err(Error::invalid(format!(
                        "{part:?} beside {first:?}: dimension {at} differs; pad_to_max_shape"
                    )));
                }
            }
        }
        let mut block = vec![0; crate::group::batch::tensor::bytes_of_shape(first.dtype(), &shape)?];
        let mut at = vec![0; rank];
        for reference in &self.references {
            let part = self.segments[*reference].tensor();
            copy_into_block(part, &mut block, &shape, &at);
            at[dimension] += part.shape()[dimension];
        }
        Tensor::new(first.dtype(), shape, block.into()).map(Some)
    }

    fn dimension_of(&self, tensor: &Tensor) -> Result<usize> {
        let rank = tensor.shape().len();
        let from_last = usize::try_from(self.dimension).ok().or_else(|| rank.checked_add_signed(self.dimension));
        from_last
            .filter(|dimension| *dimension < rank)
            .ok_or_else(|| Error::invalid(format!("no dimension {} to pack along in {tensor:?}", self.dimension)))
    }

    /// Converts the elements to another float type. Returns the column itself if it has that type already. Otherwise, the new
    /// segments get identities of their own and are shared as before.
    ///
    /// # Errors
    /// The errors of [`Tensor::to_float`].
    pub fn to_float(&self, dtype: DType) -> Result<Self> {
        let cast = |segment: &Segment| match segment.tensor.dtype() {
            same if same == dtype => Ok(segment.clone()),
            _ => segment.tensor.to_float(dtype).map(Segment::new),
        };
        Ok(Self { segments: self.segments.iter().map(cast).collect::<Result<_>>()?, ..self.clone() })
    }

    /// Merges all rows into one row with all segments.
    #[must_use]
    pub fn merge_rows(&self) -> Self {
        Self { ends: vec![self.references.len()], ..self.clone() }
    }

    /// Merges each part into one row with the segments of all of its rows.
    ///
    /// # Errors
    /// `InvalidArgument` if the settings of the parts differ.
    pub fn flattened_concat(parts: &[Self]) -> Result<Self> {
        let merged: Vec<Self> = parts.iter().map(Self::merge_rows).collect();
        Self::concat(&merged.iter().collect::<Vec<_>>())
    }

    /// Concatenates the rows of all parts, in order. Segments with the same identity are kept once.
    pub(in crate::group::batch) fn concat(parts: &[&Self]) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Err(Error::invalid("no packed columns to put together"));
        };
        let settings = |part: &Self| (part.dimension, part.pad_to_max_shape);
        if parts.iter().any(|part| settings(part) != settings(first)) {
            return Err(Error::invalid("packed columns with different dimensions or padding cannot be put together"));
        }
        let rows = parts.iter().flat_map(|part| (0..part.rows()).map(|row| part.row(row).cloned()));
        Ok(Self { pad_to_max_shape: first.pad_to_max_shape, ..Self::from_segments(rows, first.dimension) })
    }

    /// Selects the rows at these positions, which the caller has checked. Segments to which no row refers are dropped.
    pub(in crate::group::batch) fn select_rows(&self, positions: impl IntoIterator<Item = usize>) -> Self {
        let rows = positions.into_iter().map(|row| self.row(row).cloned());
        Self { pad_to_max_shape: self.pad_to_max_shape, ..Self::from_segments(rows, self.dimension) }
    }

    /// Checks that the rows of two columns have the same number of segments each, such as images and their sizes.
    ///
    /// # Errors
    /// `InvalidArgument` if the numbers differ.
    pub(in crate::group::batch) fn check_coupled(&self, other: &Self) -> Result<()> {
        match self.counts().zip(other.counts()).position(|(own, others)| own != others) {
            Some(row) => Err(Error::not_started(
                Code::InvalidArgument,
                format!("ordered per-row segment counts differ: row {row} has another number of segments"),
            )),
            None => Ok(()),
        }
    }

    fn begin(&self, row: usize) -> usize {
        row.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    fn refer(&mut self, segment: Segment, known: &mut HashMap<SegmentId, usize>) {
        let index = *known.entry(segment.id).or_insert_with(|| {
            self.segments.push(segment);
            self.segments.len() - 1
        });
        self.references.push(index);
    }
}

/// Equal if the rows have equal tensors and the settings are the same, regardless of sharing.
impl PartialEq for Packed {
    fn eq(&self, other: &Self) -> bool {
        fn tensors(packed: &Packed, row: usize) -> impl Iterator<Item = &Tensor> {
            packed.row(row).map(Segment::tensor)
        }
        (self.dimension, self.pad_to_max_shape) == (other.dimension, other.pad_to_max_shape)
            && self.counts().eq(other.counts())
            && (0..self.rows()).all(|row| tensors(self, row).eq(tensors(other, row)))
    }
}
