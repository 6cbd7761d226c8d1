//! Cancellation of calls, and requests to drain or stop: a token that fires once, for all its clones and children.
//!
//! Each link creates a child token for each call, and most of these are never waited for. Creating a child therefore only stores the
//! parent and takes no lock. The child registers with the parent at the first wait.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

/// A signal that fires once: a caller has cancelled its call, or a server is asked to drain or stop. Clones are the same token. A child
/// fires when its parent does; a parent does not fire when its child does.
///
/// ```
/// use gym_core::CancelToken;
///
/// let stop = CancelToken::new();
/// let call = stop.child_token();
/// stop.cancel();
/// assert!(call.is_cancelled());
/// ```
#[derive(Clone, Default)]
pub struct CancelToken(Arc<Node>);

/// A rollout that waits has half a dozen of these, so a node is as small as it can be, and two listeners need no memory of their own.
struct Node {
    fired: AtomicBool,
    /// Slot among the parent's listeners, taken by the first wait for this token; [`NO_SLOT`] before.
    slot: AtomicU32,
    parent: Option<CancelToken>,
    listeners: Mutex<Listeners>,
}

/// The listeners that a token notifies when it fires. Slots are reused, so that a token of a thousand consecutive calls stays small.
struct Listeners {
    /// The first slots: most tokens have one waiter, one child, or both.
    first: [ListenerSlot; FIRST_SLOTS],
    /// The slots that follow. Boxed, because few tokens have them.
    #[expect(clippy::box_collection, reason = "a pointer instead of three words")]
    more: Option<Box<Vec<ListenerSlot>>>,
    /// The slot to use next, the head of a list of free slots; [`NO_SLOT`] if none is free.
    free: u32,
}

const FIRST_SLOTS: usize = 2;

/// The position of no listener.
const NO_SLOT: u32 = u32::MAX;

enum ListenerSlot {
    /// Refers to the next free slot.
    Free(u32),
    Waiter(Waker),
    Child(Weak<Node>),
}

impl Default for Node {
    fn default() -> Self {
        Self::of(None)
    }
}

impl Default for Listeners {
    fn default() -> Self {
        Self { first: [ListenerSlot::Free(1), ListenerSlot::Free(NO_SLOT)], more: None, free: 0 }
    }
}

impl CancelToken {
    /// A token that has not fired.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A token that fires with this one, or alone.
    #[must_use]
    pub fn child_token(&self) -> Self {
        self.clone().into_child()
    }

    /// As [`CancelToken::child_token`], without a clone of this handle.
    pub(crate) fn into_child(self) -> Self {
        Self(Arc::new(Node::of(Some(self))))
    }

    /// Fires the token. Later calls have no effect.
    pub fn cancel(&self) {
        self.0.fire();
    }

    /// Returns `true` if this token or one of its ancestors has fired.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        let mut node = &self.0;
        loop {
            if node.fired.load(Ordering::Acquire) {
                return true;
            }
            match &node.parent {
                Some(parent) => node = &parent.0,
                None => return false,
            }
        }
    }

    /// Resolves when the token fires, at once if it already has. Cancel safe.
    pub fn cancelled(&self) -> Cancelled<'_> {
        Cancelled { token: self, slot: NO_SLOT }
    }

    /// As [`CancelToken::cancelled`], for a future that owns the token.
    pub(crate) fn into_cancelled(self) -> CancelledOwned {
        CancelledOwned { token: self, slot: NO_SLOT }
    }

    /// Returns a guard that fires the token when it is dropped, unless it is disarmed.
    #[must_use = "dropping the guard fires the token"]
    pub fn drop_guard(self) -> CancelOnDrop {
        CancelOnDrop(Some(self))
    }

    /// Registers the waker in the slot of the waiter, unless the token has fired.
    fn poll_fired(&self, slot: &mut u32, cx: &Context<'_>) -> Poll<()> {
        let node = &self.0;
        if *slot == NO_SLOT {
            node.listen();
        }
        let mut listeners = node.listeners.lock();
        // Checked under the lock, after registering with the parents.
        if self.is_cancelled() {
            return Poll::Ready(());
        }
        let waiter = || ListenerSlot::Waiter(cx.waker().clone());
        let replaced = match listeners.slot(*slot) {
            Some(ListenerSlot::Waiter(waker)) if waker.will_wake(cx.waker()) => None,
            Some(mine) => Some(std::mem::replace(mine, waiter())),
            None => {
                *slot = listeners.add(waiter());
                None
            }
        };
        drop(listeners);
        drop(replaced);
        Poll::Pending
    }

    /// Gives up the slot of a waiter.
    fn leave(&self, slot: u32) {
        if slot != NO_SLOT {
            let left = self.0.listeners.lock().remove(slot);
            drop(left);
        }
    }
}

