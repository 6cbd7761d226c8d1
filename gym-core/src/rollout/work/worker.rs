//! The workers of a queue: what each holds, and how long it may be silent.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::message::Incarnation;
use crate::rollout::work::WorkId;

/// Names one incarnation of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId {
    /// The worker's name; one queue has one worker of a name.
    pub name: Arc<str>,
    /// The incarnation. A worker that returns after it was lost has a higher one and holds no items.
    pub incarnation: Incarnation,
}

impl WorkerId {
    /// Creates the id of a worker.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>, incarnation: Incarnation) -> Self {
        Self { name: name.into(), incarnation }
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (incarnation {})", self.name, self.incarnation)
    }
}

/// A worker's request for work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkPoll {
    /// The number of the poll: 1 for the first, then one more each time. A poll that is sent again because its response was lost has
    /// the same number, and gets the same items.
    pub number: u64,
    /// Number of items that the worker can hold at a time.
    pub capacity: u32,
    /// How long the queue may hold the poll while there is no work.
    pub wait: Duration,
    /// Names of the classes that the worker serves; `None` for all.
    pub classes: Option<BTreeSet<Arc<str>>>,
    /// The worker is lost after this time of silence, if the options of the queue do not allow a longer one. A member of a cluster has its timeout.
    pub response_timeout: Duration,
    /// `true` if the worker gets no new work for now; see [`WorkQueue::pause`](super::WorkQueue::pause).
    pub paused: bool,
}

/// The queue's knowledge of a worker.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) id: WorkerId,
    pub(super) capacity: usize,
    /// The worker gets no new work.
    pub(super) paused: bool,
    pub(super) classes: Option<BTreeSet<Arc<str>>>,
    /// Items that were handed to the worker and are not finished.
    pub(super) holds: BTreeSet<WorkId>,
    /// Items that the worker holds and that nobody waits for any more. They still take capacity.
    pub(super) cancelled: BTreeSet<WorkId>,
    /// Cancelled items that the worker has not been told of.
    pub(super) untold: Vec<WorkId>,
    /// The poll that waits for work.
    pub(super) parked: Option<Parked>,
    /// The newest poll, and the items of the polls whose responses may have been lost.
    pub(super) newest: u64,
    pub(super) answered: Vec<(u64, Vec<WorkId>)>,
    /// Time of the newest poll.
    pub(super) heard: Instant,
    /// Time of silence after which the worker is lost, if it is longer than the queue's.
    pub(super) response_timeout: Duration,
    /// The worker is lost if it sends no poll by then.
    pub(super) due: Instant,
}

/// A poll that waits for work.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) number: u64,
    /// Position among the waiting polls.
    pub(super) turn: u64,
    /// The host was told to take work for this poll, and has not done so yet.
    pub(super) called: bool,
}

impl Worker {
    /// Returns the number of items that the worker can take.
    pub(super) fn room(&self) -> usize {
        if self.paused { 0 } else { self.capacity.saturating_sub(self.holds.len()) }
    }

    pub(super) fn serves(&self, class: &str) -> bool {
        self.classes.as_ref().is_none_or(|classes| classes.contains(class))
    }
}
