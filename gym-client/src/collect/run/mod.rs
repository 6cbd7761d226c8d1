//! Runs rollouts: the driver and its attempts, the classification of their responses, and the stream of rollouts.

mod causes;
mod driver;
mod events;
mod failure;
pub(crate) mod outcome;
pub(in crate::collect) mod progress;
mod rollout;
pub(crate) mod rollouts;
mod row;

pub use causes::FailureCause;
pub use driver::{Driver, DriverOptions, FailFast, RunEnd, TruncatedRollouts};
pub use events::{FailedAttempt, FinishedAttempt, RolloutEvent, RolloutEventKind, RolloutObserver, TokenUsage};
pub use progress::{
    AgentScore, AgentSummary, BestOfK, CollectProgress, LatencySummary, OldestRollout, PassRate, ProgressSnapshot,
    RewardBin, TaskCoverage, TokenSummary, UnrecordedRollouts,
};
pub use rollout::{Rollout, RolloutError};
pub use rollouts::Rollouts;
pub use row::RolloutRow;
