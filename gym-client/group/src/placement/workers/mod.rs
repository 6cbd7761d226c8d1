//! Assignment of ranks to bundles: single workers, or tied groups that work as one model.

use std::num::NonZeroU32;

use gym_core::group::layout::Rank;
use gym_core::{Error, Result};

use super::place::Placement;
use super::spec::PlacementStrategy;

/// The assignment of workers to bundles.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WorkersOn {
    /// One worker on each bundle.
    #[default]
    EachBundle,
    /// This number of workers on each node, on its first bundles.
    PerNode(u32),
    /// A number of workers for each node, in a list.
    PerNodeList(Vec<u32>),
    /// Tied groups: the index of a node, and its bundles. Ranks are assigned in this order. In a unified cluster, the index is
    /// only a label.
    Tied(Vec<(u32, Vec<u32>)>),
}

/// The placement of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerPlacement {
    /// The number of the rank in its worker group.
    pub rank: Rank,
    /// The name: `<prefix>-<node>-<bundle>`, or `<prefix>-grp<group>-<number>` in a tied group of several.
    pub name: String,
    /// The index of the placement group; in a unified cluster, the label of the tied group.
    pub node: u32,
    /// The bundle, which is also the `LOCAL_RANK`.
    pub bundle: u32,
    /// The tied group, which is also the shard of the data.
    pub group: u32,
    /// All bundles of the tied group, for its leader; `None` for the other ranks.
    pub bundles: Option<Vec<u32>>,
    /// The machine, as a position in the list of nodes.
    pub host: usize,
    /// The name of the GPU in `CUDA_VISIBLE_DEVICES`.
    pub gpu: Option<String>,
}

