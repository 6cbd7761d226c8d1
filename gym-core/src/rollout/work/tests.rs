use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::message::Incarnation;
use std::time::Duration;
use tokio::time::Instant;

fn poll(number: u64, capacity: u32) -> WorkPoll {
    WorkPoll {
        number,
        capacity,
        wait: Duration::from_secs(1),
        classes: None,
        response_timeout: Duration::ZERO,
        paused: false,
    }
}

fn who(name: &str, incarnation: u64) -> WorkerId {
    WorkerId::new(name, Incarnation(incarnation))
}

/// Polls and takes what there is at once.
fn take(queue: &mut WorkQueue, now: Instant, who: &WorkerId, number: u64, capacity: u32) -> Vec<WorkId> {
    queue.poll(now, who, poll(number, capacity)).unwrap();
    queue.answer(now, who, number).unwrap().items
}

#[test]
fn a_full_queue_rejects_an_item_until_one_ends() {
    let mut queue = WorkQueue::new(WorkQueueOptions { items_max: 2, ..WorkQueueOptions::default() });
    let class = queue.class("a", 1, false).unwrap();
    let first = queue.offer(class, 1).unwrap();
    queue.offer(class, 1).unwrap();
    assert_eq!(queue.offer(class, 1), Err(WorkQueueError::Full(2)));
    let (now, a) = (Instant::now(), who("a", 1));
    assert_eq!(take(&mut queue, now, &a, 1, 8).len(), 2);
    assert_eq!(queue.offer(class, 1), Err(WorkQueueError::Full(2)), "held items count");
    queue.finish(now, &a, first).unwrap();
    queue.offer(class, 1).unwrap();
}

fn answered(items: &[WorkId]) -> PollStart {
    PollStart::Answered(Assignment { items: items.to_vec(), cancelled: Vec::new() })
}

#[test]
fn a_poll_that_is_sent_again_gets_the_same_items() {
    let mut queue = WorkQueue::new(WorkQueueOptions::default());
    let class = queue.class("a", 1, false).unwrap();
    let ids: Vec<WorkId> = (0..3).map(|_| queue.offer(class, 1).unwrap()).collect();
    let (now, a) = (Instant::now(), who("a", 1));
    assert_eq!(take(&mut queue, now, &a, 1, 8), ids);
    assert_eq!(queue.poll(now, &a, poll(1, 8)), Ok(answered(&ids)));
    queue.finish(now, &a, ids[0]).unwrap();
    assert_eq!(queue.poll(now, &a, poll(1, 8)), Ok(answered(&ids[1..])));
}

#[test]
fn a_new_incarnation_inherits_nothing_and_the_old_one_is_late() {
    let mut queue = WorkQueue::new(WorkQueueOptions::default());
    let rollouts = queue.class("rollouts", 1, false).unwrap();
    let verifications = queue.class("verifications", 1, true).unwrap();
    let (rollout, verification) = (queue.offer(rollouts, 1).unwrap(), queue.offer(verifications, 1).unwrap());
    let (now, old, new) = (Instant::now(), who("a", 1), who("a", 2));
    assert_eq!(take(&mut queue, now, &old, 1, 8).len(), 2);
    let started = queue.poll(now, &new, poll(1, 8)).unwrap();
    assert_eq!(started, PollStart::Waiting(LostWork { ended: vec![rollout], again: vec![verification] }));
    assert_eq!(queue.finish(now, &old, rollout), Err(LateWork));
    assert_eq!(queue.finish(now, &old, verification), Err(LateWork));
    assert_eq!(queue.poll(now, &old, poll(2, 8)), Err(WorkQueueError::Stale(new.clone())));
    assert_eq!(queue.answer(now, &new, 1).unwrap().items, [verification]);
    queue.finish(now, &new, verification).unwrap();
    assert!(queue.is_empty());
}

