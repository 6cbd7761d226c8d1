//! The repetitions of a call: one budget covers the whole call, whatever fails.
//!
//! | failure | the call is repeated |
//! |---|---|
//! | no connection; 429, 502, 503, 521 to 523, 525 to 530; a response that vLLM aborted | until the budget ends: the endpoint has done nothing, and may serve soon |
//! | the connection broke; 404, 408, 409, 425, 500 and other 5xx but 501, 505, 506, 510, 511 | at most [`HTTP_ATTEMPTS`] times: the same request may fail again |
//! | a certificate that is not trusted; anything else | never |

use std::time::Duration;

use gym_core::rollout::FailureClass;
use gym_core::transport::RetryPolicy;
use gym_core::{Code, Error, Execution, Result, World};
use tokio::time::Instant;

use crate::model::upstream::response::{EndpointResponse, StatusMeaning};

/// Attempts of a request that the endpoint answers with an error, as in NeMo Gym.
const HTTP_ATTEMPTS: u32 = 3;

/// The limits of the repetitions.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::model) struct EndpointRetries {
    /// Maximum responses with an error, for all statuses. By default [`HTTP_ATTEMPTS`], and unlimited for the statuses of the first line above.
    pub(in crate::model) http_attempts_max: Option<u32>,
    /// Maximum time from the first failure to the last attempt.
    pub(in crate::model) budget: Duration,
    /// The wait before the second attempt; doubled for each further one.
    pub(in crate::model) backoff_min: Duration,
    /// The longest wait.
    pub(in crate::model) backoff_max: Duration,
}

/// The values of the keys in a block.
#[derive(Clone, Copy, Debug)]
pub(in crate::model) struct RetryKeys {
    pub(in crate::model) max_http_attempts: Option<u32>,
    pub(in crate::model) retry_budget_seconds: f64,
    pub(in crate::model) retry_backoff_ms: u64,
    pub(in crate::model) retry_backoff_max_ms: u64,
}

/// The default of `retry_budget_seconds`: five minutes, because an engine that restarts loads its weights for minutes.
pub(in crate::model) fn budget_seconds() -> f64 {
    300.0
}

/// The default of `probe_after_seconds`: longer than most responses take, and short enough for a person who waits.
pub(in crate::model) fn probe_after_seconds() -> f64 {
    60.0
}

/// Returns the value of `probe_after_seconds`.
///
/// # Errors
/// `InvalidArgument` with the key.
pub(in crate::model) fn probe_after(seconds: f64) -> Result<Duration> {
    let invalid = |_| Error::invalid(format!("`probe_after_seconds` is {seconds}: write a number of seconds from 0"));
    Duration::try_from_secs_f64(seconds).map_err(invalid)
}

/// The default of `retry_backoff_ms`: half a second, as in NeMo Gym.
pub(in crate::model) fn backoff_ms() -> u64 {
    500
}

/// The default of `retry_backoff_max_ms`: an endpoint that responds again is noticed within eight seconds.
pub(in crate::model) fn backoff_max_ms() -> u64 {
    8_000
}

impl EndpointRetries {
    /// Checks the values of a block.
    ///
    /// # Errors
    /// `InvalidArgument` with the key.
    pub(in crate::model) fn of(keys: RetryKeys) -> Result<Self> {
        let seconds = keys.retry_budget_seconds;
        let budget = Duration::try_from_secs_f64(seconds).map_err(|_| {
            Error::invalid(format!("`retry_budget_seconds` is {seconds}: write a number of seconds from 0"))
        })?;
        if keys.max_http_attempts == Some(0) {
            return Err(Error::invalid(
                "`max_http_attempts` is 0: no request could be made; write 1 for no repetition",
            ));
        }
        let backoff_min = Duration::from_millis(keys.retry_backoff_ms);
        Ok(Self {
            http_attempts_max: keys.max_http_attempts,
            budget,
            backoff_min,
            backoff_max: Duration::from_millis(keys.retry_backoff_max_ms).max(backoff_min),
        })
    }
}

/// The attempts of one call so far.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    pub(super) made: u32,
    /// Attempts that the endpoint may have executed.
    sent: u32,
    first_failure: Option<Instant>,
}

/// The step after a failed attempt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextAttempt {
    /// Wait, then send again.
    After(Duration),
    /// The result is final. The text explains why a repetition that the failure would allow is not made; empty if it allows none.
    Never(String),
}

