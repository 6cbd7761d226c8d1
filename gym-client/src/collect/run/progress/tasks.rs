//! The rollouts of each task: how many were requested and recorded, and the rewards of its repeats for pass@k. Sixteen bytes for each task,
//! and sixteen more for a task with partial rewards.

use std::collections::BTreeMap;
use std::sync::Arc;

use gym_core::rollout::TaskKey;
use gym_core::rollout::metrics::passed_of_counts;
use serde::Serialize;

use crate::collect::input::rows::RowKey;

/// Tasks of one page. Agents usually have ranges of tasks, so that most pages are full.
const PAGE_TASKS: u32 = 16;

/// The share of tasks that pass within k rollouts, averaged over the tasks with at least k scored rollouts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PassRate {
    /// Rollouts of a task.
    pub k: u32,
    /// The mean over the tasks: the unbiased estimate.
    pub rate: f64,
    /// Number of tasks with at least k scored rollouts.
    pub tasks: u64,
}

/// The largest of the k rewards of a task, averaged over the tasks with k scored rollouts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BestOfK {
    /// The largest number of scored rollouts of one task.
    pub k: u32,
    /// The mean over the tasks.
    pub mean_reward: f64,
    /// Number of tasks with k scored rollouts.
    pub tasks: u64,
}

/// How many rollouts of a task were requested and recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TaskCoverage {
    /// `_ng_task_index`.
    pub task_index: u32,
    /// Requested rollouts: the rows of the materialized inputs.
    pub expected: u32,
    /// Rollouts in the rollouts file.
    pub recorded: u32,
    /// Requested rollouts that are not in the rollouts file.
    pub missing: u32,
}

/// The rollouts of one task.
#[derive(Clone, Copy, Debug, Default)]
struct TaskCounts {
    requested: u32,
    recorded: u32,
    /// Those recorded with a reward.
    scored: u32,
    /// Those with the reward 1.
    right: u32,
}

impl TaskCounts {
    fn coverage(self, task_index: u32) -> TaskCoverage {
        // A program that drives the rollouts itself requests none here.
        let expected = self.requested.max(self.recorded);
        TaskCoverage { task_index, expected, recorded: self.recorded, missing: expected - self.recorded }
    }
}

/// The requested tasks of each agent.
#[derive(Debug, Default)]
pub(in crate::collect) struct RequestedTasks {
    agents: BTreeMap<Arc<str>, TaskScores>,
    rows: InputRows,
}

/// The number of the input row of each rollout, from 1. Takes no memory for tasks that have a row each, in order.
#[derive(Debug, Default)]
pub(in crate::collect) struct InputRows {
    /// The first rows of tasks.
    tasks: BTreeMap<u32, u32>,
    /// The rows of rollouts that are not the first of their task: rows can be equal, or name one task.
    rollouts: BTreeMap<(u32, u32), u32>,
}

impl InputRows {
    fn add(&mut self, (task, rollout): (u32, u32), row: u32, is_first: bool) {
        if is_first && self.first(task) != row {
            self.tasks.insert(task, row);
        }
        if self.first(task) != row {
            self.rollouts.insert((task, rollout), row);
        }
    }

    fn first(&self, task: u32) -> u32 {
        self.tasks.get(&task).copied().unwrap_or(task.saturating_add(1))
    }

    pub(super) fn of(&self, key: TaskKey) -> u32 {
        let (task, rollout) = (key.task_index, key.rollout_index);
        self.rollouts.get(&(task, rollout)).copied().unwrap_or_else(|| self.first(task))
    }
}

impl RequestedTasks {
    /// Adds a rollout. `agent` is the name that its figures have.
    pub(in crate::collect) fn add(&mut self, task_index: i64, agent: &str) {
        // An index beyond the bound is reported when the row is read.
        let Ok(task) = u32::try_from(task_index) else { return };
        match self.agents.get_mut(agent) {
            Some(tasks) => tasks.request(task),
            None => self.agents.entry(agent.into()).or_default().request(task),
        }
    }

    /// Adds a rollout of this input row, counted from 1.
    pub(in crate::collect) fn add_of_row(&mut self, key: RowKey, agent: &str, row: u64) {
        let indices = (u32::try_from(key.task_index), u32::try_from(key.rollout_index), u32::try_from(row));
        if let (Ok(task), Ok(rollout), Ok(row)) = indices {
            let is_first = !self.agents.values().any(|tasks| tasks.has(task));
            self.rows.add((task, rollout), row, is_first);
        }
        self.add(key.task_index, agent);
    }

