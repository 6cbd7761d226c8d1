//! Placement of bundles on nodes and GPUs, decided before anything starts.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::num::NonZeroUsize;

use gym_core::{Code, Error, Result};

use super::spec::{ClusterSpec, PlacementStrategy};
use super::topology::{BundleLocation, Segments, Topology, order_bundles, select_segments};

/// The resources of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeResources {
    /// The name of the node. Several nodes of one machine are named `share@machine`.
    pub name: String,
    /// Number of CPUs; `None` if they are not counted.
    pub cpus: Option<u32>,
    /// The GPUs.
    pub gpus: Devices,
    /// The position in the network.
    pub topology: Topology,
}

/// The GPUs of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Devices {
    /// GPUs with these names in `CUDA_VISIBLE_DEVICES`.
    Named(Vec<String>),
    /// A number of simulated GPUs: bundles are placed as if they existed, but workers get none.
    Simulated(u32),
}

impl NodeResources {
    /// Creates a node with these CPUs and GPUs, at an unknown position in the network.
    #[must_use]
    pub fn new(name: impl Into<String>, cpus: u32, gpus: Vec<String>) -> Self {
        Self { name: name.into(), cpus: Some(cpus), gpus: Devices::Named(gpus), topology: Topology::default() }
    }

    /// Creates a simulated node with `gpus` GPUs and as many CPUs as needed, as for `--simulate-nodes`.
    #[must_use]
    pub fn simulated(name: impl Into<String>, gpus: u32) -> Self {
        Self { name: name.into(), cpus: None, gpus: Devices::Simulated(gpus), topology: Topology::default() }
    }

    /// Returns the name of the machine, on which engines are kept together.
    fn machine(&self) -> &str {
        machine_of(&self.name)
    }

    /// Returns the position of a GPU in the order of bundles: its number, if the names of all GPUs are numbers; otherwise, such as for
    /// UUIDs, its position in the list of the node.
    fn gpu_position(&self, gpu: &str) -> Option<u32> {
        let Devices::Named(names) = &self.gpus else { return None };
        let numbers: Option<Vec<u32>> = names.iter().map(|name| name.parse().ok()).collect();
        let at = names.iter().position(|name| name == gpu)?;
        numbers.map_or(u32::try_from(at).ok(), |numbers| Some(numbers[at]))
    }

    fn gpu_count(&self) -> usize {
        match &self.gpus {
            Devices::Named(names) => names.len(),
            Devices::Simulated(count) => *count as usize,
        }
    }
}

/// Returns the machine of a node, from the name of the node.
pub(crate) fn machine_of(node: &str) -> &str {
    node.rsplit_once('@').map_or(node, |(_, machine)| machine)
}

/// A placed bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedBundle {
    /// The logical node of the spec.
    pub node: u32,
    /// The number of the bundle in its placement group.
    pub index: u32,
    /// The machine, as a position in the list of nodes.
    pub host: usize,
    /// The name of the GPU in `CUDA_VISIBLE_DEVICES`; `None` without GPUs and on simulated nodes.
    pub gpu: Option<String>,
}

/// Bundles that are addressed together: those of a logical node, or all bundles of a unified cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementGroup {
    /// `<cluster>-node<i>` or `<cluster>-unified`; without the dash for a cluster without a name.
    pub name: String,
    /// The bundles, by number.
    pub bundles: Vec<PlacedBundle>,
}

/// The placement of all bundles of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The placement groups with at least one bundle, by node.
    pub groups: Vec<PlacementGroup>,
    /// The bundles of a unified cluster in topological order, in which ranks are assigned to them.
    pub sorted: Option<Vec<u32>>,
    /// The domain and the machine of each entry of `sorted`, numbered in this order.
    pub(super) sites: Vec<[u32; 2]>,
    /// Number of GPUs of a physical node, for layouts that depend on it.
    pub gpus_per_node: u32,
}

