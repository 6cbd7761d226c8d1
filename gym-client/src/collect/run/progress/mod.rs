//! Counters of a running collection, for progress displays, metrics and the summary.

mod figures;
mod rewards;
mod tasks;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gym_core::observe::{InFlight, WorkKey};
use gym_core::rollout::{Attempt, FailureClass, TaskKey};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

use crate::collect::input::places::RowPlaces;
use crate::collect::run::causes::{FailureCause, FailureCauses};
use crate::collect::run::failure::AttemptFailure;
use crate::work::{WorkPool, WorkPoolSnapshot};
use figures::AgentFigures;
pub use figures::{AgentSummary, LatencySummary, TokenSummary};
pub(in crate::collect) use figures::{EpisodeFigures, RolloutFigures};
pub use rewards::RewardBin;
use tasks::InputRows;
pub(in crate::collect) use tasks::RequestedTasks;
pub use tasks::{BestOfK, PassRate, TaskCoverage};

/// Incomplete tasks of an agent that a summary lists; the statistics file lists all.
pub(in crate::collect) const INCOMPLETE_TASKS_MAX: usize = 1_000;

/// Counters of one collection. The driver updates them; progress bars and metrics read them.
#[derive(Debug, Default)]
pub struct CollectProgress {
    total: AtomicU64,
    completed: AtomicU64,
    already_completed: AtomicU64,
    already_given_up: AtomicU64,
    given_up: AtomicU64,
    unrecorded: Mutex<UnrecordedRollouts>,
    tool_failures: AtomicU64,
    rewardless: AtomicU64,
    in_flight: InFlight<InFlightRollout>,
    agents: Mutex<BTreeMap<Arc<str>, AgentFigures>>,
    failures: Mutex<FailureCounts>,
    input: Mutex<RequestedInput>,
    /// The pool from which workers take the rollouts, if they do.
    pool: OnceLock<WorkPool>,
}

/// The input of the requested tasks.
#[derive(Debug, Default)]
struct RequestedInput {
    /// `None` if the rows come from no file.
    name: Option<String>,
    /// The places of the rows, if they are not the input's lines.
    places: Option<RowPlaces>,
    rows: InputRows,
}

/// Rollouts that failed, in this run or an earlier one, by what a resumed run does with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UnrecordedRollouts {
    /// They have attempts left, so a resumed run tries them again.
    pub attempts_left: u64,
    /// They have used up [`DriverOptions::attempts_max`](super::DriverOptions::attempts_max).
    pub attempts_spent: u64,
    /// The most failed attempts of one of them: more than `attempts_max` if an earlier run allowed more.
    pub attempts_used: u32,
    /// They have used up [`DriverOptions::lost_max`](super::DriverOptions::lost_max): their workers were lost.
    pub workers_lost: u64,
    /// Their environment asked for no further attempt.
    pub terminal: u64,
}

/// The action of a resumed run on a rollout that failed; see [`UnrecordedRollouts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::collect) enum Unrecorded {
    AttemptsLeft,
    /// With so many failed attempts.
    AttemptsSpent(u32),
    WorkersLost,
    Terminal,
}

/// The failed attempts.
#[derive(Debug, Default)]
struct FailureCounts {
    classes: BTreeMap<FailureClass, u64>,
    causes: FailureCauses,
}

/// The rewards of one agent's recorded rollouts, those of earlier runs included.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AgentScore {
    /// Number of rollouts with a reward.
    pub count: u64,
    /// Sum of their rewards.
    pub reward_sum: f64,
    /// Number of completed rollouts without a reward.
    pub unscored: u64,
}

/// A rollout that has been in flight for a long time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OldestRollout {
    /// Its newest attempt.
    pub attempt: Attempt,
    /// Its agent.
    pub agent: Arc<str>,
    /// Time since its first attempt in this run began.
    pub age: Duration,
}

impl OldestRollout {
    fn of((began, InFlightRollout { attempt, agent }): (Instant, InFlightRollout)) -> Self {
        Self { attempt, agent, age: began.elapsed() }
    }
}

#[derive(Clone, Debug)]
struct InFlightRollout {
    attempt: Attempt,
    agent: Arc<str>,
}

