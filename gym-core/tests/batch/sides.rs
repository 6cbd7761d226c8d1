//! Batches know the side of their padding: no real token is cut, and no row moves.

use std::num::NonZeroUsize;

use gym_core::group::batch::packing::PackingAlgorithm;
use gym_core::group::batch::safetensors::SafeTensors;
use gym_core::group::{
    Assembly, Batch, Column, DynamicBatching, Padding, Ragged, SequencePacking, Sharding, Side, Tensor, Uneven,
};
use gym_core::{Code, Result};
use proptest::prelude::*;

use crate::refusal;

const ROWS: [&[i64]; 4] = [&[11, 12, 13, 14, 15, 16], &[21, 22], &[31, 32, 33, 34, 35], &[41]];

fn rows(side: Side) -> Batch {
    Batch::from_rows("ids", &ROWS, Padding::new(0, side)).unwrap()
}

fn dense(width: usize, ids: &[i64]) -> Tensor {
    Tensor::from_vec([ids.len() / width, width], ids.to_vec()).unwrap()
}

fn bools(width: usize, mask: &[i64]) -> Tensor {
    Tensor::from_vec([mask.len() / width, width], mask.iter().map(|real| *real > 0).collect()).unwrap()
}

fn elements(batch: &Batch, name: &str) -> Vec<i64> {
    batch.column(name).unwrap().dense().unwrap().to_i64s().unwrap()
}

fn side(batch: &Batch, name: &str) -> Option<Side> {
    batch.column(name).unwrap().dense().unwrap().padding_side()
}

/// Returns the rows without their padding, as the mask and the side tell them.
fn real(batch: &Batch) -> Vec<Vec<i64>> {
    let width = batch.column("ids").unwrap().dense().unwrap().shape()[1];
    let (ids, mask, lengths) = (elements(batch, "ids"), elements(batch, "ids_mask"), elements(batch, "ids_lengths"));
    let row = |row: usize| {
        let (ids, mask) = (&ids[row * width..][..width], &mask[row * width..][..width]);
        let kept: Vec<i64> = ids.iter().zip(mask).filter(|(_, real)| **real > 0).map(|(id, _)| *id).collect();
        let at = if side(batch, "ids") == Some(Side::Left) { width - kept.len() } else { 0 };
        assert_eq!((&ids[at..at + kept.len()], lengths[row]), (kept.as_slice(), kept.len() as i64));
        kept
    };
    (0..batch.rows()).map(row).collect()
}

fn dynamic(shards: usize, most: usize) -> Sharding {
    Sharding::into_shards(shards).dynamic(DynamicBatching {
        max_tokens_per_microbatch: most,
        sequence_length_round: NonZeroUsize::MIN,
        input_key: "ids".into(),
        input_lengths_key: "ids_lengths".into(),
    })
}

/// Returns the micro-batches of all shards, each received from a peer.
fn micro_batches(batch: &Batch, sharding: &Sharding) -> Result<Vec<Batch>> {
    let mut micro_batches = Vec::new();
    for shard in batch.shard_by_batch_size(sharding)?.shards {
        let (schema, segments) = shard.encode();
        let schema = serde_json::from_str(&serde_json::to_string(&schema).unwrap()).unwrap();
        let shard = Batch::decode(schema, segments)?;
        micro_batches.extend(shard.iter_planned_micro_batches()?.collect::<Result<Vec<_>>>()?);
    }
    Ok(micro_batches)
}

#[test]
fn dynamic_batching_keeps_every_token_on_both_sides() {
    let mut wanted: Vec<Vec<i64>> = ROWS.iter().map(|row| row.to_vec()).collect();
    wanted.sort_unstable();
    // What tells the side: the columns themselves, or only the mask of columns that say nothing.
    let silent = |batch: Batch| {
        Batch::new(batch.columns().map(|(name, column)| {
            let tensor = column.dense().unwrap();
            let silent = Tensor::new(tensor.dtype(), tensor.shape(), tensor.bytes().clone()).unwrap();
            (name, Column::from(silent))
        }))
        .unwrap()
    };
    for (batch, what) in
        [(rows(Side::Left), "left"), (rows(Side::Right), "right"), (silent(rows(Side::Right)), "right by the mask")]
    {
        let micro_batches = micro_batches(&batch, &dynamic(2, 6)).unwrap();
        assert!(micro_batches.iter().any(|micro| micro.column("ids").unwrap().dense().unwrap().shape()[1] == 2));
        let mut found: Vec<Vec<i64>> = micro_batches.iter().flat_map(real).collect();
        found.sort_unstable();
        assert_eq!(found, wanted, "{what}");
    }
    let by_mask = micro_batches(&silent(rows(Side::Left)), &dynamic(2, 6)).unwrap();
    let ids: Vec<i64> = by_mask.iter().flat_map(|micro| elements(micro, "ids")).filter(|id| *id > 0).collect();
    assert_eq!(ids.len(), ROWS.concat().len(), "left by the mask");
}

