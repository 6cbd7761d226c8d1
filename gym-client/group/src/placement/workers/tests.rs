use super::super::{ClusterSpec, NodeResources, place};
use super::*;

fn placement(counts: &[u32], unified: bool) -> Placement {
    let nodes: Vec<NodeResources> =
        counts.iter().enumerate().map(|(at, count)| NodeResources::simulated(format!("n{at}"), *count)).collect();
    let spec = ClusterSpec { num_gpus_per_node: NonZeroU32::new(2).unwrap(), ..ClusterSpec::new(counts) };
    place(&ClusterSpec { placement_group_strategy: PlacementStrategy::Pack, ..spec }, &nodes, unified).unwrap()
}

fn size(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).unwrap()
}

#[test]
fn c137_every_bundle_has_a_worker() {
    let workers = placement(&[2], false).workers("policy", &WorkersOn::EachBundle).unwrap();
    let places: Vec<(Rank, &str, u32, u32)> =
        workers.iter().map(|worker| (worker.rank, worker.name.as_str(), worker.node, worker.bundle)).collect();
    assert_eq!(places, [(0, "policy-0-0", 0, 0), (1, "policy-0-1", 0, 1)]);
    assert_eq!(leaders(&workers), [0, 1]);
}

#[test]
fn c157_workers_per_node_fit_the_nodes_and_their_bundles() {
    let two = placement(&[2, 2], false);
    assert_eq!(two.workers("w", &WorkersOn::PerNode(1)).unwrap().len(), 2);
    assert_eq!(two.workers("w", &WorkersOn::PerNodeList(vec![2, 1])).unwrap().len(), 3);
    let error = two.workers("w", &WorkersOn::PerNodeList(vec![1])).unwrap_err();
    assert!(error.to_string().contains("has 1 entries for 2 placement groups"), "{error}");
    let error = two.workers("w", &WorkersOn::PerNodeList(vec![2, 3])).unwrap_err();
    assert!(error.to_string().contains("placement group 1 has 2 bundles, but 3 workers were requested"), "{error}");
}

#[test]
fn c158_there_is_a_leader_for_each_tied_group_and_no_other() {
    let placement = placement(&[4, 4], false);
    let workers = placement.workers("vllm", &placement.tied_groups(size(2)).unwrap()).unwrap();
    assert_eq!(leaders(&workers), [0, 2, 4, 6]);
    assert_eq!(leaders(&workers).get(4), None);
    assert_eq!((workers[2].bundles.clone(), workers[3].bundles.clone()), (Some(vec![2, 3]), None));
    assert_eq!((workers[3].name.as_str(), workers[3].bundle, workers[3].group), ("vllm-grp1-1", 3, 1));
}

#[test]
fn bundles_that_make_no_whole_engine_are_unused() {
    let tied = placement(&[3, 2], false).tied_groups(size(2)).unwrap();
    assert_eq!(tied, WorkersOn::Tied(vec![(0, vec![0, 1]), (1, vec![0, 1])]));
    let error = placement(&[2, 2], false).tied_groups(size(4)).unwrap_err();
    assert!(error.to_string().contains("unable to allocate any worker groups"), "{error}");
    let tied = placement(&[2, 2], true).tied_groups(size(4)).unwrap();
    assert_eq!(tied, WorkersOn::Tied(vec![(0, vec![0, 1, 2, 3])]));
}

#[test]
fn in_a_unified_cluster_nodes_are_labels() {
    let unified = placement(&[2, 2], true);
    let nodes: Vec<u32> =
        unified.workers("w", &WorkersOn::EachBundle).unwrap().iter().map(|worker| worker.node).collect();
    assert_eq!(nodes, [0, 0, 1, 1]);
    let tied = unified.tied_groups(size(2)).unwrap();
    assert_eq!(tied, WorkersOn::Tied(vec![(0, vec![0, 1]), (1, vec![2, 3])]));
    assert_eq!(unified.workers("w", &tied).unwrap()[2].host, 1);
}

#[test]
fn tied_groups_name_bundles_that_are_there_once() {
    let two = placement(&[2, 2], false);
    for (tied, text) in [
        (vec![(0, vec![0, 2])], "there is no bundle 2 on node 0"),
        (vec![(2, vec![0])], "there is no bundle 0 on node 2"),
        (vec![(0, vec![0, 1]), (0, vec![1])], "bundle 1 of node 0 is named twice"),
        (vec![(0, vec![])], "tied group 0 has no bundles"),
    ] {
        let error = two.workers("w", &WorkersOn::Tied(tied)).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn c192_a_model_spans_nodes_when_ranks_that_must_be_close_are_more_than_a_node_has() {
    let span = ModelSpan::default();
    assert!(ModelSpan { tensor: 8, ..span }.megatron_spans(4));
    assert!(!ModelSpan { tensor: 2, pipeline: 2, context: 2, ..span }.megatron_spans(4));
    assert!(!ModelSpan { tensor: 4, ..span }.megatron_spans(4));
    assert!(ModelSpan { tensor: 2, expert: 8, ..span }.megatron_spans(4));
    assert!(!ModelSpan { tensor: 2, ..ModelSpan { tensor: 8, ..span } }.megatron_spans(4));
    assert!(ModelSpan { tensor: 4, pipeline: 2, ..span }.engine_spans(4));
    assert_eq!(ModelSpan::generation_strategy(true), None);
    assert_eq!(ModelSpan::generation_strategy(false), Some(PlacementStrategy::Pack));
}
