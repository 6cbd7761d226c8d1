//! Hosts a work queue: callers wait for responses, workers poll for work.

mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use gym_core::observe::stall::HandlerLabel;
use gym_core::observe::waits::{self, WAITS_ROUTE, Wait, WaitKind, WaitQuery, WaitTarget, recorded};
use gym_core::registry::{MemberLimits, MemberRegistry};
use gym_core::rollout::work::{Assignment, PollStart, WorkId, WorkPoll, WorkQueueError, WorkQueueOptions, WorkerId};
use gym_core::{Code, Error, Execution, Handler, Incarnation, Message, Request, Response, Result, Verb, World};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::registry::{RosterNews, follow_roster, is_loopback};
use crate::transport::body;
use crate::work::dispatch::Dispatch;
use crate::work::message::{self, AnswerBody, DoneBody, ItemBody, PollBody, WORK_ROUTE};
use crate::work::pool::state::{PendingCall, PoolState, WaitingPoll, WorkingMember};

/// Maximum number of bytes of a worker's name.
const NAME_BYTES_MAX: usize = 256;

/// Maximum number of bytes of one item. A worker's client accepts this much and the JSON beside it.
const ITEM_BYTES_MAX: usize = 255 << 20;

/// The kind of an item of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WorkKind {
    /// A rollout: it runs at most once. If its worker is lost, its caller begins a new attempt.
    Rollout,
    /// A call that can run twice without harm, such as a verification without a session. If its worker is lost, another worker gets it.
    Repeatable,
}

impl WorkKind {
    /// Returns the name of the class of items of this kind for a server.
    fn class(self, server: &str) -> String {
        match self {
            Self::Rollout => format!("rollout {server}"),
            Self::Repeatable => format!("repeatable {server}"),
        }
    }
}

/// Wait after which a call tells that no worker takes work. Workers look for new pools each second.
const NO_WORKER_AFTER: Duration = Duration::from_secs(5);

/// Bounds of a pool, and the weights of its servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkPoolOptions {
    /// Bounds and time limits of the queue.
    pub queue: WorkQueueOptions,
    /// The share of work that each server gets while items of several servers wait; 1 for others.
    pub weights: BTreeMap<String, u32>,
}

/// The state of a pool, for progress displays and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkPoolSnapshot {
    /// Items that wait for a worker.
    pub waiting: usize,
    /// Items that workers hold.
    pub held: usize,
    /// The workers, by name.
    pub workers: Vec<WorkerSnapshot>,
    /// Workers that were lost so far.
    pub workers_lost: u64,
    /// Responses that came too late to count.
    pub late: u64,
    /// The weights that differ from 1, by server.
    pub weights: BTreeMap<String, u32>,
}

/// One worker of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerSnapshot {
    /// Its name.
    pub name: Arc<str>,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Number of items that it can hold.
    pub capacity: usize,
    /// Number of items that it holds.
    pub held: usize,
    /// Items that it has finished.
    pub finished: u64,
    /// It gets no new work: its cluster's member is joining, suspect, draining or gone.
    pub paused: bool,
    /// The reason why the head server calls it suspect, or why the pool does, and the time after which its work moves; `None` if it is not
    /// suspect.
    pub suspect: Option<String>,
}

impl WorkerSnapshot {
    /// Creates the snapshot of a worker that holds nothing.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>, incarnation: Incarnation, capacity: usize) -> Self {
        Self { name: name.into(), incarnation, capacity, held: 0, finished: 0, paused: false, suspect: None }
    }
}

/// A work queue with its callers and workers. Cheap to clone; the last clone ends all waiting polls and calls.
///
/// It is the handler of `POST /work/next`, which workers poll, and dispatches the driver's rollouts.
#[derive(Clone, Debug)]
pub struct WorkPool {
    shared: Arc<PoolShared>,
    /// Removes silent workers, and follows clusters. Ends with the last clone.
    tasks: Arc<Mutex<JoinSet<()>>>,
}

