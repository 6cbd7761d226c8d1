//! The context of a call: deadline, cancellation, trace and metadata.
//!
//! In memory the deadline is an instant; on the wire it is the remaining time, so two machines need no common clock.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project_lite::pin_project;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, Sleep, sleep_until};

use super::metadata::Metadata;
use crate::base::cancel::{CancelToken, Cancelled};
use crate::base::error::{Code, Error, Execution, Result};
use crate::base::hex;
use crate::base::progress::CallProgress;
use crate::base::stall;

/// Length of a `traceparent`: version, trace, span and flags, with hyphens between them.
const TRACEPARENT_BYTES: usize = 2 + 1 + 32 + 1 + 16 + 1 + 2;

/// Default time until the deadline of a call: longer than a slow model turn, shorter than a night.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(600);

/// Default limit of a reply in bytes. A rollout of 128k training tokens is about 2.5 MB. The limit therefore admits images and
/// expert routing, while a faulty peer cannot exhaust the memory.
pub const DEFAULT_REPLY_BYTES_MAX: usize = 256 << 20;

/// The context of a call, passed as the first argument to every function that waits.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CallContext {
    /// The instant at which the caller stops waiting. On the wire: the remaining time.
    pub deadline: Instant,
    /// Cancelled when the caller disconnects or cancels the call.
    pub cancel: CancelToken,
    /// The position of the call in a trace.
    pub trace: TraceContext,
    /// Ordered pairs that are sent with the call, such as cookies; headers over HTTP.
    pub metadata: Metadata,
    /// Maximum number of bytes of the reply; the capacity is reserved before the request is sent.
    pub reply_bytes_max: usize,
    /// The incarnation for which the call is meant; other incarnations reject it.
    pub incarnation: Option<Incarnation>,
    /// Progress of the call, reported by its handler; distinguishes a slow call from a stuck one.
    pub progress: CallProgress,
    /// `true` if the response holds no capacity of the connection once it has arrived, because its caller may start any number of calls before
    /// it reads the first response.
    pub(crate) reads_later: bool,
}

impl CallContext {
    /// Creates a context with a deadline `timeout` from now, and defaults for all else.
    #[must_use]
    pub fn within(timeout: Duration) -> Self {
        Self::until(Instant::now() + timeout)
    }

    /// Creates a context with a deadline, and defaults for all else.
    #[must_use]
    pub fn until(deadline: Instant) -> Self {
        Self {
            deadline,
            cancel: CancelToken::new(),
            trace: TraceContext::default(),
            metadata: Metadata::new(),
            reply_bytes_max: DEFAULT_REPLY_BYTES_MAX,
            incarnation: None,
            progress: CallProgress::default(),
            reads_later: false,
        }
    }

    /// Creates the context of a call made on behalf of this one: the same deadline, cancellation, trace and progress, and no
    /// metadata.
    #[must_use]
    pub fn child(&self) -> Self {
        Self {
            deadline: self.deadline,
            cancel: self.cancel.clone(),
            trace: self.trace,
            metadata: Metadata::new(),
            reply_bytes_max: DEFAULT_REPLY_BYTES_MAX,
            incarnation: None,
            progress: self.progress.clone(),
            reads_later: false,
        }
    }

    /// Moves the deadline to at most `timeout` from now.
    #[must_use]
    pub fn at_most(mut self, timeout: Duration) -> Self {
        self.deadline = self.deadline.min(Instant::now() + timeout);
        self
    }

    /// Adds a metadata pair.
    #[must_use]
    pub fn with_metadata(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.metadata.push(name, value);
        self
    }

    /// Returns the remaining time; zero if the deadline has passed.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Checks that the deadline has not passed and that the call is not cancelled. A passed deadline is detected before anything
    /// is sent, instead of by a timer that rounds up.
    ///
    /// # Errors
    /// `DeadlineExceeded` or `Cancelled`, not started.
    pub fn check(&self) -> Result<()> {
        self.check_at(Instant::now())
    }

    /// Like [`CallContext::check`], for callers that have read the clock.
    pub(crate) fn check_at(&self, now: Instant) -> Result<()> {
        if self.cancel.is_cancelled() {
            return Err(cancelled(Execution::NotStarted));
        }
        if now >= self.deadline {
            return Err(deadline_exceeded(Execution::NotStarted, self.deadline, None));
        }
        Ok(())
    }

    /// Runs `future` until it completes, the deadline passes, or the call is cancelled. In the last two cases, the error has the
    /// state `execution`.
    ///
    /// # Errors
    /// The error of the future, `DeadlineExceeded` or `Cancelled`.
    pub fn bound<T, F>(&self, execution: Execution, future: F) -> impl Future<Output = Result<T>>
    where
        F: Future<Output = Result<T>>,
    {
        bounded(&self.cancel, self.deadline, execution, future)
    }
}