impl Attempts {
    /// Decides what follows an attempt with this result. `remaining` is the time until the caller's deadline.
    pub(super) fn next(
        &mut self,
        result: &Result<EndpointResponse>,
        retries: &EndpointRetries,
        remaining: Duration,
        world: &World,
        rng: &mut fastrand::Rng,
    ) -> NextAttempt {
        self.made += 1;
        let Some(repeats) = Repeats::of(result) else { return NextAttempt::Never(String::new()) };
        if repeats != Repeats::NotSent {
            self.sent += 1;
        }
        let sent_max = match repeats {
            Repeats::NotSent => u32::MAX,
            Repeats::Busy => retries.http_attempts_max.unwrap_or(u32::MAX),
            Repeats::Failed => retries.http_attempts_max.unwrap_or(HTTP_ATTEMPTS),
        };
        let since = *self.first_failure.get_or_insert_with(Instant::now);
        if self.sent >= sent_max {
            return NextAttempt::Never(self.so_far());
        }
        let policy = RetryPolicy::endless(retries.backoff_min, retries.backoff_max);
        let asked = result.as_ref().ok().and_then(|answer| answer.retry_after(world));
        let left = retries.budget.saturating_sub(since.elapsed());
        // The last attempt is made when the budget ends, however long the wait before it would be.
        let wait = policy.backoff(self.made, rng).min(left).max(asked.unwrap_or_default());
        let budget = retries.budget.as_secs_f64();
        match asked {
            Some(asked) if asked >= remaining || asked > left => NextAttempt::Never(format!(
                "{}; the endpoint asks to wait {} s, and the call may wait {} s",
                self.so_far(),
                asked.as_secs(),
                left.min(remaining).as_secs(),
            )),
            _ if left.is_zero() => {
                NextAttempt::Never(format!("{} in {budget} s (`retry_budget_seconds`)", self.so_far()))
            }
            _ if remaining <= wait => NextAttempt::Never(format!("{} until the call's deadline", self.so_far())),
            _ => NextAttempt::After(wait),
        }
    }

    fn so_far(&self) -> String {
        match self.made {
            1 => "1 attempt".to_owned(),
            made => format!("{made} attempts"),
        }
    }
}

/// Returns `true` if this machine has no room for a connection. The endpoint is not to blame, and calls that end make room.
pub(super) fn is_local(error: &Error) -> bool {
    (error.code(), error.execution()) == (Code::ResourceExhausted, Execution::NotStarted)
}

/// How often a failure allows the same request again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repeats {
    NotSent,
    Busy,
    Failed,
}

