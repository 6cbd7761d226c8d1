//! Records the ground truth: every reward that was given, every acknowledgement, and every lease. Any disagreement is a violation.

mod members;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use gym_client::collect::ledger::failures_path;
use gym_core::registry::{Lease, MemoryRegistry, Registry};
use gym_core::rollout::{Attempt, FailureClass, KeyState, Ledger, Outcome, TaskKey};
use gym_core::testing::{SimFiles, SimNet};
use gym_core::{CallContext, Handler, Incarnation, Request, Response, Result, Verb};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::time::Instant;

use members::ClusterTruth;
pub(crate) use members::PoolAudit;

/// The audit of a run. Cheap to clone; clones share the records.
#[derive(Clone, Debug)]
pub(crate) struct Audit {
    net: SimNet,
    truth: Arc<Mutex<Truth>>,
}

#[derive(Debug, Default)]
struct Truth {
    /// All attempts that received a reward. Rewards are distinct, so a row's reward identifies its attempt.
    given: Vec<Attempt>,
    begun: u64,
    /// `true` if the acknowledged outcome was a completion.
    acknowledged: BTreeMap<Attempt, bool>,
    /// The time at which each lease was last granted or renewed, with its time to live.
    leases: BTreeMap<(String, u32, u64), (Instant, Duration)>,
    violations: BTreeSet<String>,
    cluster: ClusterTruth,
}

/// The counts at the end of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) completed: u64,
    pub(crate) given_up: u64,
    pub(crate) attempts: u64,
}

impl Audit {
    pub(crate) fn new(net: &SimNet) -> Self {
        Self { net: net.clone(), truth: Arc::default() }
    }

    pub(crate) fn violation(&self, what: impl fmt::Display) {
        self.net.note("audit", format_args!("VIOLATION {what}"));
        self.truth.lock().violations.insert(what.to_string());
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.truth.lock().violations.iter().cloned().collect()
    }

    /// Gives a reward for an attempt.
    pub(crate) fn give(&self, host: &str, attempt: Attempt) -> f64 {
        let mut truth = self.truth.lock();
        truth.given.push(attempt);
        let number = truth.given.len() - 1;
        drop(truth);
        self.net.note(host, format_args!("gives {attempt} the reward {number}"));
        u32::try_from(number).expect("a seed gives few rewards").into()
    }

    fn leased(&self, lease: Lease) {
        let key = (lease.name, lease.replica, lease.incarnation.0);
        self.truth.lock().leases.insert(key, (Instant::now(), lease.ttl));
    }

    /// Checks that no lease outlives its time to live.
    pub(crate) async fn check_leases(&self, registry: &MemoryRegistry) {
        let Ok(live) = registry.list(&CallContext::default()).await else { return };
        for instance in live {
            let key = (instance.name, instance.replica, instance.incarnation.0);
            let known = self.truth.lock().leases.get(&key).copied();
            match known {
                Some((renewed, ttl)) if renewed.elapsed() <= ttl => {}
                Some((renewed, ttl)) => {
                    let ago = renewed.elapsed();
                    self.violation(format_args!("{key:?} is listed {ago:?} after its renewal for {ttl:?}"));
                }
                None => self.violation(format_args!("{key:?} is listed and has no lease")),
            }
        }
    }

    /// Checks that all acknowledged outcomes are in the files.
    pub(crate) fn check_acknowledged(&self, files: &SimFiles, output: &Path) {
        let rows = Rows::read(files, output);
        let truth = self.truth.lock();
        let lost: Vec<_> = truth
            .acknowledged
            .iter()
            .filter(|(attempt, completed)| {
                let rows = if **completed { &rows.completed } else { &rows.failed };
                !rows.iter().any(|row| row.attempt() == **attempt)
            })
            .map(|(attempt, _)| *attempt)
            .collect();
        drop(truth);
        for attempt in lost {
            self.violation(format_args!("{attempt} was acknowledged and is lost"));
        }
    }

