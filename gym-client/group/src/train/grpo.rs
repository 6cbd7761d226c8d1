//! One step of group relative policy optimization, in the order of NeMo RL's `grpo_train`.

use std::time::Duration;

use gym_core::group::{Batch, Tensor};
use gym_core::{CallContext, Code, Error, Result};
use tokio::time::Instant;

use crate::health::Skips;
use crate::train::advantages::{Baselines, Comparison};
use crate::train::{EnvironmentInterface, GenerationInterface, PolicyInterface, check_rows, with_columns_of};

/// Settings of a training run. The names are those of NeMo RL.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct GrpoConfig {
    /// Number of answers to each prompt; their rewards form the baseline of each other. Default: 16.
    pub num_generations_per_prompt: usize,
    /// Excludes a row's own reward from its baseline. Default: `true`.
    pub use_leave_one_out_baseline: bool,
    /// Divides advantages by the standard deviation of their group. Default: `true`.
    pub normalize_rewards: bool,
    /// Maximum number of prompts that the run may drop because too few of their answers have a reward: fewer than two, or none of a
    /// single one. Default: `None`, no limit.
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
#[non_exhaustive]
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
    /// Number of prompts that were dropped because too few of their answers have a reward. Their scored rows, which have no reward to
    /// compare theirs with, are masked too.
    pub dropped_prompts: usize,
    /// Number of scored rows of the dropped prompts.
    pub dropped_rows: usize,
    /// Durations of the phases.
    pub durations: StepDurations,
}

/// Durations of a step's phases. The fields are NeMo RL's timer labels.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
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
    /// `float32` value per row: `total_reward` (0 without a reward), `sample_mask` (1 if the row is trained on, else 0), `baseline`,
    /// `std`, `advantages`. A reward that is not a finite number is no reward. A row without a reward takes part in no mean, deviation or
    /// advantage. A prompt with fewer than two rewards is dropped, because nothing is left to compare: all its rows are masked.
    ///
    /// # Errors
    /// The first error of an interface. `FailedPrecondition` if every prompt was dropped, or more prompts than
    /// `max_skipped_prompts`; nothing was trained then.
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
        let votes = self.votes(&scores.rewards)?;
        durations.reward_calculation = stopwatch.next();

        let log_probs = policy.log_probs(cx, &generations).await?;
        let reference = policy.reference_log_probs(cx, &generations).await?;
        durations.policy_and_reference_logprobs = stopwatch.next();

        let training = self.training_batch(generations, &votes)?;
        let training = with_columns_of(training, &scores.columns, "environment step")?;
        let training = with_columns_of(training, &log_probs, "log probs")?;
        let training = with_columns_of(training, &reference, "reference log probs")?;
        // The weights may change from here on, even if the response is lost.
        self.stale = true;
        let stats = policy.train(cx, training, loss).await?;
        durations.policy_training = stopwatch.next();
        self.steps += 1;
        let Votes { reward_mean, scored, dropped_prompts, dropped_rows, .. } = votes;
        let unscored = scores.rewards.len() - scored;
        let number = self.steps;
        Ok(GrpoStep { number, stats, reward_mean, scored, unscored, dropped_prompts, dropped_rows, durations })
    }

    /// Decides which rows vote: those with a reward whose prompt has another one.
    fn votes(&mut self, rewards: &[Option<f32>]) -> Result<Votes> {
        let group = self.config.num_generations_per_prompt;
        let least = group.min(2);
        let finite = |reward: &Option<f32>| reward.filter(|reward| reward.is_finite()).map(f64::from);
        let rewards: Vec<Option<f64>> = rewards.iter().map(finite).collect();
        let (mut dropped_prompts, mut dropped_rows) = (0, 0);
        let mut voting = Vec::with_capacity(rewards.len());
        for (prompt, answers) in rewards.chunks(group).enumerate() {
            let scored = answers.iter().flatten().count();
            let kept = scored >= least;
            voting.extend(answers.iter().map(|reward| kept && reward.is_some()));
            if kept {
                continue;
            }
            (dropped_prompts, dropped_rows) = (dropped_prompts + 1, dropped_rows + scored);
            let why = format!("prompt {prompt} has {scored} rewards of {group} rollouts, and needs {least}");
            tracing::warn!(prompt, scored, rollouts = group, "a prompt has too few rewards; it is dropped");
            if let Some(skips) = &mut self.skips {
                skips.skip(Error::not_started(Code::FailedPrecondition, why))?;
            }
        }
        let scored = rewards.iter().flatten().count();
        if !voting.contains(&true) {
            let rows = rewards.len();
            let message = format!(
                "{scored} of {rows} rollouts have a reward, and no prompt has {least}: there is nothing to train on"
            );
            return Err(Error::not_started(Code::FailedPrecondition, message).about("grpo step"));
        }
        let reward_mean = rewards.iter().flatten().sum::<f64>() / scored as f64;
        Ok(Votes { rewards, voting, scored, reward_mean, dropped_prompts, dropped_rows })
    }

    /// Returns the generations with their rewards and advantages.
    fn training_batch(&self, generations: Batch, votes: &Votes) -> Result<Batch> {
        let rows = votes.rewards.len();
        let group = self.config.num_generations_per_prompt;
        let prompts: Vec<usize> = (0..rows).map(|row| row / group).collect();
        let values: Vec<f64> = votes.rewards.iter().map(|reward| reward.unwrap_or(0.0)).collect();
        let compare =
            if self.config.use_leave_one_out_baseline { Comparison::LeaveOneOut } else { Comparison::WholeGroup };
        let baselines = Baselines::of_groups(&prompts, &values, &votes.voting, compare)?;
        let advantages = baselines.advantages(&values, self.config.normalize_rewards)?;
        let column = |values: &mut dyn Iterator<Item = f64>| {
            Tensor::from_vec([rows], values.map(|value| value as f32).collect::<Vec<f32>>())
        };
        generations
            .with("total_reward", column(&mut values.iter().copied())?)?
            .with("sample_mask", column(&mut votes.voting.iter().map(|votes| f64::from(u8::from(*votes))))?)?
            .with("baseline", column(&mut baselines.mean.iter().copied())?)?
            .with("std", column(&mut baselines.deviation.iter().copied())?)?
            .with("advantages", column(&mut advantages.into_iter())?)
    }
}

