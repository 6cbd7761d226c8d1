//! Network topology: ordering of bundles by NVLink domain, and selection of whole segments of nodes within one domain.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use gym_core::{Code, Error, Result};

/// The position of a node in the network. Unknown parts come first in every order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Topology {
    /// The NVLink domain.
    pub domain: Option<String>,
    /// The position among the nodes, or among those of the domain, from 1.
    pub rank: Option<u32>,
}

/// The location of a placed bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleLocation {
    /// The name of the node.
    pub node: String,
    /// The position of the GPU on its node.
    pub gpu: u32,
    /// The position of the node in the network.
    pub topology: Topology,
}

/// Segments of nodes within one domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments {
    /// Number of nodes in a segment.
    pub nodes: NonZeroUsize,
    /// Number of GPUs, and so of bundles, on each node.
    pub gpus_per_node: NonZeroUsize,
}

/// Returns the bundles, as positions in `locations`, in the order in which ranks are assigned to them. The order is by domain
/// (the one with the lowest rank first), rank, node and GPU. The bundles of a node are therefore adjacent, and so are the nodes of
/// a domain. Domains of the same lowest rank, or without ranks, go by name, and so do nodes; numbers in names count as numbers, so
/// `node2` precedes `node10`. An unknown rank comes first, and so does an unknown domain among those of the same
/// lowest rank. With `segments`, bundles that do not belong to a whole segment
/// are dropped. If no topology is known, `segments` has no effect.
///
/// NeMo RL (`_sort_bundle_indices_by_topology`) orders by the domain's lowest rank, rank and GPU only. That interleaves the nodes of
/// two domains that both count from 1, and all nodes without a rank, so engines span nodes for no reason. Without topology, it
/// orders by Ray's node id, which is random; ours by name, which is the same in each run.
#[must_use]
pub fn order_bundles(locations: &[BundleLocation], segments: Option<Segments>) -> Vec<usize> {
    let mut order: Vec<usize> = (0..locations.len()).collect();
    let mut first_rank: BTreeMap<&Option<String>, Option<u32>> = BTreeMap::new();
    let mut nodes: BTreeMap<&Option<String>, BTreeSet<&str>> = BTreeMap::new();
    for BundleLocation { node, topology: Topology { domain, rank }, .. } in locations {
        let first = first_rank.entry(domain).or_insert(*rank);
        *first = (*first).min(*rank);
        nodes.entry(domain).or_default().insert(node);
    }
    order.sort_by_cached_key(|at| {
        let BundleLocation { node, gpu, topology: Topology { domain, rank } } = &locations[*at];
        (first_rank[domain], domain.as_deref().map(natural), *rank, natural(node), *gpu)
    });
    let known = locations.iter().any(|location| location.topology != Topology::default());
    if let Some(Segments { nodes: segment, gpus_per_node }) = segments.filter(|_| known) {
        let whole = |domain| nodes[domain].len() / segment * segment.get() * gpus_per_node.get();
        let mut kept: BTreeMap<&Option<String>, usize> = BTreeMap::new();
        order.retain(|at| {
            let domain = &locations[*at].topology.domain;
            let kept = kept.entry(domain).or_default();
            *kept += 1;
            *kept <= whole(domain)
        });
    }
    order
}

