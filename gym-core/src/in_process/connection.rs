//! What both ends of an in-process link share: who answers, how many calls are under way, and who waits for room.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use tokio::sync::{Notify, Semaphore};

use super::lock;
use crate::cancel::CancelToken;
use crate::error::{Code, Error, Result};
use crate::handler::Handler;
use crate::transport::PeerInfo;

/// What both ends share.
pub(super) struct Connection {
    /// What the connecting end calls the accepting one.
    pub(super) name: Arc<str>,
    /// What the accepting end calls the connecting one.
    pub(super) caller: PeerInfo,
    answering: OnceLock<Answering>,
    pub(super) served: Notify,
    /// Fires when either end is gone: running calls end with it.
    pub(super) closed: CancelToken,
    calls_max: usize,
    calls: Mutex<Calls>,
    /// Places of calls that have ended, on their way to those who wait for one.
    handed_on: Semaphore,
    idle: Notify,
}

/// Who answers, and how many calls it may have under way here.
struct Answering {
    handler: Arc<dyn Handler>,
    calls_max: usize,
}

#[derive(Default)]
struct Calls {
    running: usize,
    /// Those who wait for a place and have not been given one. While there are any, nobody passes them.
    waiting: usize,
    draining: bool,
    /// No channel is left: the last call closes the connection.
    abandoned: bool,
}

impl Connection {
    /// `closed` fires when either end is gone.
    pub(super) fn new(name: Arc<str>, calls_max: usize, closed: CancelToken) -> Self {
        Self {
            name,
            caller: PeerInfo { address: "in-process".into() },
            answering: OnceLock::new(),
            served: Notify::new(),
            closed,
            calls_max,
            calls: Mutex::default(),
            handed_on: Semaphore::new(0),
            idle: Notify::new(),
        }
    }

    /// Has `handler` answer from now on; only the first one counts.
    pub(super) fn answer_by(&self, handler: Arc<dyn Handler>) {
        let calls_max = if handler.bounds_calls() { usize::MAX } else { self.calls_max };
        let _ = self.answering.set(Answering { handler, calls_max });
    }

    pub(super) fn handler(&self) -> Option<&Arc<dyn Handler>> {
        Some(&self.answering.get()?.handler)
    }

    fn is_full(&self, calls: &Calls) -> bool {
        calls.waiting > 0 || calls.running >= self.answering.get().map_or(self.calls_max, |by| by.calls_max)
    }

    /// A place for one call; `None` when there is none, or others wait for one.
    pub(super) fn try_begin(self: &Arc<Self>) -> Result<Option<Running>> {
        let mut calls = lock(&self.calls);
        self.check_open(&calls)?;
        if self.is_full(&calls) {
            return Ok(None);
        }
        calls.running += 1;
        Ok(Some(Running(Arc::clone(self))))
    }

    /// Waits in line for a place.
    pub(super) async fn begin(self: &Arc<Self>) -> Result<Running> {
        let in_line = {
            let mut calls = lock(&self.calls);
            self.check_open(&calls)?;
            if !self.is_full(&calls) {
                calls.running += 1;
                return Ok(Running(Arc::clone(self)));
            }
            calls.waiting += 1;
            InLine(Some(self))
        };
        tokio::select! {
            biased;
            // First, because a connection that is closed takes no calls, see below.
            place = self.handed_on.acquire() => place.expect("it is never closed").forget(),
            () = self.closed.cancelled() => {
                return Err(Error::not_started(Code::Unavailable, "the peer has left").about(self.name.to_string()));
            }
        }
        let running = in_line.given();
        let still_open = self.check_open(&lock(&self.calls));
        still_open.map(|()| running)
    }

    fn check_open(&self, calls: &Calls) -> Result<()> {
        if calls.draining || self.closed.is_cancelled() {
            return Err(Error::not_started(Code::Unavailable, "the peer takes no new calls"));
        }
        Ok(())
    }

    /// The last channel is gone; replies that were started may still come, and the last of them closes.
    pub(super) fn abandon(&self) {
        let mut calls = lock(&self.calls);
        (calls.draining, calls.abandoned) = (true, true);
        if calls.running == 0 {
            drop(calls);
            self.closed.cancel();
        }
    }

    /// Takes no new calls and waits for the running ones.
    pub(super) async fn drain(&self) {
        lock(&self.calls).draining = true;
        loop {
            let idle = self.idle.notified();
            if lock(&self.calls).running == 0 {
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
        f.debug_struct("Connection").field("running", &lock(&self.calls).running).finish_non_exhaustive()
    }
}

/// One that waits for a place.
struct InLine<'c>(Option<&'c Arc<Connection>>);

impl InLine<'_> {
    /// The place that was handed on.
    fn given(mut self) -> Running {
        Running(Arc::clone(self.0.take().expect("given once")))
    }
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        let Some(connection) = self.0 else { return };
        let mut calls = lock(&connection.calls);
        if calls.waiting > 0 {
            // If a place was on its way here, it has gone to the next in line, who is counted still.
            calls.waiting -= 1;
            return;
        }
        // It was on its way here, and there is nobody else.
        drop(calls);
        if let Ok(place) = connection.handed_on.try_acquire() {
            place.forget();
            drop(Running(Arc::clone(connection)));
        }
    }
}

/// One call under way, in its place.
pub(super) struct Running(pub(super) Arc<Connection>);

impl Drop for Running {
    fn drop(&mut self) {
        let mut calls = lock(&self.0.calls);
        if calls.waiting > 0 {
            calls.waiting -= 1;
            // Under the lock: who leaves the line finds a place either here or handed on.
            self.0.handed_on.add_permits(1);
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

    fn places(connection: &Connection) -> (usize, usize) {
        let calls = lock(&connection.calls);
        (calls.running, calls.waiting)
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_passes_who_waits() {
        let connection = Arc::new(Connection::new("peer".into(), 1, CancelToken::new()));
        let first = connection.try_begin().unwrap().expect("there is room");
        let waits = tokio::spawn({
            let connection = Arc::clone(&connection);
            async move { connection.begin().await.map(drop) }
        });
        tokio::task::yield_now().await;
        drop(first);
        assert!(connection.try_begin().unwrap().is_none());
        waits.await.unwrap().unwrap();
        assert!(connection.try_begin().unwrap().is_some());
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
                        let running = connection.begin().await.unwrap();
                        assert!(places(&connection).0 <= PLACES);
                        tokio::task::yield_now().await;
                        drop(running);
                    };
                    if rng.bool() {
                        call.await;
                        continue;
                    }
                    // Leaves after so many looks at it, wherever it is by then.
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
        assert_eq!(places(&connection), (0, 0));
        assert_eq!(connection.handed_on.available_permits(), 0);
    }
}
