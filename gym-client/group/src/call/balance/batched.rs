//! Lists of small items: batches by time, one result for each item.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use gym_core::group::layout::dispatch::Dispatch;
use gym_core::group::worker::Method;
use gym_core::message::CallContext;
use gym_core::{Code, Error, Execution, Result};
use tokio::time::Instant;

use super::sizes::BatchSizes;
use super::{Balancer, InFlightCall, WaitingList};
use crate::call::{GroupError, WorkerGroupExt};
use crate::health::{Disposition, FailureOrigin, RetryBudget, RetryBudgets};

/// A batch that is lost with its rank is handed out again whole this often, then in halves: it may be one of its items that ends ranks.
const LOST_WHOLE_MAX: u32 = 2;

/// How [`Balancer::map_batched`] divides a list of items into batches.
///
/// ```
/// use std::sync::Arc;
///
/// use gym_core::registry::Balance;
/// use gym_group::prelude::*;
/// use gym_group::{Balancer, BatchOptions};
/// # struct Verifier;
/// # worker! {
/// #     impl Worker for Verifier as verifier {
/// #         fn start(_: WorkerEnv, _: ()) -> Result<Self> { Ok(Self) }
/// #         shared(idempotent) async fn check(&self, _: &CallContext, call: Payload<Vec<u64>>) -> Result<Payload<Vec<bool>>> {
/// #             Ok(call.value.iter().map(|answer| answer % 2 == 0).collect::<Vec<_>>().into())
/// #         }
/// #     }
/// # }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let group = InProcessGroup::start::<Verifier>("verifiers", RankLayout::line(4)?, ()).await?;
/// let balancer = Balancer::new(Arc::new(group), Balance::LeastPending)?;
/// let mut options = BatchOptions::default();
/// options.items_max = 16; // each item is large
/// let results = balancer.map_batched(&CallContext::default(), verifier::check, vec![1, 2, 3], &options).await;
/// assert_eq!(results.into_iter().collect::<Result<Vec<_>, _>>()?, [false, true, false]);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchOptions {
    /// The time that a rank needs for one batch. Shorter batches cost more calls; longer ones leave ranks idle at the end of the list, and
    /// more is repeated when a rank is lost. Default: 20 ms.
    pub target: Duration,
    /// The most items of a batch. Default: 1,024.
    pub items_max: usize,
    /// The most batches at one rank: one that runs, and others that wait there so that the rank is never idle. Default: 2.
    pub per_rank: usize,
}

impl Default for BatchOptions {
    fn default() -> Self {
        Self { target: Duration::from_millis(20), items_max: 1_024, per_rank: 2 }
    }
}

/// The failure of one item of a list.
///
/// Only the origin [`FailureOrigin::Data`] is a statement about the item. Do not score an item that failed because of the infrastructure.
#[derive(Clone, Debug)]
pub struct ItemError {
    item: usize,
    together: usize,
    error: Arc<GroupError>,
}

impl ItemError {
    /// Returns the position of the item in the list, from 0.
    #[must_use]
    pub fn item(&self) -> usize {
        self.item
    }

    /// Returns the origin of the failure: `Data` if the method failed with this item, or rejected it; `Infrastructure` if a rank, a connection, the
    /// deadline or a cancellation is the reason that there is no reply.
    #[must_use]
    pub fn origin(&self) -> FailureOrigin {
        origin(&self.error)
    }

    /// Returns the error of the last call with the item.
    #[must_use]
    pub fn error(&self) -> &GroupError {
        &self.error
    }
}

impl fmt::Display for ItemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { item, together, error } = self;
        match together {
            0 | 1 => write!(f, "item {item}: {error}"),
            others => write!(f, "item {item}, one of {others} in a batch: {error}"),
        }
    }
}

impl std::error::Error for ItemError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.error)
    }
}

impl From<ItemError> for Error {
    fn from(error: ItemError) -> Self {
        Self::new(error.error.cause().code(), error.error.execution(), error.to_string())
    }
}

/// A cancelled call says nothing about its arguments.
fn origin(error: &GroupError) -> FailureOrigin {
    match error.cause().code() {
        Code::Cancelled => FailureOrigin::Infrastructure,
        _ => FailureOrigin::of(error.cause()),
    }
}

/// Consecutive items that are handed out together.
struct Piece {
    items: Range<usize>,
    budget: Option<RetryBudget>,
    /// How often it was lost with its rank.
    lost: u32,
    error: Option<Arc<GroupError>>,
}

/// The outcome of one future of the list.
enum Step<'b, R> {
    /// A rank has answered, or is lost.
    Answered { piece: Piece, in_flight: InFlightCall<'b>, began: Instant, answer: Result<R, GroupError> },
    /// The pause before a repetition is over. Without a piece: the pause in which no rank was healthy.
    Rested(Vec<Piece>),
}

