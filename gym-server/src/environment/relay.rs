//! The environment server that most configurations use: forwards `/run` to an agent and returns the agent's response.

use std::sync::Arc;
use std::time::Duration;

use futures_util::TryFutureExt as _;
use futures_util::future::Either;
use gym_client::work::{WorkKind, WorkPool};
use gym_client::{CallOptions, ServerClient};
use gym_core::message::{CALL_METADATA, CALL_WAIT_METADATA};
use gym_core::transport::INCARNATION_METADATA;
use gym_core::{CallContext, CancelToken, Metadata, RawObject, Request, Response, Result, RolloutServer, Route};
use serde::Deserialize;

use crate::environment::deduplication::{DEFAULT_STOP_TIMEOUT, RunCaller, RunDeduplicator, RunKey};
use crate::role::reply;
use crate::role::settings::{Seconds, ServerRef};

/// Metadata that describes one hop. Each hop writes its own, so this metadata is not forwarded.
pub(super) const HOP_BY_HOP: &[&str] = &[
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "date",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "server",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    CALL_METADATA,
    CALL_WAIT_METADATA,
    INCARNATION_METADATA,
];

/// The keys of a `legacy_agent` block.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct RelayConfig {
    /// The agent that receives all requests.
    pub agent_server: ServerRef,
    /// Seconds that a `/run` continues after its caller has disconnected, so that a resent request can join it. 30 by default. A caller that states a
    /// shorter time is kept for that: clients of this SDK 1.5 s, and none within a process.
    #[serde(default)]
    pub replay_grace_seconds: Option<Seconds>,
}

impl RelayConfig {
    /// Creates the default configuration in front of an agent.
    #[must_use]
    pub fn new(agent_server: impl Into<String>) -> Self {
        Self { agent_server: ServerRef::new(agent_server), replay_grace_seconds: None }
    }
}

/// Forwards `/run` and `/aggregate_metrics` to an agent: the body unchanged, and end-to-end metadata such as cookies in both
/// directions. A `/run` that arrives twice, because its caller lost the connection, runs once. Equal requests of two connected callers run twice.
#[derive(Clone, Debug)]
pub struct Relay {
    agent: AgentClient,
    runs: RunDeduplicator,
}

/// Calls the agent. Separate from the deduplicator, because each episode holds a clone and must not keep the deduplicator alive.
#[derive(Clone, Debug)]
struct AgentClient {
    name: Arc<str>,
    route: AgentRoute,
}

/// The way to the agent.
#[derive(Clone, Debug)]
enum AgentRoute {
    /// By name.
    Push(ServerClient),
    /// Through the next worker with capacity.
    Pull(WorkPool),
}

impl AgentClient {
    /// Not an async fn, whose future would hold the arguments twice.
    fn ask(&self, request: &Request, options: CallOptions) -> impl Future<Output = Result<Response>> + Send {
        let answer = match &self.route {
            AgentRoute::Push(client) => Either::Left(client.send(&self.name, request, options)),
            AgentRoute::Pull(pool) => {
                let kind = if options.idempotent { WorkKind::Repeatable } else { WorkKind::Rollout };
                // Boxed, because a waiting call of the other kind would be as large otherwise.
                Either::Right(Box::pin(pool.submit(kind, &self.name, request)))
            }
        };
        answer.map_ok(|mut response| {
            response.metadata.retain(|name| !HOP_BY_HOP.contains(&name));
            response
        })
    }
}

impl Relay {
    /// Creates a relay that calls its agent through `client`.
    #[must_use]
    pub fn new(config: RelayConfig, client: ServerClient) -> Self {
        Self::over(config, AgentRoute::Push(client))
    }

    /// Ends episodes without callers when `draining` is cancelled, because no caller can come back. By default they have their whole grace.
    #[must_use]
    pub fn until(mut self, draining: CancelToken) -> Self {
        self.runs = self.runs.until(draining);
        self
    }

    /// Creates a relay whose agent runs on the workers of a pool.
    pub(super) fn pulled(config: RelayConfig, pool: WorkPool) -> Self {
        Self::over(config, AgentRoute::Pull(pool))
    }

    fn over(config: RelayConfig, route: AgentRoute) -> Self {
        let grace: Duration = config.replay_grace_seconds.map_or(DEFAULT_STOP_TIMEOUT, |seconds| seconds.0);
        Self { agent: AgentClient { name: config.agent_server.name.into(), route }, runs: RunDeduplicator::new(grace) }
    }
}

impl RolloutServer for Relay {
    async fn run(&self, cx: &CallContext, row: &RawObject) -> Result<Response> {
        let Some(key) = RunKey::of(row) else {
            // Boxed, because a row without a key is rare, and every run would be as large otherwise.
            let run = async {
                let request = outgoing(cx.child(), &cx.metadata, "/run", row);
                self.agent.ask(&request, CallOptions::default()).await
            };
            return Box::pin(run).await;
        };
        let start = || {
            // Not a child context: the episode must not be cancelled with this caller.
            let mut own = CallContext::until(cx.deadline);
            own.trace = cx.trace;
            own.reply_bytes_max = cx.reply_bytes_max;
            let request = outgoing(own, &cx.metadata, "/run", row);
            let agent = self.agent.clone();
            async move {
                match agent.ask(&request, CallOptions::default()).await {
                    Ok(response) => response,
                    Err(error) => reply::of_error(&error),
                }
            }
        };
        let wait = cx.metadata.get(CALL_WAIT_METADATA).and_then(|text| text.parse().ok()).map(Duration::from_millis);
        let caller = RunCaller { call: cx.metadata.get(CALL_METADATA), wait, deadline: cx.deadline };
        Ok(self.runs.run(key, row, caller, start).await)
    }

