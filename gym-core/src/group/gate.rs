//! What the calls of a group wait for as wholes, before any rank has a part.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;

/// Lets calls of a group pass, each as a whole: for groups whose calls need more than the group's own ranks, such as bundles that
/// groups use in turns. A gate before each rank would let two calls have half of what they need, each waiting inside its ranks for
/// the other half.
pub trait Gate: fmt::Debug + Send + Sync + 'static {
    /// Waits until a call may pass. Made and polled by a task of the call's own, which waits no longer than the call's deadline and
    /// drops it when the caller leaves: it then has no place in line any more.
    fn enter(&self) -> BoxFuture<'static, Leave>;

    /// Whom a call that waits now waits for, and since when: for the error of a call whose deadline came first. Asked seldom, and as the
    /// end of a sentence: `policy has had its bundles for 60s`.
    fn holder(&self) -> Option<String> {
        None
    }
}

/// What a call was given by its [`Gate`]: kept until its last rank has answered or the call has ended. A call that ends early may be over
/// before its handlers are.
pub type Leave = Arc<dyn Send + Sync>;
