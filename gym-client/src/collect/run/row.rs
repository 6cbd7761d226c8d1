//! A rollout as the driver is asked for it.

use std::sync::Arc;

use gym_core::RawObject;
use gym_core::rollout::TaskKey;

/// A rollout that is wanted, and where it is to be run.
#[derive(Clone, Debug)]
pub struct RolloutRow {
    /// Which rollout.
    pub key: TaskKey,
    /// The agent, for counting.
    pub agent: Arc<str>,
    /// The environment server that is asked.
    pub server: Arc<str>,
    /// Its implementation, written into the result.
    pub result_type: Option<Arc<str>>,
    /// The row as it is sent.
    pub row: RawObject,
}
