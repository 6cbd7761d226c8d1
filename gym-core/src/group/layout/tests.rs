//! Conformance tests of named sharding.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn cube(names: [&str; 3]) -> RankLayout {
    RankLayout::new(names.map(|name| (name, 2))).unwrap()
}

fn nested(layout: &serde_json::Value, names: &[&str]) -> Result<RankLayout, LayoutError> {
    RankLayout::from_nested(layout, names.iter().copied())
}

fn dp1_pp2_tp4() -> RankLayout {
    nested(&json!([[[0, 1, 2, 3], [4, 5, 6, 7]]]), &["dp", "pp", "tp"]).unwrap()
}

#[test]
fn c122_a_nested_layout_has_the_sizes_of_its_arrays() {
    let layout = dp1_pp2_tp4();
    let sizes: Vec<(&str, usize)> = layout.axes().iter().map(|axis| (axis.name.as_str(), axis.size)).collect();
    assert_eq!(sizes, [("dp", 1), ("pp", 2), ("tp", 4)]);
    assert_eq!((layout.ndim(), layout.size()), (3, 8));
    assert_eq!(layout, RankLayout::new([("dp", 1), ("pp", 2), ("tp", 4)]).unwrap());
    assert_eq!((layout.axis_index("tp"), layout.axis_size("tp")), (Ok(2), Ok(4)));
}

#[test]
fn c123_as_many_names_as_dimensions() {
    let error = nested(&json!([[0, 1], [2, 3]]), &["dp", "pp", "tp"]).unwrap_err();
    assert_eq!(error, LayoutError::DimensionMismatch { dimensions: 2, names: 3 });
}

#[test]
fn c124_only_integers_are_ranks() {
    let error = nested(&json!([0, 1.5]), &["dp"]).unwrap_err();
    assert_eq!(error.to_string(), "layout must contain only integer rank IDs, found 1.5");
    assert_eq!(nested(&json!([0.0, 1.0]), &["dp"]), RankLayout::new([("dp", 2)]));
    for no_rank in [json!([-1]), json!(["0"]), json!([null]), json!([1e300])] {
        assert!(matches!(nested(&no_rank, &["dp"]), Err(LayoutError::NotARank(_))), "{no_rank}");
    }
    for ragged in [json!([[0, 1], [2]]), json!([[0], 1]), json!([0, [1]])] {
        let names = if ragged[0].is_array() { &["dp", "tp"][..] } else { &["dp"] };
        assert!(matches!(nested(&ragged, names), Err(LayoutError::Ragged(_))), "{ragged}");
    }
}

#[test]
fn c125_a_rank_occurs_once() {
    assert_eq!(nested(&json!([[0, 1], [2, 0]]), &["dp", "tp"]), Err(LayoutError::DuplicateRank(0)));
}

#[test]
fn c126_two_fixed_axes_leave_a_line() {
    let line = RankLayout::from_ranks([("tp", 4)], vec![4, 5, 6, 7]).unwrap();
    assert_eq!(dp1_pp2_tp4().fix(&[("dp", 0), ("pp", 1)]), Ok(SubLayout::Layout(line)));
}

#[test]
fn c127_the_outer_and_inner_axes_may_be_fixed_around_one_that_is_left() {
    let line = RankLayout::from_ranks([("pp", 2)], vec![2, 6]).unwrap();
    assert_eq!(dp1_pp2_tp4().fix(&[("dp", 0), ("tp", 2)]), Ok(SubLayout::Layout(line)));
}

#[test]
fn c128_all_axes_fixed_leave_a_rank() {
    assert_eq!(dp1_pp2_tp4().fix(&[("dp", 0), ("pp", 0), ("tp", 2)]), Ok(SubLayout::Rank(2)));
}

#[test]
fn c129_no_axis_fixed_leaves_the_layout() {
    assert_eq!(dp1_pp2_tp4().fix(&[]), Ok(SubLayout::Layout(dp1_pp2_tp4())));
}

#[test]
fn c130_fixing_what_is_not_there_names_it() {
    let error = dp1_pp2_tp4().fix(&[("ep", 0)]).unwrap_err();
    assert_eq!(error.to_string(), "unknown axis 'ep'; this layout has dp, pp, tp");
    let error = dp1_pp2_tp4().fix(&[("pp", 2)]).unwrap_err();
    assert_eq!(error.to_string(), "index 2 is out of bounds for axis 'pp' with size 2");
    let error = dp1_pp2_tp4().fix(&[("tp", 4)]).unwrap_err();
    assert_eq!(error.to_string(), "index 4 is out of bounds for axis 'tp' with size 4");
}

#[test]
fn c131_every_rank_has_coordinates_and_others_do_not() {
    let layout = nested(&json!([[0, 1], [2, 3]]), &["dp", "tp"]).unwrap();
    let all: Vec<Vec<usize>> = (0..4).map(|rank| layout.coordinates(rank).unwrap()).collect();
    assert_eq!(all, [[0, 0], [0, 1], [1, 0], [1, 1]]);
    assert_eq!(layout.coordinates(4).unwrap_err().to_string(), "worker ID 4 not found in sharding layout");
}

