//! The nodes of a reservation: the sessions with their agents, and the placement of the bundles on them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use gym_client::transport::Transports;
use gym_core::base::host_name;
use gym_core::group::Rank;
use gym_core::{CallContext, Code, Error, Result};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::placement::{NodeResources, Placement, place};
use crate::provision::deployment::ReserveRequest;
use crate::provision::events::{EventLog, NodeEvent, NodeState, NodeStatus, RankEvent};
use crate::provision::nodes::agent::build;
use crate::provision::nodes::link::{AgentClient, LinkNews, LinkPoller, NodeLink};
use crate::provision::nodes::message::{NodeReport, PortsBody, PortsReply, ReleaseBody, ReserveBody, millis};
use crate::provision::nodes::moving::{PlacedBundles, moved};
use crate::provision::nodes::{Nodes, REPORT_TIMEOUT};
use crate::provision::place::{BundleId, placed};
use crate::provision::variables::Variables;
use crate::usage::node::NodeUsage;
use crate::usage::process::ProcessUsage;

/// Pause between two searches for room.
const SEARCH_INTERVAL: Duration = Duration::from_millis(500);
/// Time between two messages of a search.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Time for a release beyond the grace.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// The state that a reservation shares with its deployments: it lives as long as any of them.
#[derive(Debug)]
pub(super) struct NodesState {
    nodes: Nodes,
    request: ReserveRequest,
    controller: String,
    build: String,
    held: Mutex<HeldNodes>,
    log: EventLog<NodeEvent>,
    launches: Mutex<BTreeMap<u64, Weak<dyn NodeRanks>>>,
    next: AtomicU64,
    /// Held by whoever moves bundles.
    moving: tokio::sync::Mutex<()>,
    tasks: Mutex<JoinSet<()>>,
}

#[derive(Debug)]
struct HeldNodes {
    placement: Arc<Placement>,
    /// The session of each host of the placement. With simulated nodes, several hosts can share one.
    hosts: Vec<Arc<NodeLink>>,
    released: bool,
}

/// The ranks of a deployment, for which the reservation receives reports.
#[async_trait]
pub(super) trait NodeRanks: fmt::Debug + Send + Sync {
    /// Returns the number of the deployment in its reservation.
    fn number(&self) -> u64;

    /// Takes an event of an agent.
    fn event(&self, launch: u64, event: RankEvent);

    /// Takes samples of an agent.
    fn used(&self, launch: u64, samples: Vec<(Rank, ProcessUsage)>);

    /// Ends all ranks on a node that is lost.
    fn lost(&self, link: &Arc<NodeLink>, why: &str);

    /// Reports that the node of these ranks is about to be taken away.
    #[cfg(feature = "ray")]
    fn draining(&self, link: &Arc<NodeLink>);

    /// Stops all ranks.
    async fn stop(&self, grace: Duration) -> Result<()>;
}

/// The resources that are held on one agent.
struct Holding {
    client: AgentClient,
    report: NodeReport,
    cpus: u32,
    gpus: Vec<String>,
}

/// Returns each session once.
fn distinct(hosts: &[Arc<NodeLink>]) -> Vec<&Arc<NodeLink>> {
    let mut seen = BTreeSet::new();
    hosts.iter().filter(|link| seen.insert(&link.session)).collect()
}

/// Returns the hosts that have bundles.
fn used_hosts(placement: &Placement) -> BTreeSet<usize> {
    placement.groups.iter().flat_map(|group| &group.bundles).map(|bundle| bundle.host).collect()
}

impl NodesState {
    /// Reserves the bundles of `request`.
    pub(super) async fn reserve(nodes: Nodes, cx: &CallContext, request: ReserveRequest) -> Result<Arc<Self>> {
        let host = host_name();
        let state = Arc::new(Self {
            nodes,
            request,
            controller: format!("process {} on {host}", std::process::id()),
            build: build()?,
            held: Mutex::new(HeldNodes { placement: Arc::default(), hosts: Vec::new(), released: false }),
            log: EventLog::new(),
            launches: Mutex::default(),
            next: AtomicU64::new(1),
            moving: tokio::sync::Mutex::default(),
            tasks: Mutex::default(),
        });
        let (placement, hosts) = state.search(cx, |agents| state.place(agents)).await?;
        for link in distinct(&hosts) {
            state.follow(link);
        }
        let mut held = state.held.lock();
        (held.placement, held.hosts) = (Arc::new(placement), hosts);
        drop(held);
        Ok(state)
    }

