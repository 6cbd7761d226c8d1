//! Sharding of global batches by the lengths of their rows, so that every rank has the same work in the same number of
//! micro-batches. The semantics, ties included, are those of NeMo RL's `shard_by_batch_size`.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::base::error::{Error, Result};
use crate::group::batch::packing::{Packing, PackingAlgorithm};
use crate::group::batch::{Batch, Column, MicroBatch, MicroBatchChunk, MicroBatches, RowShape, Uneven};

/// Options of [`Batch::shard_by_batch_size`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    shards: usize,
    batch_size: Option<usize>,
    uneven: Uneven,
    balance: Balance,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Balance {
    Rows,
    Dynamic(DynamicBatching),
    Packed(SequencePacking),
}

impl Sharding {
    /// Splits one global batch into this many shards with the same number of rows.
    #[must_use]
    pub fn into_shards(shards: usize) -> Self {
        Self { shards, batch_size: None, uneven: Uneven::Refuse, balance: Balance::Rows }
    }

    /// Splits the batch into global batches of this many rows. In every shard, the rows of the first global batch precede those
    /// of the second.
    #[must_use]
    pub fn batch_size(self, rows: usize) -> Self {
        Self { batch_size: Some(rows), ..self }
    }

    /// Lets the last shards have fewer rows, or none. Only for one global batch. The default is to reject uneven shards.
    #[must_use]
    pub fn allow_uneven(self) -> Self {
        Self { uneven: Uneven::Allow, ..self }
    }

    /// Groups rows of similar lengths into micro-batches, each with as many rows as its token limit allows.
    #[must_use]
    pub fn dynamic(self, batching: DynamicBatching) -> Self {
        Self { balance: Balance::Dynamic(batching), ..self }
    }

    /// Packs rows into micro-batches of fixed capacity.
    #[must_use]
    pub fn packed(self, packing: SequencePacking) -> Self {
        Self { balance: Balance::Packed(packing), ..self }
    }
}

/// Dynamic batching: micro-batches of rows padded to one length, with a limit on the tokens. All fields are required.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicBatching {
    /// Maximum tokens in a micro-batch, padding included.
    pub max_tokens_per_microbatch: usize,
    /// The length of a micro-batch is a multiple of this number, or the width of the input if that is smaller.
    pub sequence_length_round: NonZeroUsize,
    /// The column whose dimension 1 is the width: no row is longer, and only dense columns of this width become narrower. A ragged
    /// column has no width, so no column becomes narrower.
    pub input_key: String,
    /// The column with the length of each row: integers of shape `[rows]`, or a ragged column.
    pub input_lengths_key: String,
}

/// Sequence packing: micro-batches of concatenated rows, with a token capacity. All fields except `microbatch_order` are required.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SequencePacking {
    /// Maximum tokens in a micro-batch, padding included.
    pub max_tokens_per_microbatch: usize,
    /// The column with the length of each row: integers of shape `[rows]`, or a ragged column.
    pub input_lengths_key: String,
    /// The algorithm that assigns rows to micro-batches.
    pub algorithm: PackingAlgorithm,
    /// The length of each row is rounded up to a multiple of this number.
    pub sequence_length_pad_multiple: NonZeroUsize,
    /// The order of a shard's micro-batches. The default is [`MicrobatchOrder::Packer`].
    #[serde(default)]
    pub microbatch_order: MicrobatchOrder,
}

/// The order of the packed micro-batches of a global batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MicrobatchOrder {
    /// The order in which the packing algorithm returns them.
    #[default]
    Packer,
    /// Most tokens first, so that memory runs out early if it is too small.
    LargestFirst,
}

/// The result of [`Batch::shard_by_batch_size`].
#[derive(Clone, Debug, PartialEq)]
pub struct Sharded {
    /// One batch for each shard.
    pub shards: Vec<Batch>,
    /// The original position of each row of the concatenated shards: `Batch::concat(&shards)?.reorder(&order)?` is the original
    /// batch.
    pub order: Vec<usize>,
}

/// The rows of one global batch on one shard, by position in the whole batch, and the micro-batches of the shard.
type Piece = (Vec<usize>, Vec<MicroBatch>);

