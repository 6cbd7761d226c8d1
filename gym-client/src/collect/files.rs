//! The output files of a collection.

use std::path::PathBuf;

/// The output files of a collection, named after its rollouts file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputFiles {
    /// `<stem>.jsonl`: the scored rollouts.
    pub rollouts: PathBuf,
    /// `<stem>_materialized_inputs.jsonl`: the rows as they were sent.
    pub materialized: PathBuf,
    /// `<stem>_failures.jsonl`: the failed attempts.
    pub failures: PathBuf,
    /// `<stem>_aggregate_metrics.json`: the statistics of the environment servers.
    pub aggregate: PathBuf,
}

impl OutputFiles {
    /// Returns the names of the output files in the directory of `rollouts`.
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
