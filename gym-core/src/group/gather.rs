//! One group call under way: parts are sent and answers read together, by whoever polls it, so that a rank whose answer nobody
//! has read cannot keep the room that another part waits for.

use std::borrow::Cow;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until};

use crate::batch::{Batch, Payload};
use crate::cancel::CancelToken;
use crate::channel::{Channel, check_incarnation};
use crate::context::{CallContext, Incarnation};
use crate::error::{Code, Error, Execution, Result};
use crate::few::Few;
use crate::group::error::Answer;
use crate::group::{Gate, GroupError, GroupView, RankOutcome};
use crate::host::{REPLY_METADATA, REPLY_NONE};
use crate::layout::Rank;
use crate::message::{CODE_METADATA, Message, Request, Response, Verb};
use crate::worker::{Method, read, route};

/// How long a failed call waits to learn how a rank that broke off has ended: a link sees the end of a process before who
/// started it does.
const OBITUARY_WAIT: Duration = Duration::from_millis(500);

/// What one rank is to do.
pub(crate) struct Part {
    pub(crate) rank: Rank,
    pub(crate) incarnation: Incarnation,
    pub(crate) channel: Channel,
    pub(crate) message: Message,
    /// Of the batch that comes back: which shard this is. `None`: the answer is not asked for.
    pub(crate) shard: Option<usize>,
}

/// What a group call is, whatever its parts.
pub(crate) struct Terms {
    pub(crate) group: Arc<str>,
    pub(crate) context: CallContext,
    pub(crate) view: watch::Receiver<Arc<GroupView>>,
}

/// The answers of a group call.
#[derive(Clone, Debug)]
pub struct Gathered<R> {
    replies: Few<RankReply<R>>,
}

/// What one rank answered.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RankReply<R> {
    /// Which rank.
    pub rank: Rank,
    /// What it said.
    pub value: R,
    /// What it gave back beside it.
    pub batch: Batch,
    shard: usize,
}

impl<R> Gathered<R> {
    /// The replies that were asked for, in rank order.
    #[must_use]
    pub fn replies(&self) -> &[RankReply<R>] {
        &self.replies
    }

    /// The values alone, in rank order.
    #[must_use]
    pub fn into_values(self) -> Vec<R> {
        self.replies.into_iter().map(|reply| reply.value).collect()
    }

    /// The batches put together in shard order, of each shard the one that its lowest rank gave: replicas did the same work.
    ///
    /// # Errors
    /// `InvalidArgument` when the ranks gave back different columns.
    pub fn batch(&self) -> Result<Batch> {
        let mut by_shard: Vec<&RankReply<R>> = self.replies.iter().collect();
        by_shard.sort_by_key(|reply| (reply.shard, reply.rank));
        by_shard.dedup_by_key(|reply| reply.shard);
        let parts: Vec<Batch> = by_shard.into_iter().map(|reply| reply.batch.clone()).collect();
        Batch::concat(&parts).map_err(|error| error.with_execution(Execution::Finished))
    }

    /// The one reply of a call to one rank.
    ///
    /// # Errors
    /// `InvalidArgument` when there is none, or more than one.
    pub fn into_one(self) -> Result<Payload<R>> {
        match self.replies.into_only() {
            Ok(RankReply { value, batch, .. }) => Ok(Payload { value, batch }),
            Err(_) => Err(Error::invalid("the call was not to one rank").with_execution(Execution::Finished)),
        }
    }

    /// The answer of one rank; none if it was not asked for.
    pub(crate) fn of_one(rank: Rank, shard: Option<usize>, answer: Option<Payload<R>>) -> Self {
        let reply = shard.zip(answer).map(|(shard, Payload { value, batch })| RankReply { rank, value, batch, shard });
        Self { replies: Few::One(reply) }
    }
}

