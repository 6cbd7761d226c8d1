//! Counters of a running collection, for progress displays and metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use gym_core::rollout::{Attempt, FailureClass};

use crate::collect::run::causes::{FailureCause, FailureCauses};
use crate::collect::run::failure::AttemptFailure;
use crate::work::{WorkPool, WorkPoolSnapshot};

/// Counters of one collection. The driver updates them; progress bars and metrics read them.
#[derive(Debug, Default)]
pub struct CollectProgress {
    total: AtomicU64,
    completed: AtomicU64,
    already_completed: AtomicU64,
    already_given_up: AtomicU64,
    given_up: AtomicU64,
    in_flight: AtomicU64,
    tool_failures: AtomicU64,
    scores: Mutex<BTreeMap<Arc<str>, AgentScore>>,
    failures: Mutex<FailureCounts>,
    /// The pool from which workers take the rollouts, if they do.
    pool: OnceLock<WorkPool>,
}

/// The failed attempts.
#[derive(Debug, Default)]
struct FailureCounts {
    classes: BTreeMap<FailureClass, u64>,
    causes: FailureCauses,
}

/// The rewards of one agent's rollouts in this run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AgentScore {
    /// Number of rollouts with a reward.
    pub count: u64,
    /// Sum of their rewards.
    pub reward_sum: f64,
    /// Number of completed rollouts without a reward.
    pub unscored: u64,
}

/// A snapshot of the counters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProgressSnapshot {
    /// Requested rollouts.
    pub total: u64,
    /// Rollouts recorded in this run.
    pub completed: u64,
    /// Rollouts that an earlier run completed.
    pub already_completed: u64,
    /// Rollouts that an earlier run abandoned.
    pub already_given_up: u64,
    /// Rollouts that used up their attempts or failed permanently in this run.
    pub given_up: u64,
    /// Rollouts in flight.
    pub in_flight: u64,
    /// Tool calls in scored rollouts of this run that failed for a reason that the model did not cause. Their errors went to the model.
    pub tool_failures: u64,
    /// Rewards by agent.
    pub scores: BTreeMap<Arc<str>, AgentScore>,
    /// Failed attempts by class.
    pub failures: BTreeMap<FailureClass, u64>,
    /// The distinct causes of the failed attempts, in the order in which they first occurred; at most 32.
    pub causes: Vec<FailureCause>,
    /// Failed attempts with none of these causes.
    pub other_causes: u64,
    /// The queue and its workers, if workers take the rollouts from a pool of this process.
    pub pool: Option<WorkPoolSnapshot>,
}

impl ProgressSnapshot {
    /// Returns the mean reward over all agents, or `None` before the first reward.
    #[must_use]
    pub fn mean_reward(&self) -> Option<f64> {
        let (count, sum) =
            self.scores.values().fold((0, 0.0), |(count, sum), score| (count + score.count, sum + score.reward_sum));
        (count > 0).then(|| sum / count as f64)
    }

    /// Returns the causes of the failed attempts, the most frequent first.
    #[must_use]
    pub fn causes_by_count(&self) -> Vec<&FailureCause> {
        let mut causes: Vec<&FailureCause> = self.causes.iter().collect();
        causes.sort_by_key(|cause| std::cmp::Reverse(cause.count));
        causes
    }

    /// Returns the number of rollouts that need no further attempt.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.completed + self.already_completed + self.given_up + self.already_given_up
    }
}

impl CollectProgress {
    /// Returns the current counters.
    #[must_use]
    pub fn snapshot(&self) -> ProgressSnapshot {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (failures, causes, other_causes) = {
            let failures = self.failures();
            (failures.classes.clone(), failures.causes.list(), failures.causes.other())
        };
        ProgressSnapshot {
            total: of(&self.total),
            completed: of(&self.completed),
            already_completed: of(&self.already_completed),
            already_given_up: of(&self.already_given_up),
            given_up: of(&self.given_up),
            in_flight: of(&self.in_flight),
            tool_failures: of(&self.tool_failures),
            scores: self.scores.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            failures,
            causes,
            other_causes,
            pool: self.pool.get().map(WorkPool::snapshot),
        }
    }

    /// Shows the state of this pool in the snapshots.
    pub(in crate::collect) fn set_pool(&self, pool: WorkPool) {
        // A collection has one pool.
        drop(self.pool.set(pool));
    }

    /// Sets the number of requested rollouts.
    pub fn set_total(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }

    pub(super) fn skip(&self, completed: bool) {
        let counter = if completed { &self.already_completed } else { &self.already_given_up };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn complete(&self, agent: &Arc<str>, reward: Option<f64>, tool_failures: u32) {
        self.completed.fetch_add(1, Ordering::Relaxed);
        if tool_failures > 0 {
            self.tool_failures.fetch_add(tool_failures.into(), Ordering::Relaxed);
        }
        let mut scores = self.scores.lock().unwrap_or_else(PoisonError::into_inner);
        let score = match scores.get_mut(agent) {
            Some(score) => score,
            None => scores.entry(Arc::clone(agent)).or_default(),
        };
        match reward {
            Some(reward) => {
                score.count += 1;
                score.reward_sum += reward;
            }
            None => score.unscored += 1,
        }
    }

    pub(super) fn fail(&self, attempt: Attempt, failure: &AttemptFailure) {
        let mut failures = self.failures();
        *failures.classes.entry(failure.class).or_default() += 1;
        failures.causes.add(attempt, failure);
    }

    /// Returns the number of rollouts that failed in this run.
    pub(super) fn failed(&self) -> u64 {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Returns `true` if at least `failed_min` rollouts failed in this run, none completed, and all failures have one cause.
    pub(super) fn failed_alike(&self, failed_min: u64) -> bool {
        self.failed() >= failed_min && self.completed.load(Ordering::Relaxed) == 0 && self.failures().causes.alike()
    }

    fn failures(&self) -> MutexGuard<'_, FailureCounts> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn give_up(&self) {
        self.given_up.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a rollout as in flight until the guard is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> InFlightGuard {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlightGuard(Arc::clone(self))
    }
}

#[derive(Debug)]
pub(super) struct InFlightGuard(Arc<CollectProgress>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
