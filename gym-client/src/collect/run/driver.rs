//! Runs rollouts with bounded concurrency, and attempts each until it is recorded or its attempts are used up.
//!
//! An attempt has a deadline by which it must be *recorded*. After the deadline it is superseded: the next attempt
//! begins. The ledger then rejects any later outcome of the old attempt, because its key has a newer attempt.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::{Stream, StreamExt};
use gym_core::message::TraceContext;
use gym_core::observe::waits::{Wait, WaitGuard, WaitKind, recorded};
use gym_core::rollout::{Attempt, FailureClass, KeyState, Ledger, TaskKey};
use gym_core::transport::RetryPolicy;
use gym_core::{CallContext, CancelToken, Code, Error, Request, Response, Result, Route, World};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::Instrument as _;
use tracing::field::Empty;

use crate::client::{SERVER_TIMEOUT, ServerClient};
use crate::collect::run::events::{BothObservers, Observed, RolloutEventKind, RolloutObserver};
use crate::collect::run::outcome::{AttemptResult, classify, contradiction, superseded, without_truncated};
use crate::collect::run::progress::{CollectProgress, Unrecorded};
use crate::collect::run::rollout::RolloutSender;
use crate::collect::run::row::RolloutRow;
use crate::work::Dispatch;

/// Concurrency, attempts and deadlines of a collection; [`DriverOptions::default`] sets the defaults.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DriverOptions {
    /// Maximum number of rollouts in flight. Default: 1,024.
    pub concurrency: usize,
    /// Maximum number of attempts at one rollout, counted over all runs. Default: 3.
    pub attempts_max: u32,
    /// Maximum number of attempts at one rollout whose worker was lost, or which never reached a server, counted over all runs. They do not
    /// count in `attempts_max`, because the task is not to blame. Default: 10.
    pub lost_max: u32,
    /// Deadline of one attempt. Default: 2 hours.
    pub attempt_timeout: Duration,
    /// Additional time after the attempt until its outcome must be on disk. Default: 30 s.
    pub record_timeout: Duration,
    /// Time that running rollouts may take after a stop was requested. Default: 20 s.
    pub stop_grace: Duration,
    /// Ends the time of `stop_grace` early: cancelled by a caller that knows that the running rollouts cannot finish. Default: never.
    pub give_up: CancelToken,
    /// When the run stops early because rollouts fail. Default: [`FailFast::Never`]; a collection
    /// has [`FailFast::Alike`].
    pub fail_fast: FailFast,
    /// The treatment of rollouts whose last model response was cut off. Default: [`TruncatedRollouts::Score`].
    pub truncated: TruncatedRollouts,
    /// Delays before further attempts. Default: at least 200 ms, otherwise [`RetryPolicy::default`].
    pub backoff: RetryPolicy,
    /// Marks the trace of each attempt as sampled: the `tracing` spans of the attempt and of each call have an id then, and servers export them if
    /// they export any. Default: `false`.
    pub sampled: bool,
}

impl Default for DriverOptions {
    /// Returns the defaults: 1,024 rollouts in flight (the connections of one hop) and 3 attempts (as in NeMo Gym). An attempt may
    /// take two hours, for long agents. The disk has 30 s, and so do running rollouts after a stop.
    fn default() -> Self {
        Self {
            concurrency: 1_024,
            attempts_max: 3,
            lost_max: 10,
            attempt_timeout: Duration::from_secs(7_200),
            record_timeout: Duration::from_secs(30),
            stop_grace: Duration::from_secs(20),
            give_up: CancelToken::new(),
            fail_fast: FailFast::default(),
            truncated: TruncatedRollouts::default(),
            backoff: {
                let mut policy = RetryPolicy::default();
                policy.backoff_min = Duration::from_millis(200);
                policy
            },
            sampled: false,
        }
    }
}

/// When a run stops early because rollouts fail. Failed rollouts are recorded; the remaining rows can be resumed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailFast {
    /// When at least [`FailFast::ALIKE_MIN`] rollouts have failed with the same cause, none has completed, and none is in flight. No
    /// rollout begins while those in flight may still show that another cause, or none, is possible.
    Alike,
    /// When this many rollouts have failed. Rollouts in flight may finish within the grace period.
    After(u64),
    /// Never.
    #[default]
    Never,
}

