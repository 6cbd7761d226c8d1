//! A call whose future only waits for what runs it: polled where it is woken, without a task.
//!
//! A task for each call costs two task switches, and often the wake-up of another thread. Here, the response is sent by what produced it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;

use crate::base::error::Result;
use crate::message::Response;

/// A call, to which its response goes. Dropping it without a response cancels the call.
pub(super) trait Respond: Send + 'static {
    /// Takes the response.
    fn respond(self, response: Result<Response>);
}

/// Drops the future of a call.
pub(super) trait Abandon: Send + Sync {
    /// Drops the future, without a lock of this call.
    fn abandon(&self);
}

/// One call that waits for its response.
pub(super) struct WaitingCall<C> {
    /// `None` once the call has its response or was abandoned.
    call: Mutex<Option<(C, BoxFuture<'static, Result<Response>>)>>,
    /// `true` if the future was woken after its last poll began.
    woken: AtomicBool,
}

impl<C: Respond> WaitingCall<C> {
    pub(super) fn new(call: C, response: BoxFuture<'static, Result<Response>>) -> Arc<Self> {
        Arc::new(Self { call: Mutex::new(Some((call, response))), woken: AtomicBool::new(false) })
    }

    /// Polls the future, unless another thread polls it: that one then polls once more.
    pub(super) fn poll(self: &Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        while self.woken.load(Ordering::SeqCst) {
            // Another holder looks at `woken` after it has released the lock.
            let Some(mut held) = self.call.try_lock() else { return };
            self.woken.store(false, Ordering::SeqCst);
            let Some((_, response)) = held.as_mut() else { return };
            let waker = Waker::from(Arc::clone(self));
            if let Poll::Ready(response) = response.as_mut().poll(&mut Context::from_waker(&waker)) {
                let call = held.take();
                drop(held);
                if let Some((call, _)) = call {
                    call.respond(response);
                }
                return;
            }
        }
    }
}

impl<C: Respond> Wake for WaitingCall<C> {
    fn wake(self: Arc<Self>) {
        self.poll();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.poll();
    }
}

impl<C: Respond> Abandon for WaitingCall<C> {
    fn abandon(&self) {
        let call = self.call.lock().take();
        drop(call);
    }
}
