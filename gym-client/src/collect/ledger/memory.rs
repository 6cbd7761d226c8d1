//! The ledger of rollouts that nobody keeps: a training step's, whose rows are used and forgotten.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use gym_core::rollout::{Attempt, KeyState, Ledger, Outcome, TaskKey};
use gym_core::{CallContext, Result};

use crate::collect::ledger::states::{KeyStates, OutcomeClass};

/// Outcomes in memory, under the same rules as those on a disk: late attempts are refused, a failure is no reward.
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
    /// A ledger without outcomes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The newest outcome of each rollout that has one; the states stay.
    #[must_use]
    pub fn take_outcomes(&self) -> BTreeMap<TaskKey, Outcome> {
        std::mem::take(&mut self.inner().outcomes)
    }

    fn inner(&self) -> MutexGuard<'_, MemoryState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Ledger for MemoryLedger {
    fn state(&self, key: TaskKey) -> KeyState {
        self.inner().states.state(key)
    }

    fn begin(&self, key: TaskKey) -> Result<Attempt> {
        self.inner().states.begin(key).map_err(|late| late.into_error("begin an attempt at rollout", &key))
    }

    async fn record(&self, cx: &CallContext, attempt: Attempt, outcome: Outcome) -> Result<()> {
        cx.check()?;
        let mut inner = self.inner();
        inner.states.claim(attempt).map_err(|late| late.into_error("record", &attempt))?;
        inner.states.on_disk(attempt, OutcomeClass::of(&outcome));
        inner.outcomes.insert(attempt.key, outcome);
        Ok(())
    }

    async fn flush(&self, _: &CallContext) -> Result<()> {
        Ok(())
    }
}
