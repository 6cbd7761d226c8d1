//! Exit codes of the commands, and their errors. The help texts and `docs/reference/exit-codes.md` have the table of this file.

use std::fmt::Write as _;
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

/// The command has succeeded.
pub(super) const SUCCESS: u8 = 0;
/// The run failed.
pub(super) const FAILED: u8 = 1;
/// Invalid usage or configuration.
pub(super) const USAGE: u8 = 2;
/// Finished, but rollouts failed or are incomplete.
pub(super) const INCOMPLETE: u8 = 3;
/// A check has found an error.
pub(super) const FAULTY: u8 = 4;

/// An exit code of the commands.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ExitMeaning {
    /// The code.
    pub code: u8,
    /// The meaning in a few words.
    pub meaning: &'static str,
    /// The cases, in sentences.
    pub cases: &'static str,
    /// The meaning of the code for `doctor`; empty if `doctor` does not return it.
    pub of_doctor: &'static str,
}

/// The exit codes of all commands.
pub const EXIT_CODES: [ExitMeaning; 5] = [
    ExitMeaning {
        code: SUCCESS,
        meaning: "success",
        cases: "`collect` has scored every rollout. `run` was stopped by one SIGINT or SIGTERM.",
        of_doctor: "every installed component works",
    },
    ExitMeaning {
        code: FAILED,
        meaning: "the run failed",
        cases: "A server, a file or a request failed for a reason other than the usage. The statistics at the end of `collect` are \
                missing. A second SIGINT or SIGTERM stopped `run` or `collect` at once.",
        of_doctor: "the transport of --require-transport is unavailable",
    },
    ExitMeaning {
        code: USAGE,
        meaning: "invalid usage or configuration",
        cases: "An option, a configuration or an input is invalid, or a name in them does not exist. A check of a worker's start has failed. \
                The error names the fix.",
        of_doctor: "invalid usage or configuration",
    },
    ExitMeaning {
        code: INCOMPLETE,
        meaning: "finished with failed or incomplete rollouts",
        cases: "`collect` recorded what it could: a rollout failed in its last attempt, or a signal or `--fail-fast` stopped the \
                collection early.",
        of_doctor: "an installed component does not work (each has a fix)",
    },
    ExitMeaning {
        code: FAULTY,
        meaning: "a check has found an error",
        cases: "`doctor` only.",
        of_doctor: "a setting of NCCL, RoCE or UCX, or the machine, has an error: it fails, hangs, or silently uses something slower",
    },
];

/// Lists the codes with a meaning, for a help text.
pub(super) fn listed(meaning: fn(&ExitMeaning) -> &'static str) -> String {
    let mut text = String::from("Exit codes:");
    for (at, row) in EXIT_CODES.iter().filter(|row| !meaning(row).is_empty()).enumerate() {
        // Writing to a string cannot fail.
        let _ = write!(text, "{} {} {}", if at == 0 { "" } else { "," }, row.code, meaning(row));
    }
    text + "."
}

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