    /// Records the outcomes with which a ledger was opened: the collector does not repeat them, so they count as
    /// acknowledged.
    pub(crate) fn opened(&self, files: &SimFiles, output: &Path) {
        let rows = Rows::read(files, output);
        let mut truth = self.truth.lock();
        truth.acknowledged.extend(rows.completed.iter().map(|row| (row.attempt(), true)));
        truth.acknowledged.extend(rows.failed.iter().map(|row| (row.attempt(), false)));
    }

    /// Checks all invariants that must hold at the end.
    pub(crate) fn check_end(&self, files: &SimFiles, output: &Path, wanted: &[TaskKey], attempts_max: u32) -> Counts {
        self.check_acknowledged(files, output);
        let rows = Rows::read(files, output);
        for line in &rows.broken {
            self.violation(format_args!("a line is no row: {line}"));
        }
        let mut counts = Counts { attempts: self.truth.lock().begun, ..Counts::default() };
        for (index, row) in rows.completed.iter().enumerate() {
            let attempt = row.attempt();
            if rows.completed[..index].iter().any(|other| other.attempt().key == attempt.key) {
                self.violation(format_args!("{} is in the rollouts twice", attempt.key));
            }
            let given = row.reward.and_then(|reward| self.given(reward));
            if given != Some(attempt) {
                self.violation(format_args!(
                    "the row of {attempt} has the reward {:?}, given to {given:?}",
                    row.reward
                ));
            }
        }
        let mut outcomes = BTreeSet::new();
        for row in rows.completed.iter().chain(&rows.failed) {
            let attempt = row.attempt();
            if !outcomes.insert(attempt) {
                self.violation(format_args!("{attempt} has an outcome twice"));
            }
            if !wanted.contains(&attempt.key) {
                self.violation(format_args!("{attempt} was never wanted"));
            }
        }
        for row in &rows.failed {
            if row.failure_class.is_none() || row.reward.is_some() {
                self.violation(format_args!("the failure of {} is not one: {row:?}", row.attempt()));
            }
            if row.failure_message.as_deref().is_some_and(|message| message.contains("panicked")) {
                self.violation(format_args!("a handler panicked: {row:?}"));
            }
        }
        for key in wanted {
            // An attempt whose worker was lost does not count for its task.
            let counts_for =
                |row: &&Row| row.attempt().key == *key && row.failure_class != Some(FailureClass::WorkerLost);
            let failures = rows.failed.iter().filter(counts_for).count();
            if rows.completed.iter().any(|row| row.attempt().key == *key) {
                counts.completed += 1;
            } else if failures >= attempts_max as usize {
                counts.given_up += 1;
            } else {
                self.violation(format_args!("{key} has no outcome, and {failures} of {attempts_max} failures"));
            }
        }
        counts
    }

    fn given(&self, reward: f64) -> Option<Attempt> {
        let truth = self.truth.lock();
        (0_u32..).zip(&truth.given).find(|(number, _)| f64::from(*number) == reward).map(|(_, attempt)| *attempt)
    }
}

/// The fields that are read from a row of either file.
#[derive(Debug, Deserialize)]
struct Row {
    #[serde(rename = "_ng_task_index")]
    task_index: u32,
    #[serde(rename = "_ng_rollout_index")]
    rollout_index: u32,
    #[serde(default, rename = "_ng_attempt_index")]
    number: u32,
    reward: Option<f64>,
    #[serde(rename = "_ng_failure_class")]
    failure_class: Option<FailureClass>,
    #[serde(rename = "_ng_failure_message")]
    failure_message: Option<String>,
}

impl Row {
    fn attempt(&self) -> Attempt {
        Attempt { key: TaskKey::new(self.task_index, self.rollout_index), number: self.number }
    }
}

#[derive(Default)]
struct Rows {
    completed: Vec<Row>,
    failed: Vec<Row>,
    /// Invalid lines. A crash can leave some, which the next opening of the file removes.
    broken: Vec<String>,
}