#[test]
fn a_silent_worker_is_lost_and_must_begin_again() {
    let mut queue = WorkQueue::new(WorkQueueOptions::default());
    let class = queue.class("a", 1, false).unwrap();
    let id = queue.offer(class, 1).unwrap();
    let (now, a) = (Instant::now(), who("a", 1));
    assert_eq!(take(&mut queue, now, &a, 1, 8), [id]);
    let silence_max = queue.options().silence_max;
    assert_eq!(queue.next_due(), Some(now + silence_max));
    assert_eq!(queue.expire(now + silence_max - Duration::from_millis(1)), []);
    assert_eq!(queue.expire(now + silence_max), [(a.clone(), LostWork { ended: vec![id], again: vec![] })]);
    assert_eq!(queue.poll(now, &a, poll(2, 8)), Err(WorkQueueError::Unknown(a)));
}

#[test]
fn a_worker_whose_connection_broke_is_lost_sooner_unless_it_returns() {
    let options = WorkQueueOptions::default();
    let mut queue = WorkQueue::new(options.clone());
    let (now, a) = (Instant::now(), who("a", 1));
    queue.poll(now, &a, poll(1, 8)).unwrap();
    queue.disconnected(now, &a, 1);
    assert_eq!(queue.next_due(), Some(now + options.reconnect_max));
    assert_eq!(queue.poll(now, &a, poll(1, 8)), Ok(PollStart::Waiting(LostWork::default())), "sent again");
    assert_eq!(queue.next_due(), Some(now + Duration::from_secs(1) + options.silence_max));
}

#[test]
fn a_cancelled_item_is_told_to_the_worker_that_holds_it() {
    let mut queue = WorkQueue::new(WorkQueueOptions::default());
    let class = queue.class("a", 1, false).unwrap();
    let (held, waiting) = (queue.offer(class, 1).unwrap(), queue.offer(class, 1).unwrap());
    let (now, a) = (Instant::now(), who("a", 1));
    assert_eq!(take(&mut queue, now, &a, 1, 1), [held]);
    queue.poll(now, &a, poll(2, 1)).unwrap();
    assert_eq!(queue.call(), None, "the worker has no room");
    assert!(queue.cancel(waiting) && queue.cancel(held));
    assert_eq!(queue.call(), Some((a.clone(), 2)));
    assert_eq!(queue.take(now, &a, 2), Some(Assignment { items: vec![], cancelled: vec![held] }));
    assert!(!queue.cancel(held), "it has ended");
    let third = queue.offer(class, 1).unwrap();
    queue.poll(now, &a, poll(3, 1)).unwrap();
    assert_eq!(queue.take(now, &a, 3), None, "a cancelled item takes its place until it is stopped");
    assert_eq!(queue.finish(now, &a, held), Err(LateWork));
    assert_eq!(queue.call(), Some((a.clone(), 3)));
    assert_eq!(queue.take(now, &a, 3).unwrap().items, [third]);
}

#[test]
fn workers_that_wait_together_share_what_there_is() {
    let mut queue = WorkQueue::new(WorkQueueOptions::default());
    let class = queue.class("a", 1, false).unwrap();
    let (now, workers) = (Instant::now(), ["a", "b", "c"].map(|name| who(name, 1)));
    for worker in &workers {
        queue.poll(now, worker, poll(1, 100)).unwrap();
    }
    for _ in 0..9 {
        queue.offer(class, 1).unwrap();
    }
    let mut taken = BTreeMap::new();
    while let Some((worker, number)) = queue.call() {
        taken.insert(worker.clone(), queue.take(now, &worker, number).unwrap().items.len());
    }
    assert_eq!(taken.into_values().collect::<Vec<_>>(), [3, 3, 3]);
}

#[test]
fn small_items_come_in_larger_batches() {
    let batch = |took: Duration| {
        let mut queue = WorkQueue::new(WorkQueueOptions::default());
        let class = queue.class("a", 1, false).unwrap();
        let (now, a) = (Instant::now(), who("a", 1));
        let first = queue.offer(class, 1).unwrap();
        assert_eq!(take(&mut queue, now, &a, 1, 100), [first]);
        queue.finish(now + took, &a, first).unwrap();
        for _ in 0..1_000 {
            queue.offer(class, 1).unwrap();
        }
        take(&mut queue, now + took, &a, 2, 100).len()
    };
    assert_eq!(batch(Duration::from_secs(1)), 50);
    assert_eq!(batch(Duration::from_micros(62)), 80);
    assert_eq!(batch(Duration::from_micros(1)), 100);
}

