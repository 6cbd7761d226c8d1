//! A group call in flight. One future sends requests and reads replies concurrently. Otherwise, an unread reply of one rank could
//! hold the capacity for which the request to another rank waits.

pub(crate) mod waiting;

use std::borrow::Cow;
use std::fmt::Write as _;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use gym_core::CancelToken;
use gym_core::base::watch;
use gym_core::group::GroupView;
use gym_core::group::batch::{Batch, Payload};
use gym_core::group::layout::Rank;
use gym_core::group::worker::host::{REPLY_METADATA, REPLY_NONE};
use gym_core::group::worker::{Method, read, route};
use gym_core::message::{CallContext, Incarnation};
use gym_core::message::{Message, Request, Response, Verb};
use gym_core::observe::waits::recorded;
use gym_core::transport::check_incarnation;
use gym_core::transport::mem::{TrySendOutcome, try_send};
use gym_core::transport::{Channel, Reply};
use gym_core::{Code, Error, Execution, Result};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use crate::call::error::Answer;
use crate::call::gate::Gate;
use crate::call::gather::waiting::{RanksWait, TurnCheck};
use crate::call::monitor::RankMonitor;
use crate::call::reach::{may_answer, no_answer};
use crate::call::{GroupError, RankOutcome};

/// The time that a failed call waits for the exit status of a rank whose connection broke. The link notices the end of a process
/// before its supervisor does.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);

/// The call of one rank.
pub(crate) struct RankCall {
    pub(crate) rank: Rank,
    pub(crate) incarnation: Incarnation,
    pub(crate) channel: Channel,
    pub(crate) message: Message,
    /// The shard of the batch that the rank returns; `None` if the rank's reply is not collected.
    pub(crate) shard: Option<usize>,
}

pub(crate) type CallResult<M> = Result<Gathered<<M as Method>::Reply>, GroupError>;

/// Data shared by all ranks of a group call.
pub(crate) struct Terms {
    pub(crate) group: Arc<str>,
    pub(crate) context: CallContext,
    /// The start of the call.
    pub(crate) began: Instant,
    pub(crate) view: watch::Receiver<Arc<GroupView>>,
    pub(crate) monitor: Option<Arc<dyn RankMonitor>>,
}

/// The replies of a group call.
///
/// ```
/// use gym_group::prelude::*;
/// # struct Filter;
/// # worker! {
/// #     impl Worker for Filter as filter {
/// #         fn start(_: WorkerEnv, _: ()) -> Result<Self> { Ok(Self) }
/// #         shared(idempotent) async fn first(&self, _: &CallContext, call: Payload<usize>) -> Result<Payload<usize>> {
/// #             Ok(Payload { value: call.batch.rows(), batch: call.batch.slice(0..call.value)? })
/// #         }
/// #     }
/// # }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let group = InProcessGroup::start::<Filter>("filters", RankLayout::new([("data", 2)])?, ()).await?;
/// let batch = Batch::empty().with("reward", Tensor::from_vec([4], vec![1.0_f32, 0.5, 0.0, 0.25])?)?;
/// // Each rank returns the first row of its shard, and the number of rows that it got.
/// let gathered = group.call(filter::first, 1).batch(batch).dispatch(Dispatch::shard("data")).await?;
/// let rewards = gathered.batch()?.column("reward")?.dense()?.view::<f32>()?.to_vec();
/// assert_eq!(rewards, [1.0, 0.0]);
/// assert_eq!(gathered.into_values(), [2, 2]);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Gathered<R> {
    replies: SmallVec<[RankReply<R>; 1]>,
}

/// The reply of one rank.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RankReply<R> {
    /// The rank.
    pub rank: Rank,
    /// The value that the rank returned.
    pub value: R,
    /// The batch that the rank returned.
    pub batch: Batch,
    shard: usize,
}

impl<R> Gathered<R> {
    /// Returns the collected replies, in rank order.
    #[must_use]
    pub fn replies(&self) -> &[RankReply<R>] {
        &self.replies
    }

    /// Returns the values of the replies, in rank order.
    #[must_use]
    pub fn into_values(self) -> Vec<R> {
        self.replies.into_iter().map(|reply| reply.value).collect()
    }

