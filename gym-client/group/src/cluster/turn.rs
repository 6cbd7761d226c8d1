//! Turns on bundles that several groups share.
//!
//! A turn covers all bundles of a group, and a call acquires it once for all its ranks. Otherwise two calls that each hold half
//! of their ranks would wait for each other permanently, inside their collectives. So one call must address all ranks that wait
//! for each other. Calls of one group share its turn. When another group waits, later calls of the holder queue behind it, so
//! no group starves. Groups that request the same bundles are served in the order of their requests.
//!
//! A call returns its turn when it ends. A call can end before its ranks do: at its deadline, when it is cancelled, or after a
//! rank failed. An exclusive or blocking handler then receives a cancellation signal but runs to completion, and may still use
//! the bundles when the next turn begins. To avoid this overlap, a caller queries the hosts until none of them runs a call
//! ([`WorkerGroupExt::ask_hosts`](crate::WorkerGroupExt::ask_hosts)).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::call::{Gate, Permit};
use crate::provision::BundleId;

/// The turns of the groups on one cluster. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct BundleTurns(Arc<Mutex<TurnQueue>>);

/// A group that shares bundles; its bundles never change.
#[derive(Debug)]
struct SharingGroup {
    group: u64,
    name: Arc<str>,
    bundles: Arc<BTreeSet<BundleId>>,
}

impl SharingGroup {
    /// Returns `true` if `other` is a different group and shares a bundle with this one.
    fn conflicts_with(&self, other: &Self) -> bool {
        self.group != other.group && !self.bundles.is_disjoint(&other.bundles)
    }
}

/// A group that holds a turn.
#[derive(Debug)]
struct TurnHolder {
    owner: Arc<SharingGroup>,
    calls: usize,
    since: Instant,
}

#[derive(Debug, Default)]
struct TurnQueue {
    holders: BTreeMap<u64, TurnHolder>,
    waiting: VecDeque<TurnRequest>,
    next: u64,
}

#[derive(Debug)]
struct TurnRequest {
    number: u64,
    owner: Arc<SharingGroup>,
    granted: oneshot::Sender<BundleTurn>,
}

/// A turn of a group on its bundles; dropping it ends the turn.
#[derive(Debug)]
pub(crate) struct BundleTurn {
    turns: BundleTurns,
    group: u64,
}

/// A request in the queue; dropping it before the turn is granted withdraws it.
struct PlaceInQueue {
    turns: BundleTurns,
    number: u64,
}

impl BundleTurns {
    /// Acquires the turn of a group. Waits as long as the caller does.
    async fn take(&self, owner: Arc<SharingGroup>) -> BundleTurn {
        let (granted, grant) = oneshot::channel();
        let number = {
            let mut state = self.0.lock();
            state.next += 1;
            let number = state.next;
            state.waiting.push_back(TurnRequest { number, owner, granted });
            number
        };
        let place = PlaceInQueue { turns: self.clone(), number };
        self.grant();
        let turn = grant.await.expect("a place in line is granted, or given up by its owner");
        drop(place);
        turn
    }

    /// Grants all requests that do not have to wait for an earlier request.
    fn grant(&self) {
        let granted = {
            let mut state = self.0.lock();
            // The group of the first request in the queue for each bundle.
            let mut wanted: BTreeMap<BundleId, u64> = BTreeMap::new();
            let mut granted = Vec::new();
            for waiting in std::mem::take(&mut state.waiting) {
                let owner = &waiting.owner;
                let foreign = |group: &u64| *group != owner.group;
                let held = state.holders.values().any(|holder| owner.conflicts_with(&holder.owner));
                let behind = owner.bundles.iter().any(|bundle| wanted.get(bundle).is_some_and(foreign));
                if held || behind {
                    for bundle in owner.bundles.iter() {
                        wanted.entry(*bundle).or_insert(owner.group);
                    }
                    state.waiting.push_back(waiting);
                } else {
                    let first = || TurnHolder { owner: Arc::clone(owner), calls: 0, since: Instant::now() };
                    state.holders.entry(owner.group).or_insert_with(first).calls += 1;
                    granted.push(waiting);
                }
            }
            granted
        };
        for TurnRequest { owner, granted, .. } in granted {
            // If the caller was cancelled, dropping the turn here returns it.
            let _ = granted.send(BundleTurn { turns: self.clone(), group: owner.group });
        }
    }