#[test]
fn a_plan_stays_for_a_shard_that_is_truncated_to_its_longest_micro_batch() {
    let batch = Batch::from_rows("ids", &ROWS, Padding::left(0).to_width(9)).unwrap();
    let shard = batch.shard_by_batch_size(&dynamic(1, 6)).unwrap().shards.remove(0);
    let micro_batches =
        |shard: &Batch| -> Vec<Batch> { shard.iter_planned_micro_batches().unwrap().map(Result::unwrap).collect() };
    let truncated = shard.truncate(1, shard.micro_batches().unwrap().longest()).unwrap();
    assert_eq!(truncated.column("ids").unwrap().dense().unwrap().shape(), [4, 6]);
    assert_eq!(micro_batches(&truncated), micro_batches(&shard));
}

#[test]
fn only_columns_of_the_width_of_the_input_are_cut() {
    let numbers = |shape: &[usize]| Tensor::from_vec(shape, (0..shape.iter().product::<usize>() as i64).collect());
    let batch = rows(Side::Left)
        .with("image_sizes", numbers(&[4, 2]).unwrap())
        .unwrap()
        .with("features", numbers(&[4, 9]).unwrap())
        .unwrap()
        .with("log_probs", numbers(&[4, 6]).unwrap())
        .unwrap()
        .with("routing", numbers(&[4, 6, 2]).unwrap())
        .unwrap();
    let micro = micro_batches(&batch, &dynamic(1, 6)).unwrap();
    let shape = |name: &str| micro[0].column(name).unwrap().dense().unwrap().shape().to_vec();
    assert_eq!([shape("ids"), shape("log_probs")], [[2, 2], [2, 2]]);
    assert_eq!((shape("routing"), shape("image_sizes"), shape("features")), (vec![2, 2, 2], vec![2, 2], vec![2, 9]));
    // Columns that do not tell their side are cut on the side of those of the same width.
    assert_eq!(elements(&micro[0], "log_probs"), [22, 23, 10, 11]);
    // A ragged input has no width, so nothing is known to be as wide as it.
    let ragged = batch.with("ids", Ragged::from_rows(&ROWS)).unwrap();
    for micro in micro_batches(&ragged, &dynamic(1, 6)).unwrap() {
        assert_eq!(micro.column("log_probs").unwrap().dense().unwrap().shape()[1], 6);
    }
}

#[test]
fn what_would_cut_a_real_token_is_refused_by_name() {
    let silent = |ids: &[i64], mask: &[i64]| {
        Batch::empty().with("ids", dense(4, ids)).unwrap().with("ids_mask", bools(4, mask)).unwrap()
    };
    let declared = |batch: &Batch, name: &str, side| {
        let tensor = batch.column(name).unwrap().dense().unwrap().clone().padded_on(side).unwrap();
        batch.clone().with(name, tensor).unwrap()
    };
    let holes = silent(&[0, 7, 0, 9], &[0, 1, 0, 1]);
    let without = |side, column: &str| {
        let mut batch = rows(side);
        batch.remove(column);
        batch
    };
    let attention =
        Batch::empty().with("x", dense(4, &[0, 0, 1, 2])).unwrap().with("attention_mask", bools(4, &[0, 0, 1, 1]));
    for (batch, length, column) in [
        (without(Side::Left, "ids_lengths"), 5, "ids_mask"),
        (without(Side::Right, "ids_lengths"), 5, "ids_mask"),
        (without(Side::Left, "ids_mask"), 5, "ids_lengths"),
        (without(Side::Right, "ids_mask"), 5, "ids_lengths"),
        (holes.clone(), 3, "ids_mask"),
        (declared(&holes, "ids", Side::Left), 2, "ids_mask"),
        (declared(&silent(&[1, 2, 0, 0], &[1, 1, 0, 0]), "ids", Side::Left), 2, "ids_mask"),
        (silent(&[1, 2, 0, 0, 0, 0, 1, 2], &[1, 1, 0, 0, 0, 0, 1, 1]), 2, "ids_mask"),
        (attention.unwrap(), 2, "attention_mask"),
    ] {
        let text = refusal(batch.truncate(1, length));
        assert!(text.contains(&format!("{column:?}")) && text.contains("fix: "), "{text}");
    }
    let kept = declared(&holes, "ids", Side::Left).truncate(1, 3).unwrap();
    assert_eq!((elements(&kept, "ids"), side(&kept, "ids")), (vec![7, 0, 9], Some(Side::Left)));
    assert_eq!(
        elements(&silent(&[0, 0, 1, 2, 0, 0, 0, 3], &[0, 0, 1, 1, 0, 0, 0, 1]).truncate(1, 2).unwrap(), "ids"),
        [1, 2, 0, 3]
    );
}

