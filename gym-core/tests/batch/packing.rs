//! Section 5.3: sequence packing through sharding.

use std::num::NonZeroUsize;

use gym_core::group::batch::packing::PackingAlgorithm::{
    self, Concatenative, FirstFitDecreasing, ModifiedFirstFitDecreasing,
};
use gym_core::group::{Batch, MicrobatchOrder, SequencePacking, Sharding};

use crate::{plan, refusal, sequences, shard, x, xs};

const EIGHT: [i32; 8] = [46, 24, 55, 88, 11, 14, 73, 17];

fn by(algorithm: PackingAlgorithm, capacity: usize, multiple: usize, order: MicrobatchOrder) -> SequencePacking {
    SequencePacking {
        max_tokens_per_microbatch: capacity,
        input_lengths_key: "input_lengths".into(),
        algorithm,
        sequence_length_pad_multiple: NonZeroUsize::new(multiple).unwrap(),
        microbatch_order: order,
    }
}

fn mffd(capacity: usize) -> SequencePacking {
    by(ModifiedFirstFitDecreasing, capacity, 1, MicrobatchOrder::Packer)
}

fn largest_first(capacity: usize) -> SequencePacking {
    by(ModifiedFirstFitDecreasing, capacity, 1, MicrobatchOrder::LargestFirst)
}

fn packed(lengths: &[i32], shards: usize, packing: SequencePacking) -> Vec<Batch> {
    shard(&sequences(lengths, 1), &Sharding::into_shards(shards).packed(packing)).unwrap().shards
}

/// The lengths of the micro-batches of each shard's only global batch.
fn lengths(shards: &[Batch]) -> Vec<Vec<usize>> {
    shards.iter().map(|part| plan(part)[0].iter().map(|(_, _, length)| *length).collect()).collect()
}

#[test]
fn c030_bins_are_dealt_over_the_shards_in_turn() {
    let sharding = Sharding::into_shards(2).packed(mffd(100));
    let sharded = shard(&sequences(&EIGHT, 1), &sharding).unwrap();
    assert_eq!(xs(&sharded.shards), [vec![3, 4, 2, 7, 1], vec![6, 5, 0]]);
    assert_eq!(plan(&sharded.shards[0]), [[(0, 2, 99), (2, 5, 96)]]);
    assert_eq!(plan(&sharded.shards[1]), [[(0, 2, 87), (2, 3, 46)]]);
    let rows = sharded.shards.iter().map(|part| part.micro_batches().unwrap().chunks[0].rows).collect::<Vec<_>>();
    assert_eq!((rows, sharded.order), (vec![5, 3], vec![3, 4, 2, 7, 1, 6, 5, 0]));
}

#[test]
fn c031_largest_first_orders_a_shards_bins_and_leaves_their_rows() {
    let (packer, largest) = (packed(&EIGHT, 2, mffd(100)), packed(&EIGHT, 2, largest_first(100)));
    assert!(lengths(&largest).iter().all(|lengths| lengths.is_sorted_by(|a, b| a >= b)));
    let sets =
        |shards: &[Batch]| xs(shards).into_iter().map(|mut rows| (rows.sort_unstable(), rows)).collect::<Vec<_>>();
    assert_eq!(sets(&packer), sets(&largest));
}

#[test]
fn c032_largest_first_puts_the_fuller_bin_first() {
    let packer = packed(&[30; 5], 1, mffd(100));
    assert_eq!((xs(&packer), lengths(&packer)), (vec![vec![3, 4, 0, 1, 2]], vec![vec![60, 90]]));
    let largest = packed(&[30; 5], 1, largest_first(100));
    assert_eq!((xs(&largest), lengths(&largest)), (vec![vec![0, 1, 2, 3, 4]], vec![vec![90, 60]]));
}

/// Sixteen rows in two global batches.
fn two_global_batches() -> Vec<Batch> {
    let lengths = [EIGHT.as_slice(), &[31, 67, 19, 82, 12, 43, 58, 21]].concat();
    let sharding = Sharding::into_shards(2).batch_size(8).packed(largest_first(100));
    shard(&sequences(&lengths, 1), &sharding).unwrap().shards
}

