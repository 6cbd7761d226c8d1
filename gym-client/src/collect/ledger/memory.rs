//! A ledger in memory, for rollouts that are used once, such as those of a training step.

use std::collections::BTreeMap;

use async_trait::async_trait;
use gym_core::rollout::{Attempt, KeyState, Ledger, Outcome, TaskKey};
use gym_core::{CallContext, Result};
use parking_lot::Mutex;

use crate::collect::ledger::states::{KeyStates, OutcomeClass};

/// Outcomes in memory, under the same rules as outcomes on disk: late attempts are rejected, and a failure is not a
/// reward.
#[derive(Debug, Default)]
pub struct MemoryLedger {
    inner: Mutex<MemoryState>,
}

#[derive(Debug)]
struct MemoryState {
    states: KeyStates,
    outcomes: BTreeMap<TaskKey, Outcome>,
}

impl Default for MemoryState {
    fn default() -> Self {
        Self { states: KeyStates::new(), outcomes: BTreeMap::new() }
    }
}

impl MemoryLedger {
    /// Creates an empty ledger.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Removes and returns the newest outcome of each rollout; the states are kept.
    #[must_use]
    pub fn take_outcomes(&self) -> BTreeMap<TaskKey, Outcome> {
        std::mem::take(&mut self.inner.lock().outcomes)
    }
}

#[async_trait]
impl Ledger for MemoryLedger {
    fn state(&self, key: TaskKey) -> KeyState {
        self.inner.lock().states.state(key)
    }

    fn begin(&self, key: TaskKey) -> Result<Attempt> {
        self.inner.lock().states.begin(key).map_err(|late| late.into_error("begin an attempt at rollout", &key))
    }

    async fn record(&self, cx: &CallContext, attempt: Attempt, outcome: Outcome) -> Result<()> {
        cx.check()?;
        let mut inner = self.inner.lock();
        inner.states.claim(attempt).map_err(|late| late.into_error("record", &attempt))?;
        inner.states.on_disk(attempt, OutcomeClass::of(&outcome));
        inner.outcomes.insert(attempt.key, outcome);
        Ok(())
    }

    async fn flush(&self, _: &CallContext) -> Result<()> {
        Ok(())
    }
}
