//! Padding of rows of unequal lengths, in one pass, and masks that mark the real elements.

use crate::base::error::{Error, Result};
use crate::group::batch::rows::select::try_vec;
use crate::group::batch::tensor::{DType, Element, Scalar, Side, Tensor};
use crate::group::batch::{Batch, Ragged};

/// Options for padding rows of unequal lengths.
///
/// The width is that of the longest row, or the one of [`Self::to_width`] if that is larger, rounded up to
/// [`Self::to_multiple_of`]. By default, there is no minimum width, and the multiple is 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Padding {
    value: Scalar,
    side: Side,
    width: usize,
    multiple: usize,
}

impl Padding {
    /// Pads with `value` on this side.
    #[must_use]
    pub fn new(value: impl Into<Scalar>, side: Side) -> Self {
        Self { value: value.into(), side, width: 0, multiple: 1 }
    }

    /// Pads after the elements.
    #[must_use]
    pub fn right(value: impl Into<Scalar>) -> Self {
        Self::new(value, Side::Right)
    }

    /// Pads before the elements.
    #[must_use]
    pub fn left(value: impl Into<Scalar>) -> Self {
        Self::new(value, Side::Left)
    }

    /// Pads to at least this width.
    #[must_use]
    pub fn to_width(self, width: usize) -> Self {
        Self { width, ..self }
    }

    /// Pads to a multiple of this many elements; 0 counts as 1.
    #[must_use]
    pub fn to_multiple_of(self, multiple: usize) -> Self {
        Self { multiple: multiple.max(1), ..self }
    }

    /// Returns the width of rows whose longest row has this many elements.
    fn width_for(&self, longest: usize) -> Result<usize> {
        let width = longest.max(self.width);
        width
            .checked_next_multiple_of(self.multiple)
            .ok_or_else(|| Error::invalid(format!("padding {width} elements to a multiple of {}", self.multiple)))
    }

    /// Copies rows into one block of `width` steps a row, with padding. `rows` yields the bytes of each row, in whole steps of
    /// `step_bytes`.
    pub(in crate::group::batch) fn block<'a>(
        &self,
        dtype: DType,
        width: usize,
        step_bytes: usize,
        rows: impl ExactSizeIterator<Item = &'a [u8]>,
    ) -> Result<Vec<u8>> {
        let row_bytes = width.checked_mul(step_bytes);
        let mut block = try_vec(row_bytes.and_then(|bytes| bytes.checked_mul(rows.len())))?;
        let row_bytes = row_bytes.unwrap_or_default();
        let element = self.value.to_bytes(dtype)?;
        let padding = element.repeat(row_bytes / element.len());
        for row in rows {
            let padding = &padding[row.len()..];
            let (first, second) = if self.side == Side::Left { (padding, row) } else { (row, padding) };
            block.extend_from_slice(first);
            block.extend_from_slice(second);
        }
        Ok(block)
    }
}

impl Batch {
    /// Creates three columns from rows of elements, copied once:
    ///
    /// - `name`, `[rows, width]`: the padded rows;
    /// - `{name}_lengths`, `I32`: the number of elements of each row;
    /// - `{name}_mask`, `BOOL`, `[rows, width]`: true for real elements.
    ///
    /// The padded columns know the side of their padding ([`Tensor::padding_side`]).
    ///
    /// ```
    /// use gym_core::group::{Batch, Padding};
    /// # fn main() -> gym_core::Result<()> {
    /// let batch = Batch::from_rows("input_ids", &[vec![5_i64, 6, 7], vec![8]], Padding::left(0))?;
    /// assert_eq!(batch.column("input_ids")?.dense()?.view::<i64>()?.as_ref(), [5, 6, 7, 0, 0, 8]);
    /// assert_eq!(batch.column("input_ids_lengths")?.dense()?.view::<i32>()?.as_ref(), [3, 1]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` if the padding value is not valid for the type, or if a row has more than 2³¹ − 1 elements.
    pub fn from_rows<T: Element>(name: &str, rows: &[impl AsRef<[T]>], padding: Padding) -> Result<Self> {
        let lengths: Vec<usize> = rows.iter().map(|row| row.as_ref().len()).collect();
        let width = padding.width_for(lengths.iter().copied().max().unwrap_or(0))?;
        let rows = rows.iter().map(|row| T::bytes_of(row.as_ref()));
        let block = padding.block(T::DTYPE, width, T::DTYPE.size(), rows)?;
        Self::empty()
            .with(name, Tensor::new(T::DTYPE, [lengths.len(), width], block.into())?.padded_on(padding.side)?)?
            .with(format!("{name}_lengths"), lengths_tensor(&lengths)?)?
            .with(format!("{name}_mask"), Tensor::mask(&lengths, width, padding.side)?)
    }
}

impl Ragged {
    /// Copies the rows once, into one padded block `[rows, width, …]`.
    ///
    /// # Errors
    /// `InvalidArgument` if the padding value is not valid for the type.
    pub fn pad(&self, padding: Padding) -> Result<Tensor> {
        let (values, offsets) = (self.values(), self.offsets());
        let (step, width) = (values.row_bytes(), padding.width_for(offsets.lengths().max().unwrap_or(0))?);
        let rows = (0..self.rows()).map(|row| {
            let steps = offsets.row(row);
            &values.bytes()[steps.start * step..steps.end * step]
        });
        let block = padding.block(values.dtype(), width, step, rows)?;
        let shape = [self.rows(), width].into_iter().chain(values.shape()[1..].iter().copied());
        Tensor::new(values.dtype(), shape.collect::<Vec<_>>(), block.into())?.padded_on(padding.side)
    }