/// The work of a future of the list.
enum Work<'b, A> {
    Call { piece: Piece, args: A, in_flight: InFlightCall<'b> },
    Rest { pieces: Vec<Piece>, pause: Duration },
}

/// The items of a list that have no result yet and are not handed out, and the results.
struct List<R> {
    again: VecDeque<Piece>,
    fresh: Range<usize>,
    results: Vec<Option<Result<R, ItemError>>>,
    /// Items without a result.
    open: usize,
}

impl<R> List<R> {
    fn new(items: usize) -> Self {
        Self { again: VecDeque::new(), fresh: 0..items, results: (0..items).map(|_| None).collect(), open: items }
    }

    fn is_handed_out(&self) -> bool {
        self.again.is_empty() && self.fresh.is_empty()
    }

    /// Takes the next items: first those of failed batches.
    fn next(&mut self, sizes: &BatchSizes, ranks: usize, budgets: Option<RetryBudgets>) -> Option<Piece> {
        if let Some(piece) = self.again.pop_front() {
            return Some(piece);
        }
        if self.fresh.is_empty() {
            return None;
        }
        let end = self.fresh.start + sizes.next(self.fresh.len(), ranks).min(self.fresh.len());
        let items = self.fresh.start..end;
        self.fresh.start = end;
        Some(Piece { items, budget: budgets.map(RetryBudget::new), lost: 0, error: None })
    }

    fn settle(&mut self, item: usize, result: Result<R, ItemError>) {
        debug_assert!(self.results[item].is_none(), "item {item} has two results");
        self.results[item] = Some(result);
        self.open -= 1;
    }

    fn fail(&mut self, items: Range<usize>, error: &Arc<GroupError>) {
        let together = items.len();
        for item in items {
            self.settle(item, Err(ItemError { item, together, error: Arc::clone(error) }));
        }
    }

    /// Gives this error to the items that are not handed out; those of a failed batch keep their own.
    fn fail_rest(&mut self, error: GroupError) {
        let error = Arc::new(error);
        for piece in std::mem::take(&mut self.again) {
            self.fail(piece.items, piece.error.as_ref().unwrap_or(&error));
        }
        for item in std::mem::take(&mut self.fresh) {
            self.fail(item..item + 1, &error);
        }
    }

    /// Decides over a failed batch: its items fail, or the pieces are to be handed out again after a pause.
    fn failed(&mut self, mut piece: Piece, error: GroupError, ended: bool) -> Option<(Vec<Piece>, Duration)> {
        let (origin, execution) = (origin(&error), error.execution());
        let several = piece.items.len() > 1;
        let error = Arc::new(error);
        piece.error = Some(Arc::clone(&error));
        if ended {
            self.fail(piece.items, &error);
            return None;
        }
        // The method has failed with one of the items. What did not run, or has replied, says nothing about single items.
        let of_one_item = execution == Execution::Finished && error.cause().code() != Code::DataLoss;
        if origin == FailureOrigin::Data && several {
            if of_one_item {
                return Some((piece.halves().into(), Duration::ZERO));
            }
            self.fail(piece.items, &error);
            return None;
        }
        piece.lost += u32::from(origin == FailureOrigin::Infrastructure);
        match piece.budget.as_mut().map(|budget| budget.failed(origin)) {
            Some(Disposition::Again { after, attempt }) => {
                tracing::debug!(%error, attempt, items = ?piece.items, "hand out again");
                let split = several && piece.lost >= LOST_WHOLE_MAX;
                Some((if split { piece.halves().into() } else { vec![piece] }, after))
            }
            _ => {
                self.fail(piece.items, &error);
                None
            }
        }
    }
}

impl Piece {
    fn halves(self) -> [Self; 2] {
        let middle = self.items.start + self.items.len().div_ceil(2);
        let half = |items| Self { items, budget: self.budget.clone(), lost: self.lost, error: self.error.clone() };
        [half(self.items.start..middle), half(middle..self.items.end)]
    }
}

