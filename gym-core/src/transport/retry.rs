//! Retries of a message, as allowed by [`Error::may_resend`](crate::Error::may_resend), the policy and the deadline.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::base::error::{Error, Execution, Result};
use crate::message::CallContext;
use crate::observe::waits::{Wait, WaitGuard, WaitKind};

/// Limits on the number and the frequency of attempts.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RetryPolicy {
    /// Maximum number of attempts, the first included. The default is 5.
    pub attempts_max: u32,
    /// The wait before the second attempt; doubled before each further one. The default is 50 ms.
    pub backoff_min: Duration,
    /// The longest wait. The default is 2 s.
    pub backoff_max: Duration,
}

impl Default for RetryPolicy {
    /// Returns five attempts and waits of 50 ms to 2 s. That is about 4 s in total: enough for a server that restarts, short
    /// enough to be noticed.
    fn default() -> Self {
        Self { attempts_max: 5, backoff_min: Duration::from_millis(50), backoff_max: Duration::from_secs(2) }
    }
}

impl RetryPolicy {
    /// Returns a policy without a limit on the attempts: the deadline of the call, or its caller, ends them.
    #[must_use]
    pub const fn endless(backoff_min: Duration, backoff_max: Duration) -> Self {
        Self { attempts_max: u32::MAX, backoff_min, backoff_max }
    }

    /// Returns a policy of one attempt.
    #[must_use]
    pub fn never() -> Self {
        Self { attempts_max: 1, ..Self::default() }
    }

    /// Returns the wait before attempt `number` (the first is 0). Half of it is fixed and half random, so that callers that
    /// failed together do not retry together.
    #[must_use]
    pub fn backoff(&self, number: u32, rng: &mut fastrand::Rng) -> Duration {
        let doubled = self.backoff_min.saturating_mul(1 << number.saturating_sub(1).min(20)).min(self.backoff_max);
        doubled.mul_f64(0.5 + 0.5 * rng.f64())
    }

    /// Decides what follows a failed attempt: returns the wait before the next attempt, or `None` if `error` is final.
    ///
    /// `attempts` is the number of attempts made, the failed one included; `remaining` is the time until the deadline.
    #[must_use]
    pub fn next_wait(
        &self,
        error: &Error,
        attempts: u32,
        idempotent: bool,
        remaining: Duration,
        rng: &mut fastrand::Rng,
    ) -> Option<Duration> {
        if attempts >= self.attempts_max || !error.may_resend(idempotent) {
            return None;
        }
        let wait = self.backoff(attempts, rng);
        (wait < remaining).then_some(wait)
    }
}

/// Runs `attempt` until it succeeds, fails with an error that must not be resent, or reaches the limit of the policy or the
/// deadline.
///
/// # Errors
/// The error of the last attempt; if that one ended with the deadline, it names the error of the attempt before.
pub async fn retry<T, F, Fut>(
    cx: &CallContext,
    policy: &RetryPolicy,
    rng: &mut fastrand::Rng,
    idempotent: bool,
    mut attempt: F,
) -> Result<T>
where
    F: FnMut(u32) -> Fut,
    Fut: Future<Output = Result<T>>,
{
    match attempt(0).await {
        Ok(done) => Ok(done),
        Err(error) => retry_after(error, cx, policy, rng, idempotent, attempt).await,
    }
}

