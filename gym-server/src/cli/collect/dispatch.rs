//! The way of rollouts to the servers: pushed by name, or pulled from a work queue that the collector hosts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gym_client::ServerClient;
use gym_client::collect::{CollectOptions, DriverOptions, ServerNames};
use gym_client::registry::{address_towards, is_loopback};
use gym_client::work::{PULLS_LABEL, PoolHost, PoolWatch, WorkPool, WorkPoolOptions, WorkPullerOptions};
use gym_core::registry::Instance;
use gym_core::{CallContext, Endpoint, Handler, Result, World};

use crate::cli::args::options::{CollectArgs, DispatchMode};
use crate::cli::console::{self, Console};
use crate::cli::exit::Failure;
use crate::cli::setup::monitor::Monitored;
use crate::metrics::Metrics;
use crate::stack::Stack;

/// Time for workers to return their last responses and to learn that the pool is gone.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Limit for the list of servers.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

/// Time until the first worker must poll, if nobody asked for pull. Workers look for new pools each second.
const FIRST_POLL_MAX: Duration = Duration::from_secs(5);

/// Where workers take the rollouts of a collection.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PullPlan {
    /// The host to listen at.
    pub(super) host: String,
    /// The servers whose rollouts are pulled, because workers of the cluster serve them; `None` for all, because the command says so.
    pub(super) servers: Option<BTreeSet<String>>,
    /// Workers of the cluster that pull.
    workers: usize,
}

impl PullPlan {
    /// Returns the plan for the servers that this collection starts.
    pub(super) fn own(args: &CollectArgs, host: &str) -> Option<Self> {
        let host = args.dispatch_host.clone().unwrap_or_else(|| host.to_owned());
        (args.dispatch == Some(DispatchMode::Pull)).then_some(Self { host, servers: None, workers: 0 })
    }

    /// Chooses between push and pull for the servers of a head server.
    pub(super) async fn choose(
        args: &CollectArgs,
        options: &CollectOptions,
        client: &ServerClient,
        names: &ServerNames,
        head: &Endpoint,
    ) -> Result<Option<Self>, Failure> {
        if args.dispatch == Some(DispatchMode::Push) {
            return Ok(None);
        }
        // NeMo Gym's head server has no such list.
        let listed = client.registry().list(&CallContext::within(LIST_TIMEOUT)).await.unwrap_or_default();
        let pulling = Pulling::of(&listed);
        if args.dispatch.is_none() && !pulling.serves(options, names) {
            return Ok(None);
        }
        let host = match &args.dispatch_host {
            Some(host) => host.clone(),
            None => {
                let mut found = address_towards(pulling.remote_address.as_deref().unwrap_or(head.address())).await;
                if found.is_err() {
                    // A worker behind a router that translates addresses cannot be reached, but reaches what reaches the head.
                    found = address_towards(head.address()).await;
                }
                let found =
                    found.map_err(|error| Failure::Usage(format!("{error}\n  fix: use --dispatch-host HOST")))?;
                found.to_string()
            }
        };
        let servers = args.dispatch.is_none().then_some(pulling.servers);
        Ok(Some(Self { host, servers, workers: pulling.workers.len() }))
    }

    /// Returns the names under which rollouts are sent: a pool of the cluster is passed by.
    pub(super) fn names(&self, names: ServerNames) -> ServerNames {
        match &self.servers {
            None => names.without_pools(),
            Some(servers) => names.without_pools_before(|agent| servers.contains(agent)),
        }
    }
}

/// The workers of a cluster that pull, and what they serve.
#[derive(Debug, Default)]
struct Pulling {
    servers: BTreeSet<String>,
    workers: BTreeSet<String>,
    /// The address of a worker on another machine.
    remote_address: Option<String>,
}

impl Pulling {
    fn of(listed: &[Instance]) -> Self {
        let mut found = Self::default();
        for server in listed.iter().filter(|server| !server.paused && server.labels.contains_key(PULLS_LABEL)) {
            let Some(member) = &server.member else { continue };
            found.servers.insert(server.name.clone());
            found.workers.insert(member.clone());
            let http = server.endpoints.iter().find(|endpoint| endpoint.scheme() == "http");
            found.remote_address = found.remote_address.or_else(|| {
                let address = http?.address();
                let host = address.rsplit_once(':')?.0;
                (!is_loopback(host)).then(|| address.to_owned())
            });
        }
        found
    }

