//! Conformance tests of the packing algorithms, and comparison with the plain versions on random input.

use proptest::prelude::*;

use super::PackingAlgorithm::{Concatenative, FirstFitDecreasing, FirstFitShuffle, ModifiedFirstFitDecreasing};
use super::*;

const S: [usize; 9] = [10, 20, 30, 40, 50, 60, 70, 80, 90];
const M: [usize; 17] = [25, 35, 45, 55, 65, 75, 85, 95, 15, 25, 35, 45, 55, 65, 75, 85, 95];
const X: [usize; 10] = [10, 50, 100, 20, 80, 30, 70, 40, 60, 90];
const SHORT: [usize; 8] = [4, 1, 3, 2, 1, 3, 4, 5];

fn pack(algorithm: PackingAlgorithm, capacity: usize, lengths: &[usize]) -> Vec<Vec<usize>> {
    Packing::new(algorithm, capacity).pack(lengths).unwrap()
}

fn constrained(algorithm: PackingAlgorithm, min: usize, multiple: usize) -> Packing {
    let bin_count_multiple = NonZeroUsize::new(multiple).unwrap();
    Packing { min_bin_count: min, bin_count_multiple, ..Packing::new(algorithm, 100) }
}

/// Parses bins from text such as `0 1|2`, which takes one line where nested lists would take twenty.
fn bins(text: &str) -> Vec<Vec<usize>> {
    text.split('|').map(|bin| bin.split(' ').map(|index| index.parse().unwrap()).collect()).collect()
}

#[test]
fn c98_concatenative_keeps_the_order_of_s() {
    assert_eq!(pack(Concatenative, 100, &S), bins("0 1 2 3|4|5|6|7|8"));
}

#[test]
fn c99_both_decreasing_packers_pair_the_ends_of_s() {
    for algorithm in [FirstFitDecreasing, ModifiedFirstFitDecreasing] {
        assert_eq!(pack(algorithm, 100, &S), bins("8 0|7 1|6 2|5 3|4"));
    }
}

#[test]
fn c100_concatenative_needs_twelve_bins_for_m() {
    assert_eq!(pack(Concatenative, 100, &M), bins("0 1|2 3|4|5|6|7|8 9 10|11 12|13|14|15|16"));
}

#[test]
fn c101_first_fit_decreasing_takes_the_later_of_equals_first() {
    assert_eq!(pack(FirstFitDecreasing, 100, &M), bins("16|7|15 8|6|14 9|5 0|13 10|4 1|12 11|3 2"));
}

#[test]
fn c102_modified_takes_the_earlier_of_equals_first() {
    assert_eq!(pack(ModifiedFirstFitDecreasing, 100, &M), bins("7|16|6 8|15|5 0|14 9|4 1|13 10|3 2|12 11"));
}

#[test]
fn c103_both_decreasing_packers_fill_x_alike() {
    for algorithm in [FirstFitDecreasing, ModifiedFirstFitDecreasing] {
        assert_eq!(pack(algorithm, 100, &X), bins("2|9 0|4 3|6 5|8 7|1"));
    }
}

#[test]
fn c104_concatenative_keeps_the_order_of_x() {
    assert_eq!(pack(Concatenative, 100, &X), bins("0 1|2|3 4|5 6|7 8|9"));
}

#[test]
fn c105_five_equal_sequences_go_three_and_two() {
    assert_eq!(pack(Concatenative, 100, &[30; 5]), bins("0 1 2|3 4"));
    assert_eq!(pack(FirstFitDecreasing, 100, &[30; 5]), bins("4 3 2|1 0"));
    assert_eq!(pack(ModifiedFirstFitDecreasing, 100, &[30; 5]), bins("3 4|0 1 2"));
}

#[test]
fn c106_full_sequences_have_a_bin_each() {
    assert_eq!(pack(Concatenative, 100, &[100; 3]), bins("0|1|2"));
    assert_eq!(pack(FirstFitDecreasing, 100, &[100; 3]), bins("2|1|0"));
    assert_eq!(pack(ModifiedFirstFitDecreasing, 100, &[100; 3]), bins("0|1|2"));
}

#[test]
fn c107_one_sequence_has_one_bin() {
    assert!(PackingAlgorithm::ALL.into_iter().all(|algorithm| pack(algorithm, 100, &[50]) == [[0]]));
}

#[test]
fn c108_no_sequences_have_no_bins() {
    assert!(PackingAlgorithm::ALL.into_iter().all(|algorithm| pack(algorithm, 100, &[]).is_empty()));
}

#[test]
fn c109_a_sequence_longer_than_a_bin_is_refused() {
    for algorithm in PackingAlgorithm::ALL {
        let error = Packing::new(algorithm, 100).pack(&[50, 150, 70]).unwrap_err();
        assert_eq!(error, PackingError::TooLong { index: 1, length: 150, capacity: 100 });
    }
}

