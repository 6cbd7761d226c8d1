//! The single-controller GRPO loop: generation workers answer, rollouts score, policy workers train.
//!
//! `cargo run --release --bin grpo` trains a table of preferences (a stand-in for a model, with a stand-in loss) until it answers
//! sums correctly. The rewards are real: each answer is scored in a rollout. The head server, the agent, the model and the
//! resources server run in this process. The workers are child processes on the bundles of `examples/configs/cluster.json`, which
//! both groups lease alternately. `--help` lists the options.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use gym_client::Transports;
use gym_client::config::{ConfigLoader, Overrides, free_port};
use gym_client::launch;
use gym_core::transport::{InProcess, TransportPolicy};
use gym_core::{CallContext, World};
use gym_examples::math::Math;
use gym_group::GroupOptions;
use gym_group::RankLayout;
use gym_group::train::{Grpo, GrpoConfig, RolloutEnvironment};
use gym_group::{ClusterFile, GroupRequest, Local, VirtualCluster, WorkerKind, Workers};
use gym_server::{Servers, Stack, StackOptions};

mod training;

use training::{
    DATA_AXIS, GenerationWorker, Loss, Operator, PolicyWorker, Table, TableGeneration, TablePolicy, played, prompts,
};

/// Trains a stand-in policy on rollouts of the math environment.
#[derive(Parser)]
struct Arguments {
    /// Number of training steps.
    #[arg(long, default_value_t = 30)]
    steps: u64,
    /// Number of prompts in each step.
    #[arg(long, default_value_t = 16)]
    prompts: usize,
    /// Number of answers to each prompt.
    #[arg(long, default_value_t = 8)]
    generations: usize,
    /// File with the cluster and its groups.
    #[arg(long, default_value = "examples/configs/cluster.json")]
    cluster: PathBuf,
    /// Simulates nodes with these numbers of bundles, such as 4,8,2.
    #[arg(long, value_delimiter = ',')]
    simulate_nodes: Option<Vec<u32>>,
    /// Step length.
    #[arg(long, default_value_t = 2.0)]
    learning_rate: f32,
    /// Seed of the tasks and of the sampling.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> anyhow::Result<()> {
    // First, because worker processes run this program too.
    workers().enter();
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async { tokio::spawn(train(arguments)).await? })
}

fn workers() -> Workers {
    Workers::new()
        .with("policy", WorkerKind::of::<PolicyWorker>())
        .with("generation", WorkerKind::of::<GenerationWorker>())
}

async fn train(arguments: Arguments) -> anyhow::Result<()> {
    let world = World::real();
    let mut random = world.rng();
    let config = ConfigLoader::new(".")
        .pick_port(move |wish| free_port(wish, &mut random))
        .load(&["examples/configs/grpo.yaml"], &Overrides::parse(["+head_server.port=0"])?)?;
    let file = ClusterFile::read(&arguments.cluster)?;
    // Before anything is started, because this program may re-execute itself with the variables that UCX reads when it loads.
    let policies = [
        config.transport_policy.clone(),
        file.cluster.transport_policy(),
        file.group("policy")?.transport_policy(),
        file.group("generation")?.transport_policy(),
    ];
    let transports = Transports::from_features(InProcess::new());
    let prepare = |policy: &TransportPolicy| launch::prepare(&transports.clone().with_policy(policy.clone()));
    policies.iter().flatten().try_for_each(prepare)?;
    let servers = Servers::stock().scripted_policy(played).resources("math", |_| Ok(Math));
    let stack = Stack::start(config, &servers, &world, StackOptions::default()).await?;
    let environment =
        RolloutEnvironment::new(stack.client().clone(), &world, "math_environment_server", "math_simple_agent");

    let mut cluster = VirtualCluster::new(file.cluster.clone(), Local::new(workers()))?;
    if let Some(nodes) = &arguments.simulate_nodes {
        cluster = cluster.simulate_nodes(nodes);
    }
    let mut options = GroupOptions::new(Transports::from_features(InProcess::new()));
    options.layout = Some(RankLayout::new([(DATA_AXIS, cluster.world_size())])?);
    let mut policy = GroupRequest::new("policy", "policy", &Table::default(), options.clone())?;
    policy.config = Some(file.group("policy")?);
    let mut engine = GroupRequest::new("generation", "generation", &(), options)?;
    engine.config = Some(file.group("generation")?);
    let starting = CallContext::within(Duration::from_secs(60));
    let policy = Arc::new(cluster.start(&starting, policy).await?);
    let engine = Arc::new(cluster.start(&starting, engine).await?);
    let generation = TableGeneration::new(engine, policy.clone(), arguments.seed);
    let trained = TablePolicy::new(policy, arguments.learning_rate);

    let mut config = GrpoConfig::default();
    config.num_generations_per_prompt = arguments.generations;
    let loss = Loss { reference_policy_kl_penalty: 0.01 };
    let mut grpo = Grpo::new(config)?;
    let mut random = fastrand::Rng::with_seed(arguments.seed);
    println!("step  reward  scored  dropped  stand-in loss  grad norm  generation  rollouts  training");
    for _ in 0..arguments.steps {
        let cx = CallContext::within(Duration::from_secs(600));
        let batch = prompts(arguments.prompts, &mut random)?;
        let step = grpo.step(&cx, (&trained, &generation, &environment), &batch, &loss).await?;
        println!(
            "{:>4}  {:>6.3}  {:>6}  {:>7}  {:>13.4}  {:>9.4}  {:>10.1?}  {:>8.1?}  {:>8.1?}",
            step.number,
            step.reward_mean,
            step.scored,
            step.dropped_prompts,
            step.stats.loss,
            step.stats.grad_norm,
            step.durations.generation,
            step.durations.reward_calculation,
            step.durations.policy_training,
        );
    }
    let weights = generation.weights(&CallContext::default()).await?;
    for (row, operator) in Operator::ALL.iter().enumerate() {
        let right = weights.probabilities(row)[row];
        println!(
            "the policy carries out {} for `{}` with probability {right:.3}",
            operator.symbol(),
            operator.symbol()
        );
    }
    cluster.shutdown(Duration::from_secs(10)).await?;
    stack.stop().await;
    Ok(())
}
