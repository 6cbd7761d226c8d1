//! The running servers of a configuration, started and stopped in order.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use gym_client::collect::monitor::CollectionMonitor;
use gym_client::collect::{DriverOptions, Rollouts, ServerNames};
use gym_client::config::{GymConfig, InstanceConfig};
use gym_client::registry::{
    LeaseKeeper, MemberKeeper, RemoteRegistry, SharedConfiguration, address_towards, is_unspecified, own_address,
};
use gym_client::transport::HTTP;
use gym_client::transport::http::HttpBackend;
use gym_client::work::{COLLECTOR_POOL, PoolWatch, PullingMember, WORK_LABEL, WorkPullerOptions};
use gym_client::{JOINS_RUNS_LABEL, ServerClient, Transports};
use gym_core::registry::{Instance, MemberLimits, MemoryRegistry, Registry};
use gym_core::server::ServerKind;
use gym_core::transport::{InProcess, ListenOptions, Listener, Transport, TransportPolicy, bare_host, host_port};
use gym_core::{CallContext, CancelToken, Code, Endpoint, Error, Handler, Incarnation, RawObject, Result, World};
use tokio::task::JoinSet;

use crate::environment::POOL_IMPLEMENTATION;
use crate::head::suspects::ask_suspects;
use crate::head::{GlobalConfig, HeadServer};
use crate::metrics::Metrics;
use crate::role::ServerContext;
use crate::stack::instance::{RunningServer, references, registration, unknown_implementation};
use crate::stack::join::{self, JoinedRegistry};
use crate::stack::options::{HEAD_NAME, StackOptions};
use crate::stack::python;
use crate::stack::servers::{Build, Made, Servers};
use gym_core::transport::serve;

/// The running servers of a configuration. [`Stack::stop`] stops them in order; dropping the stack aborts them.
///
/// ```
/// use gym_server::prelude::*;
/// use gym_server::{agent::SimpleAgent, model::ScriptedModel};
///
/// # struct Right;
/// # impl ResourcesServer for Right {
/// #     type Task = serde_json::Value;
/// #     async fn verify(&self, _: &CallContext, _: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> { Ok(Verdict::correct(true)) }
/// # }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// # let model = ScriptedModel::with_default_policy(Default::default(), &World::real());
/// let stack = Stack::embedded()
///     .resources("right", Right)
///     .model("policy", model)
///     .agent("right_agent", |client| SimpleAgent::between("policy", "right", client))
///     .start()
///     .await?;
/// let row = RawObject::parse(r#"{"responses_create_params": {"input": "2 + 2"}}"#)?;
/// let mut rollouts = stack.rollouts("right_agent", [row])?;
/// assert_eq!(rollouts.next().await.unwrap()?.reward(), Some(1.0));
/// stack.stop().await;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Stack {
    client: ServerClient,
    registry: Arc<dyn Registry>,
    head: Option<HeadServer>,
    /// Asks suspect members of the head server's cluster. Ends with the stack.
    asking: JoinSet<()>,
    running: Vec<RunningServer>,
    leases: Vec<LeaseKeeper>,
    /// Drained one after the other: callers before the servers that they call.
    stages: Vec<ShutdownStage>,
    python_servers: Option<python::PythonServers>,
    /// The membership of this process in a cluster.
    member: Option<MemberKeeper>,
    /// The host that a member tells other machines, instead of those that its servers bind.
    advertised: Option<String>,
    /// The host that other machines are told of servers that bind all addresses; empty if none does.
    own_host: String,
    stop_grace: Duration,
    metrics: Metrics,
    names: ServerNames,
    world: World,
    incarnation: Incarnation,
}

/// Time between two messages, and between two looks, while workers are missing.
#[cfg(feature = "cli")]
const WAITING_INTERVAL: Duration = Duration::from_secs(10);
#[cfg(feature = "cli")]
const WORKERS_INTERVAL: Duration = Duration::from_millis(100);

