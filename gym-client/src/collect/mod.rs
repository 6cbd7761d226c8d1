//! Collects rollouts: turns a JSONL file of tasks into a JSONL file of scored rollouts.

mod chunks;
mod collector;
mod files;
pub mod input;
pub mod ledger;
mod names;
pub mod report;
mod resume;
pub(crate) mod run;

#[doc(hidden)]
pub use chunks::write_new_file;
pub use collector::{CollectOptions, CollectSummary, RolloutCollector};
pub use files::{ExistingOutput, OutputFiles};
pub use names::{ServerNames, connect_head};
pub use run::{
    AgentScore, AgentSummary, CollectProgress, Driver, DriverOptions, FailFast, FailureCause, LatencySummary,
    OldestRollout, PassRate, ProgressSnapshot, RewardBin, Rollout, RolloutError, RolloutRow, Rollouts, RunEnd,
    TokenSummary, TruncatedRollouts,
};
