//! A whole stack and a collector inside one program of yours, without the command line: what the SDK is for.
//!
//! `cargo run --release --bin embedded` collects 200 rollouts of the math environment in process.

use gym_client::collect::{CollectOptions, RolloutCollector, ServerNames};
use gym_client::config::{ConfigLoader, Overrides, free_port};
use gym_core::CancelToken;
use gym_core::World;
use gym_server::{Stack, StackOptions};

fn main() -> anyhow::Result<()> {
    // First, because a Python server's child starts as this program.
    gym_client::launch::enter();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    // In a task, so that it runs on a worker thread: every I/O event of a `block_on` future is a wake-up across threads.
    runtime.block_on(async { tokio::spawn(collect()).await? })
}

async fn collect() -> anyhow::Result<()> {
    let world = World::real();
    let mut random = world.rng();
    let config = ConfigLoader::new(".")
        .pick_port(move |wish| free_port(wish, &mut random))
        .load(&["examples/configs/quickstart.yaml"], &Overrides::parse(["+head_server.port=0"])?)?;
    let names = ServerNames::of_config(&config);
    let stack = Stack::start(config, &gym_examples::servers::servers(), &world, StackOptions::default()).await?;
    let collector = RolloutCollector::new(stack.client().clone(), names, world);
    let mut options = CollectOptions::new("examples/data/math.jsonl", "results/embedded.jsonl");
    options.materialize.limit = Some(200);
    let collected = collector.collect(options, CancelToken::new()).await?;
    stack.stop().await;
    for (agent, score) in &collected.snapshot.scores {
        println!("{agent}: {} rollouts, mean reward {:.3}", score.count, score.reward_sum / score.count as f64);
    }
    println!("written to {}", collected.files.rollouts.display());
    anyhow::ensure!(collected.is_complete(), "some rollouts failed: see {}", collected.files.failures.display());
    Ok(())
}
