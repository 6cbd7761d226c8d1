//! The queue: items wait in classes, workers poll, and each item is finished once.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::rollout::work::WorkId;
use crate::rollout::work::class::{ClassId, Classes};
use crate::rollout::work::worker::{Parked, WorkPoll, Worker, WorkerId};

/// Items are handed out in larger batches while they add up to less work than this.
const BATCH_WORK: Duration = Duration::from_millis(5);

/// Bounds and time limits of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkQueueOptions {
    /// Maximum number of items that wait or are held by workers. Default: 16,384, the number of calls that a server queues.
    pub items_max: usize,
    /// Maximum number of workers. Default: 4,096.
    pub workers_max: usize,
    /// Maximum number of classes: one for each server that rows name, and kind of work. Default: 4,096.
    pub classes_max: usize,
    /// Maximum number of items that one worker can hold, whatever capacity it reports. Default: 4,096.
    pub capacity_max: u32,
    /// Maximum number of bytes of the items of one answer, which is larger only if a single item is. Default: 64 MiB, a quarter of
    /// what a server accepts.
    pub batch_bytes_max: usize,
    /// How long a poll may wait for work at most. Default: 5 s, shorter than the idle limits of proxies.
    pub wait_max: Duration,
    /// A worker whose poll was answered is lost if it does not poll again within this time. Default: 10 s, because a busy machine
    /// may delay a living worker by seconds.
    pub silence_max: Duration,
    /// A worker whose connection broke while its poll waited is lost if it does not poll again within this time. Default: 200 ms.
    pub reconnect_max: Duration,
}

impl Default for WorkQueueOptions {
    fn default() -> Self {
        Self {
            items_max: 16_384,
            workers_max: 4_096,
            classes_max: 4_096,
            capacity_max: 4_096,
            batch_bytes_max: 64 << 20,
            wait_max: Duration::from_secs(5),
            silence_max: Duration::from_secs(10),
            reconnect_max: Duration::from_millis(200),
        }
    }
}

/// The reason why a queue rejects an item, a class or a poll.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorkQueueError {
    /// The queue has its maximum number of items.
    Full(usize),
    /// The queue has its maximum number of classes.
    TooManyClasses(usize),
    /// The queue has its maximum number of workers.
    TooManyWorkers(usize),
    /// A newer incarnation of the worker has polled.
    Stale(WorkerId),
    /// The queue does not know this worker, which has polled before: it was lost, or the queue is a new one. The worker holds no
    /// items; it must stop what it runs and begin as a new incarnation.
    Unknown(WorkerId),
}

impl fmt::Display for WorkQueueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(max) => write!(f, "the work queue is full: it holds {max} items"),
            Self::TooManyClasses(max) => write!(f, "the work queue has {max} classes already"),
            Self::TooManyWorkers(max) => write!(f, "the work queue has {max} workers already"),
            Self::Stale(newer) => write!(f, "worker {newer} has polled, which is newer; use another worker name"),
            Self::Unknown(worker) => {
                write!(f, "worker {worker} was lost or polls a new queue; its items are no longer its own")
            }
        }
    }
}

impl std::error::Error for WorkQueueError {}

/// The worker does not hold the item: the item was cancelled, or the worker was lost meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateWork;

/// The effect of a poll.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PollStart {
    /// The poll waits; [`WorkQueue::take`] gives it work. Items that an older incarnation of the worker held are lost.
    Waiting(LostWork),
    /// The poll was answered before, and the answer may have been lost. This one leaves out what the worker has finished since.
    Answered(Assignment),
}

/// The answer to a poll.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// Items that the worker now holds.
    pub items: Vec<WorkId>,
    /// Items that the worker holds and that nobody waits for any more. The worker stops them and reports them as finished.
    pub cancelled: Vec<WorkId>,
}

/// The work that a lost worker held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LostWork {
    /// Items that may have run, and are not handed out again.
    pub ended: Vec<WorkId>,
    /// Repeatable items, which wait again.
    pub again: Vec<WorkId>,
}

/// An item that waits or that a worker holds.
#[derive(Debug)]
struct Item {
    class: ClassId,
    bytes: usize,
    /// The worker that holds it, and since when.
    held: Option<(Arc<str>, Instant)>,
}

