//! The rollout collector: a JSONL of tasks becomes a JSONL of scored rollouts.

mod driver;
mod outcome;
mod progress;

pub use driver::{Driver, DriverOptions, Ended, OutputFiles, RolloutRow};
pub use progress::{Progress, Score, Snapshot};
