//! What can be wrong with the rows that statistics are asked of.

use thiserror::Error;

/// Why statistics could not be computed; each names the row and what to do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MetricsError {
    /// The request body is not `{"verify_responses": [ … ]}`.
    #[error("aggregate metrics request: {problem}; expected {{\"verify_responses\": [{{…}}, …]}}")]
    Request {
        /// What was found instead.
        problem: String,
    },
    /// One row cannot be read as a rollout.
    #[error("{place}: {problem}")]
    Row {
        /// The row's place: `verify_responses[3]`, or a file and a line.
        place: String,
        /// What is wrong, and the fix.
        problem: String,
    },
    /// Two rows have one (task, rollout) key, so the statistics would count one rollout twice.
    #[error(
        "duplicate rollout: _ng_task_index {task}, _ng_rollout_index {rollout} appears more than once; remove one of the rows"
    )]
    Duplicate {
        /// `_ng_task_index` of both rows.
        task: i64,
        /// `_ng_rollout_index` of both rows.
        rollout: i64,
    },
    /// The statistics of each task make the reply larger than its caller takes.
    #[error(
        "the statistics are larger than {bytes_max} bytes; ask for fewer rollouts at a time, or allow a larger reply"
    )]
    ReplyTooLarge {
        /// The bound.
        bytes_max: usize,
    },
    /// Reading the rows or writing the result failed.
    #[error("{doing}")]
    Io {
        /// What was being done, and to what.
        doing: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

impl MetricsError {
    pub(crate) fn row(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Row { place: place.into(), problem: problem.into() }
    }
}
