//! The controller's side of one session on a node.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gym_client::transport::ReconnectingPeer;
use gym_client::transport::Transports;
use gym_core::base::watch;
use gym_core::transport::{ConnectOptions, RetryPolicy, TransportPolicy, retry};
use gym_core::{CallContext, Code, Endpoint, Error, Incarnation, Request, Result};
use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, sleep_until};

use crate::placement::NodeResources;
use crate::provision::events::{NodeState, NodeStatus};
use crate::provision::nodes::message::{
    NodeReport, PollBody, PollReply, ReserveBody, SECRET_METADATA, bearer, millis, read, write,
};
use crate::usage::node::NodeUsage;

/// Time that a kill may take after the lease has ended, on a node that is busy.
const KILL_TIMEOUT: Duration = Duration::from_millis(500);
/// Pause between two attempts to reach an agent that does not respond.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// The longest pause before a call is repeated.
const REPEAT_MAX: Duration = Duration::from_millis(500);
/// Pause between two looks for an agent that was lost.
const RETURN_INTERVAL: Duration = Duration::from_millis(100);
/// Time of such a look.
const LOOK_TIMEOUT: Duration = Duration::from_secs(1);

/// An agent that a controller can call.
#[derive(Debug)]
pub(super) struct AgentClient {
    peer: ReconnectingPeer,
    transports: Transports,
    secret: String,
}

impl AgentClient {
    pub(super) fn new(endpoints: Vec<Endpoint>, transports: Transports, secret: &str) -> Self {
        let peer = ReconnectingPeer::new(endpoints, ConnectOptions::default());
        // Small messages: the transports that are chosen on request, for bulk data, would only delay the connection.
        let transports = transports.with_policy(TransportPolicy::unconfigured());
        Self { peer, transports, secret: bearer(secret) }
    }

    pub(super) async fn report(&self, cx: &CallContext) -> Result<NodeReport> {
        let cx = cx.child().with_metadata(SECRET_METADATA, self.secret.clone());
        self.send(Request::get(cx, "/node")).await
    }

    pub(super) async fn reserve(&self, cx: &CallContext, request: &ReserveBody) -> Result<NodeReport> {
        self.post(cx, "/node/reserve", write(request)?).await
    }

    async fn post<T: DeserializeOwned>(&self, cx: &CallContext, route: &'static str, body: Vec<u8>) -> Result<T> {
        let cx = cx.child().with_metadata(SECRET_METADATA, self.secret.clone());
        self.send(Request::post(cx, route, body)).await
    }

    async fn send<T: DeserializeOwned>(&self, request: Request) -> Result<T> {
        let response = self.peer.call(&self.transports, &request).await?.into_result()?;
        read(&response.message.head.to_bytes())
    }

    pub(super) fn endpoint(&self) -> Option<&Endpoint> {
        self.peer.endpoints().last()
    }
}

/// A session on a node, as its controller knows it.
#[derive(Debug)]
pub(super) struct NodeLink {
    pub(super) resources: NodeResources,
    /// The address of the node for its ranks' peers.
    pub(super) address: IpAddr,
    pub(super) session: String,
    client: AgentClient,
    incarnation: Incarnation,
    lease: Duration,
    reconnect: Duration,
    state: watch::Sender<LinkState>,
    /// The end of the lease, if the agent hears no more from us.
    lease_end: Mutex<Instant>,
    /// `true` once an engine is about to take the node away.
    draining: AtomicBool,
    /// `true` if the controller wants the usage of the node.
    monitor: bool,
    /// The last sample.
    usage: Mutex<Option<NodeUsage>>,
}

#[derive(Clone, Debug, PartialEq)]
struct LinkState {
    node: NodeState,
    /// The time from which no rank of the session is alive, once the node is lost.
    fenced: Option<Instant>,
}

/// The outcome of a poll of an agent.
#[derive(Debug)]
pub(super) enum LinkNews {
    Reply {
        reply: PollReply,
        /// The agent did not respond before.
        recovered: bool,
    },
    /// The state of the node changed.
    State(NodeState),
}

/// The polls of one link.
#[derive(Debug)]
pub(super) struct LinkPoller {
    link: Arc<NodeLink>,
    received: u64,
    received_at: Instant,
    seen: usize,
    broken_since: Option<Instant>,
}

