//! Batches: named columns with the same number of rows, which a call carries next to its arguments and shards over ranks.
//!
//! ```text
//!   Batch ── column ──► Tensor (dense) · Ragged, Packed (rows of different length) · JsonRows
//!     │ shard(n)                         share the memory of the batch
//!     ▼
//!   n batches ── encode ──► message head + segments ── decode ──► Batch
//! ```
//!
//! ```
//! use gym_core::group::{Batch, Ragged, Tensor, Uneven};
//! # fn main() -> gym_core::Result<()> {
//! let batch = Batch::empty()
//!     .with("reward", Tensor::from_vec([4], vec![1.0_f32, 0.0, 0.0, 1.0])?)?
//!     .with("tokens", Ragged::from_rows(&[vec![1_i64, 2], vec![3], vec![4, 5, 6], vec![]]))?;
//! let shards = batch.shard(2, Uneven::Refuse)?;
//! assert_eq!(shards[1].column("reward")?.dense()?.view::<f32>()?.as_ref(), [0.0, 1.0]);
//! assert_eq!(Batch::concat(&shards)?, batch);
//! # Ok(()) }
//! ```
//!
//! `slice` and `shard` share the memory of the batch; `select`, `concat` and `repeat_interleave` copy once.
//!
//! | module | purpose |
//! |---|---|
//! | [`tensor`] | dense blocks of numbers |
//! | [`json`] | JSON text of arguments, replies and rows |
//! | [`packing`] | sequences that share a bin of fixed capacity |
//! | [`safetensors`] | batches and tensors in files |

mod codec;
mod column;
pub mod json;
mod metadata;
pub mod packing;
mod rows;
pub mod safetensors;
mod shard;
pub mod tensor;

use std::ops::Range;
use std::sync::Arc;

use serde_json::{Map, Value};

pub use codec::Payload;
pub use codec::{BatchSchema, ColumnSchema, SegmentSchema};
pub use column::Offsets;
pub use column::{Column, JsonRows, Ragged};
pub use column::{Packed, Segment, SegmentId};
pub use rows::Assembly;
pub use rows::Padding;
pub use shard::Uneven;
pub use shard::{DynamicBatching, MicrobatchOrder, SequencePacking, Sharded, Sharding};
pub use shard::{MicroBatch, MicroBatchChunk, MicroBatches, RowShape};
pub use tensor::{Device, Side};

use crate::base::error::{Code, Error, Result};
use crate::group::batch::metadata::BatchMetadata;
use crate::group::batch::tensor::check_range;

/// Maximum rows of a column whose rows have no bytes: a peer can announce any number of them without sending data.
const ROWS_WITHOUT_BYTES_MAX: usize = 1 << 20;

/// Named columns with the same number of rows, in order. Cheap to clone. Every constructor and every change checks the number of
/// rows.
///
/// ```
/// use gym_core::group::{Batch, Tensor};
///
/// let batch = Batch::empty().with("reward", Tensor::from_vec([2], vec![1.0_f32, 0.0])?)?;
/// assert_eq!((batch.rows(), batch.slice(0..1)?.rows()), (2, 1));
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    columns: Vec<(Arc<str>, Column)>,
    metadata: BatchMetadata,
    micro_batches: Option<Arc<MicroBatches>>,
}

impl Batch {
    /// Creates a batch without columns and rows.
    #[must_use]
    pub fn empty() -> Self {
        Self::default()
    }

    /// Creates a batch of these columns.
    ///
    /// # Errors
    /// The errors of [`Self::insert`], and `AlreadyExists` if a name is repeated.
    pub fn new<N: Into<Arc<str>>>(columns: impl IntoIterator<Item = (N, Column)>) -> Result<Self> {
        let mut batch = Self::empty();
        for (name, column) in columns {
            let name = name.into();
            if batch.get(&name).is_some() {
                return Err(Error::not_started(Code::AlreadyExists, format!("column {name:?} comes twice")));
            }
            batch.insert(name, column)?;
        }
        Ok(batch)
    }

    /// Returns the batch with one more column, or with the column of that name replaced.
    ///
    /// # Errors
    /// The errors of [`Self::insert`].
    pub fn with(mut self, name: impl Into<Arc<str>>, column: impl Into<Column>) -> Result<Self> {
        self.insert(name, column)?;
        Ok(self)
    }

