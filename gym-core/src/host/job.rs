//! One call on its way through a host: what waits in the queue, and the answer that its caller waits for.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_util::future::BoxFuture;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::cancel::CancelToken;
use crate::channel::INCARNATION_METADATA;
use crate::context::CallContext;
use crate::error::{Code, Error, Execution, Result};
use crate::host::board::{Board, Place, Shown};
use crate::host::{REPLY_METADATA, REPLY_NONE};
use crate::message::{Message, Request, Response, Status};

/// What is in a host's queue.
pub(crate) enum Item {
    Call(Job),
    /// Nothing after this is run.
    Stop,
}

/// A call that has been let in.
pub(crate) struct Job(Outlet);

/// A call that runs: on the board, and in its place, until it is dropped.
pub(crate) struct Begun {
    outlet: Option<Outlet>,
    shown: Shown,
}

/// One call, held by who waits for its answer and by who runs it: the request lies here on its way there, and the answer on its
/// way back, so that what is queued is a pointer.
struct Ticket {
    method: usize,
    name: &'static str,
    deadline: Instant,
    reply: Reply,
    state: Mutex<State>,
}

struct State {
    stage: Stage,
    caller: Option<Waker>,
}

#[allow(clippy::large_enum_variant, reason = "it lies in one place, and each variant is used once by every call")]
enum Stage {
    /// In line, with the place that it has among the host's calls: who leaves takes it along.
    Waiting(CallContext, Message, Place),
    Running,
    Answered(Result<Response>),
    /// Nobody waits for an answer.
    Left,
}

/// What a caller asks of the answer.
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
    let told = CallerLeft(Some(context.cancel.clone()));
    let deadline = context.deadline;
    let until = keep_deadline.then(|| Box::pin(sleep_until(deadline)));
    let state = Mutex::new(State { stage: Stage::Waiting(context, message, place), caller: None });
    let ticket = Arc::new(Ticket { method, name, deadline, reply, state });
    let outlet = Outlet { ticket: Arc::clone(&ticket), open: true };
    (Box::pin(Answer { ticket, told, deadline: until }), Job(outlet))
}

impl Item {
    /// Whether it is a call whose caller has left the line.
    pub(crate) fn has_left(&self) -> bool {
        matches!(self, Self::Call(job) if job.has_left())
    }
}

impl Job {
    pub(crate) fn method(&self) -> usize {
        self.0.ticket.method
    }

    /// When its caller stops waiting.
    pub(crate) fn deadline(&self) -> Instant {
        self.0.ticket.deadline
    }

    /// Whether its caller has left the line.
    pub(crate) fn has_left(&self) -> bool {
        self.caller_left().is_none_or(|left| left.is_cancelled())
    }

    /// Fires when its caller leaves the line; `None` when it has.
    pub(crate) fn caller_left(&self) -> Option<CancelToken> {
        match &self.0.ticket.state().stage {
            Stage::Waiting(context, ..) => Some(context.cancel.clone()),
            _ => None,
        }
    }

    /// Starts it, unless its caller has left or its deadline has passed.
    pub(crate) fn begin(self) -> Option<(Begun, CallContext, Message)> {
        let outlet = self.0;
        let (mut context, message, place) = outlet.ticket.take_request()?;
        if place.board().is_abandoned() {
            return None;
        }
        let now = Instant::now();
        if let Err(error) = context.check_at(now) {
            outlet.send(Err(error), place.board());
            // Whoever looks at the line for it need not.
            context.cancel.cancel();
            return None;
        }
        let (progress, shown) = place.show(outlet.ticket.name, now);
        context.progress = progress;
        Some((Begun { outlet: Some(outlet), shown }, context, message))
    }
}

impl Ticket {
    /// What is asked for, if somebody still waits for it.
    fn take_request(&self) -> Option<(CallContext, Message, Place)> {
        let mut state = self.state();
        match std::mem::replace(&mut state.stage, Stage::Running) {
            Stage::Waiting(context, message, place) => Some((context, message, place)),
            other => {
                state.stage = other;
                None
            }
        }
    }