#[derive(Debug)]
struct PoolShared {
    /// Differs between pools, so that a worker does not return responses of another pool's items.
    id: u64,
    weights: BTreeMap<String, u32>,
    state: Mutex<PoolState>,
    /// Wakes the task that removes silent workers.
    sweep: Notify,
}

impl WorkPool {
    /// Creates a pool without workers. Must be called within a tokio runtime.
    #[must_use]
    pub fn new(options: WorkPoolOptions, world: &World) -> Self {
        let shared = Arc::new(PoolShared {
            id: world.rng().u64(1..),
            weights: options.weights,
            state: Mutex::new(PoolState::new(options.queue)),
            sweep: Notify::new(),
        });
        let mut sweeper = JoinSet::new();
        sweeper.spawn(sweep(Arc::clone(&shared)).boxed());
        Self { shared, tasks: Arc::new(Mutex::new(sweeper)) }
    }

    /// Runs a `POST` on a worker that serves `server`. Any complete response is `Ok`, including error statuses. Dropping the future
    /// cancels the call, and the worker that runs it is told.
    ///
    /// # Errors
    /// `ResourceExhausted, NotStarted` if the queue is full; `Unavailable, Unknown` of the class `worker_lost` if the worker that
    /// ran it was lost; otherwise the error of the call on the worker, or of the passed deadline.
    pub async fn submit(&self, kind: WorkKind, server: &str, request: &Request) -> Result<Response> {
        let about = |error: Error| match error.subject() {
            "" => error.about(format!("{} {server}{}", request.verb, request.route)),
            _ => error,
        };
        let cx = &request.context;
        cx.check().map_err(about)?;
        if request.verb != Verb::Post {
            return Err(about(Error::not_started(Code::Unimplemented, "workers take POST requests only")));
        }
        let bytes = request.message.len();
        if bytes > ITEM_BYTES_MAX {
            let text =
                format!("the body has {bytes} bytes, and a worker takes at most {ITEM_BYTES_MAX}; use --dispatch push");
            return Err(about(Error::invalid(text)));
        }
        let (id, answered) = self.offer(kind, server, request).map_err(about)?;
        let _cancel = CancelItem { shared: &self.shared, id };
        let answered =
            async { answered.await.unwrap_or_else(|_| Err(Error::unknown(Code::Cancelled, "the pool has ended"))) };
        let wait = || {
            let label = HandlerLabel::new(server, request.route.path());
            let item = QueuedItem { pool: Arc::downgrade(&self.shared), id };
            Wait::new(WaitKind::Queue, cx.trace.trace_id).until(cx.deadline).of(label).on(Arc::new(item))
        };
        let bounded = pin!(cx.bound(Execution::Unknown, answered));
        let mut running = pin!(recorded(bounded, wait));
        let result = match tokio::time::timeout(NO_WORKER_AFTER, &mut running).await {
            Ok(result) => result,
            Err(_) => {
                self.warn_without_workers(server);
                running.await
            }
        };
        result.map_err(|error| {
            // Nothing has begun it while it waits in the queue.
            let waits = error.execution() == Execution::Unknown && self.shared.state.lock().queue.waits(id);
            about(if waits { error.with_execution(Execution::NotStarted) } else { error })
        })
    }

    /// Warns once if no worker takes work: nothing else tells why calls wait.
    fn warn_without_workers(&self, server: &str) {
        let mut state = self.shared.state.lock();
        let waiting = state.queue.waiting();
        if state.queue.workers().next().is_none() && !std::mem::replace(&mut state.told_of_no_worker, true) {
            tracing::warn!(
                server,
                waiting,
                fix = "start one with `rgym run --worker --head-url HEAD_URL`, or `rgym run --config FILE --pull-from HEAD_URL`",
                "no worker takes work from this pool"
            );
        }
    }

