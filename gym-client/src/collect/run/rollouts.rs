//! Rollouts as a stream, for programs that use each rollout as soon as it ends.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::stream::{Stream, StreamExt};
use gym_core::rollout::{FailureClass, Outcome, TaskKey};
use gym_core::{CancelToken, RawObject, Result, World};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::client::ServerClient;
use crate::collect::ledger::StreamLedger;
use crate::collect::run::driver::{Driver, DriverOptions};
use crate::collect::run::outcome::{failure_message, reward_of};
use crate::collect::run::row::RolloutRow;

/// A rollout that has ended: scored, or failed after its last attempt.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Rollout {
    /// The position of the task in the input, and its repeat.
    pub key: TaskKey,
    /// The scored row. Of a failed rollout, the row that a collector writes to the failures file, with the `_ng_failure_*` keys.
    pub row: RawObject,
    /// The reward, or why there is none. `Ok(None)` is a scored row without a reward. A failure is never a reward of 0.
    pub outcome: Result<Option<f64>, RolloutError>,
    /// The number of attempts, at least 1.
    pub attempts: u32,
    /// Time from the start of the first attempt to the end of the last one, waits between attempts included.
    pub duration: Duration,
}

impl Rollout {
    /// Returns the reward; `None` if the rollout failed or its environment gave none.
    #[must_use]
    pub fn reward(&self) -> Option<f64> {
        self.outcome.as_ref().ok().copied().flatten()
    }
}

/// Why a rollout has no scored row.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RolloutError {
    /// The last recorded attempt failed.
    #[error("{class}: {message}")]
    Failed {
        /// The class of the failure.
        class: FailureClass,
        /// The text of the failure, with the call that failed.
        message: String,
    },
    /// No attempt left a row: the environment answered with `_ng_no_persist`, or every attempt exceeded its deadline.
    #[error("no attempt was recorded; collect the task again")]
    Unrecorded,
}

impl RolloutError {
    /// Returns the class of the failure; `None` if no attempt was recorded.
    #[must_use]
    pub fn class(&self) -> Option<FailureClass> {
        match self {
            Self::Failed { class, .. } => Some(*class),
            Self::Unrecorded => None,
        }
    }
}

/// A stream of rollouts in the order in which they end.
///
/// The stream is bounded: while the program takes no rollout, at most [`DriverOptions::concurrency`] ended ones wait, and no
/// further rollouts start. Dropping the stream cancels the rollouts in flight at once.
///
/// An item is an error if the rows cannot be read or a task of the collector panics; the stream then ends.
#[derive(Debug)]
pub struct Rollouts {
    ended: mpsc::Receiver<Result<Rollout>>,
    /// The driver's task, aborted on drop together with all calls in flight.
    _driver: JoinSet<()>,
}

impl Rollouts {
    /// Runs each task once on `server`, as `agent`. Must be called within a tokio runtime.
    #[must_use]
    pub fn run(
        client: ServerClient,
        world: &World,
        (server, agent): (&str, &str),
        tasks: impl Stream<Item = Result<RawObject>> + Send + 'static,
        options: DriverOptions,
    ) -> Self {
        let (sender, ended) = mpsc::channel(options.concurrency.max(1));
        let rollouts = RolloutSender { ledger: Arc::new(StreamLedger::new()), sender: sender.clone() };
        let ledger = Arc::clone(&rollouts.ledger);
        let driver = Arc::new(Driver::new(client, ledger, world, options).sending_to(rollouts));
        let (server, agent): (Arc<str>, Arc<str>) = (server.into(), agent.into());
        let rows = tasks.enumerate().map(move |(at, task)| row(at, &task?, Arc::clone(&server), Arc::clone(&agent)));
        let mut task = JoinSet::new();
        let driving = async move {
            // Ends with the rows or with the stream: dropping the stream aborts this task.
            if let Err(error) = driver.run(Box::pin(rows), CancelToken::new()).await {
                let _ = sender.send(Err(error)).await;
            }
        };
        task.spawn(driving.boxed());
        Self { ended, _driver: task }
    }

    /// Returns the next rollout that has ended, or `None` after the last one.
    ///
    /// # Cancel safety
    /// Cancel safe: no rollout is lost.
    pub async fn next(&mut self) -> Option<Result<Rollout>> {
        self.ended.recv().await
    }
}

impl Stream for Rollouts {
    type Item = Result<Rollout>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.ended.poll_recv(cx)
    }
}

fn row(at: usize, task: &RawObject, server: Arc<str>, agent: Arc<str>) -> Result<RolloutRow> {
    let key = TaskKey::new(u32::try_from(at).unwrap_or(u32::MAX), 0);
    let row = task
        .edit()
        .set("_ng_task_index", key.task_index.to_string())
        .set("_ng_rollout_index", "0")
        .set_value("agent_ref", &serde_json::json!({ "type": "responses_api_agents", "name": &*agent }))?
        .to_object()?;
    Ok(RolloutRow { key, agent, server, result_type: None, row })
}

/// The driver's end of a stream of rollouts.
#[derive(Debug)]
pub(super) struct RolloutSender {
    ledger: Arc<StreamLedger>,
    sender: mpsc::Sender<Result<Rollout>>,
}

impl RolloutSender {
    /// Sends a rollout that has ended, and waits for a place. The wait has no deadline of its own: it ends when the program takes a
    /// rollout or drops the stream.
    pub(super) async fn send(&self, wanted: &RolloutRow, attempts: u32, duration: Duration) {
        let (row, outcome) = match self.ledger.take(wanted.key) {
            Some(Outcome::Completed(row)) => {
                let reward = reward_of(&row);
                (row, Ok(reward))
            }
            Some(Outcome::Failed { class, row, .. }) => {
                let message = failure_message(&row);
                (row, Err(RolloutError::Failed { class, message }))
            }
            None => (wanted.row.clone(), Err(RolloutError::Unrecorded)),
        };
        // An error means that the stream was dropped, which aborts this task.
        let _ = self.sender.send(Ok(Rollout { key: wanted.key, row, outcome, attempts, duration })).await;
    }
}
