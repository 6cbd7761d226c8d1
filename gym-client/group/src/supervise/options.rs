//! Options of a supervised group.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_client::transport::Transports;
use gym_core::CallContext;
use gym_core::group::{Method, RankLayout};
use gym_core::registry::Balance;

use crate::call::{GroupError, WorkerGroupExt};
use crate::health::HealthPolicy;
use crate::placement::WorkerGroupConfig;
use crate::provision::DEFAULT_START_TIMEOUT;
use crate::supervise::subset::RankSubset;

/// Default of [`GroupOptions::max_restarts`].
pub const DEFAULT_MAX_RESTARTS: u32 = 3;

/// Options of a group: transports, layout, heartbeats and restarts.
///
/// ```
/// use std::time::Duration;
///
/// use gym_client::Transports;
/// use gym_group::prelude::*;
/// use gym_group::GroupOptions;
/// # struct Policy;
/// # worker! {
/// #     impl Worker for Policy as policy {
/// #         fn start(_: WorkerEnv, _: ()) -> Result<Self> { Ok(Self) }
/// #         exclusive async fn load(&mut self, _: &CallContext, _: Payload<String>) -> Result<Payload<()>> { Ok(().into()) }
/// #     }
/// # }
///
/// let options = GroupOptions::new(Transports::standard()).restarting(3);
/// let mut options = options.on_restart(policy::load, "/checkpoints/newest".to_owned());
/// options.layout = Some(RankLayout::new([("data", 2), ("tensor", 4)])?);
/// options.stall = Duration::from_secs(1_800); // a step may take as long as that
/// assert!(options.restart_on_failure);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct GroupOptions {
    /// The transports to the ranks.
    pub transports: Transports,
    /// The ranks' axes. The default is one axis with all ranks.
    pub layout: Option<RankLayout>,
    /// Restarts ranks that end. Off by default. A failed call is never repeated.
    pub restart_on_failure: bool,
    /// The restart budget of each rank, for automatic restarts and for
    /// [`Group::restart_failed_workers`](crate::Group::restart_failed_workers). A restart that finds no room on other nodes within
    /// [`NodesOptions::wait_for_room`](crate::NodesOptions::wait_for_room) counts too: otherwise a group would wait without a limit. The default is 3.
    pub max_restarts: u32,
    /// Pause before the first automatic restart of a rank that has never served, doubled for each further restart in a row. A rank that has served
    /// restarts at once the first time. The default is 1 s.
    pub backoff_min: Duration,
    /// The longest pause. A rank that served for longer than this restarts at once again. The default is 30 s.
    pub backoff_max: Duration,
    /// Pause between two heartbeats of each rank. The default is 5 s.
    pub heartbeat: Duration,
    /// A rank without a heartbeat for this long is suspect: its running calls fail, and it gets no calls until the next heartbeat. The default is 15 s.
    /// A rank sends heartbeats while its methods compute, so a silent one is stopped, hangs in the kernel, or is cut off.
    pub silence_max: Duration,
    /// A rank without a heartbeat for this long has failed: [`Group::restart_failed_workers`](crate::Group::restart_failed_workers) kills and restarts
    /// it. The default is 30 s.
    pub silence_restart: Duration,
    /// A call without progress for this long is stuck; see [`CallContext::progress`]. The supervisor then writes a warning, and kills no rank. The
    /// default is 300 s, half of a call's default deadline.
    pub stall: Duration,
    /// Limits `on_restart`, which loads weights and may take as long as a start. A rank whose preparation takes longer counts as failed. The
    /// default is 600 s.
    pub prepare_timeout: Duration,
    /// Starts [submitted](crate::GroupCall::submit) calls without being awaited. Off by default.
    pub async_communication: bool,
    /// The rule of [`Group::balancer`](crate::Group::balancer). The default, `None`, is the least busy rank.
    pub balance: Option<Balance>,
    pub(crate) on_restart: Option<Arc<OnRestart>>,
}

pub(crate) type OnRestart = dyn Fn(RankSubset, CallContext) -> BoxFuture<'static, Result<(), GroupError>> + Send + Sync;

impl GroupOptions {
    /// Options without automatic restarts.
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
            silence_restart: Duration::from_secs(30),
            stall: Duration::from_secs(300),
            prepare_timeout: DEFAULT_START_TIMEOUT,
            async_communication: false,
            balance: None,
            on_restart: None,
        }
    }

    /// Replaces the options that a configuration has keys for; a key that it leaves out changes nothing.
    pub(crate) fn configured(&mut self, config: &WorkerGroupConfig) {
        let WorkerGroupConfig { restart_on_failure, max_restarts, async_communication, .. } = config;
        self.restart_on_failure = restart_on_failure.unwrap_or(self.restart_on_failure);
        self.max_restarts = max_restarts.unwrap_or(self.max_restarts);
        self.async_communication = async_communication.unwrap_or(self.async_communication);
        self.balance = config.balancing().or(self.balance.take());
    }

    /// Restarts ranks that end, each at most `max_restarts` times.
    #[must_use]
    pub fn restarting(mut self, max_restarts: u32) -> Self {
        self.restart_on_failure = true;
        self.max_restarts = max_restarts;
        self
    }

    /// Returns the limits of the ranks' health. Only an exited process makes a rank dead. Missed heartbeats make it suspect, and
    /// the next heartbeat makes it healthy again.
    pub(super) fn health_policy(&self) -> HealthPolicy {
        HealthPolicy { unhealthy_after: u32::MAX, healthy_after: 1, restarts_max: self.max_restarts, serving_min: 1 }
    }

    /// Calls this method on restarted ranks before they serve, for example to load the current weights. A restarted rank is stale
    /// and receives no calls until the method has succeeded. Tied ranks are called together.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_a_configuration_leaves_out_changes_no_option() {
        let chosen = || {
            let mut options = GroupOptions::new(Transports::new()).restarting(7);
            (options.async_communication, options.balance) = (true, Some(Balance::RoundRobin));
            options
        };
        let facts = |options: &GroupOptions| {
            let GroupOptions { restart_on_failure, max_restarts, async_communication, balance, .. } = options;
            (*restart_on_failure, *max_restarts, *async_communication, balance.clone())
        };
        for (config, expected) in [
            ("{}", facts(&chosen())),
            (r#"{"memory_limit": "8GB", "restart_on_failure": null}"#, facts(&chosen())),
            (r#"{"restart_on_failure": false}"#, (false, 7, true, Some(Balance::RoundRobin))),
            (r#"{"max_restarts": 0, "async_communication": false}"#, (true, 0, false, Some(Balance::RoundRobin))),
            (r#"{"load_balancing_strategy": "least_pending"}"#, (true, 7, true, Some(Balance::LeastPending))),
        ] {
            let mut options = chosen();
            options.configured(&serde_json::from_str(config).expect("a configuration"));
            assert_eq!(facts(&options), expected, "{config}");
        }
    }
}