    /// Returns the variables that the ranks get over those of this program.
    pub(super) fn variables(&self) -> &Variables {
        &self.nodes.variables
    }

    pub(super) fn placement(&self) -> Arc<Placement> {
        Arc::clone(&self.held.lock().placement)
    }

    pub(super) fn statuses(&self) -> Vec<NodeStatus> {
        self.held.lock().hosts.iter().map(|link| link.status()).collect()
    }

    /// Returns the usage of each node, by name.
    pub(super) fn usage(&self) -> BTreeMap<String, NodeUsage> {
        self.held.lock().hosts.iter().filter_map(|link| Some((link.name().to_owned(), link.usage()?))).collect()
    }

    pub(super) fn log(&self) -> &EventLog<NodeEvent> {
        &self.log
    }

    /// Decides on a placement of the whole request: the placement, and for each of its hosts the agent and what to hold there.
    fn place(&self, agents: &[(AgentClient, NodeReport)]) -> Result<(Placement, Vec<usize>)> {
        if let Some(simulated) = &self.request.simulated {
            let placement = place(&self.request.cluster, simulated, self.request.unified)?;
            if agents.is_empty() {
                return Err(Error::not_started(Code::ResourceExhausted, "there is no node"));
            }
            return Ok((placement, (0..simulated.len()).map(|host| host % agents.len()).collect()));
        }
        let place = |nodes: &[NodeResources]| self.nodes.source.place(&self.request, nodes);
        let placement = self.place_on(agents, place)?;
        Ok((placement, (0..agents.len()).collect()))
    }

    /// Places by what is free on the nodes. What they have, but somebody else holds, is a lack of room, and no mistake of the request.
    fn place_on<P>(
        &self,
        agents: &[(AgentClient, NodeReport)],
        place: impl Fn(&[NodeResources]) -> Result<P>,
    ) -> Result<P> {
        let nodes = |of: &dyn Fn(&NodeReport) -> NodeResources| -> Vec<NodeResources> {
            agents.iter().map(|(_, report)| self.request.counted(of(report))).collect()
        };
        place(&nodes(&|report| report.free(self.request.cluster.share_gpus))).map_err(|error| {
            match error.code() == Code::InvalidArgument && place(&nodes(&NodeReport::whole)).is_ok() {
                true => Error::not_started(Code::ResourceExhausted, format!("{} free", error.message())),
                false => error,
            }
        })
    }

    /// Looks for room until `plan` finds some and the agents grant it. The plan names for each host of its bundles the agent; of the result, the
    /// hosts are positions in the sessions.
    async fn search<P: PlacedBundles>(
        &self,
        cx: &CallContext,
        plan: impl Fn(&[(AgentClient, NodeReport)]) -> Result<(P, Vec<usize>)>,
    ) -> Result<(P, Vec<Arc<NodeLink>>)> {
        let until = Instant::now() + cx.remaining().min(self.nodes.options.wait_for_room);
        let mut said: Option<Instant> = None;
        loop {
            cx.check()?;
            let error = match self.try_reserve(cx, &plan).await {
                Ok(found) => return Ok(found),
                Err(error) => error,
            };
            let waits = matches!(error.code(), Code::ResourceExhausted | Code::Unavailable | Code::DeadlineExceeded);
            if !waits || Instant::now() + SEARCH_INTERVAL >= until {
                return Err(error);
            }
            if said.is_none_or(|said| said.elapsed() >= LOG_INTERVAL) {
                said = Some(Instant::now());
                tracing::warn!(%error, left = ?until.duration_since(Instant::now()), "waiting for nodes with enough room");
            }
            sleep(SEARCH_INTERVAL).await;
        }
    }