    /// Concatenates the batches in shard order. For each shard, the batch of its lowest rank is used: replicas did the same work.
    ///
    /// # Errors
    /// `InvalidArgument` if the ranks returned different columns.
    pub fn batch(&self) -> Result<Batch> {
        let mut by_shard: Vec<&RankReply<R>> = self.replies.iter().collect();
        by_shard.sort_by_key(|reply| (reply.shard, reply.rank));
        by_shard.dedup_by_key(|reply| reply.shard);
        let parts: Vec<Batch> = by_shard.into_iter().map(|reply| reply.batch.clone()).collect();
        Batch::concat(&parts).map_err(|error| error.with_execution(Execution::Finished))
    }

    /// Returns the reply of a call to one rank.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no reply, or more than one.
    pub fn into_one(mut self) -> Result<Payload<R>> {
        match take_single(&mut self.replies, true) {
            Some(RankReply { value, batch, .. }) => Ok(Payload { value, batch }),
            None => Err(Error::invalid("the call was not to one rank").with_execution(Execution::Finished)),
        }
    }

    /// Creates the result of a call to one rank; empty if the reply was not collected.
    pub(crate) fn of_one(rank: Rank, shard: Option<usize>, answer: Option<Payload<R>>) -> Self {
        let reply = shard.zip(answer).map(|(shard, Payload { value, batch })| RankReply { rank, value, batch, shard });
        Self { replies: reply.map_or_else(SmallVec::new, |reply| SmallVec::from_buf([reply])) }
    }
}

/// Takes the item of a list that has only one, if it is `wanted`.
#[inline]
pub(crate) fn take_single<T>(list: &mut SmallVec<[T; 1]>, wanted: bool) -> Option<T> {
    if wanted && list.len() == 1 { list.pop() } else { None }
}

/// Calls all ranks, once `gate` has admitted the call. `sent` is notified when every rank's transport has accepted its request.
pub(crate) async fn gather<M: Method>(
    terms: Terms,
    gate: Option<Arc<dyn Gate>>,
    parts: SmallVec<[RankCall; 1]>,
    sent: Option<oneshot::Sender<()>>,
) -> CallResult<M> {
    let Terms { group, context, began, view, monitor } = terms;
    let stages = Arc::new(Stages::new(parts.len(), sent));
    let slots = parts.iter().map(Slot::of).collect();
    let (cancel, deadline) = (context.cancel.clone(), context.deadline);
    let mut call = Call::<M> { group, cancel, began, deadline, view, monitor, slots };
    // The token of the ranks: if a rank fails, it cancels the others without cancelling the caller's token.
    let rank_cancel = context.cancel.child_token();
    // One permit for the whole call. Each part keeps a clone, so that the permit lasts until the last rank has replied.
    let permit = gate.as_ref().map(|gate| gate.enter().shared());
    let mut answers: FuturesUnordered<_> = (parts.into_iter().enumerate())
        .map(|(index, part)| {
            let mut context = context.clone();
            context.cancel = rank_cancel.clone();
            let (stages, permit) = (Arc::clone(&stages), permit.clone());
            async move {
                let _permit = match permit {
                    Some(permit) => Some(permit.await),
                    None => None,
                };
                (index, ask::<M>(index, part, context, &stages).await)
            }
        })
        .collect();
    let (label, view, monitor) = (Arc::clone(&call.group), call.view.clone(), call.monitor.clone());
    let ranks: Vec<Rank> = call.slots.iter().map(|slot| slot.rank).collect();
    let wait = || {
        let turn = gate
            .clone()
            .zip(permit.clone())
            .map(|(gate, permit)| -> TurnCheck { (gate, Box::new(move || permit.peek().is_none())) });
        let ranks = RanksWait {
            method: M::NAME,
            view: view.clone(),
            ranks: ranks.clone(),
            stages: Some(Arc::clone(&stages)),
            turn,
            monitor: monitor.clone(),
        };
        waiting::wait::<M>(&label, (context.trace.trace_id, context.deadline), ranks)
    };
    let ended = recorded(pin!(call.read(&mut answers, &stages)), wait).await;
    let Some((first, cause)) = ended else { return Ok(call.gathered()) };
    let waits = permit.is_some_and(|permit| permit.peek().is_none());
    let holder = gate.filter(|_| waits).and_then(|gate| gate.holder());
    while let Some(Some((index, answer))) = answers.next().now_or_never() {
        call.slots[index].answer.get_or_insert(answer);
    }
    rank_cancel.cancel();
    drop(answers);
    let cause = cause.map(|(code, why)| match holder {
        Some(holder) if code == Code::DeadlineExceeded => {
            (code, format!("{why} while the call waited for its turn: {holder}").into())
        }
        _ => (code, why.into()),
    });
    Err(call.failed(first, cause, |index| stages.execution(index)).await)
}

