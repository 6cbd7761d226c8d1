//! One step of group relative policy optimization, in the order of NeMo RL's `grpo_train`.

use std::time::Duration;

use gym_core::group::health::Skips;
use gym_core::group::train::advantages::{Baselines, Comparison};
use gym_core::group::{Batch, Tensor};
use gym_core::{CallContext, Code, Error, Result};
use tokio::time::Instant;

use crate::group::train::{EnvironmentInterface, GenerationInterface, PolicyInterface, check_rows, with_columns_of};

/// Settings of a training run. The names are those of NeMo RL.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrpoConfig {
    /// Number of answers to each prompt; their rewards form the baseline of each other. Default: 16.
    pub num_generations_per_prompt: usize,
    /// Excludes a row's own reward from its baseline. Default: `true`.
    pub use_leave_one_out_baseline: bool,
    /// Divides advantages by the standard deviation of their group. Default: `true`.
    pub normalize_rewards: bool,
    /// Maximum number of prompts that the run may skip because none of their answers has a reward. Default: `None`, no limit.
    pub max_skipped_prompts: Option<u32>,
}

impl Default for GrpoConfig {
    /// Returns NeMo RL's defaults: 16 generations and both switches on. Any number of prompts may be skipped.
    fn default() -> Self {
        Self {
            num_generations_per_prompt: 16,
            use_leave_one_out_baseline: true,
            normalize_rewards: true,
            max_skipped_prompts: None,
        }
    }
}

/// The state of a training run between steps, which records whether the generation engine has the policy's current weights.
#[derive(Debug)]
pub struct Grpo {
    config: GrpoConfig,
    skips: Option<Skips>,
    stale: bool,
    steps: u64,
}

/// The result of a step.
#[derive(Clone, Debug)]
pub struct GrpoStep<S> {
    /// Number of the step, from 1.
    pub number: u64,
    /// The policy's statistics of its training.
    pub stats: S,
    /// Mean reward over the rows that have one.
    pub reward_mean: f64,
    /// Number of rows that have a reward.
    pub scored: usize,
    /// Number of rows without a reward: masked and not trained on.
    pub unscored: usize,
    /// Durations of the phases.
    pub durations: StepDurations,
}

/// Durations of a step's phases. The fields are NeMo RL's timer labels.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepDurations {
    /// Transfer of the weights to the generation engine; zero if the engine had them.
    pub prepare_for_generation: Duration,
    /// Generation of the answers.
    pub generation: Duration,
    /// Scoring by the environment.
    pub reward_calculation: Duration,
    /// Both passes of log probabilities over the answers.
    pub policy_and_reference_logprobs: Duration,
    /// Training step of the policy.
    pub policy_training: Duration,
}

impl Grpo {
    /// Creates a run before its first step: the generation engine is refit before its first answer.
    ///
    /// # Errors
    /// `InvalidArgument` if `num_generations_per_prompt` is zero.
    pub fn new(config: GrpoConfig) -> Result<Self> {
        if config.num_generations_per_prompt == 0 {
            return Err(Error::invalid("num_generations_per_prompt must be at least 1"));
        }
        let skips = config.max_skipped_prompts.map(Skips::new);
        Ok(Self { config, skips, stale: true, steps: 0 })
    }

    /// Runs one step: refit if the weights are stale, generate, score, log probabilities, reference log probabilities,
    /// advantages, train.
    ///
    /// Besides the columns of the generations and of the policy, [`PolicyInterface::train`] receives these columns with one
    /// `float32` value per row: `total_reward` (0 without a reward), `sample_mask` (1 with a reward, else 0), `baseline`, `std`,
    /// `advantages`.
    ///
    /// # Errors
    /// The first error of an interface. `FailedPrecondition` if no row has a reward, or if more prompts than
    /// `max_skipped_prompts` have none; nothing was trained then.
    pub async fn step<P: PolicyInterface, G: GenerationInterface, E: EnvironmentInterface>(
        &mut self,
        cx: &CallContext,
        (policy, generation, environment): (&P, &G, &E),
        prompts: &Batch,
        loss: &P::Loss,
    ) -> Result<GrpoStep<P::Stats>> {
        let prompts = prompts.repeat_interleave(self.config.num_generations_per_prompt)?;
        let mut stopwatch = Stopwatch(Instant::now());
        let mut durations = StepDurations::default();
        if self.stale {
            generation.refit(cx).await?;
            self.stale = false;
            durations.prepare_for_generation = stopwatch.next();
        }
        let generations = generation.generate(cx, &prompts).await?;
        check_rows(generations.rows(), prompts.rows(), "generate")?;
        durations.generation = stopwatch.next();

        let scores = environment.step(cx, &generations).await?;
        check_rows(scores.rewards.len(), generations.rows(), "environment step")?;
        self.skip_unscored(&scores.rewards)?;
        durations.reward_calculation = stopwatch.next();

        let log_probs = policy.log_probs(cx, &generations).await?;
        let reference = policy.reference_log_probs(cx, &generations).await?;
        durations.policy_and_reference_logprobs = stopwatch.next();

        let (training, reward_mean, scored) = self.training_batch(generations, &scores.rewards)?;
        let training = with_columns_of(training, &scores.columns, "environment step")?;
        let training = with_columns_of(training, &log_probs, "log probs")?;
        let training = with_columns_of(training, &reference, "reference log probs")?;
        // The weights may change from here on, even if the response is lost.
        self.stale = true;
        let stats = policy.train(cx, training, loss).await?;
        durations.policy_training = stopwatch.next();
        self.steps += 1;
        let unscored = scores.rewards.len() - scored;
        Ok(GrpoStep { number: self.steps, stats, reward_mean, scored, unscored, durations })
    }

