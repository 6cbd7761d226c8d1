//! The executor of an async worker: one task that runs calls in order.
//!
//! Exclusive calls run in the task. Shared calls run concurrently, and an exclusive call waits for them. A call's position is its
//! position in the queue, and no lock is held while a call runs.

use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::task::JoinSet;
use tokio::time::sleep_until;

use crate::base::error::{Code, Error, Execution, Result};
use crate::base::progress::CallProgress;
use crate::group::worker::host::call::StartedCall;
use crate::group::worker::host::call_queue::CallQueue;
use crate::group::worker::host::executor::{Executor, WorkerSetup, panic_text};
use crate::group::worker::{Entry, Worker};
use crate::message::CallContext;
use crate::message::Message;

/// Creates the worker where blocking is allowed (models take minutes to load), then starts its task.
pub(crate) fn launch<W: Worker + Send + Sync>(setup: WorkerSetup<W>) -> BoxFuture<'static, Result<Executor>> {
    Box::pin(async move {
        let WorkerSetup { env, init, entries, queue, in_task } = setup;
        let mut queue = CallQueue::new(queue);
        let start = move || W::start(env, init);
        // In a task of its own, which catches a panic.
        let created = if in_task { tokio::spawn(async { start() }) } else { tokio::task::spawn_blocking(start) }.await;
        let worker = created.map_err(|ended| match ended.try_into_panic() {
            Ok(panic) => Error::internal(format!("panicked: {}", panic_text(&*panic))),
            Err(_) => Error::not_started(Code::Unavailable, "the runtime is shutting down"),
        })??;
        Ok(Executor::Task(tokio::spawn(async move {
            let (mut worker, mut shared) = (Arc::new(worker), JoinSet::new());
            while let Some(call) = queue.next().await {
                // Skipped without shared calls; most workers never have any.
                while !shared.is_empty() && shared.try_join_next().is_some() {}
                match entries[call.method()] {
                    Entry::Exclusive(handle) => {
                        if !shared.is_empty()
                            && let Some(cancel) = call.cancel_token().filter(|cancel| !cancel.is_cancelled())
                        {
                            queue.put_back(call);
                            let free = async {
                                tokio::select! {
                                    biased;
                                    () = async { while shared.join_next().await.is_some() {} } => {}
                                    // The calls behind a cancelled one need not wait any longer.
                                    () = cancel.cancelled() => {}
                                }
                            };
                            queue.until(free).await;
                            continue;
                        }
                        if let Some((started, context, message)) = call.start() {
                            let worker = Arc::get_mut(&mut worker).expect("shared calls have ended and hold nothing");
                            queue.until(exclusive(started, &context, handle(worker, &context, message))).await;
                        }
                    }
                    Entry::Shared(handle) => {
                        if let Some((started, context, message)) = call.start() {
                            let call = handle(Arc::clone(&worker), context.clone(), message);
                            shared.spawn(run_shared(started, context, call));
                        }
                    }
                    Entry::Blocking(_) => unreachable!("a worker with blocking methods has the other executor"),
                }
            }
            while shared.join_next().await.is_some() {}
        })))
    })
}

/// A call that counts its polls, which tells whether it blocks the thread that polls it.
struct CountsPolls<'p, F> {
    call: F,
    progress: &'p CallProgress,
}

impl<F: Future + Unpin> Future for CountsPolls<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.progress.count_poll();
        let polled = Pin::new(&mut self.call).poll(cx);
        self.progress.count_poll();
        polled
    }
}

/// Runs an exclusive call to its end, even if it is cancelled. At the deadline, cancels the handler and answers the caller.
async fn exclusive(mut started: StartedCall, context: &CallContext, call: BoxFuture<'_, Result<Message>>) {
    let call = AssertUnwindSafe(call).catch_unwind();
    let mut call = pin!(CountsPolls { call, progress: &context.progress });
    let in_time = tokio::select! {
        biased;
        result = &mut call => Some(result),
        // In a block, so that a timer is created only for a handler that waits.
        () = async { sleep_until(context.deadline).await } => None,
    };
    let result = match in_time {
        Some(result) => result,
        None => {
            context.cancel.cancel();
            started.reply(Err(deadline_passed()));
            call.await
        }
    };
    started.finish(result.unwrap_or_else(|panic| Err(panicked(&*panic))));
}

/// Runs a shared call until it ends, its deadline passes, or it is cancelled.
async fn run_shared(started: StartedCall, context: CallContext, call: BoxFuture<'static, Result<Message>>) {
    let call = CountsPolls { call: AssertUnwindSafe(call).catch_unwind(), progress: &context.progress };
    let result = tokio::select! {
        biased;
        result = call => result.unwrap_or_else(|panic| Err(panicked(&*panic))),
        () = context.cancel.cancelled() => Err(Error::unknown(Code::Cancelled, "the caller has left")),
        () = async { sleep_until(context.deadline).await } => Err(deadline_passed()),
    };
    started.finish(result);
}

fn deadline_passed() -> Error {
    Error::new(Code::DeadlineExceeded, Execution::Unknown, "the deadline has passed")
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> Error {
    Error::internal(format!("the worker panicked: {}", panic_text(panic)))
}
