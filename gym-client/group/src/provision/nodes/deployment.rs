//! The ranks of one launch on several nodes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use futures_util::stream::BoxStream;
use gym_core::group::{Rank, RankExit};
use gym_core::{CallContext, Code, Error, Incarnation, Result};
use parking_lot::Mutex;
use serde_json::Value;

use crate::provision::deployment::{Deployment, LaunchSpec};
use crate::provision::events::{EventLog, RankEvent};
use crate::provision::nodes::link::NodeLink;
use crate::provision::nodes::message::{KillBody, LaunchBody, RankBody, RanksBody, StartBody, StopBody, millis};
use crate::provision::nodes::state::{NodeRanks, NodesState};
use crate::provision::place::{RankPlace, Rendezvous, count_local};
use crate::provision::variables::{RankEnvironment, process_variables, sent_variables};
use crate::usage::node::NodeUsage;
use crate::usage::process::ProcessUsage;

/// Time for a stop beyond the grace.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the reports of exits after a stop.
const EXITS_TIMEOUT: Duration = Duration::from_secs(2);

/// The ranks of a launch. Dropping it kills them.
#[derive(Debug)]
pub(super) struct NodesDeployment(Arc<NodesRanks>);

/// The ranks, as the reservation reports on them.
#[derive(Debug)]
pub(super) struct NodesRanks {
    state: Arc<NodesState>,
    /// Number of the group among those of the reservation.
    group: u64,
    spec: LaunchSpec,
    ranks: Mutex<BTreeMap<Rank, RankOnNode>>,
    /// Every launch, with its node.
    launches: Mutex<BTreeMap<u64, Arc<NodeLink>>>,
    /// The node of rank 0 when the rendezvous was requested, and the rendezvous.
    rendezvous: Mutex<Option<(Vec<String>, Rendezvous)>>,
    /// Held by a restart while it decides where ranks start.
    restarting: tokio::sync::Mutex<()>,
    log: EventLog,
}

/// The current incarnation of a rank.
#[derive(Clone, Debug)]
struct RankOnNode {
    incarnation: Incarnation,
    link: Arc<NodeLink>,
    launch: u64,
    ended: bool,
    usage: Option<ProcessUsage>,
}

/// Ranks that start on one node.
#[derive(Debug, Default)]
struct NodeStart {
    /// The launch that has them; `None` if it must be prepared.
    launch: Option<u64>,
    incarnations: Vec<(Rank, Incarnation)>,
    places: Vec<RankPlace>,
}

impl NodesDeployment {
    pub(super) async fn launch(state: &Arc<NodesState>, cx: &CallContext, mut spec: LaunchSpec) -> Result<Self> {
        let subject = format!("start group {}", spec.group);
        let controller = sent_variables(process_variables(), state.variables());
        spec.controller = Some(controller.map_err(|error| error.about(subject.clone()))?);
        let incarnations: Vec<(Rank, Incarnation)> =
            spec.ranks.iter().map(|place| (place.rank, Incarnation(1))).collect();
        let ranks = NodesRanks {
            group: state.number(),
            state: Arc::clone(state),
            spec,
            ranks: Mutex::default(),
            launches: Mutex::default(),
            rendezvous: Mutex::default(),
            restarting: tokio::sync::Mutex::default(),
            log: EventLog::new(),
        };
        // Its drop stops what has started, if the rest cannot start.
        let deployment = Self(Arc::new(ranks));
        let started = async { deployment.0.start(cx, &incarnations, &deployment.0.meet(cx).await?).await };
        started.await.map_err(|error: Error| error.about(subject))?;
        Ok(deployment)
    }
}

impl NodesRanks {
    fn place(&self, rank: Rank) -> Result<&RankPlace> {
        self.spec.ranks.iter().find(|place| place.rank == rank).ok_or_else(|| self.no_such(rank))
    }

    fn no_such(&self, rank: Rank) -> Error {
        Error::not_started(Code::NotFound, format!("group {} has no rank {rank}", self.spec.group))
    }