    fn offer(
        &self,
        kind: WorkKind,
        server: &str,
        request: &Request,
    ) -> Result<(WorkId, oneshot::Receiver<Result<Response>>)> {
        let weight = self.shared.weights.get(server).copied().unwrap_or(1);
        let (done, answered) = oneshot::channel();
        let mut state = self.shared.state.lock();
        if state.closed {
            return Err(Error::not_started(Code::Unavailable, "the pool has ended"));
        }
        let class =
            state.queue.class(&kind.class(server), weight, kind == WorkKind::Repeatable).map_err(|e| full(&e))?;
        let id = state.queue.offer(class, request.message.len()).map_err(|error| full(&error))?;
        state.calls.insert(id, PendingCall { server: server.into(), request: request.clone(), kind, done });
        state.wake_workers();
        Ok((id, answered))
    }

    /// Removes a worker that is known to be gone. Its rollouts end at once, and its repeatable items are handed to others. With an
    /// incarnation, does nothing if the worker has another one by now.
    pub fn worker_lost(&self, name: &str, incarnation: Option<Incarnation>, why: &str) {
        let mut state = self.shared.state.lock();
        let Some(who) = state.queue.worker(name).cloned() else { return };
        if incarnation.is_none_or(|incarnation| incarnation == who.incarnation) {
            let lost = state.queue.lost(&who);
            state.end_lost(&who, lost, why);
            state.wake_workers();
        }
    }

    /// Follows the members of a cluster. The work of a member that is gone ends at once. A worker that is a member gets new work only while
    /// the head server lists it as serving; what it has goes on. While the head server does not respond, what it said last holds. Must be
    /// called within a tokio runtime.
    pub fn follow(&self, members: Arc<dyn MemberRegistry>) {
        // The task ends with the pool, which owns it.
        let shared = Arc::clone(&self.shared);
        let following = follow_roster(members, move |news| {
            let mut state = shared.state.lock();
            match news {
                RosterNews::Update(update, _) => {
                    let state = &mut *state;
                    let listed = state.members.get_or_insert_default();
                    let mut lost = listed.apply(Instant::now(), update);
                    let held = state.memberships.iter().map(|(name, member)| (&**name, member.incarnation));
                    lost.extend(listed.replaced(update, held));
                    for lost in lost {
                        state.member_lost(&lost.name, lost.incarnation, &lost.reason);
                    }
                }
                RosterNews::Away(_) => return true,
                RosterNews::Unsupported(_) => state.members = None,
            }
            state.pause_workers();
            state.name_suspects(Instant::now());
            state.wake_workers();
            true
        });
        self.tasks.lock().spawn(following.boxed());
    }

    /// Answers from now on only to members that the head server lists, and to workers that [`WorkPool::admit`] names: for a pool that other machines
    /// reach. A member that a restarted head server does not list yet goes on. Nothing proves who asks: whoever reads the head server's list can
    /// name a member.
    pub fn admit_only_members(&self) {
        self.shared.state.lock().admitted.get_or_insert_default();
    }

    /// Calls [`WorkPool::admit_only_members`] if other machines reach `host`, where the pool listens.
    pub fn listens_at(&self, host: &str) {
        if !is_loopback(host) {
            self.admit_only_members();
        }
    }

    /// Answers also to a worker of this name, which is no member.
    pub fn admit(&self, worker: String) {
        if let Some(admitted) = &mut self.shared.state.lock().admitted {
            admitted.insert(worker);
        }
    }

    /// Ends the pool: calls that wait end as cancelled, and workers learn with their next answer that they can stop.
    pub fn close(&self) {
        let mut state = self.shared.state.lock();
        state.closed = true;
        // Their callers see that the sender is gone.
        state.calls.clear();
        state.polls.values().for_each(|poll| poll.wake.notify_one());
    }

