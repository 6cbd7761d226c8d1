//! One step of group relative policy optimisation, in the order of NeMo RL's `grpo_train`.

use std::time::Duration;

use gym_core::group::health::Skips;
use gym_core::group::train::advantages::{Baselines, Comparison};
use gym_core::group::{Batch, Tensor};
use gym_core::{CallContext, Code, Error, Result};
use tokio::time::Instant;

use crate::group::train::{EnvironmentInterface, GenerationInterface, PolicyInterface, check_rows, with_columns_of};

/// What is fixed over a training run. The names are NeMo RL's.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrpoConfig {
    /// Answers to each prompt; they are each other's baseline.
    pub num_generations_per_prompt: usize,
    /// Whether a row's own reward stays out of its baseline.
    pub use_leave_one_out_baseline: bool,
    /// Whether advantages are divided by the standard deviation of their group.
    pub normalize_rewards: bool,
    /// Prompts that the run may leave out because none of their answers has a reward; `None`: any number.
    pub max_skipped_prompts: Option<u32>,
}

impl Default for GrpoConfig {
    /// NeMo RL's: 16 generations, both switches on. Any number of prompts may be left out.
    fn default() -> Self {
        Self {
            num_generations_per_prompt: 16,
            use_leave_one_out_baseline: true,
            normalize_rewards: true,
            max_skipped_prompts: None,
        }
    }
}

/// A training run's state between steps: whether the generation engine has the policy's weights.
#[derive(Debug)]
pub struct Grpo {
    config: GrpoConfig,
    skips: Option<Skips>,
    stale: bool,
    steps: u64,
}

/// What a step came to.
#[derive(Clone, Debug)]
pub struct GrpoStep<S> {
    /// Its number, from 1.
    pub number: u64,
    /// What the policy reports of its training.
    pub stats: S,
    /// The mean over the rows that have a reward.
    pub reward_mean: f64,
    /// Rows that have a reward.
    pub scored: usize,
    /// Rows without: masked, not trained on.
    pub unscored: usize,
    /// Where the time went.
    pub durations: StepDurations,
}

/// Where a step's time went. The fields are NeMo RL's timer labels.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepDurations {
    /// Weights to the generation engine; zero when it had them.
    pub prepare_for_generation: Duration,
    /// Answers.
    pub generation: Duration,
    /// The environment.
    pub reward_calculation: Duration,
    /// Both passes over the answers.
    pub policy_and_reference_logprobs: Duration,
    /// The optimiser step.
    pub policy_training: Duration,
}

impl Grpo {
    /// A run that has not begun: the generation engine is refit before its first answer.
    ///
    /// # Errors
    /// `InvalidArgument` without generations.
    pub fn new(config: GrpoConfig) -> Result<Self> {
        if config.num_generations_per_prompt == 0 {
            return Err(Error::invalid("num_generations_per_prompt must be at least 1"));
        }
        let skips = config.max_skipped_prompts.map(Skips::new);
        Ok(Self { config, skips, stale: true, steps: 0 })
    }

    /// Refit if stale, generate, step, log probs, reference log probs, advantages, train.
    ///
    /// What [`PolicyInterface::train`] gets beside the generations' and the policy's own columns, one value a row, all `float32`:
    /// `total_reward` (0 where there is none), `sample_mask` (1 where there is one, else 0), `baseline`, `std`, `advantages`.
    ///
    /// # Errors
    /// The first error of an interface; `FailedPrecondition` when no row has a reward, or more prompts than may be are without one.
    /// Nothing was trained then.
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
        // From here on the weights may have changed, also when the answer is lost.
        self.stale = true;
        let stats = policy.train(cx, training, loss).await?;
        durations.policy_training = stopwatch.next();
        self.steps += 1;
        let unscored = scores.rewards.len() - scored;
        Ok(GrpoStep { number: self.steps, stats, reward_mean, scored, unscored, durations })
    }

    /// Counts the prompts of which no answer has a reward.
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

    /// The generations with their rewards and advantages, the mean reward, and how many rows have one.
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
        // What a masked row would have been worth is nobody's business.
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

/// A stop watch.
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