/// Sends the request of one rank and reads its reply.
async fn ask<M: Method>(
    index: usize,
    part: RankCall,
    context: CallContext,
    stages: &Stages,
) -> Result<Option<Payload<M::Reply>>> {
    let (rank, incarnation, wanted) = (part.rank, part.incarnation, part.shard.is_some());
    let (channel, request) = request::<M>(part, context);
    let reply = send_request(&channel, request).await?;
    stages.sent(index);
    answer_of::<M>(rank, wanted, incarnation, reply.await)
}

pub(crate) fn request<M: Method>(part: RankCall, mut context: CallContext) -> (Channel, Request) {
    let RankCall { incarnation, channel, message, shard, .. } = part;
    context.incarnation = Some(incarnation);
    if shard.is_none() {
        context.metadata.push(REPLY_METADATA, REPLY_NONE);
    }
    (channel, Request { verb: Verb::Post, route: route::<M>(), context, peer: None, message })
}

pub(crate) fn answer_of<M: Method>(
    rank: Rank,
    wanted: bool,
    incarnation: Incarnation,
    answer: Result<Response>,
) -> Result<Option<Payload<M::Reply>>> {
    let response = check_incarnation(Some(incarnation), answer?)?;
    if !response.status.is_success() {
        return Err(error_of(response));
    }
    if !wanted {
        return Ok(None);
    }
    let reply = read(response.message).map_err(|error| {
        Error::finished(Code::DataLoss, format!("the answer of rank {rank} is no reply of {}", M::NAME))
            .caused_by(error)
    })?;
    Ok(Some(reply))
}

/// Returns the error of a host without the rank that the host names, because the error of the group names it.
fn error_of(response: Response) -> Error {
    let Err(error) = response.into_result() else {
        return Error::finished(Code::DataLoss, "an answer without success or failure");
    };
    let of_rank = error.subject().strip_prefix("rank ").is_some_and(|rest| {
        let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        rest.is_empty() || rest.starts_with(" of ")
    });
    if of_rank { error.about("") } else { error }
}

/// Records the requests that their transport has accepted.
pub(crate) struct Stages {
    sent: Vec<AtomicBool>,
    answered: Vec<AtomicBool>,
    left: AtomicUsize,
    all: Mutex<Option<oneshot::Sender<()>>>,
}

impl Stages {
    fn new(parts: usize, all: Option<oneshot::Sender<()>>) -> Self {
        let flags = || (0..parts).map(|_| AtomicBool::new(false)).collect();
        Self { sent: flags(), answered: flags(), left: AtomicUsize::new(parts), all: Mutex::new(all) }
    }

    fn sent(&self, index: usize) {
        self.sent[index].store(true, Ordering::Release);
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let all = self.all.lock().take();
            if let Some(all) = all {
                let _ = all.send(());
            }
        }
    }

    fn answered(&self, index: usize) {
        self.answered[index].store(true, Ordering::Release);
    }

    fn has_answered(&self, index: usize) -> bool {
        self.answered[index].load(Ordering::Acquire)
    }

    /// Returns the execution state of a rank without a reply.
    fn execution(&self, index: usize) -> Execution {
        if self.sent[index].load(Ordering::Acquire) { Execution::Unknown } else { Execution::NotStarted }
    }
}

/// The reply of a rank, once it has arrived.
pub(crate) struct Slot<R> {
    pub(crate) rank: Rank,
    pub(crate) incarnation: Incarnation,
    pub(crate) shard: Option<usize>,
    pub(crate) answer: Option<Result<Option<Payload<R>>>>,
}

impl<R> Slot<R> {
    fn of(part: &RankCall) -> Self {
        Self { rank: part.rank, incarnation: part.incarnation, shard: part.shard, answer: None }
    }
}