    /// Returns the current state.
    #[must_use]
    pub fn snapshot(&self) -> WorkPoolSnapshot {
        let state = self.shared.state.lock();
        let now = Instant::now();
        let workers = state.queue.workers().map(|(who, capacity, held)| WorkerSnapshot {
            name: Arc::clone(&who.name),
            incarnation: who.incarnation,
            capacity,
            held,
            finished: state.finished.get(&who.name).copied().unwrap_or(0),
            paused: state.pauses(&who.name),
            suspect: state.suspect(now, &who.name),
        });
        let waiting = state.queue.waiting();
        WorkPoolSnapshot {
            waiting,
            held: state.queue.len() - waiting,
            workers: workers.collect(),
            workers_lost: state.workers_lost,
            late: state.late,
            weights: self.shared.weights.clone(),
        }
    }

    /// Accepts a poll, and answers it at once if it can be.
    fn poll(&self, request: &Request) -> Result<PollNext> {
        let shared = &self.shared;
        let head = request.message.head.to_bytes();
        let body: PollBody =
            serde_json::from_slice(&head).map_err(|error| Error::invalid(format!("the poll is not valid: {error}")))?;
        if body.worker.is_empty() || body.worker.len() > NAME_BYTES_MAX {
            return Err(Error::invalid(format!("worker: the name must have 1 to {NAME_BYTES_MAX} bytes")));
        }
        let mut bodies = request.message.segments.iter().cloned();
        let done = body.done.into_iter().map(|done| {
            let message = message::next(&mut bodies, done.content_type.as_deref(), done.segments)?;
            Ok((done, message))
        });
        let done: Vec<(DoneBody, Message)> = done.collect::<Result<_>>()?;
        let who = WorkerId::new(body.worker, Incarnation(body.incarnation));
        let now = Instant::now();
        let heartbeat = body.timing.map_or(Duration::ZERO, |timing| timing.heartbeat);
        let member = body.member.map(|member| WorkingMember { incarnation: Incarnation(member), heartbeat });
        let mut guard = shared.state.lock();
        let state = &mut *guard;
        // Before anything that a stranger could change or learn.
        state.admits(&who.name, member)?;
        let joins = state.queue.worker(&who.name) != Some(&who);
        if body.queue != 0 && body.queue != shared.id {
            return Ok(PollNext::Answer(shared.restart()?));
        }
        for (done, message) in done {
            let id = WorkId(done.id);
            match state.queue.finish(now, &who, id) {
                Ok(()) => {
                    *state.finished.entry(Arc::clone(&who.name)).or_default() += 1;
                    state.answer(id, message::result(done, message));
                }
                Err(_) => state.late += 1,
            }
        }
        if body.leave {
            let lost = state.queue.lost(&who);
            state.end_lost(&who, lost, "it has left");
            state.wake_workers();
            return Ok(PollNext::Answer(shared.write(now, state, &Assignment::default())?));
        }
        if state.closed {
            return Ok(PollNext::Answer(shared.write(now, state, &Assignment::default())?));
        }
        let wait = Duration::from_millis(body.wait_ms).min(state.queue.options().wait_max);
        let classes = body.servers.map(|servers| {
            let both =
                |server: String| [WorkKind::Rollout, WorkKind::Repeatable].map(|kind| kind.class(&server).into());
            servers.into_iter().flat_map(both).collect::<BTreeSet<Arc<str>>>()
        });
        let paused = state.pauses_member(&who.name, member);
        // As long as the head server waits for it.
        let response_timeout =
            body.timing.map_or(Duration::ZERO, |timing| timing.timeout.min(MemberLimits::default().timeout_max));
        let poll = WorkPoll { number: body.poll, capacity: body.capacity, wait, classes, response_timeout, paused };
        match state.queue.poll(now, &who, poll) {
            Ok(PollStart::Answered(assignment)) => Ok(PollNext::Answer(shared.write(now, state, &assignment)?)),
            Ok(PollStart::Waiting(lost)) => {
                if joins {
                    tracing::info!(worker = %who.name, capacity = body.capacity, "a worker takes work");
                    // An earlier process of this name is gone.
                    state.end_lost(&who, lost, "it was restarted");
                } else if let Some(earlier) = state.polls.remove(&who.name) {
                    earlier.wake.notify_one();
                }
                match member {
                    Some(member) => state.memberships.insert(Arc::clone(&who.name), member),
                    None => state.memberships.remove(&who.name),
                };
                state.name_suspect(now, &who.name);
                let next = if wait.is_zero() {
                    state.queue.answer(now, &who, body.poll)
                } else {
                    state.queue.take(now, &who, body.poll)
                };
                let next = match next {
                    Some(assignment) => PollNext::Answer(shared.write(now, state, &assignment)?),
                    None => {
                        let wake = Arc::new(Notify::new());
                        let waiting = WaitingPoll { who: who.clone(), number: body.poll, wake: Arc::clone(&wake) };
                        state.polls.insert(Arc::clone(&who.name), waiting);
                        let shared = Arc::clone(shared);
                        let open = OpenPoll { shared, who: who.clone(), number: body.poll, answered: false };
                        PollNext::Wait { open, until: now + wait, wake }
                    }
                };
                // Items of a lost incarnation that wait again, and those for which this worker had no room.
                state.wake_workers();
                shared.arm(state, &who.name);
                Ok(next)
            }
            Err(WorkQueueError::Unknown(_)) => Ok(PollNext::Answer(shared.restart()?)),
            Err(error @ WorkQueueError::Stale(_)) => {
                Err(Error::not_started(Code::FailedPrecondition, error.to_string()))
            }
            Err(error) => Err(full(&error)),
        }
    }
}

