//! The state that both ends of an in-process link share: the handler, the concurrent calls, and the callers that wait for a slot.

use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use crate::base::cancel::CancelToken;
use crate::base::error::{Code, Error, Result};
use crate::message::PeerInfo;
use crate::transport::Handler;

/// The state shared by both ends.
pub(super) struct Connection {
    /// The name that the connecting end uses for the accepting end.
    pub(super) name: Arc<str>,
    /// The identity that the accepting end has for the connecting end.
    pub(super) caller: PeerInfo,
    serving: OnceLock<Serving>,
    pub(super) served: Notify,
    /// Fires when either end has closed, which ends running calls.
    pub(super) closed: CancelToken,
    calls_max: usize,
    calls: Mutex<Calls>,
    /// Slots of finished calls, passed on to waiting callers.
    released: Semaphore,
    idle: Notify,
}

/// The handler, and the concurrent calls allowed for it on this connection.
struct Serving {
    handler: Arc<dyn Handler>,
    calls_max: usize,
}

#[derive(Default)]
struct Calls {
    running: usize,
    /// Callers that wait for a slot and have not been granted one. While there are any, no other caller overtakes them.
    waiting: usize,
    draining: bool,
    /// `true` if all channels were dropped: the last call closes the connection.
    abandoned: bool,
}

impl Connection {
    /// Creates the state; `closed` fires when either end has closed.
    pub(super) fn new(name: Arc<str>, calls_max: usize, closed: CancelToken) -> Self {
        Self {
            name,
            caller: PeerInfo { address: "in-process".into() },
            serving: OnceLock::new(),
            served: Notify::new(),
            closed,
            calls_max,
            calls: Mutex::default(),
            released: Semaphore::new(0),
            idle: Notify::new(),
        }
    }

    /// Serves calls with `handler` from now on, which may bound its calls itself; later handlers are ignored.
    pub(super) fn serve_with(&self, handler: Arc<dyn Handler>, bounded_by_handler: bool) {
        let calls_max = if bounded_by_handler { usize::MAX } else { self.calls_max };
        let _ = self.serving.set(Serving { handler, calls_max });
    }

    pub(super) fn handler(&self) -> Option<&Arc<dyn Handler>> {
        Some(&self.serving.get()?.handler)
    }

    fn is_full(&self, calls: &Calls) -> bool {
        calls.waiting > 0 || calls.running >= self.serving.get().map_or(self.calls_max, |serving| serving.calls_max)
    }

    /// Acquires a slot for one call; returns `None` if no slot is free or other callers wait for one.
    pub(super) fn try_acquire_slot(self: &Arc<Self>) -> Result<Option<CallSlot>> {
        let mut calls = self.calls.lock();
        self.check_open(&calls)?;
        if self.is_full(&calls) {
            return Ok(None);
        }
        calls.running += 1;
        Ok(Some(CallSlot(Arc::clone(self))))
    }

    /// Waits for a slot, in the order of arrival.
    pub(super) async fn acquire_slot(self: &Arc<Self>) -> Result<CallSlot> {
        let waiter = {
            let mut calls = self.calls.lock();
            self.check_open(&calls)?;
            if !self.is_full(&calls) {
                calls.running += 1;
                return Ok(CallSlot(Arc::clone(self)));
            }
            calls.waiting += 1;
            SlotWaiter(Some(self))
        };
        tokio::select! {
            biased;
            // First, because a closed connection rejects the call below.
            slot = self.released.acquire() => slot.expect("the semaphore is never closed").forget(),
            () = self.closed.cancelled() => {
                return Err(Error::not_started(Code::Unavailable, "the peer has left").about(self.name.to_string()));
            }
        }
        let slot = waiter.granted();
        let still_open = self.check_open(&self.calls.lock());
        still_open.map(|()| slot)
    }

    fn check_open(&self, calls: &Calls) -> Result<()> {
        if calls.draining || self.closed.is_cancelled() {
            return Err(Error::not_started(Code::Unavailable, "the peer takes no new calls"));
        }
        Ok(())
    }

    /// Handles the drop of the last channel. Replies in flight may still arrive, and the last of them closes the connection.
    pub(super) fn abandon(&self) {
        let mut calls = self.calls.lock();
        (calls.draining, calls.abandoned) = (true, true);
        if calls.running == 0 {
            drop(calls);
            self.closed.cancel();
        }
    }

