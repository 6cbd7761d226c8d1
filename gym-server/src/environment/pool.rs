//! Servers whose work runs on workers: a collector that knows only `/run`, and an agent that knows only `/verify`, get a whole cluster.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use gym_client::CookieJar;
use gym_client::work::{WORK_ROUTE, WorkKind, WorkPool, WorkPoolOptions, WorkPoolSnapshot};
use gym_core::registry::MemberRegistry;
use gym_core::{
    CallContext, Code, Error, Handler, ModelResponse, RawObject, Request, ResourcesServer, Response, Result, SessionId,
    Verb, Verdict,
};
use serde::Deserialize;

use crate::environment::relay::{HOP_BY_HOP, Relay, RelayConfig};
use crate::role::settings::{Seconds, ServerRef};
use crate::role::{RoleServer, ServerContext, reply};

/// The name of the implementation. Workers find its instances in the registry.
pub const POOL_IMPLEMENTATION: &str = "pool";

/// The longest wait of a poll. Polls that wait delay the end of the server by as much.
const POLL_WAIT_MAX: Duration = Duration::from_secs(2);

/// The route of verifications.
const VERIFY_ROUTE: &str = "/verify";

/// The keys of a `pool` block of an environment server.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct PoolConfig {
    /// The agent that runs the rollouts, on each worker.
    pub agent_server: ServerRef,
    /// A resources server whose verifications workers take from the same queue: `POST /verify`. None by default.
    #[serde(default)]
    pub resources_server: Option<ServerRef>,
    /// The share of the workers that each of these two servers gets while items of both wait. 1 by default.
    #[serde(default)]
    pub weights: BTreeMap<String, NonZeroU32>,
    /// Maximum number of rollouts and verifications that wait or run; further ones are rejected. 16,384 by default.
    #[serde(default)]
    pub rollouts_max: Option<NonZeroUsize>,
    /// Seconds after which a worker that does not answer is lost. 10 by default.
    #[serde(default)]
    pub worker_timeout_seconds: Option<Seconds>,
    /// Seconds that a `/run` continues after its caller has disconnected, so that a resent request can join it. 30 by default.
    #[serde(default)]
    pub replay_grace_seconds: Option<Seconds>,
}

/// The keys of a `pool` block of a resources server.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct VerifierPoolConfig {
    /// The resources server that verifies, on each worker. It must not need a session.
    pub resources_server: ServerRef,
    /// Maximum number of verifications that wait or run; further ones are rejected. 16,384 by default.
    #[serde(default)]
    pub verifications_max: Option<NonZeroUsize>,
    /// Seconds after which a worker that does not answer is lost. 10 by default.
    #[serde(default)]
    pub worker_timeout_seconds: Option<Seconds>,
}

/// Offers each `/run` to the workers that poll `POST /work/next`, and answers with the response of the worker that ran it. If that
/// worker is lost, the answer is an error of the class `worker_lost`, and the collector begins a new attempt.
///
/// Verifications are a class of their own in the same queue. One whose worker is lost is handed to another worker.
#[derive(Debug)]
pub struct PoolServer {
    pool: WorkPool,
    role: RoleServer,
    verifier: Option<Verifier>,
}

impl PoolServer {
    /// Creates a pool. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `InvalidArgument` if `weights` names a server that the pool does not have.
    pub fn new(config: PoolConfig, context: &ServerContext) -> Result<Self> {
        let PoolConfig { agent_server, resources_server, weights, rollouts_max, .. } = config;
        let servers = [Some(&agent_server), resources_server.as_ref()].map(|server| server.map(|server| &*server.name));
        if let Some(unknown) = weights.keys().find(|name| !servers.contains(&Some(name.as_str()))) {
            return Err(Error::invalid(format!(
                "{}: weights: this pool has no server `{unknown}`\n  fix: name its agent_server or its resources_server",
                context.name
            )));
        }
        let weights = weights.into_iter().map(|(name, weight)| (name, weight.get())).collect();
        let pool = queue(weights, rollouts_max, config.worker_timeout_seconds, context);
        let relay = RelayConfig { agent_server, replay_grace_seconds: config.replay_grace_seconds };
        let role = RoleServer::environment(Relay::pulled(relay, pool.clone()).until(context.draining.clone()), context);
        let verifier = resources_server.map(|server| Verifier::new(pool.clone(), &server));
        Ok(Self { pool, role, verifier })
    }

    /// Creates a pool that verifies only, as a resources server. Must be called within a tokio runtime.
    #[must_use]
    pub fn verifying(config: VerifierPoolConfig, context: &ServerContext) -> Self {
        let VerifierPoolConfig { resources_server, verifications_max, worker_timeout_seconds } = config;
        let pool = queue(BTreeMap::new(), verifications_max, worker_timeout_seconds, context);
        let role = RoleServer::resources(OnlyVerifies(resources_server.name.clone()), context);
        let verifier = Some(Verifier::new(pool.clone(), &resources_server));
        Self { pool, role, verifier }
    }

