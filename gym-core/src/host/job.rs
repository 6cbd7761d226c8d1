//! One call on its way through a host: what waits in the queue, and the answer that its caller waits for.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio::time::{Sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::channel::INCARNATION_METADATA;
use crate::context::CallContext;
use crate::error::{Code, Error, Result};
use crate::host::board::{Place, Shown};
use crate::host::{REPLY_METADATA, REPLY_NONE};
use crate::message::{Message, Request, Response, Status};

/// What is in a host's queue.
#[allow(clippy::large_enum_variant, reason = "all but one item of a queue's life are calls")]
pub(crate) enum Item {
    Call(Job),
    /// Nothing after this is run.
    Stop,
}

/// A call that has been let in.
pub(crate) struct Job {
    pub(crate) method: usize,
    name: &'static str,
    context: CallContext,
    message: Message,
    outlet: Outlet,
    place: Place,
}

/// A call that runs: on the board, and in its place, until it is dropped.
pub(crate) struct Begun {
    outlet: Option<Outlet>,
    shown: Shown,
    place: Place,
}

/// Where the answer goes.
pub(crate) struct Outlet {
    answer: oneshot::Sender<Result<Response>>,
    /// Neither body nor incarnation are asked for.
    reply: Reply,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reply {
    /// To a caller in this process, which holds this very host: no other life can answer it.
    InMemory,
    Written,
    WithoutBody,
}

/// The two ends of a call. `keep_deadline`: the answer ends at the deadline by itself, because the worker's thread cannot.
pub(crate) fn answer_and_job(
    request: Request,
    method: usize,
    name: &'static str,
    place: Place,
    keep_deadline: bool,
) -> (BoxFuture<'static, Result<Response>>, Job) {
    let Request { context, message, .. } = request;
    let reply = match context.metadata.get(REPLY_METADATA) {
        Some(REPLY_NONE) => Reply::WithoutBody,
        _ if message.head.is_unwritten() => Reply::InMemory,
        _ => Reply::Written,
    };
    let (sender, receiver) = oneshot::channel();
    let answer = Answer {
        receiver,
        told: CallerLeft(Some(context.cancel.clone())),
        deadline: keep_deadline.then(|| Box::pin(sleep_until(context.deadline))),
    };
    let outlet = Outlet { answer: sender, reply };
    (Box::pin(answer), Job { method, name, context, message, outlet, place })
}

impl Job {
    /// Starts it, unless its caller has left or its deadline has passed.
    pub(crate) fn begin(self) -> Option<(Begun, CallContext, Message)> {
        let Self { name, mut context, message, outlet, place, .. } = self;
        if outlet.answer.is_closed() || place.board().is_abandoned() {
            return None;
        }
        if let Err(error) = context.check() {
            outlet.send(Err(error), &place);
            return None;
        }
        let (progress, shown) = place.show(name);
        context.progress = progress;
        Some((Begun { outlet: Some(outlet), shown, place }, context, message))
    }
}

impl Outlet {
    fn send(self, result: Result<Message>, place: &Place) {
        let board = place.board();
        if board.is_abandoned() {
            return;
        }
        let response = result.map(|message| match self.reply {
            Reply::InMemory => Response::new(Status::OK, message),
            Reply::Written | Reply::WithoutBody => {
                let message = if self.reply == Reply::WithoutBody { Message::default() } else { message };
                let mut response = Response::new(Status::OK, message);
                response.metadata.push(INCARNATION_METADATA, board.incarnation().to_string());
                response
            }
        });
        let about = |error: Error| match error.subject() {
            "" => error.about(format!("rank {}", board.rank())),
            _ => error,
        };
        let _ = self.answer.send(response.map_err(about));
    }
}

impl Begun {
    /// Answers; only the first answer counts.
    pub(crate) fn answer(&mut self, result: Result<Message>) {
        if let Some(outlet) = self.outlet.take() {
            self.shown.count(result.is_ok());
            outlet.send(result, &self.place);
        }
    }
}

/// The caller's end. Dropping it, and the deadline, fire the call's token: the handler is told.
struct Answer {
    receiver: oneshot::Receiver<Result<Response>>,
    told: CallerLeft,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Future for Answer {
    type Output = Result<Response>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(answer) = Pin::new(&mut self.receiver).poll(cx) {
            self.told.0 = None;
            let ended = || Error::unknown(Code::Unavailable, "the worker ended before it answered");
            return Poll::Ready(answer.unwrap_or_else(|_| Err(ended())));
        }
        let passed = self.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(cx).is_ready());
        if !passed {
            return Poll::Pending;
        }
        self.told.fire();
        Poll::Ready(Err(Error::unknown(Code::DeadlineExceeded, "the deadline has passed")))
    }
}

struct CallerLeft(Option<CancellationToken>);

impl CallerLeft {
    fn fire(&mut self) {
        if let Some(cancel) = self.0.take() {
            cancel.cancel();
        }
    }
}

impl Drop for CallerLeft {
    fn drop(&mut self) {
        self.fire();
    }
}
