//! A stack whose servers belong to a cluster: the process joins a head server as a member.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::{BoxFuture, join_all};
use futures_util::stream::BoxStream;
use gym_client::ServerClient;
use gym_client::config::{HeadConfig, InstanceConfig};
use gym_client::registry::{HealthCheck, MemberAddress, MemberKeeper, MemberOptions, RemoteRegistry, is_loopback};
use gym_client::work::PULLS_LABEL;
use gym_core::registry::{
    Instance, Lease, MemberLimits, MemberNode, MemberServer, MemberSpec, MemberTiming, MemberTuning, MemoryRegistry,
    Registration, Registry,
};
use gym_core::server::ServerKind;
use gym_core::transport::bare_host;
use gym_core::{CallContext, Endpoint, Error, Incarnation, Result, World};

use crate::environment::POOL_IMPLEMENTATION;
use crate::head::BUILD;
use crate::stack::servers::Servers;

/// Time until a server of the worker itself must respond.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);

/// How a process takes part in a cluster.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JoinOptions {
    /// The name of the member, unique in the cluster.
    pub name: String,
    /// The host to bind: `0.0.0.0` for all addresses. Default: loopback, which only a head server on the same machine allows.
    pub host: Option<String>,
    /// The host at which other machines reach this one. Default: `host`, or for `0.0.0.0` the address of the route to the head server.
    pub advertise: Option<String>,
    /// The intervals of the heartbeats.
    pub timing: MemberTiming,
    /// The time for which an unreachable head server is tried. Default: 5 minutes.
    pub join_within: Duration,
    /// The process takes work for its agents and environment servers, with [`Stack::take_work`](crate::Stack::take_work). Collectors
    /// then let it pull, instead of calling its servers by name. Default: `false`.
    pub pulls: bool,
    /// The node agent of this process (`gym_group::NodeAgent::listen`): the member is a node too, and worker groups start ranks on it.
    /// Default: none.
    pub node: Option<MemberNode>,
    /// The settings that must be the same on all workers, which the head server compares. Default: none, and nothing is compared.
    pub tuning: Option<MemberTuning>,
}

impl JoinOptions {
    /// Creates the default options of a member with this name.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            host: None,
            advertise: None,
            timing: MemberTiming::default(),
            join_within: Duration::from_secs(300),
            pulls: false,
            node: None,
            tuning: None,
        }
    }
}

/// Determines the addresses of a worker of this head server.
///
/// # Errors
/// Those of [`MemberAddress::find`], and `InvalidArgument` for intervals that the head server would reject.
pub(super) async fn find_address(options: &JoinOptions, head: &Endpoint) -> Result<MemberAddress> {
    // Before the servers start, and not only when the head server rejects it.
    options.timing.check(MemberLimits::default().timeout_max)?;
    let host = options.host.as_deref().unwrap_or("127.0.0.1");
    MemberAddress::find(host, options.advertise.as_deref(), Some(head), options.join_within).await
}

/// Returns the head server as a configuration names it, for Python servers.
pub(super) fn head_config(head: &Endpoint) -> Result<HeadConfig> {
    let (host, port) = head.address().rsplit_once(':').unwrap_or((head.address(), ""));
    let port = port.parse().map_err(|_| Error::invalid(format!("the head server {head} has no port")))?;
    Ok(HeadConfig::new(bare_host(host), port))
}

/// Moves the servers that would listen on loopback to the address of this worker.
pub(super) fn place(address: &MemberAddress, instances: &mut [InstanceConfig], servers: &Servers) {
    for instance in instances.iter_mut().filter(|instance| is_loopback(&instance.host)) {
        // A Python server advertises the host that it binds.
        let native = servers.has(instance.kind, &instance.implementation);
        instance.host.clone_from(if native { &address.bind } else { &address.advertised });
    }
}

/// Resolves names among the servers of this process first, and then among those of the cluster.
#[derive(Clone, Debug)]
pub(super) struct JoinedRegistry {
    pub(super) own: MemoryRegistry,
    pub(super) cluster: RemoteRegistry,
}