/// A queue of work. Every item that is offered ends in exactly one way: it is finished, cancelled, or ended with its worker.
///
/// The host calls [`WorkQueue::call`] until it returns `None` after each change, and [`WorkQueue::take`] for each worker that was
/// returned.
#[derive(Debug)]
pub struct WorkQueue {
    options: WorkQueueOptions,
    classes: Classes,
    items: BTreeMap<WorkId, Item>,
    workers: BTreeMap<Arc<str>, Worker>,
    /// Waiting polls of workers with room that were not called, by turn.
    ready: BTreeMap<u64, Arc<str>>,
    /// Number of waiting polls that were called and have not taken yet.
    called: usize,
    /// Workers whose waiting poll is called because items of theirs were cancelled.
    tell: Vec<Arc<str>>,
    next_id: u64,
    next_turn: u64,
}

impl WorkQueue {
    /// Creates an empty queue.
    #[must_use]
    pub fn new(options: WorkQueueOptions) -> Self {
        Self {
            options,
            classes: Classes::default(),
            items: BTreeMap::new(),
            workers: BTreeMap::new(),
            ready: BTreeMap::new(),
            called: 0,
            tell: Vec::new(),
            next_id: 0,
            next_turn: 0,
        }
    }

    /// Returns the bounds and time limits.
    #[must_use]
    pub fn options(&self) -> &WorkQueueOptions {
        &self.options
    }

    /// Returns the class of this name, which is created if there is none. Items of a `repeatable` class can run twice without harm.
    /// A weight of 0 counts as 1.
    ///
    /// # Errors
    /// [`WorkQueueError::TooManyClasses`].
    pub fn class(&mut self, name: &str, weight: u32, repeatable: bool) -> Result<ClassId, WorkQueueError> {
        if let Some(known) = self.classes.find(name) {
            return Ok(known);
        }
        if self.classes.len() >= self.options.classes_max {
            return Err(WorkQueueError::TooManyClasses(self.options.classes_max));
        }
        Ok(self.classes.add(name.into(), weight, repeatable))
    }

    /// Adds an item of this size to a class.
    ///
    /// # Errors
    /// [`WorkQueueError::Full`].
    pub fn offer(&mut self, class: ClassId, bytes: usize) -> Result<WorkId, WorkQueueError> {
        if self.items.len() >= self.options.items_max {
            return Err(WorkQueueError::Full(self.options.items_max));
        }
        let id = WorkId(self.next_id);
        self.next_id += 1;
        self.items.insert(id, Item { class, bytes, held: None });
        self.classes.push(class, id);
        Ok(id)
    }

    /// Removes an item that nobody waits for any more. A worker that holds it is told with its next answer. Returns `false` if the
    /// item has ended before.
    pub fn cancel(&mut self, id: WorkId) -> bool {
        let Some(item) = self.items.remove(&id) else { return false };
        match item.held {
            None => self.classes.remove(item.class, id),
            Some((name, _)) => {
                if let Some(worker) = self.workers.get_mut(&name) {
                    worker.cancelled.insert(id);
                    worker.untold.push(id);
                    if worker.parked.is_some() {
                        self.tell.push(name);
                    }
                }
            }
        }
        true
    }

    /// Returns `true` if the item waits, so that no worker has begun it.
    #[must_use]
    pub fn waits(&self, id: WorkId) -> bool {
        self.items.get(&id).is_some_and(|item| item.held.is_none())
    }

    /// Returns the worker that holds the item.
    #[must_use]
    pub fn holder(&self, id: WorkId) -> Option<&WorkerId> {
        let (name, _) = self.items.get(&id)?.held.as_ref()?;
        self.worker(name)
    }

