//! Section 5.2: micro-batches with a token budget.

use std::num::NonZeroUsize;

use gym_core::Code;
use gym_core::group::{Batch, DynamicBatching, Sharding};

use crate::{plan, refusal, sequences, shard, x, xs};

fn batching(round: usize, most: usize) -> DynamicBatching {
    DynamicBatching {
        max_tokens_per_microbatch: most,
        sequence_length_round: NonZeroUsize::new(round).unwrap(),
        input_key: "input_ids".into(),
        input_lengths_key: "input_lengths".into(),
    }
}

const EIGHT: [i32; 8] = [2, 8, 4, 16, 28, 32, 2, 32];

fn by_eight() -> (Batch, Sharding) {
    (sequences(&EIGHT, 128), Sharding::into_shards(2).dynamic(batching(4, 32)))
}

#[test]
fn c022_rows_are_dealt_by_length_and_every_shard_has_the_same_micro_batches() {
    let (batch, sharding) = by_eight();
    let sharded = shard(&batch, &sharding).unwrap();
    assert_eq!(xs(&sharded.shards), [[0, 2, 3, 5], [6, 1, 4, 7]]);
    for part in &sharded.shards {
        assert_eq!(plan(part), [[(0, 2, 8), (2, 3, 28), (3, 4, 32)]]);
    }
    assert_eq!(sharded.order, [0, 2, 3, 5, 6, 1, 4, 7]);
}

#[test]
fn c023_micro_batches_are_narrowed_to_their_length() {
    let (batch, sharding) = by_eight();
    let shards = shard(&batch, &sharding).unwrap().shards;
    let shapes: Vec<Vec<usize>> = shards[0]
        .iter_planned_micro_batches()
        .unwrap()
        .map(|micro| micro.unwrap().column("input_ids").unwrap().dense().unwrap().shape().to_vec())
        .collect();
    assert_eq!(shapes, [[2, 8], [1, 28], [1, 32]]);
    let micro_batches = shards[0].micro_batches().unwrap();
    assert_eq!((micro_batches.count(), micro_batches.longest()), (3, 32));
}

#[test]
fn c024_shards_put_together_and_reordered_are_the_batch() {
    let (batch, sharding) = by_eight();
    let sharded = batch.shard_by_batch_size(&sharding).unwrap();
    let whole = Batch::concat(&sharded.shards).unwrap();
    assert_ne!(x(&whole), x(&batch));
    assert_eq!(whole.reorder(&sharded.order).unwrap(), batch);
}

#[test]
fn c025_every_global_batch_is_planned_for_itself() {
    let sharding = Sharding::into_shards(2).batch_size(4).dynamic(batching(8, 64));
    let sharded = shard(&sequences(&EIGHT, 128), &sharding).unwrap();
    assert_eq!(xs(&sharded.shards), [[0, 1, 6, 5], [2, 3, 4, 7]]);
    for part in &sharded.shards {
        assert_eq!(plan(part), [[(0, 2, 16)], [(0, 2, 32)]]);
    }
    // The original's order goes chunk by chunk here, which only restores rows that are interleaved in the same way.
    // Ours restores the concatenated shards, with one or more global batches.
    assert_eq!(sharded.order, [0, 1, 6, 5, 2, 3, 4, 7]);
}

#[test]
fn c026_a_global_batch_of_a_shard_carries_its_part_of_the_plan() {
    let sharding = Sharding::into_shards(2).batch_size(4).dynamic(batching(8, 64));
    let shards = shard(&sequences(&EIGHT, 128), &sharding).unwrap().shards;
    let second: Vec<Batch> = shards.iter().map(|part| part.get_batch(1, 2).unwrap()).collect();
    assert_eq!(xs(&second), [[6, 5], [4, 7]]);
    assert!(second.iter().all(|part| plan(part) == [[(0, 2, 32)]]));
    assert!(shards[0].get_batch(2, 2).is_err());
    assert_eq!(shards[0].iter_planned_micro_batches().err().unwrap().code(), Code::FailedPrecondition);
}

#[test]
fn c027_a_budget_of_six_tokens_takes_two_rows_of_two() {
    let sharding = Sharding::into_shards(2).dynamic(batching(2, 6));
    let sharded = shard(&sequences(&[2, 3, 2, 4], 4), &sharding).unwrap();
    // Sorted by length: 0, 2, 1, 3; dealt in turn.
    assert_eq!(xs(&sharded.shards), [[0, 1], [2, 3]]);
    assert!(sharded.shards.iter().all(|part| plan(part) == [[(0, 1, 2), (1, 2, 4)]]));
}

#[test]
fn c028_a_row_longer_than_a_micro_batch_is_refused() {
    let text = refusal(shard(&sequences(&[2, 3, 2, 4], 4), &Sharding::into_shards(2).dynamic(batching(2, 3))));
    assert!(text.contains("padded (2) sequence length of 4") && text.contains('3'), "{text}");
}

#[test]
fn c029_lengths_are_rounded_up_only_to_the_width_of_the_input() {
    let shards = shard(&sequences(&[9, 10], 10), &Sharding::into_shards(1).dynamic(batching(16, 20))).unwrap().shards;
    assert_eq!(plan(&shards[0]), [[(0, 2, 10)]]);
}

#[test]
fn uneven_shards_and_columns_that_are_no_lengths_are_refused() {
    let batch = sequences(&EIGHT, 128);
    let uneven = Sharding::into_shards(2).allow_uneven().dynamic(batching(4, 32));
    assert!(refusal(shard(&batch, &uneven)).contains("jointly"));
    let by = |key: &str| {
        let batching = DynamicBatching { input_lengths_key: key.into(), ..batching(4, 32) };
        Sharding::into_shards(2).dynamic(batching)
    };
    assert_eq!(shard(&batch, &by("lengths")).unwrap_err().code(), Code::NotFound);
    assert!(refusal(shard(&batch, &by("input_ids"))).contains("lengths of rows"));
    assert!(refusal(shard(&sequences(&[1, -1], 8), &by("input_lengths"))).contains("-1"));
}

#[test]
fn a_plan_travels_with_its_shard_and_one_that_covers_other_rows_is_refused() {
    let (batch, sharding) = by_eight();
    let part = shard(&batch, &sharding).unwrap().shards.remove(0);
    let (schema, segments) = part.encode();
    let back = Batch::decode(schema.clone(), segments.clone()).unwrap();
    assert_eq!(back, part);
    for edit in [0, 1, 2] {
        let mut lie = schema.clone();
        let chunk = &mut lie.micro_batches.as_mut().unwrap().chunks[0];
        match edit {
            0 => chunk.rows = 3,
            1 => chunk.micro_batches[0].rows = 0..1,
            _ => chunk.micro_batches[2].rows = 3..usize::MAX,
        }
        assert_eq!(Batch::decode(lie, segments.clone()).unwrap_err().code(), Code::DataLoss);
    }
}
