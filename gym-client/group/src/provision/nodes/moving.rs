//! Which bundles of a placement go where, when their node is lost. Uses no sockets.

use std::collections::BTreeSet;

use gym_core::Result;

use crate::placement::{
    ClusterSpec, Devices, GpuIds, NodeResources, PlacedBundle, Placement, PlacementStrategy, place,
};
use crate::provision::place::BundleId;

/// The new hosts of lost bundles. A host is a position in the nodes that were offered, and in their sessions once they are held.
#[derive(Debug, PartialEq)]
pub(crate) struct BundleMoves(pub(crate) Vec<(BundleId, PlacedBundle)>);

/// Bundles that are placed on hosts: a whole placement, or those that move.
pub(super) trait PlacedBundles {
    /// Returns where each bundle is.
    fn placed(&mut self) -> impl Iterator<Item = &mut PlacedBundle>;
}

impl PlacedBundles for Placement {
    fn placed(&mut self) -> impl Iterator<Item = &mut PlacedBundle> {
        self.groups.iter_mut().flat_map(|group| &mut group.bundles)
    }
}

impl PlacedBundles for BundleMoves {
    fn placed(&mut self) -> impl Iterator<Item = &mut PlacedBundle> {
        self.0.iter_mut().map(|(_, placed)| placed)
    }
}

/// Places the bundles whose hosts are lost on some of `offered`, by the rules of the cluster. `kept` are the names of the nodes that have
/// the other bundles.
///
/// # Errors
/// The errors of [`place`].
pub(super) fn move_bundles(
    cluster: &ClusterSpec,
    unified: bool,
    placement: &Placement,
    lost: &BTreeSet<usize>,
    kept: &BTreeSet<String>,
    offered: &[NodeResources],
) -> Result<BundleMoves> {
    let mut moving: Vec<Vec<(BundleId, &PlacedBundle)>> = Vec::new();
    for (group, bundles) in (0..).zip(&placement.groups) {
        let of_group = (0..).zip(&bundles.bundles).filter(|(_, bundle)| lost.contains(&bundle.host));
        let of_group: Vec<_> = of_group.map(|(at, bundle)| ((group, at), bundle)).collect();
        if !of_group.is_empty() {
            moving.push(of_group);
        }
    }
    let mut spec = cluster.clone();
    // Which whole segments are left depends on the whole cluster; a moved bundle stays where there is room.
    spec.segment_size = None;
    spec.bundle_ct_per_node_list = moving.iter().map(|group| u32::try_from(group.len()).unwrap_or(u32::MAX)).collect();
    if cluster.gpu_ids != GpuIds::Auto {
        let id = |(_, bundle): &(BundleId, &PlacedBundle)| bundle.gpu.as_ref()?.parse().ok();
        spec.gpu_ids = GpuIds::PerNode(moving.iter().map(|group| group.iter().filter_map(id).collect()).collect());
    }
    let allowed = |node: &NodeResources| match cluster.placement_group_strategy {
        PlacementStrategy::StrictSpread => !kept.contains(&node.name),
        PlacementStrategy::StrictPack => kept.is_empty() || kept.contains(&node.name),
        PlacementStrategy::Pack | PlacementStrategy::Spread => true,
    };
    // A node that may not be used stays in the list, without anything to offer, so that the positions are right.
    let offered: Vec<NodeResources> = offered
        .iter()
        .map(|node| match allowed(node) {
            true => node.clone(),
            false => NodeResources { cpus: Some(0), gpus: Devices::Named(Vec::new()), ..node.clone() },
        })
        .collect();
    let placed = place(&spec, &offered, unified)?;
    let placed = placed.groups.into_iter().flat_map(|group| group.bundles);
    Ok(BundleMoves(moving.into_iter().flatten().map(|(id, _)| id).zip(placed).collect()))
}

/// Returns the placement after the moves; `position` gives the host for a position of the moves.
pub(super) fn moved(placement: &Placement, moves: BundleMoves, position: impl Fn(usize) -> usize) -> Placement {
    let mut next = placement.clone();
    for ((group, at), placed) in moves.0 {
        if let Some(bundle) = next.groups.get_mut(group as usize).and_then(|group| group.bundles.get_mut(at as usize)) {
            (bundle.host, bundle.gpu) = (position(placed.host), placed.gpu);
        }
    }
    next
}

#[cfg(test)]
mod tests {
    use gym_core::Code;

    use super::*;

    fn node(name: &str, gpus: u32) -> NodeResources {
        NodeResources::new(name, 64, (0..gpus).map(|gpu| gpu.to_string()).collect())
    }

    fn hosts(placement: &Placement) -> Vec<Vec<usize>> {
        let group = |group: &crate::placement::PlacementGroup| group.bundles.iter().map(|b| b.host).collect();
        placement.groups.iter().map(group).collect()
    }

    #[test]
    fn the_bundles_of_a_lost_node_move_and_the_others_stay() {
        for unified in [false, true] {
            let spec = ClusterSpec::new([2, 2]);
            let placement = place(&spec, &[node("a", 2), node("b", 2)], unified).unwrap();
            let (lost, kept) = (BTreeSet::from([1]), BTreeSet::from(["a".to_owned()]));
            let moves = move_bundles(&spec, unified, &placement, &lost, &kept, &[node("c", 2)]).unwrap();
            assert_eq!(moves.0.len(), 2);
            let next = moved(&placement, moves, |offered| 7 + offered);
            let (before, after) = (hosts(&placement).concat(), hosts(&next).concat());
            for (before, after) in before.into_iter().zip(after) {
                assert_eq!(after, if before == 1 { 7 } else { before }, "unified: {unified}");
            }
        }
    }

    #[test]
    fn moves_keep_to_the_strategy_and_to_the_gpus_that_were_named() {
        let mut spec = ClusterSpec::new([1, 1]);
        spec.placement_group_strategy = PlacementStrategy::StrictSpread;
        spec.gpu_ids = GpuIds::PerNode(vec![vec![0], vec![1]]);
        let placement = place(&spec, &[node("a", 2), node("b", 2)], false).unwrap();
        let on_b = placement.groups[1].bundles[0].host;
        let (lost, kept) = (BTreeSet::from([on_b]), BTreeSet::from(["a".to_owned()]));
        let error = move_bundles(&spec, false, &placement, &lost, &kept, &[node("a", 2)]).unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted, "a has the other bundle: {error}");
        let moves = move_bundles(&spec, false, &placement, &lost, &kept, &[node("a", 2), node("c", 2)]).unwrap();
        let [(id, placed)] = &moves.0[..] else { panic!("{moves:?}") };
        assert_eq!((*id, placed.host, placed.gpu.as_deref()), ((1, 0), 1, Some("1")));
    }
}