    /// Describes the turn holder that a waiting call of this group waits for.
    fn holder(&self, owner: &SharingGroup) -> Option<String> {
        let state = self.0.lock();
        let holds = state.holders.values().find(|holder| owner.conflicts_with(&holder.owner));
        if let Some(TurnHolder { owner: other, since, .. }) = holds {
            return Some(format!("{} has had its bundles for {:.1?}", other.name, since.elapsed()));
        }
        // The turn may belong to the caller's own group and end because another group requested it first.
        let before = state.waiting.iter().find(|waiting| owner.conflicts_with(&waiting.owner))?;
        Some(format!("{} waits before it", before.owner.name))
    }

    /// Returns the group that a waiting call of this group waits for.
    fn holding_group(&self, owner: &SharingGroup) -> Option<Arc<str>> {
        let state = self.0.lock();
        let holder = state.holders.values().find(|holder| owner.conflicts_with(&holder.owner));
        holder.map(|holder| Arc::clone(&holder.owner.name))
    }
}

impl Drop for BundleTurn {
    fn drop(&mut self) {
        let mut state = self.turns.0.lock();
        if let Some(holder) = state.holders.get_mut(&self.group) {
            holder.calls -= 1;
            if holder.calls == 0 {
                state.holders.remove(&self.group);
            }
        }
        drop(state);
        self.turns.grant();
    }
}

impl Drop for PlaceInQueue {
    fn drop(&mut self) {
        let mut state = self.turns.0.lock();
        let before = state.waiting.len();
        state.waiting.retain(|waiting| waiting.number != self.number);
        let left = state.waiting.len() < before;
        drop(state);
        if left {
            self.turns.grant();
        }
    }
}

/// The gate of a group that shares bundles. Each call acquires the group's turn before it sends anything to a rank, and keeps
/// the turn until the last rank has answered. If the deadline passes during the wait, no rank has received the call.
#[derive(Clone, Debug)]
pub(crate) struct TurnGate {
    turns: BundleTurns,
    owner: Arc<SharingGroup>,
}

impl TurnGate {
    /// Creates the gate of the group with this number and name.
    pub(crate) fn new(turns: BundleTurns, group: u64, name: Arc<str>, bundles: Arc<BTreeSet<BundleId>>) -> Self {
        Self { turns, owner: Arc::new(SharingGroup { group, name, bundles }) }
    }
}

