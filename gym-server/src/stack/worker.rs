//! A stack whose servers belong to a cluster: the process joins a head server as a member.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::{BoxFuture, join_all};
use futures_util::stream::BoxStream;
use gym_client::ServerClient;
use gym_client::config::{HeadConfig, InstanceConfig};
use gym_client::registry::{HealthCheck, MemberKeeper, MemberOptions, RemoteRegistry};
use gym_client::work::{PULLS_LABEL, local_address_towards};
use gym_core::registry::{
    Instance, Lease, MemberLimits, MemberServer, MemberSpec, MemberTiming, MemoryRegistry, Registration, Registry,
};
use gym_core::server::ServerKind;
use gym_core::{CallContext, Code, Endpoint, Error, Incarnation, Result, World};

use crate::environment::POOL_IMPLEMENTATION;
use crate::head::BUILD;
use crate::stack::servers::Servers;

/// Time until a server of the worker itself must respond.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);

/// How a process takes part in a cluster.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
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
}

impl WorkerOptions {
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
        }
    }
}

/// The addresses of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WorkerAddress {
    /// The host to bind.
    pub(super) bind: String,
    /// The host that others are told.
    pub(super) advertised: String,
}

impl WorkerAddress {
    /// Determines the addresses of a worker of this head server.
    ///
    /// # Errors
    /// `InvalidArgument` if other machines could not reach the address that they would be told.
    pub(super) async fn find(options: &WorkerOptions, head: &Endpoint) -> Result<Self> {
        // Before the servers start, and not only when the head server rejects it.
        options.timing.check(MemberLimits::default().timeout_max)?;
        let unresolved = |error: std::io::Error| {
            Error::new(Code::Unavailable, gym_core::Execution::NotStarted, "its host cannot be resolved")
                .about(format!("reach the head server {head}"))
                .caused_by(error)
        };
        let mut found = tokio::net::lookup_host(head.address()).await.map_err(unresolved)?;
        let head_address = found.next().ok_or_else(|| Error::invalid(format!("the host of {head} has no address")))?;
        Self::choose(options, head, head_address.ip(), local_address_towards(head_address).ok())
    }

    /// `route` is the address of this machine on the way to the head server.
    fn choose(options: &WorkerOptions, head: &Endpoint, head_ip: IpAddr, route: Option<IpAddr>) -> Result<Self> {
        let bind = options.host.clone().unwrap_or_else(|| "127.0.0.1".to_owned());
        let unspecified = bind.parse().is_ok_and(|ip: IpAddr| ip.is_unspecified());
        let advertised = match (&options.advertise, route) {
            (Some(advertised), _) => advertised.clone(),
            (None, Some(route)) if unspecified => route.to_string(),
            (None, _) => bind.clone(),
        };
        let same_machine = head_ip.is_loopback() || route == Some(head_ip);
        let nowhere = advertised.parse().is_ok_and(|ip: IpAddr| ip.is_unspecified());
        if nowhere || (is_loopback(&advertised) && !same_machine) {
            let fix = route.map_or_else(|| "ADDRESS".to_owned(), |route| route.to_string());
            return Err(Error::invalid(format!(
                "the head server {head} is on another machine, which cannot reach this worker at {advertised}\n  fix: add --host {fix}; \
                 the servers have no authentication, so use a network that you trust"
            )));
        }
        Ok(Self { bind, advertised })
    }

    /// Returns the head server as a configuration names it, for Python servers.
    pub(super) fn head(&self, head: &Endpoint) -> Result<HeadConfig> {
        let (host, port) = head.address().rsplit_once(':').unwrap_or((head.address(), ""));
        let port = port.parse().map_err(|_| Error::invalid(format!("the head server {head} has no port")))?;
        Ok(HeadConfig { host: host.to_owned(), port })
    }

