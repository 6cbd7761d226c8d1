//! Single-controller training: one program drives generation, environments and training through their interfaces.
//!
//! ```text
//!   prompts ─ repeat_interleave ─► Generation::generate ─► Environment::step ─► rewards, or none
//!                 ▲ refit when stale                             │
//!                 │                            Policy::log_probs, ::reference_log_probs
//!                 └────────── Policy::train ◄─── advantages ◄────┘
//! ```
//!
//! The interfaces are NeMo RL's `PolicyInterface`, `GenerationInterface` and `EnvironmentInterface`; [`Grpo::step`] calls them in
//! the documented order. The implementor provides losses and models. A failed rollout has no reward: it is masked out of the
//! baseline and of the loss, and never counts as 0.
//!
//! [`advantages`] and [`message_log`] are what a step computes outside the model: advantages of rewards, and token masks of message logs.

pub mod advantages;
mod grpo;
mod mark;
pub mod message_log;
mod rollouts;

use std::future::Future;

use gym_core::group::Batch;
use gym_core::{CallContext, Error, Result};

pub use grpo::{Grpo, GrpoConfig, GrpoStep, StepDurations};
pub use mark::StepMark;
pub use rollouts::{ROLLOUT_COLUMN, RolloutEnvironment, TASK_COLUMN};

/// The model to train, called by [`Grpo::step`], which ends with the first error of a method.
pub trait PolicyInterface: Sync {
    /// The loss to minimize, as the policy's workers define it.
    type Loss: Sync;
    /// Statistics that a training step reports.
    type Stats: Send;

    /// Returns the log probabilities of the generated tokens under the current weights: one row for each row of the batch.
    fn log_probs(&self, cx: &CallContext, batch: &Batch) -> impl Future<Output = Result<Batch>> + Send;

    /// Returns the same log probabilities under the weights of the reference model.
    fn reference_log_probs(&self, cx: &CallContext, batch: &Batch) -> impl Future<Output = Result<Batch>> + Send;

    /// Runs one optimizer step over the batch.
    fn train(
        &self,
        cx: &CallContext,
        batch: Batch,
        loss: &Self::Loss,
    ) -> impl Future<Output = Result<Self::Stats>> + Send;
}

/// The engine that answers prompts, called by [`Grpo::step`], which ends with the first error of a method.
pub trait GenerationInterface: Sync {
    /// Loads the policy's current weights. Called before the first [`GenerationInterface::generate`] and after each training
    /// step. If the call fails, it is repeated before the next `generate`.
    fn refit(&self, cx: &CallContext) -> impl Future<Output = Result<()>> + Send;

    /// Answers each row of prompts: returns the same rows with additional columns for the answers.
    fn generate(&self, cx: &CallContext, prompts: &Batch) -> impl Future<Output = Result<Batch>> + Send;
}

/// The environment that scores generations, called by [`Grpo::step`], which ends with the first error of a method.
pub trait EnvironmentInterface: Sync {
    /// Runs each row to its end and returns the rewards.
    fn step(&self, cx: &CallContext, generations: &Batch) -> impl Future<Output = Result<EnvironmentReturn>> + Send;
}

/// The environment's results for a batch, row by row.
#[derive(Clone, Debug, Default)]
pub struct EnvironmentReturn {
    /// The reward of each row; `None` if the rollout failed or has no score.
    pub rewards: Vec<Option<f32>>,
    /// Additional columns for training, with the same number of rows; may be empty.
    pub columns: Batch,
}

impl EnvironmentReturn {
    /// Returns these rewards without additional columns.
    #[must_use]
    pub fn new(rewards: Vec<Option<f32>>) -> Self {
        Self { rewards, columns: Batch::empty() }
    }
}

/// Adds all columns of `more` to those of `batch`; a column of the same name is replaced.
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