    /// Starts incarnations on the nodes that have their bundles.
    async fn start(
        self: &Arc<Self>,
        cx: &CallContext,
        incarnations: &[(Rank, Incarnation)],
        rendezvous: &Rendezvous,
    ) -> Result<()> {
        let mut starts: BTreeMap<String, (Arc<NodeLink>, NodeStart)> = BTreeMap::new();
        // Bundles may have moved.
        let mut places = self.spec.ranks.clone();
        count_local(&self.state.placement(), &mut places);
        for (rank, incarnation) in incarnations {
            let place = places.iter().find(|place| place.rank == *rank).ok_or_else(|| self.no_such(*rank))?;
            let (link, gpu) = self.state.host_of(place.bundle)?;
            let (_, start) =
                starts.entry(link.session.clone()).or_insert_with(|| (Arc::clone(&link), NodeStart::default()));
            start.incarnations.push((*rank, *incarnation));
            let gpus = gpu.map_or_else(|| place.gpus.clone(), |gpu| vec![gpu]);
            start.places.push(RankPlace { gpus, ..place.clone() });
        }
        // A rank that was launched on the node before starts under its old launch; the others under a new one.
        let starts: Vec<(Arc<NodeLink>, NodeStart)> =
            starts.into_values().flat_map(|(link, start)| split(&link, start, &self.ranks.lock())).collect();
        let started = starts.into_iter().map(|(link, start)| self.start_on(cx, link, start, rendezvous));
        join_all(started).await.into_iter().collect()
    }

    async fn start_on(
        self: &Arc<Self>,
        cx: &CallContext,
        link: Arc<NodeLink>,
        start: NodeStart,
        rendezvous: &Rendezvous,
    ) -> Result<()> {
        let launch = match start.launch {
            Some(launch) => launch,
            None => {
                let launch = self.state.number();
                let known = self.state.transports().known();
                let body = LaunchBody::of(&self.spec, &known, &link.session, launch, start.places.clone(), rendezvous);
                self.state.route(launch, Arc::downgrade(self) as _);
                self.launches.lock().insert(launch, Arc::clone(&link));
                match link.call::<Value>(cx, "/node/launch", &body).await {
                    // Its ranks are reported as lost below.
                    Err(_) if link.is_lost() => {}
                    launched => drop(launched?),
                }
                launch
            }
        };
        for ((rank, incarnation), place) in start.incarnations.iter().zip(&start.places) {
            let on =
                RankOnNode { incarnation: *incarnation, link: Arc::clone(&link), launch, ended: false, usage: None };
            self.ranks.lock().insert(*rank, on);
            let (rank, incarnation, node) = (*rank, *incarnation, link.name().to_owned());
            let gpus = place.gpus.clone();
            self.log.push(RankEvent::Placed { rank, incarnation, node, gpus });
            if link.is_draining() {
                self.log.push(RankEvent::Draining { rank, incarnation });
            }
        }
        let body = StartBody {
            session: link.session.clone(),
            launch,
            incarnations: start.incarnations.clone(),
            rendezvous: Some(rendezvous.clone()),
        };
        let started = link.call::<Value>(cx, "/node/start", &body).await;
        if link.is_lost() {
            // The node was lost before these ranks were known to be on it.
            self.lost(&link, "it was lost during the start of its ranks");
            return Ok(());
        }
        started.map(drop)
    }

    /// Returns the rendezvous: at rank 0's node, with a port for each rank on its own node. Ports are held anew when a rank moves.
    async fn meet(&self, cx: &CallContext) -> Result<Rendezvous> {
        let hosts = self.spec.ranks.iter().map(|place| Ok(self.state.host_of(place.bundle)?.0));
        let hosts: Vec<Arc<NodeLink>> = hosts.collect::<Result<_>>()?;
        let sessions: Vec<String> = hosts.iter().map(|link| link.session.clone()).collect();
        if let Some((known, rendezvous)) = &*self.rendezvous.lock()
            && *known == sessions
        {
            return Ok(rendezvous.clone());
        }
        let first = hosts.first().ok_or_else(|| Error::invalid("a group has at least one rank"))?;
        let mut counts: BTreeMap<&str, (&Arc<NodeLink>, usize)> = BTreeMap::new();
        for link in hosts.iter().chain([first]) {
            counts.entry(&link.session).or_insert((link, 0)).1 += 1;
        }
        let held = counts.into_values().map(|(link, count)| async move {
            let ports = self.state.ports(cx, link, self.group, &self.spec.ports, count).await;
            ports.map(|ports| (link.session.as_str(), ports))
        });
        let held: BTreeMap<&str, Vec<u16>> = join_all(held).await.into_iter().collect::<Result<_>>()?;
        let mut held: BTreeMap<&str, std::vec::IntoIter<u16>> =
            held.into_iter().map(|(session, ports)| (session, ports.into_iter())).collect();
        let mut port = |link: &Arc<NodeLink>| held.get_mut(link.session.as_str()).and_then(Iterator::next).unwrap_or(0);
        let rendezvous = Rendezvous {
            master_address: first.address,
            master_port: port(first),
            available: hosts.iter().map(|link| (link.address, port(link))).collect(),
        };
        *self.rendezvous.lock() = Some((sessions, rendezvous.clone()));
        Ok(rendezvous)
    }

