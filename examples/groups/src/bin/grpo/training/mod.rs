//! Training with a stand-in for a model: a table of preferences instead of weights.
//!
//! The "policy" sees a sum such as `7 * 5` and chooses the operation to apply. For each operator it keeps a preference for each
//! choice; a softmax over the preferences is its distribution. This is small enough to train on a laptop, and everything around it
//! is real. The ranks of one group sample the generations, rollouts through the SDK's own servers score them, and the ranks of
//! another group train the policy.

mod generation;
mod model;
mod policy;
mod tasks;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gym_core::{CallContext, Result};
use gym_group::train::{GenerationInterface, PolicyInterface};
use gym_group::{Batch, Dispatch, WorkerGroupExt};

pub(crate) use generation::{Generate, GenerationWorker, LoadWeights};
pub(crate) use model::{Operator, Table};
pub(crate) use policy::{Apply, Gradient, LogProbs, Loss, PolicyWorker, ReadWeights, Update, Weights};
pub(crate) use tasks::{played, prompts};

/// The axis along which batches are sharded.
pub(crate) const DATA_AXIS: &str = "data_parallel";

/// The policy of the training loop, backed by its worker group.
#[derive(Debug)]
pub(crate) struct TablePolicy {
    group: Arc<dyn WorkerGroupExt>,
    learning_rate: f32,
}

/// Statistics of a training step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stats {
    /// The stand-in loss, a mean over the rows that have a reward.
    pub(crate) loss: f32,
    /// The gradient's Euclidean norm.
    pub(crate) grad_norm: f32,
}

impl TablePolicy {
    /// Creates the policy on the workers of `group`, all of which begin with the same table.
    #[must_use]
    pub(crate) fn new(group: Arc<dyn WorkerGroupExt>, learning_rate: f32) -> Self {
        Self { group, learning_rate }
    }

    async fn log_probs_under(&self, cx: &CallContext, batch: &Batch, weights: Weights) -> Result<Batch> {
        let call = self.group.call(LogProbs, weights).context(cx).batch(batch.clone());
        call.dispatch(Dispatch::shard(DATA_AXIS)).await?.batch()
    }
}

impl PolicyInterface for TablePolicy {
    type Loss = Loss;
    type Stats = Stats;

    async fn log_probs(&self, cx: &CallContext, batch: &Batch) -> Result<Batch> {
        self.log_probs_under(cx, batch, Weights::Current).await
    }

    async fn reference_log_probs(&self, cx: &CallContext, batch: &Batch) -> Result<Batch> {
        self.log_probs_under(cx, batch, Weights::Reference).await
    }

    /// Sums the gradients, which each rank computes for its shard; a real policy uses an all-reduce among its ranks.
    async fn train(&self, cx: &CallContext, batch: Batch, loss: &Loss) -> Result<Stats> {
        let shards = self.group.call(Gradient, *loss).context(cx).batch(batch).dispatch(Dispatch::shard(DATA_AXIS));
        let mut total = Update::default();
        for shard in shards.await?.into_values() {
            total.add(&shard);
        }
        let stats = Stats { loss: total.mean_loss(), grad_norm: total.gradient_norm() };
        total.learning_rate = self.learning_rate;
        self.group.call(Apply, total).context(cx).await?;
        Ok(stats)
    }
}

/// The generation engine of the training loop, backed by its worker group.
#[derive(Debug)]
pub(crate) struct TableGeneration {
    group: Arc<dyn WorkerGroupExt>,
    /// The group from which the weights are read.
    policy: Arc<dyn WorkerGroupExt>,
    /// Different for every call, so that two steps never sample the same way.
    seed: AtomicU64,
}

impl TableGeneration {
    /// Creates the engine, which samples on the workers of `group` with the weights of `policy`.
    #[must_use]
    pub(crate) fn new(group: Arc<dyn WorkerGroupExt>, policy: Arc<dyn WorkerGroupExt>, seed: u64) -> Self {
        Self { group, policy, seed: AtomicU64::new(seed) }
    }

    /// Returns the policy's current weights.
    ///
    /// # Errors
    /// If rank 0 of the policy does not respond.
    pub(crate) async fn weights(&self, cx: &CallContext) -> Result<Table> {
        let call = self.policy.call(ReadWeights, ()).context(cx).dispatch(Dispatch::rank(0));
        Ok(call.await?.into_one()?.value)
    }
}

impl GenerationInterface for TableGeneration {
    /// Copies the weights through the controller, because a table is a few numbers. Real weights move from rank to rank.
    async fn refit(&self, cx: &CallContext) -> Result<()> {
        let weights = self.weights(cx).await?;
        self.group.call(LoadWeights, weights).context(cx).await?;
        Ok(())
    }

    async fn generate(&self, cx: &CallContext, prompts: &Batch) -> Result<Batch> {
        let seed = self.seed.fetch_add(1, Ordering::Relaxed);
        let call = self.group.call(Generate, seed).context(cx).batch(prompts.clone());
        call.dispatch(Dispatch::shard(DATA_AXIS)).await?.batch()
    }
}
