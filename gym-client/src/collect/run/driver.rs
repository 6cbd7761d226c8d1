//! Runs rollouts: a window of them at a time, each attempted until it is on the disk or its budget is spent.
//!
//! An attempt has a deadline by which it must be *recorded*. One that is not is superseded: the next attempt begins, and
//! whatever the old one still brings is refused by the ledger, because its key has a newer attempt.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::stream::{Stream, StreamExt};
use gym_core::message::TraceContext;
use gym_core::rollout::{Attempt, FailureClass, KeyState, Ledger, TaskKey};
use gym_core::transport::RetryPolicy;
use gym_core::{CallContext, CancelToken, Code, Error, Request, Result, Route, World};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::client::{CallOptions, ServerClient};
use crate::collect::run::outcome::{AttemptResult, classify, contradiction};
use crate::collect::run::progress::CollectProgress;
use crate::collect::run::row::RolloutRow;

/// How a collection runs.
#[derive(Clone, Debug)]
pub struct DriverOptions {
    /// Rollouts under way at once.
    pub concurrency: usize,
    /// Attempts at one rollout, over all runs.
    pub attempts_max: u32,
    /// How long one attempt may take.
    pub attempt_timeout: Duration,
    /// How much longer it may take until its outcome is on the disk.
    pub record_timeout: Duration,
    /// How long running rollouts may go on after the stop was asked for.
    pub stop_grace: Duration,
    /// The wait before a further attempt.
    pub backoff: RetryPolicy,
}

impl Default for DriverOptions {
    /// 1,024 at once (the connections of one hop), 3 attempts (NeMo Gym's), two hours each (long agents exist), 30 s for the
    /// disk, 30 s of grace.
    fn default() -> Self {
        Self {
            concurrency: 1_024,
            attempts_max: 3,
            attempt_timeout: Duration::from_secs(7_200),
            record_timeout: Duration::from_secs(30),
            stop_grace: Duration::from_secs(30),
            backoff: RetryPolicy { backoff_min: Duration::from_millis(200), ..RetryPolicy::default() },
        }
    }
}

/// Runs rollouts over a client and a ledger.
#[derive(Debug)]
pub struct Driver {
    client: ServerClient,
    ledger: Arc<dyn Ledger>,
    world: World,
    options: DriverOptions,
    progress: Arc<CollectProgress>,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// Every row was tried.
    Exhausted,
    /// The stop was asked for; the rest can be resumed.
    Stopped,
}

impl Driver {
    /// A driver that sends with `client` and records in `ledger`.
    #[must_use]
    pub fn new(client: ServerClient, ledger: Arc<dyn Ledger>, world: &World, options: DriverOptions) -> Self {
        Self { client, ledger, world: world.clone(), options, progress: Arc::default() }
    }

    /// The same driver, counting in `progress`.
    #[must_use]
    pub fn counting_in(mut self, progress: Arc<CollectProgress>) -> Self {
        self.progress = progress;
        self
    }

    /// The counters.
    #[must_use]
    pub fn progress(&self) -> Arc<CollectProgress> {
        Arc::clone(&self.progress)
    }

