//! What travels with every call: deadline, cancellation, trace and metadata.
//!
//! The deadline is an instant in memory and the time that is left on the wire, so two machines need not agree on a clock.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

use super::metadata::Metadata;
use crate::base::cancel::CancelToken;
use crate::base::error::{Code, Error, Execution, Result};
use crate::base::hex;
use crate::base::progress::CallProgress;

/// A call that names no deadline of its own ends after this long: longer than a slow model turn, shorter than a night.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(600);

/// The largest reply that a caller takes unless it says otherwise: a rollout of 128k training tokens is about 2.5 MB, so
/// this leaves room for images and expert routing while a runaway peer cannot fill the memory.
pub const DEFAULT_REPLY_BYTES_MAX: usize = 256 << 20;

/// Travels with every call, and is the first argument of everything that waits.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CallContext {
    /// When the caller stops waiting. On the wire: the time that is left.
    pub deadline: Instant,
    /// Fires when the caller has left or asks for the end.
    pub cancel: CancelToken,
    /// Where the call belongs in a trace.
    pub trace: TraceContext,
    /// Ordered pairs that go with the call, such as cookies; headers over HTTP.
    pub metadata: Metadata,
    /// The largest reply the caller takes, in bytes; its room is reserved before the request leaves.
    pub reply_bytes_max: usize,
    /// Whom the call is meant for; any other host refuses it.
    pub incarnation: Option<Incarnation>,
    /// Progress of the call, reported by its handler; distinguishes a slow call from a stuck one.
    pub progress: CallProgress,
}

impl CallContext {
    /// A context that ends after `timeout`, with nothing else set.
    #[must_use]
    pub fn within(timeout: Duration) -> Self {
        Self::until(Instant::now() + timeout)
    }

    /// A context that ends at `deadline`.
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
        }
    }

    /// The context of a call made on behalf of this one: same deadline, cancellation, trace and progress; metadata of its own.
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
        }
    }

    /// The same context, ending no later than `timeout` from now.
    #[must_use]
    pub fn at_most(mut self, timeout: Duration) -> Self {
        self.deadline = self.deadline.min(Instant::now() + timeout);
        self
    }

    /// The same context with one more metadata pair.
    #[must_use]
    pub fn with_metadata(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.metadata.push(name, value);
        self
    }

    /// The time that is left; zero when the deadline has passed.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// An error if the deadline has passed or the caller has left: a passed deadline is refused before anything is sent,
    /// not left to a timer that rounds up.
    ///
    /// # Errors
    /// `DeadlineExceeded` or `Cancelled`, not started.
    pub fn check(&self) -> Result<()> {
        self.check_at(Instant::now())
    }

    /// As [`CallContext::check`], for who has looked at the clock.
    pub(crate) fn check_at(&self, now: Instant) -> Result<()> {
        if self.cancel.is_cancelled() {
            return Err(cancelled(Execution::NotStarted));
        }
        if now >= self.deadline {
            return Err(deadline_exceeded(Execution::NotStarted));
        }
        Ok(())
    }

    /// Runs `future` until it is done, the deadline passes or the cancel token fires; `execution` says what the last two
    /// mean at this point of a call.
    ///
    /// # Errors
    /// The future's own error, `DeadlineExceeded` or `Cancelled`.
    pub async fn bound<T>(&self, execution: Execution, future: impl Future<Output = Result<T>>) -> Result<T> {
        bounded(&self.cancel, self.deadline, execution, future).await
    }
}

/// See [`CallContext::bound`].
pub(crate) async fn bounded<T>(
    cancel: &CancelToken,
    deadline: Instant,
    execution: Execution,
    future: impl Future<Output = Result<T>>,
) -> Result<T> {
    let mut future = pin!(future);
    let mut interrupted = pin!(interrupted(cancel, deadline, execution));
    // Not `select!`, which compiles to several hundred lines for each type of future.
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(done) => Poll::Ready(done),
        Poll::Pending => interrupted.as_mut().poll(cx).map(Err),
    })
    .await
}

/// Waits for the cancellation or the deadline. The caller polls it only after its own future is pending, so no timer is created before.
async fn interrupted(cancel: &CancelToken, deadline: Instant, execution: Execution) -> Error {
    tokio::select! {
        biased;
        () = cancel.cancelled() => cancelled(execution),
        () = async { tokio::time::sleep_until(deadline).await } => deadline_exceeded(execution),
    }
}

impl Default for CallContext {
    /// Ends after [`DEFAULT_DEADLINE`].
    fn default() -> Self {
        Self::within(DEFAULT_DEADLINE)
    }
}

fn cancelled(execution: Execution) -> Error {
    Error::new(Code::Cancelled, execution, "the caller has left")
}

fn deadline_exceeded(execution: Execution) -> Error {
    Error::new(Code::DeadlineExceeded, execution, "the deadline has passed")
}

/// Which life of a server or rank is meant: a restarted one has a higher number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Where a call belongs in a trace, as [W3C Trace Context](https://www.w3.org/TR/trace-context/) has it. All zero: not traced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace: one per rollout.
    pub trace_id: u128,
    /// The caller's span.
    pub span_id: u64,
    /// Whether the caller records it.
    pub sampled: bool,
}

impl TraceContext {
    /// The `traceparent` text, or none when nothing is traced.
    #[must_use]
    pub fn to_traceparent(self) -> Option<String> {
        if self.trace_id == 0 {
            return None;
        }
        let mut text = String::with_capacity(55);
        text.push_str("00-");
        hex::push::<32>(&mut text, self.trace_id);
        text.push('-');
        hex::push::<16>(&mut text, self.span_id.into());
        text.push_str(if self.sampled { "-01" } else { "-00" });
        Some(text)
    }

    /// Reads a `traceparent`; one that does not follow the format is ignored, as the specification asks.
    #[must_use]
    pub fn from_traceparent(text: &str) -> Option<Self> {
        let mut parts = text.trim().split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        if version.len() != 2 || version == "ff" || trace.len() != 32 || span.len() != 16 || flags.len() != 2 {
            return None;
        }
        let context = Self {
            trace_id: u128::from_str_radix(trace, 16).ok()?,
            span_id: u64::from_str_radix(span, 16).ok()?,
            sampled: u8::from_str_radix(flags, 16).ok()? & 1 == 1,
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
