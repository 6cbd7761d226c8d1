//! Validation of the values of a batch, which construction and decoding do not read.

use serde::de::IgnoredAny;

use crate::base::error::{Code, Error, Result};
use crate::group::batch::tensor::{DType, Tensor};
use crate::group::batch::{Batch, Column, Ragged, Segment};

impl Batch {
    /// Checks every value whose type permits invalid bytes: JSON rows must be JSON, and `BOOL` elements must be 0 or 1. Equal
    /// numbers of rows and valid boundaries need no check: every batch has them.
    ///
    /// # Errors
    /// `DataLoss` for the first invalid value, with the name of the column, and the row of a JSON column.
    pub fn validate(&self) -> Result<()> {
        for (name, column) in self.columns() {
            let valid = match column {
                Column::Dense(tensor) => check_bools(tensor),
                Column::Ragged(ragged) => check_bools(Ragged::values(ragged)),
                Column::Json(json) => (0..json.rows()).try_for_each(|row| json.read::<IgnoredAny>(row).map(drop)),
                Column::Packed(packed) => packed.segments().iter().map(Segment::tensor).try_for_each(check_bools),
            };
            valid.map_err(|error| error.about(format!("column {name:?}")))?;
        }
        Ok(())
    }
}

fn check_bools(tensor: &Tensor) -> Result<()> {
    match tensor.dtype() {
        DType::Bool if tensor.bytes().iter().any(|byte| *byte > 1) => {
            Err(Error::not_started(Code::DataLoss, "a BOOL element is neither 0 nor 1"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::group::batch::tests::every_kind;
    use crate::group::batch::{JsonRows, Offsets, Packed};

    #[test]
    fn values_that_nobody_read_are_found_by_column_and_row() {
        let batch = every_kind(2);
        batch.validate().unwrap();
        let two = Tensor::new(DType::Bool, [2], Bytes::from_static(&[0, 2])).unwrap();
        let rubbish = JsonRows::new(Bytes::from_static(b"1}"), Offsets::from_lengths([1, 1])).unwrap();
        for (column, place) in [
            (two.clone().into(), "\"odd\""),
            (Ragged::new(two.clone(), Offsets::from_lengths([0, 2])).unwrap().into(), "\"odd\""),
            (Packed::new([Some(two), None], 0).into(), "\"odd\""),
            (Column::from(rubbish), "row 1"),
        ] {
            let error = batch.clone().with("odd", column).unwrap().validate().unwrap_err();
            assert!(error.code() == Code::DataLoss && error.to_string().contains(place), "{error}");
        }
    }
}
