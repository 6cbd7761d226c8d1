//! Reports running collections to a monitor, such as a head server, so that people can watch them.
//!
//! A report is sent each second. It has the counters, the failures by cause, the rollouts in flight that are oldest, and a sample of the
//! attempts that ended since the last one. The reply names rollouts that somebody wants to read; the next report has their rows. A
//! monitor that does not respond costs a collection nothing: reports are lost, and rollouts are not.

mod reporter;
mod rows;

use std::collections::BTreeMap;
use std::fmt;

use async_trait::async_trait;
use gym_core::base::ErrorLink;
use gym_core::rollout::FailureClass;
use gym_core::{CallContext, Error, Request, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::collect::run::TokenUsage;
use crate::registry::RemoteRegistry;
pub(in crate::collect) use reporter::{CollectionReporter, ReportedCollection};

/// The route of a head server that takes reports.
pub const REPORT_ROUTE: &str = "/collections/report";

/// Takes the reports of collections. The head server is one; a program may have its own.
///
/// The collector calls it once a second for each collection, one call at a time, and gives a call 5 s. `NotFound` and `Unimplemented` end
/// the reports. After any other error, the next report has what this one had.
#[async_trait]
pub trait CollectionMonitor: fmt::Debug + Send + Sync + 'static {
    /// Takes the state of a collection.
    ///
    /// # Errors
    /// `NotFound` if the monitor takes no reports; others if this report is lost.
    async fn report(&self, cx: &CallContext, report: &CollectionReport) -> Result<ReportReply>;
}

/// The state of a collection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct CollectionReport {
    /// The run: `run_id` of the failures file.
    pub id: String,
    /// The machine of the collector.
    pub host: String,
    /// The process of the collector.
    pub pid: u32,
    /// The file of the tasks.
    pub input: String,
    /// The file of the rollouts.
    pub output: String,
    /// Milliseconds from the Unix epoch to the start of the run.
    pub began_ms: u64,
    /// The end of the run: `exhausted`, `stopped`, `failed_fast` or `error`; `None` while it runs.
    pub end: Option<String>,
    /// Requested rollouts.
    pub rollouts: u64,
    /// Rollouts that this run recorded.
    pub completed: u64,
    /// Rollouts that earlier runs recorded.
    pub already_completed: u64,
    /// Rollouts that failed, in this run or an earlier one.
    pub failed: u64,
    /// Rollouts in flight.
    pub in_flight: u64,
    /// Mean reward of the recorded rollouts; `None` without any.
    pub mean_reward: Option<f64>,
    /// The summary of each agent, as `collect --json` has it; up to 5 s old.
    pub agents: BTreeMap<String, Value>,
    /// Failed attempts of this run by class.
    pub failures: BTreeMap<FailureClass, u64>,
    /// Their causes, the most frequent first; at most 32.
    pub causes: Vec<ReportedCause>,
    /// Failed attempts with none of these causes.
    pub other_causes: u64,
    /// The rollouts in flight that are oldest, oldest first; at most 50.
    pub oldest: Vec<ReportedRollout>,
    /// The queue from which workers take the rollouts, if they do.
    pub queue: Option<ReportedQueue>,
    /// Attempts that ended since the last report: all if they are few, otherwise a sample.
    pub ended: Vec<EndedAttempt>,
    /// The rows that the last reply asked for.
    pub rows: Vec<ReportedRow>,
}

/// Failed attempts with one cause.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReportedCause {
    /// Number of attempts.
    pub count: u64,
    /// The class of the failures.
    pub class: FailureClass,
    /// The innermost server whose call failed.
    pub server: String,
    /// The route of that call.
    pub route: String,
    /// The first attempt that failed in this way, such as `3-0-a1`.
    pub example: String,
    /// The errors of the example, outermost first.
    pub causes: Vec<ErrorLink>,
}

/// A rollout in flight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReportedRollout {
    /// Its newest attempt.
    #[serde(flatten)]
    pub attempt: AttemptId,
    /// Its agent.
    pub agent: String,
    /// Seconds since its first attempt in this run began.
    pub seconds: f64,
}

/// The queue of pulled work.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReportedQueue {
    /// Rollouts that wait for a worker.
    pub waiting: usize,
    /// Rollouts that workers hold.
    pub held: usize,
    /// Workers that were lost so far.
    pub workers_lost: u64,
    /// The workers: name, held rollouts, capacity.
    pub workers: Vec<(String, usize, usize)>,
}

/// An attempt, as the rows of the files name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AttemptId {
    /// `_ng_task_index`.
    pub task: u32,
    /// `_ng_rollout_index`.
    pub repeat: u32,
    /// `_ng_attempt_index`.
    #[serde(default)]
    pub attempt: u32,
}

/// An attempt that ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EndedAttempt {
    /// The attempt.
    #[serde(flatten)]
    pub attempt: AttemptId,
    /// Its agent.
    pub agent: String,
    /// Milliseconds from the Unix epoch to its end.
    pub ended_ms: u64,
    /// Its duration.
    pub seconds: f64,
    /// The reward. A failed attempt has none.
    pub reward: Option<f64>,
    /// The class of its failure; `None` if the row is recorded.
    pub class: Option<FailureClass>,
    /// The usage of tokens, if it is known.
    pub tokens: Option<TokenUsage>,
    /// The limit that cut it off, if one did.
    pub truncated: Option<String>,
    /// The calls of the episode with their times, as [`Phases`](gym_core::rollout::Phases) has them; `None` if the agent does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phases: Option<String>,
}

/// A row that somebody asked for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReportedRow {
    /// The attempt.
    pub wanted: WantedRow,
    /// The line of the file.
    pub row: Option<Box<RawValue>>,
    /// The reason why there is no row.
    pub problem: Option<String>,
}

/// A row that somebody wants to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WantedRow {
    /// The attempt.
    #[serde(flatten)]
    pub attempt: AttemptId,
    /// Whether it failed: its row is in the failures file.
    #[serde(default)]
    pub failed: bool,
}

/// The reply to a report.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportReply {
    /// Rows that the next report should have; at most 4 are read.
    pub wanted: Vec<WantedRow>,
}

#[async_trait]
impl CollectionMonitor for RemoteRegistry {
    async fn report(&self, cx: &CallContext, report: &CollectionReport) -> Result<ReportReply> {
        let body = serde_json::to_vec(report)
            .map_err(|error| Error::internal("cannot serialize the report").caused_by(error))?;
        // A monitor that takes a report twice shows an attempt twice.
        let response = self.send(&Request::post(cx.clone(), REPORT_ROUTE, body), false).await?;
        serde_json::from_slice(&response.message.head.to_bytes()).map_err(|error| {
            Error::finished(gym_core::Code::DataLoss, "the reply to a report cannot be read").caused_by(error)
        })
    }
}
