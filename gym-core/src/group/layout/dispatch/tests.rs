//! Conformance tests of calls to all ranks and of sharded calls, as plans.

use proptest::prelude::*;

use super::*;
use crate::group::layout::REPLICATED_AXES;

fn dp2_tp2() -> RankLayout {
    RankLayout::new([("data_parallel", 2), ("tensor_parallel", 2)]).unwrap()
}

fn called(plan: &[Assignment]) -> Vec<Rank> {
    plan.iter().map(|part| part.rank).collect()
}

fn collected(plan: &[Assignment]) -> Vec<Rank> {
    plan.iter().filter(|part| part.collect).map(|part| part.rank).collect()
}

fn shards(plan: &[Assignment]) -> Vec<Option<usize>> {
    plan.iter().map(|part| part.shard).collect()
}

#[test]
fn c144_every_rank_gets_the_whole_batch_and_answers() {
    let plan = Dispatch::all().plan(&RankLayout::line(2).unwrap()).unwrap();
    assert_eq!((called(&plan), collected(&plan), shards(&plan)), (vec![0, 1], vec![0, 1], vec![None, None]));
}

#[test]
fn c145_rank_0_only_axes_call_one_rank_of_each_line() {
    let plan = Dispatch::all().run_rank_0_only_axes(["tensor_parallel"]).plan(&dp2_tp2()).unwrap();
    assert_eq!((called(&plan), collected(&plan)), (vec![0, 2], vec![0, 2]));
}

#[test]
fn c146_all_axes_rank_0_only_call_one_rank() {
    let plan = Dispatch::all().run_rank_0_only_axes(["data_parallel", "tensor_parallel"]).plan(&dp2_tp2()).unwrap();
    assert_eq!(called(&plan), [0]);
}

#[test]
fn rank_0_only_axes_that_the_layout_lacks_are_passed_over() {
    let plan = Dispatch::all().run_rank_0_only_axes(REPLICATED_AXES).plan(&dp2_tp2()).unwrap();
    assert_eq!(called(&plan), [0, 2]);
}

#[test]
fn c150_a_line_of_two_gets_two_shards() {
    let plan = Dispatch::shard("rank").plan(&RankLayout::line(2).unwrap()).unwrap();
    assert_eq!((shards(&plan), collected(&plan)), (vec![Some(0), Some(1)], vec![0, 1]));
}

#[test]
fn c151_replicated_axis_gets_the_same_shard() {
    let plan = Dispatch::shard("data_parallel").replicate(["tensor_parallel"]).plan(&dp2_tp2()).unwrap();
    assert_eq!(shards(&plan), [Some(0), Some(0), Some(1), Some(1)]);
    assert_eq!(collected(&plan), [0, 1, 2, 3]);
}

#[test]
fn c152_of_a_free_axis_only_coordinate_0_is_called() {
    let plan = Dispatch::shard("tensor_parallel").plan(&dp2_tp2()).unwrap();
    assert_eq!((called(&plan), collected(&plan)), (vec![0, 1], vec![0, 1]));
    assert_eq!(shards(&plan), [Some(0), Some(1)]);
}

#[test]
fn c153_dummy_calls_reach_the_rest_of_a_free_axis_without_data() {
    let plan = Dispatch::shard("tensor_parallel").free(Free::Dummy).plan(&dp2_tp2()).unwrap();
    assert_eq!((called(&plan), collected(&plan)), (vec![0, 1, 2, 3], vec![0, 1]));
    assert_eq!(shards(&plan), [Some(0), Some(1), None, None]);
    assert_eq!(plan.iter().map(|part| part.dummy).collect::<Vec<_>>(), [false, false, true, true]);
}

#[test]
fn c154_an_axis_collected_once_answers_from_coordinate_0() {
    let dispatch = Dispatch::shard("data_parallel").replicate(["tensor_parallel"]).collect_once(["tensor_parallel"]);
    let plan = dispatch.plan(&dp2_tp2()).unwrap();
    assert_eq!((called(&plan), collected(&plan)), (vec![0, 1, 2, 3], vec![0, 2]));
}