/// Time in which a head server that holds the wanted port must respond, to be named in the error.
const RUNNING_HEAD_TIMEOUT: Duration = Duration::from_secs(1);

/// Ports above a chosen one that are tried if another process has taken that one meanwhile.
const PORTS_TRIED: u16 = 100;

#[derive(Debug)]
struct ShutdownStage {
    drain: CancelToken,
    tasks: JoinSet<Result<()>>,
}

impl ShutdownStage {
    fn new() -> Self {
        Self { drain: CancelToken::new(), tasks: JoinSet::new() }
    }

    fn serve(&mut self, listener: Box<dyn Listener>, handler: &Arc<dyn Handler>, grace: Duration) {
        self.tasks.spawn(serve(listener, Arc::clone(handler), self.drain.clone(), grace));
    }

    async fn stop(mut self) {
        self.drain.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            match ended {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(%error, "a listener ended with an error"),
                Err(error) => tracing::warn!(%error, "a server's task ended"),
            }
        }
    }
}

/// Returns the place of a kind in the order of shutdown.
fn stage_of(kind: ServerKind) -> usize {
    SHUTDOWN_ORDER.iter().position(|known| *known == kind).unwrap_or_default()
}

/// Adds the option that sets another port to the error of a port in use.
fn with_port_option(error: Error, key: &str) -> Error {
    if error.code() != Code::AlreadyExists {
        return error;
    }
    // The listener's own advice knows no option.
    let what = error.message().split(';').next().unwrap_or_default();
    let fix = format!("fix: stop what listens there, or set another port with ++{key}=PORT (0 takes a free port)");
    Error::not_started(error.code(), format!("{what}\n  {fix}")).about(error.subject().to_owned())
}

/// Adds that a head server runs at this place already, if that is the reason for the error.
async fn with_running_head(error: Error, place: &str, world: &World) -> Error {
    let Ok(head) = Endpoint::parse(&format!("http://{place}")) else { return error };
    let transports = Transports::from_features(InProcess::new()).with_policy(TransportPolicy::unconfigured());
    let registry = RemoteRegistry::new(head.clone(), transports, world.clone());
    if error.code() != Code::AlreadyExists
        || registry.global_configuration(&CallContext::within(RUNNING_HEAD_TIMEOUT)).await.is_err()
    {
        return error;
    }
    let text = format!(
        "{}\n  note: a head server runs there already; to join it, add --worker --head-url {head}",
        error.message()
    );
    Error::not_started(error.code(), text).about(error.subject().to_owned())
}

/// Callers stop before the servers that they call.
const SHUTDOWN_ORDER: [ServerKind; 4] =
    [ServerKind::Environment, ServerKind::Agent, ServerKind::Model, ServerKind::Resources];