impl Gate for TurnGate {
    fn enter(&self) -> BoxFuture<'static, Permit> {
        let Self { turns, owner } = self.clone();
        Box::pin(async move { Arc::new(turns.take(owner).await) as Permit })
    }

    fn holder(&self) -> Option<String> {
        self.turns.holder(&self.owner)
    }

    fn holding_group(&self) -> Option<Arc<str>> {
        self.turns.holding_group(&self.owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use proptest::prelude::*;
    use std::future::Future;
    use std::pin::Pin;

    fn bundles(range: std::ops::Range<u32>) -> Arc<BTreeSet<BundleId>> {
        Arc::new(range.map(|bundle| (0, bundle)).collect())
    }

    fn owner(group: u64, bundles: &Arc<BTreeSet<BundleId>>) -> Arc<SharingGroup> {
        Arc::new(SharingGroup { group, name: format!("group {group}").into(), bundles: Arc::clone(bundles) })
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_can_say_for_whom_and_how_long_that_one_has_had_its_turn() {
        let (turns, all, other) = (BundleTurns::default(), bundles(0..8), owner(2, &bundles(4..9)));
        assert_eq!(turns.holder(&other), None);
        let first = turns.take(owner(1, &all)).await;
        tokio::time::advance(std::time::Duration::from_secs(60)).await;
        let second = turns.take(owner(1, &all)).await;
        assert_eq!(turns.holder(&other).expect("a holder"), "group 1 has had its bundles for 60.0s");
        assert_eq!(turns.holder(&owner(3, &bundles(8..9))), None, "it does not meet it");
        let mut waits = Box::pin(turns.take(Arc::clone(&other)));
        assert!(waits.as_mut().now_or_never().is_none());
        assert_eq!(turns.holder(&owner(1, &all)).expect("one before it"), "group 2 waits before it");
        drop((first, second));
        let _turn = waits.await;
        assert_eq!(turns.holder(&other), None, "it has its turn");
    }

    #[tokio::test]
    async fn two_groups_on_the_same_bundles_take_turns_in_order() {
        let (turns, all) = (BundleTurns::default(), bundles(0..8));
        let first = turns.take(owner(1, &all)).await;
        let mut other = Box::pin(turns.take(owner(2, &all)));
        assert!(other.as_mut().now_or_never().is_none(), "the bundles are taken");
        let mut again = Box::pin(turns.take(owner(1, &all)));
        assert!(again.as_mut().now_or_never().is_none(), "behind the other group, or it would starve");
        drop(first);
        let second = other.as_mut().now_or_never().expect("its turn");
        assert!(again.as_mut().now_or_never().is_none());
        drop(second);
        assert!(again.as_mut().now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_group_that_waits_is_not_passed_by_any_of_the_calls_behind_it() {
        let (turns, all) = (BundleTurns::default(), bundles(0..2));
        let holds = turns.take(owner(1, &all)).await;
        let mut waits = Box::pin(turns.take(owner(2, &all)));
        assert!(waits.as_mut().now_or_never().is_none(), "the bundles are taken");
        let mut behind = [(); 3].map(|()| Box::pin(turns.take(owner(1, &all))));
        assert!(behind.iter_mut().all(|call| call.as_mut().now_or_never().is_none()), "behind the other group");
        drop(holds);
        let turn = waits.as_mut().now_or_never().expect("its turn");
        assert!(behind.iter_mut().all(|call| call.as_mut().now_or_never().is_none()));
        drop(turn);
        assert!(behind.iter_mut().all(|call| call.as_mut().now_or_never().is_some()), "they share theirs");
    }

    #[tokio::test]
    async fn calls_of_one_group_share_its_turn_and_disjoint_groups_do_not_meet() {
        let turns = BundleTurns::default();
        let _first = turns.take(owner(1, &bundles(0..4))).await;
        assert!(turns.take(owner(1, &bundles(0..4))).now_or_never().is_some());
        assert!(turns.take(owner(2, &bundles(4..8))).now_or_never().is_some());
        assert!(turns.take(owner(3, &bundles(3..5))).now_or_never().is_none());
    }

    #[tokio::test]
    async fn one_who_leaves_the_line_holds_up_nobody() {
        let (turns, all) = (BundleTurns::default(), bundles(0..2));
        let first = turns.take(owner(1, &all)).await;
        let mut leaves = Box::pin(turns.take(owner(2, &all)));
        assert!(leaves.as_mut().now_or_never().is_none());
        drop(leaves);
        assert!(turns.take(owner(1, &all)).now_or_never().is_some(), "nobody is before it any more");
        drop(first);
        assert!(turns.0.lock().holders.is_empty() && turns.0.lock().waiting.is_empty());
    }

    proptest! {
        /// At most one group holds a bundle, and each request is granted once the earlier turns have ended.
        #[test]
        fn bundles_have_one_group_at_a_time(steps in proptest::collection::vec((0_u64..4, any::<bool>()), 1..60)) {
            let spans = [bundles(0..4), bundles(2..6), bundles(4..8), bundles(0..8)];
            let groups: Vec<_> = (0..).zip(&spans).map(|(group, span)| owner(group, span)).collect();
            let turns = BundleTurns::default();
            let mut held: Vec<BundleTurn> = Vec::new();
            type TurnRequest<'a> = Pin<Box<dyn Future<Output = BundleTurn> + 'a>>;
            let mut waiting: Vec<TurnRequest<'_>> = Vec::new();
            let settle = |waiting: &mut Vec<TurnRequest<'_>>, held: &mut Vec<BundleTurn>| {
                waiting.retain_mut(|one| one.as_mut().now_or_never().map(|turn| held.push(turn)).is_none());
                for (at, one) in held.iter().enumerate() {
                    for other in &held[at + 1..] {
                        let (a, b) = (one.group as usize, other.group as usize);
                        assert!(a == b || spans[a].is_disjoint(&spans[b]), "groups {a} and {b} at once");
                    }
                }
            };
            for (group, end) in steps {
                if end && !held.is_empty() {
                    held.remove(0);
                } else {
                    waiting.push(Box::pin(turns.take(Arc::clone(&groups[group as usize]))));
                }
                settle(&mut waiting, &mut held);
            }
            while !held.is_empty() {
                held.remove(0);
                settle(&mut waiting, &mut held);
            }
            prop_assert!(waiting.is_empty(), "{} never had a turn", waiting.len());
        }
    }
}
