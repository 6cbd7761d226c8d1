//! The errors of the statistics.

use thiserror::Error;

/// The reason why statistics could not be computed, with the row and the fix.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MetricsError {
    /// The request body is not `{"verify_responses": [ … ]}`.
    #[error("aggregate metrics request: {problem}; expected {{\"verify_responses\": [{{…}}, …]}}")]
    Request {
        /// The actual contents of the body.
        problem: String,
    },
    /// A row is not a valid rollout.
    #[error("{place}: {problem}")]
    Row {
        /// The position of the row: `verify_responses[3]`, or a file and a line.
        place: String,
        /// The mistake and its fix.
        problem: String,
    },
    /// Two rows have the same (task, rollout) key, so the statistics would count one rollout twice.
    #[error(
        "duplicate rollout: _ng_task_index {task}, _ng_rollout_index {rollout} appears more than once; remove one of the rows"
    )]
    Duplicate {
        /// `_ng_task_index` of both rows.
        task: i64,
        /// `_ng_rollout_index` of both rows.
        rollout: i64,
    },
    /// The reply, which has statistics of each task, is larger than the caller accepts.
    #[error(
        "the statistics are larger than {bytes_max} bytes; request fewer rollouts at a time, or allow a larger reply"
    )]
    ReplyTooLarge {
        /// The largest accepted reply, in bytes.
        bytes_max: usize,
    },
    /// Reading the rows or writing the result failed.
    #[error("{doing}")]
    Io {
        /// The operation and its target.
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
