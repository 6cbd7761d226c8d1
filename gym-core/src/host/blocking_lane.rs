//! The lane of a blocking worker: a thread of its own, where the worker is born, works and ends, so that it need not be `Send`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::host::job::{Item, Job};
use crate::host::queue::Arrivals;
use crate::host::{Running, Start, panic_text};
use crate::worker::{Entry, Worker};

/// Starts the thread and waits until the worker is born.
pub(crate) fn launch<W: Worker>(start: Start<W>) -> BoxFuture<'static, Result<Running>> {
    let Start { env, init, entries, queue } = start;
    Box::pin(async move {
        let (born, birth) = oneshot::channel();
        let (alive, ended) = oneshot::channel::<()>();
        let (runtime, name) = (Handle::current(), format!("{}-{}", env.group, env.rank));
        let work = move || {
            // Timers and tasks that the worker makes belong to the runtime of its host.
            let _runtime = runtime.enter();
            let _alive = alive;
            match caught(|| W::start(env, init)) {
                Ok(worker) => {
                    if born.send(Ok(())).is_ok() {
                        work(worker, &entries, queue);
                    }
                }
                Err(error) => drop(born.send(Err(error))),
            }
        };
        let spawned = thread::Builder::new().name(name).spawn(work);
        spawned.map_err(|error| Error::internal("cannot start the worker's thread").caused_by(error))?;
        birth.await.map_err(|_| Error::internal("the worker's thread ended while it started"))??;
        Ok(Running::Thread(ended))
    })
}

fn work<W: Worker>(mut worker: W, entries: &[Entry<W>], mut queue: Arrivals<Item>) {
    while let Item::Call(job) = queue.blocking_next() {
        run(&mut worker, entries, job);
    }
}

fn run<W: Worker>(worker: &mut W, entries: &[Entry<W>], job: Job) {
    let Entry::Blocking(handle) = entries[job.method()] else {
        unreachable!("a worker with async methods has the other lane")
    };
    if let Some((mut begun, context, message)) = job.begin() {
        begun.answer(caught(|| handle(worker, &context, message)));
    }
}

/// After a panic the worker goes on: what it left half done is its own to mend, as for any error.
fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(Error::internal(format!("the worker panicked: {}", panic_text(&*panic)))))
}
