//! The bounds of a wait: the deadline and the cancel token of its call.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt::Write as _;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::base::cancel::{CancelToken, CancelledOwned};
use crate::base::error::{Code, Error, Execution, Result};
use crate::observe::stall;

pin_project! {
    /// A future within the bounds of a call. Not an async block, which would hold the future twice: every call that waits holds one of these.
    #[must_use = "a future does nothing until it is polled"]
    pub(super) struct Bounded<F> {
        #[pin]
        future: F,
        bounds: CallBounds,
        execution: Execution,
    }
}

impl<F> Bounded<F> {
    pub(super) fn new(future: F, bounds: CallBounds, execution: Execution) -> Self {
        Self { future, bounds, execution }
    }
}

impl<T, F: Future<Output = Result<T>>> Future for Bounded<F> {
    type Output = Result<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        let this = self.project();
        this.bounds.poll_within(*this.execution, cx, |cx| this.future.poll(cx))
    }
}

/// The bounds of one wait: a deadline and a cancel token. Owned, so that a future without references can have them.
pub(crate) struct CallBounds {
    cancelled: CancelledOwned,
    deadline: Instant,
    timer: WaitTimer,
}

/// The timer of a wait, which begins when the wait is first pending: most are not.
///
/// A call within a call has the same deadline, and a rollout waits in a chain of four. A wait therefore has no timer if one around it with the
/// same waker ends no later. The outer timer wakes the task, whose poll reaches the waits within, and each compares its deadline with the clock.
/// The innermost wait is the first to do so, so that its error is the cause of the others.
enum WaitTimer {
    Idle,
    /// The timer of a wait around this one wakes the task. Contains the beginning of the wait.
    Outer(Instant),
    /// Boxed, because every call that waits has bounds.
    Own(Pin<Box<OwnTimer>>),
}

pin_project! {
    struct OwnTimer {
        #[pin]
        sleep: Sleep,
        began: Instant,
    }
}

/// The wait around the ones that this thread polls.
#[derive(Clone, Copy)]
struct OuterWait {
    deadline: Instant,
    /// The address of the waker. A future with a waker of its own, such as one of many in a set or one that a nested `block_on` runs, is not
    /// polled when the timer fires.
    waker: usize,
}

thread_local! {
    static OUTER: Cell<Option<OuterWait>> = const { Cell::new(None) };
}

/// Restores the wait around, also after a panic.
struct RestoreOuter(Option<OuterWait>);

impl Drop for RestoreOuter {
    fn drop(&mut self) {
        let _ = OUTER.try_with(|outer| outer.set(self.0));
    }
}

impl CallBounds {
    pub(super) fn new(cancel: CancelToken, deadline: Instant) -> Self {
        Self { cancelled: cancel.into_cancelled(), deadline, timer: WaitTimer::Idle }
    }

    /// Begins another wait within the same bounds.
    pub(crate) fn begin_next(&mut self) {
        match &mut self.timer {
            WaitTimer::Own(timer) => *timer.as_mut().project().began = Instant::now(),
            timer => *timer = WaitTimer::Idle,
        }
    }

    /// Polls a wait. If a bound ends it, the error has the state `execution`.
    pub(crate) fn poll_within<T>(
        &mut self,
        execution: Execution,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<Result<T>>,
    ) -> Poll<Result<T>> {
        let own = OuterWait { deadline: self.deadline, waker: std::ptr::from_ref(cx.waker()).addr() };
        // None while the thread ends, when a timer of its own is right.
        let around = OUTER.try_with(Cell::get).ok().flatten();
        let outer = around.filter(|outer| outer.waker == own.waker && outer.deadline <= own.deadline);
        let _ = OUTER.try_with(|outermost| outermost.set(Some(outer.unwrap_or(own))));
        let restore = RestoreOuter(around);
        let polled = poll(cx);
        drop(restore);
        match polled {
            Poll::Pending => self.poll_ended(execution, outer.is_some(), cx).map(Err),
            ready => ready,
        }
    }

    /// Returns the error of the bound that ends a pending wait. `has_outer` is `true` if the timer of another wait wakes the task.
    fn poll_ended(&mut self, execution: Execution, has_outer: bool, cx: &mut Context<'_>) -> Poll<Error> {
        if Pin::new(&mut self.cancelled).poll(cx).is_ready() {
            return Poll::Ready(cancelled(execution));
        }
        let deadline = self.deadline;
        let began = match self.timer {
            WaitTimer::Own(_) => None,
            WaitTimer::Outer(began) => Some(began),
            WaitTimer::Idle => Some(Instant::now()),
        };
        match began {
            Some(began) if has_outer => {
                self.timer = WaitTimer::Outer(began);
                let now = Instant::now();
                let waited = now.saturating_duration_since(began);
                let passed = (now >= deadline).then(|| deadline_exceeded(execution, deadline, Some(waited)));
                return passed.map_or(Poll::Pending, Poll::Ready);
            }
            // The first wait, or the wait around has ended and this one goes on.
            Some(began) => self.timer = WaitTimer::own(deadline, began),
            None => {}
        }
        let WaitTimer::Own(timer) = &mut self.timer else { return Poll::Pending };
        let timer = timer.as_mut().project();
        timer.sleep.poll(cx).map(|()| deadline_exceeded(execution, deadline, Some(timer.began.elapsed())))
    }
}