    async fn try_reserve<P: PlacedBundles>(
        &self,
        cx: &CallContext,
        plan: &impl Fn(&[(AgentClient, NodeReport)]) -> Result<(P, Vec<usize>)>,
    ) -> Result<(P, Vec<Arc<NodeLink>>)> {
        let (mut agents, errors) = self.nodes.agents(cx).await?;
        let others = agents.extract_if(.., |(_, report)| report.build != self.build);
        let others: Vec<String> =
            others.map(|(_, report)| format!("{} runs build {}", report.name, report.build)).collect();
        let (mut bundles, on) = plan(&agents).map_err(|error| {
            let mut hints: Vec<String> = errors.iter().map(|error| format!("not reached: {error}")).collect();
            let held = agents.iter().filter(|(_, report)| !report.held_by.is_empty());
            hints.extend(
                held.map(|(_, report)| format!("a part of {} is held: {}", report.name, report.held_by.join("; "))),
            );
            if !others.is_empty() {
                hints.push(format!(
                    "{}, and this program is build {}: start the same executable on all nodes",
                    others.join(", "),
                    self.build
                ));
            }
            let hints = hints.iter().map(|hint| format!("\n  {hint}")).collect::<String>();
            Error::new(error.code(), error.execution(), format!("{}{hints}", error.message()))
                .about("reserve bundles on nodes")
        })?;
        let mut holdings: Vec<Option<Holding>> = agents
            .into_iter()
            .map(|(client, report)| Some(Holding { client, report, cpus: 0, gpus: Vec::new() }))
            .collect();
        let mut used = BTreeSet::new();
        for bundle in bundles.placed() {
            used.insert(on[bundle.host]);
            if let Some(Some(holding)) = holdings.get_mut(on[bundle.host])
                && self.request.simulated.is_none()
            {
                holding.gpus.extend(bundle.gpu.clone());
                holding.cpus += if self.request.counts_cpus { self.request.cluster.cpus_per_bundle() } else { 0 };
            }
        }
        let asked = used.iter().filter_map(|at| Some((*at, holdings[*at].take()?)));
        let asked = asked.map(|(at, holding)| async move { (at, self.hold(cx, holding).await) });
        let mut links: BTreeMap<usize, Arc<NodeLink>> = BTreeMap::new();
        let mut refused = None;
        for (at, held) in join_all(asked).await {
            match held {
                Ok(link) => drop(links.insert(at, Arc::new(link))),
                Err(error) => refused = Some(error),
            }
        }
        if let Some(error) = refused {
            // Another controller was faster, or a node has ended: what was granted goes back.
            join_all(links.values().map(|link| self.give_back(link, Duration::ZERO))).await;
            return Err(error);
        }
        if self.request.simulated.is_some() {
            // A simulated host without a bundle has no session, and no rank asks for it.
            let any = links.values().next().cloned();
            let hosts = on.iter().filter_map(|at| links.get(at).cloned().or_else(|| any.clone())).collect();
            return Ok((bundles, hosts));
        }
        let positions: BTreeMap<usize, usize> = links.keys().copied().zip(0..).collect();
        for bundle in bundles.placed() {
            bundle.host = positions[&on[bundle.host]];
        }
        Ok((bundles, links.into_values().collect()))
    }

    async fn hold(&self, cx: &CallContext, holding: Holding) -> Result<NodeLink> {
        let Holding { client, report, cpus, gpus } = holding;
        let options = &self.nodes.options;
        let session = format!("{:032x}", fastrand::u128(..));
        let request = ReserveBody {
            session: session.clone(),
            controller: self.controller.clone(),
            build: self.build.clone(),
            cpus,
            gpus: gpus.clone(),
            share_gpus: self.request.cluster.share_gpus,
            lease_ms: millis(options.lease),
        };
        let resources = report.whole();
        let times = (options.lease, options.reconnect);
        // An agent that has just stopped must not hold up the search; what it grants later ends with its lease.
        let granted = client
            .reserve(&cx.child().at_most(REPORT_TIMEOUT), &request)
            .await
            .map_err(|error| error.about(format!("reserve on node {}", report.name)))?;
        let monitor = self.request.cluster.monitor_memory;
        Ok(NodeLink::new(client, &granted, resources, session, times, monitor, Instant::now()))
    }

