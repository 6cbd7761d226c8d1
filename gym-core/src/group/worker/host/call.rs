//! One call on its way through a host: the queued request, and the response for which its caller waits.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::base::cancel::CancelToken;
use crate::base::error::{Code, Error, Execution, Result};
use crate::group::worker::host::stats::{AdmissionPermit, CallStats, RunningEntry};
use crate::message::CallContext;
use crate::message::{Message, Request, Response, Status};
use crate::transport::INCARNATION_METADATA;

/// Metadata key of a call whose caller ignores the body of the reply, with the value [`REPLY_NONE`]. A replica that did the same
/// work as another rank then replies without a body.
pub const REPLY_METADATA: &str = "x-gym-reply";
/// See [`REPLY_METADATA`].
pub const REPLY_NONE: &str = "none";

/// An item of a host's queue.
pub(crate) enum QueueItem {
    Call(QueuedCall),
    /// Ends the worker: nothing after this item runs.
    Stop,
}

/// An admitted call in the queue.
pub(crate) struct QueuedCall(ReplySender);

/// A call that has started: listed as running, and counted as admitted, until it is dropped.
pub(crate) struct StartedCall {
    sender: Option<ReplySender>,
    entry: RunningEntry,
}

/// One call, shared by the future of its caller and by the executor. It holds the request on its way to the worker and the
/// response on its way back, so that a queue item is a pointer.
struct PendingCall {
    method: usize,
    name: &'static str,
    deadline: Instant,
    reply: ReplyForm,
    state: Mutex<State>,
}

struct State {
    stage: Stage,
    caller: Option<Waker>,
}

#[allow(clippy::large_enum_variant, reason = "a call has one, and each variant is used once by every call")]
enum Stage {
    /// In the queue, with its admission permit: a caller that gives up releases the permit.
    Waiting(CallContext, Message, AdmissionPermit),
    Running,
    Answered(Result<Response>),
    /// The caller has given up.
    Abandoned,
}

/// The form of reply that a caller expects.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReplyForm {
    /// For a caller in this process, which holds this host itself, so no other incarnation can reply.
    InMemory,
    Serialized,
    WithoutBody,
}

/// Creates the two ends of a call: the future of its response, and the item for the queue. With `keep_deadline`, the future ends
/// at the deadline by itself, because the worker's thread cannot.
pub(crate) fn new_call(
    request: Request,
    method: usize,
    name: &'static str,
    permit: AdmissionPermit,
    keep_deadline: bool,
) -> (BoxFuture<'static, Result<Response>>, QueuedCall) {
    let Request { context, message, .. } = request;
    let reply = match context.metadata.get(REPLY_METADATA) {
        Some(REPLY_NONE) => ReplyForm::WithoutBody,
        _ if message.head.is_lazy() => ReplyForm::InMemory,
        _ => ReplyForm::Serialized,
    };
    let cancel = CancelOnDrop(Some(context.cancel.clone()));
    let deadline = context.deadline;
    let until = keep_deadline.then(|| Box::pin(sleep_until(deadline)));
    let state = Mutex::new(State { stage: Stage::Waiting(context, message, permit), caller: None });
    let call = Arc::new(PendingCall { method, name, deadline, reply, state });
    let sender = ReplySender { call: Arc::clone(&call), open: true };
    (Box::pin(ResponseFuture { call, cancel, deadline: until }), QueuedCall(sender))
}

impl QueueItem {
    /// Returns `true` for a call that its caller cancelled while it waited.
    pub(crate) fn is_cancelled(&self) -> bool {
        matches!(self, Self::Call(call) if call.is_cancelled())
    }
}

impl QueuedCall {
    pub(crate) fn method(&self) -> usize {
        self.0.call.method
    }

    /// Returns the instant at which the caller stops waiting.
    pub(crate) fn deadline(&self) -> Instant {
        self.0.call.deadline
    }

    /// Returns `true` if the caller cancelled the call while it waited.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancel_token().is_none_or(|cancel| cancel.is_cancelled())
    }

    /// Returns a token that fires when the caller cancels the waiting call; `None` if it already has.
    pub(crate) fn cancel_token(&self) -> Option<CancelToken> {
        match &self.0.call.state.lock().stage {
            Stage::Waiting(context, ..) => Some(context.cancel.clone()),
            _ => None,
        }
    }

    /// Starts the call, unless it was cancelled or its deadline has passed.
    pub(crate) fn start(self) -> Option<(StartedCall, CallContext, Message)> {
        let sender = self.0;
        let (mut context, message, permit) = sender.call.take_request()?;
        if permit.stats().is_abandoned() {
            return None;
        }
        let now = Instant::now();
        if let Err(error) = context.check_at(now) {
            sender.send(Err(error), permit.stats());
            // The executor need not watch the queue for this call any longer.
            context.cancel.cancel();
            return None;
        }
        let (progress, entry) = permit.run(sender.call.name, now);
        context.progress = progress;
        Some((StartedCall { sender: Some(sender), entry }, context, message))
    }
}

impl PendingCall {
    /// Takes the request, if the caller still waits for a response.
    fn take_request(&self) -> Option<(CallContext, Message, AdmissionPermit)> {
        let mut state = self.state.lock();
        match std::mem::replace(&mut state.stage, Stage::Running) {
            Stage::Waiting(context, message, permit) => Some((context, message, permit)),
            other => {
                state.stage = other;
                None
            }
        }
    }