impl FailFast {
    /// The number of failures at which [`FailFast::Alike`] stops: too many for chance, few enough to cost little.
    pub const ALIKE_MIN: u64 = 32;
}

/// The treatment of a rollout whose last model response was cut off: by its limit of tokens, by the model's context, or by a filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TruncatedRollouts {
    /// It keeps the reward of its verifier, as in NeMo Gym.
    #[default]
    Score,
    /// It has no reward: its attempt fails with the class `truncated`.
    Fail,
}

/// Runs rollouts through a client and records them in a ledger.
#[derive(Debug)]
pub struct Driver {
    dispatch: Arc<dyn Dispatch>,
    ledger: Arc<dyn Ledger>,
    world: World,
    options: DriverOptions,
    progress: Arc<CollectProgress>,
    /// Identifies the run in the failures file.
    run_id: Arc<str>,
    /// Receives each rollout at its end, if a program consumes them as a stream.
    ended: Option<RolloutSender>,
    observed: Option<Observed>,
    /// The version of the servers' settings, which marks the rows; `None` for the first one.
    settings: Option<u32>,
    /// A row without a reward was reported.
    told_of_no_reward: AtomicBool,
}

/// The reason why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// Every row was tried.
    Exhausted,
    /// A stop was requested; the remaining rows can be resumed.
    Stopped,
    /// The run stopped because rollouts failed, as [`DriverOptions::fail_fast`] requests; the remaining rows can be resumed.
    FailedFast,
}

impl Driver {
    /// Creates a driver that sends with `client` and records in `ledger`.
    #[must_use]
    pub fn new(client: ServerClient, ledger: Arc<dyn Ledger>, world: &World, options: DriverOptions) -> Self {
        // The time, because a random number would change what the seeds of simulations mean.
        let run_id = format!("{:x}", world.now().as_nanos()).into();
        Self {
            dispatch: Arc::new(client),
            ledger,
            world: world.clone(),
            options,
            progress: Arc::default(),
            run_id,
            ended: None,
            observed: None,
            settings: None,
            told_of_no_reward: AtomicBool::new(false),
        }
    }

    /// Runs the rollouts over `dispatch` instead of calling the servers by name.
    #[must_use]
    pub fn dispatching_over(mut self, dispatch: Arc<dyn Dispatch>) -> Self {
        self.dispatch = dispatch;
        self
    }

    /// Counts in `progress` instead of in separate counters.
    #[must_use]
    pub fn counting_in(mut self, progress: Arc<CollectProgress>) -> Self {
        self.progress = progress;
        self
    }

    /// Marks the rows with a version of the servers' settings.
    pub(in crate::collect) fn marking(mut self, settings: Option<u32>) -> Self {
        self.settings = settings;
        self
    }

    /// Sends each rollout to `ended` at its end.
    pub(super) fn sending_to(mut self, ended: RolloutSender) -> Self {
        self.ended = Some(ended);
        self
    }

    /// Passes the events of the rollouts to `observer`, in addition to earlier observers.
    #[must_use]
    pub fn observed_by(mut self, observer: Arc<dyn RolloutObserver>) -> Self {
        let observer = match self.observed.take() {
            None => observer,
            Some(earlier) => Arc::new(BothObservers(earlier.observer, observer)),
        };
        self.observed = Some(Observed { observer, world: self.world.clone() });
        self
    }

    /// Returns the name of the run in the failures file.
    pub(in crate::collect) fn run_id(&self) -> Arc<str> {
        Arc::clone(&self.run_id)
    }

    /// Returns the counters.
    #[must_use]
    pub fn progress(&self) -> Arc<CollectProgress> {
        Arc::clone(&self.progress)
    }