    /// Follows the members of a cluster; see [`WorkPool::follow`]. If other machines reach `host`, where the pool listens, it gives work only to
    /// members.
    pub fn follow(&self, members: Arc<dyn MemberRegistry>, host: &str) {
        self.pool.listens_at(host);
        self.pool.follow(members);
    }

    /// Returns `true` if the pool joins a `/run` that arrives again to the first one.
    #[must_use]
    pub fn joins_runs(&self) -> bool {
        self.role.joins_runs()
    }

    /// Returns the state of the queue and the workers.
    #[must_use]
    pub fn snapshot(&self) -> WorkPoolSnapshot {
        self.pool.snapshot()
    }
}

fn queue(
    weights: BTreeMap<String, u32>,
    items_max: Option<NonZeroUsize>,
    timeout: Option<Seconds>,
    context: &ServerContext,
) -> WorkPool {
    let mut options = WorkPoolOptions::default();
    options.weights = weights;
    options.queue.wait_max = POLL_WAIT_MAX;
    if let Some(items_max) = items_max {
        options.queue.items_max = items_max.get();
    }
    if let Some(timeout) = timeout {
        options.queue.silence_max = timeout.0;
    }
    let pool = WorkPool::new(options, &context.world);
    context.metrics.watch_pool(&context.name, pool.clone());
    pool
}

impl Handler for PoolServer {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        match (request.route.path(), &self.verifier) {
            // Not behind the role: a waiting poll is no call in flight.
            (WORK_ROUTE, _) => self.pool.handle(request),
            (VERIFY_ROUTE, Some(verifier)) if request.verb == Verb::Post => {
                let verifier = verifier.clone();
                let verified =
                    async move { Ok(verifier.verify(request).await.unwrap_or_else(|error| reply::of_error(&error))) };
                verified.boxed()
            }
            _ => self.role.handle(request),
        }
    }
}

/// Verifications on the workers of a pool.
#[derive(Clone, Debug)]
struct Verifier {
    pool: WorkPool,
    server: Arc<str>,
}

impl Verifier {
    fn new(pool: WorkPool, server: &ServerRef) -> Self {
        Self { pool, server: server.name.as_str().into() }
    }

    /// Runs the verification on a worker, and again on another one if that worker is lost.
    async fn verify(&self, mut request: Request) -> Result<Response> {
        // Session cookies are named `IMPLEMENTATION___SERVER`, by NeMo Gym's servers too.
        let suffix = format!("___{}", self.server);
        if CookieJar::of_request(&request.context.metadata).iter().any(|(name, _)| name.ends_with(&suffix)) {
            return Err(Error::not_started(
                Code::FailedPrecondition,
                format!(
                    "this verification has a session of `{0}`, which stays with its instance; call `{0}` itself",
                    self.server
                ),
            ));
        }
        request.context.metadata.retain(|name| !HOP_BY_HOP.contains(&name) && name != "cookie");
        let mut response = self.pool.submit(WorkKind::Repeatable, &self.server, &request).await?;
        // The session that the worker's server began for this verification ends with it.
        response.metadata.retain(|name| !HOP_BY_HOP.contains(&name) && name != "set-cookie");
        Ok(response)
    }
}

/// A resources server without sessions and tools, whose verifications run elsewhere.
#[derive(Debug)]
struct OnlyVerifies(String);

impl ResourcesServer for OnlyVerifies {
    type Task = serde_json::Value;

