//! The driver's input: one rollout to run.

use std::sync::Arc;

use gym_core::RawObject;
use gym_core::rollout::TaskKey;

/// A requested rollout and its server.
#[derive(Clone, Debug)]
pub struct RolloutRow {
    /// Identifies the rollout.
    pub key: TaskKey,
    /// The agent, for the counters.
    pub agent: Arc<str>,
    /// The environment server that runs it.
    pub server: Arc<str>,
    /// The implementation of the server, written into the result.
    pub result_type: Option<Arc<str>>,
    /// The row as it is sent.
    pub row: RawObject,
}
