//! The figures of one agent's recorded rollouts: rewards, pass@k, the course of the episodes and their duration.

use std::time::Duration;

use gym_core::rollout::EpisodeRecord;
use hdrhistogram::Histogram;
use serde::Serialize;

use super::AgentScore;
use super::rewards::{RewardBin, RewardHistogram};
use super::tasks::{BestOfK, PassRate, TaskScores};

/// The contribution of one recorded rollout to the figures of its agent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::collect) struct RolloutFigures {
    /// The reward, if there is one that counts.
    pub(in crate::collect) reward: Option<f64>,
    /// Duration of the attempt that was recorded.
    pub(in crate::collect) took: Option<Duration>,
    /// The course of the episode; `None` if its agent does not report it.
    pub(in crate::collect) episode: Option<EpisodeFigures>,
}

/// The part of [`EpisodeRecord`] that is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::collect) struct EpisodeFigures {
    pub(in crate::collect) turns: u32,
    pub(in crate::collect) tool_errors: u32,
    pub(in crate::collect) tool_failures: u32,
    pub(in crate::collect) truncated: bool,
    /// Tokens that the model read and wrote, if both are known.
    pub(in crate::collect) tokens: Option<(u32, u32)>,
    /// Turns that do not continue the turn before; `None` if no two were compared.
    pub(in crate::collect) prefix_breaks: Option<u32>,
    pub(in crate::collect) completion_unverified: bool,
}

impl From<&EpisodeRecord> for EpisodeFigures {
    fn from(record: &EpisodeRecord) -> Self {
        Self {
            turns: record.turns,
            tool_errors: record.tool_errors,
            tool_failures: record.tool_failures,
            truncated: record.truncated.is_some(),
            tokens: record.input_tokens.zip(record.output_tokens),
            prefix_breaks: record.prefix_breaks,
            completion_unverified: record.completion_unverified,
        }
    }
}

/// The figures of one agent, over all rollouts in the rollouts file. Failed attempts are in none of them, so the figures of rewards are those of
/// the rollouts that succeeded; `missing` says how many did not.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct AgentSummary {
    /// Recorded rollouts.
    pub rollouts: u64,
    /// Requested rollouts: the rows of the materialized inputs.
    pub expected: u64,
    /// Requested rollouts that are not recorded.
    pub missing: u64,
    /// Requested tasks.
    pub tasks: u64,
    /// Those of them with at least one missing rollout.
    pub tasks_incomplete: u64,
    /// Those of them without a single recorded rollout.
    pub tasks_without_rollout: u64,
    /// Those of them with a reward. A masked result (`mask_sample`) has none; it is in no figure of rewards.
    pub scored: u64,
    /// Those of them without a reward.
    pub unscored: u64,
    /// Mean of the rewards; `null` without any.
    pub mean_reward: Option<f64>,
    /// The smallest reward.
    pub min_reward: Option<f64>,
    /// The largest reward.
    pub max_reward: Option<f64>,
    /// Distribution of the rewards: each value if there are at most eight, otherwise at most twelve bins of equal width.
    pub reward_histogram: Vec<RewardBin>,
    /// pass@k for 1, 2, 4, … and the largest number of scored rollouts of one task. Empty without repeats, and if a reward is neither 0
    /// nor 1.
    pub pass_at_k: Vec<PassRate>,
    /// The best of k, if a reward is neither 0 nor 1; `null` otherwise, and without repeats.
    pub best_of_k: Option<BestOfK>,
    /// Rollouts whose agent reported the course of the episode (`_gym_episode.turns`); the agents of this SDK do. The following figures
    /// are about these rollouts, and `null` without any.
    pub episodes: u64,
    /// Share of the episodes that a limit ended, from 0 to 1.
    pub truncated_share: Option<f64>,
    /// Mean number of model responses.
    pub mean_turns: Option<f64>,
    /// Tool calls whose error went to the model.
    pub tool_errors: Option<u64>,
    /// Those of `tool_errors` that the model did not cause.
    pub tool_failures: Option<u64>,
    /// Turns whose prompt does not begin with the token ids of the turn before (`_gym_episode.prefix_breaks`); `null` if no two turns have ids.
    pub prefix_breaks: Option<u64>,
    /// Episodes with a response that the engine may have aborted (`_gym_episode.completion_unverified`).
    pub completion_unverified: Option<u64>,
    /// Tokens of the model; `null` if no response told them.
    pub tokens: Option<TokenSummary>,
    /// Duration of the recorded attempts, without earlier attempts and waits; `null` if no row has it.
    pub latency: Option<LatencySummary>,
}

