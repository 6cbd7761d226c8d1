//! The answering end of one connection: admits the peer's calls and runs them.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{AbortHandle, JoinSet};

use super::CROWD;
use super::calling::check_size;
use super::capacity::UnreadReplies;
use super::header::{HEADER_BYTES_MAX, RequestHeader, malformed, put_failed, put_response};
use super::limits::{ConnectionLimits, Handshake};
use super::sender::{Flush, MessageSender};
use super::waiting::{Abandon, Respond, WaitingCall};
use crate::base::cancel::CancelToken;
use crate::base::error::{Code, Error, Result};
use crate::message::{Loan, PeerInfo, Response};
use crate::transport::Handler;

/// Number of unread replies that are tolerated beyond twice the peer's concurrent calls. Twice, because a caller that cancels may
/// not have read the replies sent before. The extra number covers replies in flight: a transport may learn later than its peer
/// that they arrived.
const UNREAD_EXTRA: usize = 1_024;
/// Size of a reply above which a task of its own sends it, so that what produced it goes on with the next call.
const LARGE_REPLY_BYTES: usize = 16 << 10;

/// The answering end of one connection. Its reader calls the `on_…` methods, one at a time.
pub struct AnsweringEnd<O> {
    sender: O,
    ours: ConnectionLimits,
    theirs: Handshake,
    handler: Arc<dyn Handler>,
    peer: PeerInfo,
    /// Bounds the calls of all connections of a listener.
    calls: Arc<Semaphore>,
    unread: UnreadReplies,
    draining: AtomicBool,
    running: Mutex<Running>,
    /// `None` after the connection has ended.
    tasks: Mutex<Option<JoinSet<()>>>,
}

#[derive(Default)]
struct Running {
    calls: HashMap<u64, Call>,
    bytes: usize,
    last_call: u64,
}

/// A call from its first byte to its response.
struct Call {
    bytes: usize,
    cancel: CancelToken,
    runs_as: RunsAs,
    _permit: OwnedSemaphorePermit,
}

/// The owner of a call's future, which polls it.
enum RunsAs {
    /// Nothing yet: its message is still arriving.
    Nothing,
    Task(AbortHandle),
    /// Whatever wakes it.
    Waiting(Arc<dyn Abandon>),
}

impl RunsAs {
    fn end(self) {
        match self {
            Self::Nothing => {}
            Self::Task(task) => task.abort(),
            Self::Waiting(call) => call.abandon(),
        }
    }
}

impl Running {
    fn remove(&mut self, call: u64) -> Option<Call> {
        let removed = self.calls.remove(&call)?;
        self.bytes -= removed.bytes;
        Some(removed)
    }
}

impl<O: MessageSender> AnsweringEnd<O> {
    /// Creates an end whose calls `handler` runs; `calls` bounds the calls of all connections together.
    #[must_use]
    pub fn new(
        sender: O,
        ours: ConnectionLimits,
        theirs: Handshake,
        calls: Arc<Semaphore>,
        handler: Arc<dyn Handler>,
        peer: PeerInfo,
    ) -> Arc<Self> {
        Arc::new(Self {
            sender,
            ours,
            theirs,
            handler,
            peer,
            calls,
            unread: UnreadReplies::default(),
            draining: AtomicBool::new(false),
            running: Mutex::default(),
            tasks: Mutex::new(Some(JoinSet::new())),
        })
    }

    /// Returns the sending half of the connection.
    pub fn sender(&self) -> &O {
        &self.sender
    }

    /// Returns the limits that the peer announced.
    pub fn theirs(&self) -> &Handshake {
        &self.theirs
    }

    /// Accepts the beginning of a request with a message of `total` bytes. Returns `false` if there is no capacity for the
    /// request: the call is rejected before anything is allocated, and the transport skips its message.
    ///
    /// # Errors
    /// `DataLoss` if the call number is not larger than all before it, `ResourceExhausted` if the peer keeps sending requests
    /// without reading replies. Either ends the connection.
    pub fn on_opening(&self, call: u64, header: &RequestHeader, total: usize) -> Result<bool> {
        match self.admit(call, header, total)? {
            Ok(()) => Ok(true),
            Err(error) => {
                self.fail(call, &error);
                Ok(false)
            }
        }
    }