    /// Kills the current incarnations of these ranks on nodes that respond, and returns when they have ended.
    async fn end(&self, cx: &CallContext, ranks: impl Iterator<Item = Rank>) -> Result<()> {
        let mut ending: BTreeMap<u64, (Arc<NodeLink>, Vec<Rank>)> = BTreeMap::new();
        {
            let known = self.ranks.lock();
            for (rank, on) in ranks.filter_map(|rank| Some((rank, known.get(&rank)?))) {
                ending.entry(on.launch).or_insert_with(|| (Arc::clone(&on.link), Vec::new())).1.push(rank);
            }
        }
        let ended =
            ending.into_iter().filter(|(_, (link, _))| !link.is_lost()).map(|(launch, (link, ranks))| async move {
                let body = RanksBody { session: link.session.clone(), launch, ranks };
                match link.call::<Value>(cx, "/node/end", &body).await {
                    // Its ranks end with its lease, for which the move waits.
                    Err(_) if link.is_lost() => Ok(()),
                    result => result.map(drop),
                }
            });
        join_all(ended).await.into_iter().collect()
    }

    /// Waits for the exits of these ranks, which arrive with the next polls of their nodes, or with the loss of one.
    async fn exits(&self, of: impl Fn(Rank) -> bool) {
        loop {
            // Before the look, so that an exit after it is noticed.
            let read = self.log.count();
            if self.ranks.lock().iter().all(|(rank, known)| known.ended || !of(*rank)) {
                return;
            }
            self.log.beyond(read).await;
        }
    }
}

#[async_trait]
impl NodeRanks for NodesRanks {
    fn number(&self) -> u64 {
        self.group
    }

    fn event(&self, launch: u64, event: RankEvent) {
        if let RankEvent::Exited { rank, exit } = &event {
            let mut ranks = self.ranks.lock();
            match ranks.get_mut(rank) {
                Some(known) if known.launch == launch && known.incarnation.0 == exit.incarnation => {
                    (known.ended, known.usage) = (true, None);
                }
                _ => return,
            }
        }
        self.log.push(event);
    }

    fn used(&self, launch: u64, samples: Vec<(Rank, ProcessUsage)>) {
        let mut ranks = self.ranks.lock();
        for (rank, sample) in samples {
            if let Some(known) = ranks.get_mut(&rank).filter(|known| known.launch == launch && !known.ended) {
                known.usage = Some(sample);
            }
        }
    }

    fn lost(&self, link: &Arc<NodeLink>, why: &str) {
        let mut ranks = self.ranks.lock();
        for (rank, known) in ranks.iter_mut().filter(|(_, known)| !known.ended && Arc::ptr_eq(&known.link, link)) {
            (known.ended, known.usage) = (true, None);
            let exit = RankExit::node_lost(known.incarnation, link.name(), why);
            self.log.push(RankEvent::Exited { rank: *rank, exit });
        }
    }

    #[cfg(feature = "ray")]
    fn draining(&self, link: &Arc<NodeLink>) {
        let ranks = self.ranks.lock();
        for (rank, known) in ranks.iter().filter(|(_, known)| !known.ended && Arc::ptr_eq(&known.link, link)) {
            self.log.push(RankEvent::Draining { rank: *rank, incarnation: known.incarnation });
        }
    }

    async fn stop(&self, grace: Duration) -> Result<()> {
        let launches: Vec<(u64, Arc<NodeLink>)> =
            self.launches.lock().iter().map(|(launch, link)| (*launch, Arc::clone(link))).collect();
        let cx = CallContext::within(grace + STOP_TIMEOUT);
        let stopped = launches.iter().filter(|(_, link)| !link.is_lost()).map(|(launch, link)| async {
            let body = StopBody { session: link.session.clone(), launch: *launch, grace_ms: millis(grace) };
            match link.call::<Value>(&cx, "/node/stop", &body).await {
                // The session has ended, and its ranks with it.
                Err(error) if error.code() == Code::NotFound || link.is_lost() => Ok(()),
                result => result.map(drop),
            }
        });
        let stopped = join_all(stopped).await.into_iter().collect();
        let _ = tokio::time::timeout(EXITS_TIMEOUT, self.exits(|_| true)).await;
        stopped
    }
}