/// Tokens of the model, of the episodes whose responses told them (`usage`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TokenSummary {
    /// Number of these episodes.
    pub episodes: u64,
    /// Tokens that the model read, over all turns of all these episodes.
    pub input: u64,
    /// Tokens that the model wrote.
    pub output: u64,
}

/// Durations, accurate to 1 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LatencySummary {
    /// Half of the rollouts took at most this long.
    pub p50_seconds: f64,
    /// 99 % of the rollouts took at most this long.
    pub p99_seconds: f64,
    /// The longest duration.
    pub max_seconds: f64,
}

/// Counts the recorded rollouts of one agent.
#[derive(Debug)]
pub(super) struct AgentFigures {
    pub(super) score: AgentScore,
    rewards: RewardHistogram,
    pub(super) tasks: TaskScores,
    /// In microseconds. Its size depends on the longest duration: 30 kB for two hours.
    latencies: Histogram<u64>,
    episodes: u64,
    truncated: u64,
    turns: u64,
    tool_errors: u64,
    tool_failures: u64,
    prefix_breaks: Option<u64>,
    completion_unverified: u64,
    tokens: TokenSummary,
}

impl Default for AgentFigures {
    fn default() -> Self {
        Self {
            score: AgentScore::default(),
            rewards: RewardHistogram::default(),
            tasks: TaskScores::default(),
            latencies: Histogram::new(2).expect("two significant digits are supported"),
            episodes: 0,
            truncated: 0,
            turns: 0,
            tool_errors: 0,
            tool_failures: 0,
            prefix_breaks: None,
            completion_unverified: 0,
            tokens: TokenSummary::default(),
        }
    }
}

impl AgentFigures {
    /// Creates the figures of an agent with these requested tasks, before its first rollout.
    pub(super) fn expecting(tasks: TaskScores) -> Self {
        Self { tasks, ..Self::default() }
    }

