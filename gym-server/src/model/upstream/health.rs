//! The health of one endpoint, as its calls have shown it: for logs, `/health`, and the progress of a collector.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use gym_core::observe::{InFlight, WorkKey};
use gym_core::server::{EndpointReport, EndpointState};
use parking_lot::Mutex;
use tokio::time::Instant;

/// Minimum time between two log lines about one endpoint. An endpoint that fails every second call would otherwise fill the log.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

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
    in_flight: InFlight<()>,
    /// Age of a call in flight from which it is reported.
    slow_after: Duration,
    /// The last answer of the engine while calls took long, and its time.
    finding: Mutex<Option<(Instant, Result<(), EndpointFailure>)>>,
    finding_logged: Mutex<Option<Instant>>,
    aborted: AtomicU64,
}

#[derive(Debug, Default)]
struct Failing {
    since: Option<(Instant, EndpointFailure)>,
    logged: Option<Instant>,
}

impl EndpointHealth {
    /// Creates the health of an endpoint. Calls that are in flight for longer than `slow_after` are reported.
    pub(super) fn new(url: String, slow_after: Duration) -> Self {
        Self {
            url,
            ready: AtomicBool::new(false),
            failing: Mutex::default(),
            waiting: AtomicU64::new(0),
            in_flight: InFlight::default(),
            slow_after,
            finding: Mutex::default(),
            finding_logged: Mutex::default(),
            aborted: AtomicU64::new(0),
        }
    }

    /// Records a call that the endpoint answered.
    pub(super) fn responded(&self) {
        if self.ready.load(Ordering::Relaxed) {
            return;
        }
        let ended = {
            let mut failing = self.failing.lock();
            self.ready.store(true, Ordering::Relaxed);
            let log = failing.logged.is_some();
            failing.since.take().filter(|_| log)
        };
        if let Some((since, _)) = ended {
            tracing::info!(endpoint = self.url, after = ?since.elapsed(), "the model endpoint is available again");
        }
    }

    /// Forgets a failure, because the call is sent again and nothing else is known.
    pub(super) fn resent(&self) {
        self.failing.lock().since = None;
    }

    /// Records a failed call, and logs the first one.
    pub(super) fn failed(&self, failure: EndpointFailure) {
        let now = Instant::now();
        {
            let mut failing = self.failing.lock();
            self.ready.store(false, Ordering::Relaxed);
            let changed = failing.since.as_ref().is_none_or(|(_, known)| known.reason != failure.reason);
            let since = failing.since.as_ref().map_or(now, |(since, _)| *since);
            failing.since = Some((since, failure.clone()));
            if !changed || failing.logged.is_some_and(|logged| now.duration_since(logged) < LOG_INTERVAL) {
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

    /// Records what the engine says while calls take long, and logs why it does not serve them.
    pub(super) fn found(&self, finding: Result<(), EndpointFailure>) {
        if let Err(EndpointFailure { reason, fix, .. }) = &finding {
            let mut logged = self.finding_logged.lock();
            if logged.is_none_or(|logged| logged.elapsed() >= LOG_INTERVAL) {
                *logged = Some(Instant::now());
                let calls = self.in_flight.count();
                tracing::warn!(endpoint = self.url, calls, reason, fix, "the model endpoint does not respond to calls");
            }
        }
        *self.finding.lock() = Some((Instant::now(), finding));
    }

    /// Counts a response that the engine aborted.
    pub(super) fn aborted(&self) {
        self.aborted.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a call as in flight until the guard is dropped.
    pub(super) fn begin(&self, began: Instant) -> CallInFlight<'_> {
        CallInFlight { health: self, key: self.in_flight.begin(began, ()) }
    }

    /// Counts a call as waiting until the guard is dropped.
    pub(super) fn wait(&self) -> WaitingCall<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        WaitingCall(self)
    }

    /// Returns the state. `budget` is the time after which a waiting call fails.
    pub(super) fn report(&self, budget: Duration) -> EndpointReport {
        let mut report = EndpointReport::default();
        report.url = self.url.clone();
        report.waiting = self.waiting.load(Ordering::Relaxed);
        report.gives_up_after_seconds = budget.as_secs();
        report.in_flight = self.in_flight.count() as u64;
        report.aborted = self.aborted.load(Ordering::Relaxed);
        let oldest = self.in_flight.oldest().map(|(began, ())| began.elapsed());
        let slow = oldest.filter(|oldest| *oldest >= self.slow_after);
        report.oldest_seconds = slow.map_or(0, |oldest| oldest.as_secs().max(1));
        match &self.failing.lock().since {
            Some((since, failure)) => {
                report.state = failure.state;
                report.reason.clone_from(&failure.reason);
                report.fix.clone_from(&failure.fix);
                report.failing_seconds = since.elapsed().as_secs();
            }
            None if slow.is_some() => {
                // Of calls that have ended, a finding says nothing.
                let finding = self.finding.lock().clone();
                match finding.filter(|(found, _)| slow.is_some_and(|oldest| found.elapsed() < oldest)) {
                    Some((_, Err(failure))) => {
                        (report.state, report.reason, report.fix) = (failure.state, failure.reason, failure.fix);
                    }
                    Some((_, Ok(()))) => {
                        report.state = EndpointState::Ready;
                        "it responds to GET /models".clone_into(&mut report.reason);
                    }
                    None => {}
                }
            }
            None if self.ready.load(Ordering::Relaxed) => report.state = EndpointState::Ready,
            None => {}
        }
        report
    }
}

#[derive(Debug)]
pub(super) struct CallInFlight<'a> {
    health: &'a EndpointHealth,
    key: WorkKey,
}

impl Drop for CallInFlight<'_> {
    fn drop(&mut self) {
        self.health.in_flight.end(self.key);
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
        let health = EndpointHealth::new("http://h/v1".to_owned(), Duration::from_secs(60));
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
