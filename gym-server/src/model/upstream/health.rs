//! The health of one endpoint, as its calls have shown it: for logs, `/health`, and the progress of a collector.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gym_core::server::{EndpointReport, EndpointState};
use tokio::time::Instant;

/// Minimum time between two log lines about one endpoint. An endpoint that fails every second call would otherwise fill the log.
const LOG_EVERY: Duration = Duration::from_secs(30);

/// The failure of a call: what a person must know about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EndpointFailure {
    pub(super) state: EndpointState,
    pub(super) reason: String,
    pub(super) fix: String,
}

/// The health of one endpoint.
#[derive(Debug)]
pub(super) struct EndpointHealth {
    /// The URL without credentials.
    url: String,
    /// Set while the last call succeeded, so that a success costs one load.
    ready: AtomicBool,
    failing: Mutex<Failing>,
    waiting: AtomicU64,
}

#[derive(Debug, Default)]
struct Failing {
    since: Option<(Instant, EndpointFailure)>,
    logged: Option<Instant>,
}

impl EndpointHealth {
    pub(super) fn new(url: String) -> Self {
        Self { url, ready: AtomicBool::new(false), failing: Mutex::default(), waiting: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Failing> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a call that the endpoint answered.
    pub(super) fn responded(&self) {
        if self.ready.load(Ordering::Relaxed) {
            return;
        }
        let ended = {
            let mut failing = self.lock();
            self.ready.store(true, Ordering::Relaxed);
            let log = failing.logged.is_some();
            failing.since.take().filter(|_| log)
        };
        if let Some((since, _)) = ended {
            tracing::info!(endpoint = self.url, after = ?since.elapsed(), "the model endpoint is available again");
        }
    }

    /// Records a failed call, and logs the first one.
    pub(super) fn failed(&self, failure: EndpointFailure) {
        let now = Instant::now();
        {
            let mut failing = self.lock();
            self.ready.store(false, Ordering::Relaxed);
            let changed = failing.since.as_ref().is_none_or(|(_, known)| known.reason != failure.reason);
            let since = failing.since.as_ref().map_or(now, |(since, _)| *since);
            failing.since = Some((since, failure.clone()));
            if !changed || failing.logged.is_some_and(|logged| now.duration_since(logged) < LOG_EVERY) {
                return;
            }
            failing.logged = Some(now);
        }
        let EndpointFailure { state, reason, fix } = failure;
        if state == EndpointState::Misconfigured {
            tracing::error!(endpoint = self.url, reason, fix, "the model endpoint rejects the calls");
        } else {
            tracing::warn!(
                endpoint = self.url,
                reason,
                fix,
                "the model endpoint is unavailable; calls to it are repeated"
            );
        }
    }

    /// Counts a call as waiting until the guard is dropped.
    pub(super) fn wait(&self) -> WaitingCall<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        WaitingCall(self)
    }

    /// Returns the state. `budget` is the time after which a waiting call fails.
    pub(super) fn report(&self, budget: Duration) -> EndpointReport {
        let mut report = EndpointReport {
            url: self.url.clone(),
            waiting: self.waiting.load(Ordering::Relaxed),
            gives_up_after_seconds: budget.as_secs(),
            ..EndpointReport::default()
        };
        match &self.lock().since {
            Some((since, failure)) => {
                report.state = failure.state;
                report.reason.clone_from(&failure.reason);
                report.fix.clone_from(&failure.fix);
                report.failing_seconds = since.elapsed().as_secs();
            }
            None if self.ready.load(Ordering::Relaxed) => report.state = EndpointState::Ready,
            None => {}
        }
        report
    }
}

/// A call that waits for the endpoint.
#[derive(Debug)]
pub(super) struct WaitingCall<'a>(&'a EndpointHealth);

impl Drop for WaitingCall<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused() -> EndpointFailure {
        EndpointFailure { state: EndpointState::Unavailable, reason: "connection refused".into(), fix: "x".into() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failing_endpoint_is_reported_since_its_first_failure_until_it_responds() {
        let health = EndpointHealth::new("http://h/v1".to_owned());
        let report = || health.report(Duration::from_secs(300));
        assert_eq!(report().state, EndpointState::Unknown);
        health.responded();
        assert_eq!(report().state, EndpointState::Ready);
        health.failed(refused());
        tokio::time::advance(Duration::from_secs(12)).await;
        health.failed(refused());
        let waiting = health.wait();
        let failing = report();
        assert_eq!((failing.state, failing.failing_seconds), (EndpointState::Unavailable, 12));
        assert_eq!((failing.reason.as_str(), failing.waiting), ("connection refused", 1));
        drop(waiting);
        health.responded();
        assert_eq!((report().state, report().failing_seconds, report().waiting), (EndpointState::Ready, 0, 0));
    }
}
