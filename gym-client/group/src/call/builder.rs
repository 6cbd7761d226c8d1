//! Builder of a group call: method, ranks, data, and deadline.

use std::fmt;
use std::future::{Future, IntoFuture, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_core::base::watch;
use gym_core::group::GroupView;
use gym_core::group::batch::{Batch, Payload, Uneven, json};
use gym_core::group::layout::dispatch::{Assignment, Dispatch};
use gym_core::group::layout::{Rank, RankLayout};
use gym_core::group::worker::{Method, write};
use gym_core::message::Message;
use gym_core::message::{CallContext, DEFAULT_CALL_TIMEOUT};
use gym_core::{Code, Error, Execution, Result};
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::call::gather::{CallResult, RankCall, Terms, gather, take_single};
use crate::call::monitor::RankMonitor;
use crate::call::reach::open;
use crate::call::single::SingleRankCall;
use crate::call::{Backlog, CallSupport, Gathered, GroupError, RankOutcome, WorkerGroupExt};

/// A call to a group. Awaiting it makes the call and gathers the replies; [`GroupCall::start`] makes the call and gathers the
/// replies later. Dropping either future cancels the call.
///
/// ```
/// use std::time::Duration;
///
/// use gym_group::prelude::*;
/// # struct Scorer;
/// # worker! {
/// #     impl Worker for Scorer as scorer {
/// #         fn start(_: WorkerEnv, _: ()) -> Result<Self> { Ok(Self) }
/// #         shared(idempotent) async fn score(&self, _: &CallContext, call: Payload<f32>) -> Result<Payload<f32>> {
/// #             Ok((call.value * 2.0).into())
/// #         }
/// #     }
/// # }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let group = InProcessGroup::start::<Scorer>("scorers", RankLayout::line(4)?, ()).await?;
/// let call = group.call(scorer::score, 1.5).dispatch(Dispatch::rank(1)).deadline(Duration::from_secs(5));
/// assert_eq!(call.await?.into_one()?.value, 3.0);
/// # Ok(()) }
/// ```
#[must_use = "a group call does nothing until it is awaited or started"]
pub struct GroupCall<'g, M: Method> {
    group: Arc<str>,
    layout: &'g RankLayout,
    view: watch::Receiver<Arc<GroupView>>,
    support: CallSupport,
    args: Args<M::Args>,
    batch: Batch,
    dispatch: Dispatch,
    uneven: Uneven,
    deadline: Option<Instant>,
    context: Option<CallContext>,
    method: M,
}

/// Arguments: the same for every rank, or separate ones for each.
enum Args<A> {
    Same(A),
    Each(Vec<A>),
}

impl<'g, M: Method> GroupCall<'g, M> {
    pub(crate) fn same<G: WorkerGroupExt + ?Sized>(group: &'g G, method: M, args: M::Args) -> Self {
        Self::new(group, method, Args::Same(args))
    }

    pub(crate) fn each<G: WorkerGroupExt + ?Sized>(group: &'g G, method: M, args: Vec<M::Args>) -> Self {
        Self::new(group, method, Args::Each(args))
    }

    fn new<G: WorkerGroupExt + ?Sized>(group: &'g G, method: M, args: Args<M::Args>) -> Self {
        Self {
            group: Arc::clone(group.name()),
            layout: group.layout(),
            view: group.view(),
            support: group.call_support(),
            args,
            batch: Batch::empty(),
            dispatch: Dispatch::all(),
            uneven: Uneven::Refuse,
            deadline: None,
            context: None,
            method,
        }
    }

    /// Sets the batch, which the dispatch shards, replicates or withholds. Shards share the memory of the batch.
    pub fn batch(mut self, batch: Batch) -> Self {
        self.batch = batch;
        self
    }

    /// Sets the dispatch: the called ranks, their data, and the collected replies. The default is all ranks with the whole batch.
    pub fn dispatch(mut self, dispatch: Dispatch) -> Self {
        self.dispatch = dispatch;
        self
    }

    /// Sets the treatment of rows that cannot be split evenly. The default is to reject them.
    pub fn uneven(mut self, uneven: Uneven) -> Self {
        self.uneven = uneven;
        self
    }

    /// Sets the time within which every rank must reply, from now on. The context's deadline applies too. The default is
    /// [`DEFAULT_CALL_TIMEOUT`](gym_core::message::DEFAULT_CALL_TIMEOUT).
    pub fn deadline(mut self, within: Duration) -> Self {
        self.deadline = Some(Instant::now() + within);
        self
    }

    /// Makes the call on behalf of another call, with its deadline, cancellation, trace, metadata and reply limit (for each rank).
    pub fn context(mut self, context: &CallContext) -> Self {
        self.context = Some(context.clone());
        self
    }

