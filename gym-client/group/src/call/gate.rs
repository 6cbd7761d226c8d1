//! Admission control for whole group calls.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;

/// Admits the calls of a group, each as a whole. For groups whose calls need more than their own ranks, such as bundles that
/// several groups share.
///
/// A separate gate for each rank could deadlock: two calls could each hold half of what they need, and wait for the other half.
pub trait Gate: fmt::Debug + Send + Sync + 'static {
    /// Waits until a call may proceed. The call's own task calls and polls this future, up to the call's deadline. It drops the
    /// future when the call is cancelled, which removes the call from the queue of the gate.
    fn enter(&self) -> BoxFuture<'static, Permit>;

    /// Describes the current permit holder and since when it has held the permit: `policy has had its bundles for 60s`. Used in
    /// the error of a call that times out while waiting.
    fn holder(&self) -> Option<String> {
        None
    }

    /// Returns the name of the group whose calls the waiting calls are behind.
    fn holding_group(&self) -> Option<Arc<str>> {
        None
    }
}

/// The permit that a [`Gate`] grants to a call. Dropped when the last rank has replied or the call has ended. A failed call may
/// end before its handlers have finished.
pub type Permit = Arc<dyn Send + Sync>;