#[test]
fn c155_an_axis_is_not_sharded_and_replicated() {
    let error = Dispatch::shard("data_parallel").replicate(["data_parallel"]).plan(&dp2_tp2()).unwrap_err();
    assert_eq!(error.to_string(), "axis 'data_parallel' is both sharded and replicated");
    assert!(Dispatch::shard("data_parallel").and_shard("data_parallel").plan(&dp2_tp2()).is_err());
    assert!(Dispatch::shard("data_parallel").run_rank_0_only_axes(["data_parallel"]).plan(&dp2_tp2()).is_err());
}

#[test]
fn c156_a_group_without_named_axes_refuses_to_shard_by_one() {
    let error = Dispatch::shard("data_parallel").plan(&RankLayout::line(2).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "unknown axis 'data_parallel'; this layout has rank");
}

#[test]
fn an_unknown_axis_is_refused_wherever_it_stands() {
    for dispatch in [
        Dispatch::shard("dp"),
        Dispatch::shard("data_parallel").replicate(["dp"]),
        Dispatch::shard("data_parallel").collect_once(["dp"]),
    ] {
        let error = dispatch.plan(&dp2_tp2()).unwrap_err();
        assert!(matches!(error, PlanError::Layout(LayoutError::UnknownAxis { .. })), "{dispatch:?}");
    }
    assert!(Dispatch::shard("dp").shards(&dp2_tp2()).is_err());
}

#[test]
fn one_rank_is_called_alone() {
    let plan = Dispatch::rank(3).plan(&dp2_tp2()).unwrap();
    assert_eq!(plan, [Assignment { rank: 3, shard: None, collect: true, dummy: false }]);
    assert_eq!(Dispatch::rank(4).plan(&dp2_tp2()), Err(PlanError::Layout(LayoutError::UnknownRank(4))));
    assert_eq!(Dispatch::rank(0).replicate(["tensor_parallel"]).plan(&dp2_tp2()), Err(PlanError::OneRank(0)));
}

#[test]
fn two_sharded_axes_split_the_shards_of_the_first() {
    let dispatch = Dispatch::shard("tensor_parallel").and_shard("data_parallel");
    assert_eq!(dispatch.shards(&dp2_tp2()), Ok(Some(4)));
    assert_eq!(shards(&dispatch.plan(&dp2_tp2()).unwrap()), [Some(0), Some(2), Some(1), Some(3)]);
}

#[test]
fn assignments_ascend_by_rank_whatever_the_layout() {
    let layout = RankLayout::from_ranks([("data", 2)], vec![7, 3]).unwrap();
    let plan = Dispatch::shard("data").plan(&layout).unwrap();
    assert_eq!(plan.iter().map(|part| (part.rank, part.shard)).collect::<Vec<_>>(), [(3, Some(1)), (7, Some(0))]);
}

proptest! {
    #[test]
    fn every_shard_is_answered_for_at_least_once(
        sizes in proptest::collection::vec(1usize..4, 4), roles in proptest::collection::vec(0..3, 4), dummy: bool,
    ) {
        let names = ["a", "b", "c", "d"];
        let layout = RankLayout::new(names.into_iter().zip(sizes)).unwrap();
        let of = |role| names.into_iter().zip(&roles).filter(move |(_, r)| **r == role).map(|(name, _)| name);
        let free = if dummy { Free::Dummy } else { Free::Idle };
        let mut dispatch = Dispatch::shard("a").free(free).replicate(of(1).filter(|name| *name != "a"));
        for axis in of(0).filter(|name| *name != "a") {
            dispatch = dispatch.and_shard(axis);
        }
        let dispatch = dispatch.collect_once(of(1));
        let plan = dispatch.plan(&layout).unwrap();
        for shard in 0..dispatch.shards(&layout).unwrap().unwrap() {
            prop_assert!(plan.iter().any(|part| part.shard == Some(shard)));
        }
        prop_assert!(plan.iter().any(|part| part.collect));
        prop_assert!(plan.iter().all(|part| part.dummy == part.shard.is_none()));
        prop_assert!(plan.iter().all(|part| !(part.dummy && part.collect)));
        prop_assert!(!dummy || plan.len() == layout.size());
    }
}