impl Stack {
    /// Starts the servers of `config` and waits until all of them serve.
    ///
    /// # Errors
    /// `InvalidArgument` with file, key and fix for an error in the configuration, such as an implementation that is neither native
    /// nor Python. `Unavailable` if a server does not start; the servers that have started are stopped again.
    pub async fn start(config: GymConfig, servers: &Servers, world: &World, options: StackOptions) -> Result<Self> {
        gym_core::observe::stall::watch();
        let in_process = InProcess::new().with_calls_max(options.in_process_calls_max);
        // Clients call the head server over HTTP, regardless of the policy, because it resolves all other servers.
        let control = Transports::from_features(in_process.clone()).with_policy(TransportPolicy::unconfigured());
        let metrics = Metrics::new();
        let mut config = config;
        let mut wanted = wanted(&config, &options.only)?;
        let all_here = options.only.is_empty() || options.only.iter().any(|name| name == HEAD_NAME);
        let serves_head = all_here && !options.in_process && options.join.is_none();
        let remote = if all_here && options.join.is_none() {
            None
        } else {
            let head = match &options.head {
                Some(head) => head.clone(),
                None => Endpoint::parse(&format!("http://{}", host_port(&config.head.host, config.head.port)))?,
            };
            Some(RemoteRegistry::new(head, control, world.clone()))
        };
        let address = match (&options.join, &remote) {
            (Some(worker), Some(remote)) => {
                let address = join::find_address(worker, remote.head()).await?;
                config.head = join::head_config(remote.head())?;
                join::place(&address, &mut wanted, servers);
                Some(address)
            }
            _ => None,
        };
        let bound = wanted.iter().map(|instance| &instance.host).chain(Some(&config.head.host).filter(|_| serves_head));
        let own_host = match &address {
            Some(address) => address.advertised.clone(),
            None if bound.into_iter().any(|host| is_unspecified(host)) => {
                own_host(remote.as_ref().map(RemoteRegistry::head)).await
            }
            None => String::new(),
        };
        if serves_head && is_unspecified(&config.head.host) {
            config.advertise_head(&own_host);
        }
        let config = Arc::new(config);
        let policy = match &config.transport_policy {
            _ if options.in_process => TransportPolicy::of([Transport::MEM])?,
            Some(policy) => policy.clone(),
            None => TransportPolicy::unconfigured(),
        };
        let all = options.transports.clone().unwrap_or_else(|| {
            let all = servers.transports();
            let frames = all.get::<HttpBackend>().map(|backend| backend.frames.clone()).unwrap_or_default();
            all.with(in_process.clone()).with(HttpBackend::new(options.http.clone(), frames))
        });
        policy.check(&all.known())?;
        let transports = all.scoped(&policy, Some(ucx_address(&wanted)));
        transports.check_required().await?;
        metrics.with(|known| {
            known.register_collector(Box::new(transports.metrics()));
            #[cfg(feature = "rdma")]
            known.register_collector(Box::new(transports.ucx_metrics()));
        });
        let memory = if serves_head {
            let memory = MemoryRegistry::with_limits(world.rng().u64(..), MemberLimits::default());
            // Members of an earlier life of this head server return meanwhile.
            memory.recover_for(options.recovery);
            memory
        } else {
            MemoryRegistry::new()
        };
        let worker = match (&address, &remote) {
            (Some(_), Some(remote)) => Some(JoinedRegistry { own: memory.clone(), cluster: remote.clone() }),
            _ => None,
        };
        let local = options.only.is_empty();
        let registry: Arc<dyn Registry> = match (&worker, &remote) {
            (Some(worker), _) => Arc::new(worker.clone()),
            (None, Some(remote)) => Arc::new(remote.clone()),
            (None, None) => Arc::new(memory.clone()),
        };
        let client = ServerClient::new(Arc::clone(&registry), transports, world);
        if serves_head {
            client.set_members(Arc::new(memory.clone()));
        }
        if let Some(remote) = remote {
            client.follow(Arc::new(remote));
        }
        client.expect(config.instances.iter().map(|instance| instance.name.clone()));
        metrics.watch_affinity("replicas", client.affinity_counts());
        let mut stack = Self {
            client,
            registry,
            head: None,
            asking: JoinSet::new(),
            running: Vec::new(),
            leases: Vec::new(),
            stages: SHUTDOWN_ORDER.iter().chain(&[ServerKind::Resources]).map(|_| ShutdownStage::new()).collect(),
            python_servers: None,
            member: None,
            advertised: address.as_ref().map(|address| address.advertised.clone()),
            own_host,
            stop_grace: options.stop_grace,
            metrics,
            names: ServerNames::of_config(&config),
            world: world.clone(),
            incarnation: Incarnation(u64::try_from(world.now().as_millis()).unwrap_or(u64::MAX)),
        };
        let started = stack.bring_up(&config, &wanted, servers, world, &options, serves_head.then_some(memory), local);
        let started = match (started.await, &worker, &options.join, &address) {
            (Ok(()), Some(registry), Some(options), Some(address)) => {
                join::join(registry, &stack.client, options, address, stack.incarnation, world).await.map(Some)
            }
            (started, ..) => started.map(|()| None),
        };
        match started {
            Ok(member) => {
                stack.member = member;
                Ok(stack)
            }
            Err(error) => {
                stack.stop().await;
                Err(error)
            }
        }
    }

