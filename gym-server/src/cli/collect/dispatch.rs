//! `collect --dispatch pull`: hosts the work queue for the workers of a head server.

use std::time::Duration;

use gym_client::ServerClient;
use gym_client::collect::DriverOptions;
use gym_client::work::{PoolHost, PoolWatch, WorkPool, WorkPoolOptions, WorkPullerOptions};
use gym_core::{Result, World};

use crate::cli::console::{self, Console};
use crate::stack::Stack;

/// Time for workers to return their last responses and to learn that the pool is gone.
const END_GRACE: Duration = Duration::from_secs(2);

/// The pool of a collection, with its listener and its registration.
pub(super) struct PulledWork {
    pub(super) pool: WorkPool,
    host: PoolHost,
    /// The servers that were started for this collection are a worker too.
    own: Option<PoolWatch>,
}

impl PulledWork {
    /// Listens at `host`, and registers with the head server of `client`.
    pub(super) async fn start(
        client: &ServerClient,
        host: &str,
        driver: &DriverOptions,
        stack: Option<&Stack>,
        world: &World,
        console: &Console,
    ) -> Result<Self> {
        let mut options = WorkPoolOptions::default();
        // One for each rollout in flight, and one for the statistics at the end.
        options.queue.items_max = options.queue.items_max.max(driver.concurrency + 1);
        let pool = WorkPool::new(options, world);
        let name = format!("collector-{}-{}", std::process::id(), &world.unique_id()[..8]);
        let host = PoolHost::start(pool.clone(), &name, host, client, world).await?;
        if let Some(endpoint) = host.endpoints().last() {
            console.line(&format!(
                "workers take rollouts from {endpoint}; start one with `{} run --config FILE --pull-from HEAD_URL`",
                console::program()
            ));
        }
        let own =
            stack.map(|stack| stack.take_work(client.registry().clone(), WorkPullerOptions::of_this_process(world)));
        Ok(Self { pool, host, own })
    }

    pub(super) async fn end(self) {
        if let Some(own) = self.own {
            own.drain(END_GRACE).await;
        }
        self.host.end(END_GRACE).await;
    }
}
