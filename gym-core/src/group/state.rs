//! The health state of a rank or replica.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The health state of a rank. Only [`RankState::Healthy`] ranks are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RankState {
    /// Starting for the first time.
    Starting,
    /// Accepts calls.
    Healthy,
    /// Missed a heartbeat; calls in flight are still awaited.
    Suspect,
    /// The process has ended.
    Dead,
    /// Another incarnation is starting.
    Restarting,
    /// Restarted, but without the state that it needs to serve, such as the current weights.
    Stale,
    /// Ended more often than the restart budget allows.
    Retired,
    /// Stopped on request.
    Stopped,
}

impl RankState {
    /// Returns the name of the state in statuses and errors.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Healthy => "healthy",
            Self::Suspect => "suspect",
            Self::Dead => "dead",
            Self::Restarting => "restarting",
            Self::Stale => "stale",
            Self::Retired => "retired",
            Self::Stopped => "stopped",
        }
    }
}

impl fmt::Display for RankState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