#[test]
fn a_batch_is_bounded_in_bytes() {
    let mut queue = WorkQueue::new(WorkQueueOptions { batch_bytes_max: 10, ..WorkQueueOptions::default() });
    let class = queue.class("a", 1, false).unwrap();
    let ids: Vec<WorkId> = [4, 6, 1, 11].map(|bytes| queue.offer(class, bytes).unwrap()).into();
    let (now, a) = (Instant::now(), who("a", 1));
    assert_eq!(take(&mut queue, now, &a, 1, 100), ids[..2]);
    assert_eq!(take(&mut queue, now, &a, 2, 100), ids[2..3]);
    assert_eq!(take(&mut queue, now, &a, 3, 100), ids[3..], "a single item is never too large");
}

#[test]
fn a_paused_worker_keeps_what_it_holds_and_gets_nothing_new() {
    let mut queue = WorkQueue::new(WorkQueueOptions::default());
    let class = queue.class("a", 1, false).unwrap();
    let (now, a, b) = (Instant::now(), who("a", 1), who("b", 1));
    let first = queue.offer(class, 1).unwrap();
    assert_eq!(take(&mut queue, now, &a, 1, 8), [first]);
    queue.poll(now, &a, poll(2, 8)).unwrap();
    let second = queue.offer(class, 1).unwrap();
    // It was called for the item, and is paused before it takes it.
    assert_eq!(queue.call(), Some((a.clone(), 2)));
    queue.pause(&a, true);
    assert_eq!((queue.take(now, &a, 2), queue.call()), (None, None));
    let paused = WorkPoll { paused: true, ..poll(1, 8) };
    queue.poll(now, &b, paused).unwrap();
    assert_eq!((queue.take(now, &b, 1), queue.call()), (None, None));
    queue.finish(now, &a, first).unwrap();
    assert_eq!(queue.call(), None);
    queue.pause(&b, false);
    assert_eq!(queue.call(), Some((b.clone(), 1)));
    assert_eq!(queue.take(now, &b, 1).unwrap().items, [second]);
}

#[test]
fn a_worker_gets_only_what_it_serves() {
    let mut queue = WorkQueue::new(WorkQueueOptions::default());
    let (a, b) = (queue.class("a", 1, false).unwrap(), queue.class("b", 1, false).unwrap());
    let (now, worker) = (Instant::now(), who("a", 1));
    let only = WorkPoll { classes: Some(BTreeSet::from(["b".into()])), ..poll(1, 8) };
    queue.poll(now, &worker, only).unwrap();
    queue.offer(a, 1).unwrap();
    assert_eq!(queue.call(), None);
    let wanted = queue.offer(b, 1).unwrap();
    assert_eq!(queue.call(), Some((worker.clone(), 1)));
    assert_eq!(queue.take(now, &worker, 1).unwrap().items, [wanted]);
}

proptest! {
    /// While the same classes have waiting items, each has its share of the items that were handed out, within one item.
    #[test]
    fn each_class_gets_its_share_within_one_item(weights in proptest::collection::vec(1_u32..50, 1..8), count in 1_u64..400) {
        let mut queue = WorkQueue::new(WorkQueueOptions::default());
        let now = Instant::now();
        let mut class_of = BTreeMap::new();
        for (at, weight) in weights.iter().enumerate() {
            let class = queue.class(&at.to_string(), *weight, false).unwrap();
            for _ in 0..count {
                class_of.insert(queue.offer(class, 1).unwrap(), at);
            }
        }
        let total: u32 = weights.iter().sum();
        let mut served = vec![0_u64; weights.len()];
        let worker = who("a", 1);
        for number in 1..=count {
            let taken = take(&mut queue, now, &worker, number, 1);
            prop_assert_eq!(taken.len(), 1);
            served[class_of[&taken[0]]] += 1;
            queue.finish(now, &worker, taken[0]).unwrap();
            for (got, weight) in served.iter().zip(&weights) {
                let share = number as f64 * f64::from(*weight) / f64::from(total);
                prop_assert!((*got as f64 - share).abs() <= 1.0 + 1e-9, "{got} of {number}, share {share}");
            }
        }
    }
}

/// The end of an item, as its caller sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Finished,
    Cancelled,
    LostWithWorker,
}