    pub(super) fn into_parts(self) -> (BTreeMap<Arc<str>, TaskScores>, InputRows) {
        (self.agents, self.rows)
    }
}

/// The rollouts of an agent by task.
#[derive(Clone, Debug, Default)]
pub(super) struct TaskScores {
    /// Sixteen tasks each, because task numbers are dense.
    pages: BTreeMap<u32, Box<[TaskCounts; PAGE_TASKS as usize]>>,
    /// The largest reward of each task that has a reward other than 0 and 1.
    partial: BTreeMap<u32, f64>,
}

impl TaskScores {
    fn counts(&mut self, task: u32) -> &mut TaskCounts {
        let page = self.pages.entry(task / PAGE_TASKS).or_default();
        &mut page[(task % PAGE_TASKS) as usize]
    }

    /// Counts a requested rollout.
    fn request(&mut self, task: u32) {
        self.counts(task).requested += 1;
    }

    /// Returns `true` if a rollout of the task is requested.
    fn has(&self, task: u32) -> bool {
        self.pages.get(&(task / PAGE_TASKS)).is_some_and(|page| page[(task % PAGE_TASKS) as usize].requested > 0)
    }

    /// Counts a recorded rollout, with its reward if it has one that counts.
    pub(super) fn record(&mut self, task: u32, reward: Option<f64>) {
        let counts = self.counts(task);
        let before = *counts;
        counts.recorded += 1;
        let Some(reward) = reward else { return };
        counts.scored += 1;
        counts.right += u32::from(reward == 1.0);
        if reward != 0.0 && reward != 1.0 {
            let best = match before {
                TaskCounts { scored: 0, .. } => f64::NEG_INFINITY,
                TaskCounts { right: 0, .. } => 0.0,
                TaskCounts { .. } => 1.0,
            };
            let best = self.partial.entry(task).or_insert(best);
            *best = best.max(reward);
        } else if let Some(best) = self.partial.get_mut(&task) {
            *best = best.max(reward);
        }
    }

    /// Returns the coverage of each task, in the order of the task index.
    pub(super) fn coverage(&self) -> impl Iterator<Item = TaskCoverage> {
        self.tasks().map(|(task, counts)| counts.coverage(task))
    }

    /// Returns pass@k for k = 1, 2, 4, … and the largest number of scored rollouts of one task. Empty if no task has two, and if there
    /// are partial rewards: nothing says which of them is a pass.
    pub(super) fn pass_rates(&self) -> Vec<PassRate> {
        let k_max = self.scored_max();
        if k_max < 2 || !self.partial.is_empty() {
            return Vec::new();
        }
        let powers = std::iter::successors(Some(1_u32), |k| k.checked_mul(2)).take_while(|k| *k < k_max);
        powers.chain([k_max]).map(|k| self.pass_rate(k)).collect()
    }

    fn pass_rate(&self, k: u32) -> PassRate {
        let passed = |counts: TaskCounts| passed_of_counts(counts.right as usize, counts.scored as usize, k as usize);
        let (tasks, sum) = self.sum_over(k, |_, counts| passed(counts).unwrap_or_default());
        PassRate { k, rate: sum / tasks as f64, tasks }
    }

    /// Returns the best of k if there are partial rewards and k is at least two. The k is the number of a task's scored rollouts, because the
    /// rewards of the first of them are not known.
    pub(super) fn best_of_k(&self) -> Option<BestOfK> {
        let k = self.scored_max();
        if k < 2 || self.partial.is_empty() {
            return None;
        }
        let best = |task, counts: TaskCounts| {
            self.partial.get(&task).copied().unwrap_or_else(|| f64::from(u8::from(counts.right > 0)))
        };
        let (tasks, sum) = self.sum_over(k, best);
        Some(BestOfK { k, mean_reward: sum / tasks as f64, tasks })
    }

    /// Returns the number of tasks with at least k scored rollouts, and the sum over them.
    fn sum_over(&self, k: u32, value: impl Fn(u32, TaskCounts) -> f64) -> (u64, f64) {
        let tasks = self.tasks().filter(|(_, counts)| counts.scored >= k);
        tasks.fold((0, 0.0), |(tasks, sum), (task, counts)| (tasks + 1, sum + value(task, counts)))
    }

    fn scored_max(&self) -> u32 {
        self.tasks().map(|(_, counts)| counts.scored).max().unwrap_or(0)
    }

    fn tasks(&self) -> impl Iterator<Item = (u32, TaskCounts)> {
        let pages = self.pages.iter().flat_map(|(page, tasks)| (page * PAGE_TASKS..).zip(tasks.iter().copied()));
        pages.filter(|(_, counts)| counts.requested + counts.recorded > 0)
    }
}

