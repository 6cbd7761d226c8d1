//! The calls that wait for an async worker. A call is answered at its deadline, however long the running call takes. A cancelled
//! call releases its permit at once, and its empty item is removed periodically.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;

use tokio::time::{Instant, sleep_until};

use crate::group::worker::host::call::{QueueItem, QueuedCall};
use crate::group::worker::host::queue::QueueReceiver;

/// The waiting calls of a worker, in order of arrival.
pub(crate) struct CallQueue {
    queue: QueueReceiver<QueueItem>,
    /// Items received while the worker was busy: at most twice the number of admitted calls, or [`CLEANUP_MIN`].
    waiting: VecDeque<QueueItem>,
    /// Number of waiting items at which cancelled calls are removed.
    cleanup_at: usize,
    /// A lower bound on the deadlines of the waiting calls.
    soonest: Option<Instant>,
}

/// Removing cancelled calls from a shorter list would cost more than it saves.
const CLEANUP_MIN: usize = 64;

impl CallQueue {
    pub(crate) fn new(queue: QueueReceiver<QueueItem>) -> Self {
        Self { queue, waiting: VecDeque::new(), cleanup_at: CLEANUP_MIN, soonest: None }
    }

    /// Waits for the next call; returns `None` when the worker is to stop.
    pub(crate) async fn next(&mut self) -> Option<QueuedCall> {
        let item = match self.waiting.pop_front() {
            Some(item) => item,
            None => self.queue.next().await,
        };
        match item {
            QueueItem::Call(call) => Some(call),
            QueueItem::Stop => None,
        }
    }

    /// Returns a call to the front of the queue.
    pub(crate) fn put_back(&mut self, call: QueuedCall) {
        self.note(call.deadline());
        self.waiting.push_front(QueueItem::Call(call));
    }

    /// Waits for `work`, and meanwhile answers waiting calls at their deadlines. Costs nothing if `work` need not wait.
    pub(crate) async fn until<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            let soonest = self.soonest;
            tokio::select! {
                biased;
                done = &mut work => return done,
                item = self.queue.next() => self.append(item),
                () = async { sleep_until(soonest.unwrap_or_else(Instant::now)).await }, if soonest.is_some() => {
                    self.answer_late();
                }
            }
        }
    }

    fn append(&mut self, item: QueueItem) {
        if let QueueItem::Call(call) = &item {
            self.note(call.deadline());
        }
        self.waiting.push_back(item);
        if self.waiting.len() >= self.cleanup_at {
            self.waiting.retain(|item| !item.is_cancelled());
            self.cleanup_at = CLEANUP_MIN.max(self.waiting.len() * 2);
        }
    }

    fn note(&mut self, deadline: Instant) {
        self.soonest = Some(self.soonest.map_or(deadline, |soonest| soonest.min(deadline)));
    }

    fn answer_late(&mut self) {
        let now = Instant::now();
        self.soonest = None;
        for item in std::mem::take(&mut self.waiting) {
            match item {
                // Starting a call whose deadline has passed answers the call.
                QueueItem::Call(call) if call.deadline() <= now => drop(call.start()),
                item => self.append(item),
            }
        }
    }
}
