//! A batch cut into contiguous pieces of equal rows, without a copy.

use crate::base::error::{Error, Result};
use crate::group::batch::Batch;

/// What to do with rows that do not divide into equal shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Uneven {
    /// Refuse them; a batch without rows too, because a rank that waits for work would get none.
    #[default]
    Refuse,
    /// `⌈rows / shards⌉` rows a shard, then what is left; the last shards may have no rows. They keep every column.
    Allow,
}

impl Batch {
    /// `count` contiguous shards that share this batch's memory, in order: `concat` of them is the batch.
    ///
    /// # Errors
    /// `InvalidArgument` when `count` is 0, or when [`Uneven::Refuse`] has reason to.
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
