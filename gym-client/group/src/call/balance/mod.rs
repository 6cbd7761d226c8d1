//! Load balancing of calls that any rank can run: single calls, lists with more items than ranks, and batches of small items.

mod batched;
mod sizes;

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use gym_core::base::watch;
use gym_core::group::RankState;
use gym_core::group::batch::{Batch, Payload};
use gym_core::group::layout::Rank;
use gym_core::group::layout::dispatch::Dispatch;
use gym_core::group::worker::Method;
use gym_core::group::{GroupView, RankView};
use gym_core::message::{CallContext, Incarnation};
use gym_core::registry::{Balance, Picker};
use gym_core::{Code, Error, Execution, Result};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::call::{GroupError, WorkerGroupExt};
use crate::health::{Disposition, FailureOrigin, Fleet, HealthEvent, HealthPolicy, Replica, RetryBudget, RetryBudgets};

pub use batched::{BatchOptions, ItemError};

/// Sends each call to the rank that the balancing rule chooses. The balancer counts calls as long as it exists.
///
/// It counts the calls in flight at each rank, whichever node the rank is on, and takes turns among ranks with as many calls. Calls therefore spread over
/// the nodes of a group in proportion to the speed of their ranks. Calls of other balancers are not counted: use one for all callers of a group.
///
/// A rank is ejected until its next incarnation if three consecutive calls fail because of the rank. That is, the rank
/// disconnects or misses the deadline, even if it still answers status requests. The other ranks get its calls. If all ranks are
/// ejected, they are called nevertheless.
///
/// A rank whose node is about to be taken away ([`RankView::draining`]) is called only if there is no other.
///
/// ```
/// use std::sync::Arc;
///
/// use gym_core::registry::Balance;
/// use gym_group::Balancer;
/// use gym_group::health::RetryBudgets;
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
/// let balancer = Balancer::new(Arc::new(group), Balance::LeastPending)?.again(RetryBudgets::default());
/// let cx = CallContext::default();
/// let one = balancer.submit(&cx, scorer::score, 1.5, Batch::empty()).await?;
/// // At most two calls at each rank.
/// let list = balancer.map(&cx, scorer::score, vec![1.0, 2.0, 3.0], 2).await?;
/// assert_eq!((one.value, list), (3.0, vec![2.0, 4.0, 6.0]));
/// # Ok(()) }
/// ```
pub struct Balancer {
    group: Arc<dyn WorkerGroupExt>,
    picker: Picker,
    again: Option<RetryBudgets>,
    observed: Mutex<ObservedHealth>,
    /// Notified when a call has ended at its rank, or when a list no longer waits.
    capacity: Notify,
    /// Lists of items that have no call in flight and wait for capacity.
    waiting_lists: AtomicUsize,
}

/// The health of the ranks as observed in calls, by position in the group.
struct ObservedHealth {
    fleet: Fleet,
    incarnations: Vec<Incarnation>,
}

impl Balancer {
    /// Creates a balancer for the calls of a group. Weights are in rank order.
    ///
    /// # Errors
    /// `InvalidArgument` if there is not one weight for each rank, or if none is above 0. Also for [`Balance::Affinity`]: the calls
    /// of a group have no session.
    pub fn new(group: Arc<dyn WorkerGroupExt>, balance: Balance) -> Result<Self> {
        if balance == Balance::Affinity {
            return Err(Error::invalid(
                "`affinity` balances the replicas of a model, and calls of a worker group have no session; use least_pending",
            ));
        }
        let ranks = group.layout().size();
        if let Balance::Weighted(weights) = &balance
            && (weights.len() != ranks || weights.iter().all(|weight| *weight == 0))
        {
            return Err(Error::invalid(format!(
                "weights {weights:?} for {ranks} ranks; give one for each, at least one of them above 0"
            )));
        }
        let fleet = Fleet::new(ranks, HealthPolicy::default())?;
        let incarnations = group.view().borrow().members().iter().map(|member| member.incarnation).collect();
        Ok(Self {
            group,
            picker: Picker::new(balance),
            again: None,
            observed: Mutex::new(ObservedHealth { fleet, incarnations }),
            capacity: Notify::new(),
            waiting_lists: AtomicUsize::new(0),
        })
    }

    /// Retries failed calls of idempotent methods, each time at a newly chosen rank, within these budgets for each call.
    #[must_use]
    pub fn again(mut self, budgets: RetryBudgets) -> Self {
        self.again = Some(budgets);
        self
    }

    /// Returns the ejected ranks. Killing and restarting them may help.
    #[must_use]
    pub fn ejected(&self) -> Vec<Rank> {
        let view = Arc::clone(&self.group.view().borrow());
        let observed = self.observed(&view);
        let members = view.members().iter().zip(observed.fleet.replicas());
        members.filter(|(_, replica)| !replica.health.serves()).map(|(member, _)| member.rank).collect()
    }

