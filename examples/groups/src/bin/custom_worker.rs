//! A worker of your own and a group of four of them: `cargo run --release --bin custom_worker`.

use std::time::Duration;

use gym_core::group::{
    Batch, Dispatch, Handles, InProcessGroup, Method, Methods, Payload, RankLayout, Tensor, Worker, WorkerEnv,
    WorkerGroupExt,
};
use gym_core::{CallContext, Result};

#[derive(Clone, Copy, Debug)]
struct TrainStep;
impl Method for TrainStep {
    const NAME: &'static str = "policy.train_step";
    type Args = f32; // the learning rate, the same for every rank
    type Reply = f32; // the loss of its shard
}
struct Policy(f32);
impl Worker for Policy {
    type Init = f32;
    fn start(_: WorkerEnv, weight: f32) -> Result<Self> {
        Ok(Self(weight))
    }
    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(TrainStep);
    }
}
impl Handles<TrainStep> for Policy {
    async fn handle(&mut self, _: &CallContext, call: Payload<f32>) -> Result<Payload<f32>> {
        let rewards = call.batch.column("reward")?.dense()?.view::<f32>()?;
        let loss = rewards.iter().map(|reward| (self.0 - reward).powi(2)).sum::<f32>() / rewards.len() as f32;
        self.0 -= call.value * loss;
        Ok(loss.into())
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let policy = InProcessGroup::start::<Policy>("policy", RankLayout::new([("data", 4)])?, 1.0).await?;
    let batch =
        Batch::empty().with("reward", Tensor::from_vec([8], vec![1.0_f32, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.5])?)?;
    let call = policy.call(TrainStep, 0.01).batch(batch).dispatch(Dispatch::shard("data"));
    println!("losses: {:?}", call.deadline(Duration::from_secs(60)).await?.into_values());
    policy.stop(Duration::from_secs(5)).await
}
