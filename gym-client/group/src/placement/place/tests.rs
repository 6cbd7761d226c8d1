use super::super::spec::GpuIds;
use super::*;

fn gpus(ids: std::ops::Range<u32>) -> Vec<String> {
    ids.map(|id| id.to_string()).collect()
}

fn node(name: &str, count: u32) -> NodeResources {
    NodeResources::new(name, 64, gpus(0..count))
}

fn spec(counts: &[u32], strategy: PlacementStrategy) -> ClusterSpec {
    ClusterSpec { name: "train".to_owned(), placement_group_strategy: strategy, ..ClusterSpec::new(counts) }
}

/// Returns the host of each group's first bundle.
fn hosts(placement: &Placement) -> Vec<usize> {
    placement.groups.iter().map(|group| group.bundles[0].host).collect()
}

#[test]
fn empty_nodes_are_left_out_and_keep_their_index() {
    let nodes = [node("a", 8), node("b", 8), node("c", 8)];
    let placement = place(&spec(&[4, 0, 2], PlacementStrategy::Spread), &nodes, false).unwrap();
    let groups: Vec<(&str, usize)> =
        placement.groups.iter().map(|group| (group.name.as_str(), group.bundles.len())).collect();
    assert_eq!(groups, [("train-node0", 4), ("train-node2", 2)]);
    assert!(placement.groups[1].bundles.iter().all(|bundle| bundle.node == 2));
}

#[test]
fn a_heterogeneous_cluster_finds_the_machines_that_fit() {
    let nodes = [node("a", 2), node("b", 8), node("c", 4)];
    let placement = place(&spec(&[4, 8, 2], PlacementStrategy::StrictSpread), &nodes, false).unwrap();
    assert_eq!(hosts(&placement), [2, 1, 0]);
    let simulated = [4, 8, 2].map(|count| NodeResources::simulated("s", count));
    let placement = place(&spec(&[4, 8, 2], PlacementStrategy::Spread), &simulated, false).unwrap();
    assert_eq!(hosts(&placement), [0, 1, 2]);
    assert!(placement.groups[1].bundles.iter().all(|bundle| bundle.gpu.is_none()));
}

#[test]
fn strategies_share_machines_or_keep_apart() {
    let nodes = [node("a", 8), node("b", 8)];
    let hosts_of = |counts: &[u32], strategy| place(&spec(counts, strategy), &nodes, false).map(|it| hosts(&it));
    assert_eq!(hosts_of(&[4, 4], PlacementStrategy::Pack).unwrap(), [0, 0]);
    assert_eq!(hosts_of(&[4, 4], PlacementStrategy::StrictPack).unwrap(), [0, 0]);
    assert_eq!(hosts_of(&[4, 4], PlacementStrategy::Spread).unwrap(), [0, 1]);
    assert_eq!(hosts_of(&[4, 4], PlacementStrategy::StrictSpread).unwrap(), [0, 1]);
    assert_eq!(hosts_of(&[4, 4, 4], PlacementStrategy::Spread).unwrap(), [0, 1, 0]);
    assert_eq!(hosts_of(&[4, 4, 8], PlacementStrategy::Spread).unwrap(), [0, 0, 1]);
    let codes = [
        hosts_of(&[8, 4], PlacementStrategy::StrictPack).unwrap_err().code(),
        hosts_of(&[4, 4, 4], PlacementStrategy::StrictSpread).unwrap_err().code(),
    ];
    assert_eq!(codes, [Code::ResourceExhausted; 2]);
}

#[test]
fn what_is_missing_is_said_with_what_is_there() {
    let error = place(&spec(&[8, 8], PlacementStrategy::Spread), &[node("a", 8), node("b", 2)], false).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    let text = error.to_string();
    assert!(text.contains("16 GPUs are asked for, 10 are there"), "{text}");
    assert!(text.contains("a has 64 CPUs, GPUs [0, 1, 2, 3, 4, 5, 6, 7]; b has 64 CPUs, GPUs [0, 1]"), "{text}");
    let error = place(&spec(&[4], PlacementStrategy::Spread), &[], false).unwrap_err();
    assert!(error.to_string().contains("there is no node"), "{error}");
    let cpus = ClusterSpec { use_gpus: false, ..ClusterSpec::new([4]) };
    let error = place(&cpus, &[NodeResources::new("a", 2, Vec::new())], false).unwrap_err();
    assert!(error.to_string().contains("4 CPUs are asked for, 2 are there"), "{error}");
    assert!(
        error.to_string().contains("fix: ask for fewer bundles; on a small machine, VirtualCluster::simulate_nodes"),
        "{error}"
    );
}