    /// Counts the prompts whose answers all lack a reward.
    fn skip_unscored(&mut self, rewards: &[Option<f32>]) -> Result<()> {
        let Some(skips) = &mut self.skips else { return Ok(()) };
        for (prompt, rewards) in rewards.chunks(self.config.num_generations_per_prompt).enumerate() {
            if rewards.iter().all(Option::is_none) {
                let why = format!("none of the {} rollouts of prompt {prompt} has a reward", rewards.len());
                skips.skip(Error::not_started(Code::FailedPrecondition, why))?;
            }
        }
        Ok(())
    }

    /// Returns the generations with their rewards and advantages, the mean reward, and the number of rows with a reward.
    fn training_batch(&self, generations: Batch, rewards: &[Option<f32>]) -> Result<(Batch, f64, usize)> {
        let rows = rewards.len();
        let scored = rewards.iter().flatten().count();
        if scored == 0 {
            let message = format!("none of {rows} rollouts has a reward: there is nothing to train on");
            return Err(Error::not_started(Code::FailedPrecondition, message).about("grpo step"));
        }
        let group = self.config.num_generations_per_prompt;
        let prompts: Vec<usize> = (0..rows).map(|row| row / group).collect();
        let valid: Vec<bool> = rewards.iter().map(Option::is_some).collect();
        let values: Vec<f64> = rewards.iter().map(|reward| f64::from(reward.unwrap_or(0.0))).collect();
        let compare =
            if self.config.use_leave_one_out_baseline { Comparison::LeaveOneOut } else { Comparison::WholeGroup };
        let baselines = Baselines::of_groups(&prompts, &values, &valid, compare)?;
        let advantages = baselines.advantages(&values, self.config.normalize_rewards)?;
        // The advantage of a masked row is 0.
        let advantages = advantages.iter().zip(&valid).map(|(advantage, valid)| if *valid { *advantage } else { 0.0 });
        let column = |values: &mut dyn Iterator<Item = f64>| {
            Tensor::from_vec([rows], values.map(|value| value as f32).collect::<Vec<f32>>())
        };
        let training = generations
            .with("total_reward", column(&mut values.iter().copied())?)?
            .with("sample_mask", column(&mut valid.iter().map(|valid| f64::from(u8::from(*valid))))?)?
            .with("baseline", column(&mut baselines.mean.iter().copied())?)?
            .with("std", column(&mut baselines.deviation.iter().copied())?)?
            .with("advantages", column(&mut { advantages })?)?;
        let sum: f64 = rewards.iter().flatten().map(|reward| f64::from(*reward)).sum();
        Ok((training, sum / scored as f64, scored))
    }
}

/// A stopwatch.
struct Stopwatch(Instant);

impl Stopwatch {
    fn next(&mut self) -> Duration {
        let now = Instant::now();
        now.duration_since(std::mem::replace(&mut self.0, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_without_a_reward_are_left_out_within_the_budget_of_the_run() {
        let two_lost = [None, None, Some(1.0), None, None, None];
        let run = |max_skipped_prompts| {
            let config = GrpoConfig { num_generations_per_prompt: 2, max_skipped_prompts, ..GrpoConfig::default() };
            Grpo::new(config).expect("generations")
        };
        let mut any = run(None);
        (0..9).for_each(|_| any.skip_unscored(&two_lost).expect("no budget was given"));
        let mut three = run(Some(3));
        three.skip_unscored(&two_lost).expect("two of three");
        let error = three.skip_unscored(&two_lost).expect_err("the fourth");
        assert_eq!(error.code(), Code::FailedPrecondition);
        let text = error.to_string();
        assert!(text.contains("the budget of 3 skipped prompts is spent"), "{text}");
        assert!(text.contains("none of the 2 rollouts of prompt 2 has a reward"), "{text}");
    }
}