    /// Returns the memory into which the handler wants a segment of a request that was admitted, if it names any of that length.
    #[must_use]
    pub fn place(&self, header: &RequestHeader, head: &Bytes, segment: usize, length: usize) -> Option<Loan> {
        self.handler.place(&header.route, head, segment, length).filter(|loan| loan.as_ref().len() == length)
    }

    /// Passes a complete request to the handler before it returns, so the order of these calls is the order of arrival.
    ///
    /// Call it within the context of the tokio runtime that runs the handler; a thread outside
    /// [enters](tokio::runtime::Handle::enter) the runtime first.
    pub fn on_request(self: &Arc<Self>, call: u64, header: RequestHeader, head: Bytes, segments: Vec<Bytes>) {
        if let Err(error) = header.context.check() {
            if self.remove(call).is_some() {
                self.fail(call, &error);
            }
            return;
        }
        let reply_bytes_max = header.context.reply_bytes_max;
        let duty = CallTask {
            end: Arc::clone(self),
            call,
            reply_bytes_max,
            cancel: header.context.cancel.clone(),
            done: false,
        };
        // Called here and not in the task, because the order of these calls is the order of arrival.
        let answer = self.handler.handle(header.into_request(self.peer.clone(), head, segments));
        if self.handler.only_waits() {
            let waiting = WaitingCall::new(duty, answer);
            // Before it is polled, because its response removes the call.
            let known = self
                .running
                .lock()
                .calls
                .get_mut(&call)
                .map(|call| call.runs_as = RunsAs::Waiting(Arc::clone(&waiting) as _));
            if known.is_some() {
                waiting.poll();
            }
            return;
        }
        if let Some(task) = self.spawn(duty.run(answer))
            && let Some(call) = self.running.lock().calls.get_mut(&call)
        {
            call.runs_as = RunsAs::Task(task);
        }
    }

    /// Runs a task that ends with the connection; `None` if the connection has ended.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Option<AbortHandle> {
        let mut tasks = self.tasks.lock();
        let tasks = tasks.as_mut()?;
        // Finished tasks are removed as new calls arrive, so that the set stays small.
        while tasks.try_join_next().is_some() {}
        Some(tasks.spawn(task))
    }

    /// Cancels a call whose caller disconnected or dropped it.
    pub fn on_cancel(&self, call: u64) {
        if let Some(call) = self.remove(call) {
            call.cancel.cancel();
            call.runs_as.end();
        }
    }

    /// Waits for `drain`, then rejects new calls and notifies the peer. The peer closes the connection after its last response,
    /// because only the peer can tell that no call is in flight. Never resolves.
    pub async fn drain_with(&self, drain: &CancelToken) -> Infallible {
        // A child token, because the lock of the parent is shared by all connections.
        drain.child_token().cancelled().await;
        self.draining.store(true, Ordering::Relaxed);
        self.sender.post_drain();
        std::future::pending().await
    }

    /// Returns a guard for the future that serves: dropping the guard ends the connection and drops its running calls.
    #[must_use]
    pub fn end_on_drop(self: &Arc<Self>) -> EndOnDrop<O> {
        EndOnDrop(Arc::clone(self))
    }

    /// Admits a call before its message arrives, so that nothing is allocated for a call beyond capacity.
    fn admit(&self, call: u64, header: &RequestHeader, bytes: usize) -> Result<Result<()>> {
        let full = |said: String| Ok(Err(Error::not_started(Code::ResourceExhausted, said)));
        // Checked when calls arrive, because only calls cause replies; rejections are replies too.
        let unread_max = self.ours.calls_max.saturating_mul(2).saturating_add(UNREAD_EXTRA);
        if self.unread.count() >= unread_max {
            let said = format!("{unread_max} answers wait for a peer that does not take them");
            return Err(Error::unknown(Code::ResourceExhausted, said));
        }
        let mut running = self.running.lock();
        if call <= running.last_call {
            return Err(malformed(format!("call {call} after call {}: numbers only grow", running.last_call)));
        }
        running.last_call = call;
        if self.draining.load(Ordering::Relaxed) {
            return Ok(Err(Error::not_started(Code::Unavailable, "the peer takes no new calls")));
        }
        let Ok(permit) = Arc::clone(&self.calls).try_acquire_owned() else {
            return full("the peer has as many calls under way as requests_max allows".into());
        };
        let ConnectionLimits {
            calls_max,
            request_bytes_in_flight_max: bytes_max,
            reply_bytes_in_flight_max: unread_max,
            ..
        } = self.ours;
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
        running.calls.insert(call, Call { bytes, cancel, runs_as: RunsAs::Nothing, _permit: permit });
        Ok(Ok(()))
    }

    fn remove(&self, call: u64) -> Option<Call> {
        self.running.lock().remove(call)
    }

    fn fail(&self, call: u64, error: &Error) {
        let reason = put_failed(O::HEADROOM, error);
        let permit = self.unread.add(reason.len());
        self.sender.post_failed(call, reason, permit);
    }

    fn answer(&self, call: u64, reply_bytes_max: usize, response: &Response) {
        let too_large = |said: String| self.fail(call, &Error::finished(Code::ResourceExhausted, said));
        let flush = {
            let mut running = self.running.lock();
            let flush = if running.calls.len() > CROWD { Flush::Soon } else { Flush::Now };
            // Before the reply is sent, because the peer may send the next request after it.
            if running.remove(call).is_none() {
                return;
            }
            flush
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
        let permit = self.unread.add(header.len() + length);
        self.sender.post_response(call, header, &response.message, permit, flush);
    }
}

