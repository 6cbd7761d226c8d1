//! The agents of a job as those of a controller, and which bundles each of them has.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use gym_core::{CallContext, Code, Endpoint, Error, Result};

use crate::placement::{Devices, NodeResources, PlacedBundle, Placement, place_each};
use crate::provision::{BundleMoves, NodeSource, NodesReservation, ReserveRequest};
use crate::ray::run::RayRun;

/// The agents of a job, on which bundles are placed as on any nodes.
#[async_trait]
impl NodeSource for RayRun {
    async fn agents(&self, _: &CallContext) -> Result<Vec<(String, Vec<Endpoint>)>> {
        let state = self.state();
        if let Some(end) = state.ended {
            if !self.is_over() {
                // The job is submitted again, and will have other agents.
                return Ok(Vec::new());
            }
            let message = format!("job {} on Ray has ended: {}", self.id(), end.why);
            return Err(Error::not_started(Code::FailedPrecondition, message));
        }
        let agents = (0..).zip(state.shares).filter_map(|(number, share): (usize, _)| {
            let agent = share.agent?;
            Some((format!("share {number} on {}", agent.ip), agent.endpoints))
        });
        Ok(agents.collect())
    }
}

/// Tells a reservation which of its nodes Ray drains, until either ends.
pub(super) async fn pass_on_drains(run: Weak<RayRun>, nodes: Weak<NodesReservation>) {
    let Some(mut state) = run.upgrade().map(|run| run.watch()) else { return };
    let mut told: BTreeSet<(usize, String)> = BTreeSet::new();
    loop {
        let news: Vec<(usize, String)> = {
            let state = state.borrow_and_update();
            let shares = (0..).zip(&state.shares);
            let drained = shares.filter_map(|(number, share): (usize, _)| {
                let (agent, why) = (share.agent.as_ref()?, share.draining.as_ref()?);
                told.insert((number, agent.node_id.clone())).then(|| (number, why.clone()))
            });
            drained.collect()
        };
        let Some(nodes) = nodes.upgrade() else { return };
        for (number, why) in news {
            let share = share_name(number);
            nodes.drain(|name| share_of(name) == Some(&share), &why);
        }
        drop(nodes);
        if state.changed().await.is_err() {
            return;
        }
    }
}

/// The agents of a job whose bundles Ray has placed: each share has its own.
#[derive(Debug)]
pub(super) struct PlacedShares(pub(super) Arc<RayRun>);

#[async_trait]
impl NodeSource for PlacedShares {
    async fn agents(&self, cx: &CallContext) -> Result<Vec<(String, Vec<Endpoint>)>> {
        self.0.agents(cx).await
    }

    fn place(&self, request: &ReserveRequest, nodes: &[NodeResources]) -> Result<Placement> {
        place_each(&request.cluster, nodes, request.unified)
    }

    fn move_lost(
        &self,
        _: &ReserveRequest,
        placement: &Placement,
        lost: &BTreeMap<usize, String>,
        _: &BTreeSet<String>,
        nodes: &[NodeResources],
    ) -> Result<BundleMoves> {
        return_to_shares(placement, lost, nodes).ok_or_else(|| {
            let missing = self.0.state().missing();
            let message = format!("Ray has not started all lost shares again\n  {missing}");
            Error::not_started(Code::ResourceExhausted, message)
        })
    }
}

/// Returns the name of a share in those of its nodes.
fn share_name(number: usize) -> String {
    format!("share{number:04}")
}

/// Returns the name of a share, from the name of its node: `share0003@10.0.0.1`.
fn share_of(name: &str) -> Option<&str> {
    name.split_once('@').map(|(share, _)| share)
}

/// Moves the bundles of each lost host to the agent that has the same share now, with the GPUs that it has. `None` if a share has no agent.
fn return_to_shares(
    placement: &Placement,
    lost: &BTreeMap<usize, String>,
    nodes: &[NodeResources],
) -> Option<BundleMoves> {
    let mut moves = Vec::new();
    for (host, name) in lost {
        let to = nodes.iter().position(|node| share_of(&node.name) == share_of(name))?;
        let mut gpus = match &nodes[to].gpus {
            Devices::Named(names) => names.clone(),
            Devices::Simulated(_) => Vec::new(),
        }
        .into_iter();
        for (group, bundles) in (0..).zip(&placement.groups) {
            let of_host = (0..).zip(&bundles.bundles).filter(|(_, bundle)| bundle.host == *host);
            for (at, bundle) in of_host {
                let gpu = if bundle.gpu.is_some() { Some(gpus.next()?) } else { None };
                moves.push(((group, at), PlacedBundle { host: to, gpu, ..bundle.clone() }));
            }
        }
    }
    Some(BundleMoves(moves))
}

#[cfg(test)]
mod tests {
    use crate::placement::ClusterSpec;

    use super::*;

    #[test]
    fn bundles_return_to_their_share_with_the_gpus_of_its_new_node() {
        let node =
            |name: &str, gpus: &[&str]| NodeResources::new(name, 8, gpus.iter().map(|gpu| (*gpu).to_owned()).collect());
        let cluster = ClusterSpec::new([2, 1]);
        let before = [node("share0000@a", &["0", "1"]), node("share0001@b", &["3"])];
        let placement = place_each(&cluster, &before, false).unwrap();
        let lost = BTreeMap::from([(0, "share0000@a".to_owned())]);
        assert_eq!(return_to_shares(&placement, &lost, &before[1..]), None, "not started again yet");
        let offered = [node("share0000@c", &["5", "6"]), node("share0001@b", &[])];
        let moves = return_to_shares(&placement, &lost, &offered).unwrap();
        let moved: Vec<_> = moves.0.iter().map(|(id, placed)| (*id, placed.host, placed.gpu.as_deref())).collect();
        assert_eq!(moved, [((0, 0), 0, Some("5")), ((0, 1), 0, Some("6"))]);
    }
}
