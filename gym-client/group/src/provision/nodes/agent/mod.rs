//! The agent of a node: starts ranks for controllers on other machines.

mod metrics;
pub(super) mod program;
mod session;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use gym_client::launch::{LineSink, prefixed};
use gym_client::metrics::metrics_response;
use gym_client::registry::{MemberAddress, MemberKeeper, MemberOptions, RemoteRegistry};
use gym_client::transport::{HTTP, Transports};
use gym_core::base::process::OWN_PROGRAM;
use gym_core::registry::{MemberNode, MemberSpec, MemberTiming};
use gym_core::transport::{InProcess, ListenOptions, Transport, TransportPolicy, serve};
use gym_core::{
    CallContext, CancelToken, Code, Endpoint, Error, Handler, Incarnation, Request, Response, Result, Verb, World,
};
use metrics::AgentMetrics;
use parking_lot::Mutex;
use serde_json::json;
use session::NodeSession;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::placement::{Devices, NodeResources, Topology};
use crate::provision::in_process::InProcessRanks;
use crate::provision::local::{Local, LocalOptions};
use crate::provision::machine::{PreparesRanks, this_machine};
use crate::provision::nodes::lease::check_lease;
use crate::provision::nodes::message::{
    KillBody, LaunchBody, NodeReport, PollBody, PortsBody, PortsReply, RankBody, RanksBody, ReleaseBody, ReserveBody,
    StartBody, StopBody, is_allowed, read, reply,
};
use crate::provision::place::{GpuFolder, HeldGpus, listed};
use crate::provision::workers::Workers;

/// Sessions of one node: controllers that hold something, or did until a moment ago.
const SESSIONS_MAX: usize = 256;
/// Pause between two looks at the sessions of a draining node.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Options of a node.
#[derive(Clone)]
#[non_exhaustive]
pub struct NodeOptions {
    /// The name of the node, unique in the cluster. Default: the name of the host.
    pub name: String,
    /// The secret that controllers must know: whoever has it can start the worker types of this program on this machine.
    pub secret: String,
    /// The head server that the node joins as a member, with [`NodeAgent::start`]. Default: none; controllers then name the agent's endpoint.
    pub head: Option<Endpoint>,
    /// The host to bind. Default: `127.0.0.1`, which only this machine reaches.
    pub host: String,
    /// The port to bind. Default: 0, any free port.
    pub port: u16,
    /// The host at which other machines reach this one. Default: `host`, or for `0.0.0.0` the address of the route to the head server.
    pub advertise: Option<String>,
    /// The resources that the node offers. Default: the CPUs of this machine, and its visible GPUs. Controllers get those that no other program of the machine holds.
    pub resources: NodeResources,
    /// The intervals of its heartbeats to the head server.
    pub timing: MemberTiming,
    /// The time for which an unreachable head server is tried at the start. Default: 5 minutes.
    pub join_within: Duration,
    /// Receives the output of the ranks. Default: our standard error, each line with its worker's name.
    pub lines: LineSink,
    /// An engine divides the GPUs between its agents.
    pub(super) engine_divides: bool,
}

impl NodeOptions {
    /// Creates the default options of a node with this secret.
    #[must_use]
    pub fn new(secret: impl Into<String>) -> Self {
        let resources = this_machine();
        Self {
            name: resources.name.clone(),
            secret: secret.into(),
            head: None,
            host: "127.0.0.1".to_owned(),
            port: 0,
            advertise: None,
            resources,
            timing: MemberTiming::default(),
            join_within: Duration::from_secs(300),
            lines: prefixed(std::io::stderr()),
            engine_divides: false,
        }
    }
}

impl fmt::Debug for NodeOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeOptions")
            .field("name", &self.name)
            .field("head", &self.head)
            .field("host", &self.host)
            .field("resources", &self.resources)
            .finish_non_exhaustive()
    }
}

