//! The columns of a batch: dense rows, ragged rows, JSON rows, packed media.

mod offsets;
mod packed;

use std::ops::Range;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::base::error::{Code, Error, Result};
use crate::group::batch::json::{self, Marking};
use crate::group::batch::tensor::{DType, Element, Tensor, check_range};

pub use offsets::Offsets;
pub use packed::{Packed, Segment, SegmentId};

/// A value for each row. Cheap to clone; slices share the memory.
#[derive(Clone, Debug, PartialEq)]
pub enum Column {
    /// Rows of one shape, counted by dimension 0 of the tensor.
    Dense(Tensor),
    /// Rows of unequal lengths.
    Ragged(Ragged),
    /// JSON values.
    Json(JsonRows),
    /// Lists of tensors with individual shapes, which rows may share.
    Packed(Packed),
}

impl Column {
    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.rows(),
            Self::Ragged(ragged) => ragged.rows(),
            Self::Json(json) => json.rows(),
            Self::Packed(packed) => packed.rows(),
        }
    }

    /// Returns the tensor of a dense column.
    ///
    /// # Errors
    /// `InvalidArgument` if the column is of another kind.
    pub fn dense(&self) -> Result<&Tensor> {
        match self {
            Self::Dense(tensor) => Ok(tensor),
            other => Err(other.is_not("dense")),
        }
    }

    /// Returns the rows of a ragged column.
    ///
    /// # Errors
    /// `InvalidArgument` if the column is of another kind.
    pub fn ragged(&self) -> Result<&Ragged> {
        match self {
            Self::Ragged(ragged) => Ok(ragged),
            other => Err(other.is_not("ragged")),
        }
    }

    /// Returns the rows of a JSON column.
    ///
    /// # Errors
    /// `InvalidArgument` if the column is of another kind.
    pub fn json(&self) -> Result<&JsonRows> {
        match self {
            Self::Json(json) => Ok(json),
            other => Err(other.is_not("json")),
        }
    }

    /// Returns the rows of a packed column.
    ///
    /// # Errors
    /// `InvalidArgument` if the column is of another kind.
    pub fn packed(&self) -> Result<&Packed> {
        match self {
            Self::Packed(packed) => Ok(packed),
            other => Err(other.is_not("packed")),
        }
    }

    /// Returns the name of the kind, as used in messages and on the wire.
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

    /// Returns adjacent rows, sharing the memory. The caller has checked the range.
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

/// Rows of unequal lengths, concatenated in one tensor along its dimension 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Ragged {
    values: Tensor,
    offsets: Offsets,
}

impl Ragged {
    /// Creates rows from `values`, cut along dimension 0 at boundaries that cover all of it.
    ///
    /// # Errors
    /// `InvalidArgument` if the values are a scalar, or if the boundaries span another number of steps.
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

    /// Creates rows of single elements, such as token ids or log-probs, copied into one block.
    #[must_use]
    pub fn from_rows<T: Element>(rows: &[impl AsRef<[T]>]) -> Self {
        let lengths = rows.iter().map(|row| row.as_ref().len());
        let mut values = Vec::with_capacity(lengths.clone().sum());
        rows.iter().for_each(|row| values.extend_from_slice(row.as_ref()));
        let values = Tensor::from_vec([values.len()], values).expect("the shape is the vector's own length");
        Self { values, offsets: Offsets::from_lengths(lengths) }
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.offsets.rows()
    }

    /// Returns the type of the elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.values.dtype()
    }

    /// Returns all rows, concatenated.
    #[must_use]
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// Returns the boundaries of the rows in [`Self::values`].
    #[must_use]
    pub fn offsets(&self) -> &Offsets {
        &self.offsets
    }

    /// Returns one row, sharing the memory.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such row.
    pub fn row(&self, row: usize) -> Result<Tensor> {
        check_row(row, self.rows())?;
        Ok(self.values.slice_rows(self.offsets.row(row)))
    }

    pub(crate) fn slice_rows(&self, rows: Range<usize>) -> Self {
        let values = self.values.slice_rows(self.offsets.rows_range(rows.clone()));
        Self { values, offsets: self.offsets.slice_rows(rows) }
    }
}

/// JSON values as concatenated texts. A row is parsed when it is read.
///
/// ```
/// use gym_core::group::JsonRows;
///
/// let rows = JsonRows::from_values(["2 + 2", "3 + 3"])?;
/// assert_eq!(rows.read::<String>(1)?, "3 + 3");
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct JsonRows {
    text: Bytes,
    offsets: Offsets,
}

impl JsonRows {
    /// Creates rows from `text`, cut at boundaries that cover all of it.
    ///
    /// # Errors
    /// `InvalidArgument` if the boundaries span another number of bytes.
    pub fn new(text: Bytes, offsets: Offsets) -> Result<Self> {
        if offsets.total() != text.len() {
            let (span, found) = (offsets.total(), text.len());
            return Err(Error::invalid(format!("the rows span {span} bytes, the text has {found}")));
        }
        Ok(Self { text, offsets })
    }

    /// Serializes each value as one row. [`Self::read`] returns its numbers as they are, even if JSON has no such number; [`json`] has
    /// their text.
    ///
    /// # Errors
    /// `InvalidArgument`, with the row, if a value cannot be serialized as JSON.
    pub fn from_values<T: Serialize>(values: impl IntoIterator<Item = T>) -> Result<Self> {
        let (mut text, mut lengths) = (Vec::new(), Vec::new());
        for value in values {
            let begin = text.len();
            serde_json::to_writer(&mut text, &Marking(&value))
                .map_err(|error| Error::invalid(format!("row {} is not JSON", lengths.len())).caused_by(error))?;
            lengths.push(text.len() - begin);
        }
        Ok(Self { text: text.into(), offsets: Offsets::from_lengths(lengths) })
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.offsets.rows()
    }

    /// Returns the texts of all rows, concatenated.
    #[must_use]
    pub fn text(&self) -> &Bytes {
        &self.text
    }

    /// Returns the boundaries of the texts in [`Self::text`].
    #[must_use]
    pub fn offsets(&self) -> &Offsets {
        &self.offsets
    }

    /// Returns the text of one row, sharing the memory.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such row.
    pub fn row(&self, row: usize) -> Result<Bytes> {
        check_row(row, self.rows())?;
        Ok(self.text.slice(self.offsets.row(row)))
    }

    /// Deserializes one row as a `T`. A number that is not finite is read from the text that [`json`] gives it.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such row; `DataLoss` if its text is not a `T`.
    pub fn read<T: DeserializeOwned>(&self, row: usize) -> Result<T> {
        json::read(&self.row(row)?).map_err(|error| {
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
