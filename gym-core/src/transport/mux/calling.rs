//! The calling end of one connection: capacity, call numbers, and callers that wait for responses.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::base::cancel::CancelToken;
use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit, oneshot};

use super::CROWD;
use super::capacity::{CapacityPermit, ConnectionCapacity, units};
use super::header::{HEADER_BYTES_MAX, malformed, put_request, read_failed};
use super::limits::{ConnectionLimits, Handshake};
use super::sender::{Flush, MessageSender};
use crate::base::error::{Code, Error, Result};
use crate::message::{Message, Request, Response};

/// The calling end of one connection, shared by its link, its calls and its reader.
///
/// The reader calls the `on_…` methods, one at a time, and [`CallingEnd::end`] when the connection has ended.
pub struct CallingEnd<O> {
    sender: O,
    theirs: Handshake,
    capacity: ConnectionCapacity,
    calls: Mutex<Calls>,
    /// Number of calls whose response nobody awaits yet.
    unawaited: AtomicUsize,
    /// Notified when no call remains.
    idle: Notify,
    over: CancelToken,
    why: OnceLock<(Code, String)>,
}

#[derive(Default)]
struct Calls {
    waiting: HashMap<u64, Waiting>,
    /// The reason why new calls are rejected, if they are.
    refusing: Option<&'static str>,
    /// `true` if the last call closes the connection.
    leaving: bool,
}

/// A call that awaits its response.
struct Waiting {
    answer: oneshot::Sender<Result<Answer>>,
    reply_bytes_max: usize,
    reply_permit: OwnedSemaphorePermit,
    reads_later: bool,
    _permit: CapacityPermit,
}

/// A response, and the permit that it holds until the caller takes it.
struct Answer {
    response: Response,
    _permit: Option<OwnedSemaphorePermit>,
}