impl Node {
    fn of(parent: Option<CancelToken>) -> Self {
        Self { fired: AtomicBool::new(false), slot: AtomicU32::new(NO_SLOT), parent, listeners: Mutex::default() }
    }

    fn fire(&self) {
        if self.fired.swap(true, Ordering::AcqRel) {
            return;
        }
        // A listener that takes a slot after this finds, under the same lock, that the token has fired.
        let listeners = std::mem::take(&mut *self.listeners.lock());
        for slot in listeners.first.into_iter().chain(listeners.more.into_iter().flat_map(|more| *more)) {
            match slot {
                ListenerSlot::Waiter(waker) => waker.wake(),
                ListenerSlot::Child(child) => drop(child.upgrade().map(|child| child.fire())),
                ListenerSlot::Free(_) => {}
            }
        }
    }

    /// Registers this token with its parent, so that it fires with the parent.
    fn listen(self: &Arc<Self>) {
        let Some(CancelToken(parent)) = &self.parent else { return };
        parent.listen();
        if self.slot.load(Ordering::Acquire) == NO_SLOT {
            let mut listeners = parent.listeners.lock();
            // Another waiter may have registered the token meanwhile. The slot changes under the parent's lock only.
            if self.slot.load(Ordering::Acquire) == NO_SLOT {
                let slot = listeners.add(ListenerSlot::Child(Arc::downgrade(self)));
                self.slot.store(slot, Ordering::Release);
            }
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let slot = *self.slot.get_mut();
        if let (Some(CancelToken(parent)), true) = (&self.parent, slot != NO_SLOT) {
            let left = parent.listeners.lock().remove(slot);
            drop(left);
        }
    }
}

impl Listeners {
    fn slot(&mut self, at: u32) -> Option<&mut ListenerSlot> {
        match at as usize {
            at if at < FIRST_SLOTS => Some(&mut self.first[at]),
            at => self.more.as_mut()?.get_mut(at - FIRST_SLOTS),
        }
    }

    fn add(&mut self, slot: ListenerSlot) -> u32 {
        let at = self.free;
        if let Some(free) = self.slot(at) {
            let taken = std::mem::replace(free, slot);
            self.free = if let ListenerSlot::Free(next) = taken { next } else { NO_SLOT };
            return at;
        }
        let more = self.more.get_or_insert_default();
        more.push(slot);
        // No process has four billion waiters, each of which takes memory.
        (FIRST_SLOTS + more.len() - 1) as u32
    }

    /// Returns the content of the slot, to be dropped without a lock.
    fn remove(&mut self, at: u32) -> Option<ListenerSlot> {
        let free = ListenerSlot::Free(self.free);
        // After the token has fired, which removes all slots, there is nothing to free.
        match self.slot(at)? {
            ListenerSlot::Free(_) => None,
            taken => {
                let left = std::mem::replace(taken, free);
                self.free = at;
                Some(left)
            }
        }
    }
}

impl fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelToken").field("is_cancelled", &self.is_cancelled()).finish()
    }
}

/// Waits for a [`CancelToken`].
#[must_use = "a future does nothing until it is polled"]
pub struct Cancelled<'t> {
    token: &'t CancelToken,
    slot: u32,
}

impl Future for Cancelled<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let token = self.token;
        token.poll_fired(&mut self.slot, cx)
    }
}

impl Drop for Cancelled<'_> {
    fn drop(&mut self) {
        self.token.leave(self.slot);
    }
}

impl fmt::Debug for Cancelled<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.token.fmt(f)
    }
}

/// Waits for a [`CancelToken`] that it owns.
#[must_use = "a future does nothing until it is polled"]
pub(crate) struct CancelledOwned {
    token: CancelToken,
    slot: u32,
}

impl Future for CancelledOwned {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        this.token.poll_fired(&mut this.slot, cx)
    }
}

impl Drop for CancelledOwned {
    fn drop(&mut self) {
        self.token.leave(self.slot);
    }
}

/// Fires a [`CancelToken`] when it is dropped.
#[derive(Debug)]
pub struct CancelOnDrop(Option<CancelToken>);