/// The agent of this machine. It starts ranks of this program's worker types for controllers that know its secret and run the same
/// program.
///
/// ```no_run
/// # use gym_group::{NodeAgent, NodeOptions, Workers}; use gym_core::{Endpoint, Result};
/// # async fn example(workers: Workers) -> Result<()> {
/// let mut options = NodeOptions::new(std::env::var("GYM_JOIN_SECRET").unwrap_or_default());
/// options.head = Some(Endpoint::parse("http://10.0.0.1:11000")?);
/// options.host = "0.0.0.0".to_owned();
/// let node = NodeAgent::start(workers, options).await?;
/// tokio::select! {
///     _ = tokio::signal::ctrl_c() => {}
///     () = node.drained() => {}
/// }
/// node.stop(std::time::Duration::from_secs(30)).await;
/// # Ok(()) }
/// ```
///
/// A controller holds its part of the node under a lease. If the agent has not heard from it for the lease, the agent kills its ranks; if
/// the agent itself is stopped, its watchdog does; if the agent dies, the kernel does.
#[derive(Debug)]
pub struct NodeAgent {
    state: Arc<AgentState>,
    endpoints: Vec<Endpoint>,
    drain: CancelToken,
    serving: JoinSet<Result<()>>,
    /// Requests that change something. They run to their end even if their caller has left; a repeated request finds what they did.
    _changes: Arc<Mutex<JoinSet<()>>>,
    member: Option<MemberKeeper>,
}

struct AgentState {
    options: NodeOptions,
    ranks: Arc<dyn PreparesRanks>,
    incarnation: Incarnation,
    build: String,
    /// The host that others are told.
    advertised: String,
    address: IpAddr,
    sessions: Mutex<BTreeMap<String, Arc<NodeSession>>>,
    /// Held during a reservation, so that a request that is repeated finds what the first one did.
    reserving: tokio::sync::Mutex<()>,
    /// Where the programs of this machine divide its GPUs; `None` if the ranks are tasks of this process, for tests and simulations.
    folder: Option<GpuFolder>,
    /// Ends the sessions whose lease has ended.
    keepers: Mutex<JoinSet<()>>,
    /// How the last session that has ended did.
    ended: Mutex<Option<SessionEnd>>,
    metrics: AgentMetrics,
}

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SessionEnd {
    /// Its controller released it.
    Released,
    /// Its controller was silent for the lease.
    Silent,
}

impl fmt::Debug for AgentState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentState").field("options", &self.options).finish_non_exhaustive()
    }
}

impl NodeAgent {
    /// Listens, and joins the head server as a member of its own. The program must have called [`Workers::enter`] first.
    ///
    /// # Errors
    /// Those of [`NodeAgent::listen`] and of the head server.
    pub async fn start(workers: Workers, options: NodeOptions) -> Result<Self> {
        let mut agent = Self::listen(workers, options).await?;
        if let Some(head) = agent.state.options.head.clone() {
            let joined = agent.join(head, &World::real()).await;
            agent.member = Some(joined.map_err(|error| error.about(subject(&agent.state.options)))?);
        }
        Ok(agent)
    }

    /// Listens, and joins no head server: the process joins otherwise, for example as a worker with servers, and puts
    /// [`NodeAgent::member_node`] into its membership under the name of the node. [`NodeOptions::head`] decides only on the address that others are
    /// told. The program must have called [`Workers::enter`] first.
    ///
    /// # Errors
    /// `InvalidArgument` if the secret is empty or the node could not be reached at its address. The errors of the listener.
    pub async fn listen(workers: Workers, options: NodeOptions) -> Result<Self> {
        let subject = subject(&options);
        Self::listen_at(workers, options).await.map_err(|error| error.about(subject))
    }

    async fn listen_at(workers: Workers, options: NodeOptions) -> Result<Self> {
        let (place, address) = placed(&options).await?;
        if !address.is_loopback() {
            tracing::warn!(node = options.name, %address, "this node starts processes for whoever knows its join secret, which travels unencrypted; use a network that you trust");
        }
        let local = LocalOptions {
            host: Some(address.to_string()),
            lines: Arc::clone(&options.lines),
            // A restart elsewhere counts on it that the ranks of a dead agent are dead.
            orphan_grace: Duration::ZERO,
            ..LocalOptions::default()
        };
        let at = ListenOptions::default().at(place.bind, options.port).advertised_as(place.advertised.clone());
        let (advertised, folder) = (place.advertised, Some(GpuFolder::of_this_machine()));
        let listens = AgentListens { transports: transports(), at, needed: &[HTTP], advertised, address, folder };
        Self::serve(Arc::new(Local::new(workers).with(local)), listens, &World::real(), options).await
    }

