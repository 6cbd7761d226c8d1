//! Exit codes of the commands, and their errors.

use std::process::ExitCode;

use gym_client::config::ConfigError;
use gym_core::{Code, Error};

/// The error of a command.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// An error of the user: exit code 2.
    Usage(String),
    /// A failure of the run: exit code 1.
    Failed(String),
}

/// The result of a command.
pub(super) type Outcome = Result<ExitCode, Failure>;

/// The run failed.
pub(super) const FAILED: u8 = 1;
/// Invalid usage or configuration.
pub(super) const USAGE: u8 = 2;
/// Finished, but rollouts failed or are incomplete.
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