impl Repeats {
    /// `None` for a success, and for a failure that a repetition cannot change.
    fn of(result: &Result<EndpointResponse>) -> Option<Self> {
        match result {
            // The client does not trust the endpoint's certificate.
            Err(error) if error.class() == Some(FailureClass::ModelError) => None,
            Err(error) if is_local(error) => Some(Self::NotSent),
            Err(error) if error.code() == Code::Unavailable => Some(match error.execution() {
                Execution::NotStarted => Self::NotSent,
                // A generation has no side effects, so a lost response can be requested again.
                _ => Self::Failed,
            }),
            Err(_) => None,
            Ok(answer) if answer.exhausted_quota().is_some() => None,
            Ok(answer) if answer.is_aborted() => Some(Self::Busy),
            Ok(answer) => match StatusMeaning::of(answer.status) {
                StatusMeaning::Busy => Some(Self::Busy),
                StatusMeaning::Late | StatusMeaning::Failed => Some(Self::Failed),
                StatusMeaning::Final => None,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::testing::world;

    fn retries(attempts: Option<u32>, budget: Duration) -> EndpointRetries {
        let second = Duration::from_secs(1);
        EndpointRetries { http_attempts_max: attempts, budget, backoff_min: second, backoff_max: 4 * second }
    }

    fn answered(status: u16, retry_after: Option<&str>) -> Result<EndpointResponse> {
        Ok(EndpointResponse::new(status, retry_after.map(str::to_owned), None, Bytes::new()))
    }

    fn refused() -> Result<EndpointResponse> {
        Err(Error::not_started(Code::Unavailable, "connection refused"))
    }

    /// Runs attempts with this result until none follows; returns their number and the time that they took.
    async fn run(
        result: impl Fn() -> Result<EndpointResponse>,
        retries: &EndpointRetries,
        limit: Duration,
    ) -> (u32, Duration, String) {
        let (mut attempts, mut rng, began) = (Attempts::default(), fastrand::Rng::with_seed(1), Instant::now());
        loop {
            let remaining = limit.saturating_sub(began.elapsed());
            match attempts.next(&result(), retries, remaining, &world(), &mut rng) {
                NextAttempt::After(wait) => tokio::time::sleep(wait).await,
                NextAttempt::Never(why) => return (attempts.made, began.elapsed(), why),
            }
        }
    }

    const HOUR: Duration = Duration::from_secs(3_600);

    #[tokio::test(start_paused = true)]
    async fn the_failure_decides_how_often_a_call_is_repeated() {
        let budget = Duration::from_secs(60);
        let lost = || Err(Error::unknown(Code::Unavailable, "lost"));
        let late = || Err(Error::unknown(Code::DeadlineExceeded, "late"));
        for status in [404, 408, 409, 425, 500, 504, 507, 520, 524, 599] {
            assert_eq!(run(|| answered(status, None), &retries(None, budget), HOUR).await.0, 3, "{status}");
            assert_eq!(run(|| answered(status, None), &retries(Some(5), budget), HOUR).await.0, 5, "{status}");
        }
        for status in [429, 502, 503, 521, 522, 523, 529, 530] {
            assert!(run(|| answered(status, None), &retries(None, budget), HOUR).await.0 > 10, "{status}");
            assert_eq!(run(|| answered(status, None), &retries(Some(2), budget), HOUR).await.0, 2, "{status}");
        }
        for status in [200, 307, 400, 401, 403, 422, 501, 505, 600] {
            assert_eq!(run(|| answered(status, None), &retries(None, budget), HOUR).await.0, 1, "{status}");
        }
        assert_eq!(run(lost, &retries(None, budget), HOUR).await.0, 3);
        assert_eq!(run(late, &retries(None, budget), HOUR).await.0, 1);
        // Nothing was sent, so the number of attempts is not limited.
        assert!(run(refused, &retries(Some(1), budget), HOUR).await.0 > 10);
        assert_eq!(run(refused, &retries(None, Duration::ZERO), HOUR).await.0, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_retry_after_is_obeyed_or_named() {
        let budget = Duration::from_secs(60);
        let (made, took, _) = run(|| answered(429, Some("25")), &retries(None, budget), HOUR).await;
        assert_eq!((made, took), (3, Duration::from_secs(50)));
        let (made, took, why) = run(|| answered(503, Some("600")), &retries(None, budget), HOUR).await;
        assert_eq!((made, took), (1, Duration::ZERO));
        assert_eq!(why, "1 attempt; the endpoint asks to wait 600 s, and the call may wait 60 s");
        let (_, took, why) = run(refused, &retries(None, budget), HOUR).await;
        assert_eq!(took, budget);
        assert!(why.ends_with("attempts in 60 s (`retry_budget_seconds`)"), "{why}");
    }

    proptest! {
        #[test]
        fn no_mix_of_failures_exceeds_the_budget_or_the_deadline(
            kinds in proptest::collection::vec((0..4_u8, 0..40_u64), 1..60),
            budget in 0..120_u64,
            limit in 1..200_u64,
            attempts in proptest::option::of(1..8_u32),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
            runtime.block_on(async {
                let retries = retries(attempts, Duration::from_secs(budget));
                let (mut so_far, mut rng, began) = (Attempts::default(), fastrand::Rng::with_seed(7), Instant::now());
                let limit = Duration::from_secs(limit);
                for (kind, seconds) in kinds.into_iter().cycle().take(500) {
                    let result = match kind {
                        0 => refused(),
                        1 => Err(Error::unknown(Code::Unavailable, "lost")),
                        2 => answered(503, None),
                        _ => answered(429, Some(&seconds.to_string())),
                    };
                    let remaining = limit.saturating_sub(began.elapsed());
                    match so_far.next(&result, &retries, remaining, &world(), &mut rng) {
                        NextAttempt::After(wait) => tokio::time::sleep(wait).await,
                        NextAttempt::Never(_) => break,
                    }
                }
                assert!(began.elapsed() <= retries.budget.min(limit));
            });
        }
    }
}