impl Batch {
    /// Splits the batch into global batches, and each of them into shards. In every shard, rows have the order of their global
    /// batches. A shard that is one contiguous range shares the memory; otherwise, each row is copied once.
    ///
    /// # Errors
    /// `InvalidArgument` in these cases:
    /// - the numbers of rows are not divisible as requested;
    /// - uneven shards are combined with a batch size or dynamic batching;
    /// - a row is longer than a micro-batch may be, or than the input is wide; packing knows the input of `{input}_lengths`;
    /// - packing needs more rows;
    /// - the length column does not contain lengths.
    pub fn shard_by_batch_size(&self, sharding: &Sharding) -> Result<Sharded> {
        let Sharding { shards, uneven, .. } = *sharding;
        let batch_size = self.global_batch_size(sharding)?;
        let chunks =
            (0..self.rows().checked_div(batch_size).unwrap_or(1)).map(|at| at * batch_size..(at + 1) * batch_size);
        match &sharding.balance {
            Balance::Rows if batch_size == self.rows() => {
                Ok(Sharded { shards: self.shard(shards, uneven)?, order: (0..self.rows()).collect() })
            }
            Balance::Rows => {
                let size = batch_size / shards;
                let piece = |shard: usize| {
                    move |chunk: Range<usize>| chunk.start + shard * size..chunk.start + (shard + 1) * size
                };
                let order = (0..shards).flat_map(|shard| chunks.clone().flat_map(piece(shard))).collect();
                let shard = |shard| {
                    Self::concat(
                        &chunks.clone().map(piece(shard)).map(|rows| self.slice_rows(rows)).collect::<Vec<_>>(),
                    )
                };
                Ok(Sharded { shards: (0..shards).map(shard).collect::<Result<_>>()?, order })
            }
            Balance::Dynamic(batching) => {
                let lengths = self.column(&batching.input_lengths_key)?.lengths()?;
                let width = self.column(&batching.input_key)?.width();
                check_lengths(&lengths, &batching.input_lengths_key, width)?;
                let pieces = chunks.map(|chunk| batching.plan(chunk, &lengths, width, shards));
                self.planned(RowShape::Padded, width, shards, pieces.collect::<Result<_>>()?)
            }
            Balance::Packed(packing) => {
                let lengths = self.column(&packing.input_lengths_key)?.lengths()?;
                let input = packing.input_lengths_key.strip_suffix("_lengths").and_then(|input| self.get(input));
                check_lengths(&lengths, &packing.input_lengths_key, input.and_then(Column::width))?;
                let pieces = chunks.map(|chunk| packing.plan(chunk, &lengths, shards));
                self.planned(RowShape::Packed, None, shards, pieces.collect::<Result<_>>()?)
            }
        }
    }

    /// Returns the number of rows of a global batch, after checking the counts.
    fn global_batch_size(&self, sharding: &Sharding) -> Result<usize> {
        let (rows, shards, uneven) = (self.rows(), sharding.shards, sharding.uneven == Uneven::Allow);
        if uneven && sharding.batch_size.is_some() {
            return Err(Error::invalid("uneven shards are for one global batch; leave the batch size out"));
        }
        if uneven && matches!(sharding.balance, Balance::Dynamic(_)) {
            return Err(Error::invalid("dynamic batching plans all shards jointly and needs equal ones"));
        }
        let batch_size = sharding.batch_size.unwrap_or(rows);
        if shards == 0 || (rows == 0 && !uneven) {
            return Err(Error::invalid(format!("a batch of {rows} rows cannot be cut into {shards} shards")));
        }
        if batch_size != rows && (batch_size == 0 || !rows.is_multiple_of(batch_size)) {
            return Err(Error::invalid(format!(
                "total batch size ({rows}) is not a multiple of batch_size ({batch_size})"
            )));
        }
        if !uneven && !batch_size.is_multiple_of(shards) {
            return Err(Error::invalid(format!("batch size ({batch_size}) is not a multiple of shards ({shards})")));
        }
        Ok(batch_size)
    }

    /// Builds the shards of a plan, which lists the piece of each shard for each chunk.
    fn planned(
        &self,
        row_shape: RowShape,
        width: Option<usize>,
        shards: usize,
        chunks: Vec<Vec<Piece>>,
    ) -> Result<Sharded> {
        let mut order = Vec::with_capacity(self.rows());
        let mut made = Vec::with_capacity(shards);
        let mut chunks: Vec<VecDeque<Piece>> = chunks.into_iter().map(VecDeque::from).collect();
        for _ in 0..shards {
            let (begin, mut plan) = (order.len(), Vec::with_capacity(chunks.len()));
            for (rows, micro_batches) in chunks.iter_mut().filter_map(VecDeque::pop_front) {
                plan.push(MicroBatchChunk { rows: rows.len(), micro_batches });
                order.extend(rows);
            }
            let mut shard = self.select(&order[begin..])?;
            shard.micro_batches = Some(Arc::new(MicroBatches { row_shape, width, chunks: plan }));
            made.push(shard);
        }
        Ok(Sharded { shards: made, order })
    }
}

/// Rejects rows that are longer than the input is wide.
fn check_lengths(lengths: &[usize], key: &str, width: Option<usize>) -> Result<()> {
    match lengths.iter().zip(0..).find(|(length, _)| width.is_some_and(|width| **length > width)) {
        Some((length, row)) => {
            let width = width.unwrap_or_default();
            Err(Error::invalid(format!("row {row} has {length} elements by column {key:?}, the input is {width} wide")))
        }
        None => Ok(()),
    }
}

