//! Selection of rows by position, with one copy of the selected rows, for every kind of column.

use std::ops::Range;

use bytes::Bytes;

use crate::base::error::{Code, Error, Result};
use crate::group::batch::tensor::Tensor;
use crate::group::batch::{Batch, Column, JsonRows, Offsets, Ragged};

impl Batch {
    /// Selects the rows at these positions, in this order. A position may be repeated.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no row at a position; `ResourceExhausted` if the memory is not available.
    pub fn select(&self, positions: &[usize]) -> Result<Self> {
        let rows = self.rows();
        if let Some(position) = positions.iter().find(|position| **position >= rows) {
            return Err(Error::invalid(format!("select of row {position} from a batch of {rows} rows")));
        }
        let columns = self.columns.iter().map(|(name, column)| Ok((name.clone(), column.select_rows(positions)?)));
        Ok(Self { columns: columns.collect::<Result<_>>()?, metadata: self.metadata.clone(), micro_batches: None })
    }

    /// Selects the rows for which `keep` is true.
    ///
    /// # Errors
    /// `InvalidArgument` if `keep` does not have one entry for each row.
    pub fn filter(&self, keep: &[bool]) -> Result<Self> {
        if keep.len() != self.rows() {
            return Err(Error::invalid(format!("a filter of {} rows for a batch of {}", keep.len(), self.rows())));
        }
        self.select(&(0..keep.len()).filter(|row| keep[*row]).collect::<Vec<_>>())
    }

    /// Repeats each row `times` times: `[a, b]` twice is `[a, a, b, b]`. With 0, the batch has no rows and keeps its columns.
    ///
    /// # Errors
    /// `ResourceExhausted` if the memory is not available.
    pub fn repeat_interleave(&self, times: usize) -> Result<Self> {
        if times == 1 {
            return Ok(Self { micro_batches: None, ..self.clone() });
        }
        let rows = self.rows();
        let mut positions = try_vec(rows.checked_mul(times))?;
        positions.extend((0..rows).flat_map(|row| std::iter::repeat_n(row, times)));
        self.select(&positions)
    }

    /// Like [`Self::repeat_interleave`], in place.
    ///
    /// # Errors
    /// The errors of [`Self::repeat_interleave`]; the batch is then unchanged.
    pub fn repeat_interleave_mut(&mut self, times: usize) -> Result<()> {
        *self = self.repeat_interleave(times)?;
        Ok(())
    }

    /// Moves row `i` to position `order[i]`. This restores the order from before `select(order)`, or from before
    /// [`Self::shard_by_batch_size`] and [`Self::concat`].
    ///
    /// # Errors
    /// `InvalidArgument` if `order` is not a permutation of the rows.
    pub fn reorder(&self, order: &[usize]) -> Result<Self> {
        self.select(&inverse_permutation(order, self.rows())?)
    }
}

/// Returns the inverse of the permutation `order`.
fn inverse_permutation(order: &[usize], rows: usize) -> Result<Vec<usize>> {
    if order.len() != rows {
        return Err(Error::invalid(format!("an order of {} rows for a batch of {rows}", order.len())));
    }
    let mut inverse = vec![usize::MAX; rows];
    for (at, position) in order.iter().enumerate() {
        match inverse.get_mut(*position) {
            Some(place) if *place == usize::MAX => *place = at,
            Some(_) => return Err(Error::invalid(format!("an order with position {position} twice"))),
            None => return Err(Error::invalid(format!("an order with position {position} of {rows} rows"))),
        }
    }
    Ok(inverse)
}

impl Column {
    /// Selects the rows at these positions, which the caller has checked.
    fn select_rows(&self, positions: &[usize]) -> Result<Self> {
        Ok(match self {
            Self::Dense(tensor) => Self::Dense(select_tensor(tensor, positions)?),
            Self::Ragged(ragged) => {
                let (values, offsets) = (ragged.values(), ragged.offsets());
                let step = values.row_bytes();
                let spans = positions.iter().map(|row| {
                    let steps = offsets.row(*row);
                    steps.start * step..steps.end * step
                });
                let offsets = Offsets::from_lengths(positions.iter().map(|row| offsets.row(*row).len()));
                let mut shape = values.shape().to_vec();
                shape[0] = offsets.total();
                let values = Tensor::new(values.dtype(), shape, gather(values.bytes(), spans)?)?;
                Self::Ragged(Ragged::new(values, offsets)?)
            }
            Self::Json(json) => {
                let spans = positions.iter().map(|row| json.offsets().row(*row));
                let offsets = Offsets::from_lengths(spans.clone().map(|span| span.len()));
                Self::Json(JsonRows::new(gather(json.text(), spans)?, offsets)?)
            }
            Self::Packed(packed) => Self::Packed(packed.select_rows(positions.iter().copied())),
        })
    }
}