#[test]
fn a_cluster_without_gpus_needs_none() {
    let cpus = ClusterSpec { use_gpus: false, ..ClusterSpec::new([2]) };
    let placement = place(&cpus, &[NodeResources::new("a", 2, Vec::new())], false).unwrap();
    assert!(placement.groups[0].bundles.len() == 2 && placement.groups[0].bundles[0].gpu.is_none());
}

#[test]
fn named_gpus_are_those_that_the_bundles_get() {
    let with = |counts: &[u32], gpu_ids, strategy| ClusterSpec { gpu_ids, ..spec(counts, strategy) };
    let of = |placement: &Placement, group: usize| -> Vec<String> {
        placement.groups[group].bundles.iter().filter_map(|bundle| bundle.gpu.clone()).collect()
    };
    let halves = GpuIds::PerNode(vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]]);
    let placement = place(&with(&[4, 4], halves, PlacementStrategy::Spread), &[node("a", 8)], false).unwrap();
    assert_eq!((of(&placement, 0), of(&placement, 1)), (gpus(0..4), gpus(4..8)));

    let same = || GpuIds::PerNode(vec![vec![0, 1], vec![0, 1]]);
    let pack = PlacementStrategy::Pack;
    let placement = place(&with(&[2, 2], same(), pack), &[node("a", 8), node("b", 8)], false).unwrap();
    assert_eq!(hosts(&placement), [0, 1]);
    let error = place(&with(&[2, 2], same(), pack), &[node("a", 8)], false).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);

    let error = place(&with(&[2], GpuIds::Flat(vec![0, 9]), pack), &[node("a", 8)], false).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.to_string().contains("gpu_ids names GPU 9; a has"), "{error}");
}

#[test]
fn c166_a_unified_cluster_has_an_order_and_one_per_node_has_none() {
    let one = [node("a", 2)];
    let unified = place(&spec(&[2], PlacementStrategy::Spread), &one, true).unwrap();
    assert_eq!((unified.groups[0].name.as_str(), unified.sorted), ("train-unified", Some(vec![0, 1])));
    assert_eq!(place(&spec(&[2], PlacementStrategy::Spread), &one, false).unwrap().sorted, None);
}

#[test]
fn spreading_a_unified_cluster_interleaves_and_its_order_puts_machines_together() {
    let nodes = [node("a", 3), node("b", 3)];
    let spread = place(&spec(&[3, 3], PlacementStrategy::Spread), &nodes, true).unwrap();
    let on: Vec<usize> = spread.groups[0].bundles.iter().map(|bundle| bundle.host).collect();
    assert_eq!(on, [0, 1, 0, 1, 0, 1]);
    assert_eq!(spread.sorted, Some(vec![0, 2, 4, 1, 3, 5]));
    let packed = place(&spec(&[3, 3], PlacementStrategy::Pack), &nodes, true).unwrap();
    let on: Vec<usize> = packed.groups[0].bundles.iter().map(|bundle| bundle.host).collect();
    assert_eq!(on, [0, 0, 0, 1, 1, 1]);
}

#[test]
fn segments_are_whole_nodes_of_one_domain_and_the_other_nodes_are_left_alone() {
    let in_domain = |(domain, rank): (&str, u32)| NodeResources {
        topology: Topology { domain: Some(domain.to_owned()), rank: Some(rank) },
        ..node(&format!("{domain}{rank}"), 2)
    };
    let nodes = [("A", 1), ("B", 2), ("B", 3), ("B", 4)].map(in_domain);
    let with = |counts: &[u32]| ClusterSpec {
        segment_size: std::num::NonZeroU32::new(2),
        num_gpus_per_node: std::num::NonZeroU32::new(2).unwrap(),
        ..spec(counts, PlacementStrategy::Pack)
    };
    for unified in [true, false] {
        let placement = place(&with(&[2, 2]), &nodes, unified).unwrap();
        let used: BTreeSet<usize> =
            placement.groups.iter().flat_map(|group| group.bundles.iter().map(|bundle| bundle.host)).collect();
        assert_eq!(used, BTreeSet::from([1, 2]), "unified: {unified}");
    }
    let error = place(&with(&[2, 2, 2]), &nodes, true).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.to_string().contains("3 nodes must be divisible by the segment size 2"), "{error}");
    let error = place(&with(&[2; 4]), &nodes, true).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().contains("cannot form 2 segments of 2 nodes"), "{error}");
    let anywhere = [node("a", 2), node("b", 2), node("c", 2)];
    let error = place(&with(&[2, 2]), &anywhere, true).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().contains("no node has a known NVLink domain"), "c190: {error}");
}