/// Sends to all and reads all, once `gate` lets the call pass. `handed_over` is told once every rank has been handed its part.
pub(crate) async fn gather<M: Method>(
    terms: Terms,
    gate: Option<Arc<dyn Gate>>,
    parts: Few<Part>,
    handed_over: Option<oneshot::Sender<()>>,
) -> Result<Gathered<M::Reply>, GroupError> {
    let Terms { group, context, view } = terms;
    let stages = Arc::new(Stages::new(parts.len(), handed_over));
    let slots = parts.iter().map(Slot::of).collect();
    let mut call = Call::<M> { group, cancel: context.cancel.clone(), deadline: context.deadline, view, slots };
    // The ranks' own token: a rank that fails ends the others, and the caller's stays whole.
    let told = context.cancel.child_token();
    // Of the whole call: each part keeps it, so that it lasts until the last of them is answered.
    let passing = gate.as_ref().map(|gate| gate.enter().shared());
    let mut answers: FuturesUnordered<_> = (parts.into_iter().enumerate())
        .map(|(index, part)| {
            let context = CallContext { cancel: told.clone(), ..context.clone() };
            let (stages, passing) = (Arc::clone(&stages), passing.clone());
            async move {
                let _leave = match passing {
                    Some(passing) => Some(passing.await),
                    None => None,
                };
                (index, ask::<M>(index, part, context, &stages).await)
            }
        })
        .collect();
    let ended = call.read(&mut answers, &stages).await;
    let Some((first, cause)) = ended else { return Ok(call.gathered()) };
    let waits = passing.is_some_and(|passing| passing.peek().is_none());
    let holder = gate.filter(|_| waits).and_then(|gate| gate.holder());
    while let Some(Some((index, answer))) = answers.next().now_or_never() {
        call.slots[index].answer.get_or_insert(answer);
    }
    told.cancel();
    drop(answers);
    let cause = cause.map(|(code, why)| match holder {
        Some(holder) if code == Code::DeadlineExceeded => {
            (code, format!("{why} while the call waited for its turn: {holder}").into())
        }
        _ => (code, why.into()),
    });
    Err(call.failed(first, cause, |index| stages.execution(index)).await)
}

/// Hands one part of several over and reads its answer.
async fn ask<M: Method>(
    index: usize,
    part: Part,
    context: CallContext,
    stages: &Stages,
) -> Result<Option<Payload<M::Reply>>> {
    let (rank, incarnation, wanted) = (part.rank, part.incarnation, part.shard.is_some());
    let (channel, request) = request::<M>(part, context);
    let reply = channel.hand_over(request).await?;
    stages.handed_over(index);
    answer_of::<M>(rank, wanted, incarnation, reply.await)
}

pub(crate) fn request<M: Method>(part: Part, mut context: CallContext) -> (Channel, Request) {
    let Part { incarnation, channel, message, shard, .. } = part;
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

/// The error of a host, without the wrapping of a foreign server's answer.
fn error_of(response: Response) -> Error {
    let text = response.metadata.get(CODE_METADATA).is_some().then(|| response.message.head.to_bytes());
    let text = text.and_then(|text| serde_json::from_slice::<String>(&text).ok());
    match (response.into_result(), text) {
        (Err(error), Some(text)) => Error::new(error.code(), error.execution(), text),
        (Err(error), None) => error,
        (Ok(_), _) => Error::finished(Code::DataLoss, "an answer without success or failure"),
    }
}

/// Which parts have been handed over.
struct Stages {
    handed: Vec<AtomicBool>,
    left: AtomicUsize,
    all: Mutex<Option<oneshot::Sender<()>>>,
}

impl Stages {
    fn new(parts: usize, all: Option<oneshot::Sender<()>>) -> Self {
        let handed = (0..parts).map(|_| AtomicBool::new(false)).collect();
        Self { handed, left: AtomicUsize::new(parts), all: Mutex::new(all) }
    }

    fn handed_over(&self, index: usize) {
        self.handed[index].store(true, Ordering::Release);
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let all = self.all.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(all) = all {
                let _ = all.send(());
            }
        }
    }

    /// What a part that has no answer means.
    fn execution(&self, index: usize) -> Execution {
        if self.handed[index].load(Ordering::Acquire) { Execution::Unknown } else { Execution::NotStarted }
    }
}

/// One part and its answer, once there is one.
pub(crate) struct Slot<R> {
    pub(crate) rank: Rank,
    pub(crate) incarnation: Incarnation,
    pub(crate) shard: Option<usize>,
    pub(crate) answer: Option<Result<Option<Payload<R>>>>,
}

impl<R> Slot<R> {
    fn of(part: &Part) -> Self {
        Self { rank: part.rank, incarnation: part.incarnation, shard: part.shard, answer: None }
    }
}

/// What became of the parts so far.
pub(crate) struct Call<M: Method> {
    pub(crate) group: Arc<str>,
    pub(crate) cancel: CancelToken,
    pub(crate) deadline: Instant,
    pub(crate) view: watch::Receiver<Arc<GroupView>>,
    pub(crate) slots: Vec<Slot<M::Reply>>,
}