impl DynamicBatching {
    /// Plans the pieces of one global batch, one for each shard. Assigns rows to the shards round robin, in order of length, so
    /// that the `j`-th rows of all shards have similar lengths. The micro-batches are planned for all shards together.
    fn plan(&self, chunk: Range<usize>, lengths: &[usize], width: Option<usize>, shards: usize) -> Result<Vec<Piece>> {
        let mut sorted: Vec<usize> = chunk.collect();
        sorted.sort_by_key(|row| lengths[*row]);
        let mut micro_batches: Vec<MicroBatch> = Vec::new();
        for (at, alike) in sorted.chunks(shards).enumerate() {
            let length = self.padded(alike.iter().map(|row| lengths[*row]).max().unwrap_or(0), width)?;
            match micro_batches.last_mut() {
                Some(last) if self.takes(last, length) => {
                    last.rows.end = at + 1;
                    last.length = last.length.max(length);
                }
                _ => micro_batches.push(MicroBatch { rows: at..at + 1, length }),
            }
        }
        let of_shard = |shard| sorted.iter().skip(shard).step_by(shards).copied().collect();
        Ok((0..shards).map(|shard| (of_shard(shard), micro_batches.clone())).collect())
    }

    fn padded(&self, length: usize, width: Option<usize>) -> Result<usize> {
        let (round, most) = (self.sequence_length_round.get(), self.max_tokens_per_microbatch);
        let padded = length.div_ceil(round).saturating_mul(round).min(width.unwrap_or(usize::MAX));
        if padded > most {
            return Err(Error::invalid(format!(
                "got an input of padded ({round}) sequence length of {padded}, max_tokens_per_microbatch is {most}"
            )));
        }
        Ok(padded)
    }

    fn takes(&self, micro: &MicroBatch, length: usize) -> bool {
        let tokens = (micro.rows.len() + 1).checked_mul(micro.length.max(length));
        tokens.is_some_and(|tokens| tokens <= self.max_tokens_per_microbatch)
    }
}

impl SequencePacking {
    /// Plans the pieces of one global batch, one for each shard. Every shard gets the same number of bins, assigned round robin.
    fn plan(&self, chunk: Range<usize>, lengths: &[usize], shards: usize) -> Result<Vec<Piece>> {
        let multiple = self.sequence_length_pad_multiple.get();
        let padded: Vec<usize> =
            lengths[chunk.clone()].iter().map(|length| length.div_ceil(multiple).saturating_mul(multiple)).collect();
        let mut packing = Packing::new(self.algorithm, self.max_tokens_per_microbatch);
        packing.min_bin_count = shards;
        packing.bin_count_multiple = NonZeroUsize::new(shards).unwrap_or(NonZeroUsize::MIN);
        let tokens = |bin: &[usize]| bin.iter().map(|row| padded[*row]).sum::<usize>();
        let bins: Vec<(Vec<usize>, usize)> =
            packing.pack(&padded)?.into_iter().map(|bin| (tokens(&bin), bin)).map(|(sum, bin)| (bin, sum)).collect();
        let piece = |shard: usize| {
            let mut own: Vec<_> = bins.iter().skip(shard).step_by(shards).collect();
            if self.microbatch_order == MicrobatchOrder::LargestFirst {
                own.sort_by_key(|(_, length)| std::cmp::Reverse(*length));
            }
            let (mut rows, mut micro_batches) = (Vec::new(), Vec::with_capacity(own.len()));
            for (bin, length) in own {
                let begin = rows.len();
                rows.extend(bin.iter().map(|row| chunk.start + row));
                micro_batches.push(MicroBatch { rows: begin..rows.len(), length: *length });
            }
            (rows, micro_batches)
        };
        Ok((0..shards).map(piece).collect())
    }
}

impl Column {
    /// Returns the lengths that the column contains: integers of shape `[rows]`, or the row lengths of a ragged column.
    ///
    /// # Errors
    /// `InvalidArgument` if the column does not contain lengths, or if one is negative.
    pub fn lengths(&self) -> Result<Vec<usize>> {
        match self {
            Self::Ragged(ragged) => Ok(ragged.offsets().lengths().collect()),
            Self::Dense(tensor) if tensor.shape().len() == 1 => tensor
                .to_i64s()?
                .into_iter()
                .map(|length| {
                    usize::try_from(length).map_err(|_| Error::invalid(format!("{length} is no length of a row")))
                })
                .collect(),
            other => {
                Err(Error::invalid(format!("{other:?} does not tell the lengths of rows; one integer a row does")))
            }
        }
    }

    /// Returns the size of dimension 1 of a dense column, if there is one.
    fn width(&self) -> Option<usize> {
        match self {
            Self::Dense(tensor) => tensor.shape().get(1).copied(),
            _ => None,
        }
    }
}