    async fn verify(&self, _: &CallContext, _: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> {
        Err(Error::internal("verifications of a pool do not reach its role"))
    }

    async fn call_tool(&self, _: &CallContext, _: &SessionId, tool: &str, _: &RawObject) -> Result<Response> {
        let server = &self.0;
        Err(Error::not_started(
            Code::NotFound,
            format!("this pool only verifies and has no tool `{tool}`; an agent with tools names `{server}` itself"),
        ))
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use gym_client::work::{WorkPuller, WorkPullerOptions};
    use gym_core::transport::handler_fn;
    use gym_core::{Endpoint, Status};
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::{TestNetwork, world};

    /// The order in which servers got their requests.
    type Order = Arc<Mutex<Vec<&'static str>>>;

    /// A worker with an agent and a resources server. Those of the worker `stuck` never answer.
    fn worker(name: &'static str, pool: &Arc<PoolServer>, order: &Order) -> (WorkPuller, TestNetwork) {
        let mut network = TestNetwork::new();
        let pool = Arc::clone(pool);
        network.serve("pool", handler_fn(move |request: Request| pool.handle(request)));
        for server in ["agent", "math"] {
            let order = Arc::clone(order);
            let answer = move |request: Request| {
                assert_eq!(request.context.metadata.get("cookie"), None);
                order.lock().push(server);
                async move {
                    if name == "stuck" {
                        std::future::pending::<()>().await;
                    }
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    let mut response = Response::json(json!({"reward": 1.0, "by": name}).to_string());
                    response.metadata.push("set-cookie", "math___math=new");
                    Ok(response)
                }
            };
            network.serve(server, handler_fn(answer));
        }
        let mut options = WorkPullerOptions::new(name, &world());
        options.capacity = 1;
        options.wait = Duration::from_secs(1);
        options.servers = Some(vec!["agent".to_owned(), "math".to_owned()]);
        let endpoint = [Endpoint::parse("mem://pool").unwrap()];
        (WorkPuller::start(&endpoint, network.client(&["agent", "math"]), options, &world()), network)
    }

    async fn post(pool: &PoolServer, route: &'static str, cookie: Option<&str>) -> (u16, Value, Option<String>) {
        let mut cx = CallContext::within(Duration::from_secs(60));
        cookie.into_iter().for_each(|cookie| cx.metadata.push("cookie", cookie.to_owned()));
        let body = r#"{"responses_create_params": {"input": "x"}, "response": {"output": []}}"#;
        let response = pool.handle(Request::post(cx, gym_core::Route::from_static(route), body)).await.unwrap();
        let Status(status) = response.status;
        let set = response.metadata.get("set-cookie").map(str::to_owned);
        (status, serde_json::from_slice(&response.message.head.to_bytes()).unwrap_or_default(), set)
    }

    fn config(text: Value) -> PoolConfig {
        serde_json::from_value(text).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_verification_whose_worker_is_lost_is_handed_to_another_one() {
        let text = json!({"resources_server": {"name": "math"}, "worker_timeout_seconds": 2});
        let context = ServerContext::new("math_anywhere", POOL_IMPLEMENTATION, &world());
        let pool = PoolServer::verifying(serde_json::from_value(text).unwrap(), &context);
        let (pool, order) = (Arc::new(pool), Order::default());
        let stuck = worker("stuck", &pool, &order);
        let asked = Arc::clone(&pool);
        let verified = tokio::spawn(async move { post(&asked, "/verify", Some("other___judge=1")).await });
        while order.lock().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let healthy = worker("healthy", &pool, &order);
        drop(stuck);
        // The session that the server began for it does not leave the pool.
        assert_eq!(verified.await.unwrap(), (200, json!({"reward": 1.0, "by": "healthy"}), None));
        assert_eq!(*order.lock(), ["math", "math"]);

        // An agent seeds before it verifies, and may have tools of its own.
        let (status, _, cookie) = post(&pool, "/seed_session", None).await;
        let cookie = cookie.unwrap();
        assert_eq!(status, 200);
        assert_eq!(post(&pool, "/verify", Some(cookie.split(';').next().unwrap())).await.0, 200);
        let (status, body, _) = post(&pool, "/add", None).await;
        assert!(status == 404 && body.to_string().contains("names `math` itself"), "{status} {body}");
        // A session stays with its instance.
        let (status, body, _) = post(&pool, "/verify", Some("math___math=abc")).await;
        assert!(status >= 400 && body.to_string().contains("stays with its instance"), "{status} {body}");
        drop(healthy);
    }

    #[tokio::test(start_paused = true)]
    async fn rollouts_and_verifications_share_the_workers_by_weight() {
        let servers =
            json!({"agent_server": {"name": "agent"}, "resources_server": {"name": "math"}, "weights": {"math": 3}});
        let context = ServerContext::new("math_pool", POOL_IMPLEMENTATION, &world());
        let pool = Arc::new(PoolServer::new(config(servers), &context).unwrap());
        let order = Order::default();
        let mut calls = tokio::task::JoinSet::new();
        for at in 0..80 {
            let pool = Arc::clone(&pool);
            let route = if at % 2 == 0 { "/run" } else { "/verify" };
            calls.spawn(async move { post(&pool, route, None).await.0 });
        }
        while pool.snapshot().waiting < 80 {
            tokio::task::yield_now().await;
        }
        let _worker = worker("healthy", &pool, &order);
        while let Some(status) = calls.join_next().await {
            assert_eq!(status.unwrap(), 200);
        }
        let first = order.lock()[..40].iter().filter(|server| **server == "math").count();
        assert!((29..=31).contains(&first), "{first} of the first 40 are verifications");

        let unknown = config(json!({"agent_server": {"name": "agent"}, "weights": {"agnet": 2}}));
        let error = PoolServer::new(unknown, &context).unwrap_err().to_string();
        assert!(error.contains("weights: this pool has no server `agnet`"), "{error}");
        // Without a resources server, there is nothing to verify.
        let plain = PoolServer::new(config(json!({"agent_server": {"name": "agent"}})), &context).unwrap();
        assert_eq!(post(&plain, "/verify", None).await.0, 404);
    }
}
