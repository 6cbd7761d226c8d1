//! The rewards of the repeats of each task, for pass@k: eight bytes for each task, and sixteen more for a task with partial rewards.

use std::collections::BTreeMap;

use gym_core::rollout::metrics::passed_of_counts;
use serde::Serialize;

/// Tasks of one page. Agents usually have ranges of tasks, so that most pages are full.
const PAGE_TASKS: u32 = 16;

/// The share of tasks that pass within k rollouts, averaged over the tasks with at least k scored rollouts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PassRate {
    /// Rollouts of a task.
    pub k: u32,
    /// The mean over the tasks: the unbiased estimate if all rewards of a task are 0 or 1, otherwise the largest of its rewards.
    pub rate: f64,
    /// Number of tasks with at least k scored rollouts.
    pub tasks: u64,
}

/// The scored rollouts of one task.
#[derive(Clone, Copy, Debug, Default)]
struct TaskCounts {
    all: u32,
    /// Those with the reward 1.
    right: u32,
}

/// The scored rollouts of an agent by task.
#[derive(Clone, Debug, Default)]
pub(super) struct RepeatScores {
    /// Sixteen tasks each, because task numbers are dense.
    pages: BTreeMap<u32, Box<[TaskCounts; PAGE_TASKS as usize]>>,
    /// The largest reward of each task that has a reward other than 0 and 1.
    partial: BTreeMap<u32, f64>,
}

impl RepeatScores {
    pub(super) fn add(&mut self, task: u32, reward: f64) {
        let page = self.pages.entry(task / PAGE_TASKS).or_default();
        let counts = &mut page[(task % PAGE_TASKS) as usize];
        let before = *counts;
        counts.all += 1;
        counts.right += u32::from(reward == 1.0);
        if reward != 0.0 && reward != 1.0 {
            let best = match before {
                TaskCounts { all: 0, .. } => f64::NEG_INFINITY,
                TaskCounts { right: 0, .. } => 0.0,
                TaskCounts { .. } => 1.0,
            };
            let best = self.partial.entry(task).or_insert(best);
            *best = best.max(reward);
        } else if let Some(best) = self.partial.get_mut(&task) {
            *best = best.max(reward);
        }
    }

    /// Returns pass@k for k = 1, 2, 4, … and the largest number of scored rollouts of one task; only the last if there are partial
    /// rewards, because the rewards of the first k are not known. Empty if no task has two.
    pub(super) fn pass_rates(&self) -> Vec<PassRate> {
        let k_max = self.tasks().map(|(_, counts)| counts.all).max().unwrap_or(0);
        if k_max < 2 {
            return Vec::new();
        }
        let powers = std::iter::successors(Some(1_u32), |k| k.checked_mul(2)).take_while(|k| *k < k_max);
        let smaller = powers.filter(|_| self.partial.is_empty());
        smaller.chain([k_max]).map(|k| self.pass_rate(k)).collect()
    }

    fn pass_rate(&self, k: u32) -> PassRate {
        let (mut tasks, mut sum) = (0_u64, 0.0);
        for (task, counts) in self.tasks().filter(|(_, counts)| counts.all >= k) {
            // With partial rewards, k is the number of this task's rollouts, so the largest of the first k is that of all.
            let passed = self.partial.get(&task).copied();
            let passed = passed.or_else(|| passed_of_counts(counts.right as usize, counts.all as usize, k as usize));
            tasks += 1;
            sum += passed.unwrap_or_default();
        }
        PassRate { k, rate: sum / tasks as f64, tasks }
    }

    fn tasks(&self) -> impl Iterator<Item = (u32, TaskCounts)> {
        let pages = self.pages.iter().flat_map(|(page, tasks)| (page * PAGE_TASKS..).zip(tasks.iter().copied()));
        pages.filter(|(_, counts)| counts.all > 0)
    }
}

#[cfg(test)]
mod tests {
    use gym_core::rollout::metrics::{Sample, pass_at_k};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn without_repeats_there_is_no_pass_rate() {
        let mut repeats = RepeatScores::default();
        (0..40).for_each(|task| repeats.add(task, f64::from(task % 2)));
        assert_eq!(repeats.pass_rates(), []);
    }

    fn rewards(partial: bool) -> impl Strategy<Value = Vec<Vec<f64>>> {
        let reward = match partial {
            false => prop_oneof![Just(0.0), Just(1.0)].boxed(),
            true => prop_oneof![Just(0.0), Just(1.0), Just(-1.0), Just(0.25), 0.0..2.0].boxed(),
        };
        prop::collection::vec(prop::collection::vec(reward, 0..10), 1..40)
    }

    proptest! {
        #[test]
        fn the_rates_are_those_of_the_metrics(tasks in any::<bool>().prop_flat_map(rewards), seed: u64) {
            let mut repeats = RepeatScores::default();
            // In the order in which rollouts end, which is any.
            let mut ended: Vec<(u32, f64)> =
                (0..).zip(&tasks).flat_map(|(task, rewards)| rewards.iter().map(move |reward| (task * 7, *reward))).collect();
            fastrand::Rng::with_seed(seed).shuffle(&mut ended);
            ended.iter().for_each(|(task, reward)| repeats.add(*task, *reward));
            let samples: Vec<Vec<Sample>> =
                tasks.iter().map(|task| task.iter().copied().map(Sample::accuracy).collect()).collect();
            let expected = pass_at_k(&samples, false);
            let rates = repeats.pass_rates();
            prop_assert_eq!(rates.is_empty(), expected.k_max < 2);
            for PassRate { k, rate, tasks: counted } in rates {
                let percent = expected.metrics[&format!("pass@{k}/accuracy")].as_f64().unwrap();
                prop_assert!((100.0 * rate - percent).abs() < 1e-9, "pass@{k}: {rate} and {percent} %");
                prop_assert_eq!(counted, tasks.iter().filter(|task| task.len() >= k as usize).count() as u64);
            }
        }
    }
}