    /// Runs one call on one rank.
    ///
    /// # Errors
    /// `Unavailable` if no rank is healthy and has a weight; otherwise the error of the call.
    pub async fn submit<M: Method>(
        &self,
        cx: &CallContext,
        method: M,
        args: M::Args,
        batch: Batch,
    ) -> Result<Payload<M::Reply>, GroupError> {
        let in_flight = self.take_any().map_err(|error| self.refused::<M>(error))?;
        self.attempts(cx, method, args, batch, in_flight).await
    }

    /// Runs a call for each item, at most `per_rank` concurrently on one rank (not counting retries), and returns the replies in
    /// the order of the items. The first failure cancels the calls in flight.
    ///
    /// Waits, up to the deadline, for ranks at capacity. A list with calls in flight starts no further ones while another list
    /// has none. A long list therefore does not block a short one until it ends.
    ///
    /// # Errors
    /// The errors of [`Balancer::submit`]; `DeadlineExceeded` if calls of others keep the ranks at capacity until the deadline.
    /// The error is `NotStarted` only if no other item was started: [`GroupError::may_resend`] does not repeat the work of other
    /// items.
    pub async fn map<M: Method>(
        &self,
        cx: &CallContext,
        method: M,
        items: Vec<M::Args>,
        per_rank: usize,
    ) -> Result<Vec<M::Reply>, GroupError> {
        let (count, per_rank) = (items.len(), per_rank.max(1));
        let mut items = items.into_iter().enumerate();
        let mut begun = 0;
        let mut replies: Vec<Option<M::Reply>> = (0..count).map(|_| None).collect();
        let (mut running, mut next) = (FuturesUnordered::new(), items.next());
        let (mut view, mut waiting) = (self.group.view(), None);
        loop {
            // Registered before the check for capacity, so that no notification is missed.
            let capacity = pin!(self.changed(&mut view));
            while let Some((index, args)) = next.take() {
                let in_flight = match self.take_for_list(running.len(), per_rank) {
                    Ok(in_flight) => in_flight,
                    Err(_) if !running.is_empty() => None,
                    Err(error) => return Err(self.refused::<M>(error).with_others_started(begun)),
                };
                let Some(in_flight) = in_flight else {
                    next = Some((index, args));
                    break;
                };
                waiting = None;
                begun += 1;
                let attempts = self.attempts(cx, method, args, Batch::empty(), in_flight);
                running.push(attempts.map(move |answer| (index, answer)));
                next = items.next();
            }
            if running.is_empty() {
                if next.is_none() {
                    break;
                }
                waiting.get_or_insert_with(|| WaitingList::of(self));
                let waited = cx.bound(Execution::NotStarted, capacity.map(Ok)).await;
                waited
                    .map_err(|error| self.refused::<M>(self.kept_full(per_rank, &error)).with_others_started(begun))?;
                continue;
            }
            tokio::select! {
                biased;
                Some((index, answer)) = running.next() => {
                    replies[index] = Some(answer.map_err(|error| error.with_others_started(begun - 1))?.value);
                }
                () = capacity, if next.is_some() => {}
            }
        }
        Ok(replies.into_iter().flatten().collect())
    }

    /// Runs one call, and retries it within its budget.
    async fn attempts<M: Method>(
        &self,
        cx: &CallContext,
        method: M,
        args: M::Args,
        batch: Batch,
        mut in_flight: InFlightCall<'_>,
    ) -> Result<Payload<M::Reply>, GroupError> {
        let mut budget = self.again.filter(|_| M::IDEMPOTENT).map(RetryBudget::new);
        let mut parts = Some((args, batch));
        loop {
            let part = if budget.is_some() { parts.clone() } else { parts.take() };
            let (args, batch) = part.expect("without a budget there is one attempt");
            let call = self.group.call(method, args).batch(batch).dispatch(Dispatch::rank(in_flight.rank)).context(cx);
            let answer = call.await;
            in_flight.answered(answer.as_ref().err());
            let error = match answer {
                Ok(gathered) => return gathered.into_one().map_err(|error| self.refused::<M>(error)),
                Err(error) => error,
            };
            let origin = FailureOrigin::of(error.cause());
            let Some(Disposition::Again { after, attempt }) = budget.as_mut().map(|budget| budget.failed(origin))
            else {
                return Err(error);
            };
            drop(in_flight);
            tracing::debug!(%error, attempt, "call again");
            let pause = async {
                tokio::time::sleep(after).await;
                self.take_any()
            };
            in_flight = match cx.bound(Execution::NotStarted, pause).await {
                Ok(in_flight) => in_flight,
                Err(_) => return Err(error),
            };
        }
    }

    fn refused<M: Method>(&self, error: Error) -> GroupError {
        GroupError::new::<M>(self.group.name(), error, None, Vec::new())
    }

