//! Bundles held on this machine.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use futures_util::stream::BoxStream;
use gym_core::base::host_name;
use gym_core::group::Rank;
use gym_core::group::cluster::{NodeResources, Placement, place};
use gym_core::{CallContext, Code, Error, Incarnation, Result};

use crate::group::provision::deployment::{Deployment, LaunchSpec, Reservation, ReserveRequest};
use crate::group::provision::events::{EventLog, NodeEvent, NodeState, NodeStatus};
use crate::group::provision::place::{HeldRendezvous, Rendezvous};
use crate::group::usage::visible_gpus;

/// Prepares ranks on this machine, for a reservation and for the agent of a node.
#[async_trait]
pub(super) trait PreparesRanks: fmt::Debug + Send + Sync + 'static {
    /// Prepares the ranks of `spec`, and starts none. `held` are the ports of the rendezvous, if they are held for these ranks alone: they are
    /// held as long as the ranks are.
    async fn prepare(
        &self,
        cx: &CallContext,
        spec: LaunchSpec,
        rendezvous: Rendezvous,
        held: Option<HeldRendezvous>,
    ) -> Result<Arc<dyn PreparedRanks>>;

    /// Returns the time on the clock of the leases.
    fn now(&self) -> Duration;
}

/// Ranks that were prepared on this machine. Dropping them ends them.
#[async_trait]
pub(super) trait PreparedRanks: Deployment {
    /// Starts these incarnations, with another rendezvous if one is given. An incarnation that was started before, or was followed by another one, is
    /// not started again.
    ///
    /// # Errors
    /// `NotFound` for a rank that was not launched. A rank that fails to start is an event.
    async fn start(&self, lives: &[(Rank, Incarnation)], rendezvous: Option<Rendezvous>) -> Result<()>;

    /// Kills the incarnations of these ranks that run, and returns when they have ended.
    async fn end(&self, ranks: &[Rank]) -> Result<()>;

    /// Lets the ranks run until this [time](PreparesRanks::now), unless it is extended. They end then even if the agent is stopped.
    async fn lease(&self, until: Duration);
}

/// A reservation on this machine. The machine is not divided between reservations: each may use all of it.
#[derive(Debug)]
pub(super) struct MachineReservation {
    ranks: Arc<dyn PreparesRanks>,
    placement: Arc<Placement>,
    nodes: Vec<NodeResources>,
    log: EventLog<NodeEvent>,
    /// `None` after the release.
    deployments: Mutex<Option<Vec<Weak<dyn Deployment>>>>,
}

impl MachineReservation {
    pub(super) fn reserve(ranks: impl PreparesRanks, request: &ReserveRequest) -> Result<Arc<dyn Reservation>> {
        let here = || vec![request.counted(this_machine())];
        let nodes = request.simulated.clone().unwrap_or_else(here);
        let placement = Arc::new(place(&request.cluster, &nodes, request.unified)?);
        let log = EventLog::new();
        nodes.iter().for_each(|node| log.push(NodeEvent::Serving { node: node.name.clone() }));
        let (ranks, deployments) = (Arc::new(ranks), Mutex::new(Some(Vec::new())));
        Ok(Arc::new(Self { ranks, placement, nodes, log, deployments }))
    }

    /// Holds a rendezvous, and starts the first incarnation of every rank.
    async fn start(&self, cx: &CallContext, spec: LaunchSpec) -> Result<Arc<dyn Deployment>> {
        let subject = format!("start group {}", spec.group);
        let held = HeldRendezvous::hold(spec.ranks.len(), &spec.ports).map_err(|error| error.about(subject))?;
        let first: Vec<(Rank, Incarnation)> = spec.ranks.iter().map(|place| (place.rank, Incarnation(1))).collect();
        let rendezvous = held.addresses.clone();
        let ranks = self.ranks.prepare(cx, spec, rendezvous, Some(held)).await?;
        ranks.start(&first, None).await?;
        Ok(ranks)
    }
}

#[async_trait]
impl Reservation for MachineReservation {
    fn placement(&self) -> Arc<Placement> {
        Arc::clone(&self.placement)
    }

    fn nodes(&self) -> Vec<NodeStatus> {
        let node = |node: &NodeResources| NodeStatus {
            resources: node.clone(),
            address: None,
            state: NodeState::Serving,
            usage: None,
        };
        self.nodes.iter().map(node).collect()
    }

    fn events(&self) -> BoxStream<'static, NodeEvent> {
        self.log.stream()
    }

    async fn launch(&self, cx: &CallContext, spec: LaunchSpec) -> Result<Arc<dyn Deployment>> {
        let lock = || self.deployments.lock().unwrap_or_else(PoisonError::into_inner);
        let released = || Error::not_started(Code::Unavailable, "the bundles were released");
        if lock().is_none() {
            return Err(released());
        }
        let deployment = self.start(cx, spec).await?;
        let mut deployments = lock();
        let deployments = deployments.as_mut().ok_or_else(released)?;
        deployments.retain(|known| known.strong_count() > 0);
        deployments.push(Arc::downgrade(&deployment));
        Ok(deployment)
    }

    async fn release(&self, grace: Duration) -> Result<()> {
        let held: Vec<_> = {
            let mut deployments = self.deployments.lock().unwrap_or_else(PoisonError::into_inner);
            deployments.take().into_iter().flatten().filter_map(|known| known.upgrade()).collect()
        };
        join_all(held.iter().map(|deployment| deployment.shutdown(grace))).await.into_iter().collect()
    }
}

/// Returns what this machine has.
pub(super) fn this_machine() -> NodeResources {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    NodeResources::new(host_name(), u32::try_from(cpus).unwrap_or(u32::MAX), visible_gpus())
}
