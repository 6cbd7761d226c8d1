//! The calls that a peer makes over one connection: which are taken in, and what runs for them.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use super::CROWD;
use super::calling::check_size;
use super::header::{HEADER_BYTES_MAX, RequestHeader, malformed, put_failed, put_response};
use super::limits::{Greeting, Limits};
use super::outbox::Outbox;
use super::room::Unread;
use crate::cancel::CancelToken;
use crate::error::{Code, Error, Result};
use crate::handler::Handler;
use crate::message::Response;
use crate::transport::PeerInfo;

/// Answers that may wait for a peer beyond twice the calls that it may have under way. Twice: a caller that cancels need not have taken
/// what was answered before. More: a transport may know later than its peer that an answer is there, by all that it has on its way.
const UNREAD_MORE: usize = 1_024;

/// The answering end of one connection. What reads for it calls `on_…`, from one place at a time.
pub struct AnsweringEnd<O> {
    outbox: O,
    ours: Limits,
    theirs: Greeting,
    handler: Arc<dyn Handler>,
    peer: PeerInfo,
    /// Calls of all connections of a listener.
    calls: Arc<Semaphore>,
    unread: Unread,
    draining: AtomicBool,
    running: Mutex<Running>,
    /// None when the connection is over.
    tasks: Mutex<Option<JoinSet<()>>>,
}

#[derive(Default)]
struct Running {
    calls: HashMap<u64, Call>,
    bytes: usize,
    last_call: u64,
}

/// A call from its first byte to its answer.
struct Call {
    bytes: usize,
    cancel: CancelToken,
    task: Option<AbortHandle>,
    _room: OwnedSemaphorePermit,
}

impl Running {
    fn remove(&mut self, call: u64) -> Option<Call> {
        let removed = self.calls.remove(&call)?;
        self.bytes -= removed.bytes;
        Some(removed)
    }
}

impl<O: Outbox> AnsweringEnd<O> {
    /// An end whose calls `handler` answers; `calls` counts those of all connections together.
    #[must_use]
    pub fn new(
        outbox: O,
        ours: Limits,
        theirs: Greeting,
        calls: Arc<Semaphore>,
        handler: Arc<dyn Handler>,
        peer: PeerInfo,
    ) -> Arc<Self> {
        Arc::new(Self {
            outbox,
            ours,
            theirs,
            handler,
            peer,
            calls,
            unread: Unread::default(),
            draining: AtomicBool::new(false),
            running: Mutex::default(),
            tasks: Mutex::new(Some(JoinSet::new())),
        })
    }

    /// What sends.
    pub fn outbox(&self) -> &O {
        &self.outbox
    }

    /// What the peer has said.
    pub fn theirs(&self) -> &Greeting {
        &self.theirs
    }

    /// A request with a message of `total` bytes begins: whether it is wanted. One without room is refused here, before
    /// anything is allocated for it; its message is to be read past.
    ///
    /// # Errors
    /// `DataLoss` when the number is not larger than all before it, `ResourceExhausted` when the peer asks on and on and takes no
    /// answers: the connection ends.
    pub fn on_opening(&self, call: u64, header: &RequestHeader, total: usize) -> Result<bool> {
        match self.admit(call, header, total)? {
            Ok(()) => Ok(true),
            Err(error) => {
                self.fail(call, &error);
                Ok(false)
            }
        }
    }

    /// A request is complete: its handler takes it before this returns, so the order of these calls is the order of arrival.
    ///
    /// To be called within the context of the tokio runtime that is to run it; a thread outside of it
    /// [enters](tokio::runtime::Handle::enter) it first.
    pub fn on_request(self: &Arc<Self>, call: u64, header: RequestHeader, head: Bytes, segments: Vec<Bytes>) {
        if let Err(error) = header.context.check() {
            if self.remove(call).is_some() {
                self.fail(call, &error);
            }
            return;
        }
        let duty = Duty {
            end: Arc::clone(self),
            call,
            reply_bytes_max: header.context.reply_bytes_max,
            cancel: header.context.cancel.clone(),
            done: false,
        };
        // Here and not in the task: the order of these calls is the order of arrival.
        let answer = self.handler.handle(header.into_request(self.peer.clone(), head, segments));
        let task = {
            let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(tasks) = tasks.as_mut() else { return };
            // Reaped as others come, so that the set holds few that are done.
            while tasks.try_join_next().is_some() {}
            tasks.spawn(duty.run(answer))
        };
        if let Some(call) = self.lock().calls.get_mut(&call) {
            call.task = Some(task);
        }
    }

    /// The caller has left.
    pub fn on_cancel(&self, call: u64) {
        if let Some(call) = self.remove(call) {
            call.cancel.cancel();
            if let Some(task) = call.task {
                task.abort();
            }
        }
    }

    /// Waits for `drain`, refuses what comes from then on, and tells the peer, which closes when its last call is answered:
    /// only the peer knows that none is on its way. Never ends.
    pub async fn drain_with(&self, drain: &CancellationToken) -> Infallible {
        // A child of its own: the parent's lock is shared by all connections.
        drain.child_token().cancelled().await;
        self.draining.store(true, Ordering::Relaxed);
        self.outbox.post_drain();
        std::future::pending().await
    }

