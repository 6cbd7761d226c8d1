//! Admission control for whole group calls.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;

/// Admits the calls of a group, each as a whole. For groups whose calls need more than the group's own ranks, such as bundles that
/// several groups share.
///
/// A gate for each rank would not do: two calls could each hold half of what they need, and wait inside their ranks for the other half.
pub trait Gate: fmt::Debug + Send + Sync + 'static {
    /// Waits until a call may proceed. Called and polled by the call's own task, which waits until the call's deadline at most, and
    /// drops the future when the call is cancelled: the call then leaves the queue of the gate.
    fn enter(&self) -> BoxFuture<'static, Permit>;

    /// Describes the current permit holder and since when it has held the permit, for the error of a call that times out while waiting:
    /// `policy has had its bundles for 60s`.
    fn holder(&self) -> Option<String> {
        None
    }
}

/// The permit that a [`Gate`] grants to a call. Dropped when the last rank has replied or the call has ended, which may be before the
/// handlers of a failed call have finished.
pub type Permit = Arc<dyn Send + Sync>;