/// Creates a node from `name`, `domain:name` or `domain:name:rank`, whose GPUs are listed in descending order.
fn located(text: &str, count: u32) -> NodeResources {
    let (domain, name, rank) = match text.split(':').collect::<Vec<_>>()[..] {
        [name] => (None, name, None),
        [domain, name] => (Some(domain), name, None),
        [domain, name, rank] => (Some(domain), name, Some(rank.parse().unwrap())),
        _ => panic!("{text}"),
    };
    let topology = Topology { domain: domain.filter(|domain| !domain.is_empty()).map(str::to_owned), rank };
    NodeResources { topology, ..NodeResources::new(name, 64, gpus(0..count).into_iter().rev().collect()) }
}

/// Returns the machines and GPUs of each engine, such as `a.0-3` or `a.0,b.0`.
fn engines_of(placement: &Placement, nodes: &[NodeResources], size: u32) -> Vec<String> {
    let on = placement.tied_groups(std::num::NonZeroU32::new(size).unwrap()).unwrap();
    let workers = placement.workers("vllm", &on).unwrap();
    let engine = |workers: &[crate::placement::WorkerPlacement]| -> String {
        let machines = workers.chunk_by(|a, b| nodes[a.host].machine() == nodes[b.host].machine());
        let text = |on: &[crate::placement::WorkerPlacement]| {
            let gpus: Vec<&str> = on.iter().map(|worker| worker.gpu.as_deref().unwrap()).collect();
            let machine = nodes[on[0].host].machine();
            if gpus.len() > 1 {
                format!("{machine}.{}-{}", gpus[0], gpus[gpus.len() - 1])
            } else {
                format!("{machine}.{}", gpus[0])
            }
        };
        machines.map(text).collect::<Vec<_>>().join(",")
    };
    workers.chunk_by(|a, b| a.group == b.group).map(engine).collect()
}

/// A case: what it is, the nodes and their GPUs, the size of an engine, and the engines.
type Case<'a> = (&'a str, &'a [(&'a str, u32)], u32, &'a [&'a str]);

#[test]
fn an_engine_stays_on_one_node_and_in_one_domain_where_it_fits() {
    let table: &[Case] = &[
        (
            "two domains that count from 1",
            &[("B:b1:1", 4), ("A:a2:2", 4), ("A:a1:1", 4), ("B:b2:2", 4)],
            4,
            &["a1.0-3", "a2.0-3", "b1.0-3", "b2.0-3"],
        ),
        (
            "two domains that count from 1, engines of two nodes",
            &[("B:b1:1", 4), ("A:a2:2", 4), ("A:a1:1", 4), ("B:b2:2", 4)],
            8,
            &["a1.0-3,a2.0-3", "b1.0-3,b2.0-3"],
        ),
        (
            "domains without ranks",
            &[("B:n3", 4), ("A:n10", 4), ("B:n1", 4), ("A:n2", 4)],
            4,
            &["n2.0-3", "n10.0-3", "n1.0-3", "n3.0-3"],
        ),
        (
            "one domain with ranks, one without",
            &[("A:a2:2", 4), ("B:b2", 4), ("A:a1:1", 4), ("B:b1", 4)],
            4,
            &["b1.0-3", "b2.0-3", "a1.0-3", "a2.0-3"],
        ),
        ("one node without a domain", &[("A:a1:1", 4), ("x", 4), ("A:a2:2", 4)], 4, &["x.0-3", "a1.0-3", "a2.0-3"]),
        ("two nodes with the same rank", &[("A:a2:1", 4), ("A:a1:1", 4)], 4, &["a1.0-3", "a2.0-3"]),
        ("ranks without domains", &[(":n1:2", 4), (":n2:1", 4)], 4, &["n2.0-3", "n1.0-3"]),
        ("no topology", &[("node10", 4), ("node2", 4)], 4, &["node2.0-3", "node10.0-3"]),
        ("GPUs by number", &[("n", 11)], 11, &["n.0-10"]),
        ("engines of two", &[("n1", 4), ("n2", 4)], 2, &["n1.0-1", "n1.2-3", "n2.0-1", "n2.2-3"]),
        ("engines of four on nodes of eight", &[("n1", 8), ("n2", 8)], 4, &["n1.0-3", "n1.4-7", "n2.0-3", "n2.4-7"]),
        ("engines of eight on nodes of eight", &[("n2", 8), ("n1", 8)], 8, &["n1.0-7", "n2.0-7"]),
        ("engines of eight on nodes of four", &[("n2", 4), ("n1", 4)], 8, &["n1.0-3,n2.0-3"]),
        (
            "engines of eight on nodes of four and eight",
            &[("n1", 4), ("n2", 8), ("n3", 4)],
            8,
            &["n1.0-3,n3.0-3", "n2.0-7"],
        ),
        ("remainders", &[("n1", 6), ("n2", 6)], 4, &["n1.0-3", "n1.4-5,n2.4-5", "n2.0-3"]),
        (
            "remainders of a domain",
            &[("A:a1:1", 3), ("B:b1:1", 3), ("A:a2:2", 3), ("B:b2:2", 3)],
            4,
            &["a1.0-2,a2.0", "a2.1-2,b2.1-2", "b1.0-2,b2.0"],
        ),
    ];
    for (what, nodes, size, engines) in table {
        let nodes: Vec<NodeResources> = nodes.iter().map(|(text, count)| located(text, *count)).collect();
        let counts: Vec<u32> = nodes.iter().map(|node| node.gpu_count() as u32).collect();
        for strategy in [PlacementStrategy::Spread, PlacementStrategy::Pack] {
            let placement = place(&spec(&counts, strategy), &nodes, true).unwrap();
            assert_eq!(engines_of(&placement, &nodes, *size), *engines, "{what}, {strategy:?}");
        }
    }
}