#[test]
fn columns_padded_on_both_sides_are_not_cut_together() {
    let response = Batch::from_rows("response", &ROWS, Padding::right(0)).unwrap();
    let mixed = rows(Side::Left).with("response", response.column("response").unwrap().clone()).unwrap();
    let whole = Batch::from_batches(&[mixed.clone(), mixed.clone()], &Assembly::default()).unwrap();
    assert_eq!((side(&whole, "ids"), side(&whole, "response")), (Some(Side::Left), Some(Side::Right)));
    let mut texts = vec![refusal(mixed.truncate(1, 6).and_then(|same| same.truncate(1, 5)))];
    texts.push(refusal(micro_batches(&mixed, &dynamic(2, 6))));
    // A column of that width that does not tell its side could be either.
    let log_probs = mixed.with("log_probs", dense(6, &[0; 24])).unwrap();
    texts.push(refusal(Batch::from_batches(&[log_probs.clone(), log_probs], &Assembly::default())));
    for text in texts {
        assert!(text.contains("\"ids\"") && text.contains("\"response\"") && text.contains("fix: "), "{text}");
    }
}

#[test]
fn lengths_beyond_the_width_are_refused() {
    let batch = rows(Side::Left).with("ids_lengths", Tensor::from_vec([4], vec![6_i32, 2, 7, 1]).unwrap()).unwrap();
    let packing = Sharding::into_shards(1).packed(SequencePacking {
        max_tokens_per_microbatch: 100,
        input_lengths_key: "ids_lengths".into(),
        algorithm: PackingAlgorithm::Concatenative,
        sequence_length_pad_multiple: NonZeroUsize::MIN,
        microbatch_order: Default::default(),
    });
    for sharding in [dynamic(2, 100), packing] {
        let text = refusal(batch.shard_by_batch_size(&sharding));
        assert!(text.contains("row 2") && text.contains("\"ids_lengths\"") && text.contains('7'), "{text}");
    }
}

#[test]
fn parts_are_assembled_on_their_side_or_refused() {
    let part = |rows: &[&[i64]], side| Batch::from_rows("ids", rows, Padding::new(0, side)).unwrap();
    let ids = |parts: &[Batch]| Batch::from_batches(parts, &Assembly::default()).map(|whole| elements(&whole, "ids"));
    let left = [part(&[&[1, 2], &[3]], Side::Left), part(&[&[4, 5, 6, 7]], Side::Left)];
    assert_eq!(ids(&left).unwrap(), [0, 0, 1, 2, 0, 0, 0, 3, 4, 5, 6, 7]);
    let whole = Batch::from_batches(&left, &Assembly::default()).unwrap();
    assert_eq!(real(&whole), [vec![1, 2], vec![3], vec![4, 5, 6, 7]]);
    // A column that does not tell its side follows the one of its width that does.
    let with_log_probs = |part: &Batch| {
        let width = part.column("ids").unwrap().dense().unwrap().shape()[1];
        let log_probs = vec![-1_i64; width * part.rows()];
        part.clone().with("log_probs", dense(width, &log_probs)).unwrap()
    };
    let whole = Batch::from_batches(&left.each_ref().map(with_log_probs), &Assembly::default()).unwrap();
    assert_eq!(elements(&whole, "log_probs"), [0, 0, -1, -1, 0, 0, -1, -1, -1, -1, -1, -1]);
    // Parts without rows have no side.
    let none = part(&[&[1, 2]], Side::Right).slice(0..0).unwrap();
    assert_eq!(side(&Batch::concat(&[none.clone(), left[0].clone()]).unwrap(), "ids"), Some(Side::Left));
    assert_eq!(ids(&[none, left[0].clone()]).unwrap(), [1, 2, 0, 3]);

    let unknown = Batch::new(left[0].columns().map(|(name, column)| {
        let tensor = column.dense().unwrap();
        (name, Column::from(Tensor::new(tensor.dtype(), tensor.shape(), tensor.bytes().clone()).unwrap()))
    }))
    .unwrap();
    assert_eq!(ids(&[unknown.clone(), left[1].clone()]).unwrap()[..4], [0, 0, 1, 2], "the mask of the part tells it");
    for mixed in [
        [left[0].clone(), part(&[&[1, 2], &[3]], Side::Right)],
        [part(&[&[1, 2], &[3]], Side::Right), left[0].clone()],
        [left[0].clone(), unknown],
    ] {
        let text = refusal(Batch::concat(&mixed));
        assert!(text.contains("\"ids\"") && text.contains("part 0") && text.contains("part 1"), "{text}");
        assert!(text.contains("on the left") && text.contains("fix: "), "{text}");
    }
    let text = refusal(ids(&[left[1].clone(), part(&[&[1, 2], &[3]], Side::Right)]));
    assert!(text.contains("\"ids\"") && text.contains("part 1") && text.contains("fix: "), "{text}");
}

