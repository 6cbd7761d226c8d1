//! The calls that wait for an async worker. Who cannot wait any longer is answered at the deadline and leaves the line, however
//! long the call before takes: a place in it is for those who still want their turn. Whose caller has left has no place any more; what
//! is left of it here is cleared away now and then.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;

use tokio::time::{Instant, sleep_until};

use crate::host::job::{Item, Job};
use crate::host::queue::Arrivals;

/// What waits for a worker, in order of arrival.
pub(crate) struct Line {
    queue: Arrivals<Item>,
    /// Taken out of the queue while the worker was busy. At most twice what the host lets in, or [`CLEARED_FROM`].
    waiting: VecDeque<Item>,
    /// How many may wait before it is looked who has left.
    clear_at: usize,
    /// None of those that wait has an earlier deadline.
    soonest: Option<Instant>,
}

/// Looking through a shorter line is not worth its while.
const CLEARED_FROM: usize = 64;

impl Line {
    pub(crate) fn new(queue: Arrivals<Item>) -> Self {
        Self { queue, waiting: VecDeque::new(), clear_at: CLEARED_FROM, soonest: None }
    }

    /// The next call; `None` at the end of the line.
    pub(crate) async fn next(&mut self) -> Option<Job> {
        let item = match self.waiting.pop_front() {
            Some(item) => item,
            None => self.queue.next().await,
        };
        match item {
            Item::Call(job) => Some(job),
            Item::Stop => None,
        }
    }

    /// Gives a call its place at the head of the line back.
    pub(crate) fn put_back(&mut self, job: Job) {
        self.note(job.deadline());
        self.waiting.push_front(Item::Call(job));
    }

    /// Waits for `work`. Costs nothing where that need not wait.
    pub(crate) async fn until<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            let soonest = self.soonest;
            tokio::select! {
                biased;
                done = &mut work => return done,
                item = self.queue.next() => self.join(item),
                () = async { sleep_until(soonest.unwrap_or_else(Instant::now)).await }, if soonest.is_some() => {
                    self.answer_late();
                }
            }
        }
    }

    fn join(&mut self, item: Item) {
        if let Item::Call(job) = &item {
            self.note(job.deadline());
        }
        self.waiting.push_back(item);
        if self.waiting.len() >= self.clear_at {
            self.waiting.retain(|item| !item.has_left());
            self.clear_at = CLEARED_FROM.max(self.waiting.len() * 2);
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
                // A call whose deadline has passed is answered instead of begun.
                Item::Call(job) if job.deadline() <= now => drop(job.begin()),
                item => self.join(item),
            }
        }
    }
}