#[test]
fn c132_coordinates_in_three_dimensions() {
    assert_eq!(cube(["dp", "pp", "tp"]).coordinates(5), Ok(vec![1, 0, 1]));
}

#[test]
fn c133_ranks_by_coordinates_in_two_dimensions() {
    let layout = RankLayout::new([("dp", 2), ("tp", 2)]).unwrap();
    let ranks = |fixed: &[(&str, usize)]| layout.ranks_by_coordinates(fixed).unwrap();
    assert_eq!(ranks(&[("dp", 0)]), [0, 1]);
    assert_eq!(ranks(&[("tp", 1)]), [1, 3]);
    assert_eq!(ranks(&[]), [0, 1, 2, 3]);
    assert!(ranks(&[("dp", 2)]).is_empty());
    assert!(ranks(&[("dp", 0), ("tp", 5)]).is_empty());
    assert!(layout.ranks_by_coordinates(&[("pp", 0)]).is_err());
}

#[test]
fn c134_ranks_by_coordinates_in_three_dimensions() {
    let layout = cube(["d", "p", "t"]);
    assert_eq!(layout.ranks_by_coordinates(&[("p", 1)]), Ok(vec![2, 3, 6, 7]));
    assert_eq!(layout.ranks_by_coordinates(&[("d", 0), ("t", 1)]), Ok(vec![1, 3]));
    assert_eq!(layout.ranks_by_coordinates(&[("d", 1), ("p", 1), ("t", 1)]), Ok(vec![7]));
}

#[test]
fn c135_four_dimensions() {
    let layout = RankLayout::new(["a", "b", "c", "d"].map(|name| (name, 2))).unwrap();
    assert_eq!(layout.coordinates(10), Ok(vec![1, 0, 1, 0]));
    assert_eq!(layout.ranks_by_coordinates(&[("c", 0), ("d", 1)]), Ok(vec![1, 5, 9, 13]));
    assert_eq!(layout.ranks_by_coordinates(&[("a", 1), ("b", 0), ("c", 1)]), Ok(vec![10, 11]));
}

#[test]
fn c136_equal_layouts_have_equal_ranks_and_names() {
    let layout = RankLayout::new([("dp", 2), ("tp", 2)]).unwrap();
    assert_eq!(layout, nested(&json!([[0, 1], [2, 3]]), &["dp", "tp"]).unwrap());
    assert_ne!(layout, nested(&json!([[0, 2], [1, 3]]), &["dp", "tp"]).unwrap());
    assert_ne!(layout, RankLayout::new([("dp", 2), ("pp", 2)]).unwrap());
}

#[test]
fn an_axis_that_the_layout_lacks_counts_as_zero() {
    let layout = cube(["dp", "pp", "tp"]);
    assert_eq!(layout.is_axis_zero(5, &["pp", "ep"]), Ok(true));
    assert_eq!(layout.is_axis_zero(5, &["pp", "tp"]), Ok(false));
}

#[test]
fn empty_and_repeated_axes_are_refused() {
    assert_eq!(RankLayout::new([("dp", 0)]), Err(LayoutError::EmptyAxis("dp".to_owned())));
    assert_eq!(RankLayout::line(0), Err(LayoutError::EmptyAxis("rank".to_owned())));
    assert_eq!(RankLayout::new([("dp", 1), ("dp", 2)]), Err(LayoutError::DuplicateAxis("dp".to_owned())));
    let error = RankLayout::from_ranks([("dp", 2)], vec![0, 1, 2]).unwrap_err();
    assert_eq!(error, LayoutError::SizeMismatch { expected: 2, found: 3 });
    assert!(RankLayout::new([("a", usize::MAX), ("b", 2)]).is_err());
}

#[test]
fn model_parallelism_must_divide_the_world() {
    let degrees = Parallelism { pipeline: 2, context: 1, tensor: 2 };
    let layout = RankLayout::training(8, degrees).unwrap();
    assert_eq!(layout.axis_size("data_parallel"), Ok(2));
    assert_eq!(layout.ranks_by_coordinates(&[("data_parallel", 0)]), Ok(vec![0, 1, 4, 5]));
    let layout = RankLayout::generation(8, degrees).unwrap();
    assert_eq!(layout.ranks_by_coordinates(&[("data_parallel", 0)]), Ok(vec![0, 1, 2, 3]));
    for world_size in [0, 2, 6] {
        assert!(matches!(RankLayout::training(world_size, degrees), Err(LayoutError::Indivisible { .. })));
    }
    assert!(RankLayout::training(8, Parallelism { tensor: 0, ..degrees }).is_err());
}

proptest! {
    #[test]
    fn coordinates_lead_back_to_their_rank(sizes in proptest::collection::vec(1usize..4, 1..5)) {
        let names = ["a", "b", "c", "d"];
        let layout = RankLayout::new(names.into_iter().zip(sizes)).unwrap();
        for &rank in layout.ranks() {
            let fixed: Vec<(&str, usize)> = names.into_iter().zip(layout.coordinates(rank).unwrap()).collect();
            prop_assert_eq!(layout.ranks_by_coordinates(&fixed), Ok(vec![rank]));
            prop_assert_eq!(layout.fix(&fixed), Ok(SubLayout::Rank(rank)));
        }
    }
}