    /// Accepts a poll. An earlier waiting poll of the same worker ends without items; a newer incarnation replaces an older one.
    ///
    /// # Errors
    /// [`WorkQueueError::Stale`], [`WorkQueueError::Unknown`], [`WorkQueueError::TooManyWorkers`].
    pub fn poll(&mut self, now: Instant, who: &WorkerId, poll: WorkPoll) -> Result<PollStart, WorkQueueError> {
        let mut lost = LostWork::default();
        if let Some(known) = self.workers.get(&who.name) {
            if known.id.incarnation > who.incarnation {
                return Err(WorkQueueError::Stale(known.id.clone()));
            }
            if known.id.incarnation < who.incarnation {
                let older = known.id.clone();
                lost = self.lost(&older);
            }
        }
        let capacity = poll.capacity.min(self.options.capacity_max) as usize;
        if !self.workers.contains_key(&who.name) {
            if poll.number != 1 {
                return Err(WorkQueueError::Unknown(who.clone()));
            }
            if self.workers.len() >= self.options.workers_max {
                return Err(WorkQueueError::TooManyWorkers(self.options.workers_max));
            }
            let worker = Worker {
                id: who.clone(),
                capacity,
                paused: poll.paused,
                classes: None,
                holds: Default::default(),
                cancelled: Default::default(),
                untold: Vec::new(),
                parked: None,
                newest: 0,
                answered: Vec::new(),
                heard: now,
                response_timeout: poll.response_timeout,
                due: now,
            };
            self.workers.insert(Arc::clone(&who.name), worker);
        }
        let worker = self.workers.get_mut(&who.name).expect("the worker is known by now");
        let waits_already = worker.parked.as_ref().is_some_and(|parked| parked.number == poll.number);
        if poll.number <= worker.newest && !waits_already {
            let answered = worker.answered.iter().find(|(number, _)| *number == poll.number);
            let mut items = answered.map(|(_, items)| items.clone()).unwrap_or_default();
            items.retain(|id| worker.holds.contains(id) && !worker.cancelled.contains(id));
            let cancelled = worker.cancelled.iter().copied().collect();
            return Ok(PollStart::Answered(Assignment { items, cancelled }));
        }
        // The worker has at most two polls under way, so it has the answers to all polls before the last one.
        worker.answered.retain(|(number, _)| number + 1 >= poll.number);
        worker.newest = poll.number;
        worker.capacity = capacity;
        worker.paused = poll.paused;
        worker.classes = poll.classes;
        (worker.heard, worker.response_timeout) = (now, poll.response_timeout);
        worker.due = now + (poll.wait.min(self.options.wait_max) + self.options.silence_max).max(poll.response_timeout);
        self.park(&who.name, poll.number);
        Ok(PollStart::Waiting(lost))
    }

    /// Makes a poll wait, in place of the worker's earlier one.
    fn park(&mut self, name: &Arc<str>, number: u64) {
        self.unpark(name);
        let Some(worker) = self.workers.get_mut(name) else { return };
        let turn = self.next_turn;
        self.next_turn += 1;
        worker.parked = Some(Parked { number, turn, called: false });
        if worker.room() > 0 {
            self.ready.insert(turn, Arc::clone(name));
        }
        if !worker.untold.is_empty() {
            self.tell.push(Arc::clone(name));
        }
    }

    fn unpark(&mut self, name: &Arc<str>) -> Option<Parked> {
        let parked = self.workers.get_mut(name)?.parked.take()?;
        self.ready.remove(&parked.turn);
        self.called -= usize::from(parked.called);
        Some(parked)
    }

    /// Returns a worker whose waiting poll can be answered, and the poll's number; the worker that has waited longest for work
    /// first. The host then calls [`WorkQueue::take`].
    pub fn call(&mut self) -> Option<(WorkerId, u64)> {
        while let Some(name) = self.tell.pop() {
            if let Some(worker) = self.workers.get(&name)
                && let Some(parked) = &worker.parked
                && !worker.untold.is_empty()
            {
                return Some((worker.id.clone(), parked.number));
            }
        }
        if self.classes.waiting() <= self.called {
            return None;
        }
        let found = self.ready.iter().find_map(|(turn, name)| {
            let worker = self.workers.get(name)?;
            self.classes.any(|class| worker.serves(&class.name)).then(|| (*turn, Arc::clone(name)))
        });
        let (turn, name) = found?;
        self.ready.remove(&turn);
        let worker = self.workers.get_mut(&name)?;
        let parked = worker.parked.as_mut()?;
        parked.called = true;
        self.called += 1;
        Some((worker.id.clone(), parked.number))
    }

