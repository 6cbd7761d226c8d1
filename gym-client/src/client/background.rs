//! Requests whose response nobody waits for.

use std::sync::{Mutex, PoisonError};

use tokio::runtime::Handle;
use tokio::task::JoinSet;

/// Requests of one client that may be in flight in the background: as many as a server queues.
pub(super) const BACKGROUND_MAX: usize = 16_384;

/// The tasks that send the requests. Dropping it aborts them; each has a deadline.
#[derive(Debug, Default)]
pub(super) struct BackgroundRequests(Mutex<JoinSet<()>>);

impl BackgroundRequests {
    /// Starts a request, unless too many are in flight.
    pub(super) fn spawn(&self, request: impl Future<Output = ()> + Send + 'static) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut tasks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        if tasks.len() < BACKGROUND_MAX {
            tasks.spawn_on(request, &runtime);
        } else {
            tracing::warn!(limit = BACKGROUND_MAX, "a request in the background was not sent: too many are in flight");
        }
    }
}