fn full(error: &WorkQueueError) -> Error {
    Error::not_started(Code::ResourceExhausted, error.to_string())
}

/// The next step after a poll.
enum PollNext {
    Answer(Response),
    Wait { open: OpenPoll, until: Instant, wake: Arc<Notify> },
}

impl PoolShared {
    /// Makes the sweeper wake in time for this worker.
    fn arm(&self, state: &mut PoolState, name: &str) {
        if let Some(due) = state.due(name)
            && state.armed.is_none_or(|armed| due < armed)
        {
            state.armed = Some(due);
            self.sweep.notify_one();
        }
    }

    /// Writes the answer to a poll.
    fn write(&self, now: Instant, state: &PoolState, assignment: &Assignment) -> Result<Response> {
        let mut segments = Vec::with_capacity(assignment.items.len());
        let items = assignment.items.iter().filter_map(|id| {
            let call = state.calls.get(id)?;
            let cx = &call.request.context;
            let remaining = cx.deadline.saturating_duration_since(now);
            let (content_type, count) = message::append(&call.request.message, &mut segments);
            Some(ItemBody {
                id: id.0,
                server: call.server.clone().into(),
                route: call.request.route.as_str().to_owned(),
                timeout_ms: u64::try_from(remaining.as_millis()).unwrap_or(u64::MAX),
                reply_bytes_max: cx.reply_bytes_max,
                repeatable: call.kind == WorkKind::Repeatable,
                traceparent: cx.trace.to_traceparent(),
                content_type,
                metadata: message::pairs(&cx.metadata),
                segments: count,
            })
        });
        let items = items.collect();
        let cancel = assignment.cancelled.iter().map(|id| id.0).collect();
        let body = AnswerBody { queue: self.id, items, cancel, restart: false, closed: state.closed };
        let mut response = Response::json(body::write(&body)?);
        response.message.segments = segments;
        Ok(response)
    }

    fn restart(&self) -> Result<Response> {
        let body = AnswerBody { queue: self.id, restart: true, ..AnswerBody::default() };
        Ok(Response::json(body::write(&body)?))
    }
}

/// An item whose caller waits.
struct QueuedItem {
    /// Not the pool itself, which must end when its owner drops it.
    pool: Weak<PoolShared>,
    id: WorkId,
}

