//! The environment server whose rollouts run on workers: a collector that knows only `/run` gets a whole cluster.

use std::num::NonZeroUsize;
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_client::work::{WORK_ROUTE, WorkPool, WorkPoolOptions, WorkPoolSnapshot};
use gym_core::{Handler, Request, Response, Result};
use serde::Deserialize;

use crate::environment::relay::{Relay, RelayConfig};
use crate::role::settings::{Seconds, ServerRef};
use crate::role::{RoleServer, ServerContext};

/// The name of the implementation. Workers find its instances in the registry.
pub const POOL_IMPLEMENTATION: &str = "pool";

/// The longest wait of a poll. Polls that wait delay the end of the server by as much.
const POLL_WAIT_MAX: Duration = Duration::from_secs(2);

/// The keys of a `pool` block.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct PoolConfig {
    /// The agent that runs the rollouts, on each worker.
    pub agent_server: ServerRef,
    /// Maximum number of rollouts that wait or run; further ones are rejected. 16,384 by default.
    #[serde(default)]
    pub rollouts_max: Option<NonZeroUsize>,
    /// Seconds after which a worker that does not answer is lost. 10 by default.
    #[serde(default)]
    pub worker_timeout_seconds: Option<Seconds>,
    /// Seconds that a `/run` continues after its caller has disconnected, so that a resent request can join it. 30 by default.
    #[serde(default)]
    pub replay_grace_seconds: Option<Seconds>,
}

/// Offers each `/run` to the workers that poll `POST /work/next`, and answers with the response of the worker that ran it. If that
/// worker is lost, the answer is an error of the class `worker_lost`, and the collector begins a new attempt.
#[derive(Debug)]
pub struct PoolServer {
    pool: WorkPool,
    relay: RoleServer,
}

impl PoolServer {
    /// Creates a pool. Must be called within a tokio runtime.
    #[must_use]
    pub fn new(config: PoolConfig, context: &ServerContext) -> Self {
        let mut options = WorkPoolOptions::default();
        options.queue.wait_max = POLL_WAIT_MAX;
        if let Some(rollouts_max) = config.rollouts_max {
            options.queue.items_max = rollouts_max.get();
        }
        if let Some(timeout) = config.worker_timeout_seconds {
            options.queue.silence_max = timeout.0;
        }
        let pool = WorkPool::new(options, &context.world);
        context.metrics.watch_pool(&context.name, pool.clone());
        let PoolConfig { agent_server, replay_grace_seconds, .. } = config;
        let relay = Relay::pulled(RelayConfig { agent_server, replay_grace_seconds }, pool.clone());
        Self { pool, relay: RoleServer::environment(relay, context) }
    }

    /// Returns the state of the queue and the workers.
    #[must_use]
    pub fn snapshot(&self) -> WorkPoolSnapshot {
        self.pool.snapshot()
    }
}

impl Handler for PoolServer {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        // Not behind the role: a waiting poll is no call in flight.
        if request.route.path() == WORK_ROUTE { self.pool.handle(request) } else { self.relay.handle(request) }
    }
}