    /// Starts an agent whose ranks are tasks of this process, for tests and simulations. It joins no head server, and listens over those of
    /// `transports` that need no socket, under the name of the node.
    ///
    /// # Errors
    /// As [`NodeAgent::listen`].
    pub async fn start_in_process(
        ranks: InProcessRanks,
        transports: impl Into<Transports>,
        world: &World,
        options: NodeOptions,
    ) -> Result<Self> {
        let subject = subject(&options);
        let started = async {
            let (place, address) = placed(&options).await?;
            let at = ListenOptions::named(&options.name);
            let transports = transports.into();
            let advertised = place.advertised;
            let listens = AgentListens { transports, at, needed: &[], advertised, address, folder: None };
            Self::serve(Arc::new(ranks), listens, world, options).await
        };
        started.await.map_err(|error| error.about(subject))
    }

    async fn serve(
        ranks: Arc<dyn PreparesRanks>,
        listens: AgentListens,
        world: &World,
        options: NodeOptions,
    ) -> Result<Self> {
        let AgentListens { transports, at, needed, advertised, address, folder } = listens;
        let state = Arc::new(AgentState {
            ranks,
            incarnation: Incarnation(u64::try_from(world.now().as_millis()).unwrap_or(u64::MAX)),
            build: build()?,
            advertised,
            address,
            sessions: Mutex::default(),
            reserving: tokio::sync::Mutex::default(),
            folder,
            keepers: Mutex::default(),
            ended: Mutex::default(),
            metrics: AgentMetrics::default(),
            options,
        });
        let changes = Arc::default();
        let handler: Arc<dyn Handler> =
            Arc::new(AgentHandler { state: Arc::clone(&state), changes: Arc::downgrade(&changes) });
        let (listener, handler) = transports.listen(at, handler, needed).await?;
        let mut endpoints = listener.endpoints().to_vec();
        endpoints.retain(|endpoint| endpoint.scheme() != "mem" || needed.is_empty());
        let drain = CancelToken::new();
        let mut serving = JoinSet::new();
        serving.spawn(serve(listener, handler, drain.clone(), Duration::from_secs(2)));
        Ok(Self { state, endpoints, drain, serving, _changes: changes, member: None })
    }

    async fn join(&self, head: Endpoint, world: &World) -> Result<MemberKeeper> {
        let AgentState { options, incarnation, advertised, .. } = &*self.state;
        let mut spec = MemberSpec::of_this_process(&options.name, *incarnation, advertised, options.timing, world);
        spec.node = Some(self.member_node());
        let cx = CallContext::within(options.join_within);
        let mut member = MemberOptions::default();
        member.join_within = options.join_within;
        let head = Arc::new(RemoteRegistry::new(head, transports(), world.clone()));
        MemberKeeper::join(head, &cx, spec, member, world).await
    }

    /// Returns what a membership of this process says about the node.
    #[must_use]
    pub fn member_node(&self) -> MemberNode {
        let gpus = u32::try_from(self.state.report().gpus.len()).unwrap_or(u32::MAX);
        MemberNode { endpoints: self.endpoints.clone(), build: self.state.build.clone(), gpus }
    }

    /// Returns the endpoints of the agent, in order of preference.
    #[must_use]
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// Waits until the head server asks the node to drain (`rgym drain NAME`) and its last controller has released it. A draining node gets no new
    /// ranks. Waits forever if this agent has joined no head server.
    pub async fn drained(&self) {
        let Some(member) = &self.member else { return std::future::pending().await };
        member.draining().cancelled().await;
        self.released().await;
    }

    /// Waits until no controller holds anything of the node. A process that joined the head server otherwise calls this when it is asked
    /// to drain; the head server then lists the node to no further controller.
    pub async fn released(&self) {
        while !self.state.sessions.lock().is_empty() {
            tokio::time::sleep(DRAIN_POLL_INTERVAL).await;
        }
    }

    /// Waits until no controller has held anything of the node for `first`, or for `later` once a controller has.
    async fn idle(&self, first: Duration, later: Duration) -> Option<SessionEnd> {
        let mut since = Instant::now();
        loop {
            let ended = *self.state.ended.lock();
            if !self.state.sessions.lock().is_empty() {
                since = Instant::now();
            } else if since.elapsed() >= if ended.is_some() { later } else { first } {
                return ended;
            }
            tokio::time::sleep(DRAIN_POLL_INTERVAL).await;
        }
    }

    /// Leaves the head server if this agent has joined it, stops all ranks, kills those that run after `grace`, and closes the listener.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn stop(mut self, grace: Duration) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            if let Some(member) = self.member.take() {
                member.leave(Duration::from_secs(2)).await;
            }
            let sessions: Vec<_> = std::mem::take(&mut *self.state.sessions.lock()).into_values().collect();
            for ended in join_all(sessions.iter().map(|session| session.end(grace))).await {
                if let Err(error) = ended {
                    tracing::error!(node = self.state.options.name, %error, "a rank could not be stopped");
                }
            }
            self.drain.cancel();
            while self.serving.join_next().await.is_some() {}
        })
    }
}

