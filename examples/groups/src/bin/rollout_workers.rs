//! Collects rollouts in workers that each have a model, an agent and an environment: `cargo run --release -p gym-group-examples --bin rollout_workers`.
//!
//! A rank embeds a whole stack, as the example `embedded` does, and stays between its batches. The prompts go to the rank with the fewest batches in flight,
//! and the rollouts come back in the order of the prompts. For collections that resume and are recorded, use `rgym collect` and workers that take rollouts;
//! this is for a program that holds its prompts itself.
//!
//! The ranks are processes of this machine, or run on the nodes of the Ray cluster in `RAY_ADDRESS`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gym_client::Transports;
use gym_core::RawObject;
use gym_examples::{math::Math, servers, tasks};
use gym_group::BatchOptions;
use gym_group::health::RetryBudgets;
use gym_group::prelude::*;
use gym_group::ray::{RayAddress, ray_or_local};
use gym_group::{Group, GroupOptions, LaunchSpec, RankPlace, WorkerKind, Workers};
use gym_server::{agent::SimpleAgent, model::ScriptedModel, stack::Stack};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

const RANKS: u32 = 4;
/// Of the 240 tasks of the math environment.
const PROMPTS: usize = 200;

/// A rollout, or the reason why there is none. The response is in the row, as a collector writes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Collected {
    rank: Rank,
    outcome: Result<Option<f64>, String>,
    row: RawObject,
}

struct RolloutWorker {
    rank: Rank,
    /// Started by the first batch.
    stack: Option<Stack>,
}
worker! {
    impl Worker for RolloutWorker as rollout_worker {
        fn start(env: WorkerEnv, (): ()) -> Result<Self> { Ok(Self { rank: env.rank, stack: None }) }
        /// Plays each prompt with the model, and scores the response in the environment.
        exclusive(idempotent) async fn collect(&mut self, _: &CallContext, call: Payload<Vec<RawObject>>) -> Result<Payload<Vec<Collected>>> {
            let stack = match &mut self.stack {
                Some(stack) => stack,
                none => none.insert(start_stack().await?),
            };
            let mut rollouts = stack.rollouts("math_agent", call.value)?;
            let mut collected = Vec::new();
            while let Some(rollout) = rollouts.next().await {
                let rollout = rollout?;
                let outcome = rollout.outcome.map_err(|error| error.to_string());
                collected.push((rollout.key, Collected { rank: self.rank, outcome, row: rollout.row }));
            }
            // They come in the order in which they end.
            collected.sort_by_key(|(key, _)| *key);
            Ok(collected.into_iter().map(|(_, collected)| collected).collect::<Vec<_>>().into())
        }
    }
}

/// Starts a model, an environment and an agent in this process. Here, the model is a script; `VllmModel` calls an engine.
async fn start_stack() -> Result<Stack> {
    Stack::embedded()
        .resources("math", Math)
        .model("policy", ScriptedModel::from_policy(servers::play))
        .agent("math_agent", |client| SimpleAgent::between("policy", "math", client))
        .start()
        .await
}

fn workers() -> Workers {
    Workers::new().with("rollout_worker", WorkerKind::of::<RolloutWorker>())
}

fn main() -> anyhow::Result<()> {
    // First, because ranks run this program too.
    workers().enter();
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(collect())
}

async fn collect() -> anyhow::Result<()> {
    let cx = CallContext::within(Duration::from_secs(300));
    let address = RayAddress::of_environment()?;
    let places = (0..RANKS).map(|rank| RankPlace::on_one_node(rank, RANKS)).collect();
    let spec = LaunchSpec::new("rollout_workers", "rollout_worker", serde_json::value::to_raw_value(&())?, places);
    let options = GroupOptions::new(Transports::standard()).restarting(3);
    let group = Arc::new(Group::start(&cx, &ray_or_local(address, workers()), spec, options).await?);

    let prompts = tasks::rows("math")?.into_iter().take(PROMPTS).collect();
    // A rank plays the prompts of a batch concurrently, so a batch may take longer than one of a verifier, and needs several prompts.
    let mut batches = BatchOptions::default();
    batches.target = Duration::from_millis(100);
    let begin = Instant::now();
    let balancer = group.balancer()?.again(RetryBudgets::default());
    let rollouts = balancer.map_batched(&cx, rollout_worker::collect, prompts, &batches).await;
    let seconds = begin.elapsed().as_secs_f64();

    let nodes = group.worker_status();
    let mut by_node: BTreeMap<&str, usize> = BTreeMap::new();
    let mut rewards = Vec::new();
    for (at, rollout) in rollouts.iter().enumerate() {
        let Collected { rank, outcome, row } = match rollout {
            Ok(collected) => collected,
            Err(error) => {
                println!("no rollout: {error}");
                continue;
            }
        };
        let node = nodes[*rank as usize].node_name.as_deref().unwrap_or("this machine");
        *by_node.entry(node).or_default() += 1;
        match outcome {
            Ok(reward) => rewards.extend(*reward),
            Err(error) => println!("prompt {at} failed: {error}"),
        }
        if at == 0 {
            println!("the first answer is {}, with reward {outcome:?}", serde_json::to_value(row)?["extracted_answer"]);
        }
    }
    let mean = rewards.iter().sum::<f64>() / rewards.len().max(1) as f64;
    println!("{} of {PROMPTS} rollouts with rewards, mean {mean:.3}, by node: {by_node:?}", rewards.len());
    println!("{:.0} rollouts/s on {RANKS} ranks", PROMPTS as f64 / seconds);
    group.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}
