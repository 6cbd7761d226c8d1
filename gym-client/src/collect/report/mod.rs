//! Statistics of a rollouts file: an index of its rows, the bodies that ask servers for their statistics, and the file in
//! which the answers are kept.
//!
//! The file is in completion order and may be larger than memory. The index keeps 32 bytes a row and puts them in the order
//! of (environment server, task, rollout); rows are read again at their offsets when a pass needs them.

mod document;
mod index;
mod request;

pub use document::{ReportEntry, label_runs, write_computed_report, write_report};
pub use index::{FileRows, RolloutsIndex, ServerRollouts};
pub use request::AggregateRequest;
