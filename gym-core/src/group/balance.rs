//! Calls that any rank may take: one at a time, or more items than there are ranks.

use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::{Notify, watch};

use crate::batch::{Batch, Payload};
use crate::context::{CallContext, Incarnation};
use crate::dispatch::Dispatch;
use crate::error::{Code, Error, Execution, Result};
use crate::group::{GroupError, GroupView, Member, RankState, WorkerGroup, WorkerGroupExt};
use crate::health::{Disposition, FailureOrigin, Fleet, HealthEvent, HealthPolicy, Replica, RetryBudget, RetryBudgets};
use crate::layout::Rank;
use crate::pick::{Balance, Picker};
use crate::worker::Method;

/// Sends calls to the rank that has most room for them. Keep one for as long as its counts are to matter.
///
/// A rank whose calls fail three times in a row for the fleet's reasons (it breaks off, or is silent until the deadline) is given up
/// until its next life, however well it answers questions about its status: the others take its calls. With all of them given
/// up, they are called all the same.
pub struct Balancer {
    group: Arc<dyn WorkerGroup>,
    picker: Picker,
    again: Option<RetryBudgets>,
    known: Mutex<Known>,
    /// A call has left its rank, or somebody is no longer let pass.
    room: Notify,
    /// Lists of items that have no call under way and wait for room.
    idle: AtomicUsize,
}

/// What calls have shown of the ranks, by their position in the group.
struct Known {
    fleet: Fleet,
    lives: Vec<Incarnation>,
}

impl Balancer {
    /// A balancer of a group's calls. Weights are in rank order.
    ///
    /// # Errors
    /// `InvalidArgument` when there is not one weight for each rank, or none above 0.
    pub fn new(group: Arc<dyn WorkerGroup>, balance: Balance) -> Result<Self> {
        let ranks = group.layout().size();
        if let Balance::Weighted(weights) = &balance
            && (weights.len() != ranks || weights.iter().all(|weight| *weight == 0))
        {
            return Err(Error::invalid(format!(
                "weights {weights:?} for {ranks} ranks; give one for each, at least one of them above 0"
            )));
        }
        // How often a rank may be restarted is its group's business.
        let fleet = Fleet::new(ranks, HealthPolicy { restarts_max: u32::MAX, ..HealthPolicy::default() })?;
        let lives = group.view().borrow().members().iter().map(|member| member.incarnation).collect();
        Ok(Self {
            group,
            picker: Picker::new(balance),
            again: None,
            known: Mutex::new(Known { fleet, lives }),
            room: Notify::new(),
            idle: AtomicUsize::new(0),
        })
    }

    /// Makes failed calls of idempotent methods again, at whichever rank is chosen then, within these budgets for each call.
    #[must_use]
    pub fn again(mut self, budgets: RetryBudgets) -> Self {
        self.again = Some(budgets);
        self
    }

    /// Ranks that are given up: killing and restarting them may help.
    #[must_use]
    pub fn given_up(&self) -> Vec<Rank> {
        let view = Arc::clone(&self.group.view().borrow());
        let known = self.known(&view);
        let members = view.members().iter().zip(known.fleet.replicas());
        members.filter(|(_, replica)| !replica.serves()).map(|(member, _)| member.rank).collect()
    }

    /// Has one rank run one call.
    ///
    /// # Errors
    /// `Unavailable` when no rank is healthy and has a weight; else the call's own.
    pub async fn submit<M: Method>(
        &self,
        cx: &CallContext,
        method: M,
        args: M::Args,
        batch: Batch,
    ) -> Result<Payload<M::Reply>, GroupError> {
        let taken = self.take_any().map_err(|error| self.refused::<M>(error))?;
        self.attempts(cx, method, args, batch, taken).await
    }

