//! Data-parallel training: `cargo run --release --bin data_parallel`.
use gym_group::collective::{CommunicatorExt as _, Peers, ReduceOp};
use gym_group::prelude::*;
struct Policy(Peers, f32);
worker! {
    impl Worker for Policy as policy {
        fn start(env: WorkerEnv, weight: f32) -> Result<Self> { Ok(Self(env.peers, weight)) }
        /// Learns the mean reward from the rank's shard and the gradients of all ranks. Returns the weight.
        exclusive async fn train_step(&mut self, cx: &CallContext, call: Payload<f32>) -> Result<Payload<f32>> {
            let rewards = call.batch.column("reward")?.dense()?.view::<f32>()?;
            let gradient = rewards.iter().map(|reward| self.1 - reward).sum::<f32>() / rewards.len() as f32;
            let (gradient, data) = (Tensor::from_vec([1], vec![gradient])?, self.0.gradients(cx, "data").await?);
            self.1 -= call.value * data.all_reduce(cx, gradient, ReduceOp::Mean).await?.view::<f32>()?[0];
            Ok(self.1.into())
        }
    }
}
#[tokio::main]
async fn main() -> Result<()> {
    let group = InProcessGroup::start::<Policy>("policy", RankLayout::new([("data", 4)])?, 1.0).await?;
    let batch = Batch::empty().with("reward", Tensor::from_vec([4], vec![1.0_f32, 0.0, 0.5, 1.0])?)?;
    let call = group.call(policy::train_step, 1.0).batch(batch).dispatch(Dispatch::shard("data"));
    println!("the weight of each rank: {:?}", call.await?.into_values());
    Ok(())
}
