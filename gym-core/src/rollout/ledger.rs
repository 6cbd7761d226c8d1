//! The ledger, through which a collector records outcomes durably.

use std::fmt;

use async_trait::async_trait;

use crate::base::error::Result;
use crate::message::CallContext;
use crate::message::RawObject;
use crate::rollout::{Attempt, FailureClass, TaskKey};

/// The state of one rollout in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyState {
    /// The rollout needs another attempt.
    Open {
        /// The number of recorded failed attempts, without those of `lost`.
        failures: u32,
        /// The number of recorded attempts whose worker was lost ([`FailureClass::WorkerLost`]): the task is not to blame.
        lost: u32,
    },
    /// The scored row is on the disk.
    Completed,
    /// The rollout failed permanently.
    Terminal,
}

/// The outcome of one attempt.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The attempt produced this scored row.
    Completed(RawObject),
    /// The attempt failed. The failures file (sidecar) receives a row.
    Failed {
        /// The class of the failure.
        class: FailureClass,
        /// Whether no further attempt is made.
        terminal: bool,
        /// The row of the failures file.
        row: RawObject,
    },
}

/// Records outcomes durably; keeps at most 64 bytes of memory per rollout. The collector calls it.
///
/// - **Order.** The collector begins each attempt here, and records its outcome later. Attempts run concurrently.
/// - **Late attempts.** [`Ledger::record`] rejects an attempt that has an outcome, or that is not the newest at its
///   key.
/// - **Cancellation.** After the future of `record` is dropped, the outcome may still be recorded.
#[async_trait]
pub trait Ledger: fmt::Debug + Send + Sync + 'static {
    /// Returns the state of a rollout.
    fn state(&self, key: TaskKey) -> KeyState;

    /// Begins the next attempt at a rollout. Earlier attempts at it are late from now on.
    ///
    /// # Errors
    /// `FailedPrecondition` if the rollout is completed or terminal.
    fn begin(&self, key: TaskKey) -> Result<Attempt>;

    /// Records the outcome of an attempt. Returns after it is on the disk.
    ///
    /// # Errors
    /// `FailedPrecondition` if the attempt is late; nothing is written. `ResourceExhausted` if the disk is full. After
    /// an error of the disk, the ledger must be opened again.
    async fn record(&self, cx: &CallContext, attempt: Attempt, outcome: Outcome) -> Result<()>;

    /// Waits until all accepted outcomes are on the disk, and writes the cache files.
    ///
    /// # Errors
    /// The errors of the disk.
    async fn flush(&self, cx: &CallContext) -> Result<()>;
}