/// A worker as it sees itself.
#[derive(Debug)]
struct ModelWorker {
    id: WorkerId,
    capacity: u32,
    number: u64,
    holds: BTreeSet<WorkId>,
    /// Its poll has no answer yet.
    waits: bool,
    /// The answer to its poll was lost on the way.
    misses_answer: bool,
    paused: bool,
}

/// Plays random schedules, and records what happened to each item.
struct Model {
    queue: WorkQueue,
    rng: fastrand::Rng,
    now: Instant,
    workers: Vec<ModelWorker>,
    classes: Vec<(ClassId, bool)>,
    repeatable: BTreeMap<WorkId, bool>,
    endings: BTreeMap<WorkId, Ending>,
    handed_to: BTreeMap<WorkId, BTreeSet<WorkerId>>,
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut queue = WorkQueue::new(WorkQueueOptions { items_max: 24, ..WorkQueueOptions::default() });
        let mut rng = fastrand::Rng::with_seed(seed);
        let classes =
            (0..4).map(|at| (queue.class(&at.to_string(), rng.u32(1..6), at == 3).unwrap(), at == 3)).collect();
        let workers = ["a", "b", "c"].map(|name| ModelWorker {
            id: who(name, 1),
            capacity: rng.u32(1..6),
            number: 0,
            holds: BTreeSet::new(),
            waits: false,
            misses_answer: false,
            paused: false,
        });
        let (repeatable, endings, handed_to) = Default::default();
        Self { queue, rng, now: Instant::now(), workers: workers.into(), classes, repeatable, endings, handed_to }
    }

    fn end(&mut self, id: WorkId, ending: Ending) {
        assert_eq!(self.endings.insert(id, ending), None, "{id} ended twice");
    }

    fn note_lost(&mut self, lost: LostWork) {
        for id in lost.ended {
            assert!(!self.repeatable[&id]);
            self.end(id, Ending::LostWithWorker);
        }
        assert!(lost.again.iter().all(|id| self.repeatable[id] && !self.endings.contains_key(id)));
    }

    fn arrive(&mut self, at: usize, assignment: &Assignment) {
        for id in &assignment.items {
            assert!(!self.endings.contains_key(id), "{id} was handed out after its end");
            let to = self.handed_to.entry(*id).or_default();
            assert!(
                to.contains(&self.workers[at].id) || !self.workers[at].paused,
                "{id} was handed to a paused worker"
            );
            to.insert(self.workers[at].id.clone());
            assert!(to.len() == 1 || self.repeatable[id], "{id} was handed out twice: {to:?}");
        }
        let lost = self.rng.u8(0..8) == 0;
        let worker = &mut self.workers[at];
        worker.waits = false;
        worker.misses_answer = lost;
        if !lost {
            worker.holds.extend(&assignment.items);
            assert!(worker.holds.len() <= worker.capacity as usize, "{worker:?}");
        }
        if !lost {
            for id in &assignment.cancelled {
                worker.holds.remove(id);
                assert_eq!(self.queue.finish(self.now, &worker.id, *id), Err(LateWork));
            }
        }
    }

    fn polls(&mut self, at: usize) {
        let worker = &mut self.workers[at];
        worker.number += u64::from(!worker.misses_answer);
        worker.number = worker.number.max(1);
        let (id, number, capacity) = (worker.id.clone(), worker.number, worker.capacity);
        let poll = WorkPoll { paused: worker.paused, ..poll(number, capacity) };
        match self.queue.poll(self.now, &id, poll) {
            Ok(PollStart::Waiting(lost)) => {
                self.workers[at].misses_answer = false;
                self.workers[at].waits = true;
                self.note_lost(lost);
                if let Some(assignment) = self.queue.take(self.now, &id, number) {
                    self.arrive(at, &assignment);
                }
            }
            Ok(PollStart::Answered(assignment)) => self.arrive(at, &assignment),
            Err(WorkQueueError::Unknown(_)) => self.restart(at),
            Err(error) => panic!("{error}"),
        }
    }

    fn restart(&mut self, at: usize) {
        let worker = &mut self.workers[at];
        worker.id.incarnation.0 += 1;
        worker.number = 0;
        worker.misses_answer = false;
        worker.waits = false;
        worker.holds.clear();
    }

    fn finishes(&mut self, at: usize) {
        let worker = &mut self.workers[at];
        let Some(id) = self.rng.choice(worker.holds.iter().copied()) else { return };
        worker.holds.remove(&id);
        match self.queue.finish(self.now, &worker.id, id) {
            Ok(()) => self.end(id, Ending::Finished),
            // Only if it was cancelled, or the worker was lost and does not know.
            Err(LateWork) => {
                let known = self.queue.worker(&worker.id.name) == Some(&worker.id);
                assert!(!known || self.endings.get(&id) == Some(&Ending::Cancelled), "{id} is late at {worker:?}");
            }
        }
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(self.rng.u64(0..50));
        let at = self.rng.usize(..self.workers.len());
        match self.rng.u8(0..100) {
            0..30 => {
                let (class, repeatable) = self.classes[self.rng.usize(..self.classes.len())];
                match self.queue.offer(class, 1) {
                    Ok(id) => drop(self.repeatable.insert(id, repeatable)),
                    Err(error) => assert_eq!(error, WorkQueueError::Full(24)),
                }
            }
            30..60 => self.polls(at),
            60..85 => self.finishes(at),
            85..90 => {
                let open = self.repeatable.keys().copied().filter(|id| !self.endings.contains_key(id));
                if let Some(id) = self.rng.choice(open.collect::<Vec<_>>()) {
                    assert!(self.queue.cancel(id));
                    self.end(id, Ending::Cancelled);
                }
            }
            90..93 => {
                let (id, number) = (self.workers[at].id.clone(), self.workers[at].number);
                self.queue.disconnected(self.now, &id, number);
                self.workers[at].misses_answer |= std::mem::take(&mut self.workers[at].waits);
            }
            93..95 => {
                let lost = self.queue.lost(&self.workers[at].id);
                self.note_lost(lost);
            }
            95..96 => self.restart(at),
            96..97 => {
                let worker = &mut self.workers[at];
                worker.paused = !worker.paused;
                self.queue.pause(&worker.id, worker.paused);
            }
            _ => {
                self.now += self.rng.choice([1, 30]).map(Duration::from_secs).unwrap();
                for (_, lost) in self.queue.expire(self.now) {
                    self.note_lost(lost);
                }
            }
        }
        self.settle();
    }

    /// Answers all polls that can be answered, and checks the bounds.
    fn settle(&mut self) {
        while let Some((id, number)) = self.queue.call() {
            if let Some(assignment) = self.queue.take(self.now, &id, number) {
                let at = self.workers.iter().position(|worker| worker.id == id);
                // The worker was restarted meanwhile, and the answer reaches nobody.
                if let Some(at) = at {
                    self.arrive(at, &assignment);
                } else {
                    for item in assignment.items {
                        self.handed_to.entry(item).or_default().insert(id.clone());
                    }
                }
            }
        }
        assert!(self.queue.len() <= 24);
        assert!(self.queue.workers().all(|(_, capacity, holds)| holds <= capacity));
        let open = self.repeatable.len() - self.endings.len();
        assert_eq!(self.queue.len(), open, "every item is in the queue until it ends");
        let idle = self.queue.idle_with_room();
        assert!(idle == 0 || self.queue.waiting() == 0, "{idle} workers with room wait beside waiting items");
    }
}

#[test]
fn random_schedules_lose_nothing_and_hand_out_nothing_twice() {
    for seed in 0..2_000 {
        let mut model = Model::new(seed);
        let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..150 {
                model.step();
            }
            // All workers serve until nothing is left: no item starves.
            for worker in &mut model.workers {
                worker.paused = false;
                model.queue.pause(&worker.id, false);
            }
            for _ in 0..60 {
                for at in 0..model.workers.len() {
                    model.polls(at);
                    model.settle();
                    while !model.workers[at].holds.is_empty() {
                        model.finishes(at);
                    }
                }
            }
            for worker in 0..model.workers.len() {
                let lost = model.queue.lost(&model.workers[worker].id);
                model.note_lost(lost);
            }
            assert_eq!(model.queue.waiting(), 0);
        }));
        assert!(played.is_ok(), "seed {seed}");
    }
}