impl Balancer {
    /// Runs a method for many small items in batches, and returns one result for each item, in the order of the items.
    ///
    /// The method gets a list of items and returns one reply for each. The list decides how many items a batch has: as many as take
    /// [`BatchOptions::target`], measured while it runs, with batches of one item first. Each batch goes to the rank that the balancing rule chooses
    /// (with [`Balance::LeastPending`](gym_core::registry::Balance), the one with the fewest batches in flight, on whichever node), so a node whose
    /// ranks are quicker, or more, gets more. There are at least four batches for each rank if there are as many items, and the last batches are
    /// small, so that the ranks end together.
    ///
    /// **One bad item fails alone.** If the method fails or panics, the batch is halved until the item is found; the others get their replies. An item of its
    /// own is tried again within the budget of [`Balancer::again`]. If a rank is lost, its batches are handed out again within that budget, first whole,
    /// then in halves. Without [`Balancer::again`], the items of a lost batch fail with the origin `Infrastructure`. If no rank is healthy, the list waits
    /// for one within the same budget.
    ///
    /// When the context ends, the items without a reply fail with the origin `Infrastructure`, and the others keep their replies.
    ///
    /// The method must be idempotent, because the items of a failed batch run again; other methods do not compile:
    ///
    /// ```compile_fail
    /// # use std::sync::Arc; use gym_group::prelude::*; use gym_group::{Balancer, BatchOptions}; use gym_core::registry::Balance;
    /// # struct Log(Vec<u64>);
    /// # worker! {
    /// #     impl Worker for Log as log {
    /// #         fn start(_: WorkerEnv, (): ()) -> Result<Self> { Ok(Self(Vec::new())) }
    /// exclusive async fn append(&mut self, _: &CallContext, call: Payload<Vec<u64>>) -> Result<Payload<Vec<u64>>> {
    /// #             self.0.extend(&call.value);
    /// #             Ok(call.value.into())
    /// #         }
    /// #     }
    /// # }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
    /// # let balancer = Balancer::new(Arc::new(InProcessGroup::start::<Log>("logs", RankLayout::line(1)?, ()).await?), Balance::LeastPending)?;
    /// // Error: map_batched runs items again: declare the method `(idempotent)`
    /// balancer.map_batched(&CallContext::default(), log::append, vec![1, 2], &BatchOptions::default()).await;
    /// # Ok(()) }
    /// ```
    ///
    /// A verifier:
    ///
    /// ```
    /// # use std::sync::Arc; use gym_group::prelude::*; use gym_group::{Balancer, BatchOptions}; use gym_core::registry::Balance;
    /// struct Verifier;
    /// worker! {
    ///     impl Worker for Verifier as verifier {
    ///         fn start(_: WorkerEnv, (): ()) -> Result<Self> { Ok(Self) }
    ///         /// Returns for each answer whether it is even.
    ///         shared(idempotent) async fn check(&self, _: &CallContext, call: Payload<Vec<u64>>) -> Result<Payload<Vec<bool>>> {
    ///             Ok(call.value.iter().map(|answer| answer % 2 == 0).collect::<Vec<_>>().into())
    ///         }
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
    /// let group = Arc::new(InProcessGroup::start::<Verifier>("verifiers", RankLayout::line(4)?, ()).await?);
    /// let balancer = Balancer::new(group, Balance::LeastPending)?;
    /// let results = balancer.map_batched(&CallContext::default(), verifier::check, (0..1_000).collect(), &BatchOptions::default()).await;
    /// let right = results.into_iter().collect::<Result<Vec<bool>, _>>()?;
    /// assert_eq!(right.iter().filter(|right| **right).count(), 500);
    /// # Ok(()) }
    /// ```
    pub async fn map_batched<M, I, R>(
        &self,
        cx: &CallContext,
        method: M,
        items: Vec<I>,
        options: &BatchOptions,
    ) -> Vec<Result<R, ItemError>>
    where
        M: Method<Args = Vec<I>, Reply = Vec<R>>,
        I: Clone,
    {
        self.map_batched_with(cx, method, items, |batch| batch, options).await
    }

