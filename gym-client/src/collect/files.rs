//! The files of a collection.

use std::path::PathBuf;

/// Where a collection writes, from the name of its rollouts file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputFiles {
    /// `<stem>.jsonl`: the rollouts.
    pub rollouts: PathBuf,
    /// `<stem>_materialized_inputs.jsonl`: the rows as they were sent.
    pub materialized: PathBuf,
    /// `<stem>_failures.jsonl`: failed attempts.
    pub failures: PathBuf,
    /// `<stem>_aggregate_metrics.json`.
    pub aggregate: PathBuf,
}

impl OutputFiles {
    /// The files beside `rollouts`.
    #[must_use]
    pub fn beside(rollouts: impl Into<PathBuf>) -> Self {
        let rollouts: PathBuf = rollouts.into();
        let stem = rollouts.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let named = |suffix: &str| rollouts.with_file_name(format!("{stem}{suffix}"));
        Self {
            materialized: named("_materialized_inputs.jsonl"),
            failures: named("_failures.jsonl"),
            aggregate: named("_aggregate_metrics.json"),
            rollouts,
        }
    }
}