    /// With a call id, a request joins even if the first connection broke. Without a grace, the episode has then ended.
    fn joins_runs(&self) -> bool {
        !self.runs.grace().is_zero()
    }

    async fn aggregate_metrics(&self, cx: &CallContext, body: &RawObject) -> Result<Response> {
        let request = outgoing(cx.child(), &cx.metadata, "/aggregate_metrics", body);
        self.agent.ask(&request, CallOptions::idempotent()).await
    }
}

/// Creates the request to the agent: the body unchanged, with the end-to-end metadata of the caller.
fn outgoing(mut cx: CallContext, metadata: &Metadata, route: &'static str, body: &RawObject) -> Request {
    cx.metadata = metadata.clone();
    cx.metadata.retain(|name| !HOP_BY_HOP.contains(&name));
    Request::post(cx, Route::from_static(route), body.clone())
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use gym_core::Status;
    use gym_core::transport::handler_fn;
    use serde_json::Value;
    use tokio::task::JoinSet;

    use super::*;
    use crate::role::{RoleServer, ServerContext};
    use crate::testing::{TestNetwork, world};

    /// A relay in front of an agent whose episodes take ten seconds and return their number.
    struct Relayed {
        net: TestNetwork,
        /// The metadata of the episodes that began.
        begun: Arc<Mutex<Vec<Metadata>>>,
    }

    impl Relayed {
        fn new() -> Self {
            let (mut net, begun) = (TestNetwork::new(), Arc::<Mutex<Vec<Metadata>>>::default());
            let client = net.client(&["agent"]);
            let relay = Relay::new(RelayConfig::new("agent"), client);
            net.serve("relay", RoleServer::environment(relay, &ServerContext::new("relay", "Test", &world())));
            let seen = Arc::clone(&begun);
            let agent = move |request: Request| {
                let number = {
                    let mut seen = seen.lock();
                    seen.push(request.context.metadata);
                    seen.len() - 1
                };
                async move {
                    tokio::time::sleep(Duration::from_secs(10)).await;
                    Ok(Response::json(format!(r#"{{"episode":{number}}}"#)))
                }
            };
            net.serve("agent", handler_fn(agent));
            Self { net, begun }
        }

        fn begun(&self) -> usize {
            self.begun.lock().len()
        }
    }

    /// Sends the row of a task with a call id, and returns the number of the episode that answered.
    async fn run(client: &ServerClient, task: u32, call: Option<&str>) -> Result<u64> {
        let mut cx = CallContext::within(Duration::from_secs(100));
        call.into_iter().for_each(|call| cx.metadata.push(CALL_METADATA, call));
        let row = format!(r#"{{"_ng_task_index":{task},"_ng_rollout_index":0}}"#);
        let response = client.send("relay", &Request::post(cx, "/run", row), CallOptions::default()).await?;
        assert_eq!(response.status, Status::OK);
        let body: Value = serde_json::from_slice(&response.message.head.to_bytes()).unwrap();
        Ok(body["episode"].as_u64().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn two_clients_with_the_same_rows_get_rollouts_of_their_own() {
        let relayed = Relayed::new();
        let mut calls = JoinSet::new();
        for id in [None, Some("a")] {
            let client = relayed.net.client(&["relay"]);
            for task in 0..32 {
                let (client, call) = (client.clone(), id.map(|id| format!("{id}{task}")));
                calls.spawn(async move { run(&client, task, call.as_deref()).await.unwrap() });
            }
        }
        let mut episodes = calls.join_all().await;
        episodes.sort_unstable();
        assert_eq!(episodes, (0..64).collect::<Vec<_>>());
        assert!(relayed.begun.lock().iter().all(|metadata| metadata.get(CALL_METADATA).is_none()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_sent_again_joins_before_its_first_connection_is_known_to_be_broken() {
        let relayed = Relayed::new();
        let client = relayed.net.client(&["relay"]);
        let (first, again) = tokio::join!(run(&client, 3, Some("a")), run(&client, 3, Some("a")));
        assert_eq!((first.unwrap(), again.unwrap(), relayed.begun()), (0, 0, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_without_call_ids_joins_after_its_connection_broke() {
        let relayed = Relayed::new();
        let client = relayed.net.client(&["relay"]);
        let broken = tokio::time::timeout(Duration::from_secs(3), run(&client, 3, None)).await;
        assert!(broken.is_err(), "{broken:?}");
        assert_eq!((run(&client, 3, None).await.unwrap(), relayed.begun()), (0, 1));
    }
}
