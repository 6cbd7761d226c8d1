//! The lane of a blocking worker: a thread of its own, where the worker is born, works and ends, so that it need not be `Send`.
//!
//! A thread that blocks cannot be ended, but given up: whoever waits for it is told that the worker has ended, and it ends by itself
//! after the call that it runs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::host::board::Board;
use crate::host::job::{Caller, Item, Job};
use crate::host::queue::Arrivals;
use crate::host::{Running, Start, panic_text};
use crate::worker::{Entry, Worker};

/// Who waits for the call that the thread runs now.
#[derive(Clone, Default)]
pub(crate) struct Desk(Arc<Mutex<Option<Caller>>>);

impl Desk {
    /// The thread is given up: `board` says so from now on.
    pub(crate) fn abandon(&self, board: &Board) {
        board.abandon();
        let caller = self.lock().take();
        if let Some(caller) = caller {
            caller.give_up();
        }
    }

    /// Puts `caller` there; false when the thread has been given up, and is to run nothing.
    fn occupy(&self, caller: Option<Caller>, board: &Board) -> bool {
        let mut desk = self.lock();
        // Under the lock: who abandons finds the caller, or this the flag.
        let wanted = !board.is_abandoned();
        if wanted {
            *desk = caller;
        }
        wanted
    }

    fn leave(&self) {
        let left = self.lock().take();
        drop(left);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Caller>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts the thread and waits until the worker is born.
pub(crate) fn launch<W: Worker>(start: Start<W>) -> BoxFuture<'static, Result<Running>> {
    let Start { env, init, entries, queue } = start;
    Box::pin(async move {
        let (born, birth) = oneshot::channel();
        let (alive, ended) = oneshot::channel::<()>();
        let (runtime, name) = (Handle::current(), format!("{}-{}", env.group, env.rank));
        let desk = Desk::default();
        let at = desk.clone();
        let work = move || {
            // Timers and tasks that the worker makes belong to the runtime of its host.
            let _runtime = runtime.enter();
            let _alive = alive;
            match caught(|| W::start(env, init)) {
                Ok(worker) => {
                    if born.send(Ok(())).is_ok() {
                        work(worker, &entries, queue, &at);
                    }
                }
                Err(error) => drop(born.send(Err(error))),
            }
        };
        let spawned = thread::Builder::new().name(name).spawn(work);
        spawned.map_err(|error| Error::internal("cannot start the worker's thread").caused_by(error))?;
        birth.await.map_err(|_| Error::internal("the worker's thread ended while it started"))??;
        Ok(Running::Thread(ended, desk))
    })
}

fn work<W: Worker>(mut worker: W, entries: &[Entry<W>], mut queue: Arrivals<Item>, desk: &Desk) {
    while let Some(Item::Call(job)) = queue.blocking_next() {
        run(&mut worker, entries, job, desk);
    }
}

fn run<W: Worker>(worker: &mut W, entries: &[Entry<W>], job: Job, desk: &Desk) {
    let Entry::Blocking(handle) = entries[job.method()] else {
        unreachable!("a worker with async methods has the other lane")
    };
    if let Some((mut begun, context, message)) = job.begin()
        && desk.occupy(begun.caller(&context), begun.board())
    {
        let result = caught(|| handle(worker, &context, message));
        desk.leave();
        begun.answer(result);
    }
}

/// After a panic the worker goes on: what it left half done is its own to mend, as for any error.
fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(Error::internal(format!("the worker panicked: {}", panic_text(&*panic)))))
}