    /// Answers a waiting poll, if there is something for its worker; otherwise the poll goes on waiting.
    pub fn take(&mut self, now: Instant, who: &WorkerId, number: u64) -> Option<Assignment> {
        let worker = self.worker_mut(who)?;
        let parked = worker.parked.as_mut().filter(|parked| parked.number == number)?;
        let (turn, was_called) = (parked.turn, std::mem::take(&mut parked.called));
        let has_room = worker.room() > 0;
        let told = !worker.untold.is_empty();
        let name = Arc::clone(&worker.id.name);
        self.called -= usize::from(was_called);
        if has_room {
            self.ready.insert(turn, Arc::clone(&name));
        }
        let items = if has_room { self.hand_out(now, &name) } else { Vec::new() };
        if items.is_empty() && !told {
            return None;
        }
        Some(self.answer_parked(now, &name, items))
    }

    /// Answers a waiting poll even if there is nothing for its worker. `None` if this poll does not wait any more.
    pub fn answer(&mut self, now: Instant, who: &WorkerId, number: u64) -> Option<Assignment> {
        self.worker_mut(who)?.parked.as_ref().filter(|parked| parked.number == number)?;
        match self.take(now, who, number) {
            Some(assignment) => Some(assignment),
            None => Some(self.answer_parked(now, &who.name, Vec::new())),
        }
    }

    fn answer_parked(&mut self, now: Instant, name: &Arc<str>, items: Vec<WorkId>) -> Assignment {
        let parked = self.unpark(name);
        let due = now + self.options.silence_max;
        let Some(worker) = self.workers.get_mut(name) else { return Assignment::default() };
        worker.due = due.max(worker.heard + worker.response_timeout);
        if let Some(parked) = parked {
            worker.answered.push((parked.number, items.clone()));
        }
        Assignment { items, cancelled: std::mem::take(&mut worker.untold) }
    }

    /// Hands items to a worker: half of its room, or as many as have little work, but no more than its share of the waiting items.
    fn hand_out(&mut self, now: Instant, name: &Arc<str>) -> Vec<WorkId> {
        let Some(worker) = self.workers.get_mut(name) else { return Vec::new() };
        let room = worker.room();
        // Workers that wait at the same time finish together.
        let takers = (self.ready.len() + self.called).max(1);
        let share = self.classes.waiting().div_ceil(takers);
        let count_max = room.min(share);
        let half = room.div_ceil(2);
        let (mut items, mut work, mut bytes) = (Vec::new(), Duration::ZERO, 0_usize);
        while items.len() < count_max {
            let Some(class) = self.classes.next(|class| worker.serves(&class.name)) else { break };
            let next = self.classes.get(class);
            work = work.saturating_add(next.took.unwrap_or(BATCH_WORK));
            let next_bytes = next.waiting.first().and_then(|id| self.items.get(id)).map_or(0, |item| item.bytes);
            bytes = bytes.saturating_add(next_bytes);
            let too_long = items.len() >= half && work > BATCH_WORK;
            let too_large = !items.is_empty() && bytes > self.options.batch_bytes_max;
            if too_long || too_large {
                break;
            }
            let Some(id) = self.classes.serve(class) else { break };
            if let Some(item) = self.items.get_mut(&id) {
                item.held = Some((Arc::clone(name), now));
            }
            worker.holds.insert(id);
            items.push(id);
        }
        items
    }

    /// Determines whether a worker gets new work. What it holds goes on, and a poll of a paused worker waits.
    pub fn pause(&mut self, who: &WorkerId, paused: bool) {
        let Some(worker) = self.worker_mut(who) else { return };
        if std::mem::replace(&mut worker.paused, paused) == paused {
            return;
        }
        let has_room = worker.room() > 0;
        let Some(parked) = worker.parked.as_mut() else { return };
        let (turn, was_called) = (parked.turn, std::mem::take(&mut parked.called));
        self.called -= usize::from(was_called);
        self.ready.remove(&turn);
        if has_room {
            self.ready.insert(turn, Arc::clone(&who.name));
        }
    }

    /// Notes that the connection of a waiting poll broke. The worker is lost unless it polls again soon.
    pub fn disconnected(&mut self, now: Instant, who: &WorkerId, number: u64) {
        let due = now + self.options.reconnect_max;
        let Some(worker) = self.worker_mut(who) else { return };
        if worker.parked.as_ref().is_some_and(|parked| parked.number == number) {
            worker.due = worker.due.min(due);
            // A poll that is sent again under this number is a new one.
            worker.newest = number - 1;
            let name = Arc::clone(&worker.id.name);
            self.unpark(&name);
        }
    }