#[test]
fn c033_every_global_batch_is_packed_for_itself() {
    let shards = two_global_batches();
    assert_eq!(xs(&shards), [vec![3, 4, 2, 7, 1, 14, 10, 15, 11, 12], vec![6, 5, 0, 9, 8, 13]]);
    assert_eq!(plan(&shards[0]), [[(0, 2, 99), (2, 5, 96)], [(0, 3, 98), (3, 5, 94)]]);
    let lengths =
        plan(&shards[1]).iter().map(|chunk| chunk.iter().map(|micro| micro.2).collect()).collect::<Vec<Vec<_>>>();
    assert_eq!(lengths, [[87, 46], [98, 43]]);
    let rows = |part: &Batch| part.micro_batches().unwrap().chunks.iter().map(|chunk| chunk.rows).collect::<Vec<_>>();
    assert_eq!((rows(&shards[0]), rows(&shards[1])), (vec![5, 5], vec![3, 3]));
}

#[test]
fn c034_a_global_batch_of_a_packed_shard_goes_by_its_own_rows() {
    let second = two_global_batches()[0].get_batch(1, 4).unwrap();
    assert_eq!((x(&second), plan(&second)), (vec![14, 10, 15, 11, 12], vec![vec![(0, 3, 98), (3, 5, 94)]]));
    let micro_batches = second.micro_batches().unwrap();
    assert_eq!((micro_batches.count(), micro_batches.longest()), (2, 98));
    let rows: Vec<Vec<i64>> = second.iter_planned_micro_batches().unwrap().map(|micro| x(&micro.unwrap())).collect();
    assert_eq!(rows, [vec![14, 10, 15], vec![11, 12]]);
}

#[test]
fn c035_equal_rows_fill_equal_bins() {
    let shards = packed(&[256; 16], 2, mffd(1024));
    assert!(shards.iter().all(|part| plan(part) == [[(0, 4, 1024), (4, 8, 1024)]]));
}

#[test]
fn c036_rows_that_share_no_bin_have_one_each() {
    let shards = packed(&[900, 850, 1000, 950], 2, mffd(1024));
    assert_eq!((xs(&shards), lengths(&shards)), (vec![vec![2, 0], vec![3, 1]], vec![vec![1000, 900], vec![950, 850]]));
}

#[test]
fn c037_lengths_are_padded_to_the_multiple_before_packing() {
    let packing = by(ModifiedFirstFitDecreasing, 24, 4, MicrobatchOrder::Packer);
    let shards = packed(&[5, 6, 7, 8, 9, 10, 11, 12], 2, packing);
    assert_eq!(xs(&shards), [vec![3, 6, 7], vec![4, 5, 0, 1, 2]]);
    assert_eq!(lengths(&shards), [[8, 24], [24, 24]]);
}

#[test]
fn c038_four_short_rows_make_a_bin_for_each_of_two_shards() {
    let shards = packed(&[2, 3, 2, 4], 2, mffd(6));
    assert_eq!((xs(&shards), lengths(&shards)), (vec![vec![3, 0], vec![1, 2]], vec![vec![6], vec![5]]));
}

#[test]
fn c039_first_fit_decreasing_through_sharding() {
    let shards = packed(&EIGHT, 2, by(FirstFitDecreasing, 100, 1, MicrobatchOrder::Packer));
    assert_eq!(
        (xs(&shards), lengths(&shards)),
        (vec![vec![3, 4, 2, 7, 5], vec![6, 1, 0]], vec![vec![99, 86], vec![97, 46]])
    );
}

#[test]
fn c040_concatenative_through_sharding_is_raised_to_a_multiple_of_the_shards() {
    let shards = packed(&EIGHT, 2, by(Concatenative, 100, 1, MicrobatchOrder::Packer));
    assert_eq!(xs(&shards), [vec![0, 1, 3, 4, 7], vec![2, 5, 6]]);
    assert_eq!(lengths(&shards), [[70, 99, 17], [55, 14, 73]]);
}

#[test]
fn c041_two_bins_are_split_for_three_shards() {
    assert_eq!(xs(&packed(&[5, 5, 5], 3, mffd(10))), [[2], [0], [1]]);
}