/// Places the bundles of `spec` on `nodes`. If `unified`, each bundle is placed individually, and all belong to one group, for
/// models that span nodes. If such a cluster is packed, the bundles of each logical node still share a machine, as far as that is
/// possible for all of them; otherwise, the bundles are on the machines with the most room.
///
/// With a `segment_size`, only as many nodes are used as the spec has. They form whole segments
/// of one domain each ([`select_segments`]); the other nodes remain for other clusters.
///
/// # Errors
/// The errors of [`ClusterSpec::validate`] and [`select_segments`]; `InvalidArgument` for a GPU that no node has; `ResourceExhausted` for
/// a `segment_size` if no node's domain is known, and
/// `ResourceExhausted`, with the requested resources and those of each node.
pub fn place(spec: &ClusterSpec, nodes: &[NodeResources], unified: bool) -> Result<Placement> {
    spec.validate()?;
    let allocation = Allocation::new(spec, nodes, &usable(spec, nodes)?);
    // Ranks that exchange most are consecutive, so what fits one machine should not be cut in two by the capacity that others have left.
    let packed = unified && spec.placement_group_strategy == PlacementStrategy::Pack;
    place_by(spec, nodes, unified, packed, |sets, single| {
        let few = (packed && single).then(|| allocation.clone().try_each(sets, Preference::Largest, |_, _| true));
        few.flatten().or_else(|| allocation.clone().assign(sets, spec.placement_group_strategy))
    })
}

/// As [`place`], for an engine that has decided on the nodes: the first logical node of `spec` with bundles is placed on the first of `nodes`, and so
/// on. If `unified`, each bundle has a node.
///
/// # Errors
/// As [`place`]; `ResourceExhausted` if there is another number of nodes.
pub fn place_each(spec: &ClusterSpec, nodes: &[NodeResources], unified: bool) -> Result<Placement> {
    spec.validate()?;
    let allocation = Allocation::new(spec, nodes, &vec![true; nodes.len()]);
    place_by(spec, nodes, unified, false, |sets, _| {
        let in_order = |allocation: &Allocation, host: usize| host == allocation.assigned.len();
        (sets.len() == nodes.len()).then(|| allocation.clone().try_each(sets, Preference::Fullest, in_order))?
    })
}

fn place_by(
    spec: &ClusterSpec,
    nodes: &[NodeResources],
    unified: bool,
    together: bool,
    assign: impl Fn(&[BundleSet], bool) -> Option<Allocation>,
) -> Result<Placement> {
    let ids = spec.gpus_of_nodes()?;
    check_totals(spec, nodes)?;
    let whole = if together { assign(&bundle_sets(spec, ids.as_deref(), false), false) } else { None };
    let single = unified && whole.is_none();
    let sets = bundle_sets(spec, ids.as_deref(), single);
    let Some(mut allocation) = whole.or_else(|| assign(&sets, single)) else {
        check_ids(&sets, nodes)?;
        return Err(insufficient(spec, nodes, "they do not fit the nodes one by one"));
    };
    let mut groups: Vec<PlacementGroup> = Vec::new();
    for (set, (host, gpus)) in std::mem::take(&mut allocation.assigned).into_iter().enumerate() {
        let node = sets[set].node;
        if !unified || groups.is_empty() {
            let kind = if unified { "unified".to_owned() } else { format!("node{node}") };
            let name = if spec.name.is_empty() { kind } else { format!("{}-{kind}", spec.name) };
            groups.push(PlacementGroup { name, bundles: Vec::new() });
        }
        if let Some(group) = groups.last_mut() {
            for gpu in gpus {
                let index = group.bundles.len() as u32;
                group.bundles.push(PlacedBundle { node, index, host, gpu });
            }
        }
    }
    let gpus_per_node = spec.num_gpus_per_node.get();
    let (sorted, sites) = if unified {
        sort(&groups[0], nodes, spec).map(|(sorted, sites)| (Some(sorted), sites))?
    } else {
        (None, Vec::new())
    };
    Ok(Placement { groups, sorted, sites, gpus_per_node })
}

