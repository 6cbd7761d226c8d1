//! The columns of a batch: dense rows, ragged rows, JSON rows, packed media.

mod offsets;
mod packed;

use std::ops::Range;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::base::error::{Code, Error, Result};
use crate::group::batch::tensor::{DType, Element, Tensor, check_range};

pub use offsets::Offsets;
pub use packed::{Packed, Segment, SegmentId};

/// A value per row. Cheap to clone; slices share the memory.
#[derive(Clone, Debug, PartialEq)]
pub enum Column {
    /// Rows of one shape: dimension 0 of the tensor counts them.
    Dense(Tensor),
    /// Rows of unequal lengths.
    Ragged(Ragged),
    /// JSON values.
    Json(JsonRows),
    /// Lists of tensors of their own shapes, which rows may share.
    Packed(Packed),
}

impl Column {
    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.rows(),
            Self::Ragged(ragged) => ragged.rows(),
            Self::Json(json) => json.rows(),
            Self::Packed(packed) => packed.rows(),
        }
    }

    /// The tensor of a dense column.
    ///
    /// # Errors
    /// `InvalidArgument` when the column is of another kind.
    pub fn dense(&self) -> Result<&Tensor> {
        match self {
            Self::Dense(tensor) => Ok(tensor),
            other => Err(other.is_not("dense")),
        }
    }

    /// The rows of a ragged column.
    ///
    /// # Errors
    /// `InvalidArgument` when the column is of another kind.
    pub fn ragged(&self) -> Result<&Ragged> {
        match self {
            Self::Ragged(ragged) => Ok(ragged),
            other => Err(other.is_not("ragged")),
        }
    }

    /// The rows of a JSON column.
    ///
    /// # Errors
    /// `InvalidArgument` when the column is of another kind.
    pub fn json(&self) -> Result<&JsonRows> {
        match self {
            Self::Json(json) => Ok(json),
            other => Err(other.is_not("json")),
        }
    }

    /// The rows of a packed column.
    ///
    /// # Errors
    /// `InvalidArgument` when the column is of another kind.
    pub fn packed(&self) -> Result<&Packed> {
        match self {
            Self::Packed(packed) => Ok(packed),
            other => Err(other.is_not("packed")),
        }
    }

    /// The name of the kind, as in messages and on the wire.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Dense(_) => "dense",
            Self::Ragged(_) => "ragged",
            Self::Json(_) => "json",
            Self::Packed(_) => "packed",
        }
    }

    fn is_not(&self, wanted: &str) -> Error {
        Error::invalid(format!("a {} column is not {wanted}", self.kind()))
    }

    /// Neighbouring rows, sharing the memory; the range was checked.
    pub(crate) fn slice_rows(&self, rows: Range<usize>) -> Self {
        match self {
            Self::Dense(tensor) => Self::Dense(tensor.slice_rows(rows)),
            Self::Ragged(ragged) => Self::Ragged(ragged.slice_rows(rows)),
            Self::Json(json) => Self::Json(json.slice_rows(rows)),
            Self::Packed(packed) => Self::Packed(packed.select_rows(rows)),
        }
    }
}

impl From<Tensor> for Column {
    fn from(tensor: Tensor) -> Self {
        Self::Dense(tensor)
    }
}

impl From<Ragged> for Column {
    fn from(ragged: Ragged) -> Self {
        Self::Ragged(ragged)
    }
}

impl From<JsonRows> for Column {
    fn from(json: JsonRows) -> Self {
        Self::Json(json)
    }
}

impl From<Packed> for Column {
    fn from(packed: Packed) -> Self {
        Self::Packed(packed)
    }
}

/// Rows of unequal lengths, one after the other in one tensor along its dimension 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Ragged {
    values: Tensor,
    offsets: Offsets,
}

impl Ragged {
    /// Rows cut out of `values` along its dimension 0, at boundaries that begin at its start and end at its end.
    ///
    /// # Errors
    /// `InvalidArgument` when the values are a scalar, or the boundaries span another number of steps.
    pub fn new(values: Tensor, offsets: Offsets) -> Result<Self> {
        if values.shape().is_empty() {
            return Err(Error::invalid("a scalar cannot be cut into rows"));
        }
        if offsets.total() != values.rows() {
            let (span, found) = (offsets.total(), values.rows());
            return Err(Error::invalid(format!("the rows span {span} steps, the values have {found}")));
        }
        Ok(Self { values, offsets })
    }

    /// Rows of single elements, copied into one block: token ids, log-probs.
    #[must_use]
    pub fn from_rows<T: Element>(rows: &[impl AsRef<[T]>]) -> Self {
        let lengths = rows.iter().map(|row| row.as_ref().len());
        let mut values = Vec::with_capacity(lengths.clone().sum());
        rows.iter().for_each(|row| values.extend_from_slice(row.as_ref()));
        let values = Tensor::from_vec([values.len()], values).expect("the shape is the vector's own length");
        Self { values, offsets: Offsets::from_lengths(lengths) }
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.offsets.rows()
    }

