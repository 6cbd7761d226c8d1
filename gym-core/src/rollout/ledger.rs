//! The ledger: the interface through which a collector durably records outcomes.

use std::fmt;

use async_trait::async_trait;

use crate::base::error::Result;
use crate::message::CallContext;
use crate::message::RawObject;
use crate::rollout::{Attempt, FailureClass, TaskKey};

/// What is known of one rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyState {
    /// No outcome ends it yet.
    Open {
        /// Failed attempts on record.
        failures: u32,
    },
    /// Its row is on the disk.
    Completed,
    /// It failed for good.
    Terminal,
}

/// How an attempt ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// With a scored row.
    Completed(RawObject),
    /// With a failure, which is a row of the sidecar.
    Failed {
        /// Why.
        class: FailureClass,
        /// Whether another attempt is pointless.
        terminal: bool,
        /// The sidecar's row.
        row: RawObject,
    },
}

/// Durable outcomes, at most 64 bytes held per rollout.
///
/// Every attempt begins here, so that a late one can be told: [`Ledger::record`] refuses an attempt whose key has an outcome
/// already, and one that is older than the newest attempt begun.
#[async_trait]
pub trait Ledger: fmt::Debug + Send + Sync + 'static {
    /// What is known of a rollout.
    fn state(&self, key: TaskKey) -> KeyState;

    /// Begins the next attempt at a rollout; attempts begun before it are late from now on.
    ///
    /// # Errors
    /// `FailedPrecondition` when the rollout is completed or terminal.
    fn begin(&self, key: TaskKey) -> Result<Attempt>;

    /// Records how an attempt ended, and returns after it is on the disk.
    ///
    /// # Errors
    /// `FailedPrecondition` when the attempt is late; nothing is written. `ResourceExhausted` when the disk is full. After
    /// an error of the disk nothing counts until the ledger is opened again.
    async fn record(&self, cx: &CallContext, attempt: Attempt, outcome: Outcome) -> Result<()>;

    /// Waits until everything accepted so far is on the disk, and writes what is only a cache.
    ///
    /// # Errors
    /// The disk's.
    async fn flush(&self, cx: &CallContext) -> Result<()>;
}