/// What ended a call early: the rank that failed, or a cause of its own.
pub(crate) type Ended = (Option<usize>, Option<(Code, &'static str)>);

pub(crate) const LATE: Ended = (None, Some((Code::DeadlineExceeded, "the deadline has passed")));
pub(crate) const LEFT: Ended = (None, Some((Code::Cancelled, "the caller has left")));

/// Hosts keep the deadline and hear of a caller that leaves, and may say so before this side notices: it is no fault of theirs.
pub(crate) fn ended_by(error: &Error, index: usize, cancel: &CancelToken) -> Ended {
    match (error.code(), error.execution()) {
        _ if cancel.is_cancelled() => LEFT,
        (Code::DeadlineExceeded, Execution::Unknown | Execution::NotStarted) => LATE,
        _ => (Some(index), None),
    }
}

/// Whether this life of the rank can still answer.
pub(crate) fn may_answer(view: &GroupView, rank: Rank, incarnation: Incarnation) -> bool {
    view.member(rank).is_some_and(|member| member.may_answer(incarnation))
}

/// What a rank that cannot answer any more comes to.
pub(crate) fn cannot_answer(view: &GroupView, rank: Rank, incarnation: Incarnation) -> Error {
    let now = view
        .member(rank)
        .map_or("gone", |member| if member.incarnation == incarnation { member.state.as_str() } else { "replaced" });
    Error::unknown(Code::Unavailable, format!("the rank is {now}; it has not answered"))
}

impl<M: Method> Call<M> {
    /// Until every rank has answered, or something ends the call.
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
                            if ended.is_some() {
                                return ended;
                            }
                        }
                    },
                    () = &mut left => return Some(LEFT),
                    () = &mut deadline => return Some(LATE),
                    ended = &mut changed, if watching => break ended.is_err(),
                }
            };
            // A group that is gone changes no more; its ranks' links tell the rest.
            watching = !ended;
            if let Some(index) = self.replaced(stages) {
                return Some((Some(index), None));
            }
        }
    }

    /// A rank that is waited for and cannot answer any more, with its answer filled in.
    fn replaced(&mut self, stages: &Stages) -> Option<usize> {
        let view = Arc::clone(&self.view.borrow_and_update());
        let mut waiting = self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.answer.is_none());
        let (index, slot) = waiting.find(|(_, slot)| !may_answer(&view, slot.rank, slot.incarnation))?;
        let error = cannot_answer(&view, slot.rank, slot.incarnation);
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

    /// `handed`: what a part without an answer means.
    pub(crate) async fn failed(
        mut self,
        first: Option<usize>,
        cause: Option<(Code, Cow<'static, str>)>,
        handed: impl Fn(usize) -> Execution,
    ) -> GroupError {
        let first_rank = first.map(|index| self.slots[index].rank);
        let (code, why) = match (cause, first_rank) {
            (Some((code, why)), _) => (code, why.into_owned()),
            (None, Some(rank)) => (Code::Cancelled, format!("told to stop because rank {rank} failed")),
            (None, None) => (Code::Internal, "ended without a cause".to_owned()),
        };
        for (index, slot) in self.slots.iter_mut().enumerate() {
            slot.answer.get_or_insert_with(|| Err(Error::new(code, handed(index), why.clone())));
        }
        if let Some(index) = first {
            self.await_obituary(index).await;
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
                let mut outcome = RankOutcome::new(rank, incarnation, answer);
                if outcome.error().is_some_and(|error| error.code() == Code::Unavailable) {
                    let exit = view.member(rank).and_then(|member| member.exit.clone());
                    outcome.exit = exit.filter(|exit| exit.incarnation == incarnation.0);
                }
                outcome
            })
            .collect();
        let execution = |outcomes: &[RankOutcome]| {
            let started = outcomes.iter().any(|outcome| outcome.execution() != Execution::NotStarted);
            if started { Execution::Unknown } else { Execution::NotStarted }
        };
        let cause = first_cause.unwrap_or_else(|| Error::new(code, execution(&outcomes), why));
        GroupError::new::<M>(&self.group, cause, first_rank, outcomes)
    }

    /// Waits a little for the view to say how a rank that broke off has ended.
    async fn await_obituary(&mut self, index: usize) {
        let Slot { rank, incarnation, answer, .. } = &self.slots[index];
        if !matches!(answer, Some(Err(error)) if error.code() == Code::Unavailable) {
            return;
        }
        let wait = OBITUARY_WAIT.min(self.deadline.saturating_duration_since(Instant::now()));
        let ended = |view: &Arc<GroupView>| !may_answer(view, *rank, *incarnation);
        let _ = tokio::time::timeout(wait, self.view.wait_for(ended)).await;
    }
}
