//! The collective operations of a rank: those that wait, and totals.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::group::collective::operation::has;
use crate::group::collective::transfer::Moving;
use crate::group::layout::Rank;

/// The collective operations of one rank, as its backend reports them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct CollectiveReport {
    /// The operations that the rank has called and that are not over, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<WaitingOperation>,
    /// The operations that have succeeded since the rank started.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub totals: Vec<OperationTotals>,
    /// Meetings of the rank that have failed.
    pub aborts: u64,
    /// Why the ranks of a meeting do not share memory, if they were to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_shared: Option<String>,
}

/// An operation that is not over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct WaitingOperation {
    /// The operation, as in the subject of its error: `all_reduce 3 of meeting policy/data (epoch 2)`.
    pub operation: String,
    /// Milliseconds since the rank called it.
    pub elapsed_ms: u64,
    /// The ranks that have not called it, ascending. Empty if all have, and it is under way.
    pub missing: Vec<Rank>,
}

/// The operations of one kind over one path that have succeeded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct OperationTotals {
    /// The kind, such as `all_reduce`.
    pub operation: String,
    /// How the elements went: the transport, such as `unix+frames`.
    pub path: String,
    /// The number of operations.
    pub operations: u64,
    /// The sum of [`Moving::bytes`](super::Moving::bytes).
    pub bytes: u64,
    /// The time from the calls to their ends, in microseconds.
    pub micros: u64,
}

impl CollectiveReport {
    /// Returns `true` if the rank has called no operation.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl WaitingOperation {
    /// Creates the report of an operation that was called so long ago.
    #[must_use]
    pub fn new(operation: String, elapsed: Duration, missing: Vec<Rank>) -> Self {
        Self { operation, elapsed_ms: u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX), missing }
    }
}

/// The totals of one rank, for a backend.
#[derive(Debug, Default)]
pub struct CollectiveTotals(Mutex<Totals>);

#[derive(Debug, Default)]
struct Totals {
    /// By kind and path.
    moved: BTreeMap<(&'static str, &'static str), OperationTotals>,
    aborts: u64,
}

impl CollectiveTotals {
    /// Adds an operation that has succeeded: its kind, and how its elements went.
    pub fn count(&self, operation: &'static str, path: &'static str, moved: &Moving) {
        let mut totals = self.0.lock();
        let total = totals.moved.entry((operation, path)).or_insert_with(|| OperationTotals {
            operation: operation.to_owned(),
            path: path.to_owned(),
            ..OperationTotals::default()
        });
        total.operations += 1;
        total.bytes += moved.bytes;
        total.micros += u64::try_from(moved.took.as_micros()).unwrap_or(u64::MAX);
    }

    /// Adds a meeting that has failed.
    pub fn count_abort(&self) {
        self.0.lock().aborts += 1;
    }

    /// Writes the totals to a report.
    pub fn report(&self, report: &mut CollectiveReport) {
        let totals = self.0.lock();
        report.totals = totals.moved.values().cloned().collect();
        report.aborts = totals.aborts;
    }
}

impl fmt::Display for WaitingOperation {
    /// Writes `waits in all_reduce 3 of meeting policy/data (epoch 2): rank 2 has not called it`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waits in {}: ", self.operation)?;
        match &self.missing[..] {
            [] => f.write_str("all ranks have called it"),
            missing => write!(f, "{} not called it", has(missing)),
        }
    }
}