impl CancelOnDrop {
    /// Returns the token without firing it.
    #[must_use]
    pub fn disarm(mut self) -> CancelToken {
        self.0.take().expect("taken by disarm alone, which consumes")
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(token) = &self.0 {
            token.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn woken() -> (Arc<Woken>, Waker) {
        let woken = Arc::new(Woken::default());
        (Arc::clone(&woken), woken.into())
    }

    #[test]
    fn a_token_fires_with_its_parent_and_never_the_reverse() {
        let parent = CancelToken::new();
        let (child, other) = (parent.child_token(), parent.child_token());
        child.clone().cancel();
        assert!(child.is_cancelled() && !parent.is_cancelled() && !other.is_cancelled());
        parent.cancel();
        assert!(other.is_cancelled() && other.child_token().is_cancelled());
    }

    #[test]
    fn who_waits_for_a_grandchild_is_woken_once_by_the_eldest() {
        let eldest = CancelToken::new();
        let youngest = eldest.child_token().child_token();
        let (count, waker) = woken();
        let mut cx = Context::from_waker(&waker);
        let mut waiting = pin!(youngest.cancelled());
        assert!(waiting.as_mut().poll(&mut cx).is_pending() && waiting.as_mut().poll(&mut cx).is_pending());
        eldest.cancel();
        eldest.cancel();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(waiting.poll(&mut cx).is_ready());
        assert!(pin!(youngest.child_token().cancelled()).poll(&mut cx).is_ready());
    }

    #[test]
    fn a_waiter_that_stopped_waiting_is_not_woken_and_frees_its_slot() {
        let token = CancelToken::new();
        let (count, waker) = woken();
        let mut cx = Context::from_waker(&waker);
        for _ in 0..1_000 {
            let child = token.child_token();
            assert!(
                pin!(child.cancelled()).poll(&mut cx).is_pending()
                    && pin!(token.cancelled()).poll(&mut cx).is_pending()
            );
        }
        assert!(token.0.listeners.lock().more.is_none());
        token.cancel();
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
    }

    proptest::proptest! {
        /// Waiters of a token and of its children come and go in any order, more than there are first slots.
        #[test]
        fn whoever_waits_is_woken_once_and_nobody_else(steps in proptest::collection::vec((0..4_u8, proptest::prelude::any::<usize>()), 0..60)) {
            let token = CancelToken::new();
            let (mut waiting, mut left) = (Vec::new(), Vec::new());
            for (step, which) in steps {
                match step {
                    0 | 1 => {
                        let of = if step == 0 { token.clone() } else { token.child_token() };
                        let (count, waker) = woken();
                        let mut waiter = Box::pin(of.into_cancelled());
                        proptest::prop_assert!(waiter.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
                        waiting.push((waiter, count));
                    }
                    _ if waiting.is_empty() => {}
                    2 => left.push(waiting.swap_remove(which % waiting.len()).1),
                    _ => {
                        // It is polled with another waker, which is the one to wake.
                        let at = which % waiting.len();
                        let (count, waker) = woken();
                        proptest::prop_assert!(waiting[at].0.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
                        left.push(std::mem::replace(&mut waiting[at].1, count));
                    }
                }
            }
            token.cancel();
            let woken = |counts: &[&Arc<Woken>]| counts.iter().map(|count| count.0.load(Ordering::Relaxed)).collect::<Vec<_>>();
            proptest::prop_assert_eq!(woken(&waiting.iter().map(|(_, count)| count).collect::<Vec<_>>()), vec![1; waiting.len()]);
            proptest::prop_assert_eq!(woken(&left.iter().collect::<Vec<_>>()), vec![0; left.len()]);
        }
    }

    #[test]
    fn a_guard_fires_unless_it_is_disarmed() {
        let token = CancelToken::new();
        assert!(!token.clone().drop_guard().disarm().is_cancelled());
        drop(token.clone().drop_guard());
        assert!(token.is_cancelled());
    }

    #[tokio::test]
    async fn a_token_that_fires_on_another_thread_wakes_who_waits() {
        for _ in 0..200 {
            let token = CancelToken::new();
            let child = token.child_token();
            let waiting = tokio::spawn(async move { child.cancelled().await });
            std::thread::spawn(move || token.cancel());
            tokio::time::timeout(std::time::Duration::from_secs(60), waiting).await.unwrap().unwrap();
        }
    }
}