impl Rows {
    fn read(files: &SimFiles, output: &Path) -> Self {
        let mut rows = Self::default();
        for (path, into) in [(output, &mut rows.completed), (&*failures_path(output), &mut rows.failed)] {
            for line in files.contents(path).split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                match serde_json::from_slice(line) {
                    Ok(row) => into.push(row),
                    Err(error) => rows.broken.push(format!("{}: {error}", path.display())),
                }
            }
        }
        rows
    }
}

/// A ledger whose acknowledgements are recorded.
#[derive(Debug)]
pub(crate) struct AuditedLedger<L> {
    pub(crate) ledger: L,
    pub(crate) audit: Audit,
}

#[async_trait]
impl<L: Ledger> Ledger for AuditedLedger<L> {
    fn state(&self, key: TaskKey) -> KeyState {
        self.ledger.state(key)
    }

    fn begin(&self, key: TaskKey) -> Result<Attempt> {
        let attempt = self.ledger.begin(key)?;
        self.audit.truth.lock().begun += 1;
        self.audit.attempt_begins(attempt);
        self.audit.net.note("collector", format_args!("begins {attempt}"));
        Ok(attempt)
    }

    async fn record(&self, cx: &CallContext, attempt: Attempt, outcome: Outcome) -> Result<()> {
        let what = match &outcome {
            Outcome::Completed(_) => "completed",
            Outcome::Failed { class, .. } => class.as_str(),
        };
        self.audit.net.note("collector", format_args!("records {attempt} as {what}"));
        let recorded = self.ledger.record(cx, attempt, outcome).await;
        match &recorded {
            Ok(()) => {
                self.audit.net.note("collector", format_args!("has {attempt} on the disk"));
                self.audit.truth.lock().acknowledged.insert(attempt, what == "completed");
            }
            Err(error) => self.audit.net.note("collector", format_args!("has {attempt} not recorded: {error:?}")),
        }
        recorded
    }

    async fn flush(&self, cx: &CallContext) -> Result<()> {
        self.ledger.flush(cx).await
    }
}

/// A head server whose leases are recorded.
#[derive(Debug)]
pub(crate) struct AuditedHead<H> {
    pub(crate) head: Arc<H>,
    /// The life of the head server.
    pub(crate) term: u64,
    pub(crate) audit: Audit,
    /// Time that each worker takes to find the head server before it joins.
    pub(crate) lookup: Duration,
}

impl<H: Handler> Handler for AuditedHead<H> {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        let renewed = (request.verb == Verb::Post && request.route.path() == "/registry/renew")
            .then(|| serde_json::from_slice::<Lease>(&request.message.head.to_bytes()).ok())
            .flatten();
        let granted = request.route.path() == "/registry/register";
        let audit = self.audit.clone();
        let membership = audit.membership(&request, self.term);
        let lookup = if request.route.path() == "/cluster/join" { self.lookup } else { Duration::ZERO };
        let head = Arc::clone(&self.head);
        Box::pin(async move {
            if !lookup.is_zero() {
                tokio::time::sleep(lookup).await;
            }
            let response = head.handle(request).await?;
            if let Some(membership) = membership {
                membership.answered(&response);
            }
            if response.status.is_success() {
                let granted = granted.then(|| serde_json::from_slice(&response.message.head.to_bytes()).ok()).flatten();
                if let Some(lease) = renewed.or(granted) {
                    audit.leased(lease);
                }
            }
            Ok(response)
        })
    }
}

/// Runs inside the fence: every request that reaches it must name this incarnation.
#[derive(Debug)]
pub(crate) struct AuditedIncarnation<H> {
    pub(crate) life: Incarnation,
    pub(crate) handler: H,
    pub(crate) audit: Audit,
}

impl<H: Handler> Handler for AuditedIncarnation<H> {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        if request.context.incarnation != Some(self.life) {
            let meant = request.context.incarnation;
            self.audit.violation(format_args!("{} meant for {meant:?} ran in life {}", request.route, self.life));
        }
        self.handler.handle(request)
    }
}
