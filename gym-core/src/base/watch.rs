//! A value that receivers watch. As tokio's `watch`, except that a change wakes its receivers in the order in which they began to wait.
//!
//! tokio's wakes them in random order, to spread the contention of many threads. With it, a simulation would not repeat.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::sync::Notify;

struct Shared<T> {
    value: RwLock<T>,
    /// Changed only while `value` is locked for writing.
    version: AtomicUsize,
    senders: AtomicUsize,
    changed: Notify,
}

/// The value, which nobody can change while this lives.
#[derive(Debug)]
pub struct Ref<'a, T>(RwLockReadGuard<'a, T>);

impl<T> Deref for Ref<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Shared<T> {
    fn read(&self) -> Ref<'_, T> {
        Ref(self.value.read())
    }

    fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.value.write()
    }
}

/// Changes the value. Clones change the same value. Receivers notice when the last clone is dropped.
pub struct Sender<T>(Arc<Shared<T>>);

impl<T> Sender<T> {
    /// Creates a value without receivers.
    #[must_use]
    pub fn new(value: T) -> Self {
        let (version, senders) = (AtomicUsize::new(0), AtomicUsize::new(1));
        Self(Arc::new(Shared { value: RwLock::new(value), version, senders, changed: Notify::new() }))
    }

    /// Creates a receiver, which has seen the current value.
    #[must_use]
    pub fn subscribe(&self) -> Receiver<T> {
        let shared = Arc::clone(&self.0);
        let seen = shared.version.load(Ordering::Acquire);
        Receiver { shared, seen }
    }

    /// Returns the value, which nobody can change while the guard lives.
    #[must_use]
    pub fn borrow(&self) -> Ref<'_, T> {
        self.0.read()
    }

    /// Replaces the value and returns the one before.
    pub fn send_replace(&self, mut value: T) -> T {
        self.send_modify(|current| std::mem::swap(current, &mut value));
        value
    }

    /// Changes the value.
    pub fn send_modify(&self, modify: impl FnOnce(&mut T)) {
        self.send_if_modified(|value| {
            modify(value);
            true
        });
    }

    /// Changes the value, and notifies the receivers if `modify` returns `true`. Returns what it returned.
    pub fn send_if_modified(&self, modify: impl FnOnce(&mut T) -> bool) -> bool {
        let mut value = self.0.write();
        let modified = modify(&mut value);
        if modified {
            self.0.version.fetch_add(1, Ordering::Release);
        }
        drop(value);
        if modified {
            self.0.changed.notify_waiters();
        }
        modified
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.senders.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        if self.0.senders.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.changed.notify_waiters();
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sender").field(&*self.borrow()).finish()
    }
}

/// Reads the value and waits for changes. A clone has seen what its original had seen.
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
    seen: usize,
}

/// The senders were dropped: the value no longer changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the value no longer changes: its senders were dropped")]
pub struct Closed;

impl<T> Receiver<T> {
    /// Returns the value, which nobody can change while the guard lives.
    #[must_use]
    pub fn borrow(&self) -> Ref<'_, T> {
        self.shared.read()
    }

    /// Returns the value, and marks it as seen.
    pub fn borrow_and_update(&mut self) -> Ref<'_, T> {
        let value = self.shared.read();
        self.seen = self.shared.version.load(Ordering::Acquire);
        value
    }

    /// Marks the current value as seen.
    pub fn mark_unchanged(&mut self) {
        self.seen = self.shared.version.load(Ordering::Acquire);
    }

    /// Waits for a value that this receiver has not seen, and marks it as seen. Cancel safe.
    ///
    /// # Errors
    /// If it has seen the last value.
    pub async fn changed(&mut self) -> Result<(), Closed> {
        changed(&self.shared, &mut self.seen).await
    }

    /// Waits until `is` holds for the value, and marks the value as seen. Cancel safe.
    ///
    /// # Errors
    /// If it does not hold for the last value.
    pub async fn wait_for(&mut self, mut is: impl FnMut(&T) -> bool) -> Result<Ref<'_, T>, Closed> {
        let Self { shared, seen } = self;
        let mut open = Ok(());
        loop {
            {
                let value = shared.read();
                *seen = shared.version.load(Ordering::Acquire);
                if is(&value) {
                    return Ok(value);
                }
            }
            open?;
            open = changed(shared, seen).await;
        }
    }
}

async fn changed<T>(shared: &Shared<T>, seen: &mut usize) -> Result<(), Closed> {
    loop {
        // Before the look, so that a change after it is noticed.
        let notified = shared.changed.notified();
        let open = shared.senders.load(Ordering::Acquire) > 0;
        let version = shared.version.load(Ordering::Acquire);
        if version != *seen {
            *seen = version;
            return Ok(());
        }
        if !open {
            return Err(Closed);
        }
        notified.await;
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), seen: self.seen }
    }
}

impl<T: fmt::Debug> fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Receiver").field(&*self.borrow()).finish()
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn receivers_are_woken_in_the_order_in_which_they_began_to_wait() {
        for _ in 0..8 {
            let (sender, order) = (Sender::new(0), Arc::new(Mutex::new(Vec::new())));
            let waiters: Vec<_> = (0..8)
                .map(|number| {
                    let (mut receiver, order) = (sender.subscribe(), Arc::clone(&order));
                    tokio::spawn(async move {
                        receiver.changed().await.unwrap();
                        order.lock().push(number);
                    })
                })
                .collect();
            tokio::task::yield_now().await;
            sender.send_replace(1);
            for waiter in waiters {
                waiter.await.unwrap();
            }
            assert_eq!(*order.lock(), (0..8).collect::<Vec<_>>());
        }
    }

    #[tokio::test]
    async fn a_receiver_notices_each_change_once_and_the_end() {
        let sender = Sender::new(1);
        let mut receiver = sender.subscribe();
        assert!(receiver.changed().now_or_never().is_none());
        sender.send_modify(|value| *value += 1);
        assert!(!sender.send_if_modified(|_| false));
        assert_eq!(receiver.changed().now_or_never(), Some(Ok(())));
        assert!(receiver.changed().now_or_never().is_none());
        sender.send_replace(3);
        assert_eq!(*receiver.borrow_and_update(), 3);
        assert!(receiver.changed().now_or_never().is_none());
        let other = sender.clone();
        other.send_replace(4);
        drop(sender);
        let mut late = receiver.clone();
        drop(other);
        assert_eq!(receiver.changed().await, Ok(()), "the last value comes before the end");
        assert_eq!(receiver.changed().await, Err(Closed));
        assert_eq!(*late.wait_for(|value| *value == 4).await.unwrap(), 4);
        assert!(late.wait_for(|value| *value == 5).await.is_err());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_change_is_missed_between_two_threads() {
        let sender = Sender::new(0_u32);
        let mut receiver = sender.subscribe();
        let reader =
            tokio::spawn(async move { receiver.wait_for(|value| *value == 100_000).await.map(|value| *value) });
        for value in 1..=100_000 {
            sender.send_replace(value);
        }
        assert_eq!(reader.await.unwrap(), Ok(100_000));
    }
}