    /// Has the ranks run a call for each item, at most `per_rank` at one rank at a time (those that are made again apart), and
    /// returns the replies in the order of the items. The first failure ends it, and what is under way is cancelled.
    ///
    /// Ranks that are full with the calls of others are waited for. A list that has calls under way begins no others while one waits
    /// that has none, so that a long one does not keep a short one waiting for its end.
    ///
    /// # Errors
    /// As [`Balancer::submit`]; `DeadlineExceeded` when others keep the ranks full until the deadline. Not started only when no item was
    /// begun but the one that failed: what others have done is not repeated by [`GroupError::may_resend`].
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
        let (mut view, mut idle) = (self.group.view(), None);
        loop {
            // Before the look for room: what becomes free after it is told.
            let room = pin!(self.changed(&mut view));
            while let Some((index, args)) = next.take() {
                let taken = match self.take_beside(running.len(), per_rank) {
                    Ok(taken) => taken,
                    Err(_) if !running.is_empty() => None,
                    Err(error) => return Err(self.refused::<M>(error).beside(begun)),
                };
                let Some(taken) = taken else {
                    next = Some((index, args));
                    break;
                };
                idle = None;
                begun += 1;
                let attempts = self.attempts(cx, method, args, Batch::empty(), taken);
                running.push(attempts.map(move |answer| (index, answer)));
                next = items.next();
            }
            if running.is_empty() {
                if next.is_none() {
                    break;
                }
                idle.get_or_insert_with(|| Idle::of(self));
                let waited = cx.bound(Execution::NotStarted, room.map(Ok)).await;
                waited.map_err(|error| self.refused::<M>(self.kept_full(per_rank, &error)).beside(begun))?;
                continue;
            }
            tokio::select! {
                biased;
                Some((index, answer)) = running.next() => {
                    replies[index] = Some(answer.map_err(|error| error.beside(begun - 1))?.value);
                }
                () = room, if next.is_some() => {}
            }
        }
        Ok(replies.into_iter().flatten().collect())
    }

    /// One call, and the same again as long as its budget lasts.
    async fn attempts<M: Method>(
        &self,
        cx: &CallContext,
        method: M,
        args: M::Args,
        batch: Batch,
        mut taken: Taken<'_>,
    ) -> Result<Payload<M::Reply>, GroupError> {
        let mut budget = self.again.filter(|_| M::IDEMPOTENT).map(RetryBudget::new);
        let mut parts = Some((args, batch));
        loop {
            let part = if budget.is_some() { parts.clone() } else { parts.take() };
            let (args, batch) = part.expect("without a budget there is one attempt");
            let call = self.group.call(method, args).batch(batch).dispatch(Dispatch::rank(taken.rank)).context(cx);
            let answer = call.await;
            taken.answered(answer.as_ref().err());
            let error = match answer {
                Ok(gathered) => return gathered.into_one().map_err(|error| self.refused::<M>(error)),
                Err(error) => error,
            };
            let origin = FailureOrigin::of(error.cause());
            let Some(Disposition::Again { after, attempt }) = budget.as_mut().map(|budget| budget.failed(origin))
            else {
                return Err(error);
            };
            drop(taken);
            tracing::debug!(%error, attempt, "call again");
            let pause = async {
                tokio::time::sleep(after).await;
                self.take_any()
            };
            taken = match cx.bound(Execution::NotStarted, pause).await {
                Ok(taken) => taken,
                Err(_) => return Err(error),
            };
        }
    }

    fn refused<M: Method>(&self, error: Error) -> GroupError {
        GroupError::new::<M>(self.group.name(), error, None, Vec::new())
    }

    /// A call's place at the rank that is chosen.
    fn take_any(&self) -> Result<Taken<'_>> {
        // No rank has as many calls as this.
        self.take(usize::MAX)?.ok_or_else(|| Error::internal("a rank without room for one call"))
    }

    /// As [`Balancer::take`], for a list that has `running` calls under way.
    fn take_beside(&self, running: usize, room: usize) -> Result<Option<Taken<'_>>> {
        let lets_pass = running > 0 && self.idle.load(Ordering::Acquire) > 0;
        if lets_pass { Ok(None) } else { self.take(room) }
    }

    /// A call's place at the rank that is chosen among those with fewer than `room` calls; `None` when there is no such rank.
    fn take(&self, room: usize) -> Result<Option<Taken<'_>>> {
        let view = Arc::clone(&self.group.view().borrow());
        let members = view.members();
        let mut known = self.known(&view);
        let open = |index: usize| self.is_open(index, members);
        if !(0..members.len()).any(open) {
            return Err(self.none_open(members));
        }
        let serving = known.fleet.serving().into_iter().any(open);
        let fit = |index: usize, replica: &Replica| open(index) && replica.in_flight < room;
        let fleet = &mut known.fleet;
        let index = if serving { fleet.acquire(&self.picker, fit) } else { fleet.take(&self.picker, fit) };
        // There are ranks to choose from, so it is for want of room alone that none was.
        let taken =
            |index: usize| Taken { balancer: self, index, rank: members[index].rank, life: members[index].incarnation };
        Ok(index.ok().map(taken))
    }

    fn is_open(&self, index: usize, members: &[Member]) -> bool {
        let healthy = members.get(index).is_some_and(|member| member.state == RankState::Healthy);
        healthy && self.picker.balance().chooses(index)
    }

    fn none_open(&self, members: &[Member]) -> Error {
        let healthy = members.iter().filter(|member| member.state == RankState::Healthy);
        let healthy: Vec<Rank> = healthy.map(|member| member.rank).collect();
        let why = match healthy.is_empty() {
            true => "no rank is healthy".to_owned(),
            false => format!("ranks {healthy:?} are healthy and have weight 0, which is never chosen"),
        };
        Error::not_started(Code::Unavailable, why).about(self.group.name().to_owned())
    }

    fn kept_full(&self, per_rank: usize, ended: &Error) -> Error {
        let why = format!("{} while others had {per_rank} calls under way at each rank", ended.message());
        Error::not_started(ended.code(), why).about(self.group.name().to_owned())
    }

    /// Resolves when there may be room that there was not when it was made.
    fn changed<'a>(&'a self, view: &'a mut watch::Receiver<Arc<GroupView>>) -> impl Future<Output = ()> + Send + 'a {
        let room = self.room.notified();
        view.mark_unchanged();
        async move {
            tokio::select! {
                biased;
                () = room => {}
                Ok(()) = view.changed() => {}
            }
        }
    }

    /// What is known, with the lives of now: what an earlier life failed says nothing about this one.
    fn known(&self, view: &GroupView) -> MutexGuard<'_, Known> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let Known { fleet, lives } = &mut *known;
        for (index, (member, life)) in view.members().iter().zip(lives).enumerate() {
            // Only forward: another caller may have seen a newer view.
            if *life < member.incarnation {
                *life = member.incarnation;
                // A life that its group lets serve has been made fit to.
                for event in [HealthEvent::RestartBegun, HealthEvent::Loaded, HealthEvent::Refit(life.0)] {
                    fleet.note(index, event);
                }
            }
        }
        known
    }
}

