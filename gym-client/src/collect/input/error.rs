//! What can be wrong with the input of a collection, or with what is asked of it.

use std::io;

use thiserror::Error;

use crate::collect::input::prompt::PromptError;

/// What is wrong with the input or with what is asked of it. Every message names the place and the fix.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InputError {
    /// One line of the input cannot be used.
    #[error("{file}, line {line}: {problem}")]
    Line {
        /// The input's name.
        file: String,
        /// Counted from 1.
        line: u64,
        /// What is wrong, and the fix.
        problem: String,
    },
    /// Rows that no rule sends to an agent.
    #[error(
        "{file}, line {}: no agent for {count} row(s); name one with --agent or agent_map._default, or give the rows agent_ref or task_source",
        .lines.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
    )]
    NoAgent {
        /// The input's name.
        file: String,
        /// The first of their lines.
        lines: Vec<u64>,
        /// How many there are.
        count: u64,
    },
    /// Rows whose names the per-agent repeats do not mention.
    #[error("{file}, line {line}: num_repeats has no entry for {} and no `_default`; it has {}", .names.join(", "), .known.join(", "))]
    NoRepeats {
        /// The input's name.
        file: String,
        /// The first such row.
        line: u64,
        /// The names that rows route by.
        names: Vec<String>,
        /// The names that have an entry.
        known: Vec<String>,
    },
    /// An option that contradicts itself or another.
    #[error("{key}: {problem}")]
    Option {
        /// The option's key.
        key: String,
        /// What is wrong, and the fix.
        problem: String,
    },
    /// Reading or writing failed.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done, and to what.
        doing: String,
        /// The cause.
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
