//! Calls that outlive their caller.

use std::sync::{Mutex, PoisonError};

use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::client::server_client::ServerClient;

/// Tasks of one client that may run in the background: as many as a server queues.
const BACKGROUND_MAX: usize = 16_384;

/// The tasks of a client. Dropping it aborts them.
#[derive(Debug, Default)]
pub(super) struct BackgroundTasks(Mutex<JoinSet<()>>);

impl ServerClient {
    /// Runs calls that outlive their caller, such as the one that closes the session of a cancelled episode. `calls` must have a
    /// deadline. They are dropped if this client runs 16,384 of them, and outside of a Tokio runtime.
    pub fn in_background(&self, calls: impl Future<Output = ()> + Send + 'static) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut tasks = self.inner.background.0.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        if tasks.len() < BACKGROUND_MAX {
            tasks.spawn_on(calls, &runtime);
        } else {
            drop(tasks);
            tracing::warn!(limit = BACKGROUND_MAX, "calls in the background were dropped: too many are in flight");
        }
    }
}
