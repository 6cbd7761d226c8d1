//! Cancellation of calls, and requests to drain or stop: a token that fires once, for all its clones and children.
//!
//! Each link creates a child token for each call, and most of these are never waited for. Creating a child therefore only stores the
//! parent and takes no lock. The child registers with the parent at the first wait.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

/// A signal that fires once: a caller has cancelled its call, or a server is asked to drain or stop. Clones are the same token. A child
/// fires when its parent does; a parent does not fire when its child does.
#[derive(Clone, Default)]
pub struct CancelToken(Arc<Node>);

#[derive(Default)]
struct Node {
    fired: AtomicBool,
    parent: Option<CancelToken>,
    /// Slot among the parent's listeners, taken by the first wait for this token.
    slot: OnceLock<usize>,
    listeners: Mutex<Listeners>,
}

/// The listeners that a token notifies when it fires. Slots are reused, so that a token of a thousand consecutive calls stays small.
#[derive(Default)]
struct Listeners {
    slots: Vec<ListenerSlot>,
    free: Option<usize>,
}

enum ListenerSlot {
    Free { next: Option<usize> },
    Waiter(Waker),
    Child(Weak<Node>),
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
        let parent = Some(self);
        Self(Arc::new(Node {
            fired: AtomicBool::new(false),
            parent,
            slot: OnceLock::new(),
            listeners: Mutex::default(),
        }))
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
        Cancelled { token: self, slot: None }
    }

    /// Returns a guard that fires the token when it is dropped, unless it is disarmed.
    #[must_use = "dropping the guard fires the token"]
    pub fn drop_guard(self) -> CancelOnDrop {
        CancelOnDrop(Some(self))
    }
}

impl Node {
    fn fire(&self) {
        if self.fired.swap(true, Ordering::AcqRel) {
            return;
        }
        // A listener that takes a slot after this finds, under the same lock, that the token has fired.
        let listeners = std::mem::take(&mut *self.listeners());
        for slot in listeners.slots {
            match slot {
                ListenerSlot::Waiter(waker) => waker.wake(),
                ListenerSlot::Child(child) => drop(child.upgrade().map(|child| child.fire())),
                ListenerSlot::Free { .. } => {}
            }
        }
    }

    /// Registers this token with its parent, so that it fires with the parent.
    fn listen(self: &Arc<Self>) {
        let Some(CancelToken(parent)) = &self.parent else { return };
        parent.listen();
        self.slot.get_or_init(|| parent.listeners().add(ListenerSlot::Child(Arc::downgrade(self))));
    }

    fn listeners(&self) -> MutexGuard<'_, Listeners> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let (Some(CancelToken(parent)), Some(at)) = (&self.parent, self.slot.get()) {
            let left = parent.listeners().remove(*at);
            drop(left);
        }
    }
}

impl Listeners {
    fn add(&mut self, slot: ListenerSlot) -> usize {
        match self.free {
            Some(at) => {
                let taken = std::mem::replace(&mut self.slots[at], slot);
                self.free = if let ListenerSlot::Free { next } = taken { next } else { None };
                at
            }
            None => {
                // Most tokens have one listener; a vector of its own accord has room for four.
                if self.slots.is_empty() {
                    self.slots.reserve_exact(1);
                }
                self.slots.push(slot);
                self.slots.len() - 1
            }
        }
    }

    /// Returns the content of the slot, to be dropped without a lock; `None` after the token has fired, which removes all slots.
    fn remove(&mut self, at: usize) -> Option<ListenerSlot> {
        let slot = self.slots.get_mut(at)?;
        let left = std::mem::replace(slot, ListenerSlot::Free { next: self.free });
        self.free = Some(at);
        Some(left)
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
    slot: Option<usize>,
}

impl Future for Cancelled<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let node = &self.token.0;
        if self.slot.is_none() {
            node.listen();
        }
        let mut listeners = node.listeners();
        // Checked under the lock, after registering with the parents.
        if self.token.is_cancelled() {
            return Poll::Ready(());
        }
        let registered = self.slot.and_then(|at| listeners.slots.get(at));
        if matches!(registered, Some(ListenerSlot::Waiter(waker)) if waker.will_wake(cx.waker())) {
            return Poll::Pending;
        }
        let waiter = ListenerSlot::Waiter(cx.waker().clone());
        let replaced = match self.slot.and_then(|at| listeners.slots.get_mut(at)) {
            Some(mine) => Some(std::mem::replace(mine, waiter)),
            None => {
                let at = listeners.add(waiter);
                drop(listeners);
                self.slot = Some(at);
                return Poll::Pending;
            }
        };
        drop(listeners);
        drop(replaced);
        Poll::Pending
    }
}

impl Drop for Cancelled<'_> {
    fn drop(&mut self) {
        if let Some(at) = self.slot {
            let left = self.token.0.listeners().remove(at);
            drop(left);
        }
    }
}

impl fmt::Debug for Cancelled<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.token.fmt(f)
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
        assert!(token.0.listeners().slots.len() <= 2);
        token.cancel();
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
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
            tokio::time::timeout(std::time::Duration::from_secs(10), waiting).await.unwrap().unwrap();
        }
    }
}
