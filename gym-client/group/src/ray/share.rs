//! The shares of a request: what is requested from Ray.

use std::collections::BTreeMap;

use gym_core::{Code, Error, Result};

use crate::placement::{ClusterSpec, GpuIds, NodeResources, PlacementStrategy, Topology, place};
use crate::provision::ReserveRequest;
use crate::ray::RayNode;

/// CPUs of a share whose ranks count none: Ray requires some resource.
const SOME_CPU: f64 = 0.01;
/// The part that a share takes of the resource that announces its domain: each node of the domain has 1.
const SOME_DOMAIN: f64 = 0.001;
/// A node announces its NVLink domain by a custom resource with this prefix, as NeMo RL's clusters do, or by the label [`DOMAIN_LABEL`].
const DOMAIN_RESOURCE: &str = "nvlink_domain_";
const DOMAIN_LABEL: &str = "nvlink_domain";
/// The resource or label with the position of a node among all, from 1.
const RANK_NAME: &str = "topo_rank";

/// The request to Ray.
#[derive(Debug, PartialEq)]
pub(super) struct SharePlan {
    /// The resources of each share.
    pub(super) bundles: Vec<BTreeMap<String, f64>>,
    /// The CPUs that the agent of each share offers.
    pub(super) cpus: Vec<u32>,
    /// The labels that the node of each share must have. Empty if no share requires a label.
    pub(super) selectors: Vec<BTreeMap<String, String>>,
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
                selectors: Vec::new(),
                strategy: "SPREAD",
                placed: false,
            });
        }
        if cluster.gpu_ids != GpuIds::Auto {
            let message = "gpu_ids is set, but Ray chooses the GPUs\n  fix: leave gpu_ids out";
            return Err(Error::invalid(message));
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
        let mut plan = Self {
            bundles: sets.iter().map(bundle).collect(),
            cpus: sets.iter().map(|count| count * cluster.cpus_per_bundle()).collect(),
            selectors: Vec::new(),
            strategy: strategy(cluster),
            placed: true,
        };
        if cluster.segment_size.is_some() {
            plan.tie_to_domains(request, nodes)?;
        }
        Ok(plan)
    }

    /// Ties each share to the NVLink domain that a placement on the empty nodes gives it: Ray knows no segments. Within its domain, Ray chooses the node.
    ///
    /// # Errors
    /// Those of [`place`]; `ResourceExhausted` if no node announces a domain.
    fn tie_to_domains(&mut self, request: &ReserveRequest, nodes: &[RayNode]) -> Result<()> {
        let alive: Vec<&RayNode> = nodes.iter().filter(|node| node.is_alive()).collect();
        if alive.iter().all(|node| node.topology().domain.is_none()) {
            let message = format!(
                "segment_size is set, but no node announces its NVLink domain\n  fix: leave segment_size out, or start each node with `ray start --labels \
                 {DOMAIN_LABEL}=NAME,{RANK_NAME}=NUMBER`"
            );
            return Err(Error::not_started(Code::ResourceExhausted, message));
        }
        let totals: Vec<NodeResources> = alive.iter().map(|node| total(node, request)).collect();
        let placement = place(&request.cluster, &totals, request.unified)?;
        // Each share has one bundle of a unified cluster, or all bundles of a logical node, which are on one host.
        let hosts: Vec<usize> = match request.unified {
            true => placement.groups.iter().flat_map(|group| &group.bundles).map(|bundle| bundle.host).collect(),
            false => placement.groups.iter().filter_map(|group| Some(group.bundles.first()?.host)).collect(),
        };
        self.selectors = vec![BTreeMap::new(); self.bundles.len()];
        for (share, host) in hosts.into_iter().enumerate() {
            let node = alive[host];
            match (node.domain_resource(), node.topology().domain) {
                (Some(name), _) => drop(self.bundles[share].insert(name.to_owned(), SOME_DOMAIN)),
                (None, Some(domain)) => drop(self.selectors[share].insert(DOMAIN_LABEL.to_owned(), domain)),
                (None, None) => return Err(Error::internal("a segment has a node without a domain")),
            }
        }
        Ok(())
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
        let nodes: Vec<_> = nodes.iter().filter(|node| node.is_alive()).map(|node| total(node, request)).collect();
        place(&request.cluster, &nodes, request.unified).map(drop)
    }

    /// Returns `true` for shares that Ray spreads over nodes if it can.
    pub(super) fn asks_for_several_nodes(&self) -> bool {
        self.strategy == "SPREAD" && self.bundles.len() > 1
    }

    /// Returns `true` if a share needs more than any node that is alive has in total. Ray 2.51 does not report that of its own.
    pub(super) fn exceeds_every_node(&self, nodes: &[RayNode]) -> bool {
        let has = |node: &RayNode, (name, many): (&String, &f64)| {
            node.resources_total.get(name).is_some_and(|total| total >= many)
        };
        let fits = |bundle: &BTreeMap<String, f64>, node: &RayNode| {
            node.is_alive() && bundle.iter().all(|need| has(node, need))
        };
        !self.bundles.iter().all(|bundle| nodes.iter().any(|node| fits(bundle, node)))
    }

    /// Describes the shares, equal ones together.
    pub(super) fn describe(&self) -> String {
        let mut kinds: Vec<(usize, String)> = Vec::new();
        for (share, bundle) in self.bundles.iter().enumerate() {
            let resources: Vec<String> = bundle.iter().map(|(name, many)| format!("{many} {name}")).collect();
            let mut text = resources.join(" and ");
            let labels = self.selectors.get(share).into_iter().flatten();
            labels.for_each(|(name, value)| text.push_str(&format!(" on a node with {name}={value}")));
            match kinds.iter_mut().find(|(_, known)| *known == text) {
                Some((many, _)) => *many += 1,
                None => kinds.push((1, text)),
            }
        }
        kinds.iter().map(|(many, text)| format!("{many} × {text}")).collect::<Vec<_>>().join(", ")
    }
}