impl<O: MessageSender> CallingEnd<O> {
    /// Creates the end of a connection with its own limits and those that the peer announced.
    #[must_use]
    pub fn new(sender: O, ours: &ConnectionLimits, theirs: Handshake) -> Arc<Self> {
        Arc::new(Self {
            sender,
            capacity: ConnectionCapacity::new(ours, &theirs),
            theirs,
            calls: Mutex::default(),
            unawaited: AtomicUsize::new(0),
            idle: Notify::new(),
            over: CancelToken::new(),
            why: OnceLock::new(),
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

    /// Accepts the beginning of a response of `total` bytes. Returns `false` if the caller no longer waits and the message is not
    /// needed.
    ///
    /// # Errors
    /// `DataLoss` if the response exceeds the bytes that the call reserved: allocate nothing and end the connection.
    pub fn on_opening(&self, call: u64, total: usize) -> Result<bool> {
        let most = self.calls.lock().waiting.get(&call).map(|waiting| waiting.reply_bytes_max);
        match most {
            Some(most) if total > most => Err(malformed(format!("an answer of {total} bytes; {most} was the most"))),
            most => Ok(most.is_some()),
        }
    }

    /// Returns `true` if the call still awaits its response.
    pub fn is_awaited(&self, call: u64) -> bool {
        self.calls.lock().waiting.contains_key(&call)
    }

    /// Accepts a complete response.
    pub fn on_answer(&self, call: u64, response: Response) {
        if let Some(waiting) = self.remove(call) {
            // A response that has arrived holds only its own bytes.
            let mut reply_permit = waiting.reply_permit;
            let held = if waiting.reads_later { 0 } else { response.message.len() };
            let permit = reply_permit.split(units(held).min(reply_permit.num_permits()));
            let _ = waiting.answer.send(Ok(Answer { response, _permit: permit }));
        }
    }

    /// Accepts the reason why a call has no response.
    ///
    /// # Errors
    /// `DataLoss` if the reason is malformed.
    pub fn on_failed(&self, call: u64, reason: Bytes) -> Result<()> {
        let error = read_failed(reason)?;
        if let Some(waiting) = self.remove(call) {
            let _ = waiting.answer.send(Err(error));
        }
        Ok(())
    }

    /// Stops sending new calls, because the peer accepts none. The last call in flight closes the connection.
    pub fn on_drain(&self) {
        self.refuse("the peer takes no new calls", true);
    }

    /// Ends the connection and closes the sender. Later calls do not replace the first reason.
    pub fn end(&self, error: &Error) {
        let _ = self.why.set((error.code(), error.to_string()));
        let waiting = {
            let mut calls = self.calls.lock();
            calls.refusing.get_or_insert("the connection has ended");
            std::mem::take(&mut calls.waiting)
        };
        self.over.cancel();
        self.sender.close();
        // The callers notice that no response will arrive, and get the reason from `lost`.
        drop(waiting);
        self.idle.notify_waiters();
    }

    /// Resolves when the connection has ended, on either side.
    pub async fn over(&self) {
        self.over.cancelled().await;
    }

    /// Returns the error of a call on an ended connection; `before` is `true` if nothing of the call was sent.
    pub(super) fn lost(&self, before: bool) -> Error {
        let (code, said) = self.why.get().cloned().unwrap_or((Code::Unavailable, "the connection has ended".into()));
        if before { Error::not_started(Code::Unavailable, said) } else { Error::unknown(code, said) }
    }

    /// Waits for capacity and posts a request.
    pub(super) async fn send(self: &Arc<Self>, request: &Request) -> Result<Pending<O>> {
        if let Some(why) = self.calls.lock().refusing {
            return Err(Error::not_started(Code::Unavailable, why));
        }
        // The peer would reject it, now and later.
        check_size(&request.message, &self.theirs).map_err(Error::invalid)?;
        let (permit, reply_permit) = tokio::select! {
            biased;
            taken = self.capacity.acquire(request.message.len(), request.context.reply_bytes_max) => {
                taken.map_err(|_| self.lost(true))?
            }
            () = self.over.cancelled() => return Err(self.lost(true)),
        };
        self.hand_over(request, permit, reply_permit)
    }

    fn hand_over(
        self: &Arc<Self>,
        request: &Request,
        permit: CapacityPermit,
        reply_permit: OwnedSemaphorePermit,
    ) -> Result<Pending<O>> {
        let Request { verb, route, context, message, .. } = request;
        let reply_bytes_max = context.reply_bytes_max.min(self.capacity.reply_bytes_max());
        let header = put_request(O::HEADROOM, *verb, route, context, reply_bytes_max, message);
        if header.len() - O::HEADROOM > HEADER_BYTES_MAX {
            return Err(Error::invalid(format!("route and metadata take more than {HEADER_BYTES_MAX} bytes")));
        }
        let (sender, answer) = oneshot::channel();
        let flush = if self.unawaited.load(Ordering::Relaxed) >= CROWD {
            Flush::Later
        } else if self.capacity.is_crowded(CROWD) {
            Flush::Soon
        } else {
            Flush::Now
        };
        let call = self.sender.post_request(header, message, permit.clone(), flush, |call| {
            let mut calls = self.calls.lock();
            if let Some(why) = calls.refusing {
                return Err(Error::not_started(Code::Unavailable, why));
            }
            let reads_later = context.reads_later;
            let waiting = Waiting { answer: sender, reply_bytes_max, reply_permit, reads_later, _permit: permit };
            calls.waiting.insert(call, waiting);
            Ok(())
        })?;
        self.unawaited.fetch_add(1, Ordering::Relaxed);
        Ok(Pending { answer, call: CancelOnDrop { call: Some(call), awaited: false, end: Arc::clone(self) } })
    }

    /// Rejects new calls. If `leaving`, the last call closes the connection.
    pub(super) fn refuse(&self, why: &'static str, leaving: bool) {
        let mut calls = self.calls.lock();
        calls.refusing.get_or_insert(why);
        calls.leaving |= leaving;
        self.look_at_rest(calls);
    }

    /// Rejects new calls, waits up to `grace` for the calls in flight, and ends the connection.
    pub(super) async fn close(&self, grace: Duration) -> Result<()> {
        self.refuse("the channel was closed", false);
        let drained = tokio::time::timeout(grace, async {
            loop {
                let idle = self.idle.notified();
                if self.calls.lock().waiting.is_empty() {
                    return;
                }
                idle.await;
            }
        })
        .await;
        self.end(&Error::unknown(Code::Unavailable, "the channel was closed"));
        drained.map_err(|_| Error::unknown(Code::DeadlineExceeded, "calls were still running when the channel closed"))
    }

    /// Removes a call. Closes the connection if the call was its last and the connection is closing.
    fn remove(&self, call: u64) -> Option<Waiting> {
        let mut calls = self.calls.lock();
        let waiting = calls.waiting.remove(&call);
        self.look_at_rest(calls);
        waiting
    }

    fn look_at_rest(&self, calls: MutexGuard<'_, Calls>) {
        if calls.waiting.is_empty() && calls.refusing.is_some() {
            let leaving = calls.leaving;
            drop(calls);
            self.idle.notify_waiters();
            if leaving {
                self.end(&Error::unknown(Code::Unavailable, "the peer takes no new calls"));
            }
        }
    }
}

impl<O> fmt::Debug for CallingEnd<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting = self.calls.lock().waiting.len();
        write!(f, "CallingEnd({waiting} calls under way)")
    }
}

/// Checks a message against the limits that the peer announced.
pub(super) fn check_size(message: &Message, theirs: &Handshake) -> Result<(), String> {
    let sizes = [
        ("a message", message.len(), "message_bytes_max", theirs.message_bytes_max),
        ("a head", message.head.len(), "head_bytes_max", theirs.head_bytes_max),
        ("a segment count", message.segments.len(), "segments_max", theirs.segments_max),
    ];
    match sizes.into_iter().find(|(_, size, _, most)| size > most) {
        Some((what, size, name, most)) => {
            Err(format!("{what} of {size} exceeds {name} = {most} of the peer; raise it there if this is wanted"))
        }
        None => Ok(()),
    }
}

/// A call that was posted.
pub(super) struct Pending<O: MessageSender> {
    answer: oneshot::Receiver<Result<Answer>>,
    call: CancelOnDrop<O>,
}

impl<O: MessageSender> Pending<O> {
    pub(super) async fn answered(mut self) -> Result<Response> {
        self.call.awaited();
        let answered = (&mut self.answer).await;
        self.call.call = None;
        match answered {
            Ok(answer) => answer.map(|answer| answer.response),
            Err(_) => Err(self.call.end.lost(false)),
        }
    }
}

/// Cancels the call at the peer when the caller drops it.
struct CancelOnDrop<O: MessageSender> {
    call: Option<u64>,
    /// `true` once the caller awaits the response.
    awaited: bool,
    end: Arc<CallingEnd<O>>,
}

impl<O: MessageSender> CancelOnDrop<O> {
    /// The caller waits from now on, so nothing that was posted before waits any longer.
    fn awaited(&mut self) {
        if !std::mem::replace(&mut self.awaited, true) {
            self.end.unawaited.fetch_sub(1, Ordering::Relaxed);
            self.end.sender.flush();
        }
    }
}

impl<O: MessageSender> Drop for CancelOnDrop<O> {
    fn drop(&mut self) {
        if !self.awaited {
            self.end.unawaited.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(call) = self.call.take()
            && let Some(waiting) = self.end.remove(call)
        {
            self.end.sender.cancel(call, CapacityPermit::of([waiting.reply_permit]));
        }
    }
}