/// Where an agent listens.
struct AgentListens {
    transports: Transports,
    at: ListenOptions,
    /// Without these, controllers cannot reach the agent.
    needed: &'static [Transport],
    /// The host that others are told, and its address.
    advertised: String,
    address: IpAddr,
    folder: Option<GpuFolder>,
}

/// Checks the options, and returns the addresses of the node.
async fn placed(options: &NodeOptions) -> Result<(MemberAddress, IpAddr)> {
    if options.secret.trim().is_empty() {
        let message = "the join secret is empty, and anybody could start processes here\n  fix: set NodeOptions::secret, the same for \
                       the nodes and their controllers";
        return Err(Error::invalid(message));
    }
    let NodeOptions { host, advertise, head, join_within, .. } = options;
    let place = MemberAddress::find(host, advertise.as_deref(), head.as_ref(), *join_within).await?;
    let address = place.resolve().await?;
    Ok((place, address))
}

/// Returns the build of this program: a checksum of its file, which is read once.
pub(super) fn build() -> Result<String> {
    static BUILD: OnceLock<String> = OnceLock::new();
    if let Some(known) = BUILD.get() {
        return Ok(known.clone());
    }
    let failed = |error| Error::internal("the file of this program cannot be read").caused_by(error);
    let mut file = File::open(OWN_PROGRAM).map_err(failed)?;
    let (mut sum, mut bytes, mut block) = (0, 0, vec![0; 1 << 20]);
    loop {
        match file.read(&mut block).map_err(failed)? {
            0 => return Ok(BUILD.get_or_init(|| format!("{sum:08x}-{bytes}")).clone()),
            read => (sum, bytes) = (crc32c::crc32c_append(sum, &block[..read]), bytes + read),
        }
    }
}

#[derive(Debug)]
struct AgentHandler {
    state: Arc<AgentState>,
    changes: Weak<Mutex<JoinSet<()>>>,
}

impl Handler for AgentHandler {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        let (state, changes) = (Arc::clone(&self.state), self.changes.clone());
        if matches!(request.verb, Verb::Get | Verb::Head) || request.route.path() == "/node/poll" {
            return Box::pin(state.answer(request));
        }
        Box::pin(async move {
            let ended = || Error::unknown(Code::Unavailable, "the agent has ended");
            let (done, answer) = oneshot::channel();
            {
                let changes = changes.upgrade().ok_or_else(ended)?;
                let mut changes = changes.lock();
                while changes.try_join_next().is_some() {}
                changes.spawn(async move {
                    // An error means that the caller has left.
                    let _ = done.send(state.answer(request).await);
                });
            }
            answer.await.map_err(|_| ended())?
        })
    }
}

fn subject(options: &NodeOptions) -> String {
    format!("start node {}", options.name)
}

/// Returns the transports of an agent: over HTTP and frames, regardless of the policy of its groups.
fn transports() -> Transports {
    Transports::from_features(InProcess::new()).with_policy(TransportPolicy::unconfigured())
}

