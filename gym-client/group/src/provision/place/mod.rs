//! The place of a rank, its GPUs, and the rendezvous of a group.

mod gpus;
mod ports;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::sync::Arc;

use gym_core::Result;
use gym_core::group::Rank;
use serde::{Deserialize, Serialize};

use crate::placement::{PlacedBundle, Placement};

pub(crate) use gpus::{GpuFolder, HeldGpus, listed};
pub use ports::HeldPort;

use ports::{SearchOrder, search};

/// A bundle of a cluster: its placement group, and its number in the group.
pub type BundleId = (u32, u32);

/// The place of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankPlace {
    /// Number of the rank in the group.
    pub rank: Rank,
    /// Its name, as in logs: `<group>-<node>-<bundle>`. Unique within the group.
    pub name: String,
    /// Number of ranks in the group.
    pub world_size: u32,
    /// Index of its first bundle on the node.
    pub local_rank: u32,
    /// Number of ranks of the group on its node.
    pub local_world_size: u32,
    /// Index of its node.
    pub node_rank: u32,
    /// The bundle on which it runs. The reservation knows the node of the bundle.
    pub bundle: BundleId,
    /// Number of CPUs of the bundle; 1 if CPUs are not counted.
    pub cpus: u32,
    /// Its GPUs, as in `CUDA_VISIBLE_DEVICES`; empty without GPUs.
    pub gpus: Vec<String>,
    /// The bundles of its tied ranks, for the leader of the tied ranks; `None` for the others.
    pub bundles: Option<Vec<u32>>,
    /// Ranks with the same number are tied: they start and end together.
    pub tied: u32,
    /// The first of a hundred ports on this node that are reserved for the engine of its tied ranks; only for the leader.
    pub engine_port: Option<u16>,
}

impl RankPlace {
    /// Returns the place of a rank on the bundle of the same number, on one node, without a GPU and not tied.
    #[must_use]
    pub fn on_one_node(rank: Rank, world_size: u32) -> Self {
        let name = format!("worker-0-{rank}");
        let bundles = Some(vec![rank]);
        let (gpus, engine_port) = (Vec::new(), None);
        Self {
            rank,
            name,
            world_size,
            local_rank: rank,
            local_world_size: world_size,
            node_rank: 0,
            bundle: (0, rank),
            cpus: 1,
            gpus,
            bundles,
            tied: rank,
            engine_port,
        }
    }
}

/// Counts the ranks of the group on each host of the placement, and writes the numbers into the places.
pub(crate) fn count_local(placement: &Placement, ranks: &mut [RankPlace]) {
    let host = |place: &RankPlace| placed(placement, place.bundle).map(|bundle| bundle.host);
    let mut counts: BTreeMap<Option<usize>, u32> = BTreeMap::new();
    ranks.iter().for_each(|place| *counts.entry(host(place)).or_default() += 1);
    ranks.iter_mut().for_each(|place| place.local_world_size = counts[&host(place)]);
}

/// Returns a bundle of a placement.
pub(crate) fn placed(placement: &Placement, (group, bundle): BundleId) -> Option<&PlacedBundle> {
    placement.groups.get(group as usize)?.bundles.get(bundle as usize)
}

/// The rendezvous of the ranks of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rendezvous {
    /// Address of rank 0's node.
    pub master_address: IpAddr,
    /// A port on that node, reserved for rank 0 to listen on.
    pub master_port: u16,
    /// One address and held port for each rank, in rank order.
    pub available: Vec<(IpAddr, u16)>,
}

impl Rendezvous {
    pub(super) fn variables(&self) -> [(&'static str, String); 4] {
        let quoted = |(address, _): &(IpAddr, u16)| format!("'{address}'");
        let addresses: Vec<String> = self.available.iter().map(quoted).collect();
        let ports: Vec<String> = self.available.iter().map(|(_, port)| port.to_string()).collect();
        [
            ("MASTER_ADDR", self.master_address.to_string()),
            ("MASTER_PORT", self.master_port.to_string()),
            // Formatted as a Python list, which NeMo RL's workers read.
            ("AVAILABLE_ADDR_LIST", format!("[{}]", addresses.join(", "))),
            ("AVAILABLE_PORT_LIST", format!("[{}]", ports.join(", "))),
        ]
    }
}

/// Ports reserved for one group on this machine, and the rendezvous that uses them. They stay reserved until this is dropped,
/// across all restarts.
#[derive(Debug)]
pub(crate) struct HeldRendezvous {
    _held: Vec<HeldPort>,
    pub(crate) addresses: Rendezvous,
}

impl HeldRendezvous {
    pub(crate) fn hold(ranks: usize, range: &Range<u16>) -> Result<Self> {
        let held = hold_ports(ranks + 1, range)?;
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let available = held[1..].iter().map(|port| (here, port.port())).collect();
        let rendezvous = Rendezvous { master_address: here, master_port: held[0].port(), available };
        Ok(Self { _held: held, addresses: rendezvous })
    }
}

/// The part of this machine that a group has as long as its ranks may run: its ports, and the GPUs of its cluster.
#[derive(Debug)]
pub(crate) struct HeldPlace {
    _ports: HeldRendezvous,
    _gpus: Arc<HeldGpus>,
}

impl HeldPlace {
    pub(crate) fn new(ports: HeldRendezvous, gpus: Arc<HeldGpus>) -> Self {
        Self { _ports: ports, _gpus: gpus }
    }
}

/// Holds this number of free ports of `range`.
pub(crate) fn hold_ports(count: usize, range: &Range<u16>) -> Result<Vec<HeldPort>> {
    let mut random = fastrand::Rng::new();
    let hold = |_| search(range, SearchOrder::EachOnce, &BTreeSet::new(), &mut random, HeldPort::bind);
    (0..count).map(hold).collect()
}

#[cfg(test)]
mod tests {
    use crate::placement::{ClusterSpec, NodeResources, place};

    use super::*;

    #[test]
    fn ranks_are_counted_on_their_host() {
        let nodes = [NodeResources::new("a", 3, Vec::new()), NodeResources::new("b", 3, Vec::new())];
        // The bundles of the ranks, and the number of ranks on the host of each.
        let cases: [(bool, &[BundleId], &[u32]); 3] = [
            (false, &[(0, 0), (0, 1), (1, 0)], &[2, 2, 1]),
            (false, &[(1, 1), (0, 0)], &[1, 1]),
            (true, &[(0, 0), (0, 1), (0, 2), (0, 3)], &[3, 3, 3, 1]),
        ];
        for (unified, bundles, expected) in cases {
            let mut spec = ClusterSpec::new(if unified { vec![4] } else { vec![2, 2] });
            (spec.use_gpus, spec.placement_group_strategy) = (false, crate::placement::PlacementStrategy::Pack);
            let placement = place(&spec, &nodes, unified).expect("there is room");
            let of = |bundle: &BundleId| RankPlace { bundle: *bundle, ..RankPlace::on_one_node(0, 9) };
            let mut ranks: Vec<RankPlace> = bundles.iter().map(of).collect();
            count_local(&placement, &mut ranks);
            let counts: Vec<u32> = ranks.iter().map(|rank| rank.local_world_size).collect();
            assert_eq!(counts, expected, "{placement:?}");
        }
    }
}
