//! Collects rollouts: turns a JSONL file of tasks into a JSONL file of scored rollouts.

mod collector;
mod files;
pub mod input;
pub mod ledger;
mod names;
mod observe;
pub mod report;
mod resume;
pub(crate) mod run;

pub use collector::{CollectOptions, CollectSummary, RolloutCollector};
#[doc(hidden)]
pub use files::chunks::write_new_file;
pub use files::{ExistingOutput, OutputFiles, fix_of_unopened, nearest_file};
pub use names::{ServerNames, connect_head};
pub use observe::monitor;
pub use resume::settings::ChangedSettings;
pub use run::outcome::reward_of;
pub use run::{
    AgentScore, AgentSummary, BestOfK, CollectProgress, Driver, DriverOptions, FailFast, FailedAttempt, FailureCause,
    FinishedAttempt, LatencySummary, OldestRollout, PassRate, ProgressSnapshot, RewardBin, Rollout, RolloutError,
    RolloutEvent, RolloutEventKind, RolloutObserver, RolloutRow, Rollouts, RunEnd, TaskCoverage, TokenSummary,
    TokenUsage, TruncatedRollouts, UnrecordedRollouts,
};