    fn put_answer(&self, answer: Result<Response>) {
        let mut state = self.state();
        let unread = match state.stage {
            Stage::Left => return,
            Stage::Running => {
                state.stage = Stage::Answered(answer);
                None
            }
            Stage::Waiting(..) | Stage::Answered(_) => {
                Some(std::mem::replace(&mut state.stage, Stage::Answered(answer)))
            }
        };
        let caller = state.caller.take();
        drop(state);
        if let Some(caller) = caller {
            caller.wake();
        }
        drop(unread);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the answer goes. Dropped without one, it says that the worker has ended.
struct Outlet {
    ticket: Arc<Ticket>,
    open: bool,
}

impl Outlet {
    fn send(mut self, result: Result<Message>, board: &Board) {
        if board.is_abandoned() {
            return;
        }
        let reply = self.ticket.reply;
        let response = result.map(|message| match reply {
            Reply::InMemory => Response::new(Status::OK, message),
            Reply::Written | Reply::WithoutBody => {
                let message = if reply == Reply::WithoutBody { Message::default() } else { message };
                let mut response = Response::new(Status::OK, message);
                response.metadata.push(INCARNATION_METADATA, board.incarnation().to_string());
                response
            }
        });
        let about = |error: Error| match error.subject() {
            "" => error.about(format!("rank {}", board.rank())),
            _ => error,
        };
        self.open = false;
        self.ticket.put_answer(response.map_err(about));
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        if self.open {
            self.ticket.put_answer(Err(ended()));
        }
    }
}

/// The caller of a call that runs, for who gives the call up.
pub(crate) struct Caller {
    ticket: Arc<Ticket>,
    cancel: CancelToken,
}

impl Caller {
    /// Tells the caller that the worker has ended, and the worker that nobody waits.
    pub(crate) fn give_up(self) {
        self.ticket.put_answer(Err(ended()));
        self.cancel.cancel();
    }
}

fn ended() -> Error {
    Error::unknown(Code::Unavailable, "the worker ended before it answered")
}

impl Begun {
    /// Who waits for the call, which was begun with `context`.
    pub(crate) fn caller(&self, context: &CallContext) -> Option<Caller> {
        let ticket = Arc::clone(&self.outlet.as_ref()?.ticket);
        Some(Caller { ticket, cancel: context.cancel.clone() })
    }

    /// Where the call is counted.
    pub(crate) fn board(&self) -> &Board {
        self.shown.board()
    }

    /// Answers; only the first answer counts.
    pub(crate) fn answer(&mut self, result: Result<Message>) {
        if let Some(outlet) = self.outlet.take() {
            self.shown.count(result.is_ok());
            outlet.send(result, self.shown.board());
        }
    }
}

/// The caller's end. Dropping it, and the deadline, fire the call's token: the handler is told.
struct Answer {
    ticket: Arc<Ticket>,
    told: CallerLeft,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Answer {
    /// Waits no longer: what is in line gives its place up at once. Returns what a call without an answer means then.
    fn leave(&mut self) -> Execution {
        let mut state = self.ticket.state();
        let unwanted = std::mem::replace(&mut state.stage, Stage::Left);
        let caller = state.caller.take();
        drop(state);
        drop(caller);
        if matches!(unwanted, Stage::Waiting(..)) { Execution::NotStarted } else { Execution::Unknown }
    }

    fn poll_ticket(&self, cx: &mut Context<'_>) -> Poll<Result<Response>> {
        let mut state = self.ticket.state();
        match std::mem::replace(&mut state.stage, Stage::Left) {
            Stage::Answered(answer) => Poll::Ready(answer),
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

impl Future for Answer {
    type Output = Result<Response>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(answer) = self.poll_ticket(cx) {
            self.told.0 = None;
            return Poll::Ready(answer);
        }
        let passed = self.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(cx).is_ready());
        if !passed {
            return Poll::Pending;
        }
        let execution = self.leave();
        self.told.fire();
        Poll::Ready(Err(Error::new(Code::DeadlineExceeded, execution, "the deadline has passed")))
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if self.told.0.is_some() {
            self.leave();
        }
    }
}

struct CallerLeft(Option<CancelToken>);

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
