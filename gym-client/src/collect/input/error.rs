//! Errors in the input rows or options of a collection.

use std::io;
use std::path::Path;

use thiserror::Error;

use crate::collect::input::places::RowPlaces;
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
    /// One row of a Parquet file is invalid.
    #[error("{file}, row {row}: {problem}")]
    Row {
        /// The file.
        file: String,
        /// Number of the row in the file, counted from 1.
        row: u64,
        /// The cause and the fix.
        problem: String,
    },
    /// An input file cannot be used.
    #[error("{file}: {problem}")]
    File {
        /// The file.
        file: String,
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

    pub(crate) fn row(file: String, row: u64, problem: impl Into<String>) -> Self {
        Self::Row { file, row, problem: problem.into() }
    }

    pub(crate) fn file(file: &Path, problem: impl Into<String>) -> Self {
        Self::File { file: file.display().to_string(), problem: problem.into() }
    }

    /// Names the place of a line by its file and row, if the lines are the rows of Parquet files.
    pub(in crate::collect) fn with_places(self, places: Option<&RowPlaces>) -> Self {
        let Some(places) = places else { return self };
        let (line, problem) = match &self {
            Self::Line { line, problem, .. } => (*line, problem.clone()),
            // The text is `<file>, line <line>: <problem>`.
            Self::NoRepeats { file, line, .. } => (*line, problem_of(&self.to_string(), file)),
            Self::NoAgent { file, lines, .. } => {
                (lines.first().copied().unwrap_or(1), problem_of(&self.to_string(), file))
            }
            _ => return self,
        };
        let (file, row) = places.of(line);
        Self::row(file, row, problem)
    }

    pub(crate) fn io(doing: impl Into<String>, source: io::Error) -> Self {
        Self::Io { doing: doing.into(), source }
    }
}

fn problem_of(text: &str, file: &str) -> String {
    let place = text.strip_prefix(file).unwrap_or(text);
    place.split_once(": ").map_or(place, |(_, problem)| problem).to_owned()
}

impl From<PromptError> for InputError {
    fn from(error: PromptError) -> Self {
        Self::option("prompt_config", error.to_string())
    }
}
