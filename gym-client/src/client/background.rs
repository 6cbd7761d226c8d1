//! Calls that outlive their caller.

use parking_lot::Mutex;

use tokio::runtime::Handle;
use tokio::task::JoinSet;

/// Maximum number of background tasks of one client, equal to the number of calls that a server queues.
const BACKGROUND_MAX: usize = 16_384;

/// The tasks of a client. Dropping it aborts them.
#[derive(Debug, Default)]
pub(super) struct BackgroundTasks(Mutex<JoinSet<()>>);

impl BackgroundTasks {
    /// Starts a task, unless too many run.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut tasks = self.0.lock();
        while tasks.try_join_next().is_some() {}
        if tasks.len() < BACKGROUND_MAX {
            tasks.spawn_on(task, &runtime);
        } else {
            drop(tasks);
            tracing::warn!(limit = BACKGROUND_MAX, "calls in the background were dropped: too many are in flight");
        }
    }
}
