//! The shares of a request: what is requested from Ray.

use std::collections::BTreeMap;

use gym_core::group::cluster::{ClusterSpec, GpuIds, NodeResources, PlacementStrategy, place};
use gym_core::{Code, Error, Result};

use crate::group::provision::ReserveRequest;
use crate::group::ray::RayNode;

/// CPUs of a share whose ranks count none: Ray requires some resource.
const SOME_CPU: f64 = 0.01;

/// What is requested from Ray.
#[derive(Debug, PartialEq)]
pub(super) struct SharePlan {
    /// The resources of each share.
    pub(super) bundles: Vec<BTreeMap<String, f64>>,
    /// The CPUs that the agent of each share offers.
    pub(super) cpus: Vec<u32>,
    pub(super) strategy: &'static str,
    /// `true` if each share has its own part of the request; otherwise the request is placed on all shares.
    pub(super) placed: bool,
}

impl SharePlan {
    /// Divides a request into shares: a logical node each, or a bundle each for a unified cluster. A request that counts neither CPUs nor GPUs, or
    /// whose nodes are simulated, gets a share on each of `nodes`.
    pub(super) fn of(request: &ReserveRequest, nodes: &[RayNode], resources: &BTreeMap<String, f64>) -> Result<Self> {
        let cluster = &request.cluster;
        let counts = request.simulated.is_none() && (request.counts_cpus || cluster.use_gpus);
        if !counts {
            let hosts = request.simulated.as_ref().map_or(cluster.world_size(), Vec::len);
            let able =
                |node: &&RayNode| node.is_alive() && node.resources_total.get("CPU").is_some_and(|cpus| *cpus > 0.0);
            let shares = nodes.iter().filter(able).count().min(hosts).max(1);
            let bundle = BTreeMap::from([("CPU".to_owned(), SOME_CPU)]);
            return Ok(Self {
                bundles: vec![bundle; shares],
                cpus: vec![0; shares],
                strategy: "SPREAD",
                placed: false,
            });
        }
        if cluster.gpu_ids != GpuIds::Auto {
            let message = "gpu_ids is set, but Ray chooses the GPUs\n  fix: leave gpu_ids out";
            return Err(Error::invalid(message));
        }
        if cluster.segment_size.is_some() {
            let message = "segment_size is not supported on Ray yet\n  fix: leave segment_size out";
            return Err(Error::not_started(Code::Unimplemented, message));
        }
        let counts = cluster.bundle_ct_per_node_list.iter().copied().filter(|count| *count > 0);
        let sets: Vec<u32> =
            if request.unified { counts.flat_map(|count| vec![1; count as usize]).collect() } else { counts.collect() };
        let bundle = |count: &u32| {
            let mut bundle = BTreeMap::new();
            let cpus = if request.counts_cpus { f64::from(count * cluster.cpus_per_bundle()) } else { SOME_CPU };
            bundle.insert("CPU".to_owned(), cpus);
            if cluster.use_gpus {
                bundle.insert("GPU".to_owned(), f64::from(*count));
            }
            bundle.extend(resources.iter().map(|(name, many)| (name.clone(), many * f64::from(*count))));
            bundle
        };
        Ok(Self {
            bundles: sets.iter().map(bundle).collect(),
            cpus: sets.iter().map(|count| count * cluster.cpus_per_bundle()).collect(),
            strategy: strategy(cluster),
            placed: true,
        })
    }