    /// Returns the number of elements of each row, as `I32` of shape `[rows]`.
    ///
    /// # Errors
    /// `InvalidArgument` if a row has more than 2³¹ − 1 elements.
    pub fn lengths(&self) -> Result<Tensor> {
        lengths_tensor(&self.offsets().lengths().collect::<Vec<_>>())
    }
}

impl Tensor {
    /// Creates the mask of rows with these lengths, padded to `width` on this side: `BOOL`, `[rows, width]`, true for real
    /// elements.
    ///
    /// # Errors
    /// `InvalidArgument` if a length exceeds the width.
    pub fn mask(lengths: &[usize], width: usize, side: Side) -> Result<Self> {
        if let Some(length) = lengths.iter().find(|length| **length > width) {
            return Err(Error::invalid(format!("a mask of width {width} for a row of {length} elements")));
        }
        let mut mask = try_vec(lengths.len().checked_mul(width))?;
        for length in lengths {
            let padding = width - length;
            let (first, real) = if side == Side::Left { (padding, false) } else { (*length, true) };
            mask.extend(std::iter::repeat_n(real, first));
            mask.extend(std::iter::repeat_n(!real, width - first));
        }
        Self::from_vec([lengths.len(), width], mask)?.padded_on(side)
    }
}

fn lengths_tensor(lengths: &[usize]) -> Result<Tensor> {
    let narrow = |length: &usize| {
        i32::try_from(*length).map_err(|_| Error::invalid(format!("a row of {length} elements; lengths travel as I32")))
    };
    Tensor::from_vec([lengths.len()], lengths.iter().map(narrow).collect::<Result<Vec<_>>>()?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn elements(batch: &Batch, name: &str) -> Vec<i64> {
        batch.column(name).unwrap().dense().unwrap().view::<i64>().unwrap().into_owned()
    }

    #[test]
    fn c080_rows_of_seven_and_nine_tokens_are_padded_on_the_right() {
        let batch = Batch::from_rows("ids", &[vec![1_i64; 7], vec![2; 9]], Padding::right(0)).unwrap();
        assert_eq!(batch.column("ids").unwrap().dense().unwrap().shape(), [2, 9]);
        assert_eq!(elements(&batch, "ids")[5..10], [1, 1, 0, 0, 2]);
        let lengths = batch.column("ids_lengths").unwrap().dense().unwrap();
        assert_eq!((lengths.dtype(), lengths.view::<i32>().unwrap().as_ref()), (DType::I32, [7, 9].as_slice()));
    }

    #[test]
    fn the_side_the_value_and_the_width_are_the_callers() {
        let rows = [vec![1_i64], vec![2, 3, 4]];
        let padded = |padding| elements(&Batch::from_rows("ids", &rows, padding).unwrap(), "ids");
        assert_eq!(padded(Padding::left(-1)), [-1, -1, 1, 2, 3, 4]);
        assert_eq!(padded(Padding::right(9).to_width(4)), [1, 9, 9, 9, 2, 3, 4, 9]);
        assert_eq!(padded(Padding::right(0).to_width(2).to_multiple_of(4)), [1, 0, 0, 0, 2, 3, 4, 0]);
        assert_eq!(padded(Padding::right(0).to_multiple_of(0)).len(), 6);
        let left = Batch::from_rows("ids", &rows, Padding::left(0)).unwrap();
        let mask = left.column("ids_mask").unwrap().dense().unwrap();
        assert_eq!(mask.view::<bool>().unwrap().as_ref(), [false, false, true, true, true, true]);
        assert!(Batch::from_rows("ids", &rows, Padding::right(0.5)).is_err());
        assert!(Batch::from_rows("ids", &rows, Padding::right(0).to_width(1 << 62)).is_err());
        assert!(Batch::from_rows("ids", &rows, Padding::right(0).to_width(usize::MAX).to_multiple_of(2)).is_err());
    }

    #[test]
    fn no_rows_and_empty_rows_are_padded_to_what_was_asked() {
        let none: [Vec<i64>; 0] = [];
        let shape = |rows: &[Vec<i64>], width| {
            let batch = Batch::from_rows("ids", rows, Padding::right(0).to_width(width)).unwrap();
            batch.column("ids").unwrap().dense().unwrap().shape().to_vec()
        };
        assert_eq!(shape(&none, 0), [0, 0]);
        assert_eq!(shape(&none, 5), [0, 5]);
        assert_eq!(shape(&[vec![], vec![]], 0), [2, 0]);
        assert_eq!(shape(&[vec![]], 3), [1, 3]);
    }

    #[test]
    fn a_mask_narrower_than_a_row_is_refused() {
        assert!(Tensor::mask(&[1, 5], 4, Side::Right).unwrap_err().message().contains("width 4 for a row of 5"));
    }

    proptest! {
        #[test]
        fn padding_keeps_every_element_where_the_mask_is_true(
            rows in prop::collection::vec(prop::collection::vec(1_i64.., 0..6), 0..6), left in any::<bool>(),
        ) {
            let side = if left { Side::Left } else { Side::Right };
            let batch = Batch::from_rows("ids", &rows, Padding::new(0, side)).unwrap();
            let mask = batch.column("ids_mask").unwrap().dense().unwrap();
            let mask = mask.view::<bool>().unwrap();
            let real = elements(&batch, "ids").into_iter().zip(mask.iter().copied());
            let (kept, padding): (Vec<_>, Vec<_>) = real.partition(|(_, real)| *real);
            prop_assert!(kept.into_iter().map(|(element, _)| element).eq(rows.iter().flatten().copied()));
            prop_assert!(padding.into_iter().all(|(element, _)| element == 0));
            prop_assert_eq!(
                &Ragged::from_rows(&rows).pad(Padding::new(0, side)).unwrap(),
                batch.column("ids").unwrap().dense().unwrap()
            );
        }
    }
}
