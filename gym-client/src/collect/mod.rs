//! The rollout collector: a JSONL of tasks becomes a JSONL of scored rollouts.

mod collector;
mod driver;
pub mod ledger;
pub mod materialize;
pub mod metrics;
mod names;
mod outcome;
mod progress;
pub mod prompt;
mod python;
pub mod source;
mod splice;

pub use collector::{CollectOptions, Collected, RolloutCollector};
pub use driver::{Driver, DriverOptions, Ended, OutputFiles, RolloutRow};
pub use names::{ServerNames, connect_head};
#[cfg(feature = "groups")]
pub(crate) use outcome::reward_of;
pub use progress::{Progress, Score, Snapshot};
