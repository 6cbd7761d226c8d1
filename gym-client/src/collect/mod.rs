//! The rollout collector: a JSONL of tasks becomes a JSONL of scored rollouts.

mod driver;
pub mod ledger;
pub mod materialize;
pub mod metrics;
mod outcome;
mod progress;
pub mod prompt;
mod python;
pub mod source;
mod splice;

pub use driver::{Driver, DriverOptions, Ended, OutputFiles, RolloutRow};
pub use progress::{Progress, Score, Snapshot};