/// The replies of a group call so far.
pub(crate) struct Call<M: Method> {
    pub(crate) group: Arc<str>,
    pub(crate) cancel: CancelToken,
    pub(crate) began: Instant,
    pub(crate) deadline: Instant,
    pub(crate) view: watch::Receiver<Arc<GroupView>>,
    pub(crate) monitor: Option<Arc<dyn RankMonitor>>,
    pub(crate) slots: Vec<Slot<M::Reply>>,
}

/// The cause that ended a call early: a failed rank, or another cause.
pub(crate) type Ended = (Option<usize>, Option<(Code, &'static str)>);

pub(crate) const DEADLINE_PASSED: Ended = (None, Some((Code::DeadlineExceeded, "the deadline has passed")));
pub(crate) const CANCELLED: Ended = (None, Some((Code::Cancelled, "the caller has left")));

/// Returns the cause of an early end. Hosts enforce the deadline and receive cancellations, and may report them before this side
/// does: the rank is then not at fault.
pub(crate) fn ended_by(error: &Error, index: usize, cancel: &CancelToken) -> Ended {
    match (error.code(), error.execution()) {
        _ if cancel.is_cancelled() => CANCELLED,
        (Code::DeadlineExceeded, Execution::Unknown | Execution::NotStarted) => DEADLINE_PASSED,
        _ => (Some(index), None),
    }
}

impl<M: Method> Call<M> {
    /// Reads replies until every rank has replied or the call ends early.
    async fn read<S>(&mut self, answers: &mut S, stages: &Stages) -> Option<Ended>
    where
        S: futures_util::Stream<Item = (usize, Result<Option<Payload<M::Reply>>>)> + Unpin,
    {
        let cancel = self.cancel.clone();
        let mut deadline = pin!(sleep_until(self.deadline));
        let mut left = pin!(cancel.cancelled());
        let mut watching = true;
        loop {
            let mut view = self.view.clone();
            let mut changed = pin!(view.changed());
            let ended = loop {
                tokio::select! {
                    biased;
                    next = answers.next() => match next {
                        None => return None,
                        Some((index, answer)) => {
                            let ended = answer.as_ref().err().map(|error| ended_by(error, index, &cancel));
                            self.slots[index].answer = Some(answer);
                            stages.answered(index);
                            if ended.is_some() {
                                return ended;
                            }
                        }
                    },
                    () = &mut left => return Some(CANCELLED),
                    () = &mut deadline => return Some(DEADLINE_PASSED),
                    ended = &mut changed, if watching => break ended.is_err(),
                }
            };
            // The view of a dropped group no longer changes; the links of its ranks report the rest.
            watching = !ended;
            if let Some(index) = self.replaced(stages) {
                return Some((Some(index), None));
            }
        }
    }

    /// Finds a rank that has not replied and no longer can, and records its error.
    fn replaced(&mut self, stages: &Stages) -> Option<usize> {
        let view = Arc::clone(&self.view.borrow_and_update());
        let mut waiting = self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.answer.is_none());
        let (index, slot) = waiting.find(|(_, slot)| !may_answer(&view, slot.rank, slot.incarnation))?;
        let error = no_answer(&view, slot.rank, slot.incarnation, self.monitor.as_deref());
        slot.answer = Some(Err(error.with_execution(stages.execution(index))));
        Some(index)
    }

    fn gathered(self) -> Gathered<M::Reply> {
        let replies = (self.slots.into_iter())
            .filter_map(|slot| {
                let (Some(shard), Some(Ok(Some(Payload { value, batch })))) = (slot.shard, slot.answer) else {
                    return None;
                };
                Some(RankReply { rank: slot.rank, value, batch, shard })
            })
            .collect();
        Gathered { replies }
    }

    /// Creates the error of a failed call; `sent` is the execution state of a rank without a reply.
    pub(crate) async fn failed(
        mut self,
        first: Option<usize>,
        cause: Option<(Code, Cow<'static, str>)>,
        sent: impl Fn(usize) -> Execution,
    ) -> GroupError {
        let first_rank = first.map(|index| self.slots[index].rank);
        let (code, why) = match (cause, first_rank) {
            (Some((code, why)), _) => (code, why.into_owned()),
            (None, Some(rank)) => (Code::Cancelled, format!("told to stop because rank {rank} failed")),
            (None, None) => (Code::Internal, "ended without a cause".to_owned()),
        };
        let late = (code == Code::DeadlineExceeded && first.is_none()).then(|| self.began.elapsed());
        let monitor = self.monitor.clone();
        for (index, slot) in self.slots.iter_mut().enumerate() {
            // Hosts enforce the deadline too, and may report it first.
            let execution = match &slot.answer {
                None => sent(index),
                Some(Err(error)) if late.is_some() && error.code() == Code::DeadlineExceeded => error.execution(),
                Some(_) => continue,
            };
            let text = match late {
                Some(waited) if execution == Execution::Unknown => unanswered::<M>(monitor.as_deref(), slot, waited),
                _ => why.clone(),
            };
            slot.answer = Some(Err(Error::new(code, execution, text)));
        }
        if let Some(index) = first {
            self.await_exit(index).await;
        }
        let view = Arc::clone(&self.view.borrow());
        let first_cause = first.and_then(|index| match &self.slots[index].answer {
            Some(Err(error)) => Some(Error::new(error.code(), error.execution(), error.to_string())),
            _ => None,
        });
        let outcomes: Vec<RankOutcome> = (self.slots.into_iter())
            .map(|Slot { rank, incarnation, answer, .. }| {
                let answer = answer.unwrap_or_else(|| Err(Error::internal("no outcome")));
                let answer = answer.map(|payload| -> Answer { payload.map(|payload| Arc::new(payload) as _) });
                RankOutcome::new(rank, incarnation, answer).seen_in(&view)
            })
            .collect();
        let execution = |outcomes: &[RankOutcome]| {
            let started = outcomes.iter().any(|outcome| outcome.execution() != Execution::NotStarted);
            if started { Execution::Unknown } else { Execution::NotStarted }
        };
        let cause = first_cause.unwrap_or_else(|| Error::new(code, execution(&outcomes), why));
        GroupError::new::<M>(&self.group, cause, first_rank, outcomes).with_restart(monitor.as_deref())
    }

    /// Waits briefly until the view reports the exit of a disconnected rank.
    async fn await_exit(&mut self, index: usize) {
        let Slot { rank, incarnation, answer, .. } = &self.slots[index];
        if !matches!(answer, Some(Err(error)) if error.code() == Code::Unavailable) {
            return;
        }
        let wait = EXIT_TIMEOUT.min(self.deadline.saturating_duration_since(Instant::now()));
        let ended = |view: &Arc<GroupView>| !may_answer(view, *rank, *incarnation);
        let _ = tokio::time::timeout(wait, self.view.wait_for(ended)).await;
    }
}

/// A rank whose last status is older than this is not heard of any more: supervisors ask every five seconds.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(12);

/// Describes a rank that has not answered: since when, and what it does instead according to its last known status.
fn unanswered<M: Method>(monitor: Option<&dyn RankMonitor>, slot: &Slot<M::Reply>, waited: Duration) -> String {
    let seconds = |duration: Duration| format!("{:.1} s", duration.as_secs_f64());
    let mut text = format!("no answer to {} for {}", M::NAME, seconds(waited));
    let status = monitor.and_then(|monitor| monitor.last_status(slot.rank, slot.incarnation));
    let Some((status, age)) = status else { return text };
    // The oldest call holds up the others.
    let running = status.running.first();
    match running {
        _ if age > SILENCE_TIMEOUT => text.push_str(&format!(", and no heartbeat for {}", seconds(age))),
        // The status is from before the call.
        _ if age >= waited => {}
        Some(call) => {
            let since = |ms: u64| seconds(Duration::from_millis(ms) + age);
            let _ = write!(text, "; it has run {} for {}", call.method, since(call.elapsed_ms));
            let _ = match call.progress {
                0 => write!(text, ", without progress"),
                units => write!(text, ", the last progress ({units} units) {} ago", since(call.still_ms)),
            };
            if let Some(operation) = status.collectives.waiting.first() {
                let _ = write!(text, "; it {operation}");
            }
            if let Some(blocks) = call.blocks(age) {
                let _ = write!(text, ", and {blocks}");
            }
        }
        None => text.push_str("; it runs no call"),
    }
    text
}

/// Sends a request under the timer of the group, without waiting if possible.
pub(super) async fn send_request(channel: &Channel, request: Request) -> Result<Reply> {
    match try_send(channel.link(), request) {
        TrySendOutcome::Done(sent) => sent,
        TrySendOutcome::WouldBlock(request) => channel.link().send(request).await,
    }
}