    #[allow(clippy::too_many_arguments)] // The parts of one start, used once.
    async fn bring_up(
        &mut self,
        config: &Arc<GymConfig>,
        wanted: &[InstanceConfig],
        servers: &Servers,
        world: &World,
        options: &StackOptions,
        head: Option<MemoryRegistry>,
        local: bool,
    ) -> Result<()> {
        if let Some(memory) = head {
            self.start_head(memory, config, world, options).await?;
        }
        let incarnation = self.incarnation;
        let mut python_instances = Vec::new();
        for instance in wanted {
            let mut context = ServerContext::new(&instance.name, &instance.implementation, world);
            context.metrics = self.metrics.clone();
            context.transports = Some(self.client.transports().clone());
            context.awaited = Some(self.client.awaited());
            context.incarnation = Some(incarnation);
            context.draining = self.stages[stage_of(instance.kind)].drain.clone();
            match servers.make(Build::new(instance, &context, &self.client)) {
                Some(made) => {
                    let Made { handler, task_check, joins_runs, ignored } = made?;
                    ignored.iter().for_each(|ignored| tracing::warn!(server = instance.name, "{ignored}"));
                    if let Some(check) = task_check {
                        self.names.add_task_check(&instance.name, check);
                    }
                    self.start_native(instance, handler, joins_runs, incarnation, local, options).await?;
                }
                None if instance.entrypoint.is_some() && options.in_process => {
                    return Err(Error::invalid(format!(
                        "{}: {} runs with Python, which needs a head server; a stack with `in_process` has none\n  fix: start \
                         the stack without `in_process`, or implement {} in this program",
                        instance.origin, instance.name, instance.implementation,
                    )));
                }
                None if instance.entrypoint.is_some() => {
                    let host = self.reachable_host(&instance.host).unwrap_or(&instance.host).clone();
                    python_instances.push((instance.clone(), host));
                }
                None => return Err(unknown_implementation(instance, servers)),
            }
        }
        if !python_instances.is_empty() {
            let yaml = self.python_configuration(config, &python_instances).await;
            let python_servers =
                python::PythonServers::start(&yaml, python_instances, options, &self.registry, incarnation, world)
                    .await?;
            self.running.extend(python_servers.running());
            self.python_servers = Some(python_servers);
        }
        self.running.sort_by_key(|row| config.instances.iter().position(|instance| instance.name == row.name));
        if let Some(head) = &self.head {
            head.set_ready();
        }
        Ok(())
    }

    async fn start_head(
        &mut self,
        memory: MemoryRegistry,
        config: &Arc<GymConfig>,
        world: &World,
        options: &StackOptions,
    ) -> Result<()> {
        let yaml = Arc::clone(config);
        let text: GlobalConfig = Arc::new(move |instances: &[Instance]| yaml.to_global_yaml_with(&live(instances)));
        let transports = self.client.transports().aside();
        self.asking.spawn(ask_suspects(memory.clone(), transports.clone()).boxed());
        let head = HeadServer::new(memory, text, world, self.metrics.clone());
        let served = config.instances.iter().map(|instance| instance.name.clone());
        let served = served.filter(|name| options.only.is_empty() || options.only.contains(name)).collect();
        let shared = SharedConfiguration { yaml: config.to_shared_yaml(), served };
        let head = head.expecting(options.expected_workers).sharing(shared).following(transports);
        let handler: Arc<dyn Handler> = Arc::new(head.clone());
        // Over HTTP only, regardless of the policy: clients find all other servers through the head server.
        let http = HttpBackend::new(options.http.clone(), Default::default());
        let mut place = ListenOptions::default().at(config.head.host.clone(), config.head.port);
        place.advertise = self.reachable_host(&config.head.host).cloned();
        let listened = Transports::new().with(http).listen(place, handler, &[HTTP]).await;
        let (listener, handler) = match listened {
            Ok(listened) => listened,
            Err(error) => {
                let place = host_port(&config.head.host, config.head.port);
                let error =
                    with_port_option(error.about(format!("start the head server on {place}")), "head_server.port");
                return Err(with_running_head(error, &place, world).await);
            }
        };
        let url = listener.endpoints()[0].to_string();
        self.running.push(RunningServer {
            name: HEAD_NAME.to_owned(),
            kind: HEAD_NAME.to_owned(),
            implementation: "head".to_owned(),
            url,
            runs_as: "native".to_owned(),
        });
        self.stages.last_mut().expect("one stage per kind and the head's").serve(
            listener,
            &handler,
            options.stop_grace,
        );
        self.head = Some(head);
        Ok(())
    }