#[test]
fn gpus_whose_names_are_no_numbers_keep_the_order_of_their_node() {
    let names = ["GPU-f", "GPU-0", "7", "GPU-a"].map(str::to_owned);
    for strategy in [PlacementStrategy::Spread, PlacementStrategy::Pack] {
        let nodes = ["n2", "n1"].map(|name| NodeResources::new(name, 64, names.to_vec()));
        let placement = place(&spec(&[4, 4], strategy), &nodes, true).unwrap();
        let workers = placement.workers("w", &crate::placement::WorkersOn::EachBundle).unwrap();
        let order: Vec<&str> = workers.iter().map(|worker| worker.gpu.as_deref().unwrap()).collect();
        assert_eq!(order, [names.each_ref(), names.each_ref()].concat(), "{strategy:?}");
    }
}

#[test]
fn engines_stay_on_a_machine_that_has_a_node_for_each_bundle() {
    let nodes: Vec<NodeResources> = (0..8)
        .map(|at| NodeResources::new(format!("share000{at}@10.0.0.{}", 10 - at % 2), 1, vec![(at / 2).to_string()]))
        .collect();
    let placement = place_each(&spec(&[4, 4], PlacementStrategy::Spread), &nodes, true).unwrap();
    assert_eq!(engines_of(&placement, &nodes, 4), ["10.0.0.9.0-3", "10.0.0.10.0-3"]);
    let labels: Vec<u32> = placement
        .workers("w", &placement.tied_groups(std::num::NonZeroU32::new(4).unwrap()).unwrap())
        .unwrap()
        .iter()
        .map(|worker| worker.node)
        .collect();
    assert_eq!(labels, [0, 0, 0, 0, 1, 1, 1, 1]);
}

#[test]
fn a_packed_unified_cluster_is_on_few_machines() {
    let packed = |counts: &[u32], nodes: &[u32]| -> Vec<usize> {
        let nodes: Vec<NodeResources> =
            nodes.iter().zip(0..).map(|(gpus, at)| node(&format!("n{at}"), *gpus)).collect();
        let placement = place(&spec(counts, PlacementStrategy::Pack), &nodes, true).unwrap();
        placement.groups[0].bundles.iter().map(|bundle| bundle.host).collect()
    };
    assert_eq!(packed(&[4], &[2, 4]), [1; 4], "a machine that has room for all is not passed over");
    assert_eq!(packed(&[2], &[8, 2]), [1; 2]);
    assert_eq!(packed(&[8], &[2, 4, 4]), [1, 1, 1, 1, 2, 2, 2, 2]);
    assert_eq!(packed(&[2, 2, 2], &[3, 3]), [0, 0, 0, 1, 1, 1]);
}