    /// Checks that the nodes could have the shares if nothing else ran there. Ray itself waits for ever for some requests that no node can have, such as
    /// three bundles that must be spread over two nodes.
    ///
    /// # Errors
    /// Those of [`place`].
    pub(super) fn check_possible(&self, request: &ReserveRequest, nodes: &[RayNode]) -> Result<()> {
        if !self.placed {
            return Ok(());
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts of a node")]
        let whole = |node: &RayNode, name: &str| node.resources_total.get(name).map_or(0, |many| *many as u32);
        let total = |node: &RayNode| {
            let total = NodeResources::simulated(&node.node_ip, whole(node, "GPU"));
            request.counted(NodeResources { cpus: Some(whole(node, "CPU")), ..total })
        };
        let nodes: Vec<_> = nodes.iter().filter(|node| node.is_alive()).map(total).collect();
        place(&request.cluster, &nodes, request.unified).map(drop)
    }

    /// Describes the shares, equal ones together.
    pub(super) fn describe(&self) -> String {
        let mut kinds: Vec<(usize, String)> = Vec::new();
        for bundle in &self.bundles {
            let resources: Vec<String> = bundle.iter().map(|(name, many)| format!("{many} {name}")).collect();
            let text = resources.join(" and ");
            match kinds.iter_mut().find(|(_, known)| *known == text) {
                Some((many, _)) => *many += 1,
                None => kinds.push((1, text)),
            }
        }
        kinds.iter().map(|(many, text)| format!("{many} × {text}")).collect::<Vec<_>>().join(", ")
    }
}

fn strategy(cluster: &ClusterSpec) -> &'static str {
    match cluster.placement_group_strategy {
        PlacementStrategy::Pack => "PACK",
        PlacementStrategy::Spread => "SPREAD",
        PlacementStrategy::StrictPack => "STRICT_PACK",
        PlacementStrategy::StrictSpread => "STRICT_SPREAD",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alive(ip: &str, cpus: f64) -> RayNode {
        RayNode {
            node_ip: ip.to_owned(),
            state: "ALIVE".to_owned(),
            resources_total: BTreeMap::from([("CPU".to_owned(), cpus)]),
            ..RayNode::default()
        }
    }

    fn bundle(cpus: f64, gpus: f64) -> BTreeMap<String, f64> {
        BTreeMap::from([("CPU".to_owned(), cpus), ("GPU".to_owned(), gpus)])
    }

    #[test]
    fn a_logical_node_is_a_share_and_a_unified_cluster_has_one_for_each_bundle() {
        let mut cluster = ClusterSpec::new([4, 0, 2]);
        cluster.placement_group_strategy = PlacementStrategy::StrictSpread;
        cluster.max_colocated_worker_groups = std::num::NonZeroU32::new(2);
        let mut request = ReserveRequest::new(cluster);
        let plan = SharePlan::of(&request, &[], &BTreeMap::new()).unwrap();
        assert_eq!(plan.bundles, [bundle(8.0, 4.0), bundle(4.0, 2.0)]);
        assert_eq!((plan.cpus.as_slice(), plan.strategy, plan.placed), (&[8, 4][..], "STRICT_SPREAD", true));
        assert_eq!(plan.describe(), "1 × 8 CPU and 4 GPU, 1 × 4 CPU and 2 GPU");
        request.unified = true;
        let disks = BTreeMap::from([("disk".to_owned(), 0.5)]);
        let plan = SharePlan::of(&request, &[], &disks).unwrap();
        assert_eq!(plan.bundles.len(), 6);
        assert_eq!(plan.describe(), "6 × 2 CPU and 1 GPU and 0.5 disk");
    }

    #[test]
    fn ranks_that_count_nothing_share_the_nodes_that_there_are() {
        let nodes = [alive("a", 4.0), alive("b", 4.0), alive("head", 0.0)];
        let plan = |request: &ReserveRequest| SharePlan::of(request, &nodes, &BTreeMap::new()).unwrap();
        let three = plan(&ReserveRequest::for_ranks(3));
        assert_eq!((three.bundles.len(), three.placed, three.strategy), (2, false, "SPREAD"));
        assert_eq!(plan(&ReserveRequest::for_ranks(1)).bundles.len(), 1);
    }

    #[test]
    fn what_ray_decides_itself_is_rejected() {
        let mut cluster = ClusterSpec::new([1]);
        cluster.gpu_ids = GpuIds::Flat(vec![3]);
        let error = SharePlan::of(&ReserveRequest::new(cluster), &[], &BTreeMap::new()).unwrap_err();
        assert!(error.to_string().contains("Ray chooses the GPUs"), "{error}");
    }
}
