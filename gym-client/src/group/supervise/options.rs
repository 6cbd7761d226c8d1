//! How a group is kept alive.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_core::CallContext;
use gym_core::group::health::HealthPolicy;
use gym_core::group::{GroupError, Method, RankLayout, WorkerGroupExt};
use gym_core::registry::Balance;

use crate::group::supervise::subset::RankSubset;
use crate::transport::Transports;

/// Restarts of one rank in the life of its group, when restarts are on and no number is given.
pub const DEFAULT_MAX_RESTARTS: u32 = 3;

/// How a group is reached, watched and restarted.
#[derive(Clone)]
#[non_exhaustive]
pub struct GroupOptions {
    /// Transports to reach the ranks with.
    pub transports: Transports,
    /// The ranks' axes; a line of all ranks unless given.
    pub layout: Option<RankLayout>,
    /// Whether a rank that ended is started again by itself. Off unless asked for; a call that failed is never repeated.
    pub restart_on_failure: bool,
    /// Restarts of each rank in the life of the group, by itself or by [`Group::restart_failed_workers`](crate::group::supervise::group::Group).
    pub max_restarts: u32,
    /// Pause before a rank's restart by itself: this long, then twice as long, …
    pub backoff_min: Duration,
    /// … up to this. A rank that has served for longer than this starts again with the shortest pause.
    pub backoff_max: Duration,
    /// Pause between two looks at each rank.
    pub heartbeat: Duration,
    /// A rank that has not answered for this long is suspect, and not called until it does.
    pub silence_max: Duration,
    /// A call that has told of no progress for this long is stuck. See [`CallContext::progress`].
    pub stall: Duration,
    /// How [`Group::balancer`](crate::group::supervise::group::Group::balancer) chooses; `None`: the least busy.
    pub balance: Option<Balance>,
    pub(crate) on_restart: Option<Arc<OnRestart>>,
}

pub(crate) type OnRestart = dyn Fn(RankSubset, CallContext) -> BoxFuture<'static, Result<(), GroupError>> + Send + Sync;

impl GroupOptions {
    /// Ranks reached over these transports; no restarts.
    #[must_use]
    pub fn new(transports: Transports) -> Self {
        Self {
            transports,
            layout: None,
            restart_on_failure: false,
            max_restarts: DEFAULT_MAX_RESTARTS,
            backoff_min: Duration::from_secs(1),
            backoff_max: Duration::from_secs(30),
            heartbeat: Duration::from_secs(5),
            silence_max: Duration::from_secs(15),
            stall: Duration::from_secs(600),
            balance: None,
            on_restart: None,
        }
    }

    /// Ranks that end are started again, each at most `max_restarts` times.
    #[must_use]
    pub fn restarting(mut self, max_restarts: u32) -> Self {
        self.restart_on_failure = true;
        self.max_restarts = max_restarts;
        self
    }

    /// The limits of the ranks' health. Only a process that ends makes a rank dead: missed heartbeats make it suspect, and the next one
    /// makes it healthy again.
    pub(super) fn health_policy(&self) -> HealthPolicy {
        HealthPolicy { unhealthy_after: u32::MAX, healthy_after: 1, restarts_max: self.max_restarts, serving_min: 1 }
    }

    /// A restarted rank is stale, and not called, until this method has succeeded on it: old weights must not serve. Ranks that are
    /// tied are called together.
    #[must_use]
    pub fn on_restart<M: Method>(mut self, method: M, args: M::Args) -> Self {
        self.on_restart = Some(Arc::new(move |subset, cx| {
            let args = args.clone();
            Box::pin(async move { subset.call(method, args).context(&cx).await.map(drop) })
        }));
        self
    }
}

impl fmt::Debug for GroupOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupOptions")
            .field("restart_on_failure", &self.restart_on_failure)
            .field("max_restarts", &self.max_restarts)
            .field("on_restart", &self.on_restart.is_some())
            .finish_non_exhaustive()
    }
}
