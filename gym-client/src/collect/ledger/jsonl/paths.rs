//! The files of a ledger, named after its output.

use std::path::{Path, PathBuf};

use crate::collect::ledger::jsonl::index::LedgerFile;

/// The paths of one ledger.
#[derive(Debug)]
pub(super) struct LedgerPaths {
    pub(super) rollouts: PathBuf,
    pub(super) failures: PathBuf,
    pub(super) index: PathBuf,
}

impl LedgerPaths {
    pub(super) fn new(rollouts: PathBuf) -> Self {
        let failures = failures_path(&rollouts);
        let index = index_path(&rollouts);
        Self { rollouts, failures, index }
    }

    pub(super) fn of(&self, file: LedgerFile) -> &Path {
        match file {
            LedgerFile::Rollouts => &self.rollouts,
            LedgerFile::Failures => &self.failures,
        }
    }
}

/// Returns the failures file of an output: `rollouts.jsonl` has `rollouts_failures.jsonl`.
#[must_use]
pub fn failures_path(output: &Path) -> PathBuf {
    let mut name = output.file_stem().unwrap_or_default().to_owned();
    name.push("_failures.jsonl");
    output.with_file_name(name)
}

/// Returns the index of an output: `rollouts.jsonl` has `rollouts.jsonl.index`.
#[must_use]
pub fn index_path(output: &Path) -> PathBuf {
    let mut name = output.file_name().unwrap_or_default().to_owned();
    name.push(".index");
    output.with_file_name(name)
}
