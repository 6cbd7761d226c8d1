//! The session of one controller on a node: resources, ports, and ranks under a lease.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use gym_core::base::watch;
use gym_core::group::Rank;
use gym_core::{CallContext, Code, Error, Result};
use parking_lot::Mutex;
use tokio_util::task::AbortOnDropHandle;

use crate::provision::events::{EventLog, RankEvent};
use crate::provision::machine::{PreparedRanks, PreparesRanks};
use crate::provision::nodes::lease::AgentLease;
use crate::provision::nodes::message::{LaunchBody, PollBody, PollReply, PortsBody, ReserveBody, StartBody};
use crate::provision::place::{HeldGpus, HeldPort, hold_ports};
use crate::usage::node::NodeMonitor;

/// The share of a lease for which a poll may wait: the lease is extended several times before it ends.
const WAIT_SHARE: u32 = 4;
/// The longest pause between two looks at the clock, which also counts the time for which the machine was suspended.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Launches of a session: one for each group and move.
const LAUNCHES_MAX: usize = 4_096;

#[derive(Debug)]
pub(super) struct NodeSession {
    pub(super) controller: String,
    pub(super) cpus: u32,
    pub(super) gpus: Vec<String>,
    /// Other controllers may get the GPUs.
    pub(super) shares: bool,
    /// The GPUs, as far as the programs of this machine divide them.
    held: HeldGpus,
    /// Starts the ranks, and has the clock of the lease.
    here: Arc<dyn PreparesRanks>,
    lease: Mutex<AgentLease>,
    log: EventLog<(u64, RankEvent)>,
    launches: Mutex<BTreeMap<u64, NodeLaunch>>,
    ports: Mutex<BTreeMap<u64, Vec<HeldPort>>>,
    /// Held by whoever changes which ranks run: a request that is repeated waits for the one before it.
    changing: tokio::sync::Mutex<()>,
    /// `true` once the session ends: its ranks are being stopped.
    ending: watch::Sender<bool>,
    /// Samples the node, once the controller wants its usage.
    monitor: OnceLock<NodeMonitor>,
}

/// Ranks that a controller prepared with one request.
#[derive(Clone, Debug)]
struct NodeLaunch {
    ranks: Arc<dyn PreparedRanks>,
    /// Copies the events of the ranks into the log of the session.
    _events: Arc<AbortOnDropHandle<()>>,
}

impl NodeSession {
    pub(super) fn begin(request: &ReserveBody, held: HeldGpus, lease: Duration, here: Arc<dyn PreparesRanks>) -> Self {
        let lease = Mutex::new(AgentLease::begin(lease, here.now()));
        Self {
            controller: request.controller.clone(),
            cpus: request.cpus,
            gpus: request.gpus.clone(),
            shares: request.share_gpus,
            held,
            here,
            lease,
            log: EventLog::new(),
            launches: Mutex::default(),
            ports: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            ending: watch::Sender::new(false),
            monitor: OnceLock::new(),
        }
    }

    /// Waits for events after those that the controller has seen, no longer than it asks for, and returns them.
    pub(super) async fn poll(&self, request: &PollBody) -> Result<PollReply> {
        let (seen, wait) = (request.seen, Duration::from_millis(request.wait_ms));
        let monitor = request.monitor.then(|| self.monitor.get_or_init(NodeMonitor::start));
        let until = self.lease.lock().confirm(request.received);
        let launches: Vec<NodeLaunch> = self.launches.lock().values().cloned().collect();
        join_all(launches.iter().map(|launch| launch.ranks.lease(until))).await;
        let wait = wait.min(self.lease.lock().duration() / WAIT_SHARE);
        let mut ending = self.ending.subscribe();
        tokio::select! { biased;
            () = self.log.beyond(seen) => {}
            // An error without its own exits would be one without a cause.
            _ = ending.wait_for(|ending| *ending) => self.check()?,
            () = tokio::time::sleep(wait) => {}
        }
        let usage = |(launch, ranks): (&u64, &NodeLaunch)| {
            let usage = ranks.ranks.usage().into_iter();
            usage.map(|(rank, usage)| (*launch, rank, usage)).collect::<Vec<_>>()
        };
        let usage = self.launches.lock().iter().flat_map(usage).collect();
        let events = self.log.after(seen);
        let node = monitor.and_then(NodeMonitor::usage);
        Ok(PollReply { number: self.lease.lock().respond(self.here.now()), events, usage, node })
    }

