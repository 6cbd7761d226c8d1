//! The conformance cases of batches, by their ids in tests/tables/conformance.md. They use the public interface only.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

mod dynamic;
mod ops;
mod packed;
mod packing;
mod shard;
mod sides;

use gym_core::Result;
use gym_core::group::{Batch, JsonRows, Ragged, Sharded, Sharding, Tensor};

/// Creates a batch with one column `x` of these numbers.
fn numbers(x: &[i64]) -> Batch {
    Batch::empty().with("x", Tensor::from_vec([x.len()], x.to_vec()).unwrap()).unwrap()
}

/// Creates a batch with one column `x` that contains the index of each row.
fn positions(rows: usize) -> Batch {
    numbers(&(0..rows as i64).collect::<Vec<_>>())
}

/// Returns the column `x`.
fn x(batch: &Batch) -> Vec<i64> {
    batch.column("x").unwrap().dense().unwrap().to_i64s().unwrap()
}

/// Returns the column `x` of each batch.
fn xs(batches: &[Batch]) -> Vec<Vec<i64>> {
    batches.iter().map(x).collect()
}

/// The same numbers in a dense, a ragged and a JSON column.
fn every_kind(x: &[i64]) -> Batch {
    let ragged: Vec<Vec<i64>> = x.iter().map(|x| vec![*x; (*x % 3) as usize]).collect();
    let mut batch = numbers(x);
    batch.insert("ragged", Ragged::from_rows(&ragged)).unwrap();
    batch.insert("json", JsonRows::from_values(x).unwrap()).unwrap();
    batch
}

/// Ids, `input_ids` of that width, and their lengths.
fn sequences(lengths: &[i32], width: usize) -> Batch {
    let rows = lengths.len();
    positions(rows)
        .with("input_ids", Tensor::from_vec([rows, width], vec![0_i64; rows * width]).unwrap())
        .unwrap()
        .with("input_lengths", Tensor::from_vec([rows], lengths.to_vec()).unwrap())
        .unwrap()
}

/// Returns the plan of each shard: `(first row, end, length)` of each micro-batch of each chunk.
fn plan(batch: &Batch) -> Vec<Vec<(usize, usize, usize)>> {
    let chunks = &batch.micro_batches().unwrap().chunks;
    let micro = |chunk: &gym_core::group::MicroBatchChunk| {
        chunk.micro_batches.iter().map(|micro| (micro.rows.start, micro.rows.end, micro.length)).collect()
    };
    chunks.iter().map(micro).collect()
}

fn refusal<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.unwrap_err().to_string()
}

/// Shards a batch, and checks that the shards can be restored to the original order.
fn shard(batch: &Batch, sharding: &Sharding) -> Result<Sharded> {
    let sharded = batch.shard_by_batch_size(sharding)?;
    let whole = Batch::concat(&sharded.shards)?.reorder(&sharded.order)?;
    assert!(whole.columns().eq(batch.columns()), "shards put together and reordered are the batch");
    Ok(sharded)
}