    /// Like [`Balancer::map_batched`], for a method that takes more than the items: `arguments` makes its arguments from the items of a batch. A large
    /// input that all items share is part of these arguments, by reference (`gym_client::values`).
    pub async fn map_batched_with<M, I, R>(
        &self,
        cx: &CallContext,
        method: M,
        items: Vec<I>,
        arguments: impl Fn(Vec<I>) -> M::Args,
        options: &BatchOptions,
    ) -> Vec<Result<R, ItemError>>
    where
        M: Method<Reply = Vec<R>>,
        I: Clone,
    {
        const { assert!(M::IDEMPOTENT, "map_batched runs items again: declare the method `(idempotent)`") }
        let per_rank = options.per_rank.max(1);
        let mut sizes = BatchSizes::new(options.target, options.items_max);
        let mut list = List::new(items.len());
        let (mut running, mut calls) = (FuturesUnordered::new(), 0);
        let (mut view, mut waiting) = (self.group.view(), None);
        // When each rank, by index, answered last: a batch that waited there until then was not being worked on.
        let mut answered: Vec<Option<Instant>> = vec![None; self.group.layout().size()];
        let mut without_ranks = self.again.map(RetryBudget::new);
        loop {
            if let Err(error) = cx.check() {
                list.fail_rest(self.refused::<M>(error));
            }
            // Registered before the check for capacity, so that no notification is missed.
            let capacity = pin!(self.changed(&mut view));
            while !list.is_handed_out() {
                let in_flight = match self.take_for_list(calls, per_rank) {
                    Ok(Some(in_flight)) => in_flight,
                    Ok(None) => break,
                    Err(_) if !running.is_empty() => break,
                    Err(error) => {
                        match without_ranks.as_mut().map(|budget| budget.failed(FailureOrigin::Infrastructure)) {
                            Some(Disposition::Again { after, .. }) => {
                                let rest = Work::Rest { pieces: Vec::new(), pause: after };
                                running.push(self.step(cx, method, rest));
                            }
                            _ => list.fail_rest(self.refused::<M>(error)),
                        }
                        break;
                    }
                };
                let Some(piece) = list.next(&sizes, self.open_ranks(), self.again) else { break };
                (waiting, calls) = (None, calls + 1);
                let args = arguments(items[piece.items.clone()].to_vec());
                running.push(self.step(cx, method, Work::Call { piece, args, in_flight }));
            }
            // Pauses without items may still run.
            if list.open == 0 {
                break;
            }
            if calls == 0 && !list.is_handed_out() {
                waiting.get_or_insert_with(|| WaitingList::of(self));
            }
            let event = async {
                tokio::select! {
                    biased;
                    Some(step) = running.next() => Some(step),
                    () = capacity, if !list.is_handed_out() => None,
                }
            };
            // Calls end with the context by themselves, and describe the ranks that are late.
            let step = if calls > 0 {
                Ok(event.await)
            } else {
                cx.bound(Execution::NotStarted, async { Ok(event.await) }).await
            };
            match step {
                Ok(None) => {}
                Err(error) if list.is_handed_out() => drop(error),
                // Other callers keep the ranks at capacity, or this list rests.
                Err(error) if running.is_empty() => {
                    list.fail_rest(self.refused::<M>(self.kept_full(per_rank, &error)));
                }
                Err(error) => list.fail_rest(self.refused::<M>(error)),
                Ok(Some(Step::Rested(pieces))) => list.again.extend(pieces),
                Ok(Some(Step::Answered { piece, in_flight, began, answer })) => {
                    calls -= 1;
                    let now = Instant::now();
                    let busy = now - began.max(answered[in_flight.index].unwrap_or(began));
                    answered[in_flight.index] = Some(now);
                    drop(in_flight);
                    let replied = answer.and_then(|replies| self.one_for_each::<M, R>(replies, piece.items.len()));
                    match replied {
                        Ok(replies) => {
                            sizes.measured(piece.items.len(), busy);
                            without_ranks = self.again.map(RetryBudget::new);
                            for (item, reply) in piece.items.zip(replies) {
                                list.settle(item, Ok(reply));
                            }
                        }
                        Err(error) => match list.failed(piece, error, cx.check().is_err()) {
                            Some((pieces, Duration::ZERO)) => list.again.extend(pieces),
                            Some((pieces, pause)) => running.push(self.step(cx, method, Work::Rest { pieces, pause })),
                            None => {}
                        },
                    }
                }
            }
        }
        list.results.into_iter().map(|result| result.expect("every item has been handed out or failed")).collect()
    }

    async fn step<'b, M: Method>(&'b self, cx: &CallContext, method: M, work: Work<'b, M::Args>) -> Step<'b, M::Reply> {
        match work {
            Work::Call { piece, args, in_flight } => {
                let began = Instant::now();
                let call = self.group.call(method, args).dispatch(Dispatch::rank(in_flight.rank)).context(cx);
                let answer = call.await;
                in_flight.answered(answer.as_ref().err());
                let one =
                    |gathered: crate::Gathered<M::Reply>| gathered.into_one().map_err(|error| self.refused::<M>(error));
                let answer = answer.and_then(one).map(|payload| payload.value);
                Step::Answered { piece, in_flight, began, answer }
            }
            Work::Rest { pieces, pause } => {
                let rest = async {
                    tokio::time::sleep(pause).await;
                    Ok(())
                };
                // When the context ends, the pause does.
                let _ = cx.bound(Execution::NotStarted, rest).await;
                Step::Rested(pieces)
            }
        }
    }

    fn one_for_each<M: Method, R>(&self, replies: Vec<R>, items: usize) -> Result<Vec<R>, GroupError> {
        if replies.len() == items {
            return Ok(replies);
        }
        let text =
            format!("{} replies for {items} items; return one reply for each item, in their order", replies.len());
        Err(self.refused::<M>(Error::finished(Code::DataLoss, text)))
    }

    /// Returns the number of ranks that can be chosen now.
    fn open_ranks(&self) -> usize {
        let view = Arc::clone(&self.group.view().borrow());
        (0..view.members().len()).filter(|index| self.is_open(*index, view.members())).count()
    }
}