    /// Holds ports for a group.
    pub(super) fn hold(&self, request: &PortsBody) -> Result<Vec<u16>> {
        self.check()?;
        // Those held before are released only afterwards, so that an old incarnation cannot meet a new one at the same port.
        let held = hold_ports(request.count, &(request.low..request.high))?;
        let numbers = held.iter().map(HeldPort::port).collect();
        self.ports.lock().insert(request.group, held);
        Ok(numbers)
    }

    /// Prepares ranks. A repeated request changes nothing.
    pub(super) async fn launch(&self, request: LaunchBody) -> Result<()> {
        let _one = self.changing.lock().await;
        self.check_lease()?;
        let number = request.launch;
        if self.launches.lock().contains_key(&number) {
            return Ok(());
        }
        let (spec, rendezvous) = request.into_spec()?;
        let ranks = self.here.prepare(&CallContext::default(), spec, rendezvous, None).await?;
        let until = self.lease.lock().until();
        ranks.lease(until).await;
        let (mut events, log) = (ranks.events(), self.log.clone());
        let events = tokio::spawn(async move {
            while let Some(event) = events.next().await {
                log.push((number, event));
            }
        });
        let mut launches = self.launches.lock();
        // The session may have ended meanwhile, or the same request may have been repeated.
        self.check()?;
        if launches.len() >= LAUNCHES_MAX {
            return Err(Error::not_started(
                Code::ResourceExhausted,
                format!("a session has at most {LAUNCHES_MAX} launches"),
            ));
        }
        launches.entry(number).or_insert(NodeLaunch { ranks, _events: Arc::new(AbortOnDropHandle::new(events)) });
        Ok(())
    }

    /// Starts incarnations of prepared ranks. A repeated request changes nothing.
    pub(super) async fn start(&self, request: StartBody) -> Result<()> {
        let StartBody { launch, incarnations, rendezvous, .. } = request;
        let _one = self.changing.lock().await;
        self.check_lease()?;
        self.ranks(launch)?.start(&incarnations, rendezvous).await
    }

    /// Returns the ranks of a launch.
    pub(super) fn ranks(&self, launch: u64) -> Result<Arc<dyn PreparedRanks>> {
        self.check()?;
        let found = self.launches.lock().get(&launch).map(|known| Arc::clone(&known.ranks));
        found.ok_or_else(|| Error::not_started(Code::NotFound, format!("there is no launch {launch}")))
    }

    /// Stops the ranks of a launch, and forgets them. A launch that is unknown has been stopped.
    pub(super) async fn stop(&self, launch: u64, grace: Duration) -> Result<()> {
        let Ok(ranks) = self.ranks(launch) else { return Ok(()) };
        ranks.shutdown(grace).await
    }

    /// Kills the incarnations of these ranks, and returns when they have ended.
    pub(super) async fn end_ranks(&self, launch: u64, ranks: Vec<Rank>) -> Result<()> {
        let _one = self.changing.lock().await;
        self.ranks(launch)?.end(&ranks).await
    }