    /// Chooses a rank for one call.
    fn take_any(&self) -> Result<InFlightCall<'_>> {
        // No rank has as many calls as this.
        self.take(usize::MAX)?.ok_or_else(|| Error::internal("a rank without room for one call"))
    }

    /// Like [`Balancer::take`], for a list that has `running` calls in flight.
    fn take_for_list(&self, running: usize, calls_max: usize) -> Result<Option<InFlightCall<'_>>> {
        let yields = running > 0 && self.waiting_lists.load(Ordering::Acquire) > 0;
        if yields { Ok(None) } else { self.take(calls_max) }
    }

    /// Chooses a rank for one call, among those with fewer than `calls_max` calls; `None` if there is no such rank.
    fn take(&self, calls_max: usize) -> Result<Option<InFlightCall<'_>>> {
        let view = Arc::clone(&self.group.view().borrow());
        let members = view.members();
        let mut observed = self.observed(&view);
        let any_open = |index: usize| self.is_open(index, members);
        if !(0..members.len()).any(any_open) {
            return Err(self.none_open(members));
        }
        // A rank whose node is about to be taken away is the last choice.
        let stays = |index: usize| self.is_open(index, members) && !members[index].draining;
        let any_stays = (0..members.len()).any(stays);
        let open = |index: usize| if any_stays { stays(index) } else { any_open(index) };
        let serving = observed.fleet.serving().into_iter().any(open);
        let fit = |index: usize, replica: &Replica| open(index) && replica.in_flight < calls_max;
        let fleet = &mut observed.fleet;
        let index = if serving { fleet.acquire(&self.picker, fit) } else { fleet.take(&self.picker, fit) };
        // There are ranks to choose from, so an error means that all of them are at capacity.
        let in_flight = |index: usize| InFlightCall {
            balancer: self,
            index,
            rank: members[index].rank,
            incarnation: members[index].incarnation,
        };
        Ok(index.ok().map(in_flight))
    }

    fn is_open(&self, index: usize, members: &[RankView]) -> bool {
        let healthy = members.get(index).is_some_and(|member| member.state == RankState::Healthy);
        healthy && self.picker.balance().chooses(index)
    }

    fn none_open(&self, members: &[RankView]) -> Error {
        let healthy = members.iter().filter(|member| member.state == RankState::Healthy);
        let healthy: Vec<Rank> = healthy.map(|member| member.rank).collect();
        let why = match healthy.is_empty() {
            true => "no rank is healthy".to_owned(),
            false => format!("ranks {healthy:?} are healthy and have weight 0, which is never chosen"),
        };
        Error::not_started(Code::Unavailable, why).about(self.group.name().to_string())
    }

    fn kept_full(&self, per_rank: usize, ended: &Error) -> Error {
        let why = format!("{} while others had {per_rank} calls under way at each rank", ended.message());
        Error::not_started(ended.code(), why).about(self.group.name().to_string())
    }

    /// Resolves when there may be more capacity than when this was called.
    fn changed<'a>(&'a self, view: &'a mut watch::Receiver<Arc<GroupView>>) -> impl Future<Output = ()> + Send + 'a {
        let capacity = self.capacity.notified();
        view.mark_unchanged();
        async move {
            tokio::select! {
                biased;
                () = capacity => {}
                Ok(()) = view.changed() => {}
            }
        }
    }

    /// Returns the observed health of the current incarnations; failures of an earlier incarnation are forgotten.
    fn observed(&self, view: &GroupView) -> MutexGuard<'_, ObservedHealth> {
        let mut observed = self.observed.lock();
        let ObservedHealth { fleet, incarnations } = &mut *observed;
        for (index, (member, incarnation)) in view.members().iter().zip(incarnations).enumerate() {
            // Only forward: another caller may have seen a newer view.
            if *incarnation < member.incarnation {
                *incarnation = member.incarnation;
                // The group lets only prepared incarnations serve.
                fleet.replace(index);
            }
        }
        observed
    }
}

/// A call that is counted at a rank until it is dropped.
struct InFlightCall<'b> {
    balancer: &'b Balancer,
    index: usize,
    rank: Rank,
    incarnation: Incarnation,
}

impl InFlightCall<'_> {
    /// Records the result of the call. A rejected call does not affect the health of the rank.
    fn answered(&self, error: Option<&GroupError>) {
        let failed = |error: &GroupError| FailureOrigin::of(error.cause()) == FailureOrigin::Infrastructure;
        if error.is_some_and(|error| error.execution() == Execution::NotStarted) {
            return;
        }
        let mut observed = self.balancer.observed.lock();
        if observed.incarnations[self.index] == self.incarnation {
            observed.fleet.note(self.index, HealthEvent::Requested { ok: !error.is_some_and(failed) });
        }
    }
}

impl Drop for InFlightCall<'_> {
    fn drop(&mut self) {
        self.balancer.observed.lock().fleet.release(self.index);
        self.balancer.capacity.notify_waiters();
    }
}

/// Counts a list of items as waiting for capacity, without a call in flight, until it is dropped.
struct WaitingList<'b>(&'b Balancer);

impl<'b> WaitingList<'b> {
    fn of(balancer: &'b Balancer) -> Self {
        balancer.waiting_lists.fetch_add(1, Ordering::AcqRel);
        Self(balancer)
    }
}

impl Drop for WaitingList<'_> {
    fn drop(&mut self) {
        self.0.waiting_lists.fetch_sub(1, Ordering::AcqRel);
        self.0.capacity.notify_waiters();
    }
}

impl fmt::Debug for Balancer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Balancer({:?} of {})", self.picker.balance(), self.group.name())
    }
}