    fn put_response(&self, response: Result<Response>) {
        let mut state = self.state.lock();
        let unread = match state.stage {
            Stage::Abandoned => return,
            Stage::Running => {
                state.stage = Stage::Answered(response);
                None
            }
            Stage::Waiting(..) | Stage::Answered(_) => {
                Some(std::mem::replace(&mut state.stage, Stage::Answered(response)))
            }
        };
        let caller = state.caller.take();
        drop(state);
        if let Some(caller) = caller {
            caller.wake();
        }
        drop(unread);
    }
}

/// Sends the reply of one call. Dropped without a reply, it reports that the worker has ended.
struct ReplySender {
    call: Arc<PendingCall>,
    open: bool,
}

impl ReplySender {
    fn send(mut self, result: Result<Message>, stats: &CallStats) {
        if stats.is_abandoned() {
            return;
        }
        let reply = self.call.reply;
        let response = result.map(|message| match reply {
            ReplyForm::InMemory => Response::new(Status::OK, message),
            ReplyForm::Serialized | ReplyForm::WithoutBody => {
                let message = if reply == ReplyForm::WithoutBody { Message::default() } else { message };
                let mut response = Response::new(Status::OK, message);
                response.metadata.push(INCARNATION_METADATA, stats.incarnation().to_string());
                response
            }
        });
        let about = |error: Error| match error.subject() {
            "" => error.about(format!("rank {}", stats.rank())),
            _ => error,
        };
        self.open = false;
        self.call.put_response(response.map_err(about));
    }
}

impl Drop for ReplySender {
    fn drop(&mut self) {
        if self.open {
            self.call.put_response(Err(ended()));
        }
    }
}

/// The caller of a running call, used by an executor that abandons the call.
pub(crate) struct Caller {
    call: Arc<PendingCall>,
    cancel: CancelToken,
}

impl Caller {
    /// Reports to the caller that the worker has ended, and cancels the call.
    pub(crate) fn abandon(self) {
        self.call.put_response(Err(ended()));
        self.cancel.cancel();
    }
}

fn ended() -> Error {
    Error::unknown(Code::Unavailable, "the worker ended before it answered")
}

impl StartedCall {
    /// Returns the caller of the call, which was started with `context`.
    pub(crate) fn caller(&self, context: &CallContext) -> Option<Caller> {
        let call = Arc::clone(&self.sender.as_ref()?.call);
        Some(Caller { call, cancel: context.cancel.clone() })
    }

    /// Returns the statistics that count the call.
    pub(crate) fn stats(&self) -> &CallStats {
        self.entry.stats()
    }

    /// Replies to the call and ends it; only the first reply counts. The call is no longer admitted when its caller has the reply, and may send the next one.
    pub(crate) fn finish(mut self, result: Result<Message>) {
        let Some(sender) = self.sender.take() else { return };
        self.entry.count(result.is_ok());
        let stats = self.entry.end();
        sender.send(result, &stats);
    }

    /// Replies to the call, which goes on; only the first reply counts.
    pub(crate) fn reply(&mut self, result: Result<Message>) {
        if let Some(sender) = self.sender.take() {
            self.entry.count(result.is_ok());
            sender.send(result, self.entry.stats());
        }
    }
}

/// The caller's end. Dropping it, or the deadline, fires the call's token, which cancels the handler.
struct ResponseFuture {
    call: Arc<PendingCall>,
    cancel: CancelOnDrop,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl ResponseFuture {
    /// Stops waiting: a queued call releases its permit at once. Returns what the missing response means for the call.
    fn abandon(&mut self) -> Execution {
        let mut state = self.call.state.lock();
        let unwanted = std::mem::replace(&mut state.stage, Stage::Abandoned);
        let caller = state.caller.take();
        drop(state);
        drop(caller);
        if matches!(unwanted, Stage::Waiting(..)) { Execution::NotStarted } else { Execution::Unknown }
    }

    fn poll_response(&self, cx: &mut Context<'_>) -> Poll<Result<Response>> {
        let mut state = self.call.state.lock();
        match std::mem::replace(&mut state.stage, Stage::Abandoned) {
            Stage::Answered(response) => Poll::Ready(response),
            stage => {
                state.stage = stage;
                let waker = state.caller.replace(cx.waker().clone());
                drop(state);
                drop(waker);
                Poll::Pending
            }
        }
    }
}

impl Future for ResponseFuture {
    type Output = Result<Response>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(response) = self.poll_response(cx) {
            self.cancel.0 = None;
            return Poll::Ready(response);
        }
        let passed = self.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(cx).is_ready());
        if !passed {
            return Poll::Pending;
        }
        let execution = self.abandon();
        self.cancel.fire();
        Poll::Ready(Err(Error::new(Code::DeadlineExceeded, execution, "the deadline has passed")))
    }
}

impl Drop for ResponseFuture {
    fn drop(&mut self) {
        if self.cancel.0.is_some() {
            self.abandon();
        }
    }
}

struct CancelOnDrop(Option<CancelToken>);

impl CancelOnDrop {
    fn fire(&mut self) {
        if let Some(cancel) = self.0.take() {
            cancel.cancel();
        }
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.fire();
    }
}