    /// Waits until the lease has ended.
    pub(super) async fn lease_ended(&self) {
        loop {
            let left = self.lease.lock().until().saturating_sub(self.here.now());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(POLL_INTERVAL)).await;
        }
    }

    /// Stops all ranks, and returns when they have ended.
    pub(super) async fn end(&self, grace: Duration) -> Result<()> {
        self.ending.send_replace(true);
        let launches: Vec<NodeLaunch> = self.launches.lock().values().cloned().collect();
        let stopped = join_all(launches.iter().map(|launch| launch.ranks.shutdown(grace))).await;
        self.launches.lock().clear();
        stopped.into_iter().collect::<Result<()>>()?;
        self.held.release();
        Ok(())
    }

    /// Checks that new ranks may start. An agent that was stopped may read a request before it notices that the lease has ended.
    fn check_lease(&self) -> Result<()> {
        self.check()?;
        if self.lease.lock().until() <= self.here.now() {
            return Err(Error::not_started(Code::Unavailable, "the lease has ended"));
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        if *self.ending.borrow() {
            return Err(Error::not_started(Code::Unavailable, "the session is ending"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use gym_core::Incarnation;
    use gym_core::transport::InProcess;
    use serde_json::value::RawValue;

    use super::*;
    use crate::provision::deployment::LaunchSpec;
    use crate::provision::in_process::InProcessRanks;
    use crate::provision::place::{RankPlace, Rendezvous};
    use crate::provision::variables::VariableSource;
    use crate::provision::workers::tests::Idle;
    use crate::provision::workers::{WorkerKind, Workers};
    use gym_client::transport::Transports;

    const LEASE: Duration = Duration::from_secs(2);

    fn launch(number: u64) -> LaunchBody {
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let rendezvous = Rendezvous { master_address: local, master_port: 1, available: vec![(local, 2)] };
        let (ranks, init) = (vec![RankPlace::on_one_node(0, 1)], RawValue::NULL.to_owned());
        let spec = LaunchSpec::new("group", "idle", init, ranks.clone());
        LaunchBody::of(&spec, &[], "session", number, ranks, &rendezvous)
    }

    fn start(launch: u64) -> StartBody {
        StartBody { session: "session".to_owned(), launch, incarnations: vec![(0, Incarnation(1))], rendezvous: None }
    }

    fn session() -> NodeSession {
        let workers = Workers::new().with("idle", WorkerKind::of::<Idle>());
        let ranks = InProcessRanks::new(workers, Transports::from_features(InProcess::new()));
        let request = ReserveBody {
            session: "session".to_owned(),
            controller: "a test".to_owned(),
            build: String::new(),
            cpus: 1,
            gpus: Vec::new(),
            share_gpus: false,
            lease_ms: 2_000,
        };
        NodeSession::begin(&request, HeldGpus::default(), LEASE, Arc::new(ranks))
    }

    /// The first answer was lost: the ranks may have started since.
    #[tokio::test(start_paused = true)]
    async fn a_launch_that_is_repeated_keeps_the_ranks_of_the_first() {
        let session = session();
        session.launch(launch(1)).await.expect("the lease runs");
        let first = session.ranks(1).expect("they are prepared");
        session.launch(launch(1)).await.expect("the lease runs");
        assert!(Arc::ptr_eq(&first, &session.ranks(1).expect("they are prepared")));
    }

    #[tokio::test(start_paused = true)]
    async fn a_rank_has_the_variables_of_its_controller() {
        let session = session();
        let mut body = launch(1);
        body.controller.insert("only_controller".to_owned(), "1".to_owned());
        session.launch(body).await.expect("the lease runs");
        let ranks = session.ranks(1).expect("they are prepared");
        let environment = ranks.environment(&CallContext::default(), 0).await.expect("rank 0 was launched");
        let variable = environment.get("only_controller").expect("it was sent");
        assert_eq!((variable.value.as_str(), variable.source), ("1", VariableSource::Controller));
        let unknown = ranks.environment(&CallContext::default(), 1).await.expect_err("there is no rank 1");
        assert_eq!(unknown.code(), Code::NotFound);
    }

    /// The agent is stopped, and reads requests of before when it goes on: the controller may have started the ranks on another node by then.
    #[tokio::test(start_paused = true)]
    async fn an_agent_that_was_stopped_for_its_lease_starts_no_rank() {
        let session = session();
        session.launch(launch(1)).await.expect("the lease runs");
        tokio::time::advance(LEASE).await;
        for late in [session.launch(launch(2)).await, session.start(start(1)).await] {
            let error = late.expect_err("the lease is over");
            assert!(error.code() == Code::Unavailable && error.message() == "the lease has ended", "{error}");
        }
        assert_eq!(session.log.count(), 0, "no rank has started");
    }
}