impl WaitTarget for QueuedItem {
    fn describe(&self) -> String {
        let Some(pool) = self.pool.upgrade() else { return String::new() };
        let state = pool.state.lock();
        if let Some(worker) = state.queue.holder(self.id) {
            return match state.suspect(Instant::now(), &worker.name) {
                Some(why) => format!("worker {} has it and is suspect: {why}", worker.name),
                None => format!("worker {} has it", worker.name),
            };
        }
        let workers: Vec<(bool, bool)> =
            (state.queue.workers()).map(|(who, capacity, held)| (state.pauses(&who.name), held >= capacity)).collect();
        let paused = workers.iter().filter(|(paused, _)| *paused).count();
        let full = workers.iter().filter(|(_, full)| *full).count();
        let waiting = state.queue.waiting();
        match workers.len() {
            0 => format!("no worker has joined; waiting items: {waiting}"),
            all => format!("{all} workers, {full} of them full and {paused} paused; waiting items: {waiting}"),
        }
    }
}

/// Cancels an item when its caller leaves.
struct CancelItem<'a> {
    shared: &'a PoolShared,
    id: WorkId,
}

impl Drop for CancelItem<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        if state.calls.remove(&self.id).is_some() {
            state.queue.cancel(self.id);
            state.wake_workers();
        }
    }
}

/// A poll that waits. Dropping it before it was answered, because the worker's connection broke, begins the time after which the
/// worker is lost.
struct OpenPoll {
    shared: Arc<PoolShared>,
    who: WorkerId,
    number: u64,
    answered: bool,
}

impl OpenPoll {
    fn is_current(&self, state: &PoolState) -> bool {
        state.polls.get(&self.who.name).is_some_and(|poll| poll.number == self.number && poll.who == self.who)
    }

    async fn wait(mut self, until: Instant, wake: Arc<Notify>) -> Result<Response> {
        loop {
            let timed_out = tokio::select! {
                biased;
                () = wake.notified() => false,
                () = tokio::time::sleep_until(until) => true,
            };
            let shared = Arc::clone(&self.shared);
            let now = Instant::now();
            let mut guard = shared.state.lock();
            let state = &mut *guard;
            let current = self.is_current(state);
            let assignment = match (current, timed_out || state.closed) {
                // A newer poll has taken its place, or the worker was removed.
                (false, _) => Some(Assignment::default()),
                (true, false) => state.queue.take(now, &self.who, self.number),
                (true, true) => Some(state.queue.answer(now, &self.who, self.number).unwrap_or_default()),
            };
            let Some(assignment) = assignment else { continue };
            self.answered = true;
            if current {
                state.polls.remove(&self.who.name);
                shared.arm(state, &self.who.name);
                // What this worker had no room for.
                state.wake_workers();
            }
            return shared.write(now, state, &assignment);
        }
    }
}

impl Drop for OpenPoll {
    fn drop(&mut self) {
        if self.answered {
            return;
        }
        let mut guard = self.shared.state.lock();
        let state = &mut *guard;
        if self.is_current(state) {
            state.polls.remove(&self.who.name);
            state.queue.disconnected(Instant::now(), &self.who, self.number);
            self.shared.arm(state, &self.who.name);
            // It may have been woken for an item that another worker can take.
            state.wake_workers();
        }
    }
}

/// Removes workers that were silent for too long.
async fn sweep(pool: Arc<PoolShared>) {
    loop {
        let armed = {
            let now = Instant::now();
            let mut state = pool.state.lock();
            for (who, lost) in state.queue.expire(now) {
                state.end_lost(&who, lost, "it did not poll in time");
            }
            state.name_suspects(now);
            state.wake_workers();
            let silent = state.memberships.keys().filter_map(|name| state.due(name)).min();
            state.armed = state.queue.next_due().into_iter().chain(silent).min();
            state.armed
        };
        let changed = pool.sweep.notified();
        match armed {
            Some(due) => {
                tokio::select! {
                    biased;
                    () = changed => {}
                    () = tokio::time::sleep_until(due) => {}
                }
            }
            None => changed.await,
        }
    }
}