    pub(super) fn add(&mut self, task: u32, rollout: &RolloutFigures) {
        // A reward that is not finite is no reward, as in a training step.
        let reward = rollout.reward.filter(|reward| reward.is_finite());
        self.tasks.record(task, reward);
        match reward {
            Some(reward) => {
                self.score.count += 1;
                self.score.reward_sum += reward;
                self.rewards.add(reward);
            }
            None => self.score.unscored += 1,
        }
        if let Some(took) = rollout.took {
            // Fails only beyond 2^63 µs, or without memory for a larger histogram.
            let _ = self.latencies.record(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        }
        if let Some(episode) = rollout.episode {
            self.episodes += 1;
            self.truncated += u64::from(episode.truncated);
            self.turns += u64::from(episode.turns);
            self.tool_errors += u64::from(episode.tool_errors);
            self.tool_failures += u64::from(episode.tool_failures);
            self.completion_unverified += u64::from(episode.completion_unverified);
            if let Some(breaks) = episode.prefix_breaks {
                self.prefix_breaks = Some(self.prefix_breaks.unwrap_or(0) + u64::from(breaks));
            }
            if let Some((input, output)) = episode.tokens {
                self.tokens.episodes += 1;
                self.tokens.input += u64::from(input);
                self.tokens.output += u64::from(output);
            }
        }
    }

    pub(super) fn summary(&self) -> AgentSummary {
        let AgentScore { count, reward_sum, unscored } = self.score;
        let share = |part: u64, of: u64| (of > 0).then(|| part as f64 / of as f64);
        let range = self.rewards.range();
        let known = |count: u64| (self.episodes > 0).then_some(count);
        let seconds = |quantile| self.latencies.value_at_quantile(quantile) as f64 / 1e6;
        let mut summary = AgentSummary {
            rollouts: count + unscored,
            scored: count,
            unscored,
            mean_reward: (count > 0).then(|| reward_sum / count as f64),
            min_reward: range.map(|(min, _)| min),
            max_reward: range.map(|(_, max)| max),
            reward_histogram: self.rewards.bins(),
            pass_at_k: self.tasks.pass_rates(),
            best_of_k: self.tasks.best_of_k(),
            episodes: self.episodes,
            truncated_share: share(self.truncated, self.episodes),
            mean_turns: share(self.turns, self.episodes),
            tool_errors: known(self.tool_errors),
            tool_failures: known(self.tool_failures),
            prefix_breaks: self.prefix_breaks,
            completion_unverified: known(self.completion_unverified),
            tokens: (self.tokens.episodes > 0).then_some(self.tokens),
            latency: (!self.latencies.is_empty()).then(|| LatencySummary {
                p50_seconds: seconds(0.5),
                p99_seconds: seconds(0.99),
                max_seconds: seconds(1.0),
            }),
            ..AgentSummary::default()
        };
        for task in self.tasks.coverage() {
            summary.expected += u64::from(task.expected);
            summary.missing += u64::from(task.missing);
            summary.tasks += 1;
            summary.tasks_incomplete += u64::from(task.missing > 0);
            summary.tasks_without_rollout += u64::from(task.recorded == 0);
        }
        summary
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn only_rollouts_with_a_reward_are_in_the_figures_of_rewards(
            rollouts in prop::collection::vec((0..20_u32, prop::option::of(-1.0..2.0)), 0..200)
        ) {
            let mut figures = AgentFigures::default();
            for (task, reward) in &rollouts {
                figures.add(*task, &RolloutFigures { reward: *reward, ..RolloutFigures::default() });
            }
            let summary = figures.summary();
            let rewards: Vec<f64> = rollouts.iter().filter_map(|(_, reward)| *reward).collect();
            prop_assert_eq!(summary.scored, rewards.len() as u64);
            prop_assert_eq!(summary.scored + summary.unscored, rollouts.len() as u64);
            prop_assert_eq!(summary.reward_histogram.iter().map(|bin| bin.count).sum::<u64>(), summary.scored);
            let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
            prop_assert!(summary.mean_reward.map_or(rewards.is_empty(), |is| (is - mean).abs() < 1e-9));
            prop_assert_eq!((summary.episodes, summary.mean_turns, summary.latency), (0, None, None));
        }

        #[test]
        fn latencies_are_those_of_the_sorted_durations_to_one_percent(micros in prop::collection::vec(1..10_000_000_000_u64, 1..300)) {
            let mut figures = AgentFigures::default();
            for micros in &micros {
                let took = Some(Duration::from_micros(*micros));
                figures.add(0, &RolloutFigures { took, ..RolloutFigures::default() });
            }
            let mut sorted = micros.clone();
            sorted.sort_unstable();
            let nearest = |quantile: f64| {
                let rank = (quantile * sorted.len() as f64).ceil() as usize;
                sorted[rank.max(1) - 1] as f64 / 1e6
            };
            let latency = figures.summary().latency.unwrap();
            for (is, expected) in
                [(latency.p50_seconds, nearest(0.5)), (latency.p99_seconds, nearest(0.99)), (latency.max_seconds, nearest(1.0))]
            {
                prop_assert!((is / expected - 1.0).abs() < 0.01, "{is} and {expected}");
            }
        }
    }

    #[test]
    fn the_figures_of_episodes_are_about_those_that_were_reported() {
        let mut figures = AgentFigures::default();
        let episode = EpisodeFigures {
            turns: 3,
            tool_errors: 2,
            tool_failures: 1,
            truncated: true,
            tokens: Some((30, 4)),
            prefix_breaks: Some(1),
            completion_unverified: true,
        };
        for episode in [Some(episode), Some(EpisodeFigures { turns: 2, ..EpisodeFigures::default() }), None] {
            figures.add(0, &RolloutFigures { episode, ..RolloutFigures::default() });
        }
        let summary = figures.summary();
        assert_eq!((summary.rollouts, summary.episodes), (3, 2));
        assert_eq!((summary.truncated_share, summary.mean_turns), (Some(0.5), Some(2.5)));
        assert_eq!((summary.tool_errors, summary.tool_failures), (Some(2), Some(1)));
        assert_eq!((summary.prefix_breaks, summary.completion_unverified), (Some(1), Some(1)));
        assert_eq!(summary.tokens, Some(TokenSummary { episodes: 1, input: 30, output: 4 }));
    }
}