/// Like [`retry`], after a first attempt that failed with `error`. That attempt counts as one of the policy's attempts.
///
/// # Errors
/// The error of the last attempt.
pub async fn retry_after<T, F, Fut>(
    mut error: Error,
    cx: &CallContext,
    policy: &RetryPolicy,
    rng: &mut fastrand::Rng,
    idempotent: bool,
    mut attempt: F,
) -> Result<T>
where
    F: FnMut(u32) -> Fut,
    Fut: Future<Output = Result<T>>,
{
    let mut number = 0;
    // Once an attempt may have run, a later "not started" does not change that.
    let mut worst = Execution::NotStarted;
    loop {
        worst = worst.max(error.execution());
        let execution = error.execution().max(worst.min(Execution::Unknown));
        number += 1;
        let Some(wait) = policy.next_wait(&error, number, idempotent, cx.remaining(), rng) else {
            return Err(error.with_execution(execution));
        };
        tracing::debug!(%error, number, "resend");
        let text: Arc<str> = error.to_string().into();
        let pause = Wait::new(WaitKind::CallBackoff, cx.trace.trace_id).until(Instant::now() + wait);
        let pause = WaitGuard::begin(pause.on(Arc::new(move || text.to_string())));
        tokio::select! {
            biased;
            () = cx.cancel.cancelled() => return Err(error.with_execution(execution)),
            () = tokio::time::sleep(wait) => {}
        }
        drop(pause);
        error = match attempt(number).await {
            Ok(done) => return Ok(done),
            Err(next) => next.after_attempt(Some(&error)),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::error::Code;
    use crate::base::failure::FailureClass;

    async fn attempts(idempotent: bool, error: fn() -> Error) -> (u32, Error) {
        let cx = CallContext::default();
        let mut count = 0;
        let error = retry(&cx, &RetryPolicy::default(), &mut fastrand::Rng::with_seed(1), idempotent, |_| {
            count += 1;
            std::future::ready(Err::<(), _>(error()))
        })
        .await
        .unwrap_err();
        (count, error)
    }

    #[tokio::test(start_paused = true)]
    async fn only_what_may_be_resent_is() {
        let refused = || Error::not_started(Code::Unavailable, "x");
        let lost = || Error::unknown(Code::Unavailable, "x");
        let answered = || Error::finished(Code::Unavailable, "x");
        assert_eq!(attempts(false, refused).await.0, 5);
        assert_eq!(attempts(false, lost).await.0, 1);
        assert_eq!(attempts(true, lost).await.0, 5);
        assert_eq!(attempts(true, answered).await.0, 1);
    }

    #[test]
    fn the_decision_depends_on_the_error_the_attempts_and_the_deadline() {
        let policy = RetryPolicy { attempts_max: 3, ..RetryPolicy::default() };
        let (minute, short) = (Duration::from_secs(60), Duration::from_millis(20));
        // Execution, code, idempotent, attempts made, time until the deadline; `true` if another attempt is made.
        let table = [
            (Execution::NotStarted, Code::Unavailable, false, 1, minute, true),
            (Execution::NotStarted, Code::ResourceExhausted, false, 1, minute, true),
            (Execution::NotStarted, Code::Unavailable, false, 2, minute, true),
            (Execution::NotStarted, Code::Unavailable, true, 3, minute, false),
            (Execution::NotStarted, Code::Unavailable, true, 1, short, false),
            (Execution::NotStarted, Code::InvalidArgument, true, 1, minute, false),
            (Execution::NotStarted, Code::Cancelled, true, 1, minute, false),
            (Execution::NotStarted, Code::DeadlineExceeded, true, 1, minute, false),
            (Execution::Unknown, Code::Unavailable, false, 1, minute, false),
            (Execution::Unknown, Code::Unavailable, true, 1, minute, true),
            (Execution::Unknown, Code::DeadlineExceeded, true, 2, minute, true),
            (Execution::Unknown, Code::ResourceExhausted, true, 1, minute, false),
            (Execution::Finished, Code::Unavailable, true, 1, minute, false),
            (Execution::Finished, Code::ResourceExhausted, true, 1, minute, false),
        ];
        for (execution, code, idempotent, attempts, remaining, again) in table {
            let error = Error::new(code, execution, "x");
            let wait = policy.next_wait(
                &error,
                attempts,
                idempotent,
                remaining,
                &mut fastrand::Rng::with_seed(u64::from(attempts)),
            );
            let case = format!("{execution:?} {code:?}, idempotent {idempotent}, {attempts} attempts, {remaining:?}");
            assert_eq!(wait.is_some(), again, "{case}");
            assert!(wait.is_none_or(|wait| wait >= policy.backoff_min / 2 && wait < remaining), "{case}: {wait:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_ends_it() {
        let cx = CallContext::within(Duration::from_millis(120));
        let started = tokio::time::Instant::now();
        let policy = RetryPolicy { attempts_max: 1_000, ..RetryPolicy::default() };
        let result = retry(&cx, &policy, &mut fastrand::Rng::with_seed(1), true, |_| {
            std::future::ready(Err::<(), _>(Error::not_started(Code::Unavailable, "x")))
        })
        .await;
        assert!(result.is_err());
        assert!(started.elapsed() <= Duration::from_millis(120));
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_that_the_deadline_ends_names_the_error_before() {
        let cx = CallContext::within(Duration::from_millis(200));
        let error = retry(&cx, &RetryPolicy::default(), &mut fastrand::Rng::with_seed(1), true, |number| async move {
            if number < 2 {
                return Err::<(), _>(Error::not_started(Code::Unavailable, "cannot connect"));
            }
            let late = Error::not_started(Code::DeadlineExceeded, "the deadline has passed");
            Err(late.within(Execution::NotStarted, "GET policy/health"))
        })
        .await
        .unwrap_err();
        assert_eq!(error.to_string(), "GET policy/health: the deadline has passed; the attempt before: cannot connect");
        assert_eq!((error.code(), error.failure_class()), (Code::DeadlineExceeded, FailureClass::TransportTimeout));
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_after_a_lost_attempt_stays_unknown() {
        let cx = CallContext::default();
        let policy = RetryPolicy { attempts_max: 2, ..RetryPolicy::default() };
        let error = retry(&cx, &policy, &mut fastrand::Rng::with_seed(1), true, |number| {
            std::future::ready(Err::<(), _>(match number {
                0 => Error::unknown(Code::Unavailable, "lost"),
                _ => Error::not_started(Code::Unavailable, "refused"),
            }))
        })
        .await
        .unwrap_err();
        assert_eq!(error.execution(), Execution::Unknown);
    }
}
