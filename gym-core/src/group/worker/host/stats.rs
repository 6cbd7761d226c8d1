//! Statistics of a host's calls: waiting calls, running calls with their progress, and counts of ended calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::base::progress::CallProgress;
use crate::group::collective::CollectiveReport;
use crate::group::layout::Rank;
use crate::group::worker::WorkerEnv;
use crate::message::Incarnation;

/// The current activity of a rank, as its host reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WorkerStatus {
    /// The rank.
    pub rank: Rank,
    /// The incarnation of the rank.
    pub incarnation: u64,
    /// Number of calls that wait for the worker.
    pub waiting: usize,
    /// Running calls, oldest first.
    pub running: Vec<RunningCall>,
    /// Number of calls that ended with a reply.
    pub succeeded: u64,
    /// Number of calls that ended with an error, panics included.
    pub failed: u64,
    /// The rank's collective operations.
    #[serde(default, skip_serializing_if = "CollectiveReport::is_empty")]
    pub collectives: CollectiveReport,
}

/// A running call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunningCall {
    /// The number of the call at its rank, from 0.
    #[serde(default)]
    pub number: u64,
    /// Name of the method.
    pub method: String,
    /// Time since the call started, in milliseconds.
    pub elapsed_ms: u64,
    /// Units of work reported by [`CallProgress::advance`].
    pub progress: u64,
    /// Time since the last reported progress, in milliseconds.
    pub still_ms: u64,
    /// Time for which the method is known to have blocked its thread, in milliseconds: since the first status that saw it. 0 for a method that awaits,
    /// and for a `blocking` method.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub blocked_ms: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl RunningCall {
    /// Says that the method blocks its thread, with the fix; `None` if it does not. The status is `age` old.
    #[must_use]
    pub fn blocks(&self, age: Duration) -> Option<String> {
        let blocked = Duration::from_millis(self.blocked_ms).checked_add(age).filter(|_| self.blocked_ms > 0)?;
        let fix = "declare the method `blocking`, so that its calls end at their deadlines";
        Some(format!("it has blocked its thread for {:.1} s at least: {fix}", blocked.as_secs_f64()))
    }
}

/// The call statistics of one host, which also bound its calls.
#[derive(Debug)]
pub(crate) struct CallStats {
    rank: Rank,
    incarnation: Incarnation,
    calls_max: usize,
    /// Number of calls that run or wait.
    admitted: AtomicUsize,
    succeeded: AtomicU64,
    failed: AtomicU64,
    running: Mutex<RunningCalls>,
    /// `true` if the callers of running calls have been answered; results of those calls are ignored.
    abandoned: AtomicBool,
}

#[derive(Debug, Default)]
struct RunningCalls {
    next: u64,
    /// Oldest first. A list keeps its memory when it is empty, as it is after each exclusive call.
    entries: Vec<Entry>,
    /// The counter of the last call, reused by the next one unless a clone of it is alive.
    spare: Option<CallProgress>,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    method: &'static str,
    since: Instant,
    progress: CallProgress,
    /// The polls of the call when they had last changed, as far as a status has seen it.
    polled: (u64, Instant),
}

impl Entry {
    /// Returns how long the call has been polled once, as far as is known.
    fn blocked_for(&mut self) -> Duration {
        let (polls, now) = (self.progress.polls(), Instant::now());
        if polls % 2 == 1 && polls == self.polled.0 {
            return now.saturating_duration_since(self.polled.1);
        }
        self.polled = (polls, now);
        Duration::ZERO
    }
}

/// A call was rejected because `calls_max` calls run or wait.
pub(crate) struct QueueFull {
    pub(crate) calls_max: usize,
}

impl CallStats {
    pub(crate) fn new(env: &WorkerEnv, calls_max: usize) -> Self {
        Self {
            rank: env.rank,
            incarnation: env.incarnation,
            calls_max,
            admitted: AtomicUsize::new(0),
            succeeded: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            running: Mutex::default(),
            abandoned: AtomicBool::new(false),
        }
    }

    /// Admits a call until the permit is dropped.
    pub(crate) fn admit(self: &Arc<Self>) -> Result<AdmissionPermit, QueueFull> {
        if self.admitted.fetch_add(1, Ordering::AcqRel) < self.calls_max {
            return Ok(AdmissionPermit(Arc::clone(self)));
        }
        self.admitted.fetch_sub(1, Ordering::AcqRel);
        Err(QueueFull { calls_max: self.calls_max })
    }

    pub(crate) fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    pub(crate) fn status(&self) -> WorkerStatus {
        let ms = |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let running: Vec<RunningCall> = (self.running.lock().entries.iter_mut())
            .map(|entry| RunningCall {
                number: entry.number,
                method: entry.method.to_owned(),
                elapsed_ms: ms(entry.since.elapsed()),
                progress: entry.progress.units(),
                still_ms: ms(entry.progress.still_for()),
                blocked_ms: ms(entry.blocked_for()),
            })
            .collect();
        WorkerStatus {
            rank: self.rank,
            incarnation: self.incarnation.0,
            waiting: self.admitted.load(Ordering::Acquire).saturating_sub(running.len()),
            running,
            succeeded: self.succeeded.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            collectives: CollectiveReport::default(),
        }
    }
}

/// Counts one call as admitted until it is dropped.
#[derive(Debug)]
pub(crate) struct AdmissionPermit(Arc<CallStats>);

impl AdmissionPermit {
    pub(crate) fn stats(&self) -> &CallStats {
        &self.0
    }

    /// Lists the call as running; `since` is the current time.
    pub(crate) fn run(self, method: &'static str, since: Instant) -> (CallProgress, RunningEntry) {
        let mut running = self.0.running.lock();
        let renewed = running.spare.take().and_then(|spare| spare.renewed(since));
        let progress = renewed.unwrap_or_else(|| CallProgress::watched_since(since));
        let number = running.next;
        running.next += 1;
        running.entries.push(Entry { number, method, since, progress: progress.clone(), polled: (0, since) });
        drop(running);
        (progress, RunningEntry { permit: self, number })
    }
}

impl Drop for AdmissionPermit {
    fn drop(&mut self) {
        self.0.admitted.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Lists one call as running, and counts it as admitted, until it is dropped.
#[derive(Debug)]
pub(crate) struct RunningEntry {
    permit: AdmissionPermit,
    number: u64,
}

impl RunningEntry {
    pub(crate) fn stats(&self) -> &CallStats {
        self.permit.stats()
    }

    /// Ends the entry, and returns the statistics that counted it.
    pub(crate) fn end(self) -> Arc<CallStats> {
        Arc::clone(&self.permit.0)
    }

    /// Records the result of the call.
    pub(crate) fn count(&self, succeeded: bool) {
        let counter = if succeeded { &self.stats().succeeded } else { &self.stats().failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for RunningEntry {
    fn drop(&mut self) {
        let mut running = self.stats().running.lock();
        if let Some(at) = running.entries.iter().position(|entry| entry.number == self.number) {
            running.spare = Some(running.entries.remove(at).progress);
        }
    }
}