impl Placement {
    /// Returns the placement of all ranks of a worker group.
    ///
    /// # Errors
    /// `InvalidArgument` in these cases:
    /// - the list does not have one entry for each node;
    /// - there are more workers than bundles;
    /// - a bundle does not exist or is repeated;
    /// - a tied group has no bundles.
    pub fn workers(&self, prefix: &str, on: &WorkersOn) -> Result<Vec<WorkerPlacement>> {
        let singles = |counts: Vec<u32>| -> Result<Vec<(u32, Vec<u32>)>> {
            let mut tied = Vec::new();
            for (node, (group, workers)) in (0..).zip(self.groups.iter().zip(counts)) {
                let bundles = group.bundles.len();
                if workers as usize > bundles {
                    let text =
                        format!("placement group {node} has {bundles} bundles, but {workers} workers were requested");
                    return Err(Error::invalid(text).about("place workers"));
                }
                tied.extend((0..workers).map(|at| match &self.sorted {
                    Some(sorted) => (at / self.gpus_per_node, vec![sorted[at as usize]]),
                    None => (node, vec![at]),
                }));
            }
            Ok(tied)
        };
        let tied = match on {
            WorkersOn::EachBundle => singles(self.groups.iter().map(|group| group.bundles.len() as u32).collect())?,
            WorkersOn::PerNode(workers) => singles(vec![*workers; self.groups.len()])?,
            WorkersOn::PerNodeList(list) if list.len() == self.groups.len() => singles(list.clone())?,
            WorkersOn::PerNodeList(list) => {
                let text =
                    format!("workers_per_node has {} entries for {} placement groups", list.len(), self.groups.len());
                return Err(Error::invalid(text).about("place workers"));
            }
            WorkersOn::Tied(tied) => tied.clone(),
        };
        let mut places: Vec<WorkerPlacement> = Vec::new();
        for (group, (node, bundles)) in (0..).zip(&tied) {
            if bundles.is_empty() {
                return Err(Error::invalid(format!("tied group {group} has no bundles")).about("place workers"));
            }
            for (number, &bundle) in bundles.iter().enumerate() {
                places.push(self.worker(prefix, places.len(), group, *node, bundles, number, bundle)?);
            }
        }
        let mut seen = std::collections::BTreeSet::new();
        let one = self.groups.len() == 1;
        match places.iter().find(|place| !seen.insert((if one { 0 } else { place.node }, place.bundle))) {
            Some(twice) => {
                let text = format!("bundle {} of node {} is named twice", twice.bundle, twice.node);
                Err(Error::invalid(text).about("place workers"))
            }
            None => Ok(places),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one caller, and each is a field of the result")]
    fn worker(
        &self,
        prefix: &str,
        rank: usize,
        group: u32,
        node: u32,
        bundles: &[u32],
        number: usize,
        bundle: u32,
    ) -> Result<WorkerPlacement> {
        let home = if self.groups.len() == 1 { self.groups.first() } else { self.groups.get(node as usize) };
        let placed = home.and_then(|home| home.bundles.get(bundle as usize)).ok_or_else(|| {
            Error::invalid(format!("there is no bundle {bundle} on node {node}")).about("place workers")
        })?;
        let name = if bundles.len() > 1 {
            format!("{prefix}-grp{group}-{number}")
        } else {
            format!("{prefix}-{node}-{bundle}")
        };
        let bundles = (number == 0).then(|| bundles.to_vec());
        Ok(WorkerPlacement {
            rank: rank as Rank,
            name,
            node,
            bundle,
            group,
            bundles,
            host: placed.host,
            gpu: placed.gpu.clone(),
        })
    }

    /// Creates tied groups of `size` bundles, for engines with that many GPUs. Groups do not span nodes; the remaining bundles of a
    /// node are unused.
    ///
    /// In a unified cluster, the bundles of a group are in topological order. A machine is cut into as many groups as fit it. The bundles
    /// that remain on the machines of a domain make groups, and then those that remain in the domains. The order of the groups is
    /// that of their first bundles, and the label is the number of its machine. NeMo RL cuts the whole order into consecutive
    /// groups, so that one machine with a remainder makes the groups of all later ones span two machines. The number of groups is the
    /// same.
    ///
    /// # Errors
    /// `InvalidArgument` if there is not enough capacity for one group.
    pub fn tied_groups(&self, size: NonZeroU32) -> Result<WorkersOn> {
        let size = size.get() as usize;
        let tied: Vec<(u32, Vec<u32>)> = match &self.sorted {
            Some(sorted) => {
                let bundles =
                    |engine: Vec<usize>| (self.sites[engine[0]][1], engine.into_iter().map(|at| sorted[at]).collect());
                engines(&self.sites, size).into_iter().map(bundles).collect()
            }
            None => {
                let node = |(node, group): (u32, &super::PlacementGroup)| -> Vec<(u32, Vec<u32>)> {
                    let all: Vec<u32> = group.bundles.iter().map(|bundle| bundle.index).collect();
                    all.chunks_exact(size).map(|bundles| (node, bundles.to_vec())).collect()
                };
                (0..).zip(&self.groups).flat_map(node).collect()
            }
        };
        if tied.is_empty() {
            let text = format!(
                "unable to allocate any worker groups of {size} bundles; use a unified cluster or smaller engines"
            );
            return Err(Error::invalid(text).about("place workers"));
        }
        Ok(WorkersOn::Tied(tied))
    }
}

/// Cuts positions into engines of `size`: within a machine, then within a domain, then across them.
fn engines(sites: &[[u32; 2]], size: usize) -> Vec<Vec<usize>> {
    let mut left: Vec<usize> = (0..sites.len()).collect();
    let mut engines = Vec::new();
    for level in [2, 1, 0] {
        let mut rest = Vec::new();
        for near in left.chunk_by(|a, b| sites[*a][..level] == sites[*b][..level]) {
            let whole = near.chunks_exact(size);
            rest.extend_from_slice(whole.remainder());
            engines.extend(whole.map(<[usize]>::to_vec));
        }
        left = rest;
    }
    engines.sort_unstable();
    engines
}

/// Returns the first rank of each tied group, by group. These ranks are called with data and have the list of the group's bundles.
#[must_use]
pub fn leaders(workers: &[WorkerPlacement]) -> Vec<Rank> {
    workers.iter().filter(|worker| worker.bundles.is_some()).map(|worker| worker.rank).collect()
}

/// The degrees of parallelism that decide whether one model spans nodes; 1 means none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSpan {
    /// Ranks that share one layer.
    pub tensor: u32,
    /// Stages of the pipeline.
    pub pipeline: u32,
    /// Ranks that share one sequence.
    pub context: u32,
    /// Ranks that share the experts.
    pub expert: u32,
    /// Ranks that share one expert's layer.
    pub expert_tensor: u32,
}

impl Default for ModelSpan {
    fn default() -> Self {
        Self { tensor: 1, pipeline: 1, context: 1, expert: 1, expert_tensor: 1 }
    }
}

impl ModelSpan {
    /// Returns `true` if a Megatron model needs a unified cluster: its tensor and context ranks, or its expert ranks, exceed the
    /// GPUs of a node. Pipeline stages may be on different nodes.
    #[must_use]
    pub fn megatron_spans(&self, gpus_per_node: u32) -> bool {
        (self.tensor * self.context).max(self.expert_tensor * self.expert) > gpus_per_node
    }

    /// Returns `true` if a generation engine needs a unified cluster. All of its ranks belong together.
    #[must_use]
    pub fn engine_spans(&self, gpus_per_node: u32) -> bool {
        self.tensor * self.pipeline > gpus_per_node
    }

    /// Returns the placement strategy of a generation group. A group that shares its bundles with training has none of its own.
    /// Any other group is packed, because spreading would interleave an engine's bundles over the nodes.
    #[must_use]
    pub fn generation_strategy(colocated: bool) -> Option<PlacementStrategy> {
        (!colocated).then_some(PlacementStrategy::Pack)
    }
}

#[cfg(test)]
mod tests;
