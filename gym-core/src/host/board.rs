//! What a host knows of its calls: how many there are, which run, and how far they are.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::context::Incarnation;
use crate::layout::Rank;
use crate::progress::Progress;
use crate::worker::WorkerEnv;

/// What a rank is doing, as its host tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WorkerStatus {
    /// Which rank.
    pub rank: Rank,
    /// Which life of it.
    pub incarnation: u64,
    /// Calls that wait for the worker.
    pub waiting: usize,
    /// Calls that run now, oldest first.
    pub running: Vec<RunningCall>,
    /// Calls that ended with a reply.
    pub succeeded: u64,
    /// Calls that ended with an error, panics among them.
    pub failed: u64,
}

/// A call that runs now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunningCall {
    /// Its method.
    pub method: String,
    /// For how long, in milliseconds.
    pub elapsed_ms: u64,
    /// Units of work that it told of, by [`Progress::advance`].
    pub progress: u64,
    /// For how long it has told of none, in milliseconds.
    pub still_ms: u64,
}

/// The counts of one host.
#[derive(Debug)]
pub(crate) struct Board {
    rank: Rank,
    incarnation: Incarnation,
    calls_max: usize,
    /// Calls that run or wait.
    admitted: AtomicUsize,
    succeeded: AtomicU64,
    failed: AtomicU64,
    running: Mutex<Calls>,
    /// Nobody waits for what still runs.
    abandoned: AtomicBool,
}

#[derive(Debug, Default)]
struct Calls {
    next: u64,
    /// Oldest first. A list keeps its memory when it is empty, as it is after each exclusive call.
    shown: Vec<Call>,
    /// The last call's, for the next one unless somebody still holds it.
    spare: Option<Progress>,
}

#[derive(Debug)]
struct Call {
    number: u64,
    method: &'static str,
    since: Instant,
    progress: Progress,
}

/// The bound that a call has met.
pub(crate) struct Refusal {
    pub(crate) calls_max: usize,
}

impl Board {
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

    /// A place among the calls that run or wait, held until it is dropped.
    pub(crate) fn admit(self: &Arc<Self>) -> Result<Place, Refusal> {
        if self.admitted.fetch_add(1, Ordering::AcqRel) < self.calls_max {
            return Ok(Place(Arc::clone(self)));
        }
        self.admitted.fetch_sub(1, Ordering::AcqRel);
        Err(Refusal { calls_max: self.calls_max })
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
        let running: Vec<RunningCall> = (self.calls().shown.iter())
            .map(|call| RunningCall {
                method: call.method.to_owned(),
                elapsed_ms: ms(call.since.elapsed()),
                progress: call.progress.units(),
                still_ms: ms(call.progress.still_for()),
            })
            .collect();
        WorkerStatus {
            rank: self.rank,
            incarnation: self.incarnation.0,
            waiting: self.admitted.load(Ordering::Acquire).saturating_sub(running.len()),
            running,
            succeeded: self.succeeded.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
        }
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of the calls that a host has let in.
#[derive(Debug)]
pub(crate) struct Place(Arc<Board>);

impl Place {
    pub(crate) fn board(&self) -> &Board {
        &self.0
    }

    /// Shows the call as running since `since`, which is now.
    pub(crate) fn show(self, method: &'static str, since: Instant) -> (Progress, Shown) {
        let mut calls = self.0.calls();
        let renewed = calls.spare.take().and_then(|spare| spare.renewed(since));
        let progress = renewed.unwrap_or_else(|| Progress::watched_since(since));
        let number = calls.next;
        calls.next += 1;
        calls.shown.push(Call { number, method, since, progress: progress.clone() });
        drop(calls);
        (progress, Shown { place: self, number })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.admitted.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A call on the board, and in its place, until it is dropped.
#[derive(Debug)]
pub(crate) struct Shown {
    place: Place,
    number: u64,
}

impl Shown {
    pub(crate) fn board(&self) -> &Board {
        self.place.board()
    }

    /// Counts how the call ended.
    pub(crate) fn count(&self, succeeded: bool) {
        let counter = if succeeded { &self.board().succeeded } else { &self.board().failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        let mut calls = self.board().calls();
        if let Some(at) = calls.shown.iter().position(|call| call.number == self.number) {
            calls.spare = Some(calls.shown.remove(at).progress);
        }
    }
}
