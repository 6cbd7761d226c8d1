//! Calls that any rank may take: one at a time, or more items than there are ranks.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::stream::{FuturesUnordered, StreamExt};
use serde::{Deserialize, Serialize};

use crate::batch::{Batch, Payload};
use crate::context::CallContext;
use crate::dispatch::Dispatch;
use crate::error::{Code, Error, Result};
use crate::group::{GroupError, GroupView, RankState, WorkerGroup, WorkerGroupExt};
use crate::layout::Rank;
use crate::worker::Method;

/// How a rank is chosen for a call that any of them may take. Only healthy ranks are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Balance {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest calls of this balancer under way; the lowest rank among equals. NeMo RL calls it
    /// `least_outstanding`.
    #[default]
    #[serde(alias = "least_outstanding")]
    LeastPending,
    /// In proportion to these weights, one for each rank in rank order: smoothly, as nginx does it. 0 is never chosen.
    Weighted(Vec<u32>),
    /// The less busy of two that are drawn at random.
    PowerOfTwo,
}

impl FromStr for Balance {
    type Err = Error;

    /// The name in a configuration; weights have no name.
    fn from_str(name: &str) -> Result<Self> {
        match name {
            "round_robin" => Ok(Self::RoundRobin),
            "least_pending" | "least_outstanding" => Ok(Self::LeastPending),
            "power_of_two" => Ok(Self::PowerOfTwo),
            _ => Err(Error::invalid(format!(
                "no load balancing strategy {name:?}; there are round_robin, least_pending (or least_outstanding), \
                 power_of_two, and weighted with a list of weights"
            ))),
        }
    }
}

/// Sends calls to the rank that has most room for them. Keep one for as long as its counts are to matter.
pub struct Balancer {
    group: Arc<dyn WorkerGroup>,
    balance: Balance,
    turn: AtomicUsize,
    random: AtomicU64,
    /// Calls under way; and, for weights, what each rank is owed.
    load: Mutex<BTreeMap<Rank, Load>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Load {
    pending: usize,
    owed: i64,
}

impl Balancer {
    /// A balancer of a group's calls.
    ///
    /// # Errors
    /// `InvalidArgument` when there is not one weight for each rank, or none above 0.
    pub fn new(group: Arc<dyn WorkerGroup>, balance: Balance) -> Result<Self> {
        if let Balance::Weighted(weights) = &balance {
            let ranks = group.layout().size();
            if weights.len() != ranks || weights.iter().all(|weight| *weight == 0) {
                return Err(Error::invalid(format!(
                    "weights {weights:?} for {ranks} ranks; give one for each, at least one of them above 0"
                )));
            }
        }
        let random = AtomicU64::new(0x9e37_79b9_7f4a_7c15);
        Ok(Self { group, balance, turn: AtomicUsize::new(0), random, load: Mutex::default() })
    }

    /// Has one rank run one call.
    ///
    /// # Errors
    /// `Unavailable` when no rank is healthy; else the call's own.
    pub async fn submit<M: Method>(
        &self,
        cx: &CallContext,
        method: M,
        args: M::Args,
        batch: Batch,
    ) -> Result<Payload<M::Reply>, GroupError> {
        let refused = |error| GroupError::new::<M>(self.group.name(), error, None, Vec::new());
        let taken = self.take(|_| true).map_err(refused)?;
        let call = self.group.call(method, args).batch(batch).dispatch(Dispatch::rank(taken.rank)).context(cx);
        call.await?.into_one().map_err(refused)
    }

