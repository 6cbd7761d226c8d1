//! Runs rollouts: the driver and its attempts, the classification of their responses, and the stream of rollouts.

mod driver;
pub(crate) mod outcome;
mod progress;
pub(crate) mod rollouts;
mod row;

pub use driver::{Driver, DriverOptions, RunEnd};
pub use progress::{AgentScore, CollectProgress, ProgressSnapshot};
pub use rollouts::{Rollout, RolloutError, Rollouts};
pub use row::RolloutRow;
