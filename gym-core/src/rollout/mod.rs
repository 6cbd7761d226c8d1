//! Rollouts: task keys, attempts, outcomes, the ledger that records them, exact statistics, and the queue
//! from which workers take them.
//!
//! ```text
//!   TaskKey ── Ledger::begin ──► Attempt ── episode ──► Outcome ── Ledger::record ──► disk
//!   (task, repeat)                (number)               row, or FailureClass           └──► metrics
//! ```

mod episode;
mod ledger;
pub mod metrics;
mod phases;
mod reward;
mod task;
pub mod work;

pub use crate::base::FailureClass;
pub use episode::{EPISODE_KEY, EPISODE_METADATA, EpisodeRecord, PROMPT_KEY, TURNS_KEY, UNVERIFIED_KEY};
pub use ledger::{KeyState, Ledger, Outcome};
pub use phases::{Phase, PhaseSpan, Phases};
pub use reward::non_finite_reward;
pub use task::{Attempt, TaskKey};