proptest::proptest! {
    /// With one machine for each logical node, the strict strategy succeeds whenever sorted sizes fit sorted machines.
    #[test]
    fn strict_spread_fails_only_when_nothing_fits(
        counts in proptest::collection::vec(1u32..6, 1..6), offered in proptest::collection::vec(0u32..6, 1..7),
    ) {
        let nodes: Vec<NodeResources> = offered.iter().map(|count| node("n", *count)).collect();
        let placed = place(&spec(&counts, PlacementStrategy::StrictSpread), &nodes, false);
        let (mut wanted, mut there) = (counts.clone(), offered.clone());
        wanted.sort_unstable_by_key(|count| Reverse(*count));
        there.sort_unstable_by_key(|count| Reverse(*count));
        let feasible = wanted.len() <= there.len() && wanted.iter().zip(&there).all(|(wanted, there)| wanted <= there);
        proptest::prop_assert_eq!(placed.is_ok(), feasible);
        if let Ok(placement) = placed {
            let distinct: BTreeSet<usize> = hosts(&placement).into_iter().collect();
            proptest::prop_assert_eq!(distinct.len(), counts.len());
        }
    }

    #[test]
    fn no_gpu_is_given_twice_and_no_machine_gives_more_than_it_has(
        counts in proptest::collection::vec(0u32..5, 1..6), offered in proptest::collection::vec(0u32..9, 1..5), unified: bool,
    ) {
        let nodes: Vec<NodeResources> = offered.iter().map(|count| node("n", *count)).collect();
        for strategy in [PlacementStrategy::Pack, PlacementStrategy::Spread, PlacementStrategy::StrictPack] {
            let Ok(placement) = place(&spec(&counts, strategy), &nodes, unified) else { continue };
            let all: Vec<(usize, &Option<String>)> =
                placement.groups.iter().flat_map(|group| group.bundles.iter().map(|bundle| (bundle.host, &bundle.gpu))).collect();
            let distinct: BTreeSet<_> = all.iter().collect();
            proptest::prop_assert_eq!(distinct.len(), counts.iter().sum::<u32>() as usize);
            let offered_there = |(host, gpu): &(usize, &Option<String>)| {
                gpu.as_ref().is_some_and(|gpu| gpu.parse::<u32>().unwrap() < offered[*host])
            };
            proptest::prop_assert!(all.iter().all(offered_there));
        }
    }

    #[test]
    fn as_many_engines_as_fit_stay_on_a_machine_and_none_is_lost(
        nodes in proptest::collection::vec((0_u8..3, proptest::option::of(1_u32..4), 1_u32..9), 1..7), size in 1_u32..9, spread: bool,
    ) {
        let nodes: Vec<NodeResources> = nodes.into_iter().zip(0..).map(|((domain, rank, count), at)| {
            let domain = (domain > 0).then(|| format!("d{domain}"));
            NodeResources { topology: Topology { domain, rank }, ..node(&format!("n{at}"), count) }
        }).collect();
        let counts: Vec<u32> = nodes.iter().map(|node| node.gpu_count() as u32).collect();
        proptest::prop_assume!(counts.iter().sum::<u32>() >= size);
        let strategy = if spread { PlacementStrategy::Spread } else { PlacementStrategy::Pack };
        let placement = place(&spec(&counts, strategy), &nodes, true).unwrap();
        let hosts: Vec<usize> = placement.sorted.iter().flatten().map(|at| placement.groups[0].bundles[*at as usize].host).collect();
        let runs: Vec<usize> = hosts.chunk_by(PartialEq::eq).map(|run| run[0]).collect();
        proptest::prop_assert_eq!(runs.len(), nodes.len(), "the bundles of a node are adjacent");
        let domains = runs.chunk_by(|a, b| nodes[*a].topology.domain == nodes[*b].topology.domain).count();
        let known: BTreeSet<&Option<String>> = nodes.iter().map(|node| &node.topology.domain).collect();
        proptest::prop_assert_eq!(domains, known.len(), "the nodes of a domain are adjacent");
        let engines = engines_of(&placement, &nodes, size);
        proptest::prop_assert_eq!(engines.len() as u32, counts.iter().sum::<u32>() / size);
        let on_one = engines.iter().filter(|engine| !engine.contains(',')).count() as u32;
        proptest::prop_assert!(on_one >= counts.iter().map(|count| count / size).sum());
    }
}