#[test]
fn c042_small_global_batches_give_each_shard_one_row() {
    let sharding = Sharding::into_shards(2).batch_size(2).packed(mffd(10));
    let sharded = shard(&sequences(&[1, 2, 3, 4], 1), &sharding).unwrap();
    assert_eq!((xs(&sharded.shards), sharded.order), (vec![vec![1, 3], vec![0, 2]], vec![1, 3, 0, 2]));
    let rows = |part: &Batch| part.micro_batches().unwrap().chunks.iter().map(|chunk| chunk.rows).collect::<Vec<_>>();
    assert!(sharded.shards.iter().all(|part| rows(part) == [1, 1]));
}

#[test]
fn c043_an_unknown_order_is_refused_by_name() {
    let mut config = serde_json::to_value(mffd(10)).unwrap();
    assert_eq!(serde_json::from_value::<SequencePacking>(config.clone()).unwrap(), mffd(10));
    config["microbatch_order"] = "unknown".into();
    let text = serde_json::from_value::<SequencePacking>(config).unwrap_err().to_string();
    assert!(text.contains("unknown") && text.contains("packer") && text.contains("largest_first"), "{text}");
}

#[test]
fn c044_a_row_without_tokens_is_refused() {
    let text = refusal(shard(&sequences(&[3, 0], 1), &Sharding::into_shards(1).packed(mffd(10))));
    assert!(text.contains("sequence lengths must be positive"), "{text}");
}

#[test]
fn c045_a_row_that_padding_makes_too_long_is_refused() {
    let packing = by(ModifiedFirstFitDecreasing, 10, 4, MicrobatchOrder::Packer);
    let text = refusal(shard(&sequences(&[9], 1), &Sharding::into_shards(1).packed(packing)));
    assert!(text.contains("12") && text.contains("10"), "{text}");
}

#[test]
fn c046_a_thousand_rows_fill_their_bins() {
    let seed = 46;
    let mut random = fastrand::Rng::with_seed(seed);
    let lengths: Vec<i32> = (0..1024).map(|_| random.i32(50..800)).collect();
    let batch = sequences(&lengths, 1);
    for (multiple, least, most) in [(1, 0.955, 1.0), (32, 0.91, 0.97), (64, 0.85, 0.92), (256, 0.60, 0.80)] {
        let packing = by(ModifiedFirstFitDecreasing, 1200, multiple, MicrobatchOrder::Packer);
        let sharding = Sharding::into_shards(4).batch_size(256).packed(packing);
        let sharded = shard(&batch, &sharding).unwrap();
        assert_ne!(sharded.order, (0..1024).collect::<Vec<_>>(), "seed {seed}");
        let mut bins = 0;
        for chunk in 0..4 {
            let parts: Vec<Batch> = sharded.shards.iter().map(|part| part.get_batch(chunk, 0).unwrap()).collect();
            let mut rows: Vec<i64> = parts.iter().flat_map(x).collect();
            rows.sort_unstable();
            assert!(rows.into_iter().eq(256 * chunk as i64..256 * (chunk as i64 + 1)), "seed {seed}");
            let counts: Vec<usize> = parts.iter().map(|part| part.micro_batches().unwrap().count()).collect();
            assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "seed {seed}");
            assert!(parts.iter().all(|part| part.micro_batches().unwrap().longest() <= 1200), "seed {seed}");
            bins += counts.iter().sum::<usize>();
        }
        let tokens: i32 = lengths.iter().sum();
        let efficiency = f64::from(tokens) / (bins * 1200) as f64;
        assert!((least..=most).contains(&efficiency), "multiple {multiple}: {efficiency}, seed {seed}");
    }
}

#[test]
fn uneven_rows_may_be_packed_and_too_few_rows_are_refused() {
    let sharding = |shards| Sharding::into_shards(shards).allow_uneven().packed(mffd(10));
    assert_eq!(shard(&sequences(&[5; 5], 1), &sharding(2)).unwrap().shards.len(), 2);
    let text = refusal(shard(&sequences(&[5], 1), &sharding(2)));
    assert!(text.contains("2 bins with only 1 sequence"), "{text}");
    assert!(refusal(shard(&sequences(&[5; 3], 1), &Sharding::into_shards(2).packed(mffd(10)))).contains("multiple"));
}