    /// Returns `true` if workers serve the agent of the collection; if the rows name their agents, if workers serve any.
    fn serves(&self, options: &CollectOptions, names: &ServerNames) -> bool {
        let Some(agent) = options.materialize.agent_map.get("_default") else { return !self.servers.is_empty() };
        let names = names.clone().without_pools_before(|agent| self.servers.contains(agent));
        names.server_of_agent(agent).is_ok_and(|(server, _)| self.servers.contains(&server))
    }
}

/// The weights of `--weight`, by the server that gets the rollouts of the agent.
pub(super) fn weights(args: &CollectArgs, names: &ServerNames) -> Result<BTreeMap<String, u32>, Failure> {
    let found = args.weights.iter().map(|(name, weight)| {
        let server = match names.environment(name) {
            Ok(_) => name.clone(),
            Err(_) => {
                let found = names.server_of_agent(name);
                found.map_err(|error| Failure::Usage(format!("--weight {name}={weight}: {}", error.message())))?.0
            }
        };
        Ok((server, *weight))
    });
    found.collect()
}

/// The pool of a collection, with its listener and its registration.
pub(super) struct PulledWork {
    pub(super) pool: WorkPool,
    host: PoolHost,
    /// The servers that were started for this collection are a worker too.
    own: Option<PoolWatch>,
}

impl PulledWork {
    #[allow(clippy::too_many_arguments)] // The parts of one start, used once.
    /// Listens, and registers with the head server of `client`. Returns `None` if no worker comes and nobody asked for pull.
    pub(super) async fn start(
        plan: &PullPlan,
        weights: BTreeMap<String, u32>,
        client: &ServerClient,
        driver: &DriverOptions,
        stack: Option<&Stack>,
        metrics: &Metrics,
        world: &World,
        console: &Console,
    ) -> Result<Option<Self>> {
        let mut options = WorkPoolOptions::default();
        options.weights = weights;
        // One for each rollout in flight, and one for the statistics at the end.
        options.queue.items_max = options.queue.items_max.max(driver.concurrency + 1);
        let pool = WorkPool::new(options, world);
        let name = format!("collector-{}-{}", std::process::id(), &world.unique_id()[..8]);
        // The head server lists the listener among the processes with metrics.
        let handler: Arc<dyn Handler> = Arc::new(Monitored::beside(Arc::new(pool.clone()), metrics));
        let host = PoolHost::start_with(handler, pool.clone(), &name, &plan.host, client, world).await?;
        let own = stack.map(|stack| {
            let own = WorkPullerOptions::of_this_process(world);
            pool.admit(own.name.clone());
            stack.take_work(client.registry().clone(), own)
        });
        let started = Self { pool, host, own };
        let endpoint = started.host.endpoints().last().map(ToString::to_string).unwrap_or_default();
        match &plan.servers {
            None => {
                let start = if is_loopback(&plan.host) { "--config FILE --pull-from" } else { "--worker --head-url" };
                console.line(&format!(
                    "workers take rollouts from {endpoint}; start one with `{} run {start} HEAD_URL`",
                    console::program()
                ));
            }
            Some(_) if started.first_poll().await => {
                let take =
                    if plan.workers == 1 { "worker of the cluster takes" } else { "workers of the cluster take" };
                console.line(&format!(
                    "{} {take} the rollouts from {endpoint}; --dispatch push sends them by name instead",
                    plan.workers
                ));
            }
            Some(_) => {
                console.warn(format!(
                    "no worker reached this collector at {endpoint} within {FIRST_POLL_MAX:?}, so rollouts are sent to the servers by \
                     name; name an address that workers reach with --dispatch-host, or use --dispatch push"
                ));
                started.end().await;
                return Ok(None);
            }
        }
        Ok(Some(started))
    }

    /// Waits for the first poll of a worker; returns `false` if none comes.
    async fn first_poll(&self) -> bool {
        let polled = async {
            while self.pool.snapshot().workers.is_empty() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(FIRST_POLL_MAX, polled).await.is_ok()
    }

    pub(super) async fn end(self) {
        if let Some(own) = self.own {
            own.drain(END_TIMEOUT).await;
        }
        self.host.end(END_TIMEOUT).await;
    }
}