#[test]
fn c110_short_sequences_in_bins_of_5() {
    assert_eq!(pack(Concatenative, 5, &SHORT), bins("0 1|2 3|4 5|6|7"));
    assert_eq!(pack(FirstFitDecreasing, 5, &SHORT), bins("7|6 4|0 1|5 3|2"));
    assert_eq!(pack(ModifiedFirstFitDecreasing, 5, &SHORT), bins("7|0|6|2 3|5 1 4"));
}

#[test]
fn c111_short_sequences_in_bins_of_8() {
    assert_eq!(pack(Concatenative, 8, &SHORT), bins("0 1 2|3 4 5|6|7"));
    assert_eq!(pack(FirstFitDecreasing, 8, &SHORT), bins("7 5|6 0|2 3 4 1"));
    assert_eq!(pack(ModifiedFirstFitDecreasing, 8, &SHORT), bins("7 2|5 3 1 4|0 6"));
}

#[test]
fn c112_a_minimum_splits_the_fullest_bins() {
    assert_eq!(constrained(Concatenative, 8, 1).pack(&S).unwrap(), bins("0 1|4|5|6|7|8|3|2"));
    for algorithm in [FirstFitDecreasing, ModifiedFirstFitDecreasing] {
        assert_eq!(constrained(algorithm, 7, 1).pack(&S).unwrap(), bins("8 0|7 1|6|5|4|3|2"));
    }
}

#[test]
fn c113_a_multiple_splits_the_last_bins() {
    assert_eq!(constrained(Concatenative, 0, 4).pack(&M).unwrap(), pack(Concatenative, 100, &M));
    let ours = constrained(FirstFitDecreasing, 0, 4).pack(&M).unwrap();
    assert_eq!(ours, bins("16|7|15 8|6|14 9|5 0|13 10|4 1|12|3|2|11"));
    let ours = constrained(ModifiedFirstFitDecreasing, 0, 4).pack(&M).unwrap();
    assert_eq!(ours, bins("7|16|6 8|15|5 0|14 9|4 1|13 10|3|12|11|2"));
}

#[test]
fn c114_a_minimum_is_rounded_up_to_the_multiple() {
    for algorithm in [FirstFitDecreasing, ModifiedFirstFitDecreasing] {
        assert_eq!(constrained(algorithm, 6, 3).pack(&S).unwrap(), bins("8 0|7 1|6 2|5|4|3"));
    }
    let singles = constrained(Concatenative, 7, 3).pack(&S).unwrap();
    assert!(singles.len() == 9 && singles.iter().all(|bin| bin.len() == 1));
}

#[test]
fn c115_more_bins_than_sequences_are_refused() {
    let error = constrained(FirstFitDecreasing, 3, 1).pack(&[50, 50]).unwrap_err();
    assert!(error.to_string().starts_with("cannot create 3 bins with only 2 sequences"), "{error}");
    let error = constrained(FirstFitDecreasing, 0, 4).pack(&[50, 50]).unwrap_err();
    assert!(error.to_string().starts_with("cannot create 4 bins with only 2 sequences"), "{error}");
    assert!(constrained(FirstFitDecreasing, usize::MAX, 2).pack(&[50, 50]).is_err());
}