/// A call that counts at a rank until it is dropped.
struct Taken<'b> {
    balancer: &'b Balancer,
    index: usize,
    rank: Rank,
    life: Incarnation,
}

impl Taken<'_> {
    /// Takes note of how the call ended. One that was refused says nothing about the rank.
    fn answered(&self, error: Option<&GroupError>) {
        let failed = |error: &GroupError| FailureOrigin::of(error.cause()) == FailureOrigin::Infrastructure;
        if error.is_some_and(|error| error.execution() == Execution::NotStarted) {
            return;
        }
        let mut known = self.balancer.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.lives[self.index] == self.life {
            known.fleet.note(self.index, HealthEvent::Requested { ok: !error.is_some_and(failed) });
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.balancer.known.lock().unwrap_or_else(PoisonError::into_inner).fleet.release(self.index);
        self.balancer.room.notify_waiters();
    }
}

/// A list of items that has no call under way and waits for room, until it is dropped.
struct Idle<'b>(&'b Balancer);

impl<'b> Idle<'b> {
    fn of(balancer: &'b Balancer) -> Self {
        balancer.idle.fetch_add(1, Ordering::AcqRel);
        Self(balancer)
    }
}

impl Drop for Idle<'_> {
    fn drop(&mut self) {
        self.0.idle.fetch_sub(1, Ordering::AcqRel);
        self.0.room.notify_waiters();
    }
}

impl fmt::Debug for Balancer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Balancer({:?} of {})", self.picker.balance(), self.group.name())
    }
}