fn select_tensor(tensor: &Tensor, positions: &[usize]) -> Result<Tensor> {
    let row = tensor.row_bytes();
    let spans = positions.iter().map(|position| position * row..(position + 1) * row);
    let mut shape = tensor.shape().to_vec();
    shape[0] = positions.len();
    Ok(Tensor::new(tensor.dtype(), shape, gather(tensor.bytes(), spans)?)?.with_side(tensor.padding_side()))
}

/// Concatenates these spans of `bytes`.
fn gather(bytes: &[u8], spans: impl Iterator<Item = Range<usize>> + Clone) -> Result<Bytes> {
    let mut gathered = try_vec(spans.clone().try_fold(0_usize, |total, span| total.checked_add(span.len())))?;
    spans.for_each(|span| gathered.extend_from_slice(&bytes[span]));
    Ok(gathered.into())
}

/// Creates a vector with this capacity. Returns an error if the memory is not available: the product of two counts may be any
/// number.
pub(in crate::group::batch) fn try_vec<T>(count: Option<usize>) -> Result<Vec<T>> {
    let mut vector = Vec::new();
    match count.map(|count| vector.try_reserve_exact(count)) {
        Some(Ok(())) => Ok(vector),
        _ => Err(Error::not_started(Code::ResourceExhausted, "the memory for the rows is not there")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::group::batch::tests::{every_kind, x};

    #[test]
    fn c047_every_row_comes_n_times_whatever_its_kind() {
        let mut batch = every_kind(3).repeat_interleave(2).unwrap();
        assert_eq!(x(&batch), [0, 0, 1, 1, 2, 2]);
        let json = batch.column("note").unwrap().json().unwrap();
        let rows: Vec<_> = (0..6).map(|row| json.read::<serde_json::Value>(row).unwrap()["row"].clone()).collect();
        assert_eq!(rows, [0, 0, 1, 1, 2, 2]);
        batch.repeat_interleave_mut(2).unwrap();
        assert_eq!(batch.rows(), 12);
    }

    #[test]
    fn c048_no_times_gives_no_rows_and_keeps_the_columns() {
        let batch = every_kind(3);
        let none = batch.repeat_interleave(0).unwrap();
        assert_eq!((none.rows(), none.columns().len()), (0, batch.columns().len()));
    }

    #[test]
    fn c049_repeated_rows_are_independent_of_the_rows_they_came_from() {
        let mut batch = every_kind(2);
        let repeated = batch.repeat_interleave(2).unwrap();
        batch.insert("x", Tensor::from_vec([2], vec![7_i64, 7]).unwrap()).unwrap();
        assert_eq!(x(&repeated), [0, 0, 1, 1]);
    }

    #[test]
    fn repeats_that_no_memory_can_hold_are_refused() {
        for times in [usize::MAX, usize::MAX / 4, 1 << 61] {
            assert_eq!(every_kind(4).repeat_interleave(times).unwrap_err().code(), Code::ResourceExhausted);
        }
    }

    #[test]
    fn c057_reorder_puts_row_i_to_position_order_i() {
        let batch = Batch::empty().with("x", Tensor::from_vec([4], vec![10_i64, 20, 30, 40]).unwrap()).unwrap();
        assert_eq!(x(&batch.reorder(&[2, 0, 3, 1]).unwrap()), [20, 40, 10, 30]);
        for order in [vec![0, 1, 2], vec![0, 1, 2, 2], vec![0, 1, 2, 4]] {
            assert!(batch.reorder(&order).is_err(), "{order:?}");
        }
    }

    #[test]
    fn c065_select_picks_rows_in_order_and_more_than_once() {
        let batch = every_kind(6);
        let picked = batch.select(&[5, 0, 0]).unwrap();
        assert_eq!(x(&picked), [5, 0, 0]);
        let tokens = picked.column("tokens").unwrap().ragged().unwrap();
        assert_eq!(tokens.row(0).unwrap().view::<i64>().unwrap().as_ref(), [5]);
        assert!(batch.select(&[6]).unwrap_err().message().contains("row 6 from a batch of 6 rows"));
    }

    #[test]
    fn a_filter_keeps_the_rows_that_are_true() {
        let batch = every_kind(3);
        assert_eq!(x(&batch.filter(&[true, false, true]).unwrap()), [0, 2]);
        assert!(batch.filter(&[true]).is_err());
    }

    proptest! {
        #[test]
        fn reorder_is_the_inverse_of_select(order in (0_usize..20).prop_flat_map(|rows| {
            Just((0..rows).collect::<Vec<_>>()).prop_shuffle()
        })) {
            let batch = every_kind(order.len());
            prop_assert_eq!(&batch.select(&order).unwrap().reorder(&order).unwrap(), &batch);
            prop_assert_eq!(&batch.reorder(&order).unwrap().select(&order).unwrap(), &batch);
        }
    }
}
