//! Calls of a group with `async_communication`: they start when they are submitted, and end whether or not a caller waits for them.
//!
//! Nobody may be waiting when such a call fails, so its error is kept until a flush returns it.

use std::fmt;
use std::sync::Arc;

use gym_core::message::CallContext;
use gym_core::{Code, Error, Execution, Result};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;

use crate::call::GroupError;

/// Maximum submitted calls of a group that have not ended: the number of calls that a rank admits by default.
const CALLS_MAX: usize = 1_024;
/// Maximum errors that are kept for a flush; further ones are counted.
const ERRORS_KEPT: usize = 8;

/// The submitted calls of one group. Dropping it cancels them.
#[derive(Default)]
pub struct Backlog {
    state: Mutex<BacklogState>,
    /// Notified when a call has ended.
    ended: Notify,
}

#[derive(Default)]
struct BacklogState {
    running: usize,
    tasks: JoinSet<()>,
    /// Resolves when the requests of the last submitted call have been sent.
    last_sent: Option<oneshot::Receiver<()>>,
    errors: Vec<GroupError>,
    errors_left_out: usize,
}

impl Backlog {
    /// Runs a call. `call` receives what to wait for before it sends, and what to notify when it has sent.
    pub(super) fn spawn<Fut>(
        self: &Arc<Self>,
        call: impl FnOnce(Option<oneshot::Receiver<()>>, oneshot::Sender<()>) -> Fut,
    ) -> Result<()>
    where
        Fut: Future<Output = ()> + Send + 'static,
    {
        let mut state = self.state.lock();
        while state.tasks.try_join_next().is_some() {}
        if state.running >= CALLS_MAX {
            let text = format!("{CALLS_MAX} submitted calls have not ended; wait for some, or call `flush`");
            return Err(Error::not_started(Code::ResourceExhausted, text));
        }
        state.running += 1;
        let (sent, next) = oneshot::channel();
        let before = state.last_sent.replace(next);
        let call = call(before, sent);
        // A task that held the backlog would keep it alive after its group.
        let running = Running(Arc::downgrade(self));
        state.tasks.spawn(async move {
            let _running = running;
            call.await;
        });
        Ok(())
    }

    /// Keeps the error of a call whose caller has left.
    pub(super) fn keep(&self, error: GroupError) {
        tracing::warn!(%error, "a submitted call failed, and nobody waits for it");
        let mut state = self.state.lock();
        if state.errors.len() < ERRORS_KEPT {
            state.errors.push(error);
        } else {
            state.errors_left_out += 1;
        }
    }

    /// Waits until every submitted call has ended, and returns the errors that no caller has received.
    pub(super) async fn flush(&self, cx: &CallContext) -> Result<()> {
        let all_ended = async {
            loop {
                let ended = self.ended.notified();
                if self.state.lock().running == 0 {
                    return Ok(());
                }
                ended.await;
            }
        };
        cx.bound(Execution::Unknown, all_ended).await?;
        let (errors, left_out) = {
            let mut state = self.state.lock();
            (std::mem::take(&mut state.errors), std::mem::take(&mut state.errors_left_out))
        };
        let Some(first) = errors.first() else { return Ok(()) };
        let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
        let count = errors.len() + left_out;
        let text = format!("{count} submitted calls failed: {}", texts.join("; "));
        Err(Error::new(first.cause().code(), first.execution(), text))
    }
}

/// A submitted call until it has ended.
struct Running(std::sync::Weak<Backlog>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(backlog) = self.0.upgrade() {
            backlog.state.lock().running -= 1;
            backlog.ended.notify_waiters();
        }
    }
}

impl fmt::Debug for Backlog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backlog").field("running", &self.state.lock().running).finish_non_exhaustive()
    }
}