    /// What the future that serves holds: when it is dropped the connection ends, and its running calls are dropped.
    #[must_use]
    pub fn end_on_drop(self: &Arc<Self>) -> EndOnDrop<O> {
        EndOnDrop(Arc::clone(self))
    }

    /// Takes a call in before its message is there, so that what has no room is never allocated.
    fn admit(&self, call: u64, header: &RequestHeader, bytes: usize) -> Result<Result<()>> {
        let full = |said: String| Ok(Err(Error::not_started(Code::ResourceExhausted, said)));
        // Looked at where calls come in, because only they make more: refusals are answers too.
        let unread_max = self.ours.calls_max.saturating_mul(2).saturating_add(UNREAD_MORE);
        if self.unread.answers() >= unread_max {
            let said = format!("{unread_max} answers wait for a peer that does not take them");
            return Err(Error::unknown(Code::ResourceExhausted, said));
        }
        let mut running = self.lock();
        if call <= running.last_call {
            return Err(malformed(format!("call {call} after call {}: numbers only grow", running.last_call)));
        }
        running.last_call = call;
        if self.draining.load(Ordering::Relaxed) {
            return Ok(Err(Error::not_started(Code::Unavailable, "the peer takes no new calls")));
        }
        let Ok(room) = Arc::clone(&self.calls).try_acquire_owned() else {
            return full("the peer has as many calls under way as requests_max allows".into());
        };
        let Limits { calls_max, request_bytes_in_flight_max: bytes_max, reply_bytes_in_flight_max: unread_max, .. } =
            self.ours;
        if running.calls.len() >= calls_max {
            return full(format!("this connection has calls_max = {calls_max} calls under way"));
        }
        if running.bytes > 0 && running.bytes.saturating_add(bytes) > bytes_max {
            return full(format!("the requests under way exceed request_bytes_in_flight_max = {bytes_max}"));
        }
        if self.unread.bytes() > unread_max {
            return full(format!(
                "the answers that wait for their caller exceed reply_bytes_in_flight_max = {unread_max}"
            ));
        }
        running.bytes += bytes;
        let cancel = header.context.cancel.clone();
        running.calls.insert(call, Call { bytes, cancel, task: None, _room: room });
        Ok(Ok(()))
    }

    fn remove(&self, call: u64) -> Option<Call> {
        self.lock().remove(call)
    }

    fn fail(&self, call: u64, error: &Error) {
        let reason = put_failed(O::HEADROOM, error);
        let room = self.unread.add(reason.len());
        self.outbox.post_failed(call, reason, room);
    }

    fn answer(&self, call: u64, reply_bytes_max: usize, response: &Response) {
        let too_large = |said: String| self.fail(call, &Error::finished(Code::ResourceExhausted, said));
        let crowded = {
            let mut running = self.lock();
            let crowded = running.calls.len() > CROWD;
            // Before the answer leaves, which lets the next request come.
            if running.remove(call).is_none() {
                return;
            }
            crowded
        };
        let length = response.message.len();
        if length > reply_bytes_max {
            return too_large(format!(
                "the reply of {length} bytes is larger than reply_bytes_max = {reply_bytes_max}; raise it if this is wanted"
            ));
        }
        if let Err(said) = check_size(&response.message, &self.theirs) {
            return too_large(format!("the reply is too large: {said}"));
        }
        let header = put_response(O::HEADROOM, response);
        if header.len() - O::HEADROOM > HEADER_BYTES_MAX {
            return too_large(format!("the metadata of the reply take more than {HEADER_BYTES_MAX} bytes"));
        }
        let room = self.unread.add(header.len() + length);
        self.outbox.post_response(call, header, &response.message, room, crowded);
    }

    fn lock(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<O> fmt::Debug for AnsweringEnd<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).calls.len();
        write!(f, "AnsweringEnd({}, {running} calls under way)", self.peer.address)
    }
}

/// Ends an answering end when it is dropped.
#[derive(Debug)]
pub struct EndOnDrop<O: Outbox>(Arc<AnsweringEnd<O>>);

impl<O: Outbox> Drop for EndOnDrop<O> {
    fn drop(&mut self) {
        // Before the tasks: of calls that end with the connection nobody is told.
        self.0.outbox.close();
        let tasks = self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(tasks);
        // Those whose message never came.
        let calls = std::mem::take(&mut self.0.lock().calls);
        drop(calls);
    }
}

/// One call's task: whatever becomes of it, its caller hears of it.
struct Duty<O: Outbox> {
    end: Arc<AnsweringEnd<O>>,
    call: u64,
    reply_bytes_max: usize,
    cancel: CancelToken,
    done: bool,
}

impl<O: Outbox> Duty<O> {
    async fn run(mut self, answer: BoxFuture<'static, Result<Response>>) {
        let response = answer.await.unwrap_or_else(|error| Response::from_error(&error));
        self.done = true;
        self.end.answer(self.call, self.reply_bytes_max, &response);
    }
}

impl<O: Outbox> Drop for Duty<O> {
    fn drop(&mut self) {
        if !self.done {
            // The caller has left, or the connection is gone: what was handed on is to end too. A call that is still on the
            // list was ended by neither.
            self.cancel.cancel();
            if self.end.remove(self.call).is_some() {
                self.end.fail(self.call, &Error::internal("the handler panicked"));
            }
        }
    }
}