#[async_trait]
impl Registry for JoinedRegistry {
    async fn register(&self, cx: &CallContext, registration: Registration) -> Result<Lease> {
        self.own.register(cx, registration).await
    }

    async fn renew(&self, cx: &CallContext, lease: &Lease) -> Result<()> {
        self.own.renew(cx, lease).await
    }

    async fn deregister(&self, cx: &CallContext, lease: Lease) -> Result<()> {
        self.own.deregister(cx, lease).await
    }

    async fn resolve(&self, cx: &CallContext, name: &str) -> Result<Vec<Instance>> {
        let own = self.own.resolve(cx, name).await?;
        if own.is_empty() { self.cluster.resolve(cx, name).await } else { Ok(own) }
    }

    async fn list(&self, cx: &CallContext) -> Result<Vec<Instance>> {
        let own = self.own.list(cx).await?;
        let mut all = self.cluster.list(cx).await?;
        all.retain(|server| own.iter().all(|own| own.name != server.name));
        all.extend(own);
        Ok(all)
    }

    fn watch(&self, name: &str) -> BoxStream<'static, Vec<Instance>> {
        self.cluster.watch(name)
    }
}

/// Joins the cluster with the servers of this process, which respond by then.
pub(super) fn join<'a>(
    registry: &'a JoinedRegistry,
    client: &ServerClient,
    options: &'a JoinOptions,
    address: &'a MemberAddress,
    incarnation: Incarnation,
    world: &'a World,
) -> BoxFuture<'a, Result<MemberKeeper>> {
    let client = client.clone();
    Box::pin(async move {
        let cx = CallContext::within(options.join_within);
        let own = registry.own.list(&cx).await?;
        let JoinOptions { name, timing, .. } = options;
        let mut spec = MemberSpec::of_this_process(name, incarnation, &address.advertised, *timing, world);
        spec.build = BUILD.to_owned();
        spec.node.clone_from(&options.node);
        spec.tuning.clone_from(&options.tuning);
        spec.servers = own.iter().map(|server| member_server(server, options.pulls)).collect();
        let names: Vec<String> = own.into_iter().map(|server| server.name).collect();
        let mut member = MemberOptions::default();
        member.join_within = options.join_within;
        member.health = check(client, names);
        MemberKeeper::join(Arc::new(registry.cluster.clone()), &cx, spec, member, world).await
    })
}

fn member_server(server: &Instance, pulls: bool) -> MemberServer {
    let mut labels = server.labels.clone();
    if pulls && runs_rollouts(server.kind, &server.implementation) {
        labels.insert(PULLS_LABEL.to_owned(), "1".to_owned());
    }
    let mut endpoints = server.endpoints.clone();
    // Of this process only.
    endpoints.retain(|endpoint| endpoint.scheme() != "mem");
    MemberServer {
        name: server.name.clone(),
        replica: None,
        kind: server.kind,
        implementation: server.implementation.clone(),
        endpoints,
        labels,
    }
}

/// Returns `true` for servers of which a worker takes work: rollouts, and verifications without a session. A pool hands it out.
pub(crate) fn takes_work(kind: ServerKind, implementation: &str) -> bool {
    kind != ServerKind::Model && implementation != POOL_IMPLEMENTATION
}

/// Returns `true` for servers whose rollouts a worker takes.
fn runs_rollouts(kind: ServerKind, implementation: &str) -> bool {
    kind != ServerKind::Resources && takes_work(kind, implementation)
}

/// Returns a check that all servers of this process respond.
fn check(client: ServerClient, names: Vec<String>) -> HealthCheck {
    Arc::new(move || {
        let (client, names) = (client.clone(), names.clone());
        Box::pin(async move {
            let cx = CallContext::within(HEALTH_TIMEOUT);
            let asked = names.iter().map(|name| async { client.get(&cx, name, "/health").await?.into_result() });
            join_all(asked).await.into_iter().collect::<Result<Vec<_>>>().map(drop)
        })
    })
}
