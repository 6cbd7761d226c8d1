//! Composes the servers of a configuration: all in this process, or one of them alone, from the same file.
//!
//! ```text
//!   configuration ──► native implementation ──► role handler ──► mem://name  (callers of this process)
//!                 │                                          ├─► ucx://host:port   (where `transport` allows it)
//!                 │                                          └─► http://host:port  (everybody else)
//!                 └─► Python entrypoint ──────► child process ──► http://host:port
//!                                 all of them ──► registry ◄── head server
//! ```

mod python;
mod servers;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gym_client::config::{GymConfig, InstanceConfig};
use gym_client::http::{HttpConfig, HttpListener};
use gym_client::launch::LineSink;
use gym_client::registry::{KeptLease, RemoteRegistry, keep};
use gym_client::{Offer, ServerClient, Transports};
use gym_core::{
    CallContext, Code, Endpoint, Error, Fenced, Handler, InProcess, Incarnation, Instance, Ladder, Listener,
    MemoryRegistry, Registration, Registry, Result, ServerKind, World,
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use servers::{Build, Servers};

use crate::head::{GlobalConfig, HeadServer};
use crate::metrics::Metrics;
use crate::role::Site;
use crate::serve;

/// How a configuration is brought to life.
#[derive(Clone)]
pub struct StackOptions {
    /// Serve only these instances; `head_server` names the head. Empty: everything.
    pub only: Vec<String>,
    /// The head server to register with, when it is not served here.
    pub head: Option<Endpoint>,
    /// The interpreter of Python entrypoints.
    pub python: Option<PathBuf>,
    /// Folders in which a Python server's folder is looked for, first match wins.
    pub python_roots: Vec<PathBuf>,
    /// Environment variables of Python servers, besides those that NeMo Gym gives them.
    pub python_env: Vec<(String, OsString)>,
    /// Where the lines of Python servers go.
    pub lines: Option<LineSink>,
    /// How long a Python server may take until it answers.
    pub start_timeout: Duration,
    /// How long running calls may go on after a stop.
    pub stop_grace: Duration,
    /// Calls under way on one in-process channel.
    pub in_process_calls_max: usize,
    /// Limits of the HTTP servers.
    pub http: HttpConfig,
}

impl Default for StackOptions {
    fn default() -> Self {
        Self {
            only: Vec::new(),
            head: None,
            python: None,
            python_roots: Vec::new(),
            python_env: Vec::new(),
            lines: None,
            // A Python server imports for seconds, on a busy machine for a minute.
            start_timeout: Duration::from_secs(300),
            stop_grace: Duration::from_secs(10),
            in_process_calls_max: 16_384,
            http: HttpConfig::default(),
        }
    }
}

impl fmt::Debug for StackOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StackOptions").field("only", &self.only).field("python", &self.python).finish_non_exhaustive()
    }
}

/// Name by which `only` means the head server.
pub const HEAD_NAME: &str = "head_server";

/// The running servers of a configuration. Stop it with [`Stack::stop`]; dropped, it breaks off.
#[derive(Debug)]
pub struct Stack {
    client: ServerClient,
    registry: Arc<dyn Registry>,
    head: Option<HeadServer>,
    rows: Vec<Running>,
    leases: Vec<KeptLease>,
    /// Drained one after the other: callers before those they call.
    tiers: Vec<Tier>,
    children: Option<python::Children>,
    stop_grace: Duration,
    metrics: Metrics,
}

/// What runs where, for a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// The instance's name.
    pub name: String,
    /// What it is; `head_server` for the head.
    pub kind: String,
    /// Which implementation.
    pub implementation: String,
    /// Where it can be reached.
    pub url: String,
    /// `native`, or `python` with the child's process id.
    pub runs_as: String,
}

#[derive(Debug)]
struct Tier {
    drain: CancellationToken,
    tasks: JoinSet<Result<()>>,
}