impl NodeLink {
    /// `reserved_at` is the time at which the response of the reservation arrived.
    pub(super) fn new(
        client: AgentClient,
        report: &NodeReport,
        resources: NodeResources,
        session: String,
        (lease, reconnect): (Duration, Duration),
        monitor: bool,
        reserved_at: Instant,
    ) -> Self {
        let state = watch::Sender::new(LinkState { node: NodeState::Serving, fenced: None });
        let lease_end = Mutex::new(reserved_at + lease);
        let (address, incarnation) = (report.address, report.incarnation);
        let (draining, usage) = (AtomicBool::new(false), Mutex::default());
        Self {
            resources,
            address,
            session,
            client,
            incarnation,
            lease,
            reconnect,
            state,
            lease_end,
            draining,
            monitor,
            usage,
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.resources.name
    }

    pub(super) fn status(&self) -> NodeStatus {
        let state = self.state.borrow().node.clone();
        let (address, usage) = (self.client.endpoint().cloned(), self.usage());
        NodeStatus { resources: self.resources.clone(), address, state, usage }
    }

    /// Returns the usage of the node, as its agent last sampled it. `None` for a lost node: nothing is known of it.
    pub(super) fn usage(&self) -> Option<NodeUsage> {
        if self.is_lost() { None } else { self.usage.lock().clone() }
    }

    #[cfg(feature = "ray")]
    pub(super) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    pub(super) fn is_lost(&self) -> bool {
        matches!(self.state.borrow().node, NodeState::Lost(_))
    }

    /// Calls the agent. Repeats the call while the agent does not respond, until the node is lost or `cx` ends.
    pub(super) async fn call<T: DeserializeOwned>(
        &self,
        cx: &CallContext,
        route: &'static str,
        body: &impl Serialize,
    ) -> Result<T> {
        let body = write(body)?;
        let mut policy = RetryPolicy::default();
        policy.attempts_max = u32::MAX;
        policy.backoff_max = REPEAT_MAX;
        let mut rng = fastrand::Rng::new();
        let attempt = |_| async {
            // A connection may lose a message without an error.
            let answered = self.client.post(&cx.child().at_most(self.lease), route, body.clone()).await;
            answered.map_err(|error| match error.code() {
                Code::DeadlineExceeded if !cx.remaining().is_zero() => {
                    Error::new(Code::Unavailable, error.execution(), error.message().to_owned())
                }
                _ => error,
            })
        };
        let calling = retry(cx, &policy, &mut rng, true, attempt);
        let mut state = self.state.subscribe();
        let lost = state.wait_for(|state| matches!(state.node, NodeState::Lost(_)));
        let result = tokio::select! { biased;
            called = calling => called,
            _ = lost => Err(Error::unknown(Code::Unavailable, "the node was lost meanwhile")),
        };
        result.map_err(|error| error.about(format!("{} on node {}", route.trim_start_matches("/node/"), self.name())))
    }

    /// Gives the node up.
    pub(super) fn lose(&self, why: String, fenced: Instant) -> NodeState {
        let node = NodeState::Lost(why);
        self.state.send_replace(LinkState { node: node.clone(), fenced: Some(fenced) });
        node
    }

    /// Waits until no rank of this lost node can be alive.
    pub(super) async fn fenced(&self) {
        let mut state = self.state.subscribe();
        loop {
            let until = state.borrow_and_update().fenced;
            match until {
                Some(until) => tokio::select! { biased;
                    () = sleep_until(until) => return,
                    changed = state.changed() => if changed.is_err() { return },
                },
                None => {
                    if state.changed().await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Watches a lost node until it cannot have living ranks: an agent of another incarnation proves it before the lease ends.
    pub(super) async fn watch_return(&self) {
        let returned = async {
            loop {
                if let Ok(report) = self.client.report(&CallContext::within(LOOK_TIMEOUT)).await
                    && report.incarnation != self.incarnation
                {
                    return;
                }
                sleep(RETURN_INTERVAL).await;
            }
        };
        tokio::select! { biased;
            () = self.fenced() => {}
            () = returned => self.state.send_modify(|state| state.fenced = Some(Instant::now())),
        }
    }

    fn lease_end(&self) -> MutexGuard<'_, Instant> {
        self.lease_end.lock()
    }
}

impl LinkPoller {
    pub(super) fn new(link: Arc<NodeLink>) -> Self {
        Self { link, received: 0, received_at: Instant::now(), seen: 0, broken_since: None }
    }

    /// Waits for news; `None` after the node was lost.
    pub(super) async fn next(&mut self) -> Option<LinkNews> {
        loop {
            let link = Arc::clone(&self.link);
            if link.is_lost() {
                return None;
            }
            let body = PollBody {
                session: link.session.clone(),
                received: self.received,
                seen: self.seen,
                wait_ms: millis(link.lease / 4),
                monitor: link.monitor,
            };
            // From here on, the agent may count the lease from the last response, which it sent before we received it.
            let end = self.received_at + link.lease;
            {
                let mut lease_end = link.lease_end();
                *lease_end = (*lease_end).max(end);
            }
            let cx = CallContext::within(link.lease / 2);
            let polled = match write(&body) {
                Ok(body) => link.client.post::<PollReply>(&cx, "/node/poll", body).await,
                Err(error) => Err(error),
            };
            let now = Instant::now();
            let error = match polled {
                Ok(reply) => {
                    (self.received, self.received_at) = (reply.number, now);
                    if reply.node.is_some() {
                        link.usage.lock().clone_from(&reply.node);
                    }
                    self.seen += reply.events.len();
                    self.broken_since = None;
                    let recovered = link.state.send_if_modified(|state| {
                        let suspect = state.node != NodeState::Serving;
                        state.node = NodeState::Serving;
                        suspect
                    });
                    return Some(LinkNews::Reply { reply, recovered });
                }
                Err(error) => error,
            };
            if error.code() == Code::NotFound {
                // The agent says so only after the ranks have ended.
                return Some(LinkNews::State(link.lose(error.to_string(), now)));
            }
            let since = *self.broken_since.get_or_insert(now);
            let silent = now.duration_since(self.received_at);
            // A connection that breaks and cannot be made again is a process that died.
            let gone = error.code() == Code::Unavailable && now.duration_since(since) >= link.reconnect;
            if gone || silent >= link.lease {
                let why = format!("its agent has not responded for {silent:.1?}: {error}");
                let fenced = *link.lease_end() + KILL_TIMEOUT;
                return Some(LinkNews::State(link.lose(why, fenced)));
            }
            sleep(RETRY_INTERVAL).await;
            let suspect = NodeState::Suspect(error.to_string());
            let first = link.state.send_if_modified(|state| {
                let first = state.node == NodeState::Serving;
                state.node = suspect.clone();
                first
            });
            if first {
                return Some(LinkNews::State(suspect));
            }
        }
    }
}
