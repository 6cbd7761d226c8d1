//! Errors in the input rows or options of a collection.

use std::io;

use thiserror::Error;

use crate::collect::input::prompt::PromptError;

/// An error in the input rows or options. Every message names the place and the fix.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InputError {
    /// One line of the input is invalid.
    #[error("{file}, line {line}: {problem}")]
    Line {
        /// Name of the input.
        file: String,
        /// Line number, counted from 1.
        line: u64,
        /// The cause and the fix.
        problem: String,
    },
    /// No rule assigns these rows to an agent.
    #[error(
        "{file}, line {}: no agent for {count} row(s); name one with --agent or agent_map._default, or give the rows agent_ref or task_source",
        .lines.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
    )]
    NoAgent {
        /// Name of the input.
        file: String,
        /// The first of the affected line numbers.
        lines: Vec<u64>,
        /// Number of affected rows.
        count: u64,
    },
    /// The per-agent repeats have no entry for these rows.
    #[error("{file}, line {line}: num_repeats has no entry for {} and no `_default`; it has {}", .names.join(", "), .known.join(", "))]
    NoRepeats {
        /// Name of the input.
        file: String,
        /// Line number of the first affected row.
        line: u64,
        /// The agent or task source names of the affected rows.
        names: Vec<String>,
        /// The names that have an entry.
        known: Vec<String>,
    },
    /// An option is invalid or contradicts another option.
    #[error("{key}: {problem}")]
    Option {
        /// Configuration key of the option.
        key: String,
        /// The cause and the fix.
        problem: String,
    },
    /// A file could not be read or written.
    #[error("{doing}: {source}")]
    Io {
        /// The operation and its target.
        doing: String,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
}

impl InputError {
    pub(crate) fn option(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Option { key: key.into(), problem: problem.into() }
    }

    pub(crate) fn line(file: &str, line: u64, problem: impl Into<String>) -> Self {
        Self::Line { file: file.to_owned(), line, problem: problem.into() }
    }

    pub(crate) fn io(doing: impl Into<String>, source: io::Error) -> Self {
        Self::Io { doing: doing.into(), source }
    }
}

impl From<PromptError> for InputError {
    fn from(error: PromptError) -> Self {
        Self::option("prompt_config", error.to_string())
    }
}