    /// Returns the host at which others reach a server that binds all addresses; `None` for another `host`.
    fn reachable_host(&self, host: &str) -> Option<&String> {
        is_unspecified(host).then_some(&self.own_host)
    }

    /// Returns the configuration of Python servers, which find other servers only by the addresses in it: those that live elsewhere,
    /// and those of this process.
    async fn python_configuration(&self, config: &GymConfig, python: &[(InstanceConfig, String)]) -> String {
        let listed = self.registry.list(&CallContext::within(Duration::from_secs(10))).await;
        let mut servers = live(&listed.unwrap_or_default());
        servers.retain(|server| {
            // Other workers may have replicas of the servers of this process.
            let own = self.running.iter().find(|row| row.name == server.name).map(|row| row.url.as_str());
            let elsewhere = python.iter().all(|(instance, _)| instance.name != server.name);
            own.map_or(elsewhere, |url| url == format!("http://{}", host_port(&server.host, server.port)))
        });
        config.to_global_yaml_with(&servers)
    }

    async fn start_native(
        &mut self,
        instance: &InstanceConfig,
        handler: Arc<dyn Handler>,
        joins_runs: bool,
        incarnation: Incarnation,
        local: bool,
        options: &StackOptions,
    ) -> Result<()> {
        let mut place = if local { ListenOptions::named(&instance.name) } else { ListenOptions::default() };
        let advertised = self.advertised.as_ref().or_else(|| self.reachable_host(&instance.host));
        place.advertise = advertised.filter(|_| !options.in_process).cloned();
        let stage = &mut self.stages[stage_of(instance.kind)];
        let mut port = instance.port.unwrap_or(0);
        let needed = if options.in_process { [].as_slice() } else { [HTTP].as_slice() };
        let last = if instance.port_chosen && port != 0 { port.saturating_add(PORTS_TRIED) } else { port };
        let listened = loop {
            let place = if options.in_process { place.clone() } else { place.clone().at(instance.host.clone(), port) };
            match self.client.transports().listen(place, Arc::clone(&handler), needed).await {
                // Another process has taken the port since it was chosen.
                Err(error) if error.code() == Code::AlreadyExists && port < last => {
                    tracing::warn!(server = instance.name, "port {port} is in use; trying the next one");
                    port += 1;
                }
                listened => break listened,
            }
        };
        let (listener, handler) = listened.map_err(|error| {
            let error = error.about(format!("start {} on {}", instance.name, instance.host));
            let InstanceConfig { name, kind, implementation, .. } = instance;
            with_port_option(error, &format!("{name}.{kind}.{implementation}.port"))
        })?;
        // Preferred endpoints first; HTTP last, because every client supports it.
        let mut endpoints = listener.endpoints().to_vec();
        endpoints.retain(|endpoint| endpoint.scheme() != "http+frames");
        let url = endpoints.last().cloned().ok_or_else(|| Error::internal("nothing listens"))?;
        stage.serve(listener, &handler, options.stop_grace);
        let mut labels = BTreeMap::from([("pid".to_owned(), std::process::id().to_string())]);
        let told = [(joins_runs, JOINS_RUNS_LABEL), (instance.implementation == POOL_IMPLEMENTATION, WORK_LABEL)];
        labels.extend(told.iter().filter(|(is, _)| *is).map(|(_, label)| ((*label).to_owned(), "1".to_owned())));
        let registration = registration(instance, endpoints, incarnation, labels, &self.world);
        let cx = CallContext::within(Duration::from_secs(30));
        self.leases.push(LeaseKeeper::start(Arc::clone(&self.registry), &cx, registration).await?);
        self.running.push(RunningServer {
            name: instance.name.clone(),
            kind: instance.kind.to_string(),
            implementation: instance.implementation.clone(),
            url: url.to_string(),
            runs_as: "native".to_owned(),
        });
        Ok(())
    }