/// Returns the sets of bundles to place: the bundles of each logical node together, or each one alone.
fn bundle_sets(spec: &ClusterSpec, ids: Option<&[Vec<u32>]>, single: bool) -> Vec<BundleSet> {
    let mut sets = Vec::new();
    for (node, &count) in (0..).zip(&spec.bundle_ct_per_node_list) {
        let ids: Option<Vec<String>> = ids.map(|ids| ids[node as usize].iter().map(u32::to_string).collect());
        let (many, each) = if single { (count, 1) } else { (u32::from(count > 0), count) };
        for set in 0..many as usize {
            let ids = ids.as_ref().map(|ids| if single { ids[set..=set].to_vec() } else { ids.clone() });
            sets.push(BundleSet { node, bundles: each as usize, ids });
        }
    }
    sets
}

/// Returns, for each node, whether its bundles may be used.
fn usable(spec: &ClusterSpec, nodes: &[NodeResources]) -> Result<Vec<bool>> {
    let size = spec.segment_size.and_then(|size| NonZeroUsize::new(size.get() as usize));
    let Some(size) = size else { return Ok(vec![true; nodes.len()]) };
    if nodes.iter().all(|node| node.topology.domain.is_none()) {
        let message = "segment_size is set, but no node has a known NVLink domain\n  fix: leave segment_size out, or start each node with its domain";
        return Err(Error::not_started(Code::ResourceExhausted, message).about("place cluster"));
    }
    let topologies: Vec<Topology> = nodes.iter().map(|node| node.topology.clone()).collect();
    let (selected, _) =
        select_segments(&topologies, size, spec.node_count()).map_err(|error| error.about("place cluster"))?;
    Ok((0..nodes.len()).map(|at| selected.contains(&at)).collect())
}

/// Returns the bundles in topological order, and the domain and machine of each.
fn sort(group: &PlacementGroup, nodes: &[NodeResources], spec: &ClusterSpec) -> Result<(Vec<u32>, Vec<[u32; 2]>)> {
    let location = |bundle: &PlacedBundle| {
        let node = &nodes[bundle.host];
        let gpu = bundle.gpu.as_ref().and_then(|gpu| node.gpu_position(gpu)).unwrap_or(bundle.index);
        BundleLocation { node: node.machine().to_owned(), gpu, topology: node.topology.clone() }
    };
    let locations: Vec<BundleLocation> = group.bundles.iter().map(location).collect();
    let segments = spec.segment_size.and_then(|size| {
        let nodes = NonZeroUsize::new(size.get() as usize)?;
        Some(Segments { nodes, gpus_per_node: NonZeroUsize::new(spec.num_gpus_per_node.get() as usize)? })
    });
    let order = order_bundles(&locations, segments);
    if order.len() < locations.len() {
        let lost = locations.len() - order.len();
        return Err(insufficient(spec, nodes, &format!("{lost} bundles are in no whole segment of their domain")));
    }
    let mut site = [0, 0];
    let mut sites = vec![site; order.len()];
    for at in 1..order.len() {
        let (before, this) = (&locations[order[at - 1]], &locations[order[at]]);
        site[0] += u32::from(before.topology.domain != this.topology.domain);
        site[1] += u32::from((&before.topology, &before.node) != (&this.topology, &this.node));
        sites[at] = site;
    }
    Ok((order.into_iter().map(|at| at as u32).collect(), sites))
}

fn check_totals(spec: &ClusterSpec, nodes: &[NodeResources]) -> Result<()> {
    let gpus: usize = nodes.iter().map(NodeResources::gpu_count).sum();
    if spec.use_gpus && spec.world_size() > gpus {
        return Err(insufficient(spec, nodes, &format!("{} GPUs are asked for, {gpus} are there", spec.world_size())));
    }
    let cpus: Option<u64> = nodes.iter().map(|node| node.cpus.map(u64::from)).sum();
    let asked = spec.world_size() as u64 * u64::from(spec.cpus_per_bundle());
    match cpus {
        Some(cpus) if asked > cpus => {
            Err(insufficient(spec, nodes, &format!("{asked} CPUs are asked for, {cpus} are there")))
        }
        _ => Ok(()),
    }
}

