//! The classes of failures. An error carries its class to the collector, through every server on the way.

use std::fmt;

use serde::{Deserialize, Serialize};

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
    /// The episode did not end within the agent's limit of time.
    EpisodeTimeout,
    /// The row does not fit the task of its environment, which found this before the first call of the model.
    RowInvalid,
    /// The environment could not begin or continue the episode.
    EnvironmentError,
    /// A tool failed, for a reason that the model did not cause.
    ToolError,
    /// The model server or its endpoint responded with an error.
    ModelError,
    /// The model endpoint cannot be reached, or has no capacity. The model server has already repeated the call within its budget.
    ModelUnavailable,
    /// The response of the model was cut off, and truncated rollouts are not scored.
    Truncated,
    /// The verifier's judge failed.
    JudgeFailed,
    /// The verifier responded with an error, or its response is not a rollout.
    VerifierError,
    /// The verifier panicked.
    VerifierPanic,
    /// The verifier's reward is not a finite number.
    InvalidReward,
    /// The server restarted, or no longer has the session.
    SessionLost,
    /// The worker that ran the episode died, or was silent for too long. The task is not to blame.
    WorkerLost,
    /// The run was stopped.
    Cancelled,
}

impl FailureClass {
    /// All classes, in the order of declaration.
    pub const ALL: [Self; 20] = [
        Self::TransportUnreachable,
        Self::TransportPeerDrop,
        Self::TransportTimeout,
        Self::TransportLocalResource,
        Self::AgentRunError,
        Self::AgentRequestFailed,
        Self::EpisodeTimeout,
        Self::RowInvalid,
        Self::EnvironmentError,
        Self::ToolError,
        Self::ModelError,
        Self::ModelUnavailable,
        Self::Truncated,
        Self::JudgeFailed,
        Self::VerifierError,
        Self::VerifierPanic,
        Self::InvalidReward,
        Self::SessionLost,
        Self::WorkerLost,
        Self::Cancelled,
    ];

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
            Self::EpisodeTimeout => "episode_timeout",
            Self::RowInvalid => "row_invalid",
            Self::EnvironmentError => "environment_error",
            Self::ToolError => "tool_error",
            Self::ModelError => "model_error",
            Self::ModelUnavailable => "model_unavailable",
            Self::Truncated => "truncated",
            Self::JudgeFailed => "judge_failed",
            Self::VerifierError => "verifier_error",
            Self::VerifierPanic => "verifier_panic",
            Self::InvalidReward => "invalid_reward",
            Self::SessionLost => "session_lost",
            Self::WorkerLost => "worker_lost",
            Self::Cancelled => "cancelled",
        }
    }

    /// Returns the class with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|class| class.as_str() == name)
    }

    /// Returns `true` if the task is not to blame: its worker was lost, or no server was reached. Such an attempt does not count in the attempts of the
    /// task.
    #[must_use]
    pub fn is_of_the_cluster(self) -> bool {
        matches!(self, Self::TransportUnreachable | Self::WorkerLost)
    }

    /// Returns `true` if another attempt may help now: the request did not reach its server, the response was lost, or a server
    /// had no capacity. An episode that ran and failed is likely to fail again, so its row waits for a resumed run. So does one whose
    /// model endpoint is unavailable: a model server repeats its calls itself, and further attempts would multiply its budget.
    #[must_use]
    pub fn is_transient(self) -> bool {
        match self {
            Self::TransportUnreachable
            | Self::TransportPeerDrop
            | Self::TransportTimeout
            | Self::TransportLocalResource
            | Self::AgentRequestFailed
            | Self::SessionLost
            | Self::WorkerLost => true,
            Self::AgentRunError
            | Self::EpisodeTimeout
            | Self::RowInvalid
            | Self::EnvironmentError
            | Self::ToolError
            | Self::ModelError
            | Self::ModelUnavailable
            | Self::Truncated
            | Self::JudgeFailed
            | Self::VerifierError
            | Self::VerifierPanic
            | Self::InvalidReward
            | Self::Cancelled => false,
        }
    }
}

impl fmt::Display for FailureClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_serde_writes() {
        for class in FailureClass::ALL {
            assert_eq!(FailureClass::from_name(class.as_str()), Some(class));
            assert_eq!(serde_json::to_value(class).unwrap(), class.as_str());
        }
    }
}
