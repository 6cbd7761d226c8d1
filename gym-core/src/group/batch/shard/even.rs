//! Splitting of a batch into contiguous shards with the same number of rows, without a copy.

use crate::base::error::{Error, Result};
use crate::group::batch::Batch;

/// The treatment of rows that cannot be split evenly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Uneven {
    /// Reject them, and also a batch without rows, because a rank that waits for work would get none.
    #[default]
    Refuse,
    /// `⌈rows / shards⌉` rows for each shard, then the rest. The last shards may have no rows, but keep every column.
    Allow,
}

impl Batch {
    /// Splits the batch into `count` contiguous shards, in order, which share its memory. `concat` of the shards is the batch.
    ///
    /// # Errors
    /// `InvalidArgument` if `count` is 0, or if [`Uneven::Refuse`] rejects the rows.
    pub fn shard(&self, count: usize, uneven: Uneven) -> Result<Vec<Self>> {
        let rows = self.rows();
        if count == 0 {
            return Err(Error::invalid("a batch cannot be cut into 0 shards"));
        }
        if uneven == Uneven::Refuse && rows == 0 {
            return Err(Error::invalid(format!(
                "a batch of 0 rows gives no rows to {count} shards; allow uneven shards"
            )));
        }
        if uneven == Uneven::Refuse && !rows.is_multiple_of(count) {
            return Err(Error::invalid(format!(
                "batch size ({rows}) is not a multiple of shards ({count}); pad it or allow uneven shards"
            )));
        }
        let size = rows.div_ceil(count);
        let shard = |index: usize| {
            let start = size.saturating_mul(index).min(rows);
            self.slice_rows(start..start.saturating_add(size).min(rows))
        };
        Ok((0..count).map(shard).collect())
    }
}