    /// Runs an agent or an environment server of this stack on tasks, and returns the rollouts in the order in which they end. Must
    /// be called within a tokio runtime.
    ///
    /// # Errors
    /// `NotFound` with the nearest name if the stack has no such server.
    pub fn rollouts(
        &self,
        agent: &str,
        tasks: impl IntoIterator<Item = RawObject, IntoIter: Send + 'static>,
    ) -> Result<Rollouts> {
        self.rollouts_with(agent, tasks, DriverOptions::default())
    }

    /// Runs rollouts as [`Stack::rollouts`] does, with the given limits: rollouts in flight, attempts, deadlines.
    ///
    /// # Errors
    /// The errors of [`Stack::rollouts`].
    pub fn rollouts_with(
        &self,
        agent: &str,
        tasks: impl IntoIterator<Item = RawObject, IntoIter: Send + 'static>,
        options: DriverOptions,
    ) -> Result<Rollouts> {
        let server = match self.names.server_of_agent(agent) {
            Ok((server, _)) => server,
            Err(_) if self.names.environment(agent).is_ok() => agent.to_owned(),
            Err(error) => return Err(error),
        };
        let tasks = futures_util::stream::iter(tasks.into_iter().map(Ok));
        Ok(Rollouts::run(self.client.clone(), &self.world, (&server, agent), tasks, options))
    }

    /// Takes work from every pool in `registry`, and runs it on the servers of this stack. A stack that is a member of a cluster takes it
    /// under the name of the member. Drain the watch before the stack is stopped.
    #[must_use]
    pub fn take_work(&self, registry: Arc<dyn Registry>, options: WorkPullerOptions) -> PoolWatch {
        let mut options = options;
        if let Some(member) = &self.member {
            member.name().clone_into(&mut options.name);
            options.member = Some(PullingMember { incarnation: member.incarnation(), timing: member.timing() });
        }
        PoolWatch::start(registry, self.client.clone(), options, &self.world)
    }

    /// Returns a client that calls the servers by name.
    #[must_use]
    pub fn client(&self) -> &ServerClient {
        &self.client
    }

    /// Returns the names of the servers, for a collector. It checks each row with the environment that runs in this process, before it
    /// sends any row.
    #[must_use]
    pub fn names(&self) -> &ServerNames {
        &self.names
    }

    /// Returns the servers in the order of the configuration, the head server first.
    #[must_use]
    pub fn servers(&self) -> &[RunningServer] {
        &self.running
    }

    /// Returns what takes the reports of collections, which the page of the head server shows; `None` if this stack has no head server.
    #[must_use]
    pub fn monitor(&self) -> Option<Arc<dyn CollectionMonitor>> {
        self.head.as_ref().map(HeadServer::monitor)
    }