    /// Polls a node in the background, until it is lost or the bundles are released.
    fn follow(self: &Arc<Self>, link: &Arc<NodeLink>) {
        self.log.push(NodeEvent::Serving { node: link.name().to_owned() });
        let (state, link) = (Arc::downgrade(self), Arc::clone(link));
        let task = async move {
            let mut poller = LinkPoller::new(Arc::clone(&link));
            while let Some(news) = poller.next().await {
                let Some(state) = state.upgrade() else { return };
                state.news(&link, news);
            }
            link.watch_return().await;
        };
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task.boxed());
    }

    fn news(&self, link: &Arc<NodeLink>, news: LinkNews) {
        let node = link.name().to_owned();
        match news {
            LinkNews::Reply { reply, recovered } => {
                if recovered {
                    tracing::info!(node, "the node responds again");
                    self.log.push(NodeEvent::Serving { node });
                }
                for (launch, event) in reply.events {
                    if let Some(ranks) = self.ranks_of(launch) {
                        ranks.event(launch, event);
                    }
                }
                let mut usage: BTreeMap<u64, Vec<_>> = BTreeMap::new();
                for (launch, rank, sample) in reply.usage {
                    usage.entry(launch).or_default().push((rank, sample));
                }
                for (launch, samples) in usage {
                    if let Some(ranks) = self.ranks_of(launch) {
                        ranks.used(launch, samples);
                    }
                }
            }
            LinkNews::State(NodeState::Lost(why)) => {
                // The session of a release ends so, too.
                if !self.held.lock().released {
                    tracing::error!(
                        node,
                        why,
                        "a node is lost; its ranks have ended for their groups, and can restart on another node when its lease is over"
                    );
                    self.log.push(NodeEvent::Lost { node, why: why.clone() });
                }
                self.all_ranks().iter().for_each(|ranks| ranks.lost(link, &why));
            }
            LinkNews::State(NodeState::Suspect(why)) => {
                tracing::warn!(node, why, "a node does not respond");
                self.log.push(NodeEvent::Suspect { node, why });
            }
            LinkNews::State(NodeState::Serving) => {}
        }
    }

    /// Takes the news that an engine is about to take these nodes away.
    #[cfg(feature = "ray")]
    pub(super) fn drain(&self, is: impl Fn(&str) -> bool, why: &str) {
        let hosts = self.held.lock().hosts.clone();
        for link in distinct(&hosts).into_iter().filter(|link| is(link.name()) && !link.is_lost()) {
            tracing::warn!(
                node = link.name(),
                why,
                "a node is about to be taken away; its ranks serve until then, and balancers choose others if they can"
            );
            link.drain();
            self.log.push(NodeEvent::Draining { node: link.name().to_owned(), why: why.to_owned() });
            self.all_ranks().iter().for_each(|ranks| ranks.draining(link));
        }
    }

    /// Returns the ranks of each deployment once.
    fn all_ranks(&self) -> Vec<Arc<dyn NodeRanks>> {
        let mut all: Vec<Arc<dyn NodeRanks>> = self.launches.lock().values().filter_map(Weak::upgrade).collect();
        all.sort_by_key(|ranks| ranks.number());
        all.dedup_by_key(|ranks| ranks.number());
        all
    }

    fn ranks_of(&self, launch: u64) -> Option<Arc<dyn NodeRanks>> {
        self.launches.lock().get(&launch)?.upgrade()
    }

    pub(super) fn transports(&self) -> &Transports {
        &self.nodes.transports
    }

    /// Returns a number that no other launch of this reservation has.
    pub(super) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends the events of a launch to these ranks.
    pub(super) fn route(&self, launch: u64, ranks: Weak<dyn NodeRanks>) {
        let mut launches = self.launches.lock();
        launches.retain(|_, known| known.strong_count() > 0);
        launches.insert(launch, ranks);
    }

    /// Returns the session that has a bundle, and the GPU of the bundle.
    pub(super) fn host_of(&self, bundle: BundleId) -> Result<(Arc<NodeLink>, Option<String>)> {
        let held = self.held.lock();
        if held.released {
            return Err(Error::not_started(Code::Unavailable, "the bundles were released"));
        }
        let found =
            placed(&held.placement, bundle).and_then(|bundle| Some((held.hosts.get(bundle.host)?, &bundle.gpu)));
        let (link, gpu) = found.ok_or_else(|| Error::invalid(format!("the reservation has no bundle {bundle:?}")))?;
        Ok((Arc::clone(link), gpu.clone()))
    }

    /// Holds ports on a node for a group.
    pub(super) async fn ports(
        &self,
        cx: &CallContext,
        link: &NodeLink,
        group: u64,
        range: &Range<u16>,
        count: usize,
    ) -> Result<Vec<u16>> {
        let request = PortsBody { session: link.session.clone(), group, low: range.start, high: range.end, count };
        let PortsReply { ports } = link.call(cx, "/node/ports", &request).await?;
        if ports.len() == count { Ok(ports) } else { Err(Error::internal("an agent held another number of ports")) }
    }

    /// Returns `true` if a node that has bundles is lost.
    pub(super) fn has_lost_bundles(&self) -> bool {
        let held = self.held.lock();
        used_hosts(&held.placement).into_iter().any(|host| held.hosts[host].is_lost())
    }

    /// Moves all bundles of lost nodes to other nodes, when no rank of the lost nodes can be alive.
    ///
    /// # Errors
    /// `ResourceExhausted` if no node has room for them.
    pub(super) async fn move_lost(self: &Arc<Self>, cx: &CallContext) -> Result<()> {
        let _one = self.moving.lock().await;
        let (placement, hosts) = {
            let held = self.held.lock();
            if held.released {
                return Err(Error::not_started(Code::Unavailable, "the bundles were released"));
            }
            (Arc::clone(&held.placement), held.hosts.clone())
        };
        let used = used_hosts(&placement);
        let lost: BTreeSet<usize> = used.iter().copied().filter(|host| hosts[*host].is_lost()).collect();
        if lost.is_empty() {
            return Ok(());
        }
        let fenced = async {
            join_all(lost.iter().map(|host| hosts[*host].fenced())).await;
            Ok(())
        };
        cx.bound(gym_core::Execution::NotStarted, fenced).await?;
        let kept: BTreeSet<String> = used.difference(&lost).map(|host| hosts[*host].name().to_owned()).collect();
        let (next, links) = if self.request.simulated.is_some() {
            self.move_simulated(cx, &lost, &hosts).await?
        } else {
            let names = lost.iter().map(|host| (*host, hosts[*host].name().to_owned())).collect();
            let plan = |agents: &[(AgentClient, NodeReport)]| {
                let moves = self.place_on(agents, |nodes| {
                    self.nodes.source.move_lost(&self.request, &placement, &names, &kept, nodes)
                })?;
                Ok((moves, (0..agents.len()).collect()))
            };
            // Only the moved bundles are held anew, on sessions that come after the known ones.
            let (moves, links) = self.search(cx, plan).await?;
            let next = moved(&placement, moves, |session| hosts.len() + session);
            (next, hosts.iter().cloned().chain(links).collect())
        };
        self.moved(&lost, &hosts, next, links)
    }

    /// Moves the simulated hosts of lost nodes to nodes that respond.
    async fn move_simulated(
        &self,
        cx: &CallContext,
        lost: &BTreeSet<usize>,
        hosts: &[Arc<NodeLink>],
    ) -> Result<(Placement, Vec<Arc<NodeLink>>)> {
        let (placement, fresh) = self.search(cx, |agents| self.place(agents)).await?;
        let mut links = hosts.to_vec();
        for host in lost {
            links[*host] = Arc::clone(&fresh[*host]);
        }
        for link in distinct(&fresh) {
            if !links.iter().any(|kept| kept.session == link.session)
                && let Err(error) = self.give_back(link, Duration::ZERO).await
            {
                tracing::warn!(node = link.name(), %error, "a session was not released; it ends with its lease");
            }
        }
        Ok((placement, links))
    }

    fn moved(
        self: &Arc<Self>,
        lost: &BTreeSet<usize>,
        before: &[Arc<NodeLink>],
        next: Placement,
        links: Vec<Arc<NodeLink>>,
    ) -> Result<()> {
        let known = |link: &Arc<NodeLink>| before.iter().any(|before| before.session == link.session);
        let fresh: Vec<&Arc<NodeLink>> = distinct(&links).into_iter().filter(|link| !known(link)).collect();
        let to: BTreeSet<&str> = fresh.iter().map(|link| link.name()).collect();
        let to: Vec<String> = to.into_iter().map(str::to_owned).collect();
        fresh.iter().for_each(|link| self.follow(link));
        for from in lost.iter().map(|host| before[*host].name().to_owned()).collect::<BTreeSet<_>>() {
            tracing::info!(from, to = to.join(", "), "bundles of a lost node moved");
            self.log.push(NodeEvent::Moved { from, to: to.clone() });
        }
        let mut held = self.held.lock();
        if held.released {
            return Err(Error::not_started(Code::Unavailable, "the bundles were released"));
        }
        (held.placement, held.hosts) = (Arc::new(next), links);
        Ok(())
    }

    async fn give_back(&self, link: &NodeLink, grace: Duration) -> Result<()> {
        let request = ReleaseBody { session: link.session.clone(), grace_ms: millis(grace) };
        let cx = CallContext::within(grace + RELEASE_TIMEOUT);
        link.call::<Value>(&cx, "/node/release", &request).await.map(drop)
    }

    /// Stops all ranks and ends the sessions.
    pub(super) async fn release(&self, grace: Duration) -> Result<()> {
        let hosts = {
            let mut held = self.held.lock();
            if std::mem::replace(&mut held.released, true) {
                return Ok(());
            }
            held.hosts.clone()
        };
        // Their exits are reported while the sessions live.
        let stopped = join_all(self.all_ranks().iter().map(|ranks| ranks.stop(grace))).await;
        let links = distinct(&hosts).into_iter().filter(|link| !link.is_lost());
        let released = join_all(links.map(|link| async move {
            match self.give_back(link, grace).await {
                // A poll was told first that the session has ended, or the node is lost: nothing is left to be released.
                Err(_) if link.is_lost() => return Ok(()),
                answered => answered?,
            }
            // Nothing of the session is left: whoever stops it again need not ask an agent, which may have ended meanwhile.
            link.lose("its bundles were released".to_owned(), Instant::now());
            Ok(())
        }))
        .await;
        self.tasks.lock().abort_all();
        stopped.into_iter().chain(released).collect()
    }
}

