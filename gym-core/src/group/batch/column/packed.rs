//! Rows made of tensors of their own shapes, which rows may share: the images of a prompt, once for all of its samples.
//!
//! A row refers to segments; a segment is a tensor with an identity. Rows that refer to the same segment share it however
//! often the column is sliced, repeated, put together or sent, because it is recognised by its identity, never by its value.

use std::collections::HashMap;

use crate::base::error::{Code, Error, Result};
use crate::group::batch::Offsets;
use crate::group::batch::tensor::{DType, Tensor, copy_into_block};

/// Says of two segments whether one was made from the other without a change. Drawn at random, so that segments of different
/// processes do not meet; a test that wants the same ones again seeds `fastrand`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SegmentId(pub(in crate::group::batch) u128);

/// A tensor with an identity. A clone has the same one.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    id: SegmentId,
    tensor: Tensor,
}

impl Segment {
    /// A segment like no other.
    #[must_use]
    pub fn new(tensor: Tensor) -> Self {
        Self { id: SegmentId(fastrand::u128(..)), tensor }
    }

    /// A segment that came from a peer.
    pub(in crate::group::batch) fn known(id: SegmentId, tensor: Tensor) -> Self {
        Self { id, tensor }
    }

    /// What tells it from others.
    #[must_use]
    pub fn id(&self) -> SegmentId {
        self.id
    }

    /// Its elements.
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
    /// One row for each entry, of one segment or none, to be packed along `dimension`; negative ones count from the last.
    #[must_use]
    pub fn new(rows: impl IntoIterator<Item = Option<Tensor>>, dimension: isize) -> Self {
        Self::from_segments(rows.into_iter().map(|row| row.map(Segment::new)), dimension)
    }

    /// One row for each entry, of the segments that it lists. A segment that comes again is kept once.
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

    /// Right-pads the other dimensions with zeros to the largest of them, where [`Self::to_tensor`] would refuse.
    #[must_use]
    pub fn pad_to_max_shape(self) -> Self {
        Self { pad_to_max_shape: true, ..self }
    }

    /// As many rows without segments, with this column's settings.
    #[must_use]
    pub fn empty_rows_like(&self, rows: usize) -> Self {
        Self { ends: vec![0; rows], ..Self::empty(self.dimension, self.pad_to_max_shape) }
    }

    fn empty(dimension: isize, pad_to_max_shape: bool) -> Self {
        Self { segments: Vec::new(), ends: Vec::new(), references: Vec::new(), dimension, pad_to_max_shape }
    }

    /// The column of parts that came from a peer.
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

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.ends.len()
    }

    /// The segments, each once, in the order in which rows first refer to them.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Which of [`Self::segments`] the rows refer to, row after row.
    #[must_use]
    pub fn references(&self) -> &[usize] {
        &self.references
    }

    /// How many segments each row refers to.
    #[must_use]
    pub fn counts(&self) -> impl ExactSizeIterator<Item = usize> + Clone + '_ {
        (0..self.rows()).map(|row| self.ends[row] - self.begin(row))
    }

    /// The segments of one row, in order.
    ///
    /// # Panics
    /// When there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> impl ExactSizeIterator<Item = &Segment> {
        self.references[self.begin(row)..self.ends[row]].iter().map(|reference| &self.segments[*reference])
    }

    /// The dimension along which segments are packed, as it was given.
    #[must_use]
    pub fn dimension(&self) -> isize {
        self.dimension
    }

    /// Whether other dimensions are padded.
    #[must_use]
    pub fn pads_to_max_shape(&self) -> bool {
        self.pad_to_max_shape
    }

    /// The segments of all rows put together along the packing dimension, one copy; none if no row has a segment.
    ///
    /// # Errors
    /// `InvalidArgument` when segments differ in type or number of dimensions, when there is no such dimension, or when other
    /// dimensions differ and are not to be padded.
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

    /// The same rows with their elements in another float type: the column itself if it has it, else segments of their own
    /// identity, shared as before.
    ///
    /// # Errors
    /// As [`Tensor::to_float`].
    pub fn to_float(&self, dtype: DType) -> Result<Self> {
        let cast = |segment: &Segment| match segment.tensor.dtype() {
            same if same == dtype => Ok(segment.clone()),
            _ => segment.tensor.to_float(dtype).map(Segment::new),
        };
        Ok(Self { segments: self.segments.iter().map(cast).collect::<Result<_>>()?, ..self.clone() })
    }

    /// One row with the segments of all rows.
    #[must_use]
    pub fn merge_rows(&self) -> Self {
        Self { ends: vec![self.references.len()], ..self.clone() }
    }

    /// One row for each part, with the segments of all of its rows.
    ///
    /// # Errors
    /// As parts put together: `InvalidArgument` when their settings differ.
    pub fn flattened_concat(parts: &[Self]) -> Result<Self> {
        let merged: Vec<Self> = parts.iter().map(Self::merge_rows).collect();
        Self::concat(&merged.iter().collect::<Vec<_>>())
    }

    /// The rows of all parts, in order; segments of one identity are kept once.
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

    /// The rows at these positions, which were checked; segments that no row refers to are left behind.
    pub(in crate::group::batch) fn select_rows(&self, positions: impl IntoIterator<Item = usize>) -> Self {
        let rows = positions.into_iter().map(|row| self.row(row).cloned());
        Self { pad_to_max_shape: self.pad_to_max_shape, ..Self::from_segments(rows, self.dimension) }
    }

    /// Refuses two columns whose rows do not have as many segments each, such as images and their sizes.
    ///
    /// # Errors
    /// `InvalidArgument` when they differ.
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

/// Equal when the rows have equal tensors and the settings are the same, whatever is shared.
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