    /// Sends the requests of all ranks, and returns when every transport has accepted its request. The replies are gathered
    /// later. Calls that are started one after another reach every rank in that order.
    ///
    /// The queues of the ranks bound the calls in flight; a full queue rejects a call at once. A call to one rank may wait up to a
    /// millisecond to be sent with others, unless a reply is awaited.
    ///
    /// The rank ends the call at its deadline. If the call is cancelled by its context, the rank learns of it when the result is
    /// awaited or dropped.
    ///
    /// # Errors
    /// The error of the call, if it fails before every transport has accepted its request.
    pub async fn start(mut self) -> Result<Pending<M>, GroupError> {
        let (mut parts, gate) = (SmallVec::new(), self.support.gate.take());
        let mut terms = self.plan(&mut parts)?;
        if let Some(part) = take_single(&mut parts, gate.is_none()) {
            // The caller reads the reply: a task for each of a thousand calls costs as much as the call.
            // Not in one process: the handler gets this context, and its own calls must not inherit the flag.
            terms.context.reads_later = !part.channel.path().shares_memory;
            let mut one = SingleRankCall::<M>::send(terms, part);
            poll_fn(|cx| one.poll_sent(cx)).await?;
            return Ok(Pending(Answers::Here(one)));
        }
        // A separate task reads the replies even if the caller does not: an unread reply keeps its capacity.
        let (sent, all_sent) = oneshot::channel();
        let mut task = AbortOnDrop(tokio::spawn(gather::<M>(terms, gate, parts, Some(sent))));
        match all_sent.await {
            Ok(()) => Ok(Pending(Answers::Read(task))),
            Err(_) => match (&mut task.0).await {
                Ok(Err(error)) => Err(error),
                _ => unreachable!("a successful gather has notified `sent`, and the task was not aborted"),
            },
        }
    }

    /// Makes the call as `async_communication` of the group's configuration says.
    ///
    /// - With it, the call starts at once, without being awaited. Calls that are submitted one after another reach every rank in that order.
    ///   Dropping the result does not cancel the call. If the call then fails, [`WorkerGroupExt::flush`](crate::WorkerGroupExt::flush)
    ///   returns its error.
    /// - Without it, which is the default, the call starts when the result is awaited.
    ///
    /// Results and order are the same in both cases. Must be called within a tokio runtime.
    pub fn submit(mut self) -> Submitted<M> {
        let Some(backlog) = self.support.backlog.take() else { return Submitted(Submission::Lazy(self.into_future())) };
        let (mut parts, gate, group) = (SmallVec::new(), self.support.gate.take(), Arc::clone(&self.group));
        let (result, received) = oneshot::channel();
        let submitted = Submitted(Submission::Running(received, Arc::clone(&backlog)));
        // Planned here, so that the call goes to the ranks that the group has now.
        let terms = match self.plan(&mut parts) {
            Ok(terms) => terms,
            Err(error) => {
                let _ = result.send(Err(error));
                return submitted;
            }
        };
        let unheard = Arc::downgrade(&backlog);
        let spawned = backlog.spawn(|before, sent| async move {
            if let Some(before) = before {
                // An error means that the call before has failed. Both have deadlines.
                let _ = before.await;
            }
            let ended = gather::<M>(terms, gate, parts, Some(sent)).await;
            if let (Err(Err(error)), Some(backlog)) = (result.send(ended), unheard.upgrade()) {
                backlog.keep(error);
            }
        });
        match spawned {
            Ok(()) => submitted,
            Err(error) => {
                let error = GroupError::new::<M>(&group, error, None, Vec::new());
                Submitted(Submission::Lazy(Box::pin(async move { Err(error) })))
            }
        }
    }

