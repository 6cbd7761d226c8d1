//! The place of a rank, its GPUs, and the rendezvous of a group.

mod gpus;
mod ports;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::sync::Arc;

use gym_core::Result;
use gym_core::group::Rank;
use gym_core::group::cluster::{PlacedBundle, Placement};
use serde::{Deserialize, Serialize};

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
    /// Index of its node.
    pub node_rank: u32,
    /// The bundle on which it runs. The reservation knows the node of the bundle.
    pub bundle: BundleId,
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
        let bundle = (0, rank);
        Self { rank, name, world_size, local_rank: rank, node_rank: 0, bundle, gpus, bundles, tied: rank, engine_port }
    }
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

/// What a group has of this machine as long as its ranks may run: its ports, and the GPUs of its cluster.
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
