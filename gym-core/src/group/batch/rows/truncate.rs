//! Removal of padding: columns become narrower, and no real element is lost.

use std::ops::Range;
use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::group::batch::rows::sides::is_mask;
use crate::group::batch::tensor::{Side, Tensor};
use crate::group::batch::{Batch, Column};

impl Batch {
    /// Narrows dimension `dimension` to `length` in every dense column that has it. Other columns are unchanged.
    ///
    /// Padding is in dimension 1, and is removed on its side: columns that are padded on the left keep their last elements. The
    /// side is the one that the column declares ([`Tensor::padding_side`]). Otherwise, it is the one of `{name}_mask`, then the one of the
    /// columns of the same width, then the right. A plan of micro-batches stays, for the new width.
    ///
    /// # Errors
    /// `InvalidArgument` in these cases:
    /// - the dimension is 0, which counts the rows;
    /// - a column has less than `length` in this dimension;
    /// - the columns that become narrower are padded on different sides;
    /// - a real element would be lost: a removed element of a mask, that is, of a column `…_mask` with two dimensions, is not 0, or
    ///   `{name}_lengths` has a larger number. To shorten rows, shorten them before they are padded.
    pub fn truncate(&self, dimension: usize, length: usize) -> Result<Self> {
        if dimension == 0 {
            return Err(Error::invalid("truncate of dimension 0, which counts the rows; slice the batch instead"));
        }
        let mut narrowed = self.narrow(dimension, length, |tensor| tensor.shape().len() > dimension)?;
        if let Some(plan) = &mut narrowed.micro_batches
            && dimension == 1
            && plan.width.is_some_and(|width| width > length)
        {
            Arc::make_mut(plan).width = Some(length);
        }
        Ok(narrowed)
    }

    /// As [`Self::truncate`] of dimension 1, for the dense columns of this width only.
    pub(in crate::group::batch) fn narrow_width(&self, width: usize, length: usize) -> Result<Self> {
        self.narrow(1, length, |tensor| tensor.shape().get(1) == Some(&width))
    }

    fn narrow(&self, dimension: usize, length: usize, chosen: impl Fn(&Tensor) -> bool) -> Result<Self> {
        let side = if dimension == 1 { self.side_of_narrowed(length, &chosen)? } else { Side::Right };
        let narrow = |(name, column): &(Arc<str>, Column)| -> Result<(Arc<str>, Column)> {
            let column = match column {
                Column::Dense(tensor) if chosen(tensor) => {
                    let narrowed = tensor.narrow(dimension, length, side);
                    Column::Dense(narrowed.map_err(|error| error.about(format!("truncate column {name:?}")))?)
                }
                other => other.clone(),
            };
            Ok((Arc::clone(name), column))
        };
        Ok(Self { columns: self.columns.iter().map(narrow).collect::<Result<_>>()?, ..self.clone() })
    }

    /// Returns the side on which the chosen columns become narrower, after checking that no real element is there.
    fn side_of_narrowed(&self, length: usize, chosen: impl Fn(&Tensor) -> bool) -> Result<Side> {
        let dense = self.columns().filter_map(|(name, column)| Some((name, column.dense().ok()?)));
        let wider: Vec<_> = dense.filter(|(_, tensor)| chosen(tensor) && tensor.shape()[1] > length).collect();
        let Some(((first, _), others)) = wider.split_first() else { return Ok(Side::default()) };
        let side = self.side_of(first)?.unwrap_or_default();
        for (name, _) in others {
            let other = self.side_of(name)?.unwrap_or_default();
            if other != side {
                return Err(Error::invalid(format!(
                    "truncate: column {first:?} is padded on the {side}, column {name:?} on the {other}\n  fix: truncate them in \
                     batches of their own, or declare the side with Tensor::padded_on"
                )));
            }
        }
        for (name, tensor) in &wider {
            let (width, size) = (tensor.shape()[1], tensor.dtype().size());
            let removed = if side == Side::Left { 0..width - length } else { length..width };
            if is_mask(name, tensor) {
                lost(first_real(tensor, removed.start * size..removed.end * size), name, width, length)?;
            }
            let lengths = format!("{name}_lengths");
            if let Some(Column::Dense(numbers)) = self.get(&lengths)
                && numbers.shape().len() == 1
            {
                let numbers = Column::lengths(&numbers.clone().into())?;
                lost(numbers.iter().position(|number| *number > length), &lengths, width, length)?;
            }
        }
        Ok(side)
    }
}

/// Returns the first row of a mask with an element that is not 0 in this range of bytes.
fn first_real(mask: &Tensor, removed: Range<usize>) -> Option<usize> {
    let rows = mask.bytes().chunks(mask.row_bytes().max(1));
    rows.map(|row| &row[removed.clone()]).position(|row| row.iter().any(|byte| *byte != 0))
}

fn lost(row: Option<usize>, by: &str, width: usize, length: usize) -> Result<()> {
    row.map_or(Ok(()), |row| {
        Err(Error::invalid(format!(
            "truncate from {width} to {length} would cut real elements of row {row}, by column {by:?}\n  fix: shorten the rows \
             before they are padded; if the padding is on the left, declare it with Tensor::padded_on"
        )))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::batch::tests::every_kind;

    fn elements(batch: &Batch, name: &str) -> Vec<i64> {
        batch.column(name).unwrap().dense().unwrap().view::<i64>().unwrap().into_owned()
    }

    #[test]
    fn c058_truncate_narrows_the_dense_columns_that_have_the_dimension() {
        let wide = Tensor::from_vec([2, 4], (0..8_i64).collect()).unwrap();
        let batch = every_kind(2).with("wide", wide).unwrap();
        let cut = batch.truncate(1, 2).unwrap();
        assert_eq!(elements(&cut, "wide"), [0, 1, 4, 5]);
        for same in ["x", "tokens", "note"] {
            assert_eq!(cut.column(same).unwrap(), batch.column(same).unwrap());
        }
        assert!(batch.truncate(1, 3).unwrap_err().to_string().contains("matrix"));
        assert!(batch.truncate(0, 1).is_err());
    }

    #[test]
    fn truncate_narrows_an_inner_dimension_row_by_row() {
        let cube = Tensor::from_vec([2, 2, 3], (0..12_i64).collect()).unwrap();
        let left = cube.clone().padded_on(Side::Left).unwrap();
        let batch = Batch::empty().with("cube", cube).unwrap();
        assert_eq!(elements(&batch.truncate(2, 1).unwrap(), "cube"), [0, 3, 6, 9]);
        assert_eq!(batch.truncate(2, 0).unwrap().column("cube").unwrap().dense().unwrap().shape(), [2, 2, 0]);
        // Padding is in dimension 1; its side says nothing of the others.
        let batch = Batch::empty().with("cube", left).unwrap();
        assert_eq!(elements(&batch.truncate(2, 1).unwrap(), "cube"), [0, 3, 6, 9]);
        assert_eq!(elements(&batch.truncate(1, 1).unwrap(), "cube"), [3, 4, 5, 9, 10, 11]);
    }
}