/// A snapshot of the counters.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
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
    /// The action of a resumed run on the rollouts of `given_up` and `already_given_up`.
    pub unrecorded: UnrecordedRollouts,
    /// Rollouts in flight.
    pub in_flight: u64,
    /// The rollout that has been in flight for the longest time.
    pub oldest: Option<OldestRollout>,
    /// Tool calls in recorded rollouts that failed for a reason that the model did not cause. Their errors went to the model.
    pub tool_failures: u64,
    /// Rollouts of this run whose agent returned a row without `reward`, and without `mask_sample`: most often a mistake of the agent.
    pub rewardless: u64,
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
            let failures = self.failures.lock();
            (failures.classes.clone(), failures.causes.list(), failures.causes.other())
        };
        ProgressSnapshot {
            total: of(&self.total),
            completed: of(&self.completed),
            already_completed: of(&self.already_completed),
            already_given_up: of(&self.already_given_up),
            given_up: of(&self.given_up),
            unrecorded: *self.unrecorded.lock(),
            in_flight: self.in_flight.count() as u64,
            oldest: self.in_flight.oldest().map(OldestRollout::of),
            tool_failures: of(&self.tool_failures),
            rewardless: of(&self.rewardless),
            scores: self.scores(),
            failures,
            causes,
            other_causes,
            pool: self.pool.get().map(WorkPool::snapshot),
        }
    }

    /// Returns the scores of the agents with a recorded rollout.
    fn scores(&self) -> BTreeMap<Arc<str>, AgentScore> {
        let agents = self.agents.lock();
        let scores = agents.iter().map(|(agent, figures)| (Arc::clone(agent), figures.score));
        scores.filter(|(_, score)| score.count + score.unscored > 0).collect()
    }

    /// Returns the figures of each agent. Costs time for each task; [`CollectProgress::snapshot`] does not.
    #[must_use]
    pub fn agent_summaries(&self) -> BTreeMap<Arc<str>, AgentSummary> {
        self.agents.lock().iter().map(|(agent, figures)| (Arc::clone(agent), figures.summary())).collect()
    }

    /// Returns the tasks with missing rollouts, by agent: first those without a single recorded rollout, and at most `max` of each agent.
    #[must_use]
    pub fn incomplete_tasks(&self, max: usize) -> BTreeMap<Arc<str>, Vec<TaskCoverage>> {
        let incomplete = |figures: &AgentFigures| {
            let missing = |none: bool| {
                figures.tasks.coverage().filter(move |task| task.missing > 0 && (task.recorded == 0) == none)
            };
            missing(true).chain(missing(false)).take(max).collect::<Vec<_>>()
        };
        let agents = self.agents.lock();
        let tasks = agents.iter().map(|(agent, figures)| (Arc::clone(agent), incomplete(figures)));
        tasks.filter(|(_, tasks)| !tasks.is_empty()).collect()
    }

    /// Returns at most `max` rollouts in flight, the oldest first. Looks at all of them.
    #[must_use]
    pub fn oldest(&self, max: usize) -> Vec<OldestRollout> {
        self.in_flight.oldest_of(max).into_iter().map(OldestRollout::of).collect()
    }

    /// Forgets an earlier collection.
    pub(in crate::collect) fn restart(&self) {
        let counters = [
            &self.total,
            &self.completed,
            &self.already_completed,
            &self.already_given_up,
            &self.given_up,
            &self.tool_failures,
            &self.rewardless,
        ];
        counters.into_iter().for_each(|counter| counter.store(0, Ordering::Relaxed));
        self.agents.lock().clear();
        *self.unrecorded.lock() = UnrecordedRollouts::default();
        *self.failures.lock() = FailureCounts::default();
    }

    /// Shows the state of this pool in the snapshots.
    pub(in crate::collect) fn set_pool(&self, pool: WorkPool) {
        // A collection has one pool.
        drop(self.pool.set(pool));
    }

    /// Sets the input of the requested tasks, and the places of its rows if they are not its lines. Called before the first rollout.
    pub(in crate::collect) fn set_input(&self, input: String, places: Option<RowPlaces>) {
        let mut known = self.input.lock();
        (known.name, known.places) = (Some(input), places);
    }

    /// Sets the requested tasks of each agent. Called before the first rollout.
    pub(in crate::collect) fn expect(&self, requested: RequestedTasks) {
        let (agents, rows) = requested.into_parts();
        self.input.lock().rows = rows;
        let figures = agents.into_iter().map(|(agent, tasks)| (agent, AgentFigures::expecting(tasks)));
        *self.agents.lock() = figures.collect();
    }

    /// Sets the number of requested rollouts.
    pub fn set_total(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }

    /// Counts a rollout that needs no attempt in this run; `None` if it is completed.
    pub(super) fn skip(&self, unrecorded: Option<Unrecorded>) {
        let counter = if unrecorded.is_none() { &self.already_completed } else { &self.already_given_up };
        counter.fetch_add(1, Ordering::Relaxed);
        if let Some(unrecorded) = unrecorded {
            self.count(unrecorded);
        }
    }

    /// Counts a rollout that was recorded in this run.
    pub(super) fn complete(&self, agent: &Arc<str>, key: TaskKey, rollout: &RolloutFigures) {
        self.completed.fetch_add(1, Ordering::Relaxed);
        self.add_recorded(agent, key, rollout);
    }

    /// Counts a rollout whose agent returned no reward.
    pub(super) fn count_rewardless(&self) {
        self.rewardless.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a recorded rollout in the figures of its agent. Alone, for one that an earlier run recorded.
    pub(in crate::collect) fn add_recorded(&self, agent: &Arc<str>, key: TaskKey, rollout: &RolloutFigures) {
        let tool_failures = rollout.episode.map_or(0, |episode| episode.tool_failures);
        if tool_failures > 0 {
            self.tool_failures.fetch_add(tool_failures.into(), Ordering::Relaxed);
        }
        let mut agents = self.agents.lock();
        let figures = match agents.get_mut(agent) {
            Some(figures) => figures,
            None => agents.entry(Arc::clone(agent)).or_default(),
        };
        figures.add(key.task_index, rollout);
    }

    pub(super) fn fail(&self, attempt: Attempt, failure: &AttemptFailure) {
        let input = self.input_of(attempt.key);
        let mut failures = self.failures.lock();
        *failures.classes.entry(failure.class).or_default() += 1;
        failures.causes.add(attempt, failure, input);
    }

    /// Returns the place of a rollout's row in the input; `None` if the rows come from no file.
    pub(super) fn input_of(&self, key: TaskKey) -> Option<String> {
        let input = self.input.lock();
        Some(RowPlaces::name(input.places.as_ref(), input.name.as_ref()?, input.rows.of(key).into()))
    }

    /// Returns the number of rollouts that failed in this run.
    pub(super) fn failed(&self) -> u64 {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Returns `true` if at least `failed_min` rollouts failed in this run, none completed, and all failures have one cause.
    pub(super) fn failed_alike(&self, failed_min: u64) -> bool {
        self.failed() >= failed_min
            && self.completed.load(Ordering::Relaxed) == 0
            && self.failures.lock().causes.alike()
    }

    pub(super) fn give_up(&self, unrecorded: Unrecorded) {
        self.given_up.fetch_add(1, Ordering::Relaxed);
        self.count(unrecorded);
    }

    fn count(&self, unrecorded: Unrecorded) {
        let mut counts = self.unrecorded.lock();
        *match unrecorded {
            Unrecorded::AttemptsLeft => &mut counts.attempts_left,
            Unrecorded::AttemptsSpent(used) => {
                counts.attempts_used = counts.attempts_used.max(used);
                &mut counts.attempts_spent
            }
            Unrecorded::WorkersLost => &mut counts.workers_lost,
            Unrecorded::Terminal => &mut counts.terminal,
        } += 1;
    }

    /// Counts a rollout as in flight until the guard is dropped.
    pub(super) fn begin(self: &Arc<Self>, key: TaskKey, agent: &Arc<str>, began: Instant) -> InFlightGuard {
        let attempt = Attempt { key, number: 0 };
        let key = self.in_flight.begin(began, InFlightRollout { attempt, agent: Arc::clone(agent) });
        InFlightGuard { progress: Arc::clone(self), key }
    }
}

#[derive(Debug)]
pub(super) struct InFlightGuard {
    progress: Arc<CollectProgress>,
    key: WorkKey,
}

impl InFlightGuard {
    /// Sets the number of the newest attempt.
    pub(super) fn attempt(&self, number: u32) {
        self.progress.in_flight.update(self.key, |rollout| rollout.attempt.number = number);
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.progress.in_flight.end(self.key);
    }
}