    /// Ends an item that a worker has finished.
    ///
    /// # Errors
    /// [`LateWork`] if the worker does not hold the item, or nobody waits for it. Its outcome does not count.
    pub fn finish(&mut self, now: Instant, who: &WorkerId, id: WorkId) -> Result<(), LateWork> {
        let worker = self.worker_mut(who).ok_or(LateWork)?;
        if !worker.holds.remove(&id) {
            return Err(LateWork);
        }
        let cancelled = worker.cancelled.remove(&id);
        worker.untold.retain(|untold| *untold != id);
        let uncalled = worker.parked.as_ref().filter(|parked| !parked.called).map(|parked| parked.turn);
        let has_room = worker.room() > 0;
        if let (true, Some(turn)) = (has_room, uncalled) {
            self.ready.insert(turn, Arc::clone(&who.name));
        }
        if cancelled {
            return Err(LateWork);
        }
        let item = self.items.remove(&id).ok_or(LateWork)?;
        if let Some((_, since)) = item.held {
            self.classes.get_mut(item.class).finished_after(now.saturating_duration_since(since));
        }
        Ok(())
    }

    /// Removes a worker. Items that may have run end; repeatable ones wait again, before all others of their class.
    pub fn lost(&mut self, who: &WorkerId) -> LostWork {
        let mut lost = LostWork::default();
        if self.worker_mut(who).is_none() {
            return lost;
        }
        self.unpark(&who.name);
        let Some(worker) = self.workers.remove(&who.name) else { return lost };
        for id in worker.holds {
            let Some(item) = self.items.get_mut(&id) else { continue };
            if self.classes.get(item.class).repeatable {
                item.held = None;
                self.classes.push(item.class, id);
                lost.again.push(id);
            } else {
                self.items.remove(&id);
                lost.ended.push(id);
            }
        }
        lost
    }

    /// Removes the workers that were silent for too long.
    pub fn expire(&mut self, now: Instant) -> Vec<(WorkerId, LostWork)> {
        let due = self.workers.values().filter(|worker| worker.due <= now).map(|worker| worker.id.clone());
        let due: Vec<WorkerId> = due.collect();
        due.into_iter().map(|who| (who.clone(), self.lost(&who))).collect()
    }

    /// Returns the time at which [`WorkQueue::expire`] removes a worker, unless that worker polls before.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        self.workers.values().map(|worker| worker.due).min()
    }

    /// Returns the time at which a worker is lost, unless it polls before.
    #[must_use]
    pub fn due(&self, name: &str) -> Option<Instant> {
        self.workers.get(name).map(|worker| worker.due)
    }

    /// Returns the time of a worker's newest poll.
    #[must_use]
    pub fn heard(&self, name: &str) -> Option<Instant> {
        self.workers.get(name).map(|worker| worker.heard)
    }

    /// Returns the current incarnation of the worker with this name.
    #[must_use]
    pub fn worker(&self, name: &str) -> Option<&WorkerId> {
        self.workers.get(name).map(|worker| &worker.id)
    }

    /// Returns each worker with its capacity and the number of items that it holds.
    pub fn workers(&self) -> impl Iterator<Item = (&WorkerId, usize, usize)> {
        self.workers.values().map(|worker| (&worker.id, worker.capacity, worker.holds.len()))
    }

    /// Returns the name of each class with its number of waiting items.
    pub fn classes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.classes.iter().map(|class| (&*class.name, class.waiting.len()))
    }

    /// Returns the number of items that wait for a worker.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.classes.waiting()
    }

    /// Returns the number of items that wait or that workers hold.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Returns `true` if no item waits and no worker holds one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Returns the number of waiting polls of workers with room that were not called.
    #[cfg(test)]
    pub(super) fn idle_with_room(&self) -> usize {
        self.ready.len()
    }

    fn worker_mut(&mut self, who: &WorkerId) -> Option<&mut Worker> {
        self.workers.get_mut(&who.name).filter(|worker| worker.id.incarnation == who.incarnation)
    }
}