    fn plan(mut self, parts: &mut SmallVec<[RankCall; 1]>) -> Result<Terms, GroupError> {
        let (group, monitor) = (self.group, self.support.monitor);
        let view = Arc::clone(&self.view.borrow_and_update());
        let refuse = |error: Error| GroupError::new::<M>(&group, error, None, Vec::new());
        let now = Instant::now();
        let mut context =
            self.context.unwrap_or_else(|| CallContext::until(self.deadline.unwrap_or(now + DEFAULT_CALL_TIMEOUT)));
        context.deadline = self.deadline.map_or(context.deadline, |deadline| deadline.min(context.deadline));
        context.check_at(now).map_err(refuse)?;
        let assignments = self.dispatch.assignments(self.layout).map_err(|error| refuse(error.into()))?;
        let shards = self.dispatch.shards(self.layout).map_err(|error| refuse(error.into()))?;
        let shards = match shards {
            Some(count) if !self.batch.is_empty() => self.batch.shard(count, self.uneven).map_err(refuse)?,
            _ => Vec::new(),
        };
        let mut args = EachArgs::of(self.args, &assignments).map_err(refuse)?;
        parts.reserve(assignments.len());
        for (index, assignment) in assignments.iter().enumerate() {
            let (rank, member) = (assignment.rank, view.member(assignment.rank));
            let member = member.ok_or_else(|| refuse(Error::invalid(format!("the group has no rank {rank}"))))?;
            let channel = match open(member, monitor.as_deref()) {
                Ok(channel) => channel.clone(),
                Err(error) => {
                    return Err(closed::<M>(&group, &view, monitor.as_deref(), &assignments, (rank, &error)));
                }
            };
            let batch = match assignment.shard {
                _ if assignment.dummy => Batch::empty(),
                Some(shard) => shards.get(shard).cloned().unwrap_or_default(),
                // The last rank needs no copy.
                None if index + 1 == assignments.len() => std::mem::take(&mut self.batch),
                None => self.batch.clone(),
            };
            let message = args.message(batch, channel.path().shares_memory).map_err(refuse)?;
            let shard = assignment.collect.then(|| assignment.shard.unwrap_or(index));
            parts.push(RankCall { rank, incarnation: member.incarnation, channel, message, shard });
        }
        Ok(Terms { group, context, began: now, view: self.view, monitor })
    }
}

/// Returns the error of a call to a rank that accepts no calls. No rank is called.
fn closed<M: Method>(
    group: &str,
    view: &GroupView,
    monitor: Option<&dyn RankMonitor>,
    assignments: &[Assignment],
    (first, cause): (Rank, &Error),
) -> GroupError {
    let outcomes = assignments.iter().filter_map(|assignment| {
        let member = view.member(assignment.rank)?;
        let error = match open(member, monitor) {
            Err(error) => error,
            Ok(_) => Error::not_started(Code::Cancelled, format!("not called because rank {first} takes no calls")),
        };
        Some(RankOutcome::new(member.rank, member.incarnation, Err(error)).seen_in(view))
    });
    let cause = Error::not_started(cause.code(), cause.message().to_owned());
    GroupError::new::<M>(group, cause, Some(first), outcomes.collect()).with_restart(monitor)
}

/// Arguments for one rank after another: serialized at most once if they are the same for all.
enum EachArgs<A> {
    Same { left: usize, args: Option<A>, text: Option<Box<serde_json::value::RawValue>> },
    Each { args: std::vec::IntoIter<A> },
}

impl<A: serde::Serialize + Clone + Send + Sync + 'static> EachArgs<A> {
    fn of(args: Args<A>, assignments: &[Assignment]) -> Result<Self> {
        match args {
            Args::Same(args) => Ok(Self::Same { left: assignments.len(), args: Some(args), text: None }),
            Args::Each(args) if args.len() == assignments.len() => Ok(Self::Each { args: args.into_iter() }),
            Args::Each(args) => Err(Error::invalid(format!(
                "{} arguments for {} ranks that are called; give one for each, or balance the load",
                args.len(),
                assignments.len()
            ))),
        }
    }

    fn message(&mut self, batch: Batch, in_memory: bool) -> Result<Message> {
        match self {
            Self::Same { left, args, text } => {
                *left -= 1;
                if !in_memory {
                    let text = match text {
                        Some(text) => text,
                        none => {
                            let value = args.as_ref().map(json::to_raw).transpose();
                            let value = value.map_err(|error| {
                                Error::invalid("the arguments cannot be written as JSON").caused_by(error)
                            })?;
                            none.insert(value.ok_or_else(given_away)?)
                        }
                    };
                    return Payload { value: &**text, batch }.to_message();
                }
                let value = if *left == 0 && text.is_none() { args.take() } else { args.clone() };
                write(Payload { value: value.ok_or_else(given_away)?, batch }, true)
            }
            Self::Each { args } => {
                let value = args.next().ok_or_else(given_away)?;
                write(Payload { value, batch }, in_memory)
            }
        }
    }
}

fn given_away() -> Error {
    Error::internal("more parts than ranks").with_execution(Execution::NotStarted)
}

impl<'g, M: Method> IntoFuture for GroupCall<'g, M> {
    type Output = Result<Gathered<M::Reply>, GroupError>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(mut self) -> Self::IntoFuture {
        let (mut parts, gate) = (SmallVec::new(), self.support.gate.take());
        let terms = self.plan(&mut parts);
        Box::pin(async move {
            let terms = terms?;
            if gate.is_some() {
                // A separate task: the permit is released even if the caller stops polling.
                let task = AbortOnDrop(tokio::spawn(gather::<M>(terms, gate, parts, None)));
                return Pending::<M>(Answers::Read(task)).await;
            }
            match take_single(&mut parts, true) {
                Some(part) => SingleRankCall::<M>::send(terms, part).await,
                // Boxed, so that a call to one rank does not contain this future.
                None => Box::pin(gather::<M>(terms, None, parts, None)).await,
            }
        })
    }
}