/// Reports a GPU id that no node has as an error of the spec, not as a lack of resources.
fn check_ids(sets: &[BundleSet], nodes: &[NodeResources]) -> Result<()> {
    let known: BTreeSet<&String> = (nodes.iter())
        .filter_map(|node| if let Devices::Named(names) = &node.gpus { Some(names) } else { None })
        .flatten()
        .collect();
    match sets.iter().flat_map(|set| set.ids.iter().flatten()).find(|id| !known.contains(id)) {
        Some(id) => Err(Error::invalid(format!("gpu_ids names GPU {id}; {}", offered(nodes))).about("place cluster")),
        None => Ok(()),
    }
}

fn insufficient(spec: &ClusterSpec, nodes: &[NodeResources], why: &str) -> Error {
    let asked = &spec.bundle_ct_per_node_list;
    let of = if spec.use_gpus { "a GPU and " } else { "" };
    let cpus = spec.cpus_per_bundle();
    Error::not_started(
        Code::ResourceExhausted,
        format!(
            "not enough resources for bundles {asked:?} of {of}{cpus} CPU each: {why}; {}\n  fix: ask for fewer bundles; on a small \
             machine, VirtualCluster::simulate_nodes places the cluster on nodes of any size",
            offered(nodes)
        ),
    )
    .about("place cluster")
}

fn offered(nodes: &[NodeResources]) -> String {
    if nodes.is_empty() {
        return "there is no node".to_owned();
    }
    let node = |node: &NodeResources| {
        let gpus = match &node.gpus {
            Devices::Named(names) => format!("GPUs [{}]", names.join(", ")),
            Devices::Simulated(count) => format!("{count} simulated GPUs"),
        };
        let cpus = node.cpus.map(|cpus| format!("{cpus} CPUs, ")).unwrap_or_default();
        format!("{} has {cpus}{gpus}", node.name)
    };
    nodes.iter().map(node).collect::<Vec<_>>().join("; ")
}

/// Bundles that must be placed on one machine.
struct BundleSet {
    /// The logical node of the spec.
    node: u32,
    bundles: usize,
    ids: Option<Vec<String>>,
}

/// The host that is preferred among those that fit.
#[derive(Clone, Copy, PartialEq)]
enum Preference {
    /// The one with the fewest sets.
    Even,
    /// One in use, then the one with the least free capacity.
    Fullest,
    /// One in use, then the one with the most free capacity: single bundles are then on the fewest hosts.
    Largest,
}

/// The free capacity of the nodes, and the bundle sets assigned so far.
#[derive(Clone)]
struct Allocation {
    hosts: Vec<HostCapacity>,
    use_gpus: bool,
    cpus_per_bundle: u64,
    /// The host of each bundle set, and the GPU of each of its bundles.
    assigned: Vec<(usize, Vec<Option<String>>)>,
}

#[derive(Clone)]
struct HostCapacity {
    /// Free GPUs; `None` in a list is a simulated GPU.
    gpus: Vec<Option<String>>,
    cpus: Option<u64>,
    sets: usize,
}

impl Allocation {
    fn new(spec: &ClusterSpec, nodes: &[NodeResources], usable: &[bool]) -> Self {
        let host = |(node, usable): (&NodeResources, &bool)| HostCapacity {
            gpus: match &node.gpus {
                _ if !usable => Vec::new(),
                Devices::Named(names) => names.iter().cloned().map(Some).collect(),
                Devices::Simulated(count) => vec![None; *count as usize],
            },
            cpus: if *usable { node.cpus.map(u64::from) } else { Some(0) },
            sets: 0,
        };
        Self {
            hosts: nodes.iter().zip(usable).map(host).collect(),
            use_gpus: spec.use_gpus,
            cpus_per_bundle: u64::from(spec.cpus_per_bundle()),
            assigned: Vec::new(),
        }
    }

