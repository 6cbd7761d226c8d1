//! Statistics of a rollouts file: the index of its rows, the request bodies for the servers, and the report of their
//! responses.
//!
//! The file is in completion order and may be larger than memory. The index keeps 32 bytes per row, ordered by
//! environment server, task and rollout. Rows are read again from their offsets when needed.

mod coverage;
mod document;
mod index;
mod recorded;
mod request;

pub(in crate::collect) use coverage::ServerCoverage;
pub(in crate::collect) use document::ReportWriter;
pub use document::{ReportEntry, label_runs, write_computed_report, write_report};
pub use index::{FileRows, RolloutsIndex, ServerRollouts};
pub use recorded::RecordedSummary;
pub(in crate::collect) use recorded::read_recorded;
pub use request::AggregateRequest;