    /// Has the ranks run a call for each item, at most `per_rank` at one rank at a time, and returns the replies in the order
    /// of the items. The first failure ends it, and what is under way is cancelled.
    ///
    /// # Errors
    /// As [`Balancer::submit`].
    pub async fn map<M: Method>(
        &self,
        cx: &CallContext,
        method: M,
        items: Vec<M::Args>,
        per_rank: usize,
    ) -> Result<Vec<M::Reply>, GroupError> {
        let refused = |error| GroupError::new::<M>(self.group.name(), error, None, Vec::new());
        let (count, per_rank) = (items.len(), per_rank.max(1));
        let mut items = items.into_iter().enumerate();
        let mut replies: Vec<Option<M::Reply>> = (0..count).map(|_| None).collect();
        let (mut running, mut next) = (FuturesUnordered::new(), items.next());
        loop {
            while let Some((index, args)) = next.take() {
                // Ranks that are full are passed over; with all of them full, one must finish first.
                let taken = match self.take(|load| load.pending < per_rank) {
                    Ok(taken) => taken,
                    Err(_) if !running.is_empty() => {
                        next = Some((index, args));
                        break;
                    }
                    Err(error) => return Err(refused(error)),
                };
                let call = self.group.call(method, args).dispatch(Dispatch::rank(taken.rank)).context(cx);
                running.push(async move {
                    let answer = call.await;
                    drop(taken);
                    (index, answer)
                });
                next = items.next();
            }
            let Some((index, answer)) = running.next().await else { break };
            replies[index] = Some(answer?.into_one().map_err(refused)?.value);
        }
        Ok(replies.into_iter().flatten().collect())
    }

    /// A call's place at the rank that is chosen among those with room.
    fn take(&self, room: impl Fn(&Load) -> bool) -> Result<Taken<'_>> {
        let view = Arc::clone(&self.group.view().borrow());
        let mut load = self.load.lock().unwrap_or_else(PoisonError::into_inner);
        let open: Vec<(usize, Rank)> =
            healthy(&view).filter(|(_, rank)| room(&load.get(rank).copied().unwrap_or_default())).collect();
        let rank = self.choose(&open, &mut load).ok_or_else(|| {
            Error::not_started(Code::Unavailable, "no healthy rank has room").about(self.group.name().to_owned())
        })?;
        load.entry(rank).or_default().pending += 1;
        Ok(Taken { balancer: self, rank })
    }

    fn choose(&self, open: &[(usize, Rank)], load: &mut BTreeMap<Rank, Load>) -> Option<Rank> {
        let pending = |rank: &Rank| load.get(rank).map_or(0, |load| load.pending);
        match &self.balance {
            Balance::RoundRobin => {
                let turn = self.turn.fetch_add(1, Ordering::Relaxed);
                Some(open.get(turn.checked_rem(open.len())?)?.1)
            }
            Balance::LeastPending => open.iter().map(|(_, rank)| *rank).min_by_key(pending),
            Balance::PowerOfTwo => {
                let first = self.draw(open.len())?;
                // Another one, unless there is none.
                let second = self.draw(open.len() - 1).map_or(first, |at| (first + 1 + at) % open.len());
                [first, second].into_iter().map(|at| open[at].1).min_by_key(pending)
            }
            Balance::Weighted(weights) => {
                let weight = |position: usize| i64::from(weights.get(position).copied().unwrap_or(0));
                let of_use: Vec<_> = open.iter().filter(|(position, _)| weight(*position) > 0).collect();
                let total: i64 = of_use.iter().map(|(position, _)| weight(*position)).sum();
                for (position, rank) in &of_use {
                    load.entry(*rank).or_default().owed += weight(*position);
                }
                let owed = |rank: &Rank| load.get(rank).map_or(0, |load| load.owed);
                let chosen =
                    of_use.iter().map(|(_, rank)| *rank).max_by_key(|rank| (owed(rank), std::cmp::Reverse(*rank)))?;
                load.entry(chosen).or_default().owed -= total;
                Some(chosen)
            }
        }
    }

    /// A number below `bound`, by splitmix64: which of two ranks is looked at needs no better source.
    fn draw(&self, bound: usize) -> Option<usize> {
        let mut mixed = self.random.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) >> 1).ok()?.checked_rem(bound)
    }
}

/// Position among all members, and rank.
fn healthy(view: &GroupView) -> impl Iterator<Item = (usize, Rank)> {
    let members = view.members().iter().enumerate();
    members.filter(|(_, member)| member.state == RankState::Healthy).map(|(position, member)| (position, member.rank))
}

/// A call that counts at a rank until it is dropped.
struct Taken<'b> {
    balancer: &'b Balancer,
    rank: Rank,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut load = self.balancer.load.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(load) = load.get_mut(&self.rank) {
            load.pending -= 1;
        }
    }
}

impl fmt::Debug for Balancer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Balancer({:?} of {})", self.balance, self.group.name())
    }
}