/// The rows of a step that take part in its statistics.
#[derive(Debug, PartialEq)]
struct Votes {
    rewards: Vec<Option<f64>>,
    /// Whether the row is trained on.
    voting: Vec<bool>,
    scored: usize,
    reward_mean: f64,
    dropped_prompts: usize,
    dropped_rows: usize,
}

struct Stopwatch(Instant);

impl Stopwatch {
    fn next(&mut self) -> Duration {
        let now = Instant::now();
        now.duration_since(std::mem::replace(&mut self.0, now))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(num_generations_per_prompt: usize, max_skipped_prompts: Option<u32>) -> Grpo {
        let config = GrpoConfig { num_generations_per_prompt, max_skipped_prompts, ..GrpoConfig::default() };
        Grpo::new(config).expect("generations")
    }

    #[test]
    fn prompts_with_too_few_rewards_are_dropped_within_the_budget_of_the_run() {
        let dropped = [None, None, Some(1.0), None, Some(0.0), Some(1.0), None, Some(f32::NAN)];
        let mut any = run(2, None);
        for _ in 0..9 {
            let votes = any.votes(&dropped).expect("no budget was given");
            assert_eq!((votes.dropped_prompts, votes.dropped_rows, votes.scored), (3, 1, 3));
            assert_eq!(votes.voting, [false, false, false, false, true, true, false, false]);
        }
        let mut five = run(2, Some(5));
        five.votes(&dropped).expect("three of five");
        let error = five.votes(&dropped).expect_err("the sixth");
        assert_eq!(error.code(), Code::FailedPrecondition);
        let text = error.to_string();
        assert!(text.contains("the budget of 5 skipped prompts is spent"), "{text}");
        assert!(text.contains("prompt 3 has 0 rewards of 2 rollouts, and needs 2"), "{text}");
    }

    #[test]
    fn a_step_without_two_rewards_of_one_prompt_has_nothing_to_train_on() {
        let error = run(2, None).votes(&[Some(1.0), None, None, Some(0.5)]).expect_err("nothing to compare");
        let text = error.to_string();
        assert!(text.contains("2 of 4 rollouts have a reward, and no prompt has 2"), "{text}");
        let single = run(1, None).votes(&[Some(1.0), None]).expect("one answer to a prompt is not left over");
        assert_eq!((single.voting, single.dropped_prompts), (vec![true, false], 1));
    }

    proptest! {
        #[test]
        fn a_lost_rollout_has_no_influence_on_a_step(
            rewards in proptest::collection::vec(proptest::option::of(prop_oneof![Just(0.0_f32), Just(1.0), -2.0_f32..2.0]), 12),
            leave_one_out in any::<bool>(),
        ) {
            let mut run = run(4, None);
            run.config.use_leave_one_out_baseline = leave_one_out;
            let Ok(votes) = run.votes(&rewards) else {
                prop_assert!(rewards.chunks(4).all(|group| group.iter().flatten().count() < 2));
                return Ok(());
            };
            let batch = run.training_batch(Batch::empty(), &votes).expect("columns");
            let column = |name: &str| batch.column(name).expect("a column").dense().expect("dense").to_f64s().expect("numbers");
            let (mask, advantages, deviation) = (column("sample_mask"), column("advantages"), column("std"));
            let present: Vec<f64> = rewards.iter().flatten().map(|reward| f64::from(*reward)).collect();
            prop_assert!((votes.reward_mean - present.iter().sum::<f64>() / present.len() as f64).abs() < 1e-12);
            let mut dropped = (0, 0);
            for (prompt, group) in rewards.chunks(4).enumerate() {
                // The group as it would be if the lost members had never been there.
                let left: Vec<f64> = group.iter().flatten().map(|reward| f64::from(*reward)).collect();
                let compare = if leave_one_out { Comparison::LeaveOneOut } else { Comparison::WholeGroup };
                let alone = Baselines::of_groups(&vec![0; left.len()], &left, &vec![true; left.len()], compare).expect("a group");
                let expected = alone.advantages(&left, true).expect("advantages");
                let kept = left.len() >= 2;
                dropped = if kept { dropped } else { (dropped.0 + 1, dropped.1 + left.len()) };
                let mut member = 0;
                for (row, reward) in group.iter().enumerate() {
                    let row = prompt * 4 + row;
                    prop_assert_eq!(mask[row], f64::from(u8::from(kept && reward.is_some())));
                    if reward.is_none() || !kept {
                        prop_assert_eq!(advantages[row], 0.0);
                    } else {
                        prop_assert_eq!(advantages[row] as f32, expected[member] as f32);
                        prop_assert_eq!(deviation[row] as f32, alone.deviation[member] as f32);
                    }
                    member += usize::from(reward.is_some());
                }
            }
            prop_assert_eq!(dropped, (votes.dropped_prompts, votes.dropped_rows));
        }
    }
}