impl Tier {
    fn new() -> Self {
        Self { drain: CancellationToken::new(), tasks: JoinSet::new() }
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

/// Drained in this order: nobody calls what is already gone.
const TIERS: [ServerKind; 4] = [ServerKind::Environment, ServerKind::Agent, ServerKind::Model, ServerKind::Resources];

impl Stack {
    /// Starts what `config` asks for and waits until all of it serves.
    ///
    /// # Errors
    /// `InvalidArgument` for what the configuration has wrong (an implementation that is neither native nor Python), with
    /// the place and the fix; `Unavailable` when something does not come up. Whatever was started is stopped again.
    pub async fn start(config: GymConfig, servers: &Servers, world: &World, options: StackOptions) -> Result<Self> {
        let in_process = InProcess::new().with_calls_max(options.in_process_calls_max);
        // The head is asked over HTTP whatever the ladder says: it is how everything else is found.
        let control = Transports::from_features(in_process.clone()).with_ladder(Ladder::without_ucx());
        let metrics = Metrics::new();
        let config = Arc::new(config);
        let wanted = wanted(&config, &options.only)?;
        let ladder = config.ladder.clone().unwrap_or_else(Ladder::without_ucx);
        let offer = Offer::new(&ladder, Some(ucx_address(&wanted)));
        let transports = offer.calling(Transports::from_features(in_process.clone()));
        metrics.with(|known| {
            known.register_collector(Box::new(transports.metrics()));
            #[cfg(feature = "rdma")]
            known.register_collector(Box::new(transports.ucx_metrics()));
        });
        let serves_head = options.only.is_empty() || options.only.iter().any(|name| name == HEAD_NAME);
        let memory = MemoryRegistry::new();
        let local = options.only.is_empty();
        let registry: Arc<dyn Registry> = if serves_head {
            Arc::new(memory.clone())
        } else {
            let head = match &options.head {
                Some(head) => head.clone(),
                None => Endpoint::parse(&format!("http://{}:{}", config.head.host, config.head.port))?,
            };
            Arc::new(RemoteRegistry::new(head, control, world.clone()))
        };
        let client = ServerClient::new(Arc::clone(&registry), transports, world);
        let mut stack = Self {
            client,
            registry,
            head: None,
            rows: Vec::new(),
            leases: Vec::new(),
            tiers: TIERS.iter().chain(&[ServerKind::Resources]).map(|_| Tier::new()).collect(),
            children: None,
            stop_grace: options.stop_grace,
            metrics,
        };
        let started = stack.bring_up(
            &config,
            &wanted,
            servers,
            world,
            &options,
            &in_process,
            &offer,
            serves_head.then_some(memory),
            local,
        );
        match started.await {
            Ok(()) => Ok(stack),
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
        in_process: &InProcess,
        offer: &Offer,
        head: Option<MemoryRegistry>,
        local: bool,
    ) -> Result<()> {
        if let Some(memory) = head {
            self.start_head(memory, config, world, options)?;
        }
        let incarnation = Incarnation(u64::try_from(world.now().as_millis()).unwrap_or(u64::MAX));
        let mut foreign = Vec::new();
        for instance in wanted {
            let mut site = Site::new(&instance.name, &instance.implementation, world);
            site.metrics = self.metrics.clone();
            site.transports = Some(self.client.transports().clone());
            let build = Build { instance, site: &site, client: &self.client };
            match servers.make(&build) {
                Some(handler) => {
                    let handler = handler.map_err(|error| error.about(format!("start {}", instance.name)))?;
                    self.start_native(instance, handler, incarnation, in_process, offer, local, options).await?;
                }
                None if instance.entrypoint.is_some() => foreign.push(instance.clone()),
                None => return Err(unknown_implementation(instance, servers)),
            }
        }
        if !foreign.is_empty() {
            let children = python::Children::start(config, foreign, options, &self.registry, incarnation).await?;
            self.rows.extend(children.rows());
            self.children = Some(children);
        }
        self.rows.sort_by_key(|row| config.instances.iter().position(|instance| instance.name == row.name));
        if let Some(head) = &self.head {
            head.set_ready();
        }
        Ok(())
    }

    fn start_head(
        &mut self,
        memory: MemoryRegistry,
        config: &Arc<GymConfig>,
        world: &World,
        options: &StackOptions,
    ) -> Result<()> {
        let yaml = Arc::clone(config);
        let text: GlobalConfig = Arc::new(move |instances: &[Instance]| yaml.to_global_yaml_with(&live(instances)));
        let head = HeadServer::new(memory, text, world, self.metrics.clone());
        let listener = bind(&config.head.host, config.head.port, options).map_err(|error| {
            error.about(format!("start the head server on {}:{}", config.head.host, config.head.port))
        })?;
        let url = listener.endpoints()[0].to_string();
        self.rows.push(Running {
            name: HEAD_NAME.to_owned(),
            kind: HEAD_NAME.to_owned(),
            implementation: "head".to_owned(),
            url,
            runs_as: "native".to_owned(),
        });
        let handler: Arc<dyn Handler> = Arc::new(head.clone());
        self.tiers.last_mut().expect("one tier per kind and the head's").serve(listener, &handler, options.stop_grace);
        self.head = Some(head);
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // The parts of one start, used once.
    async fn start_native(
        &mut self,
        instance: &InstanceConfig,
        handler: Arc<dyn Handler>,
        incarnation: Incarnation,
        in_process: &InProcess,
        offer: &Offer,
        local: bool,
        options: &StackOptions,
    ) -> Result<()> {
        let handler: Arc<dyn Handler> = Arc::new(Fenced::new(incarnation, handler));
        let tier = TIERS.iter().position(|kind| *kind == instance.kind).unwrap_or_default();
        let tier = &mut self.tiers[tier];
        let listener = bind(&instance.host, instance.port.unwrap_or(0), options)
            .map_err(|error| error.about(format!("start {} on {}", instance.name, instance.host)))?;
        let url = listener.endpoints()[0].clone();
        let offered = offer.listen(listener, Arc::clone(&handler)).await;
        let (listener, served) = offered.map_err(|error| error.about(format!("start {}", instance.name)))?;
        // Best first; the plain one last, because every caller has it.
        let ucx = listener.endpoints().iter().filter(|endpoint| endpoint.scheme() == "ucx");
        let mut endpoints: Vec<Endpoint> = ucx.cloned().chain([url.clone()]).collect();
        tier.serve(listener, &served, options.stop_grace);
        if local {
            let listener = in_process.listen(&instance.name)?;
            // Callers of this process find it first.
            endpoints.insert(0, listener.endpoints()[0].clone());
            tier.serve(Box::new(listener), &handler, options.stop_grace);
        }
        let labels = BTreeMap::from([("pid".to_owned(), std::process::id().to_string())]);
        let registration = registration(instance, endpoints, incarnation, labels);
        let cx = CallContext::within(Duration::from_secs(30));
        self.leases.push(keep(Arc::clone(&self.registry), &cx, registration).await?);
        self.rows.push(Running {
            name: instance.name.clone(),
            kind: instance.kind.to_string(),
            implementation: instance.implementation.clone(),
            url: url.to_string(),
            runs_as: "native".to_owned(),
        });
        Ok(())
    }

    /// Calls the stack's servers by name.
    #[must_use]
    pub fn client(&self) -> &ServerClient {
        &self.client
    }

    /// What runs where, in the order of the configuration; the head first.
    #[must_use]
    pub fn rows(&self) -> &[Running] {
        &self.rows
    }

    /// The metrics of this process.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Stops everything: environment servers, agents, models and resources, each with the grace, so that episodes under way
    /// still find whom they need; then the leases, the children and the head.
    pub async fn stop(mut self) {
        let head = self.tiers.pop();
        for tier in self.tiers.drain(..) {
            tier.stop().await;
        }
        let mut ending = JoinSet::new();
        for lease in self.leases.drain(..) {
            ending.spawn(lease.end(Duration::from_secs(2)));
        }
        while ending.join_next().await.is_some() {}
        if let Some(children) = self.children.take() {
            children.stop(self.stop_grace).await;
        }
        if let Some(head) = head {
            head.stop().await;
        }
    }
}

/// Where peers of other hosts reach this process's UCX: at the host of its servers, if they have one, else anywhere.
fn ucx_address(wanted: &[InstanceConfig]) -> IpAddr {
    let mut hosts = wanted.iter().map(|instance| instance.host.as_str());
    let first = hosts.next().filter(|first| hosts.all(|host| host == *first));
    let resolved = first.and_then(|host| std::net::ToSocketAddrs::to_socket_addrs(&(host, 0)).ok()?.next());
    resolved.map_or_else(|| std::net::Ipv4Addr::UNSPECIFIED.into(), |address| address.ip())
}

/// What a lease says of an instance.
fn registration(
    instance: &InstanceConfig,
    endpoints: Vec<Endpoint>,
    incarnation: Incarnation,
    labels: BTreeMap<String, String>,
) -> Registration {
    Registration {
        name: instance.name.clone(),
        rank: None,
        kind: instance.kind,
        implementation: instance.implementation.clone(),
        endpoints,
        incarnation,
        ttl: gym_core::DEFAULT_TTL,
        labels,
    }
}

/// The instances that `only` names; all of them when it names none.
fn wanted(config: &GymConfig, only: &[String]) -> Result<Vec<InstanceConfig>> {
    if only.is_empty() {
        return Ok(config.instances.clone());
    }
    let named = only.iter().filter(|name| *name != HEAD_NAME);
    named.map(|name| config.require(name).cloned().map_err(|error| Error::invalid(error.to_string()))).collect()
}

fn unknown_implementation(instance: &InstanceConfig, servers: &Servers) -> Error {
    let known: Vec<_> = servers.names(instance.kind).collect();
    Error::invalid(format!(
        "{}: {}.{}.{}: this program has no implementation `{}`, and the block names no Python entrypoint\n  fix: add \
         `entrypoint: app.py` to run it with Python, or use one of {}",
        instance.origin,
        instance.name,
        instance.kind,
        instance.implementation,
        instance.implementation,
        known.join(", "),
    ))
}

/// How an instance would run here.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg(feature = "cli")]
pub(crate) enum RunsAs {
    /// In this process.
    Native,
    /// As a child, from this folder.
    Python(PathBuf),
}

#[cfg(feature = "cli")]
impl fmt::Display for RunsAs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native => f.write_str("native"),
            Self::Python(folder) => write!(f, "python {}", folder.display()),
        }
    }
}

/// How an instance would run with these implementations and these folders of Python servers.
///
/// # Errors
/// What starting it would say.
#[cfg(feature = "cli")]
pub(crate) fn runs_as(instance: &InstanceConfig, servers: &Servers, roots: &[PathBuf]) -> Result<RunsAs> {
    if servers.has(instance.kind, &instance.implementation) {
        return Ok(RunsAs::Native);
    }
    if instance.entrypoint.is_none() {
        return Err(unknown_implementation(instance, servers));
    }
    python::find(instance, roots).map(|(folder, _)| RunsAs::Python(folder))
}

/// Makes a native instance without serving it, so that what its block has wrong is found. A Python one is fine as it is.
///
/// # Errors
/// What starting it would say.
#[cfg(feature = "cli")]
pub(crate) fn try_build(instance: &InstanceConfig, servers: &Servers, world: &World) -> Result<()> {
    let nobody = Arc::new(MemoryRegistry::new());
    let client = ServerClient::new(nobody, Transports::from_features(InProcess::new()), world);
    let site = Site::new(&instance.name, &instance.implementation, world);
    let made = servers.make(&Build { instance, site: &site, client: &client });
    made.map_or(Ok(()), |made| made.map(drop)).map_err(|error| error.about(format!("start {}", instance.name)))
}

/// Host and port of each live server that can be reached over HTTP.
fn live(instances: &[Instance]) -> Vec<gym_client::config::LiveServer> {
    instances
        .iter()
        .filter_map(|instance| {
            let http = instance.endpoints.iter().find(|endpoint| endpoint.scheme() == "http")?;
            let (host, port) = http.address().rsplit_once(':')?;
            Some(gym_client::config::LiveServer {
                name: instance.name.clone(),
                kind: instance.kind,
                implementation: instance.implementation.clone(),
                host: host.to_owned(),
                port: port.parse().ok()?,
            })
        })
        .collect()
}

fn bind(host: &str, port: u16, options: &StackOptions) -> Result<Box<dyn Listener>> {
    let address =
        std::net::ToSocketAddrs::to_socket_addrs(&(host, port)).ok().and_then(|mut found| found.next()).ok_or_else(
            || Error::invalid(format!("the host `{host}` cannot be resolved; use an address of this machine")),
        )?;
    let listener = HttpListener::bind(address, options.http.clone())
        .and_then(|listener| listener.advertised_as(host))
        .map_err(|error| explain_bind(error, address))?;
    Ok(Box::new(listener))
}

fn explain_bind(error: Error, address: SocketAddr) -> Error {
    match error.code() {
        Code::AlreadyExists => Error::not_started(
            Code::AlreadyExists,
            format!("{address} is in use; stop what listens there, or choose another port"),
        )
        .caused_by(error),
        _ => error,
    }
}
