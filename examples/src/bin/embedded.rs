//! An environment, a model and an agent in one program, without configuration, files or ports.
//!
//! `cargo run --release --bin embedded` runs the 240 tasks of the math environment, and prints the result of each rollout.
use gym_examples::{math::Math, servers, tasks};
use gym_server::{agent::SimpleAgent, model::ScriptedModel, prelude::*};

#[tokio::main]
async fn main() -> Result<()> {
    let stack = Stack::embedded()
        .resources("math", Math)
        .model("policy", ScriptedModel::from_policy(servers::play))
        .agent("math_agent", |client| SimpleAgent::between("policy", "math", client))
        .start()
        .await?;
    let mut rollouts = stack.rollouts("math_agent", tasks::rows("math")?)?;
    while let Some(rollout) = rollouts.next().await {
        let Rollout { key, outcome, attempts, duration, .. } = rollout?;
        match outcome {
            Ok(reward) => println!("{key}: reward {reward:?} after {attempts} attempts, {duration:?}"),
            Err(error) => println!("{key}: failed after {attempts} attempts: {error}"),
        }
    }
    stack.stop().await;
    Ok(())
}
