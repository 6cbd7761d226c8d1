//! Calls that have not started wait until their server is back.
//!
//! One of the waiting calls asks the server from time to time, for all of them:
//!
//! ```text
//!   call fails, not started ──► asks the server ──► it answers: all waiting calls are sent
//!                                    ▲ 50 ms … 2 s │ it does not
//!                                    └─────────────┘ until the call's time to wait, or its deadline, is over
//! ```

use std::sync::Arc;
use std::time::Duration;

use gym_core::observe::waits::{Wait, WaitGuard, WaitKind};
use gym_core::transport::RetryPolicy;
use gym_core::{CallContext, Code, Error, Execution, Request, Result, Route, Verb};
use tokio::time::Instant;

use crate::client::outage::{AwaitedServers, Outage, SERVER_TIMEOUT};
use crate::client::server_client::{CallOptions, ServerClient};

/// Limit of one question to a server that is away.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);

/// Replicas that are asked before the server counts as away.
const ASKED_MAX: usize = 8;

/// The pauses between two questions: one process asks a server about six times in the first second, and later once in one to two seconds.
const PAUSES: RetryPolicy = RetryPolicy::endless(Duration::from_millis(50), Duration::from_secs(2));

impl ServerClient {
    /// Waits for these servers also before this client has reached them: a configuration names them.
    pub fn expect(&self, servers: impl IntoIterator<Item = String>) {
        self.inner.outages.expect(servers);
    }

    /// Returns what the calls of this client wait for.
    #[must_use]
    pub fn awaited(&self) -> AwaitedServers {
        AwaitedServers(Arc::clone(&self.inner.outages))
    }

    /// Returns `true` if a call that failed with this error waits for its server: it has not started, and the server is known to exist. Questions,
    /// such as one for its health, do not wait.
    pub(super) fn waits_for(&self, server: &str, request: &Request, error: &Error) -> bool {
        let expected = || self.inner.outages.expects(server);
        request.verb != Verb::Get
            && (error.code(), error.execution()) == (Code::Unavailable, Execution::NotStarted)
            && self.known(server).map_or_else(expected, |known| known.can_choose())
    }

    /// Waits until the server answers, for a call that failed with `error` and began to wait at `began`.
    ///
    /// # Errors
    /// An error with the time that was waited, if the server does not answer within it; the error of the passed deadline or of the cancelled call. The
    /// cause is `error`.
    pub(super) async fn until_back(&self, cx: &CallContext, server: &str, error: Error, began: Instant) -> Result<()> {
        let waiting = self.inner.outages.begin(server, &error);
        let (outage, until) = (&waiting.outage, began + SERVER_TIMEOUT);
        let shown = Arc::clone(outage);
        let what = move || {
            format!("the server has been away for {:.1} s: {}", shown.since.elapsed().as_secs_f64(), shown.reason())
        };
        let wait = Wait::new(WaitKind::CallBackoff, cx.trace.trace_id).until(until.min(cx.deadline));
        let _recorded = WaitGuard::begin(wait.on(Arc::new(what)));
        let asking = async {
            tokio::select! {
                biased;
                () = outage.back.cancelled() => {}
                () = self.ask(server, outage) => waiting.end(),
            }
        };
        let bound = cx.bound(Execution::NotStarted, async { Ok(tokio::time::timeout_at(until, asking).await) });
        match bound.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => {
                let waited = began.elapsed().as_secs_f64();
                let text = format!("the server was away for all of the {waited:.0} s that a call waits for it");
                Err(Error::not_started(Code::Unavailable, text).caused_by(error))
            }
            Err(end) => Err(end.caused_by(error)),
        }
    }

    /// Asks the server until it answers, in turn with the other calls that wait.
    async fn ask(&self, server: &str, outage: &Outage) {
        // This fair lock is held until the server answers on purpose: the other calls wait for the same answer. The next one goes on asking
        // when this one ends.
        let mut asked = outage.asking.lock().await;
        loop {
            if *asked > 0 {
                let pause = PAUSES.backoff(*asked, &mut self.inner.rng.lock().fork());
                tokio::time::sleep(pause).await;
            }
            *asked += 1;
            match self.answers(server).await {
                Ok(()) => return,
                Err(error) => outage.note(&error),
            }
        }
    }

    /// Succeeds if some replica of the server answers.
    async fn answers(&self, server: &str) -> Result<()> {
        let cx = CallContext::within(ASK_TIMEOUT);
        let request = Request::get(cx.clone(), Route::from_static("/health"));
        self.forget(server);
        let known = self.resolve(&cx, server).await?;
        let mut failed = Vec::new();
        loop {
            let replica = known.choose(server, &failed, &request, None)?;
            match self.call(server, &replica, &request, CallOptions::idempotent()).await {
                Ok(_) => return Ok(()),
                Err(error) if failed.len() + 1 >= known.replicas.len().min(ASKED_MAX) => return Err(error),
                Err(_) => failed.push(replica.number),
            }
        }
    }
}