impl AgentState {
    async fn answer(self: Arc<Self>, request: Request) -> Result<Response> {
        // For monitoring systems, which do not know the secret.
        match (request.verb, request.route.path()) {
            (Verb::Get | Verb::Head, "/health") => return reply(&json!({"status": "ok", "name": self.options.name})),
            (Verb::Get | Verb::Head, "/metrics") => {
                return Ok(metrics_response(&request.context, self.metrics.text(&self)));
            }
            _ => {}
        }
        if !is_allowed(&request.context.metadata, &self.options.secret) {
            let message = "the join secret is missing or wrong\n  fix: give nodes and controllers the same secret";
            return Err(
                Error::not_started(Code::FailedPrecondition, message).about(format!("node {}", self.options.name))
            );
        }
        let body = request.message.head.to_bytes();
        match (request.verb, request.route.path()) {
            (Verb::Get, "/node") => reply(&self.report_of_machine(&request.context).await?),
            (Verb::Post, "/node/reserve") => reply(&Self::reserve(&self, &request.context, read(&body)?).await?),
            (Verb::Post, "/node/poll") => {
                let request: PollBody = read(&body)?;
                reply(&self.session(&request.session)?.poll(&request).await?)
            }
            (Verb::Post, "/node/ports") => {
                let request: PortsBody = read(&body)?;
                reply(&PortsReply { ports: self.running(&request.session)?.hold(&request)? })
            }
            (Verb::Post, "/node/launch") => {
                let request: LaunchBody = read(&body)?;
                self.running(&request.session)?.launch(request).await?;
                reply(&json!({}))
            }
            (Verb::Post, "/node/start") => {
                let request: StartBody = read(&body)?;
                self.running(&request.session)?.start(request).await?;
                reply(&json!({}))
            }
            (Verb::Post, "/node/end") => {
                let RanksBody { session, launch, ranks } = read(&body)?;
                self.running(&session)?.end_ranks(launch, ranks).await?;
                reply(&json!({}))
            }
            (Verb::Post, "/node/kill") => {
                let KillBody { session, launch, rank, incarnation } = read(&body)?;
                self.running(&session)?.ranks(launch)?.kill(rank, incarnation).await?;
                reply(&json!({}))
            }
            (Verb::Post, "/node/environment") => {
                let RankBody { session, launch, rank } = read(&body)?;
                let ranks = self.running(&session)?.ranks(launch)?;
                reply(&ranks.environment(&CallContext::default(), rank).await?)
            }
            (Verb::Post, "/node/stop") => {
                let StopBody { session, launch, grace_ms } = read(&body)?;
                self.session(&session)?.stop(launch, Duration::from_millis(grace_ms)).await?;
                reply(&json!({}))
            }
            (Verb::Post, "/node/release") => {
                let ReleaseBody { session, grace_ms } = read(&body)?;
                if let Ok(held) = self.session(&session) {
                    let ended = held.end(Duration::from_millis(grace_ms)).await;
                    *self.ended.lock() = Some(SessionEnd::Released);
                    self.sessions.lock().remove(&session);
                    ended?;
                }
                reply(&json!({}))
            }
            (verb, path) => {
                Err(Error::not_started(Code::NotFound, format!("the agent of a node has no route {verb} {path}")))
            }
        }
    }

    /// Returns what the node has, and what its sessions and the other programs of this machine leave of it.
    async fn report_of_machine(&self, cx: &CallContext) -> Result<NodeReport> {
        let mut report = self.report();
        let Some(folder) = self.folder.as_ref().filter(|_| !report.gpus.is_empty()) else { return Ok(report) };
        let look = folder.look(cx, &report.free_gpus, self.options.engine_divides).await?;
        report.held_by.extend(look.taken());
        let free = look.free();
        drop(look);
        report.shared_gpus.extend(report.free_gpus.extract_if(.., |gpu| !free.contains(gpu)));
        report.shared_gpus = folder.look(cx, &report.shared_gpus, true).await?.free();
        Ok(report)
    }

    /// Returns what the node has, and what its sessions leave of it.
    fn report(&self) -> NodeReport {
        self.report_of(&self.sessions.lock())
    }

    fn report_of(&self, sessions: &BTreeMap<String, Arc<NodeSession>>) -> NodeReport {
        let held = |alone: bool| -> BTreeSet<&String> {
            sessions.values().filter(|session| !(alone && session.shares)).flat_map(|session| &session.gpus).collect()
        };
        let (held, alone) = (held(false), held(true));
        let NodeResources { cpus, gpus, topology: Topology { domain, rank }, .. } = self.options.resources.clone();
        let gpus = match gpus {
            Devices::Named(names) => names,
            Devices::Simulated(_) => Vec::new(),
        };
        let held_cpus: u32 = sessions.values().map(|session| session.cpus).sum();
        let cpus = cpus.unwrap_or(u32::MAX);
        NodeReport {
            name: self.options.name.clone(),
            incarnation: self.incarnation,
            build: self.build.clone(),
            address: self.address,
            cpus,
            free_cpus: cpus.saturating_sub(held_cpus),
            free_gpus: gpus.iter().filter(|gpu| !held.contains(gpu)).cloned().collect(),
            shared_gpus: gpus.iter().filter(|gpu| held.contains(gpu) && !alone.contains(gpu)).cloned().collect(),
            gpus,
            domain,
            domain_rank: rank,
            held_by: sessions.values().map(|session| session.controller.clone()).collect(),
        }
    }

