//! A custom worker, and a group of four: `cargo run --release --bin custom_worker`.
use gym_group::prelude::*;

struct Policy(f32);
worker! {
    impl Worker for Policy as policy {
        fn start(_: WorkerEnv, weight: f32) -> Result<Self> { Ok(Self(weight)) }
        /// Trains on the rank's shard and returns the loss.
        exclusive async fn train_step(&mut self, _: &CallContext, call: Payload<f32>) -> Result<Payload<f32>> {
            let rewards = call.batch.column("reward")?.dense()?.view::<f32>()?;
            let loss = rewards.iter().map(|reward| (self.0 - reward).powi(2)).sum::<f32>() / rewards.len() as f32;
            self.0 -= call.value * loss;
            Ok(loss.into())
        }
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let group = InProcessGroup::start::<Policy>("policy", RankLayout::new([("data", 4)])?, 1.0).await?;
    let batch = Batch::empty().with("reward", Tensor::from_vec([4], vec![1.0_f32, 0.0, 0.5, 1.0])?)?;
    let call = group.call(policy::train_step, 0.01).batch(batch).dispatch(Dispatch::shard("data"));
    println!("losses: {:?}", call.await?.into_values());
    Ok(())
}