    /// Adds a column at the end, or replaces the column of that name at its position. Returns the replaced column.
    ///
    /// # Errors
    /// `InvalidArgument` if the column is a scalar, has another number of rows than the other columns, or has more than 2²⁰ rows
    /// of no bytes.
    pub fn insert(&mut self, name: impl Into<Arc<str>>, column: impl Into<Column>) -> Result<Option<Column>> {
        let (name, column) = (name.into(), column.into());
        if matches!(&column, Column::Dense(tensor) if tensor.shape().is_empty()) {
            return Err(Error::invalid(format!("column {name:?} is a scalar; dimension 0 must count the rows")));
        }
        if matches!(&column, Column::Dense(tensor) if tensor.row_bytes() == 0) && column.rows() > ROWS_WITHOUT_BYTES_MAX
        {
            let rows = column.rows();
            return Err(Error::invalid(format!(
                "column {name:?} has {rows} rows of no bytes; at most {ROWS_WITHOUT_BYTES_MAX} are taken"
            )));
        }
        let position = self.position(&name);
        let others = self.columns.iter().enumerate().find(|(index, _)| Some(*index) != position);
        if let Some((_, (other, rows))) = others.map(|(index, (other, column))| (index, (other, column.rows())))
            && rows != column.rows()
        {
            let found = column.rows();
            return Err(Error::invalid(format!(
                "batch sizes are not the same: column {name:?} has {found} rows, column {other:?} has {rows}"
            )));
        }
        Ok(match position {
            Some(position) => Some(std::mem::replace(&mut self.columns[position].1, column)),
            None => {
                self.columns.push((name, column));
                None
            }
        })
    }

    /// Removes a column; the order of the others stays.
    pub fn remove(&mut self, name: &str) -> Option<Column> {
        self.position(name).map(|position| self.columns.remove(position).1)
    }

    /// Returns the number of rows; 0 without columns.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.columns.first().map_or(0, |(_, column)| column.rows())
    }

    /// Returns `true` if there are no columns. A batch may have columns without rows, such as the last shard of an uneven split.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.columns.is_empty()
    }

    /// Returns the column of that name.
    ///
    /// # Errors
    /// `NotFound`, with the known names.
    pub fn column(&self, name: &str) -> Result<&Column> {
        self.get(name).ok_or_else(|| {
            let names: Vec<_> = self.names().collect();
            Error::not_started(Code::NotFound, format!("no column {name:?}; there are {names:?}"))
        })
    }

    /// Returns the column of that name, if the batch has one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Column> {
        self.columns().find(|(known, _)| *known == name).map(|(_, column)| column)
    }

    /// Returns the names, in order.
    #[must_use]
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.columns.iter().map(|(name, _)| name.as_ref())
    }

    /// Returns names and columns, in order.
    #[must_use]
    pub fn columns(&self) -> impl ExactSizeIterator<Item = (&str, &Column)> {
        self.columns.iter().map(|(name, column)| (name.as_ref(), column))
    }

    /// Returns the metadata of the batch. Slices and shards keep all entries; `concat` keeps the entries that are equal in all
    /// parts.
    #[must_use]
    pub fn metadata(&self) -> &Map<String, Value> {
        &self.metadata
    }

    /// Returns the metadata of the batch, to change it. A [`Value`] holds no number that is not finite: `json!(f64::NAN)` is null.
    pub fn metadata_mut(&mut self) -> &mut Map<String, Value> {
        self.metadata.to_mut()
    }

    /// Returns adjacent rows, sharing the memory.
    ///
    /// # Errors
    /// `InvalidArgument`, with the first column, if the range is reversed or ends beyond the rows.
    pub fn slice(&self, rows: Range<usize>) -> Result<Self> {
        check_range(&rows, self.rows()).map_err(|error| {
            let first = self.names().next().unwrap_or("no column at all");
            error.about(format!("slice of a batch of {first:?}"))
        })?;
        Ok(self.slice_rows(rows))
    }

    /// Like [`Self::slice`], for a range that the caller has checked.
    fn slice_rows(&self, rows: Range<usize>) -> Self {
        self.map_columns(|column| column.slice_rows(rows.clone()))
    }

    /// Applies `of` to every column, and keeps names and metadata.
    fn map_columns(&self, mut of: impl FnMut(&Column) -> Column) -> Self {
        let columns = self.columns.iter().map(|(name, column)| (Arc::clone(name), of(column))).collect();
        Self { columns, metadata: self.metadata.clone(), micro_batches: None }
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|(known, _)| known.as_ref() == name)
    }
}

#[cfg(test)]
mod tests;
