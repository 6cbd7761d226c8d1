//! The context of a call: deadline, cancellation, trace and metadata.
//!
//! In memory the deadline is an instant; on the wire it is the remaining time, so two machines need no common clock.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::bounds::{Bounded, CallBounds, cancelled, deadline_exceeded};
use super::metadata::Metadata;
use crate::base::cancel::CancelToken;
use crate::base::error::{Execution, Result};
use crate::base::hex;
use crate::base::progress::CallProgress;

/// Length of a `traceparent`: version, trace, span and flags, with hyphens between them.
const TRACEPARENT_BYTES: usize = 2 + 1 + 32 + 1 + 16 + 1 + 2;

/// Length of a call id of this SDK: a number of 128 bits in hexadecimal digits.
const CALL_ID_BYTES: usize = 32;

/// Metadata key for the id of a call: any text of at most 64 bytes. A client that sends a request again keeps it, and two calls never share one.
/// A server that joins equal requests recognizes by it a request that was sent again, while the first connection still looks open.
pub const CALL_METADATA: &str = "x-gym-call";

/// Metadata key for the time in which a caller whose connection broke sends the call again, in milliseconds. A server that keeps the episode of such a
/// call for its caller drops it after this time. Without it, the server decides.
pub const CALL_WAIT_METADATA: &str = "x-gym-call-wait-ms";

/// The [`CALL_WAIT_METADATA`] of clients of this SDK, which send a broken call again at once.
pub const CALL_WAIT_TIMEOUT: Duration = Duration::from_millis(1_500);

/// Default time until the deadline of a call: longer than a slow model turn, shorter than a night.
pub const DEFAULT_CALL_TIMEOUT: Duration = Duration::from_secs(600);

/// Default limit of a reply in bytes. A rollout of 128k training tokens is about 2.5 MB. The limit therefore admits images and
/// expert routing, while a faulty peer cannot exhaust the memory.
pub const DEFAULT_REPLY_BYTES_MAX: usize = 256 << 20;

/// The context of a call, passed as the first argument to every function that waits.
///
/// ```
/// use std::time::Duration;
///
/// use gym_core::CallContext;
///
/// let cx = CallContext::within(Duration::from_secs(60));
/// // A call on behalf of this one, which ends with it or earlier.
/// let part = cx.child().at_most(Duration::from_secs(5));
/// assert!(part.deadline < cx.deadline);
/// ```
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
    /// `true` if the peer may receive the request twice, because it changes nothing twice or joins equal requests. A transport may then send it
    /// once more, over a new connection, if a reused one broke before the response began. Never sent, and `false` for calls on behalf of this one.
    pub repeatable: bool,
    /// `true` if the response holds no capacity of the connection once it has arrived, because its caller may start any number of calls before
    /// it reads the first response. `false` by default, and for calls on behalf of this one.
    pub reads_later: bool,
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
            repeatable: false,
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
            repeatable: false,
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

    /// Adds the id of the call, [`CALL_METADATA`]: a number that no other call has; and [`CALL_WAIT_TIMEOUT`], in which it is sent again.
    #[must_use]
    pub fn with_call_id(mut self, id: u128) -> Self {
        let mut text = String::with_capacity(CALL_ID_BYTES);
        hex::push::<CALL_ID_BYTES>(&mut text, id);
        // Every rollout in flight has them, and nothing else.
        self.metadata.reserve_exact(2);
        self.metadata.push(CALL_METADATA, text);
        self.metadata.push(CALL_WAIT_METADATA, CALL_WAIT_TIMEOUT.as_millis().to_string());
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
    ///
    /// # Errors
    /// As [`CallContext::check`], at the time `now`.
    pub fn check_at(&self, now: Instant) -> Result<()> {
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
    pub fn bound<T, F>(&self, execution: Execution, future: F) -> impl Future<Output = Result<T>> + use<T, F>
    where
        F: Future<Output = Result<T>>,
    {
        Bounded::new(future, self.bounds(), execution)
    }

    /// Returns the bounds of a wait of this call.
    pub(crate) fn bounds(&self) -> CallBounds {
        CallBounds::new(self.cancel.clone(), self.deadline)
    }
}

impl Default for CallContext {
    /// Returns a context that ends after [`DEFAULT_CALL_TIMEOUT`].
    fn default() -> Self {
        Self::within(DEFAULT_CALL_TIMEOUT)
    }
}

/// The number of an incarnation of a server or rank; a restarted one has a higher number.
///
/// ```
/// use gym_core::{CallContext, Incarnation};
///
/// // The call is for the rank that was started a second time, and for no later one.
/// let mut cx = CallContext::default();
/// cx.incarnation = Some(Incarnation(2));
/// assert!(cx.incarnation < Some(Incarnation(3)));
/// ```
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

    #[test]
    fn traceparent_comes_back_as_it_went() {
        let trace = TraceContext { trace_id: 0xabc, span_id: 0x12, sampled: true };
        let text = trace.to_traceparent().unwrap();
        assert_eq!(text, "00-00000000000000000000000000000abc-0000000000000012-01");
        assert_eq!(TraceContext::from_traceparent(&text), Some(trace));
        assert_eq!(TraceContext::from_traceparent("00-zz-1-01"), None);
    }
}
