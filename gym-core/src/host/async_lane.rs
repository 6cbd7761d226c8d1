//! The lane of an async worker: one task that takes calls in order. Exclusive ones run in it; shared ones run beside it, and an
//! exclusive one waits for them. So a call's place is the queue's, and no lock is held by anybody.

use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::task::JoinSet;
use tokio::time::sleep_until;

use crate::context::CallContext;
use crate::error::{Code, Error, Execution, Result};
use crate::host::job::Begun;
use crate::host::line::Line;
use crate::host::{Running, Start, panic_text};
use crate::message::Message;
use crate::worker::{Entry, Worker};

/// Starts the worker where blocking is allowed (models take minutes to load), then its task.
pub(crate) fn launch<W: Worker + Send + Sync>(start: Start<W>) -> BoxFuture<'static, Result<Running>> {
    Box::pin(async move {
        let Start { env, init, entries, queue } = start;
        let mut line = Line::new(queue);
        let born = tokio::task::spawn_blocking(move || W::start(env, init)).await;
        let worker = born.map_err(|ended| match ended.try_into_panic() {
            Ok(panic) => Error::internal(format!("panicked: {}", panic_text(&*panic))),
            Err(_) => Error::not_started(Code::Unavailable, "the runtime is shutting down"),
        })??;
        Ok(Running::Task(tokio::spawn(async move {
            let (mut worker, mut shared) = (Arc::new(worker), JoinSet::new());
            while let Some(job) = line.next().await {
                // Not even asked for when there is none, as on most lanes there never is.
                while !shared.is_empty() && shared.try_join_next().is_some() {}
                match entries[job.method()] {
                    Entry::Exclusive(handle) => {
                        if !shared.is_empty()
                            && let Some(left) = job.caller_left().filter(|left| !left.is_cancelled())
                        {
                            line.put_back(job);
                            let free = async {
                                tokio::select! {
                                    biased;
                                    () = async { while shared.join_next().await.is_some() {} } => {}
                                    // Those behind it need not wait any more.
                                    () = left.cancelled() => {}
                                }
                            };
                            line.until(free).await;
                            continue;
                        }
                        if let Some((begun, context, message)) = job.begin() {
                            let worker = Arc::get_mut(&mut worker).expect("shared calls have ended and hold nothing");
                            line.until(exclusive(begun, &context, handle(worker, &context, message))).await;
                        }
                    }
                    Entry::Shared(handle) => {
                        if let Some((begun, context, message)) = job.begin() {
                            let call = handle(Arc::clone(&worker), context.clone(), message);
                            shared.spawn(run_shared(begun, context, call));
                        }
                    }
                    Entry::Blocking(_) => unreachable!("a worker with blocking methods has the other lane"),
                }
            }
            while shared.join_next().await.is_some() {}
        })))
    })
}

/// To its end, whatever the caller does; at the deadline the handler is told and the caller answered.
async fn exclusive(mut begun: Begun, context: &CallContext, call: BoxFuture<'_, Result<Message>>) {
    let mut call = pin!(AssertUnwindSafe(call).catch_unwind());
    let in_time = tokio::select! {
        biased;
        result = &mut call => Some(result),
        // In a block, so that a timer is made only for a handler that waits.
        () = async { sleep_until(context.deadline).await } => None,
    };
    let result = match in_time {
        Some(result) => result,
        None => {
            context.cancel.cancel();
            begun.answer(Err(deadline_passed()));
            call.await
        }
    };
    begun.answer(result.unwrap_or_else(|panic| Err(panicked(&*panic))));
}

/// Until its end, the deadline, or its caller's leave.
async fn run_shared(mut begun: Begun, context: CallContext, call: BoxFuture<'static, Result<Message>>) {
    let result = tokio::select! {
        biased;
        result = AssertUnwindSafe(call).catch_unwind() => result.unwrap_or_else(|panic| Err(panicked(&*panic))),
        () = context.cancel.cancelled() => Err(Error::unknown(Code::Cancelled, "the caller has left")),
        () = async { sleep_until(context.deadline).await } => Err(deadline_passed()),
    };
    begun.answer(result);
}

fn deadline_passed() -> Error {
    Error::new(Code::DeadlineExceeded, Execution::Unknown, "the deadline has passed")
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> Error {
    Error::internal(format!("the worker panicked: {}", panic_text(panic)))
}