impl Drop for NodesState {
    fn drop(&mut self) {
        let held = self.held.lock();
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if held.released {
            return;
        }
        // Without this, the ranks would run until their lease ends.
        for link in distinct(&held.hosts).into_iter().filter(|link| !link.is_lost()).cloned() {
            runtime.spawn(async move {
                let request = ReleaseBody { session: link.session.clone(), grace_ms: 0 };
                let cx = CallContext::within(RELEASE_TIMEOUT);
                let _ = link.call::<Value>(&cx, "/node/release", &request).await;
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::placement::ClusterSpec;
    use gym_core::transport::{InProcess, handler_fn, serve};
    use gym_core::{CallContext, CancelToken, Code, Endpoint, Error, Incarnation, Request, Response};
    use tokio::time::sleep;

    use super::{NodesState, build};
    use crate::provision::deployment::ReserveRequest;
    use crate::provision::nodes::Nodes;
    use crate::provision::nodes::message::NodeReport;
    use gym_client::transport::Transports;

    /// Answers as an agent of one node whose replies to `/node/release` arrive late.
    async fn agent(released: CancelToken, request: Request) -> gym_core::Result<Response> {
        match request.route.path() {
            "/node/poll" => {
                released.cancelled().await;
                Ok(Response::from_error(&Error::not_started(Code::NotFound, "there is no such session")))
            }
            "/node/release" => {
                released.cancel();
                sleep(Duration::from_secs(5)).await;
                Ok(Response::json("null"))
            }
            _ => {
                let report = NodeReport {
                    name: "node-a".to_owned(),
                    incarnation: Incarnation(1),
                    build: build()?,
                    address: [127, 0, 0, 1].into(),
                    cpus: 1,
                    gpus: Vec::new(),
                    free_cpus: 1,
                    free_gpus: Vec::new(),
                    shared_gpus: Vec::new(),
                    domain: None,
                    domain_rank: None,
                    held_by: Vec::new(),
                };
                Ok(Response::json(serde_json::json!(report).to_string()))
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_poll_that_finds_the_session_released_is_no_lost_node() {
        let (network, released) = (InProcess::new(), CancelToken::new());
        let listener = Box::new(network.listen("agent").unwrap());
        let handler = handler_fn(move |request| agent(released.clone(), request));
        let serving = serve(listener, std::sync::Arc::new(handler), CancelToken::new(), Duration::ZERO);
        let _serving = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(serving));
        let at = vec![Endpoint::parse("mem://agent").unwrap()];
        let nodes = Nodes::at(at, Transports::from_features(network), "secret");
        let mut cluster = ClusterSpec::new([1]);
        cluster.use_gpus = false;
        let cx = CallContext::within(Duration::from_secs(10));
        let state = NodesState::reserve(nodes, &cx, ReserveRequest::new(cluster)).await.unwrap();
        // The poll is in flight when the bundles are released.
        sleep(Duration::from_millis(100)).await;
        state.release(Duration::ZERO).await.unwrap();
        assert!(state.held.lock().hosts.iter().all(|link| link.is_lost()));
    }
}