    /// Runs every row that has no outcome yet. When `stop` fires no further rollout begins, and those under way have the
    /// grace to finish; what has not finished by then is not recorded, and a resumed run does it.
    ///
    /// # Errors
    /// The first error of the rows or of the ledger; what was recorded by then stays recorded.
    pub async fn run(
        self: &Arc<Self>,
        rows: impl Stream<Item = Result<RolloutRow>> + Unpin,
        stop: CancelToken,
    ) -> Result<RunEnd> {
        let mut rows = rows.fuse();
        let mut running: JoinSet<Result<()>> = JoinSet::new();
        let mut fatal: Option<Error> = None;
        let mut reading = true;
        let mut deadline: Option<Instant> = None;
        loop {
            if !reading && running.is_empty() {
                break;
            }
            tokio::select! {
                biased;
                () = stop.cancelled(), if deadline.is_none() => {
                    reading = false;
                    deadline = Some(Instant::now() + self.options.stop_grace);
                }
                () = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    tracing::warn!(rollouts = running.len(), "not finished within the grace; a resumed run does them");
                    break;
                }
                Some(joined) = running.join_next(), if !running.is_empty() => {
                    let ended = joined.unwrap_or_else(|error| {
                        Err(Error::internal("a rollout's task ended").caused_by(error))
                    });
                    if let Err(error) = ended
                        && fatal.is_none()
                    {
                        // The ledger is broken: nothing more can be recorded, so nothing more is begun.
                        fatal = Some(error);
                        reading = false;
                        deadline.get_or_insert(Instant::now());
                    }
                }
                row = rows.next(), if reading && running.len() < self.options.concurrency.max(1) => match row {
                    Some(Ok(row)) => {
                        if self.is_open(row.key) {
                            // Shared with its attempts, one of which may outlive the rollout.
                            let (driver, row) = (Arc::clone(self), Arc::new(row));
                            running.spawn(async move { driver.rollout(row).await }.boxed());
                        } else {
                            self.progress.skip(self.ledger.state(row.key) == KeyState::Completed);
                        }
                    }
                    Some(Err(error)) => {
                        fatal.get_or_insert(error);
                        reading = false;
                    }
                    None => reading = false,
                },
            }
        }
        running.shutdown().await;
        // Whoever asked for the stop does not wait as long for the disk as a rollout does.
        let hurry = stop.is_cancelled() || fatal.is_some();
        let patience = if hurry { Duration::ZERO } else { self.options.attempt_timeout };
        let flushed = self.ledger.flush(&CallContext::within(patience + self.options.record_timeout)).await;
        match fatal {
            Some(error) => Err(error),
            None => flushed.map(|()| if stop.is_cancelled() { RunEnd::Stopped } else { RunEnd::Exhausted }),
        }
    }

    fn is_open(&self, key: TaskKey) -> bool {
        matches!(self.ledger.state(key), KeyState::Open { failures } if failures < self.options.attempts_max)
    }

    /// Attempts one rollout until it is recorded or its budget is spent. An error is the ledger's.
    async fn rollout(&self, row: Arc<RolloutRow>) -> Result<()> {
        let _in_flight = self.progress.begin();
        // Attempts that were superseded. They end by themselves, soon: their calls' deadline has passed.
        let mut stragglers: Option<JoinSet<()>> = None;
        let mut begun = 0;
        let ended = loop {
            let attempt = match self.ledger.begin(row.key) {
                Ok(attempt) => attempt,
                // A superseded attempt's outcome has come after all.
                Err(error) if error.code() == Code::FailedPrecondition => break Ok(()),
                Err(error) => break Err(error),
            };
            begun += 1;
            let deadline = Instant::now() + self.options.attempt_timeout + self.options.record_timeout;
            let mut cx = CallContext::within(self.options.attempt_timeout);
            let trace_id = self.world.rng().u128(1..);
            cx.trace = TraceContext { trace_id, span_id: u64::from(attempt.number) + 1, sampled: false };
            let cancel = cx.cancel.clone();
            let mut attempted = Box::pin(self.attempt(attempt, Arc::clone(&row), cx, deadline));
            match tokio::time::timeout_at(deadline, &mut attempted).await {
                Ok(Ok(NextStep::Done | NextStep::GiveUp)) => break Ok(()),
                Ok(Ok(NextStep::Again)) => {}
                Ok(Err(error)) => break Err(error),
                Err(_) => {
                    tracing::warn!(%attempt, "not recorded in time; superseded");
                    self.progress.fail(FailureClass::TransportTimeout);
                    cancel.cancel();
                    let superseded = async move {
                        // Its outcome is the ledger's to refuse or to take.
                        if let Err(error) = attempted.await {
                            tracing::debug!(%attempt, %error, "a superseded attempt ended");
                        }
                    };
                    stragglers.get_or_insert_default().spawn(superseded.boxed());
                }
            }
            if begun >= self.options.attempts_max || !self.is_open(row.key) {
                break Ok(());
            }
            let wait = self.options.backoff.backoff(begun, &mut self.world.rng());
            tokio::time::sleep(wait).await;
            // What a superseded attempt brought meanwhile.
            if !self.is_open(row.key) {
                break Ok(());
            }
        };
        if let Some(mut stragglers) = stragglers {
            let all = async { while stragglers.join_next().await.is_some() {} };
            if tokio::time::timeout(self.options.record_timeout, all).await.is_err() {
                stragglers.shutdown().await;
            }
        }
        // Only now, when nothing more can come: a superseded attempt may have completed the rollout after all.
        if ended.is_ok() && self.ledger.state(row.key) != KeyState::Completed {
            self.progress.give_up();
        }
        ended
    }

    /// One attempt, recorded. Owns what it needs, so that it can go on after it was superseded.
    fn attempt(
        &self,
        attempt: Attempt,
        row: Arc<RolloutRow>,
        cx: CallContext,
        deadline: Instant,
    ) -> impl Future<Output = Result<NextStep>> + Send + 'static {
        let (client, ledger, progress) = (self.client.clone(), Arc::clone(&self.ledger), Arc::clone(&self.progress));
        let record_timeout = self.options.record_timeout;
        let body = match attempt.number {
            0 => row.row.clone().into(),
            number => row.row.edit().set("_ng_attempt_index", number.to_string()).to_rope(),
        };
        let request = Request::post(cx, Route::from_static("/run"), body);
        async move {
            // Not idempotent: only our own relay joins a replay to the first one, and only at the same replica. An attempt
            // whose fate is unknown is followed by another one, with a number of its own.
            let answer = client.send(&row.server, &request, CallOptions::default()).await;
            let result = classify(&row, attempt, answer)?;
            let (mut next, reward, mut failed) = match &result {
                AttemptResult::Completed { reward, .. } => (NextStep::Done, *reward, None),
                AttemptResult::Failed { terminal: true, class, .. } => (NextStep::GiveUp, None, Some(*class)),
                AttemptResult::Failed { class, .. } => (next_after(*class), None, Some(*class)),
                AttemptResult::Lost => (NextStep::GiveUp, None, None),
            };
            if let Some(class) = failed {
                progress.fail(class);
            }
            let Some(outcome) = result.into_outcome() else { return Ok(next) };
            // As long as the attempt itself may take, for a disk that stands still and goes on: ending the run would lose what
            // has been computed, and superseding ends the wait. An attempt that was superseded has a while of its own.
            let cx = CallContext::until(deadline.max(Instant::now()) + record_timeout);
            let mut recorded = ledger.record(&cx, attempt, outcome).await;
            if let Err(error) = &recorded
                && error.code() == Code::InvalidArgument
            {
                // The environment's answer contradicts its own row: that is its failure, not the ledger's.
                let refused = contradiction(&row, attempt, error)?;
                (next, failed) = (NextStep::GiveUp, Some(FailureClass::VerifierError));
                progress.fail(FailureClass::VerifierError);
                recorded = ledger.record(&cx, attempt, refused).await;
            }
            match recorded {
                Ok(()) => {
                    if failed.is_none() {
                        progress.complete(&row.agent, reward);
                    }
                    Ok(next)
                }
                // Late: its key has an outcome or a newer attempt.
                Err(error) if error.code() == Code::FailedPrecondition => {
                    tracing::debug!(%attempt, %error, "refused as late");
                    Ok(NextStep::Done)
                }
                Err(error) => Err(error),
            }
        }
    }
}

/// What follows an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextStep {
    Done,
    Again,
    GiveUp,
}

/// Whether another attempt may help now. An environment that ran and failed is likely to fail again at once: such rows wait
/// for a resumed run. What never reached it, or lost its way back, is tried again.
fn next_after(class: FailureClass) -> NextStep {
    match class {
        FailureClass::TransportUnreachable
        | FailureClass::TransportPeerDrop
        | FailureClass::TransportTimeout
        | FailureClass::TransportLocalResource
        | FailureClass::AgentRequestFailed
        | FailureClass::SessionLost => NextStep::Again,
        _ => NextStep::GiveUp,
    }
}
