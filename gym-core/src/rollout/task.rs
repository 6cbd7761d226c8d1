//! Tasks, attempts, and classes of failures.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::base::error::{Code, Error};

/// The key of one rollout: a task (a row of the input) and one of its repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskKey {
    /// The number of the task: `_ng_task_index`.
    pub task_index: u32,
    /// The number of the repeat: `_ng_rollout_index`.
    pub rollout_index: u32,
}

impl TaskKey {
    /// Creates the key of a repeat of a task.
    #[must_use]
    pub fn new(task_index: u32, rollout_index: u32) -> Self {
        Self { task_index, rollout_index }
    }
}

impl fmt::Display for TaskKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.task_index, self.rollout_index)
    }
}

/// One attempt at a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Attempt {
    /// The rollout.
    pub key: TaskKey,
    /// The number of the attempt; the first is 0.
    pub number: u32,
}

impl fmt::Display for Attempt {
    /// Writes NeMo Gym's rollout id: `3-0`, and `3-0-a2` for the third attempt.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            0 => self.key.fmt(f),
            number => write!(f, "{}-a{number}", self.key),
        }
    }
}

/// The reason why an attempt has no reward. A failure is never a reward of 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FailureClass {
    /// The request never reached a server: nothing ran.
    TransportUnreachable,
    /// The connection was lost; the episode may have run.
    TransportPeerDrop,
    /// The deadline passed before a response arrived.
    TransportTimeout,
    /// This machine ran out of file descriptors, memory or disk space.
    TransportLocalResource,
    /// The environment or agent responded with an error.
    AgentRunError,
    /// The environment or agent reported that it cannot serve at the moment (429, 502, 503, 504).
    AgentRequestFailed,
    /// The verifier's judge failed.
    JudgeFailed,
    /// The response is not a rollout: not a JSON object, or its reward is not a number.
    VerifierError,
    /// The server restarted, or no longer has the session.
    SessionLost,
    /// The run was stopped.
    Cancelled,
}

impl FailureClass {
    /// Returns the name that is written to `_ng_failure_class`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TransportUnreachable => "transport_unreachable",
            Self::TransportPeerDrop => "transport_peer_drop",
            Self::TransportTimeout => "transport_timeout",
            Self::TransportLocalResource => "transport_local_resource",
            Self::AgentRunError => "agent_run_error",
            Self::AgentRequestFailed => "agent_request_failed",
            Self::JudgeFailed => "judge_failed",
            Self::VerifierError => "verifier_error",
            Self::SessionLost => "session_lost",
            Self::Cancelled => "cancelled",
        }
    }

    /// Returns the class of an attempt whose call failed with this error.
    #[must_use]
    pub fn of(error: &Error) -> Self {
        use crate::base::error::Execution::{Finished, NotStarted, Unknown};
        match (error.execution(), error.code()) {
            (_, Code::Cancelled) => Self::Cancelled,
            (_, Code::DeadlineExceeded) => Self::TransportTimeout,
            (_, Code::FailedPrecondition) => Self::SessionLost,
            (NotStarted, Code::ResourceExhausted) => Self::TransportLocalResource,
            (NotStarted, _) => Self::TransportUnreachable,
            (Unknown, _) => Self::TransportPeerDrop,
            (Finished, Code::Unavailable | Code::ResourceExhausted) => Self::AgentRequestFailed,
            (Finished, _) => Self::AgentRunError,
        }
    }
}

impl fmt::Display for FailureClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