impl WaitTimer {
    fn own(deadline: Instant, began: Instant) -> Self {
        Self::Own(Box::pin(OwnTimer { sleep: sleep_until(deadline), began }))
    }
}

pub(super) fn cancelled(execution: Execution) -> Error {
    Error::new(Code::Cancelled, execution, "the caller has left")
}

/// Returns the error of a passed deadline. It has the time of this wait, if there was one, and names a handler that blocked a
/// thread when the deadline passed. The error of the innermost wait is the cause of all others.
pub(super) fn deadline_exceeded(execution: Execution, deadline: Instant, waited: Option<Duration>) -> Error {
    let passed = match (waited, stall::during(deadline)) {
        (None, None) => Cow::Borrowed("the deadline has passed"),
        (None, Some(stall)) => format!("the deadline has passed while {stall}").into(),
        (Some(waited), stall) => {
            let mut text = format!("the deadline has passed after a wait of {:.1} s", waited.as_secs_f64());
            if let Some(stall) = stall {
                let _ = write!(text, "; meanwhile {stall}");
            }
            text.into()
        }
    };
    Error::new(Code::DeadlineExceeded, execution, passed)
}

#[cfg(test)]
mod tests {
    use futures_util::stream::{FuturesUnordered, StreamExt as _};

    use super::*;
    use crate::message::CallContext;

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_at_the_deadline_and_says_what_that_means() {
        let cx = CallContext::within(Duration::from_secs(1));
        let error = cx.bound(Execution::Unknown, std::future::pending::<Result<()>>()).await.unwrap_err();
        assert_eq!((error.code(), error.execution()), (Code::DeadlineExceeded, Execution::Unknown));
        assert_eq!(cx.check().unwrap_err().execution(), Execution::NotStarted);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_when_the_caller_leaves() {
        let cx = CallContext::default();
        cx.cancel.cancel();
        let error = cx.bound(Execution::NotStarted, std::future::pending::<Result<()>>()).await.unwrap_err();
        assert_eq!((error.code(), error.execution()), (Code::Cancelled, Execution::NotStarted));
    }

    #[tokio::test(start_paused = true)]
    async fn the_innermost_of_waits_with_one_deadline_ends_first() {
        let cx = CallContext::within(Duration::from_secs(1));
        let inner = || cx.bound(Execution::Unknown, std::future::pending::<Result<()>>());
        let error = cx.bound(Execution::Finished, inner()).await.unwrap_err();
        assert_eq!((error.code(), error.execution()), (Code::DeadlineExceeded, Execution::Unknown));
        assert!(error.to_string().contains("after a wait of 1.0 s"), "{error}");
        // A set polls a wait only after the waker that the set gave it.
        let mut set: FuturesUnordered<_> = [inner()].into_iter().collect();
        let error = cx.bound(Execution::Finished, async { set.next().await.unwrap() }).await.unwrap_err();
        assert_eq!(error.execution(), Execution::Unknown);
    }

    /// The executor of the inner wait polls within a poll of the outer one, which cannot start its timer before that ends.
    #[test]
    fn a_wait_that_blocks_its_thread_within_another_wait_still_ends() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let cx = CallContext::within(Duration::from_millis(100));
        let inner = || cx.bound(Execution::Unknown, std::future::pending::<Result<()>>());
        let blocking = async { tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(inner())) };
        let error = runtime.block_on(cx.bound(Execution::Finished, blocking)).unwrap_err();
        assert_eq!((error.code(), error.execution()), (Code::DeadlineExceeded, Execution::Unknown));
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_that_goes_on_after_the_wait_around_it_still_ends() {
        let began = Instant::now();
        let (long, short) = (CallContext::within(Duration::from_secs(5)), CallContext::within(Duration::from_secs(1)));
        let mut inner = std::pin::pin!(long.bound(Execution::Unknown, std::future::pending::<Result<()>>()));
        let error = short.bound(Execution::Finished, inner.as_mut()).await.unwrap_err();
        assert_eq!((error.execution(), began.elapsed()), (Execution::Finished, Duration::from_secs(1)));
        let error = inner.await.unwrap_err();
        assert_eq!((error.execution(), began.elapsed().as_secs()), (Execution::Unknown, 5));
        assert!(error.to_string().contains("after a wait of 5.0 s"), "{error}");
    }
}