#[cfg(test)]
mod tests {
    use gym_core::rollout::metrics::{Sample, pass_at_k};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn without_repeats_there_is_no_pass_rate() {
        let mut scores = TaskScores::default();
        (0..40).for_each(|task| scores.record(task, Some(f64::from(task % 2))));
        assert_eq!(scores.pass_rates(), []);
    }

    fn rewards(partial: bool) -> impl Strategy<Value = Vec<Vec<f64>>> {
        let reward = match partial {
            false => prop_oneof![Just(0.0), Just(1.0)].boxed(),
            true => prop_oneof![Just(0.0), Just(1.0), Just(-1.0), Just(0.25), 0.0..2.0].boxed(),
        };
        prop::collection::vec(prop::collection::vec(reward, 0..10), 1..40)
    }

    #[test]
    fn each_rollout_has_the_row_that_it_was_made_of() {
        // Of three rows in order; of two rows that name one task, with another one between; of a row that is repeated; of two agents.
        let rows = [
            (0, 0, 1),
            (0, 1, 1),
            (1, 0, 2),
            (7, 0, 3),
            (2, 0, 4),
            (7, 1, 5),
            (7, 2, 5),
            (1, 1, 6),
            (3, 4, 8),
            (3, 1, 7),
        ];
        let mut requested = RequestedTasks::default();
        for (at, (task_index, rollout_index, row)) in rows.into_iter().enumerate() {
            requested.add_of_row(RowKey { task_index, rollout_index }, ["a", "b"][at % 2], row);
        }
        let (_, places) = requested.into_parts();
        for (task, rollout, row) in rows {
            assert_eq!(u64::from(places.of(TaskKey::new(task as u32, rollout as u32))), row, "{task}-{rollout}");
        }
        assert_eq!((places.tasks.len(), places.rollouts.len()), (3, 4));
    }

    proptest! {
        #[test]
        fn the_rates_are_those_of_the_metrics(tasks in any::<bool>().prop_flat_map(rewards), seed: u64) {
            let mut scores = TaskScores::default();
            // In the order in which rollouts end, which is any.
            let mut ended: Vec<(u32, f64)> =
                (0..).zip(&tasks).flat_map(|(task, rewards)| rewards.iter().map(move |reward| (task * 7, *reward))).collect();
            fastrand::Rng::with_seed(seed).shuffle(&mut ended);
            ended.iter().for_each(|(task, reward)| scores.record(*task, Some(*reward)));
            let samples: Vec<Vec<Sample>> =
                tasks.iter().map(|task| task.iter().copied().map(Sample::accuracy).collect()).collect();
            let expected = pass_at_k(&samples, false);
            let best = scores.best_of_k().map(|BestOfK { k, mean_reward, tasks }| PassRate { k, rate: mean_reward, tasks });
            let rates = scores.pass_rates();
            // Each collection has the one or the other.
            prop_assert!(rates.is_empty() || best.is_none());
            prop_assert_eq!(rates.is_empty() && best.is_none(), expected.k_max < 2);
            for PassRate { k, rate, tasks: counted } in rates.into_iter().chain(best) {
                let percent = expected.metrics[&format!("pass@{k}/accuracy")].as_f64().unwrap();
                prop_assert!((100.0 * rate - percent).abs() < 1e-9, "pass@{k}: {rate} and {percent} %");
                prop_assert_eq!(counted, tasks.iter().filter(|task| task.len() >= k as usize).count() as u64);
            }
        }
    }

    proptest! {
        #[test]
        fn a_task_is_covered_by_what_was_requested_and_recorded_whether_or_not_it_has_a_reward(
            requested in prop::collection::vec((0..40_u32, 1..5_u32), 0..30),
            recorded in prop::collection::vec((0..40_u32, prop::option::of(0.0..1.0)), 0..60),
        ) {
            let (mut scores, mut expected) = (TaskScores::default(), BTreeMap::<u32, (u32, u32)>::new());
            for (task, count) in requested {
                (0..count).for_each(|_| scores.request(task));
                expected.entry(task).or_default().0 += count;
            }
            for (task, reward) in recorded {
                scores.record(task, reward);
                expected.entry(task).or_default().1 += 1;
            }
            let expected = expected.into_iter().map(|(task_index, (requested, recorded))| {
                let expected = requested.max(recorded);
                TaskCoverage { task_index, expected, recorded, missing: expected - recorded }
            });
            prop_assert_eq!(scores.coverage().collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        }
    }
}