impl RayNode {
    /// Returns the NVLink domain of the node and its position there: from the resources `nvlink_domain_NAME` and `topo_rank`, as NeMo RL's clusters
    /// announce them, or from the labels `nvlink_domain` and `topo_rank`.
    #[must_use]
    pub fn topology(&self) -> Topology {
        let named = self.domain_resource().map(|name| &name[DOMAIN_RESOURCE.len()..]);
        let domain = named.or_else(|| self.labels.get(DOMAIN_LABEL).map(String::as_str)).map(str::to_owned);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a position")]
        let of_resource = self.resources_total.get(RANK_NAME).map(|rank| *rank as u32);
        Topology { domain, rank: of_resource.or_else(|| self.labels.get(RANK_NAME)?.parse().ok()) }
    }

    /// Returns the resource that announces the domain of the node.
    fn domain_resource(&self) -> Option<&str> {
        self.resources_total.keys().map(String::as_str).find(|name| name.starts_with(DOMAIN_RESOURCE))
    }
}

/// Returns what a node has if nothing runs there, as far as the request counts it.
fn total(node: &RayNode, request: &ReserveRequest) -> NodeResources {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts of a node")]
    let whole = |name: &str| node.resources_total.get(name).map_or(0, |many| *many as u32);
    let total = NodeResources::simulated(&node.node_ip, whole("GPU"));
    request.counted(NodeResources { cpus: Some(whole("CPU")), topology: node.topology(), ..total })
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

    fn in_domain(ip: &str, domain: &str, rank: u32, by_label: bool) -> RayNode {
        let mut node = alive(ip, 4.0);
        node.resources_total.insert("GPU".to_owned(), 4.0);
        if by_label {
            node.labels.insert(DOMAIN_LABEL.to_owned(), domain.to_owned());
            node.labels.insert(RANK_NAME.to_owned(), rank.to_string());
        } else {
            node.resources_total.insert(format!("{DOMAIN_RESOURCE}{domain}"), 1.0);
            node.resources_total.insert(RANK_NAME.to_owned(), f64::from(rank));
        }
        node
    }

    #[test]
    fn shares_of_a_segment_are_tied_to_one_domain() {
        let mut cluster = ClusterSpec::new([4, 4]);
        (cluster.segment_size, cluster.num_gpus_per_node) =
            (std::num::NonZeroU32::new(2), std::num::NonZeroU32::new(4).unwrap());
        let request = ReserveRequest::new(cluster.clone());
        for by_label in [true, false] {
            // The domain of the lowest rank has one node, which is no whole segment.
            let nodes = [("a", "small", 1), ("b", "big", 2), ("c", "big", 3)]
                .map(|(ip, domain, rank)| in_domain(ip, domain, rank, by_label));
            let plan = SharePlan::of(&request, &nodes, &BTreeMap::new()).unwrap();
            if by_label {
                assert_eq!(plan.bundles, [bundle(4.0, 4.0), bundle(4.0, 4.0)]);
                assert_eq!(plan.selectors, vec![BTreeMap::from([(DOMAIN_LABEL.to_owned(), "big".to_owned())]); 2]);
                assert_eq!(plan.describe(), "2 × 4 CPU and 4 GPU on a node with nvlink_domain=big");
            } else {
                assert_eq!(plan.selectors, vec![BTreeMap::new(); 2]);
                assert_eq!(plan.describe(), "2 × 4 CPU and 4 GPU and 0.001 nvlink_domain_big");
            }
            let error = SharePlan::of(&request, &nodes[..2], &BTreeMap::new()).unwrap_err();
            assert!(error.to_string().contains("cannot form 1 segments of 2 nodes"), "{error}");
        }
        let nodes = [("a", "x", 1), ("b", "y", 3), ("c", "x", 2), ("d", "y", 4)]
            .map(|(ip, domain, rank)| in_domain(ip, domain, rank, true));
        let mut unified = request.clone();
        unified.unified = true;
        unified.cluster.bundle_ct_per_node_list = vec![4; 4];
        let plan = SharePlan::of(&unified, &nodes, &BTreeMap::new()).unwrap();
        let domains: Vec<&str> = plan.selectors.iter().map(|labels| labels[DOMAIN_LABEL].as_str()).collect();
        assert_eq!(domains.iter().filter(|domain| **domain == "x").count(), 8, "{domains:?}");
        assert_eq!(domains.len(), 16);
        let error = SharePlan::of(&request, &[alive("a", 4.0)], &BTreeMap::new()).unwrap_err();
        assert!(error.to_string().contains("ray start --labels nvlink_domain=NAME"), "{error}");
    }

    #[test]
    fn what_ray_decides_itself_is_rejected() {
        let mut cluster = ClusterSpec::new([1]);
        cluster.gpu_ids = GpuIds::Flat(vec![3]);
        let error = SharePlan::of(&ReserveRequest::new(cluster), &[], &BTreeMap::new()).unwrap_err();
        assert!(error.to_string().contains("Ray chooses the GPUs"), "{error}");
    }

    #[test]
    fn a_share_that_no_node_can_have_is_found_without_ray() {
        let disk = |many: f64| BTreeMap::from([("disk".to_owned(), many)]);
        let request = || {
            let mut cluster = ClusterSpec::new([1]);
            cluster.use_gpus = false;
            ReserveRequest::new(cluster)
        };
        let mut nodes = vec![alive("10.0.0.11", 4.0), alive("10.0.0.12", 4.0)];
        assert!(!SharePlan::of(&request(), &nodes, &BTreeMap::new()).unwrap().exceeds_every_node(&nodes));
        let plan = SharePlan::of(&request(), &nodes, &disk(2.0)).unwrap();
        assert!(plan.exceeds_every_node(&nodes));
        nodes[1].resources_total.insert("disk".to_owned(), 2.0);
        assert!(!plan.exceeds_every_node(&nodes));
        nodes[1].state = "DEAD".to_owned();
        assert!(plan.exceeds_every_node(&nodes));
    }
}
