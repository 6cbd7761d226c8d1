//! Groups that share bundles, in turns.
//!
//! A group's turn is over all its bundles at once, and a call takes it once for all its ranks: two calls that each had half of their
//! ranks would wait for one another inside their collectives for ever. So ranks that wait for each other are called by one call.
//! Calls of one group share its turn; when another group waits, later calls of the holder queue behind it, so nobody starves. First
//! come, first served, among those who want the same bundles.
//!
//! A turn is a call's and is given back when the call has ended. A call that its deadline, its caller or a failed rank ended is over before
//! its ranks are: an exclusive or blocking handler is told, not torn, and may still use the bundles while the next turn begins. Who must
//! not meet it there asks the hosts ([`WorkerGroupExt::ask_hosts`](gym_core::WorkerGroupExt::ask_hosts)) until none of them runs a call.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::BoxFuture;
use gym_core::{Gate, Leave};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// A bundle of a cluster: node and index on it.
pub type BundleId = (u32, u32);

/// The turns of the groups on one cluster. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turns(Arc<Mutex<State>>);

/// A group that takes turns, always over the same bundles.
#[derive(Debug)]
struct Tenant {
    group: u64,
    name: Arc<str>,
    bundles: Arc<BTreeSet<BundleId>>,
}

impl Tenant {
    /// Whether the other one is another group on one of its bundles.
    fn meets(&self, other: &Self) -> bool {
        self.group != other.group && !self.bundles.is_disjoint(&other.bundles)
    }
}

/// Who has a turn.
#[derive(Debug)]
struct Holder {
    tenant: Arc<Tenant>,
    calls: usize,
    since: Instant,
}

#[derive(Debug, Default)]
struct State {
    holders: BTreeMap<u64, Holder>,
    waiting: VecDeque<Waiting>,
    next: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    tenant: Arc<Tenant>,
    granted: oneshot::Sender<Turn>,
}

/// The right to use a group's bundles; ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    turns: Turns,
    group: u64,
}

/// A place in line; dropped without its turn, it is given up.
struct Place {
    turns: Turns,
    number: u64,
}

impl Turns {
    /// Takes the turn of a group. Waits as long as the caller does.
    async fn take(&self, tenant: Arc<Tenant>) -> Turn {
        let (granted, grant) = oneshot::channel();
        let number = {
            let mut state = self.lock();
            state.next += 1;
            let number = state.next;
            state.waiting.push_back(Waiting { number, tenant, granted });
            number
        };
        let place = Place { turns: self.clone(), number };
        self.grant();
        let turn = grant.await.expect("a place in line is granted, or given up by its owner");
        drop(place);
        turn
    }

    /// Gives turns to all who need not wait for anybody before them.
    fn grant(&self) {
        let granted = {
            let mut state = self.lock();
            // By the first in line for them.
            let mut wanted: BTreeMap<BundleId, u64> = BTreeMap::new();
            let mut granted = Vec::new();
            for waiting in std::mem::take(&mut state.waiting) {
                let tenant = &waiting.tenant;
                let foreign = |group: &u64| *group != tenant.group;
                let held = state.holders.values().any(|holder| tenant.meets(&holder.tenant));
                let behind = tenant.bundles.iter().any(|bundle| wanted.get(bundle).is_some_and(foreign));
                if held || behind {
                    for bundle in tenant.bundles.iter() {
                        wanted.entry(*bundle).or_insert(tenant.group);
                    }
                    state.waiting.push_back(waiting);
                } else {
                    let first = || Holder { tenant: Arc::clone(tenant), calls: 0, since: Instant::now() };
                    state.holders.entry(tenant.group).or_insert_with(first).calls += 1;
                    granted.push(waiting);
                }
            }
            granted
        };
        for Waiting { tenant, granted, .. } in granted {
            // One who has left gives the turn back here, by its drop.
            let _ = granted.send(Turn { turns: self.clone(), group: tenant.group });
        }
    }

    /// Whom a call of this group that waits now waits for.
    fn holder(&self, tenant: &Tenant) -> Option<String> {
        let state = self.lock();
        let holds = state.holders.values().find(|holder| tenant.meets(&holder.tenant));
        if let Some(Holder { tenant: other, since, .. }) = holds {
            return Some(format!("{} has had its bundles for {:.1?}", other.name, since.elapsed()));
        }
        // Its own group may have the turn, which ends for the sake of who came first.
        let before = state.waiting.iter().find(|waiting| tenant.meets(&waiting.tenant))?;
        Some(format!("{} waits before it", before.tenant.name))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.turns.lock();
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

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.turns.lock();
        let before = state.waiting.len();
        state.waiting.retain(|waiting| waiting.number != self.number);
        let left = state.waiting.len() < before;
        drop(state);
        if left {
            self.turns.grant();
        }
    }
}

/// A group's part in the turns: each of its calls takes the turn, all ranks together, before any rank has its part, and keeps it until
/// the last has answered. The wait is before the hand-over, so its end by the deadline means that no rank has seen anything.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    turns: Turns,
    tenant: Arc<Tenant>,
}

impl Share {
    /// That of the group with this number and name.
    pub(crate) fn new(turns: Turns, group: u64, name: Arc<str>, bundles: Arc<BTreeSet<BundleId>>) -> Self {
        Self { turns, tenant: Arc::new(Tenant { group, name, bundles }) }
    }
}