/// Splits the ranks that start on a node into those of its earlier launches and those of a new one.
fn split(
    link: &Arc<NodeLink>,
    start: NodeStart,
    ranks: &BTreeMap<Rank, RankOnNode>,
) -> Vec<(Arc<NodeLink>, NodeStart)> {
    let mut parts: BTreeMap<Option<u64>, NodeStart> = BTreeMap::new();
    for ((rank, incarnation), place) in start.incarnations.into_iter().zip(start.places) {
        let launch = ranks.get(&rank).filter(|known| Arc::ptr_eq(&known.link, link)).map(|known| known.launch);
        let part = parts.entry(launch).or_default();
        part.launch = launch;
        part.incarnations.push((rank, incarnation));
        part.places.push(place);
    }
    parts.into_values().map(|part| (Arc::clone(link), part)).collect()
}

#[async_trait]
impl Deployment for NodesDeployment {
    fn events(&self) -> BoxStream<'static, RankEvent> {
        self.0.log.stream()
    }

    async fn restart(&self, cx: &CallContext, incarnations: &[(Rank, Incarnation)]) -> Result<()> {
        cx.check()?;
        for (rank, _) in incarnations {
            self.0.place(*rank)?;
        }
        self.0.end(cx, incarnations.iter().map(|(rank, _)| *rank)).await?;
        // An exit that arrives after the next start would be taken for one of an incarnation that nobody knows.
        let exits = self.0.exits(|rank| incarnations.iter().any(|(restarts, _)| *restarts == rank));
        if tokio::time::timeout(cx.remaining(), exits).await.is_err() {
            let message = "the ranks have ended, but their node has not reported it";
            return Err(Error::not_started(Code::DeadlineExceeded, message));
        }
        loop {
            // A node that is lost meanwhile has to be waited for as well.
            self.0.state.move_lost(cx).await?;
            let _one = self.0.restarting.lock().await;
            match self.0.meet(cx).await {
                // Nothing has started yet.
                Err(_) if self.0.state.has_lost_bundles() => {}
                rendezvous => return self.0.start(cx, incarnations, &rendezvous?).await,
            }
        }
    }

    async fn kill(&self, rank: Rank, incarnation: Option<Incarnation>) -> Result<()> {
        let known = self.0.ranks.lock().get(&rank).cloned();
        let known = known
            .filter(|known| !known.ended && incarnation.is_none_or(|incarnation| incarnation == known.incarnation));
        let known = known.ok_or_else(|| self.0.no_such(rank))?;
        let RankOnNode { incarnation, link, launch, .. } = known;
        let body = KillBody { session: link.session.clone(), launch, rank, incarnation: Some(incarnation) };
        link.call::<Value>(&CallContext::default(), "/node/kill", &body).await.map(drop)
    }

    fn usage(&self) -> BTreeMap<Rank, ProcessUsage> {
        self.0.ranks.lock().iter().filter_map(|(rank, known)| Some((*rank, known.usage?))).collect()
    }

    fn node_usage(&self) -> Option<BTreeMap<String, NodeUsage>> {
        Some(self.0.state.usage())
    }

    async fn environment(&self, cx: &CallContext, rank: Rank) -> Result<RankEnvironment> {
        let on = self.0.ranks.lock().get(&rank).cloned();
        let RankOnNode { link, launch, .. } = on.ok_or_else(|| self.0.no_such(rank))?;
        link.call(cx, "/node/environment", &RankBody { session: link.session.clone(), launch, rank }).await
    }

    async fn shutdown(&self, grace: Duration) -> Result<()> {
        self.0.stop(grace).await
    }
}

impl Drop for NodesDeployment {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let ranks = Arc::clone(&self.0);
        // Has no effect after a shutdown. Without it, the ranks would run until the bundles are released.
        runtime.spawn(async move {
            let _ = ranks.stop(Duration::ZERO).await;
        });
    }
}
