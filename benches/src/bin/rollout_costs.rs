//! Runs a number of rollouts in one process with the embedded model, and writes every row. Use it to count the cost of a rollout on
//! a machine that is too busy for timings.
//!
//! `rollout_costs ROLLOUTS CONCURRENCY [pulled]`. With `pulled`, the servers are a worker that takes the rollouts from the collector over
//! a connection, both in this process, so that both sides are counted. Run it twice under `valgrind --tool=callgrind`; the difference is the cost of the
//! additional rollouts.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use gym_benches::measure::cpu_of;
use gym_benches::stack::{ModelAt, Plan, Scratch, all_in_one, free_port, write_config, write_rows};
use gym_client::work::{PoolHost, WorkPool, WorkPoolOptions, WorkPuller, WorkPullerOptions};
use gym_core::{CancelToken, World};
use tokio::runtime::Builder;

/// Rows of the input; each is repeated as often as needed.
const TASKS: u32 = 5;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (rollouts, concurrency, pulled) = match &arguments[..] {
        [rollouts, concurrency] => (rollouts, concurrency, false),
        [rollouts, concurrency, how] if how == "pulled" => (rollouts, concurrency, true),
        _ => bail!("rollout_costs ROLLOUTS CONCURRENCY [pulled]"),
    };
    let (rollouts, concurrency) = (rollouts.parse()?, concurrency.parse()?);
    // One worker: with two, the choice of the worker for each task would be counted.
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async { tokio::spawn(collect(rollouts, concurrency, pulled)).await? })
}

async fn collect(rollouts: u32, concurrency: usize, pulled: bool) -> Result<()> {
    let scratch = Scratch::new("rollout_costs")?;
    let config = write_config(&scratch, "config.yaml", ModelAt::Embedded(Duration::ZERO), free_port()?)?;
    let (input, output) = (write_rows(&scratch)?, scratch.path("rollouts.jsonl"));
    let plan = Plan { input, output, repeats: rollouts / TASKS, concurrency };
    let (stack, mut collector) = all_in_one(&config.to_string_lossy(), concurrency).await?;
    let mut working = None;
    if pulled {
        let world = World::real();
        let pool = WorkPool::new(WorkPoolOptions::default(), &world);
        let host = PoolHost::start(pool.clone(), "collector", "127.0.0.1", stack.client(), &world).await?;
        let mut options = WorkPullerOptions::of_this_process(&world);
        options.capacity = 256;
        let worker = WorkPuller::start(host.endpoints(), stack.client().clone(), options, &world);
        collector = collector.pulled_from(pool);
        working = Some((host, worker));
    }
    // From `/proc`, because valgrind does not support the kernel's clocks.
    let process = [std::process::id()];
    let before = cpu_of(&process);
    let collected = collector.collect(plan.options(), CancelToken::new()).await?;
    let cpu = cpu_of(&process).saturating_sub(before);
    if let Some((host, worker)) = working {
        ensure!(worker.drain(Duration::from_secs(5)).await, "the worker did not end");
        host.end(Duration::from_secs(5)).await;
    }
    stack.stop().await;
    ensure!(collected.is_complete(), "{:?}", collected.snapshot);
    let rows = collected.snapshot.completed;
    println!("{rows} rollouts, {:.1} us of CPU time each", cpu.as_secs_f64() * 1e6 / rows as f64);
    Ok(())
}
