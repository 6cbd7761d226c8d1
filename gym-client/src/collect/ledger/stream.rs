//! The ledger of a stream of rollouts: keeps the last outcome of each rollout in flight, in memory only.

use std::collections::HashMap;

use async_trait::async_trait;
use gym_core::rollout::{Attempt, KeyState, Ledger, Outcome, TaskKey};
use gym_core::{CallContext, Result};
use parking_lot::Mutex;

use crate::collect::ledger::states::{KeyStates, OutcomeClass};

/// A ledger in memory. [`StreamLedger::take`] removes the outcome of a rollout that has ended, so the ledger holds at most one
/// outcome for each rollout in flight.
#[derive(Debug)]
pub(in crate::collect) struct StreamLedger {
    inner: Mutex<StreamState>,
}

#[derive(Debug)]
struct StreamState {
    states: KeyStates,
    last: HashMap<TaskKey, Outcome>,
}

impl StreamLedger {
    pub(in crate::collect) fn new() -> Self {
        Self { inner: Mutex::new(StreamState { states: KeyStates::new(), last: HashMap::new() }) }
    }

    /// Removes and returns the outcome that was recorded last.
    pub(in crate::collect) fn take(&self, key: TaskKey) -> Option<Outcome> {
        self.inner.lock().last.remove(&key)
    }
}

#[async_trait]
impl Ledger for StreamLedger {
    fn state(&self, key: TaskKey) -> KeyState {
        self.inner.lock().states.state(key)
    }

    fn begin(&self, key: TaskKey) -> Result<Attempt> {
        self.inner.lock().states.begin(key).map_err(|late| late.into_error("begin an attempt at rollout", &key))
    }

    async fn record(&self, _: &CallContext, attempt: Attempt, outcome: Outcome) -> Result<()> {
        let mut inner = self.inner.lock();
        inner.states.claim(attempt).map_err(|late| late.into_error("record", &attempt))?;
        inner.states.on_disk(attempt, OutcomeClass::of(&outcome));
        inner.last.insert(attempt.key, outcome);
        Ok(())
    }

    async fn flush(&self, _: &CallContext) -> Result<()> {
        Ok(())
    }
}
