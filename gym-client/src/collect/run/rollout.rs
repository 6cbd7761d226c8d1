//! One rollout that has ended, and the driver's end of a stream of them.

use std::sync::Arc;
use std::time::Duration;

use gym_core::rollout::{FailureClass, Outcome, TaskKey};
use gym_core::{RawObject, Result};
use tokio::sync::mpsc;

use crate::collect::ledger::StreamLedger;
use crate::collect::run::outcome::{failure_message, reward_of};
use crate::collect::run::row::RolloutRow;

/// A rollout that has ended: scored, or failed after its last attempt.
///
/// ```
/// use gym_client::collect::Rollout;
///
/// fn line(rollout: &Rollout) -> String {
///     match &rollout.outcome {
///         Ok(reward) => format!("{}: {reward:?}", rollout.key),
///         Err(error) => format!("{} failed after {} attempts: {error}", rollout.key, rollout.attempts),
///     }
/// }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Rollout {
    /// The position of the task in the input, and its repeat.
    pub key: TaskKey,
    /// The scored row. For a failed rollout, the row that a collector writes to the failures file, with the `_ng_failure_*` keys.
    pub row: RawObject,
    /// The reward, or the reason why there is none. `Ok(None)` is a row without a reward, or one that its environment
    /// has masked (`mask_sample`). A failure is never a reward of 0.
    pub outcome: Result<Option<f64>, RolloutError>,
    /// The number of attempts, at least 1.
    pub attempts: u32,
    /// Time from the start of the first attempt to the end of the last one, including waits between attempts.
    pub duration: Duration,
}

impl Rollout {
    /// Returns the reward; `None` if the rollout failed or its environment gave none.
    #[must_use]
    pub fn reward(&self) -> Option<f64> {
        self.outcome.as_ref().ok().copied().flatten()
    }
}

/// The reason why a rollout has no scored row.
///
/// ```
/// use gym_client::collect::RolloutError;
/// use gym_core::rollout::FailureClass;
///
/// let error = RolloutError::Failed { class: FailureClass::ModelError, message: "no answer".to_owned() };
/// assert_eq!(error.to_string(), "model_error: no answer");
/// assert_eq!(RolloutError::Unrecorded.class(), None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RolloutError {
    /// The last recorded attempt failed.
    #[error("{class}: {message}")]
    Failed {
        /// The class of the failure.
        class: FailureClass,
        /// The message of the failure, with the call that failed.
        message: String,
    },
    /// No attempt was recorded: the environment returned `_ng_no_persist`, or every attempt exceeded its deadline.
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

/// The driver's end of a stream of rollouts.
#[derive(Debug)]
pub(super) struct RolloutSender {
    pub(super) ledger: Arc<StreamLedger>,
    pub(super) sender: mpsc::Sender<Result<Rollout>>,
}

impl RolloutSender {
    /// Sends a rollout that has ended, and waits for capacity. The wait has no deadline: it ends when the program takes a rollout
    /// or drops the stream.
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
