//! The executor of a blocking worker: a thread that creates the worker, runs its calls and drops it, so the worker need not be
//! `Send`.
//!
//! A blocked thread cannot be ended, only abandoned: its callers are notified that the worker has ended, and the thread exits
//! after its current call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::base::error::{Error, Result};
use crate::group::worker::host::call::{QueueItem, QueuedCall};
use crate::group::worker::host::executor::{CurrentCaller, Executor, WorkerSetup, panic_text};
use crate::group::worker::host::queue::QueueReceiver;
use crate::group::worker::{Entry, Worker};

/// Starts the thread and waits until the worker is created.
pub(crate) fn launch<W: Worker>(setup: WorkerSetup<W>) -> BoxFuture<'static, Result<Executor>> {
    let WorkerSetup { env, init, entries, queue, .. } = setup;
    Box::pin(async move {
        let (created, creation) = oneshot::channel();
        let (alive, ended) = oneshot::channel::<()>();
        let (runtime, name) = (Handle::current(), format!("{}-{}", env.group, env.rank));
        let current = CurrentCaller::default();
        let callers = current.clone();
        let work = move || {
            // Timers and tasks that the worker creates belong to the runtime of its host.
            let _runtime = runtime.enter();
            let _alive = alive;
            match caught(|| W::start(env, init)) {
                Ok(worker) => {
                    if created.send(Ok(())).is_ok() {
                        work(worker, &entries, queue, &callers);
                    }
                }
                Err(error) => drop(created.send(Err(error))),
            }
        };
        let spawned = thread::Builder::new().name(name).spawn(work);
        spawned.map_err(|error| Error::internal("cannot start the worker's thread").caused_by(error))?;
        creation.await.map_err(|_| Error::internal("the worker's thread ended while it started"))??;
        Ok(Executor::Thread(ended, current))
    })
}

fn work<W: Worker>(mut worker: W, entries: &[Entry<W>], mut queue: QueueReceiver<QueueItem>, current: &CurrentCaller) {
    while let Some(QueueItem::Call(call)) = queue.blocking_next() {
        run(&mut worker, entries, call, current);
    }
}

fn run<W: Worker>(worker: &mut W, entries: &[Entry<W>], call: QueuedCall, current: &CurrentCaller) {
    let Entry::Blocking(handle) = entries[call.method()] else {
        unreachable!("a worker with async methods has the other executor")
    };
    if let Some((started, context, message)) = call.start()
        && current.set(started.caller(&context), started.stats())
    {
        let result = caught(|| handle(worker, &context, message));
        current.clear();
        started.finish(result);
    }
}

/// Converts a panic to an error; the worker survives. Repairing state that a method left half changed is up to the worker, as
/// after any error.
fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(Error::internal(format!("the worker panicked: {}", panic_text(&*panic)))))
}