    /// Runs every row that has no outcome yet. When `stop` is cancelled, no further rollout begins, and running
    /// rollouts may finish within the grace period. Rollouts that do not finish in time are not recorded; a resumed run
    /// repeats them.
    ///
    /// # Errors
    /// The first error of the rows or of the ledger. Outcomes that were recorded by then remain recorded.
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
        let mut failed_fast = false;
        let mut pause: Option<WaitGuard> = None;
        loop {
            let begins = match self.options.fail_fast {
                FailFast::After(failed_max) if reading && self.progress.failed() >= failed_max.max(1) => {
                    reading = false;
                    failed_fast = self.has_open_row(&mut rows).await;
                    if failed_fast {
                        deadline.get_or_insert(Instant::now() + self.options.stop_grace);
                    }
                    false
                }
                FailFast::Alike if reading && self.progress.failed_alike(FailFast::ALIKE_MIN) => {
                    // Those in flight may still complete, or fail with another cause.
                    if running.is_empty() {
                        reading = false;
                        failed_fast = self.has_open_row(&mut rows).await;
                    }
                    pause.get_or_insert_with(|| WaitGuard::begin(alike()));
                    false
                }
                _ => {
                    pause = None;
                    reading && running.len() < self.options.concurrency.max(1)
                }
            };
            if !reading && running.is_empty() {
                break;
            }
            tokio::select! {
                biased;
                () = stop.cancelled(), if deadline.is_none() => {
                    reading = false;
                    deadline = Some(Instant::now() + self.options.stop_grace);
                }
                () = self.options.give_up.cancelled(), if deadline.is_some_and(|deadline| deadline > Instant::now()) => {
                    deadline = Some(Instant::now());
                }
                () = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    let rollouts = running.len();
                    tracing::warn!(rollouts, "rollouts did not finish within the grace period; resume to run them again");
                    break;
                }
                Some(joined) = running.join_next(), if !running.is_empty() => {
                    let ended = joined.unwrap_or_else(|error| {
                        Err(Error::internal("a rollout's task panicked").caused_by(error))
                    });
                    if let Err(error) = ended
                        && fatal.is_none()
                    {
                        // The ledger has failed: no outcome can be recorded, so no further rollout begins.
                        fatal = Some(error);
                        reading = false;
                        deadline.get_or_insert(Instant::now());
                    }
                }
                row = rows.next(), if begins => match row {
                    Some(Ok(row)) => {
                        if !self.skips(row.key) {
                            // Shared with the attempts, one of which may outlive the rollout.
                            let (driver, row) = (Arc::clone(self), Arc::new(row));
                            running.spawn(driver.rollout(row).boxed());
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
        // After a requested stop, the wait for the disk is shorter than during a rollout.
        let ends_now = stop.is_cancelled() || fatal.is_some();
        let flush_timeout = if ends_now { Duration::ZERO } else { self.options.attempt_timeout };
        let flushed = self.ledger.flush(&CallContext::within(flush_timeout + self.options.record_timeout)).await;
        match fatal {
            Some(error) => Err(error),
            None => flushed.map(|()| match (stop.is_cancelled(), failed_fast) {
                (true, _) => RunEnd::Stopped,
                (false, true) => RunEnd::FailedFast,
                (false, false) => RunEnd::Exhausted,
            }),
        }
    }

    /// Returns `true` if a row remains to be run, or cannot be read. That row is not run.
    async fn has_open_row(&self, rows: &mut (impl Stream<Item = Result<RolloutRow>> + Unpin)) -> bool {
        while let Some(row) = rows.next().await {
            match row {
                Ok(row) if self.skips(row.key) => {}
                _ => return true,
            }
        }
        false
    }

    /// Returns `true`, and counts the rollout, if it is done. Called once for each rollout that is done.
    pub(in crate::collect) fn skips(&self, key: TaskKey) -> bool {
        let unrecorded = match self.ledger.state(key) {
            KeyState::Completed => None,
            state => match self.unrecorded(state) {
                Unrecorded::AttemptsLeft => return false,
                unrecorded => Some(unrecorded),
            },
        };
        self.progress.skip(unrecorded);
        true
    }

    fn is_open(&self, key: TaskKey) -> bool {
        let state = self.ledger.state(key);
        state != KeyState::Completed && self.unrecorded(state) == Unrecorded::AttemptsLeft
    }

    /// Returns what a run does with a rollout that is not completed.
    fn unrecorded(&self, state: KeyState) -> Unrecorded {
        match state {
            KeyState::Open { failures, .. } if failures >= self.options.attempts_max => {
                Unrecorded::AttemptsSpent(failures)
            }
            KeyState::Open { lost, .. } if lost >= self.options.lost_max => Unrecorded::WorkersLost,
            KeyState::Open { .. } => Unrecorded::AttemptsLeft,
            KeyState::Completed | KeyState::Terminal => Unrecorded::Terminal,
        }
    }

    /// Attempts one rollout until it is recorded or its attempts are used up. Returns only errors of the ledger.
    async fn rollout(self: Arc<Self>, row: Arc<RolloutRow>) -> Result<()> {
        let started = Instant::now();
        let in_flight = self.progress.begin(row.key, &row.agent, started);
        // Attempts that were superseded. They end by themselves, soon: their calls' deadline has passed.
        let mut stragglers: Option<JoinSet<()>> = None;
        let (mut begun, mut lost, mut unreached) = (0, 0, 0);
        let ended = loop {
            let attempt = match self.ledger.begin(row.key) {
                Ok(attempt) => attempt,
                // The outcome of a superseded attempt was recorded in the meantime.
                Err(error) if error.code() == Code::FailedPrecondition => break Ok(()),
                Err(error) => break Err(error),
            };
            begun += 1;
            if attempt.number > 0 {
                in_flight.attempt(attempt.number);
            }
            let deadline = Instant::now() + self.options.attempt_timeout + self.options.record_timeout;
            let observed = self.observed.as_ref().filter(|observed| observed.observer.wants(attempt));
            if let Some(observed) = observed {
                observed.tell(&row, attempt, RolloutEventKind::Started);
            }
            let began = Instant::now();
            let RunningAttempt { trace, cancel, ended: mut attempted } =
                self.start(attempt, &row, deadline, observed.is_some());
            let trace_id = trace.trace_id;
            let limited = pin!(tokio::time::timeout_at(deadline, &mut attempted));
            let wait = |kind| Wait::new(kind, trace_id).on(Arc::new(move || attempt.to_string()));
            let (next, event) = match recorded(limited, || wait(WaitKind::Attempt).until(deadline)).await {
                Ok(Ok(ended)) => ended,
                Ok(Err(error)) => break Err(error),
                Err(_) => {
                    tracing::warn!(%attempt, trace_id = %trace.trace(), "attempt superseded: no outcome was recorded by its deadline");
                    let failure = superseded(&row);
                    self.progress.fail(attempt, &failure);
                    cancel.cancel();
                    let (observing, late) = (observed.cloned(), Arc::clone(&row));
                    let straggler = async move {
                        // The ledger decides whether to accept its outcome.
                        match (attempted.await, observing) {
                            (Ok((NextStep::Done, Some(event))), Some(observed)) => {
                                observed.tell(&late, attempt, *event)
                            }
                            (Ok(_), _) => {}
                            (Err(error), _) => tracing::debug!(%attempt, %error, "superseded attempt failed"),
                        }
                    };
                    stragglers.get_or_insert_default().spawn(straggler.boxed());
                    let event = |_| Box::new(RolloutEventKind::failed(&failure, began.elapsed()));
                    (NextStep::Again, observed.map(event))
                }
            };
            // A lost worker, and a server that was not reached, say nothing about the task, so they have a budget of their own.
            lost += u32::from(matches!(next, NextStep::AgainElsewhere | NextStep::AgainUnreached));
            unreached += u32::from(next == NextStep::AgainUnreached);
            let again = matches!(next, NextStep::Again | NextStep::AgainElsewhere | NextStep::AgainUnreached)
                && begun - lost < self.options.attempts_max
                && lost < self.options.lost_max
                && unreached < self.options.attempts_max
                && self.is_open(row.key);
            if let (Some(observed), Some(event)) = (observed, event) {
                observed.tell(&row, attempt, event.with_retried(again));
            }
            if !again {
                break Ok(());
            }
            let backoff = self.options.backoff.backoff(begun, &mut self.world.rng());
            let mut pause = Box::pin(tokio::time::sleep(backoff));
            recorded(pause.as_mut(), || wait(WaitKind::AttemptBackoff).until(Instant::now() + backoff)).await;
            // A superseded attempt may have been recorded in the meantime.
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
        // Decided only after all attempts have ended: a superseded attempt may have completed the rollout.
        let state = self.ledger.state(row.key);
        if ended.is_ok() && state != KeyState::Completed {
            self.progress.give_up(self.unrecorded(state));
        }
        drop(in_flight);
        if let (Ok(()), Some(sender)) = (&ended, &self.ended) {
            // Boxed, like the wait above, because every rollout in flight would be as large otherwise.
            Box::pin(sender.send(&row, begun, started.elapsed())).await;
        }
        ended
    }

    /// Starts an attempt.
    fn start(
        self: &Arc<Self>,
        attempt: Attempt,
        row: &Arc<RolloutRow>,
        deadline: Instant,
        observed: bool,
    ) -> RunningAttempt {
        let trace_id = self.world.rng().u128(1..);
        // An attempt has a trace of its own, so the number identifies its call too.
        let mut cx = CallContext::within(self.options.attempt_timeout).with_call_id(trace_id);
        let trace = TraceContext { trace_id, span_id: u64::from(attempt.number) + 1, sampled: self.options.sampled };
        cx.trace = trace;
        let cancel = cx.cancel.clone();
        let shown = trace.trace();
        let span = tracing::info_span!("rollout", %attempt, agent = %row.agent, trace_id = %shown, span_id = Empty, outcome = Empty);
        if trace.sampled {
            span.record("span_id", tracing::field::display(trace.span()));
        }
        let ended = self.attempt(attempt, Arc::clone(row), cx, deadline, observed);
        RunningAttempt { trace, cancel, ended: ended.instrument(span).boxed() }
    }

    /// Makes and records one attempt; returns its event if it is observed. The future owns its data, so that it can continue after
    /// it was superseded.
    fn attempt(
        self: &Arc<Self>,
        attempt: Attempt,
        row: Arc<RolloutRow>,
        cx: CallContext,
        deadline: Instant,
        observed: bool,
    ) -> impl Future<Output = Result<AttemptEnd>> + Send + 'static {
        let driver = Arc::clone(self);
        let body = match attempt.number {
            0 => row.row.clone().into(),
            number => row.row.edit().set("_ng_attempt_index", number.to_string()).to_rope(),
        };
        let request = Request::post(cx, Route::from_static("/run"), body);
        async move {
            // Not idempotent: only our relay joins a request that is sent again to the first one, and only on the same replica. The client does
            // this itself when a reused connection broke. An attempt with an unknown outcome is followed by a new attempt with its own number.
            let began = Instant::now();
            let answer = driver.dispatch.run(&row.server, &request).await;
            let trace = request.context.trace;
            // Boxed, because every attempt in flight would be as large otherwise.
            Box::pin(driver.record(attempt, &row, answer, EndedCall { trace, began, deadline, observed })).await
        }
    }

    /// Records the outcome of an attempt.
    async fn record(
        &self,
        attempt: Attempt,
        row: &RolloutRow,
        answer: Result<Response>,
        call: EndedCall,
    ) -> Result<AttemptEnd> {
        let EndedCall { trace, began, deadline, observed } = call;
        let (progress, run_id) = (&self.progress, &self.run_id);
        let mut result = classify(row, attempt, answer, run_id, began.elapsed())?;
        if self.options.truncated == TruncatedRollouts::Fail {
            result = without_truncated(row, attempt, result, run_id)?;
        }
        let event_of =
            |result: &AttemptResult| observed.then(|| Box::new(RolloutEventKind::of(result, began.elapsed())));
        let outcome = match &result {
            AttemptResult::Completed { .. } => "completed",
            AttemptResult::Failed { failure, .. } => failure.class.as_str(),
            AttemptResult::Lost => "not recorded",
        };
        tracing::Span::current().record("outcome", outcome);
        tracing::debug!(%attempt, outcome, seconds = began.elapsed().as_secs_f64(), "an attempt ended");
        let mut event = event_of(&result);
        let (mut next, mut figures) = match &result {
            AttemptResult::Completed { figures, row: completed } => {
                let reward_is_absent =
                    figures.reward.is_none() && !completed.contains("reward") && !completed.contains("mask_sample");
                if reward_is_absent {
                    progress.count_rewardless();
                }
                if reward_is_absent && !self.told_of_no_reward.swap(true, Relaxed) {
                    tracing::warn!(
                        agent = &*row.agent,
                        fix = "return the response of `/verify`, as `Episode::verify` does, or add `reward` to the row",
                        "the agent's response to `/run` has no reward; the rollout is recorded without one"
                    );
                }
                (NextStep::Done, Some(*figures))
            }
            AttemptResult::Failed { terminal, failure, .. } => {
                progress.fail(attempt, failure);
                // Its calls have waited for the server as long as they may; a resumed run waits again.
                let waited_out =
                    failure.class == FailureClass::TransportUnreachable && began.elapsed() >= SERVER_TIMEOUT;
                (if *terminal || waited_out { NextStep::GiveUp } else { next_after(failure.class) }, None)
            }
            AttemptResult::Lost => (NextStep::GiveUp, None),
        };
        let input = || progress.input_of(row.key);
        let Some(outcome) = result.marked(self.settings, input)?.into_outcome() else { return Ok((next, event)) };
        // Recording may take as long as the attempt itself, because a disk may stall and recover. Ending the run would
        // lose computed results. Superseding the attempt ends the wait. A superseded attempt has its own time limit.
        let mut cx = CallContext::until(deadline.max(Instant::now()) + self.options.record_timeout);
        cx.trace = trace;
        let disk = || Wait::new(WaitKind::Record, cx.trace.trace_id).until(cx.deadline);
        let mut written = recorded(pin!(self.ledger.record(&cx, attempt, outcome)), disk).await;
        if let Err(error) = &written
            && error.code() == Code::InvalidArgument
        {
            // The environment's response contradicts its own row, so the attempt counts as a failure of the
            // environment.
            let refused = contradiction(row, attempt, error, run_id)?;
            if let AttemptResult::Failed { failure, .. } = &refused {
                progress.fail(attempt, failure);
            }
            (next, figures, event) = (NextStep::GiveUp, None, event_of(&refused));
            let outcome = refused
                .marked(self.settings, input)?
                .into_outcome()
                .ok_or_else(|| Error::internal("a failure is an outcome"))?;
            written = recorded(pin!(self.ledger.record(&cx, attempt, outcome)), disk).await;
        }
        match written {
            Ok(()) => {
                if let Some(figures) = figures {
                    progress.complete(&row.agent, row.key, &figures);
                }
                Ok((next, event))
            }
            // Late: the key has an outcome or a newer attempt.
            Err(error) if error.code() == Code::FailedPrecondition => {
                tracing::debug!(%attempt, %error, "the ledger rejected a late attempt");
                Ok((NextStep::Done, None))
            }
            Err(error) => Err(error),
        }
    }
}

/// An attempt in flight.
struct RunningAttempt {
    trace: TraceContext,
    cancel: CancelToken,
    ended: BoxFuture<'static, Result<AttemptEnd>>,
}

/// The call of an attempt, once it has ended.
struct EndedCall {
    trace: TraceContext,
    began: Instant,
    deadline: Instant,
    observed: bool,
}

/// The wait of a run in which all fails alike.
fn alike() -> Wait {
    let why = || "all rollouts so far failed with one cause; those in flight decide whether the run stops".to_owned();
    Wait::new(WaitKind::Pause, 0).on(Arc::new(why))
}

/// The next step after an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextStep {
    Done,
    Again,
    /// The worker was lost: another attempt that does not count in the attempts of the task.
    AgainElsewhere,
    /// No server was reached: the same, as often in this run as a task has attempts.
    AgainUnreached,
    GiveUp,
}

/// The next step after an attempt, and the event of the attempt if there is an observer.
type AttemptEnd = (NextStep, Option<Box<RolloutEventKind>>);

/// Decides whether another attempt may help now.
fn next_after(class: FailureClass) -> NextStep {
    match class {
        FailureClass::WorkerLost => NextStep::AgainElsewhere,
        FailureClass::TransportUnreachable => NextStep::AgainUnreached,
        class if class.is_transient() => NextStep::Again,
        _ => NextStep::GiveUp,
    }
}