    /// Rejects new calls and waits for the running ones.
    pub(super) async fn drain(&self) {
        self.calls.lock().draining = true;
        loop {
            let idle = self.idle.notified();
            if self.calls.lock().running == 0 {
                return;
            }
            tokio::select! {
                biased;
                () = self.closed.cancelled() => return,
                () = idle => {}
            }
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("running", &self.calls.lock().running).finish_non_exhaustive()
    }
}

/// A caller that waits for a slot.
struct SlotWaiter<'c>(Option<&'c Arc<Connection>>);

impl SlotWaiter<'_> {
    /// Returns the slot that was granted.
    fn granted(mut self) -> CallSlot {
        CallSlot(Arc::clone(self.0.take().expect("granted once")))
    }
}

impl Drop for SlotWaiter<'_> {
    fn drop(&mut self) {
        let Some(connection) = self.0 else { return };
        let mut calls = connection.calls.lock();
        if calls.waiting > 0 {
            // A slot that was about to be granted to this caller goes to the next waiting caller, which is still counted.
            calls.waiting -= 1;
            return;
        }
        // The slot was about to be granted to this caller, and no other caller waits.
        drop(calls);
        if let Ok(slot) = connection.released.try_acquire() {
            slot.forget();
            drop(CallSlot(Arc::clone(connection)));
        }
    }
}

/// The slot of one running call, until it is dropped.
pub(super) struct CallSlot(pub(super) Arc<Connection>);

impl Drop for CallSlot {
    fn drop(&mut self) {
        let mut calls = self.0.calls.lock();
        if calls.waiting > 0 {
            calls.waiting -= 1;
            // Under the lock: a caller that stops waiting finds its slot either here or released.
            self.0.released.add_permits(1);
            return;
        }
        calls.running -= 1;
        if calls.running == 0 && calls.draining {
            let abandoned = calls.abandoned;
            drop(calls);
            self.0.idle.notify_waiters();
            if abandoned {
                self.0.closed.cancel();
            }
        }
    }
}

pub(super) struct CloseOnDrop(pub(super) Arc<Connection>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.closed.cancel();
    }
}

#[cfg(test)]
mod tests {
    use std::future::{Future, poll_fn};
    use std::task::Poll;
    use std::time::Duration;

    use futures_util::future::join_all;

    use super::*;

    fn counts(connection: &Connection) -> (usize, usize) {
        let calls = connection.calls.lock();
        (calls.running, calls.waiting)
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_passes_who_waits() {
        let connection = Arc::new(Connection::new("peer".into(), 1, CancelToken::new()));
        let first = connection.try_acquire_slot().unwrap().expect("there is room");
        let waits = tokio::spawn({
            let connection = Arc::clone(&connection);
            async move { connection.acquire_slot().await.map(drop) }
        });
        tokio::task::yield_now().await;
        drop(first);
        assert!(connection.try_acquire_slot().unwrap().is_none());
        waits.await.unwrap().unwrap();
        assert!(connection.try_acquire_slot().unwrap().is_some());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn places_are_not_lost_whoever_leaves_the_line() {
        const PLACES: usize = 3;
        let connection = Arc::new(Connection::new("peer".into(), PLACES, CancelToken::new()));
        let callers = (0..64_u64).map(|seed| {
            let connection = Arc::clone(&connection);
            tokio::spawn(async move {
                let mut rng = fastrand::Rng::with_seed(seed);
                for _ in 0..500 {
                    let call = async {
                        let running = connection.acquire_slot().await.unwrap();
                        assert!(counts(&connection).0 <= PLACES);
                        tokio::task::yield_now().await;
                        drop(running);
                    };
                    if rng.bool() {
                        call.await;
                        continue;
                    }
                    // Drops the call after this many polls, in whatever state it is by then.
                    let mut call = std::pin::pin!(call);
                    for _ in 0..rng.u32(1..4) {
                        if poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_ready())).await {
                            break;
                        }
                        tokio::task::yield_now().await;
                    }
                }
            })
        });
        for caller in tokio::time::timeout(Duration::from_secs(60), join_all(callers)).await.unwrap() {
            caller.unwrap();
        }
        assert_eq!(counts(&connection), (0, 0));
        assert_eq!(connection.released.available_permits(), 0);
    }
}
