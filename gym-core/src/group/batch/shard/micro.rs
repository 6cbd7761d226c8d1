//! Micro-batches: the parts of a shard that run through the model one at a time.
//!
//! They are either equal parts, or were planned by [`Batch::shard_by_batch_size`] from the lengths of the rows. A plan is sent
//! with its shard, because every rank must run the same number of micro-batches.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::base::error::{Code, Error, Result};
use crate::group::batch::Batch;

/// One micro-batch of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MicroBatch {
    /// The range of rows, counted from the first row of the chunk.
    pub rows: Range<usize>,
    /// Tokens: of each row if the rows are padded, of all rows together if they are packed.
    pub length: usize,
}

/// The micro-batches of one global batch on this shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MicroBatchChunk {
    /// Number of rows of the chunk on this shard.
    pub rows: usize,
    /// The micro-batches, which cover the rows in order.
    pub micro_batches: Vec<MicroBatch>,
}

/// The form in which the rows of a micro-batch are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowShape {
    /// Each row is padded to the length of the micro-batch (dynamic batching).
    Padded,
    /// The rows are concatenated into one (sequence packing). The training backend concatenates them.
    Packed,
}

/// A shard's plan of micro-batches, one chunk for each global batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MicroBatches {
    /// The form in which the rows of a micro-batch are combined.
    pub row_shape: RowShape,
    /// The width of the input column (dynamic batching). Only dense columns of this width become narrower; without it, none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
    /// The chunks, in the order of the global batches.
    pub chunks: Vec<MicroBatchChunk>,
}

impl MicroBatches {
    /// Returns `true` if the chunks cover exactly this many rows, in order and without gaps. A plan from a peer may not.
    pub(in crate::group::batch) fn fits(&self, rows: usize) -> bool {
        let covers = |chunk: &MicroBatchChunk| {
            let end = chunk
                .micro_batches
                .iter()
                .try_fold(0, |at, micro| (micro.rows.start == at && micro.rows.end >= at).then_some(micro.rows.end));
            end == Some(chunk.rows)
        };
        self.chunks.iter().all(covers)
            && self.chunks.iter().try_fold(0_usize, |sum, chunk| sum.checked_add(chunk.rows)) == Some(rows)
    }

    /// Returns the number of micro-batches in all chunks.
    #[must_use]
    pub fn count(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.micro_batches.len()).sum()
    }

    /// Returns the length of the longest micro-batch; 0 if there are none.
    #[must_use]
    pub fn longest(&self) -> usize {
        let micro_batches = self.chunks.iter().flat_map(|chunk| &chunk.micro_batches);
        micro_batches.map(|micro| micro.length).max().unwrap_or(0)
    }
}

impl Batch {
    /// Returns the plan of micro-batches, if the batch is a shard that has one. Slices and selections have no plan.
    #[must_use]
    pub fn micro_batches(&self) -> Option<&MicroBatches> {
        self.micro_batches.as_deref()
    }

    /// Returns the `rank`-th of `chunks` equal parts, sharing the memory.
    ///
    /// # Errors
    /// `InvalidArgument` if the number of rows is not a multiple of `chunks`, or if `rank` is not less than `chunks`.
    pub fn chunk(&self, rank: usize, chunks: usize) -> Result<Self> {
        let rows = self.rows();
        if chunks == 0 || !rows.is_multiple_of(chunks) {
            return Err(Error::invalid(format!("batch size ({rows}) is not a multiple of chunks ({chunks})")));
        }
        if rank >= chunks {
            return Err(Error::invalid(format!("chunk {rank} of {chunks}")));
        }
        let size = rows / chunks;
        Ok(self.slice_rows(rank * size..(rank + 1) * size))
    }

    /// Returns the `index`-th global batch of this shard, sharing the memory.
    ///
    /// If the shard has a plan of micro-batches, its chunks are the global batches. The returned batch then keeps its part of the
    /// plan. Otherwise, each global batch has `size` rows.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such global batch.
    pub fn get_batch(&self, index: usize, size: usize) -> Result<Self> {
        let Some(plan) = self.micro_batches() else {
            let start = index.saturating_mul(size);
            return self.slice(start..start.saturating_add(size));
        };
        let Some(chunk) = plan.chunks.get(index) else {
            return Err(Error::invalid(format!("global batch {index} of {}", plan.chunks.len())));
        };
        let start = plan.chunks[..index].iter().map(|chunk| chunk.rows).sum::<usize>();
        let mut batch = self.slice(start..start + chunk.rows)?;
        let plan = MicroBatches { chunks: vec![chunk.clone()], ..*plan };
        batch.micro_batches = Some(Arc::new(plan));
        Ok(batch)
    }

    /// Iterates over micro-batches of `size` rows each, sharing the memory.
    ///
    /// # Errors
    /// `InvalidArgument` if the number of rows is not a multiple of `size`.
    pub fn iter_micro_batches(&self, size: usize) -> Result<impl ExactSizeIterator<Item = Self> + '_> {
        let rows = self.rows();
        if size == 0 || !rows.is_multiple_of(size) {
            return Err(Error::invalid(format!(
                "batch size ({rows}) is not a multiple of the micro-batch size ({size})"
            )));
        }
        Ok((0..rows / size).map(move |index| self.slice_rows(index * size..(index + 1) * size)))
    }

    /// Iterates over the micro-batches of the batch's plan. In padded micro-batches, the dense columns of the input's width are
    /// narrowed along dimension 1 to the length of the micro-batch, which copies them, as [`Self::truncate`] does: padding is
    /// removed on its side. A column that has the width of the input by chance needs another shape, such as `[rows, 1, width]`.
    /// Packed micro-batches share the memory; their rows keep their padding, on its side.
    ///
    /// # Errors
    /// `FailedPrecondition` if the batch has no plan, or a plan of several global batches; select one with [`Self::get_batch`]
    /// first. An item is an error if [`Self::truncate`] would refuse it.
    pub fn iter_planned_micro_batches(&self) -> Result<impl ExactSizeIterator<Item = Result<Self>> + '_> {
        let refuse = |what: String| Error::not_started(Code::FailedPrecondition, what);
        let plan = self.micro_batches().ok_or_else(|| {
            refuse("the batch carries no plan of micro-batches; shard it by lengths, or ask for equal ones".into())
        })?;
        let [chunk] = plan.chunks.as_slice() else {
            return Err(refuse(format!("the plan has {} global batches; take one with get_batch", plan.chunks.len())));
        };
        Ok(chunk.micro_batches.iter().map(move |micro| {
            let rows = self.slice(micro.rows.clone())?;
            match plan.row_shape {
                RowShape::Padded => {
                    plan.width.map_or_else(|| Ok(rows.clone()), |width| rows.narrow_width(width, micro.length))
                }
                RowShape::Packed => Ok(rows),
            }
        }))
    }
}