#[test]
fn c116_constraints_out_of_range_do_not_parse() {
    let parse = |constraint: &str| {
        let text = format!(r#"{{"algorithm": "concatenative", "bin_capacity": 100, {constraint}}}"#);
        serde_json::from_str::<Packing>(&text)
    };
    assert!(parse(r#""min_bin_count": 2"#).is_ok());
    for constraint in [r#""min_bin_count": -1"#, r#""bin_count_multiple": 0"#, r#""bin_count_multiple": -5"#] {
        assert!(parse(constraint).is_err(), "{constraint}");
    }
}

#[test]
fn c117_names_are_read_in_any_case_and_unknown_ones_refused() {
    for algorithm in PackingAlgorithm::ALL {
        assert_eq!(algorithm.as_str().to_uppercase().parse(), Ok(algorithm));
    }
    let error = "best_fit".parse::<PackingAlgorithm>().unwrap_err();
    assert!(error.to_string().contains("unknown packing algorithm 'best_fit'"), "{error}");
    assert!(serde_json::from_str::<PackingAlgorithm>("7").is_err());
}

#[test]
fn c118_the_same_input_gets_the_same_bins() {
    let lengths: Vec<usize> = (1..=1000).map(|i| i * 7919 % 512 + 1).collect();
    for algorithm in PackingAlgorithm::ALL {
        assert_eq!(pack(algorithm, 1024, &lengths), pack(algorithm, 1024, &lengths));
    }
    let other_seed = Packing { seed: 1, ..Packing::new(FirstFitShuffle, 1024) };
    assert_ne!(other_seed.pack(&lengths).unwrap(), pack(FirstFitShuffle, 1024, &lengths));
}

#[test]
fn c119_constraints_cost_no_more_utilization_than_the_bins_they_add() {
    for algorithm in [Concatenative, FirstFitDecreasing, ModifiedFirstFitDecreasing] {
        let natural = pack(algorithm, 100, &M);
        let more = constrained(algorithm, natural.len() + 1, 1).pack(&M).unwrap();
        let utilization = |bins: &[Vec<usize>]| PackingMetrics::of(&M, bins, 100).average_utilization;
        assert!(utilization(&more) >= 0.9 * utilization(&natural) * natural.len() as f64 / more.len() as f64);
    }
}

#[test]
fn c120_the_metrics_are_the_documented_ones() {
    let bins = bins("3 4|6 1|2 0|7 5");
    let metrics = PackingMetrics::of(&[46, 24, 55, 88, 11, 14, 73, 17], &bins, 100);
    assert_eq!((metrics.num_sequences, metrics.num_bins, metrics.total_sequence_length), (8, 4, 328));
    assert_eq!((metrics.total_bin_capacity, metrics.total_waste, metrics.theoretical_min_bins), (400, 72, 4));
    assert!((metrics.average_utilization - 0.82).abs() < 1e-12 && (metrics.waste_ratio - 0.18).abs() < 1e-12);
    assert!((metrics.bin_efficiency - 1.0).abs() < 1e-12 && (metrics.bin_balance - 0.5849).abs() < 5e-5);
    assert_eq!(PackingMetrics::of(&[], &[], 100), PackingMetrics::default());
}

#[test]
fn c121_no_sequences_do_not_make_two_bins() {
    for algorithm in PackingAlgorithm::ALL {
        let error = constrained(algorithm, 2, 1).pack(&[]).unwrap_err();
        assert!(error.to_string().starts_with("cannot create 2 bins with only 0 sequences"), "{error}");
    }
}

#[test]
fn totals_keep_the_extremes_of_single_calls() {
    let mut totals = PackingTotals::default();
    for lengths in [&[50, 50][..], &[], &[20], &[90]] {
        totals.add(&PackingMetrics::of(lengths, &pack(FirstFitDecreasing, 100, lengths), 100));
    }
    assert_eq!((totals.packing_operations, totals.total_bins, totals.total_sequences), (4, 3, 4));
    assert_eq!((totals.min_utilization, totals.max_utilization, totals.average_utilization()), (0.2, 1.0, 0.7));
}

#[test]
fn modified_refuses_empty_sequences_and_bins_without_room() {
    let modified = |capacity| Packing::new(ModifiedFirstFitDecreasing, capacity);
    assert_eq!(modified(10).pack(&[3, 0]), Err(PackingError::Empty(1)));
    assert_eq!(modified(0).pack(&[]), Err(PackingError::NoCapacity));
}

/// Generates lengths for which ties, and all four classes, are likely.
fn some_lengths() -> impl Strategy<Value = (usize, Vec<usize>)> {
    (1usize..200).prop_flat_map(|capacity| {
        let length = prop_oneof![1..=capacity, 1..=capacity.div_ceil(3), 1..=capacity.div_ceil(6)];
        (Just(capacity), proptest::collection::vec(length, 0..120))
    })
}

proptest! {
    #[test]
    fn the_fast_packers_give_the_bins_of_the_plain_ones((capacity, lengths) in some_lengths()) {
        prop_assert_eq!(pack(FirstFitDecreasing, capacity, &lengths), oracle::first_fit_decreasing(&lengths, capacity));
        prop_assert_eq!(pack(ModifiedFirstFitDecreasing, capacity, &lengths), oracle::modified(&lengths, capacity));
    }

    #[test]
    fn first_fit_is_the_plain_one_in_any_order_and_with_empty_sequences(
        lengths in proptest::collection::vec(0usize..=50, 0..80), seed: u64,
    ) {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        fastrand::Rng::with_seed(seed).shuffle(&mut order);
        let shuffled = Packing { seed, ..Packing::new(FirstFitShuffle, 50) };
        prop_assert_eq!(shuffled.pack(&lengths).unwrap(), oracle::first_fit(&lengths, &order, 50));
    }

    #[test]
    fn every_sequence_is_in_one_bin_that_holds_it(
        (capacity, lengths) in some_lengths(), min in 0usize..8, multiple in 1usize..5,
    ) {
        for algorithm in PackingAlgorithm::ALL {
            let packing = Packing { capacity, ..constrained(algorithm, min, multiple) };
            let Ok(bins) = packing.pack(&lengths) else { continue };
            prop_assert!(bins.len() >= min && bins.len() % multiple == 0);
            prop_assert!(bins.iter().all(|bin| !bin.is_empty()));
            prop_assert!(bins.iter().all(|bin| bin.iter().map(|index| lengths[*index]).sum::<usize>() <= capacity));
            let mut all = bins.concat();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..lengths.len()));
        }
    }
}