impl<M: Method> fmt::Debug for GroupCall<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupCall({:?} of {})", self.method, self.group)
    }
}

/// A call that was submitted; see [`GroupCall::submit`]. Awaiting it gathers the replies.
///
/// ```
/// use gym_group::InProcessOptions;
/// use gym_group::prelude::*;
/// # struct Counter(u64);
/// # worker! {
/// #     impl Worker for Counter as counter {
/// #         fn start(_: WorkerEnv, from: u64) -> Result<Self> { Ok(Self(from)) }
/// #         exclusive async fn add(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
/// #             self.0 += call.value;
/// #             Ok(self.0.into())
/// #         }
/// #     }
/// # }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let mut options = InProcessOptions::default();
/// options.async_communication = true;
/// let layout = RankLayout::line(2)?;
/// let group = InProcessGroup::start_with::<Counter>("counters", layout, 10, options).await?;
/// drop(group.call(counter::add, 1).submit()); // runs nevertheless
/// let second = group.call(counter::add, 1).submit();
/// group.flush(&CallContext::default()).await?;
/// assert_eq!(second.await?.into_values(), [12, 12]);
/// # Ok(()) }
/// ```
#[must_use = "without `async_communication`, a submitted call does nothing until it is awaited"]
pub struct Submitted<M: Method>(Submission<M>);

enum Submission<M: Method> {
    /// Starts when it is polled.
    Lazy(BoxFuture<'static, CallResult<M>>),
    Running(oneshot::Receiver<CallResult<M>>, Arc<Backlog>),
}

impl<M: Method> Future for Submitted<M> {
    type Output = CallResult<M>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Submission::Lazy(call) => call.as_mut().poll(cx),
            Submission::Running(result, _) => Pin::new(result).poll(cx).map(|result| {
                result.unwrap_or_else(|_| {
                    let error = Error::unknown(Code::Cancelled, "the group was dropped");
                    Err(GroupError::new::<M>("", error, None, Vec::new()))
                })
            }),
        }
    }
}

impl<M: Method> Drop for Submitted<M> {
    fn drop(&mut self) {
        if let Submission::Running(result, backlog) = &mut self.0 {
            result.close();
            if let Ok(Err(error)) = result.try_recv() {
                backlog.keep(error);
            }
        }
    }
}

impl<M: Method> fmt::Debug for Submitted<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Submitted({})", M::NAME)
    }
}

/// A group call in flight. Awaiting it gathers the replies; dropping it cancels the call.
///
/// ```
/// use gym_group::prelude::*;
/// # struct Counter(u64);
/// # worker! {
/// #     impl Worker for Counter as counter {
/// #         fn start(_: WorkerEnv, from: u64) -> Result<Self> { Ok(Self(from)) }
/// #         exclusive async fn add(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
/// #             self.0 += call.value;
/// #             Ok(self.0.into())
/// #         }
/// #     }
/// # }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let group = InProcessGroup::start::<Counter>("counters", RankLayout::line(2)?, 10).await?;
/// let first = group.call(counter::add, 1).start().await?;
/// let second = group.call(counter::add, 1).start().await?;
/// // Each rank runs them in this order, whichever is awaited first.
/// assert_eq!(second.await?.into_values(), [12, 12]);
/// assert_eq!(first.await?.into_values(), [11, 11]);
/// # Ok(()) }
/// ```
#[must_use = "dropping it cancels the call"]
pub struct Pending<M: Method>(Answers<M>);

enum Answers<M: Method> {
    /// Read when the caller polls it.
    Here(SingleRankCall<M>),
    /// Read by a task.
    Read(AbortOnDrop<CallResult<M>>),
}

struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl<M: Method> Future for Pending<M> {
    type Output = CallResult<M>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let joined = match &mut self.0 {
            Answers::Here(one) => return Pin::new(one).poll(cx),
            Answers::Read(task) => Pin::new(&mut task.0).poll(cx),
        };
        joined.map(|joined| match joined {
            Ok(result) => result,
            Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
            Err(_) => {
                let error = Error::unknown(Code::Cancelled, "the runtime is shutting down");
                Err(GroupError::new::<M>("", error, None, Vec::new()))
            }
        })
    }
}

impl<M: Method> fmt::Debug for Pending<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({})", M::NAME)
    }
}