    /// Returns the number of bundles that still fit on a host.
    fn free_bundles(&self, host: usize) -> usize {
        let HostCapacity { gpus, cpus, .. } = &self.hosts[host];
        let cpus = cpus.map_or(usize::MAX, |cpus| (cpus / self.cpus_per_bundle) as usize);
        if self.use_gpus { cpus.min(gpus.len()) } else { cpus }
    }

    fn fits(&self, host: usize, set: &BundleSet) -> bool {
        let free = |id: &String| self.hosts[host].gpus.iter().any(|gpu| gpu.as_ref() == Some(id));
        self.free_bundles(host) >= set.bundles && set.ids.iter().flatten().all(free)
    }

    fn take(&mut self, at: usize, set: &BundleSet) -> (usize, Vec<Option<String>>) {
        let host = &mut self.hosts[at];
        host.sets += 1;
        host.cpus = host.cpus.map(|cpus| cpus - set.bundles as u64 * self.cpus_per_bundle);
        let gpus = match &set.ids {
            _ if !self.use_gpus => vec![None; set.bundles],
            None => host.gpus.drain(..set.bundles).collect(),
            Some(ids) => {
                host.gpus.retain(|gpu| gpu.as_ref().is_none_or(|gpu| !ids.contains(gpu)));
                ids.iter().cloned().map(Some).collect()
            }
        };
        (at, gpus)
    }

    fn assign(self, sets: &[BundleSet], strategy: PlacementStrategy) -> Option<Self> {
        match strategy {
            PlacementStrategy::StrictPack => (0..self.hosts.len())
                .find_map(|only| self.clone().try_each(sets, Preference::Fullest, |_, host| host == only)),
            // Uses the smallest free machine that is large enough: with one set for each machine, this succeeds whenever a
            // placement exists.
            PlacementStrategy::StrictSpread => {
                self.try_each(sets, Preference::Fullest, |allocation, host| allocation.hosts[host].sets == 0)
            }
            PlacementStrategy::Spread => {
                let spread = self.clone().try_each(sets, Preference::Even, |_, _| true);
                spread.or_else(|| self.assign(sets, PlacementStrategy::Pack))
            }
            PlacementStrategy::Pack => {
                let in_order = self.clone().try_each(sets, Preference::Fullest, |_, _| true);
                in_order.or_else(|| self.largest_first(sets))
            }
        }
    }

    /// Assigns each bundle set, in order, to the preferred host among those that fit it.
    fn try_each(
        mut self,
        sets: &[BundleSet],
        preference: Preference,
        allowed: impl Fn(&Self, usize) -> bool,
    ) -> Option<Self> {
        for set in sets {
            let fitting = (0..self.hosts.len()).filter(|host| allowed(&self, *host) && self.fits(*host, set));
            let best = fitting.min_by_key(|host| {
                let (sets, free) = (self.hosts[*host].sets, self.free_bundles(*host));
                match preference {
                    Preference::Even => (sets, free, *host),
                    Preference::Fullest => (usize::from(sets == 0), free, *host),
                    Preference::Largest => (usize::from(sets == 0), usize::MAX - free, *host),
                }
            })?;
            let taken = self.take(best, set);
            self.assigned.push(taken);
        }
        Some(self)
    }

    /// Assigns the largest bundle sets first, which succeeds more often than the order of the spec.
    fn largest_first(mut self, sets: &[BundleSet]) -> Option<Self> {
        let mut order: Vec<usize> = (0..sets.len()).collect();
        order.sort_by_key(|at| Reverse(sets[*at].bundles));
        let mut taken = vec![(0, Vec::new()); sets.len()];
        for at in order {
            let fitting = (0..self.hosts.len()).filter(|host| self.fits(*host, &sets[at]));
            let best = fitting.min_by_key(|host| (self.free_bundles(*host), *host))?;
            taken[at] = self.take(best, &sets[at]);
        }
        self.assigned = taken;
        Some(self)
    }
}

#[cfg(test)]
mod tests;