impl Gate for Share {
    fn enter(&self) -> BoxFuture<'static, Leave> {
        let Self { turns, tenant } = self.clone();
        Box::pin(async move { Arc::new(turns.take(tenant).await) as Leave })
    }

    fn holder(&self) -> Option<String> {
        self.turns.holder(&self.tenant)
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

    fn tenant(group: u64, bundles: &Arc<BTreeSet<BundleId>>) -> Arc<Tenant> {
        Arc::new(Tenant { group, name: format!("group {group}").into(), bundles: Arc::clone(bundles) })
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_can_say_for_whom_and_how_long_that_one_has_had_its_turn() {
        let (turns, all, other) = (Turns::default(), bundles(0..8), tenant(2, &bundles(4..9)));
        assert_eq!(turns.holder(&other), None);
        let first = turns.take(tenant(1, &all)).await;
        tokio::time::advance(std::time::Duration::from_secs(60)).await;
        let second = turns.take(tenant(1, &all)).await;
        assert_eq!(turns.holder(&other).expect("a holder"), "group 1 has had its bundles for 60.0s");
        assert_eq!(turns.holder(&tenant(3, &bundles(8..9))), None, "it does not meet it");
        let mut waits = Box::pin(turns.take(Arc::clone(&other)));
        assert!(waits.as_mut().now_or_never().is_none());
        assert_eq!(turns.holder(&tenant(1, &all)).expect("one before it"), "group 2 waits before it");
        drop((first, second));
        let _turn = waits.await;
        assert_eq!(turns.holder(&other), None, "it has its turn");
    }

    #[tokio::test]
    async fn two_groups_on_the_same_bundles_take_turns_in_order() {
        let (turns, all) = (Turns::default(), bundles(0..8));
        let first = turns.take(tenant(1, &all)).await;
        let mut other = Box::pin(turns.take(tenant(2, &all)));
        assert!(other.as_mut().now_or_never().is_none(), "the bundles are taken");
        let mut again = Box::pin(turns.take(tenant(1, &all)));
        assert!(again.as_mut().now_or_never().is_none(), "behind the other group, or it would starve");
        drop(first);
        let second = other.as_mut().now_or_never().expect("its turn");
        assert!(again.as_mut().now_or_never().is_none());
        drop(second);
        assert!(again.as_mut().now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_group_that_waits_is_not_passed_by_any_of_the_calls_behind_it() {
        let (turns, all) = (Turns::default(), bundles(0..2));
        let holds = turns.take(tenant(1, &all)).await;
        let mut waits = Box::pin(turns.take(tenant(2, &all)));
        assert!(waits.as_mut().now_or_never().is_none(), "the bundles are taken");
        let mut behind = [(); 3].map(|()| Box::pin(turns.take(tenant(1, &all))));
        assert!(behind.iter_mut().all(|call| call.as_mut().now_or_never().is_none()), "behind the other group");
        drop(holds);
        let turn = waits.as_mut().now_or_never().expect("its turn");
        assert!(behind.iter_mut().all(|call| call.as_mut().now_or_never().is_none()));
        drop(turn);
        assert!(behind.iter_mut().all(|call| call.as_mut().now_or_never().is_some()), "they share theirs");
    }

    #[tokio::test]
    async fn calls_of_one_group_share_its_turn_and_disjoint_groups_do_not_meet() {
        let turns = Turns::default();
        let _first = turns.take(tenant(1, &bundles(0..4))).await;
        assert!(turns.take(tenant(1, &bundles(0..4))).now_or_never().is_some());
        assert!(turns.take(tenant(2, &bundles(4..8))).now_or_never().is_some());
        assert!(turns.take(tenant(3, &bundles(3..5))).now_or_never().is_none());
    }

    #[tokio::test]
    async fn one_who_leaves_the_line_holds_up_nobody() {
        let (turns, all) = (Turns::default(), bundles(0..2));
        let first = turns.take(tenant(1, &all)).await;
        let mut leaves = Box::pin(turns.take(tenant(2, &all)));
        assert!(leaves.as_mut().now_or_never().is_none());
        drop(leaves);
        assert!(turns.take(tenant(1, &all)).now_or_never().is_some(), "nobody is before it any more");
        drop(first);
        assert!(turns.lock().holders.is_empty() && turns.lock().waiting.is_empty());
    }

    proptest! {
        /// Never two groups on one bundle, and everybody gets a turn once those before have ended theirs.
        #[test]
        fn bundles_have_one_group_at_a_time(steps in proptest::collection::vec((0_u64..4, any::<bool>()), 1..60)) {
            let spans = [bundles(0..4), bundles(2..6), bundles(4..8), bundles(0..8)];
            let tenants: Vec<_> = (0..).zip(&spans).map(|(group, span)| tenant(group, span)).collect();
            let turns = Turns::default();
            let mut held: Vec<Turn> = Vec::new();
            type Waiting<'a> = Pin<Box<dyn Future<Output = Turn> + 'a>>;
            let mut waiting: Vec<Waiting<'_>> = Vec::new();
            let settle = |waiting: &mut Vec<Waiting<'_>>, held: &mut Vec<Turn>| {
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
                    waiting.push(Box::pin(turns.take(Arc::clone(&tenants[group as usize]))));
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