    /// Type of the elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.values.dtype()
    }

    /// All rows, one after the other.
    #[must_use]
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// Where the rows begin and end in [`Self::values`].
    #[must_use]
    pub fn offsets(&self) -> &Offsets {
        &self.offsets
    }

    /// One row, sharing the memory.
    ///
    /// # Errors
    /// `InvalidArgument` when there is no such row.
    pub fn row(&self, row: usize) -> Result<Tensor> {
        check_row(row, self.rows())?;
        Ok(self.values.slice_rows(self.offsets.row(row)))
    }

    pub(crate) fn slice_rows(&self, rows: Range<usize>) -> Self {
        let values = self.values.slice_rows(self.offsets.rows_range(rows.clone()));
        Self { values, offsets: self.offsets.slice_rows(rows) }
    }
}

/// JSON values as their texts, one after the other. Nobody parses them until somebody asks for a row.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonRows {
    text: Bytes,
    offsets: Offsets,
}

impl JsonRows {
    /// Texts cut out of `text` at boundaries that begin at its start and end at its end.
    ///
    /// # Errors
    /// `InvalidArgument` when the boundaries span another number of bytes.
    pub fn new(text: Bytes, offsets: Offsets) -> Result<Self> {
        if offsets.total() != text.len() {
            let (span, found) = (offsets.total(), text.len());
            return Err(Error::invalid(format!("the rows span {span} bytes, the text has {found}")));
        }
        Ok(Self { text, offsets })
    }

    /// One text per value.
    ///
    /// # Errors
    /// `InvalidArgument` when a value cannot be written as JSON; it names the row.
    pub fn from_values<T: Serialize>(values: impl IntoIterator<Item = T>) -> Result<Self> {
        let (mut text, mut lengths) = (Vec::new(), Vec::new());
        for value in values {
            let begin = text.len();
            serde_json::to_writer(&mut text, &value)
                .map_err(|error| Error::invalid(format!("row {} is not JSON", lengths.len())).caused_by(error))?;
            lengths.push(text.len() - begin);
        }
        Ok(Self { text: text.into(), offsets: Offsets::from_lengths(lengths) })
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.offsets.rows()
    }

    /// All texts, one after the other.
    #[must_use]
    pub fn text(&self) -> &Bytes {
        &self.text
    }

    /// Where the texts begin and end in [`Self::text`].
    #[must_use]
    pub fn offsets(&self) -> &Offsets {
        &self.offsets
    }

    /// The text of one row, sharing the memory.
    ///
    /// # Errors
    /// `InvalidArgument` when there is no such row.
    pub fn row(&self, row: usize) -> Result<Bytes> {
        check_row(row, self.rows())?;
        Ok(self.text.slice(self.offsets.row(row)))
    }

    /// One row, read as `T`.
    ///
    /// # Errors
    /// `InvalidArgument` when there is no such row; `DataLoss` when its text is no such value.
    pub fn read<T: DeserializeOwned>(&self, row: usize) -> Result<T> {
        serde_json::from_slice(&self.row(row)?).map_err(|error| {
            Error::not_started(Code::DataLoss, format!("row {row} is not what is asked for")).caused_by(error)
        })
    }

    pub(crate) fn slice_rows(&self, rows: Range<usize>) -> Self {
        let text = self.text.slice(self.offsets.rows_range(rows.clone()));
        Self { text, offsets: self.offsets.slice_rows(rows) }
    }
}

fn check_row(row: usize, rows: usize) -> Result<()> {
    check_range(&(row..row.saturating_add(1)), rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ragged_rows_come_back_and_share_the_memory() {
        let ragged = Ragged::from_rows(&[vec![1_i64, 2, 3], vec![], vec![4]]);
        assert_eq!(ragged.row(2).unwrap().view::<i64>().unwrap().as_ref(), [4]);
        let tail = ragged.slice_rows(1..3);
        assert_eq!((tail.rows(), tail.row(0).unwrap().len()), (2, 0));
        assert_eq!(tail.values().bytes().as_ptr(), ragged.values().bytes()[24..].as_ptr());
        assert!(tail.row(2).is_err());
    }

    #[test]
    fn boundaries_that_do_not_span_the_values_are_refused() {
        let values = Tensor::zeros(DType::F32, [4]).unwrap();
        assert!(Ragged::new(values.clone(), Offsets::from_lengths([1, 2])).is_err());
        assert!(Ragged::new(values, Offsets::from_lengths([1, 3])).is_ok());
        assert!(Ragged::new(Tensor::zeros(DType::F32, []).unwrap(), Offsets::from_lengths([1])).is_err());
        assert!(JsonRows::new(Bytes::from_static(b"12"), Offsets::from_lengths([1])).is_err());
    }

    #[test]
    fn json_rows_are_texts_until_read() {
        let rows = JsonRows::from_values([vec![1, 2], vec![]]).unwrap();
        assert_eq!((rows.text().as_ref(), rows.read::<Vec<i32>>(0).unwrap()), (b"[1,2][]".as_slice(), vec![1, 2]));
        let rubbish = JsonRows::new(Bytes::from_static(b"]"), Offsets::from_lengths([1])).unwrap();
        assert_eq!(rubbish.read::<i32>(0).unwrap_err().code(), Code::DataLoss);
    }
}
