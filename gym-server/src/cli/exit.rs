//! How a command ends: its exit code, and why it failed.

use std::process::ExitCode;

use gym_client::config::ConfigError;
use gym_core::{Code, Error};

/// Why a command did not do what it was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The user's mistake: exit code 2.
    Usage(String),
    /// The run's failure: exit code 1.
    Failed(String),
}

/// What a command ends with.
pub(super) type Outcome = Result<ExitCode, Failure>;

/// The run failed.
pub(super) const FAILED: u8 = 1;
/// Wrong usage or configuration.
pub(super) const USAGE: u8 = 2;
/// Done, but rollouts failed or are still open.
pub(super) const INCOMPLETE: u8 = 3;

impl Failure {
    pub(super) fn code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Usage(_) => USAGE,
            Self::Failed(_) => FAILED,
        })
    }

    pub(super) fn text(&self) -> &str {
        match self {
            Self::Usage(text) | Self::Failed(text) => text,
        }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::Usage(error.to_string())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error.code() {
            Code::InvalidArgument => Self::Usage(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}
