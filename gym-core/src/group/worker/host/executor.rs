//! Executors of a worker: a task, or a dedicated thread.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle};

use crate::base::error::Result;
use crate::group::worker::host::call::{Caller, QueueItem};
use crate::group::worker::host::queue::QueueReceiver;
use crate::group::worker::host::stats::CallStats;
use crate::group::worker::{Entry, Worker, WorkerEnv};

/// The kind of executor of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExecutorKind {
    Async,
    Blocking,
}

/// Data with which an executor starts.
pub(crate) struct WorkerSetup<W: Worker> {
    pub(crate) env: WorkerEnv,
    pub(crate) init: W::Init,
    pub(crate) entries: Vec<Entry<W>>,
    pub(crate) queue: QueueReceiver<QueueItem>,
    /// As [`HostOptions::starts_in_task`](crate::group::worker::host::HostOptions::starts_in_task).
    pub(crate) in_task: bool,
}

/// Starts the executor of a worker. Chosen where the trait bounds of the worker are known.
pub(crate) struct Launcher<W: Worker> {
    pub(crate) kind: ExecutorKind,
    pub(crate) start: fn(WorkerSetup<W>) -> BoxFuture<'static, Result<Executor>>,
}

/// The executor of a worker.
pub(crate) enum Executor {
    Task(JoinHandle<()>),
    /// The receiver ends when the thread does. A thread cannot be ended from outside, only abandoned.
    Thread(oneshot::Receiver<()>, CurrentCaller),
}

impl Executor {
    pub(crate) fn kill_handle(&self) -> KillHandle {
        match self {
            Self::Task(task) => KillHandle::Task(task.abort_handle()),
            Self::Thread(_, current) => KillHandle::Thread(current.clone()),
        }
    }

    /// Waits until the executor has ended; returns `false` if it was aborted.
    pub(crate) async fn ended(&mut self) -> bool {
        match self {
            Self::Task(task) => !matches!(task.await, Err(error) if error.is_cancelled()),
            Self::Thread(ended, _) => {
                let _ = ended.await;
                true
            }
        }
    }
}

/// Ends an executor. Has no effect on one that has ended.
pub(crate) enum KillHandle {
    Task(AbortHandle),
    Thread(CurrentCaller),
}

/// The caller of the call that a worker's thread runs now.
#[derive(Clone, Default)]
pub(crate) struct CurrentCaller(Arc<Mutex<Option<Caller>>>);

impl CurrentCaller {
    /// Abandons the thread: marks `stats`, and reports to the current caller that the worker has ended.
    pub(crate) fn abandon(&self, stats: &CallStats) {
        stats.abandon();
        let caller = self.0.lock().take();
        if let Some(caller) = caller {
            caller.abandon();
        }
    }

    /// Sets the caller; returns `false` if the thread was abandoned and must run nothing.
    pub(crate) fn set(&self, caller: Option<Caller>, stats: &CallStats) -> bool {
        let mut current = self.0.lock();
        // Checked under the lock: either `abandon` finds the caller, or this finds the mark.
        let wanted = !stats.is_abandoned();
        if wanted {
            *current = caller;
        }
        wanted
    }

    pub(crate) fn clear(&self) {
        let caller = self.0.lock().take();
        drop(caller);
    }
}

/// Returns the text of a panic.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&'static str>().copied()).unwrap_or("not a text")
}