impl Dispatch for WorkPool {
    fn run<'a>(&'a self, server: &'a str, request: &'a Request) -> BoxFuture<'a, Result<Response>> {
        Box::pin(self.submit(WorkKind::Rollout, server, request))
    }
}

impl Handler for WorkPool {
    /// Serves `POST /work/next`, whose poll counts before this method returns, and `GET /waits`.
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        // The host of a pool can be a collector on another machine than `rgym stuck`.
        if (request.verb, request.route.path()) == (Verb::Get, WAITS_ROUTE) {
            let waits = waits::report(&WaitQuery::parse(request.route.query().unwrap_or_default()));
            return Box::pin(std::future::ready(body::write(&waits).map(Response::json)));
        }
        if (request.verb, request.route.path()) != (Verb::Post, WORK_ROUTE) {
            let error = Error::not_started(Code::NotFound, format!("this server has only POST {WORK_ROUTE}"));
            return Box::pin(std::future::ready(Err(error)));
        }
        if let Some(rejected) = request.reject_browsers() {
            return Box::pin(std::future::ready(Ok(rejected)));
        }
        match self.poll(&request) {
            Ok(PollNext::Answer(response)) => Box::pin(std::future::ready(Ok(response))),
            Ok(PollNext::Wait { open, until, wake }) => Box::pin(open.wait(until, wake)),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gym_core::CallContext;
    use gym_core::testing::SimFiles;

    use super::*;

    /// A worker of that commit tells no intervals, so it is lost as one that is no member is.
    #[tokio::test(start_paused = true)]
    async fn a_worker_of_an_earlier_commit_takes_work() {
        let recorded: Vec<serde_json::Value> =
            serde_json::from_str(include_str!("../../../../tests/data/cluster/3baa8bc1.json")).unwrap();
        let message = recorded.iter().find(|message| message["route"] == WORK_ROUTE).unwrap();
        serde_json::from_value::<AnswerBody>(message["response"].clone()).unwrap();
        let world = World::new(Arc::new(SimFiles::new(1)), 1, Duration::from_secs(1));
        let pool = WorkPool::new(WorkPoolOptions::default(), &world);
        let text = message["request"].to_string();
        let response = pool.handle(Request::post(CallContext::default(), WORK_ROUTE, text)).await.unwrap();
        let answer: AnswerBody = serde_json::from_slice(&response.message.head.to_bytes()).unwrap();
        assert!(answer.items.is_empty() && !answer.restart && !answer.closed);
        let [worker] = pool.snapshot().workers.try_into().unwrap();
        assert_eq!((&*worker.name, worker.capacity, worker.suspect), ("w1", 256, None));
        let WorkQueueOptions { silence_max, .. } = WorkQueueOptions::default();
        tokio::time::sleep(silence_max + Duration::from_millis(100)).await;
        assert!(pool.snapshot().workers.is_empty(), "it did not poll in time");
    }
    #[tokio::test(start_paused = true)]
    async fn a_call_that_waits_without_a_worker_says_so_once_and_not_at_once() {
        let world = World::new(Arc::new(SimFiles::new(1)), 1, Duration::from_secs(1));
        let pool = WorkPool::new(WorkPoolOptions::default(), &world);
        for (timeout, told) in [(NO_WORKER_AFTER / 2, false), (NO_WORKER_AFTER * 2, true)] {
            let request = Request::post(CallContext::within(timeout), gym_core::Route::from_static("/run"), "{}");
            pool.submit(WorkKind::Rollout, "agent", &request).await.unwrap_err();
            assert_eq!(pool.shared.state.lock().told_of_no_worker, told, "{timeout:?}");
        }
    }
}