/// Runs `future` as [`CallContext::bound`] does, with the given token and deadline.
pub(crate) fn bounded<T, F>(cancel: &CancelToken, deadline: Instant, execution: Execution, future: F) -> Bounded<'_, F>
where
    F: Future<Output = Result<T>>,
{
    Bounded { future, cancelled: cancel.cancelled(), timer: None, began: None, deadline, execution }
}

pin_project! {
    /// A future within the bounds of a call. Not an async block, which would hold the future twice: every call that waits holds one of these.
    #[must_use = "a future does nothing until it is polled"]
    pub(crate) struct Bounded<'c, F> {
        #[pin]
        future: F,
        cancelled: Cancelled<'c>,
        // Created when the future is first pending: most are not.
        #[pin]
        timer: Option<Sleep>,
        began: Option<Instant>,
        deadline: Instant,
        execution: Execution,
    }
}

impl<T, F: Future<Output = Result<T>>> Future for Bounded<'_, F> {
    type Output = Result<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        let mut this = self.project();
        if let Poll::Ready(done) = this.future.poll(cx) {
            return Poll::Ready(done);
        }
        let began = *this.began.get_or_insert_with(Instant::now);
        if Pin::new(this.cancelled).poll(cx).is_ready() {
            return Poll::Ready(Err(cancelled(*this.execution)));
        }
        if this.timer.is_none() {
            this.timer.set(Some(sleep_until(*this.deadline)));
        }
        let Some(timer) = this.timer.as_pin_mut() else { return Poll::Pending };
        timer.poll(cx).map(|()| Err(deadline_exceeded(*this.execution, *this.deadline, Some(began.elapsed()))))
    }
}

impl Default for CallContext {
    /// Returns a context that ends after [`DEFAULT_DEADLINE`].
    fn default() -> Self {
        Self::within(DEFAULT_DEADLINE)
    }
}

fn cancelled(execution: Execution) -> Error {
    Error::new(Code::Cancelled, execution, "the caller has left")
}

/// Returns the error of a passed deadline. It has the time of this wait, if there was one, and names a handler that blocked a
/// thread when the deadline passed. The error of the innermost wait is the cause of all others.
fn deadline_exceeded(execution: Execution, deadline: Instant, waited: Option<Duration>) -> Error {
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

/// The number of an incarnation of a server or rank; a restarted one has a higher number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The position of a call in a trace, as defined by [W3C Trace Context](https://www.w3.org/TR/trace-context/). All zero: not
/// traced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace: one per rollout.
    pub trace_id: u128,
    /// The caller's span.
    pub span_id: u64,
    /// `true` if the caller records the trace.
    pub sampled: bool,
}

impl TraceContext {
    /// Returns the id of the span as `traceparent` has it: 16 hexadecimal digits.
    #[must_use]
    pub fn span(self) -> impl fmt::Display {
        fmt::from_fn(move |f| write!(f, "{:016x}", self.span_id))
    }

    /// Returns the id of the trace as `traceparent` has it, for log lines: 32 hexadecimal digits.
    #[must_use]
    pub fn trace(self) -> impl fmt::Display {
        fmt::from_fn(move |f| write!(f, "{:032x}", self.trace_id))
    }

    /// Returns the `traceparent` text; `None` if the call is not traced.
    #[must_use]
    pub fn to_traceparent(self) -> Option<String> {
        if self.trace_id == 0 {
            return None;
        }
        let mut text = String::with_capacity(TRACEPARENT_BYTES);
        text.push_str("00-");
        hex::push::<32>(&mut text, self.trace_id);
        text.push('-');
        hex::push::<16>(&mut text, self.span_id.into());
        text.push_str(if self.sampled { "-01" } else { "-00" });
        Some(text)
    }

    /// Parses a `traceparent`. A malformed one is ignored, as the specification requires.
    #[must_use]
    pub fn from_traceparent(text: &str) -> Option<Self> {
        // Each field has a fixed length. A later version may add fields.
        let (fields, more) = text.trim_ascii().as_bytes().split_at_checked(TRACEPARENT_BYTES)?;
        let (version, trace, span, flags) = (&fields[..2], &fields[3..35], &fields[36..52], &fields[53..]);
        let separated =
            [2, 35, 52].iter().all(|at| fields[*at] == b'-') && more.first().is_none_or(|next| *next == b'-');
        if !separated || version == b"ff" {
            return None;
        }
        let context = Self {
            trace_id: u128::from(hex::parse(&trace[..16])?) << 64 | u128::from(hex::parse(&trace[16..])?),
            span_id: hex::parse(span)?,
            sampled: hex::parse(flags)? & 1 == 1,
        };
        (context.trace_id != 0 && context.span_id != 0).then_some(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn traceparent_comes_back_as_it_went() {
        let trace = TraceContext { trace_id: 0xabc, span_id: 0x12, sampled: true };
        let text = trace.to_traceparent().unwrap();
        assert_eq!(text, "00-00000000000000000000000000000abc-0000000000000012-01");
        assert_eq!(TraceContext::from_traceparent(&text), Some(trace));
        assert_eq!(TraceContext::from_traceparent("00-zz-1-01"), None);
    }
}