    /// Holds resources. A repeated request changes nothing.
    async fn reserve(this: &Arc<Self>, cx: &CallContext, request: ReserveBody) -> Result<NodeReport> {
        let refused = |code, message: String| {
            Err(Error::not_started(code, message).about(format!("reserve on node {}", this.options.name)))
        };
        if request.build != this.build {
            return refused(
                Code::FailedPrecondition,
                format!(
                    "the node runs build {}, the controller {}: they are different programs\n  fix: start the same executable on both",
                    this.build, request.build
                ),
            );
        }
        let lease = Duration::from_millis(request.lease_ms);
        check_lease(lease).map_err(|error| error.about(format!("reserve on node {}", this.options.name)))?;
        let _one = this.reserving.lock().await;
        let free = this.report();
        if this.sessions.lock().contains_key(&request.session) {
            return Ok(free);
        }
        let is_free =
            |gpu: &String| free.free_gpus.contains(gpu) || (request.share_gpus && free.shared_gpus.contains(gpu));
        let missing = request.gpus.iter().find(|gpu| !is_free(gpu));
        if request.cpus > free.free_cpus || missing.is_some() {
            let what = missing.map_or_else(|| format!("{} CPUs", request.cpus), |gpu| format!("GPU {gpu}"));
            return refused(
                Code::ResourceExhausted,
                format!(
                    "{what} requested; {} of {} CPUs and GPUs [{}] are free; the rest is held by {}",
                    free.free_cpus,
                    free.cpus,
                    free.free_gpus.join(", "),
                    free.held_by.join(", ")
                ),
            );
        }
        let held = this.hold(cx, &request).await?;
        let session = Arc::new(NodeSession::begin(&request, held, lease, Arc::clone(&this.ranks)));
        let mut sessions = this.sessions.lock();
        if sessions.len() >= SESSIONS_MAX {
            return refused(Code::ResourceExhausted, format!("it has {SESSIONS_MAX} sessions, which is the limit"));
        }
        sessions.insert(request.session.clone(), Arc::clone(&session));
        drop(sessions);
        let (state, name) = (Arc::downgrade(this), request.session);
        let mut keepers = this.keepers.lock();
        while keepers.try_join_next().is_some() {}
        keepers.spawn(
            async move {
                session.lease_ended().await;
                let Some(state) = state.upgrade() else { return };
                // Released meanwhile.
                if !state.sessions.lock().contains_key(&name) {
                    return;
                }
                tracing::warn!(
                    node = state.options.name,
                    controller = session.controller,
                    "no message from a controller for the time of its lease; its ranks are killed"
                );
                if let Err(error) = session.end(Duration::ZERO).await {
                    tracing::error!(node = state.options.name, %error, "a rank could not be killed");
                }
                *state.ended.lock() = Some(SessionEnd::Silent);
                // Only now: whoever asks for the session afterwards learns that its ranks have ended.
                state.sessions.lock().remove(&name);
            }
            .boxed(),
        );
        drop(keepers);
        Ok(this.report())
    }

    /// Holds the GPUs of a request among the programs of this machine.
    async fn hold(&self, cx: &CallContext, request: &ReserveBody) -> Result<HeldGpus> {
        let Some(folder) = self.folder.as_ref().filter(|_| !request.gpus.is_empty()) else {
            return Ok(HeldGpus::default());
        };
        let look = folder.look(cx, &request.gpus, self.options.engine_divides || request.share_gpus).await?;
        let name = &self.options.name;
        if look.free().len() < request.gpus.len() {
            let message = format!("not enough free GPUs{}", listed(&look.taken()));
            return Err(Error::not_started(Code::ResourceExhausted, message).about(format!("reserve on node {name}")));
        }
        look.hold(folder, &request.gpus, &format!("node {name} for {}", request.controller))
    }

    /// As [`AgentState::session`]. A session that has ended is reported to its controller by the next poll; meanwhile, its node is unavailable.
    fn running(&self, name: &str) -> Result<Arc<NodeSession>> {
        let gone = |error: Error| Error::not_started(Code::Unavailable, error.message().to_owned());
        self.session(name).map_err(|error| gone(error).about(format!("node {}", self.options.name)))
    }

    fn session(&self, name: &str) -> Result<Arc<NodeSession>> {
        self.sessions.lock().get(name).cloned().ok_or_else(|| {
            let message =
                "there is no such session: its lease has ended, or the agent was restarted; its ranks have ended";
            Error::not_started(Code::NotFound, message).about(format!("node {}", self.options.name))
        })
    }
}