/// A part of a name. The digits of a number have no leading zeros, so the longer number is larger.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum NamePart<'a> {
    Number(usize, &'a [u8]),
    Text(&'a [u8]),
}

/// Returns the key of a name in natural order: numbers count as numbers. Names that differ by leading zeros only differ.
fn natural(name: &str) -> (Vec<NamePart<'_>>, &str) {
    let parts = name.as_bytes().chunk_by(|a, b| a.is_ascii_digit() == b.is_ascii_digit());
    let parts = parts.map(|bytes| match bytes[0].is_ascii_digit() {
        false => NamePart::Text(bytes),
        true => {
            let zeros = bytes.iter().take_while(|digit| **digit == b'0').count();
            NamePart::Number(bytes.len() - zeros, &bytes[zeros..])
        }
    });
    (parts.collect(), name)
}

/// Selects `count` nodes in whole segments of `segment` nodes, each segment from one domain. Domains are used in the order of
/// their lowest rank, then of their name. Returns positions in `nodes`: the selected ones in topological order, and the others in their original
/// order.
///
/// # Errors
/// `InvalidArgument` if `count` is not a multiple of `segment`; `ResourceExhausted` if the domains do not have enough whole
/// segments. A node of unknown domain belongs to none.
pub fn select_segments(nodes: &[Topology], segment: NonZeroUsize, count: usize) -> Result<(Vec<usize>, Vec<usize>)> {
    if !count.is_multiple_of(segment.get()) {
        return Err(Error::invalid(format!("{count} nodes must be divisible by the segment size {segment}")));
    }
    let mut domains: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, node) in nodes.iter().enumerate() {
        if let Some(domain) = &node.domain {
            domains.entry(domain).or_default().push(at);
        }
    }
    let mut domains: Vec<(&str, Vec<usize>)> = domains.into_iter().collect();
    for (_, domain) in &mut domains {
        domain.sort_by_key(|at| nodes[*at].rank);
    }
    domains.sort_by_cached_key(|(name, domain)| (nodes[domain[0]].rank, natural(name)));
    let mut selected = Vec::new();
    for (_, domain) in &domains {
        let whole = domain.len() / segment * segment.get();
        selected.extend(&domain[..whole.min(count - selected.len())]);
    }
    if selected.len() < count {
        let sizes: Vec<usize> = domains.iter().map(|(_, domain)| domain.len()).collect();
        return Err(Error::not_started(
            Code::ResourceExhausted,
            format!("cannot form {} segments of {segment} nodes: the domains have {sizes:?} nodes", count / segment),
        ));
    }
    let remaining = (0..nodes.len()).filter(|at| !selected.contains(at)).collect();
    Ok((selected, remaining))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(domain: &str, rank: u32) -> Topology {
        Topology { domain: Some(domain.to_owned()), rank: Some(rank) }
    }

    fn location(node: &str, gpu: u32, topology: Topology) -> BundleLocation {
        BundleLocation { node: node.to_owned(), gpu, topology }
    }

    fn size(number: usize) -> NonZeroUsize {
        NonZeroUsize::new(number).unwrap()
    }

    /// Creates nodes of these domains, with ranks ascending from 1.
    fn nodes(domains: &[(&str, usize)]) -> Vec<Topology> {
        let names = domains.iter().flat_map(|(domain, count)| std::iter::repeat_n(*domain, *count));
        names.zip(1..).map(|(domain, rank)| topology(domain, rank)).collect()
    }

    #[test]
    fn c180_without_topology_bundles_go_by_node_and_gpu() {
        let locations =
            [("c", 0), ("a", 0), ("a", 1), ("b", 0)].map(|(node, gpu)| location(node, gpu, Topology::default()));
        assert_eq!(order_bundles(&locations, None), [1, 2, 3, 0]);
        assert!(order_bundles(&[], None).is_empty());
    }

    #[test]
    fn numbers_in_names_count_as_numbers() {
        let names =
            ["10.0.0.9", "10.0.0.10", "a", "node2", "node02", "node10", "node10a", "node10b2", "node10b12", "nodeb"];
        let mut shuffled = names;
        shuffled.reverse();
        shuffled.sort_by(|a, b| natural(a).cmp(&natural(b)));
        let mut wanted = names;
        wanted.swap(3, 4); // The names differ by zeros only.
        assert_eq!(shuffled, wanted);
    }

    #[test]
    fn domains_of_the_same_rank_are_selected_by_name() {
        let rack = |name: &str| [topology(name, 1), topology(name, 2)];
        let nodes = [rack("rack10"), rack("rack2")].concat();
        assert_eq!(select_segments(&nodes, size(2), 2).unwrap().0, [2, 3]);
    }

    #[test]
    fn c181_the_domain_with_the_lowest_rank_comes_first() {
        let locations =
            [("A", 3), ("A", 5), ("B", 1), ("B", 2)].map(|(domain, rank)| location("n", 0, topology(domain, rank)));
        assert_eq!(order_bundles(&locations, None), [2, 3, 0, 1]);
    }

    #[test]
    fn c182_gpus_of_a_node_stay_together() {
        let locations: Vec<BundleLocation> = [2, 1]
            .into_iter()
            .flat_map(|rank| (0..4).map(move |gpu| location(&format!("n{rank}"), gpu, topology("A", rank))))
            .collect();
        assert_eq!(order_bundles(&locations, None), [4, 5, 6, 7, 0, 1, 2, 3]);
    }

    #[test]
    fn c183_what_makes_no_whole_segment_is_left_out() {
        for gpus in [1, 8] {
            let locations: Vec<BundleLocation> = (1..=10)
                .flat_map(|rank| (0..gpus).map(move |gpu| location(&format!("n{rank}"), gpu, topology("A", rank))))
                .collect();
            let segments = Segments { nodes: size(8), gpus_per_node: size(gpus as usize) };
            let order = order_bundles(&locations, Some(segments));
            assert_eq!(order, (0..8 * gpus as usize).collect::<Vec<_>>());
        }
    }

    #[test]
    fn c185_an_unknown_rank_comes_first() {
        let unknown = Topology { domain: Some("A".to_owned()), rank: None };
        let locations = [location("a", 0, topology("A", 1)), location("b", 0, unknown)];
        assert_eq!(order_bundles(&locations, None), [1, 0]);
    }

    #[test]
    fn c186_the_lower_domain_is_selected_and_the_other_remains() {
        let mut nodes = nodes(&[("A", 8), ("B", 8)]);
        nodes.rotate_left(8);
        let (selected, remaining) = select_segments(&nodes, size(8), 8).unwrap();
        assert_eq!(selected, (8..16).collect::<Vec<_>>());
        assert_eq!(remaining, (0..8).collect::<Vec<_>>());
    }

    #[test]
    fn c187_nodes_are_a_multiple_of_the_segment() {
        let error = select_segments(&nodes(&[("A", 16)]), size(8), 10).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.to_string().contains("must be divisible by the segment size 8"), "{error}");
    }

    #[test]
    fn c188_too_few_nodes_make_no_segments() {
        let error = select_segments(&nodes(&[("A", 6)]), size(4), 8).unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
        assert!(error.to_string().contains("cannot form 2 segments of 4 nodes"), "{error}");
    }

    #[test]
    fn c189_a_domain_smaller_than_a_segment_is_passed_over() {
        let (selected, remaining) = select_segments(&nodes(&[("A", 6), ("B", 8)]), size(8), 8).unwrap();
        assert_eq!((selected.len(), remaining), (8, (0..6).collect()));
    }

    #[test]
    fn c190_nodes_of_unknown_domain_are_never_selected() {
        let mut some = nodes(&[("A", 4)]);
        some.insert(0, Topology::default());
        assert_eq!(select_segments(&some, size(4), 4).unwrap(), (vec![1, 2, 3, 4], vec![0]));
        let error = select_segments(&vec![Topology::default(); 8], size(4), 4).unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
    }

    #[test]
    fn c191_training_and_then_inference_take_disjoint_nodes() {
        let all = nodes(&[("A", 8), ("B", 8), ("C", 8), ("D", 8), ("E", 8)]);
        let (training, rest) = select_segments(&all, size(8), 24).unwrap();
        assert_eq!(training, (0..24).collect::<Vec<_>>());
        let left: Vec<Topology> = rest.iter().map(|at| all[*at].clone()).collect();
        let (inference, none) = select_segments(&left, size(4), 16).unwrap();
        assert_eq!(inference.iter().map(|at| rest[*at]).collect::<Vec<_>>(), (24..40).collect::<Vec<_>>());
        assert!(none.is_empty());
        assert_eq!(select_segments(&all, size(8), 48).unwrap_err().code(), Code::ResourceExhausted);
        assert_eq!(select_segments(&all, size(8), 25).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(select_segments(&left, size(6), 16).unwrap_err().code(), Code::InvalidArgument);
    }
}
