//! A ledger that sends outcomes to a channel, for rollouts that are used as they arrive.

use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use gym_core::rollout::{Attempt, KeyState, Ledger, Outcome, TaskKey};
use gym_core::{CallContext, Result};
use tokio::sync::mpsc;

use crate::collect::ledger::states::{KeyStates, OutcomeClass};

/// A ledger that sends each outcome to a channel and stores none. Late attempts are rejected, as on disk.
#[derive(Debug)]
pub(in crate::collect) struct StreamLedger {
    states: Mutex<KeyStates>,
    ended: mpsc::Sender<Result<(TaskKey, Outcome)>>,
}

impl StreamLedger {
    pub(in crate::collect) fn new(ended: mpsc::Sender<Result<(TaskKey, Outcome)>>) -> Self {
        Self { states: Mutex::new(KeyStates::new()), ended }
    }

    fn states(&self) -> std::sync::MutexGuard<'_, KeyStates> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Ledger for StreamLedger {
    fn state(&self, key: TaskKey) -> KeyState {
        self.states().state(key)
    }

    fn begin(&self, key: TaskKey) -> Result<Attempt> {
        self.states().begin(key).map_err(|late| late.into_error("begin an attempt at rollout", &key))
    }

    async fn record(&self, cx: &CallContext, attempt: Attempt, outcome: Outcome) -> Result<()> {
        let place = cx.bound(gym_core::Execution::NotStarted, async {
            self.ended
                .reserve()
                .await
                .map_err(|_| gym_core::Error::internal("the receiver of the rollouts was dropped"))
        });
        let place = place.await?;
        {
            let mut states = self.states();
            states.claim(attempt).map_err(|late| late.into_error("record", &attempt))?;
            states.on_disk(attempt, OutcomeClass::of(&outcome));
        }
        place.send(Ok((attempt.key, outcome)));
        Ok(())
    }

    async fn flush(&self, _: &CallContext) -> Result<()> {
        Ok(())
    }
}