    /// Returns the metrics of this process.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Waits until the expected workers serve, and passes what is missing to `say` at intervals.
    ///
    /// # Errors
    /// `DeadlineExceeded` with what is missing after `limit`.
    #[cfg(feature = "cli")]
    pub(crate) async fn wait_for_members(&self, limit: Duration, say: impl Fn(&str)) -> Result<()> {
        let Some(head) = &self.head else { return Ok(()) };
        let began = tokio::time::Instant::now();
        let mut next = began;
        while let Some(missing) = head.missing_members().await? {
            let now = tokio::time::Instant::now();
            if now.duration_since(began) >= limit {
                let text = format!("{missing} after {limit:?}");
                return Err(Error::finished(Code::DeadlineExceeded, text).about("wait for workers"));
            }
            if now >= next {
                next = now + WAITING_INTERVAL;
                say(&format!("waiting for workers: {missing}"));
            }
            tokio::time::sleep(WORKERS_INTERVAL).await;
        }
        Ok(())
    }

    /// Returns a token that is cancelled when the head server requests that this process finish its work and leave; `None` if it is not a
    /// member of a cluster.
    #[must_use]
    pub fn draining(&self) -> Option<&CancelToken> {
        self.member.as_ref().map(MemberKeeper::draining)
    }

    /// Stops environment servers, agents, models and resources servers in this order. Each stage has the grace period, so that
    /// episodes in progress can finish. Then ends the leases, the Python servers and the head server.
    pub async fn stop(mut self) {
        if let Some(member) = &self.member {
            // Gets no new work from here on.
            member.draining().cancel();
        }
        let head = self.stages.pop();
        for stage in self.stages.drain(..) {
            stage.stop().await;
        }
        let mut ending = JoinSet::new();
        for lease in self.leases.drain(..) {
            ending.spawn(lease.end(Duration::from_secs(2)));
        }
        while ending.join_next().await.is_some() {}
        if let Some(member) = self.member.take() {
            member.leave(Duration::from_secs(2)).await;
        }
        if let Some(python_servers) = self.python_servers.take() {
            python_servers.stop(self.stop_grace).await;
        }
        if let Some(head) = head {
            head.stop().await;
        }
    }
}

/// Returns the address that UCX listens on for other hosts: the shared host of all servers, or any address if their hosts differ.
fn ucx_address(wanted: &[InstanceConfig]) -> IpAddr {
    let mut hosts = wanted.iter().map(|instance| instance.host.as_str());
    let first = hosts.next().filter(|first| hosts.all(|host| host == *first));
    let resolved = first.and_then(|host| std::net::ToSocketAddrs::to_socket_addrs(&(host, 0)).ok()?.next());
    resolved.map_or_else(|| std::net::Ipv4Addr::UNSPECIFIED.into(), |address| address.ip())
}

/// Returns the host that other machines are told of servers which bind all addresses.
async fn own_host(head: Option<&Endpoint>) -> String {
    let towards = match head {
        // Who uses a head server of this machine from outside needs another address than the head server's.
        Some(head) => address_towards(head.address()).await.ok().filter(|address| !address.is_loopback()),
        None => None,
    };
    towards.unwrap_or_else(own_address).to_string()
}

/// Returns the instances that `only` names, or all if it is empty.
fn wanted(config: &GymConfig, only: &[String]) -> Result<Vec<InstanceConfig>> {
    if only.is_empty() {
        return Ok(config.instances.clone());
    }
    let named = only.iter().filter(|name| *name != HEAD_NAME);
    named.map(|name| config.require(name).cloned().map_err(|error| Error::invalid(error.to_string()))).collect()
}

/// Returns host and port of each live server with an HTTP endpoint.
pub(crate) fn live(instances: &[Instance]) -> Vec<gym_client::config::LiveServer> {
    instances
        .iter()
        // The pool of a collector is no server of a configuration.
        .filter(|instance| instance.implementation != COLLECTOR_POOL)
        .filter_map(|instance| {
            let http = instance.endpoints.iter().find(|endpoint| endpoint.scheme() == "http")?;
            let (host, port) = http.address().rsplit_once(':')?;
            Some(gym_client::config::LiveServer {
                name: instance.name.clone(),
                kind: instance.kind,
                implementation: instance.implementation.clone(),
                host: bare_host(host).to_owned(),
                port: port.parse().ok()?,
                references: references(instance),
            })
        })
        .collect()
}
