//! The single controller: one program that drives generation, environments and training over their interfaces.
//!
//! ```text
//!   prompts ─ repeat_interleave ─► Generation::generate ─► Environment::step ─► rewards, or none
//!                 ▲ refit when stale                             │
//!                 │                            Policy::log_probs, ::reference_log_probs
//!                 └────────── Policy::train ◄─── advantages ◄────┘
//! ```
//!
//! The interfaces are NeMo RL's `PolicyInterface`, `GenerationInterface` and `EnvironmentInterface`; [`Grpo::step`] calls them
//! in the documented order. Losses and models are the implementor's. A rollout that failed has no reward: it is masked out of
//! the baseline and of the loss, and never counts as 0.

mod grpo;
mod rollouts;

use std::future::Future;

use gym_core::group::Batch;
use gym_core::{CallContext, Error, Result};

pub use grpo::{Grpo, GrpoConfig, GrpoStep, StepDurations};
pub use rollouts::{ROLLOUT_COLUMN, RolloutEnvironment, TASK_COLUMN};

/// The model that is trained.
pub trait PolicyInterface: Sync {
    /// What is minimised, as its workers understand it.
    type Loss: Sync;
    /// What a training step reports.
    type Stats: Send;

    /// Log probabilities of the generated tokens under the current weights: one row for each row of the batch.
    fn log_probs(&self, cx: &CallContext, batch: &Batch) -> impl Future<Output = Result<Batch>> + Send;

    /// The same under the weights of the reference model.
    fn reference_log_probs(&self, cx: &CallContext, batch: &Batch) -> impl Future<Output = Result<Batch>> + Send;

    /// One optimiser step over the batch.
    fn train(
        &self,
        cx: &CallContext,
        batch: Batch,
        loss: &Self::Loss,
    ) -> impl Future<Output = Result<Self::Stats>> + Send;
}

/// The engine that answers prompts.
pub trait GenerationInterface: Sync {
    /// Takes over the policy's current weights. Called before the first [`GenerationInterface::generate`] and after each training step;
    /// one that fails is asked again before the next.
    fn refit(&self, cx: &CallContext) -> impl Future<Output = Result<()>> + Send;

    /// Answers each row of prompts: the same rows with the answers' columns beside them.
    fn generate(&self, cx: &CallContext, prompts: &Batch) -> impl Future<Output = Result<Batch>> + Send;
}

/// What scores generations.
pub trait EnvironmentInterface: Sync {
    /// Plays each row to its end.
    fn step(&self, cx: &CallContext, generations: &Batch) -> impl Future<Output = Result<EnvironmentReturn>> + Send;
}

/// What the environment made of a batch, row by row.
#[derive(Clone, Debug, Default)]
pub struct EnvironmentReturn {
    /// The reward of each row; `None` where the rollout failed or has no score.
    pub rewards: Vec<Option<f32>>,
    /// Further columns for training, of as many rows; or none at all.
    pub columns: Batch,
}

impl EnvironmentReturn {
    /// Rewards without further columns.
    #[must_use]
    pub fn new(rewards: Vec<Option<f32>>) -> Self {
        Self { rewards, columns: Batch::empty() }
    }
}

/// All columns of `more` beside those of `batch`; a column of the same name is replaced.
fn with_columns_of(mut batch: Batch, more: &Batch, from: &str) -> Result<Batch> {
    for (name, column) in more.columns() {
        batch.insert(name, column.clone()).map_err(|error| error.about(from.to_owned()))?;
    }
    Ok(batch)
}

fn check_rows(found: usize, expected: usize, from: &str) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::invalid(format!("{found} rows came back for {expected}")).about(from.to_owned()))
}
