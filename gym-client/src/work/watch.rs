//! Watches a registry for pools, and takes work from all of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use gym_core::registry::{DEFAULT_TTL, Instance, Registry};
use gym_core::{CallContext, CancelToken, Incarnation, World};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::client::ServerClient;
use crate::work::puller::{WorkPuller, WorkPullerOptions};

/// The label of instances that host a work queue; its value is `1`.
pub const WORK_LABEL: &str = "work";

/// The label of servers whose process takes work from pools; its value is `1`. A collector that hosts a queue finds its workers by it.
pub const PULLS_LABEL: &str = "pulls";

/// Time between two looks at the registry: the delay until a new pool gets workers.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Limit for one look at the registry.
const LOOK_TIMEOUT: Duration = Duration::from_secs(10);

/// Takes work from every pool in a registry: from instances with the label [`WORK_LABEL`], while they are registered. Dropping it
/// cancels the items that it runs.
#[derive(Debug)]
pub struct PoolWatch {
    drain: CancelToken,
    task: JoinSet<()>,
    grace: Duration,
}

/// An incarnation of a pool.
type PoolKey = (String, u32, Incarnation);

impl PoolWatch {
    /// Begins to watch `registry`. Items run through `client`, whose registry may be another one. The capacity is shared among the
    /// pools: what a worker runs for one pool is subtracted from what it offers to the others.
    ///
    /// Must be called within a tokio runtime.
    #[must_use]
    pub fn start(registry: Arc<dyn Registry>, client: ServerClient, options: WorkPullerOptions, world: &World) -> Self {
        let drain = CancelToken::new();
        let mut task = JoinSet::new();
        let grace = Duration::from_secs(86_400);
        task.spawn(watch(registry, client, options, world.clone(), drain.clone(), grace).boxed());
        Self { drain, task, grace }
    }

    /// Takes no more work, and finishes what runs within `grace`.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn drain(mut self, grace: Duration) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            self.drain.cancel();
            let ending = async { while self.task.join_next().await.is_some() {} };
            if tokio::time::timeout(grace.min(self.grace), ending).await.is_err() {
                tracing::warn!("pulled work was still running at the end of the grace; cancelling it");
            }
        })
    }
}

async fn watch(
    registry: Arc<dyn Registry>,
    client: ServerClient,
    options: WorkPullerOptions,
    world: World,
    drain: CancelToken,
    grace: Duration,
) {
    let mut pullers: BTreeMap<PoolKey, (WorkPuller, Instant)> = BTreeMap::new();
    let running: Arc<AtomicUsize> = Arc::default();
    let mut unread = false;
    loop {
        let cx = CallContext::within(LOOK_TIMEOUT);
        let listed = tokio::select! {
            biased;
            () = drain.cancelled() => break,
            listed = registry.list(&cx) => listed,
        };
        match listed {
            Ok(instances) => {
                if std::mem::take(&mut unread) {
                    tracing::info!("the head server lists its pools again");
                }
                let pools: BTreeMap<PoolKey, Instance> =
                    instances.into_iter().filter(is_pool).map(|pool| (key(&pool), pool)).collect();
                let now = Instant::now();
                for (key, pool) in pools {
                    let puller = pullers.entry(key).or_insert_with(|| {
                        tracing::info!(pool = pool.name, worker = options.name, "taking work from a pool");
                        let (client, options) = (client.clone(), options.clone());
                        (WorkPuller::sharing(&pool.endpoints, client, options, &world, Arc::clone(&running)), now)
                    });
                    // One that the pool has rejected asks it again after the same time as one whose pool is gone.
                    if !puller.0.has_ended() {
                        puller.1 = now;
                    }
                }
                // A restarted head server lists a pool only after the pool has registered again.
                pullers.retain(|_, (_, seen)| now.duration_since(*seen) < DEFAULT_TTL);
            }
            Err(error) => {
                // The known pools go on, and have the same time to register again as after the last look.
                pullers.values_mut().for_each(|(_, seen)| *seen = Instant::now());
                if !std::mem::replace(&mut unread, true) {
                    tracing::warn!(%error, "the pools of the head server are unknown; trying again each second");
                }
            }
        }
        tokio::select! {
            biased;
            () = drain.cancelled() => break,
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
    }
    join_all(pullers.into_values().map(|(puller, _)| puller.drain(grace))).await;
}

fn is_pool(instance: &Instance) -> bool {
    instance.labels.get(WORK_LABEL).is_some_and(|value| value == "1")
}

fn key(instance: &Instance) -> PoolKey {
    (instance.name.clone(), instance.replica, instance.incarnation)
}