impl<O> fmt::Debug for AnsweringEnd<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let running = self.running.lock().calls.len();
        write!(f, "AnsweringEnd({}, {running} calls under way)", self.peer.address)
    }
}

/// Ends an answering end when it is dropped.
#[derive(Debug)]
pub struct EndOnDrop<O: MessageSender>(Arc<AnsweringEnd<O>>);

impl<O: MessageSender> Drop for EndOnDrop<O> {
    fn drop(&mut self) {
        // Before the tasks, so that no reply is sent for calls that end with the connection.
        self.0.sender.close();
        let tasks = self.0.tasks.lock().take();
        drop(tasks);
        // Calls whose message never arrived, and those without a task.
        let calls = std::mem::take(&mut self.0.running.lock().calls);
        calls.into_values().for_each(|call| call.runs_as.end());
    }
}

/// The task of one call. However the task ends, the caller receives a response or an error.
struct CallTask<O: MessageSender> {
    end: Arc<AnsweringEnd<O>>,
    call: u64,
    reply_bytes_max: usize,
    cancel: CancelToken,
    done: bool,
}

impl<O: MessageSender> CallTask<O> {
    async fn run(self, answer: BoxFuture<'static, Result<Response>>) {
        let response = answer.await;
        self.answer(response);
    }

    /// Sends the response.
    fn answer(mut self, response: Result<Response>) {
        let response = response.unwrap_or_else(|error| Response::from_error(&error));
        self.done = true;
        self.end.answer(self.call, self.reply_bytes_max, &response);
    }
}

impl<O: MessageSender> Respond for CallTask<O> {
    /// Sends the response, a large one in a task if there is a runtime.
    fn respond(self, response: Result<Response>) {
        match response {
            Ok(response) if response.message.len() > LARGE_REPLY_BYTES && Handle::try_current().is_ok() => {
                let end = Arc::clone(&self.end);
                end.spawn(async move { self.answer(Ok(response)) });
            }
            response => self.answer(response),
        }
    }
}

impl<O: MessageSender> Drop for CallTask<O> {
    fn drop(&mut self) {
        if !self.done {
            // The call was cancelled, or the connection ended: calls made by the handler are cancelled too. Neither is the case
            // for a call that is still registered.
            self.cancel.cancel();
            if self.end.remove(self.call).is_some() {
                self.end.fail(self.call, &Error::internal("the handler panicked"));
            }
        }
    }
}
