//! Rollouts: keys, attempts, outcomes, and statistics.

mod ledger;
pub mod metrics;
mod task;

pub use ledger::{KeyState, Ledger, Outcome};
pub use task::{Attempt, FailureClass, TaskKey};