    /// Moves the servers that would listen on loopback to the address of this worker.
    pub(super) fn place(&self, instances: &mut [InstanceConfig], servers: &Servers) {
        for instance in instances.iter_mut().filter(|instance| is_loopback(&instance.host)) {
            // A Python server advertises the host that it binds.
            let native = servers.has(instance.kind, &instance.implementation);
            instance.host.clone_from(if native { &self.bind } else { &self.advertised });
        }
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// Resolves names among the servers of this process first, and then among those of the cluster.
#[derive(Clone, Debug)]
pub(super) struct WorkerRegistry {
    pub(super) own: MemoryRegistry,
    pub(super) cluster: RemoteRegistry,
}

#[async_trait]
impl Registry for WorkerRegistry {
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
    registry: &'a WorkerRegistry,
    client: &ServerClient,
    options: &'a WorkerOptions,
    address: &'a WorkerAddress,
    incarnation: Incarnation,
    world: &'a World,
) -> BoxFuture<'a, Result<MemberKeeper>> {
    let client = client.clone();
    Box::pin(async move {
        let cx = CallContext::within(options.join_within);
        let own = registry.own.list(&cx).await?;
        let mut spec = MemberSpec::new(&options.name, incarnation);
        spec.build = BUILD.to_owned();
        spec.host.clone_from(&address.advertised);
        spec.clock_ms = u64::try_from(world.now().as_millis()).unwrap_or(u64::MAX);
        spec.timing = options.timing;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        spec.labels = [("pid", std::process::id().to_string()), ("cpus", cpus.to_string())]
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect();
        spec.servers = own.iter().map(|server| member_server(server, options.pulls)).collect();
        let names: Vec<String> = own.into_iter().map(|server| server.name).collect();
        let member = MemberOptions {
            join_within: options.join_within,
            health: check(client, names),
            ..MemberOptions::default()
        };
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
        rank: None,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(
        host: Option<&str>,
        advertise: Option<&str>,
        head: &str,
        route: Option<&str>,
    ) -> Result<(String, String)> {
        let mut options = WorkerOptions::new("w");
        (options.host, options.advertise) = (host.map(str::to_owned), advertise.map(str::to_owned));
        let endpoint = Endpoint::parse(&format!("http://{head}:11000")).unwrap();
        let route = route.map(|ip| ip.parse().unwrap());
        let address = WorkerAddress::choose(&options, &endpoint, head.parse().unwrap(), route)?;
        Ok((address.bind, address.advertised))
    }

    #[test]
    fn a_worker_never_advertises_an_address_that_others_cannot_reach() {
        let is = |bind: &str, advertised: &str| (bind.to_owned(), advertised.to_owned());
        // The head server is on this machine.
        assert_eq!(chosen(None, None, "127.0.0.1", Some("127.0.0.1")).unwrap(), is("127.0.0.1", "127.0.0.1"));
        assert_eq!(chosen(None, None, "10.0.0.7", Some("10.0.0.7")).unwrap(), is("127.0.0.1", "127.0.0.1"));
        // It is on another one.
        assert_eq!(chosen(Some("0.0.0.0"), None, "10.0.0.1", Some("10.0.0.7")).unwrap(), is("0.0.0.0", "10.0.0.7"));
        assert_eq!(chosen(Some("10.0.0.7"), None, "10.0.0.1", Some("10.0.0.7")).unwrap(), is("10.0.0.7", "10.0.0.7"));
        assert_eq!(
            chosen(Some("0.0.0.0"), Some("gpu-7"), "10.0.0.1", Some("10.0.0.7")).unwrap(),
            is("0.0.0.0", "gpu-7")
        );
        for (host, route) in [(None, Some("10.0.0.7")), (Some("localhost"), Some("10.0.0.7")), (Some("0.0.0.0"), None)]
        {
            let error = chosen(host, None, "10.0.0.1", route).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{host:?}");
            let fix = route.map_or("--host ADDRESS".to_owned(), |route| format!("--host {route}"));
            assert!(error.to_string().contains(&fix), "{error}");
        }
    }
}
