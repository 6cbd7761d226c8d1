//! Admission control for whole group calls.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;

/// Admits the calls of a group, each as a whole. For groups whose calls need more than their own ranks, such as bundles that
/// several groups share.
///
/// A separate gate for each rank could deadlock: two calls could each hold half of what they need, and wait for the other half.
///
/// ```
/// use std::sync::Arc;
///
/// use futures_util::future::BoxFuture;
/// use gym_group::{Gate, Permit};
/// use tokio::sync::Semaphore;
///
/// /// Admits one call at a time.
/// #[derive(Debug)]
/// struct OneCall(Arc<Semaphore>);
///
/// impl Gate for OneCall {
///     fn enter(&self) -> BoxFuture<'static, Permit> {
///         let calls = Arc::clone(&self.0);
///         Box::pin(async move { Arc::new(calls.acquire_owned().await.expect("it is never closed")) as Permit })
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let gate = OneCall(Arc::new(Semaphore::new(1)));
/// let permit = gate.enter().await;
/// assert_eq!(gate.0.available_permits(), 0);
/// drop(permit); // the call has ended
/// assert_eq!(gate.0.available_permits(), 1);
/// # }
/// ```
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

/// The permit that a [`Gate`] grants to a call, with an example there. Dropped when the last rank has replied or the call has ended. A failed call may
/// end before its handlers have finished.
pub type Permit = Arc<dyn Send + Sync>;