#[test]
fn the_side_stays_through_every_operation_and_every_journey() {
    let batch = rows(Side::Left);
    let file = SafeTensors::from_batch(&batch).unwrap().encode().unwrap().to_bytes();
    let shards = batch.shard(3, Uneven::Allow).unwrap();
    for (what, batch) in [
        ("slice", batch.slice(1..3).unwrap()),
        ("shard without rows", shards[2].clone()),
        ("concat", Batch::concat(&shards).unwrap()),
        ("select", batch.select(&[3, 1]).unwrap()),
        ("repeat_interleave", batch.repeat_interleave(2).unwrap()),
        ("reorder", batch.reorder(&[1, 0, 3, 2]).unwrap()),
        ("from_batches", Batch::from_batches(&shards, &Assembly::default()).unwrap()),
        ("a copy in another batch", Batch::new([("ids", batch.column("ids").unwrap().clone())]).unwrap()),
        ("a file", SafeTensors::decode(&file).unwrap().into_batch().unwrap()),
    ] {
        assert_eq!(side(&batch, "ids"), Some(Side::Left), "{what}");
    }
    let tensor = batch.column("ids").unwrap().dense().unwrap();
    assert_eq!(tensor.reshape([4, 6, 1]).unwrap().padding_side(), Some(Side::Left));
    assert_eq!(tensor.reshape([24]).unwrap().padding_side(), None);
    assert_eq!(Ragged::from_rows(&ROWS).pad(Padding::left(0)).unwrap().padding_side(), Some(Side::Left));
    assert!(refusal(Tensor::from_vec([3], vec![1_i64; 3]).unwrap().padded_on(Side::Left)).contains("dimension 1"));
    let (mut schema, segments) = batch.encode();
    let text = serde_json::to_string(&schema).unwrap().replacen("\"shape\":[4,6]", "\"shape\":[24]", 1);
    schema = serde_json::from_str(&text).unwrap();
    assert_eq!(Batch::decode(schema, segments).unwrap_err().code(), Code::DataLoss);
}

proptest! {
    #[test]
    fn dynamic_batching_and_assembly_return_the_rows_that_went_in(
        lengths in prop::collection::vec(0_usize..9, 1..10), left in any::<bool>(), round in 1_usize..4, at in 0_usize..9,
    ) {
        let side = if left { Side::Left } else { Side::Right };
        let rows: Vec<Vec<i64>> =
            lengths.iter().zip(1..).map(|(length, row)| vec![row; *length]).collect();
        let part = |rows: &[Vec<i64>]| Batch::from_rows("ids", rows, Padding::new(0, side).to_multiple_of(round)).unwrap();
        let (first, second) = rows.split_at(at.min(rows.len()));
        let whole = Batch::from_batches(&[part(first), part(second)], &Assembly::default()).unwrap();
        prop_assert_eq!(real(&whole), rows.clone());
        let mut found: Vec<Vec<i64>> = micro_batches(&whole, &dynamic(1, 12)).unwrap().iter().flat_map(real).collect();
        let mut wanted = rows;
        found.sort_unstable();
        wanted.sort_unstable();
        prop_assert_eq!(found, wanted);
    }
}
