//! The calls of one connection: their room, their numbers, and who waits for which answer.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit, oneshot};
use tokio_util::sync::CancellationToken;

use super::CROWD;
use super::header::{HEADER_BYTES_MAX, malformed, put_request, read_failed};
use super::limits::{Greeting, Limits};
use super::outbox::Outbox;
use super::room::{Room, Rooms, units};
use crate::error::{Code, Error, Result};
use crate::message::{Message, Request, Response};

/// The calling end of one connection. Its link, its calls and what reads for it share it.
///
/// What reads calls `on_…`, from one place at a time, and [`CallingEnd::end`] when the connection is over.
pub struct CallingEnd<O> {
    outbox: O,
    theirs: Greeting,
    rooms: Rooms,
    calls: Mutex<Calls>,
    /// No call is left.
    idle: Notify,
    over: CancellationToken,
    why: OnceLock<(Code, String)>,
}

#[derive(Default)]
struct Calls {
    waiting: HashMap<u64, Waiting>,
    /// Why no new calls are taken.
    refusing: Option<&'static str>,
    /// The last call is to close the connection.
    leaving: bool,
}

/// A call that awaits its answer.
struct Waiting {
    answer: oneshot::Sender<Result<Answer>>,
    reply_bytes_max: usize,
    reply_room: OwnedSemaphorePermit,
    _room: Room,
}

/// An answer, and the room that it takes until somebody has it.
struct Answer {
    response: Response,
    _room: Option<OwnedSemaphorePermit>,
}

impl<O: Outbox> CallingEnd<O> {
    /// An end with its own limits, towards a peer that has said its own.
    #[must_use]
    pub fn new(outbox: O, ours: &Limits, theirs: Greeting) -> Arc<Self> {
        Arc::new(Self {
            outbox,
            rooms: Rooms::new(ours, &theirs),
            theirs,
            calls: Mutex::default(),
            idle: Notify::new(),
            over: CancellationToken::new(),
            why: OnceLock::new(),
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

    /// An answer of `total` bytes begins: whether its message is wanted. It is not when its caller has left.
    ///
    /// # Errors
    /// `DataLoss` when it exceeds what the call has room for: nothing is to be allocated for it, and the connection ends.
    pub fn on_opening(&self, call: u64, total: usize) -> Result<bool> {
        let most = self.lock().waiting.get(&call).map(|waiting| waiting.reply_bytes_max);
        match most {
            Some(most) if total > most => Err(malformed(format!("an answer of {total} bytes; {most} was the most"))),
            most => Ok(most.is_some()),
        }
    }

    /// Whether somebody still waits for an answer.
    pub fn is_awaited(&self, call: u64) -> bool {
        self.lock().waiting.contains_key(&call)
    }

    /// An answer is complete.
    pub fn on_answer(&self, call: u64, response: Response) {
        if let Some(waiting) = self.remove(call) {
            // What has arrived keeps only its own bytes of room.
            let mut reply_room = waiting.reply_room;
            let room = reply_room.split(units(response.message.len()).min(reply_room.num_permits()));
            let _ = waiting.answer.send(Ok(Answer { response, _room: room }));
        }
    }

    /// A call has no answer.
    ///
    /// # Errors
    /// `DataLoss` when the reason is malformed.
    pub fn on_failed(&self, call: u64, reason: Bytes) -> Result<()> {
        let error = read_failed(reason)?;
        if let Some(waiting) = self.remove(call) {
            let _ = waiting.answer.send(Err(error));
        }
        Ok(())
    }

    /// The peer takes no new calls; the last one under way closes the connection.
    pub fn on_drain(&self) {
        self.refuse("the peer takes no new calls", true);
    }

    /// The connection is over; the first reason stays. Closes the outbox.
    pub fn end(&self, error: &Error) {
        let _ = self.why.set((error.code(), error.to_string()));
        let waiting = {
            let mut calls = self.lock();
            calls.refusing.get_or_insert("the connection has ended");
            std::mem::take(&mut calls.waiting)
        };
        self.over.cancel();
        self.outbox.close();
        // Their callers see that nobody will answer, and ask `lost` why.
        drop(waiting);
        self.idle.notify_waiters();
    }

    /// Resolves when the connection is over, whoever ended it.
    pub async fn over(&self) {
        self.over.cancelled().await;
    }

    /// What the end of the connection means for a call; `before`: nothing of it has left.
    pub(super) fn lost(&self, before: bool) -> Error {
        let (code, said) = self.why.get().cloned().unwrap_or((Code::Unavailable, "the connection has ended".into()));
        if before { Error::not_started(Code::Unavailable, said) } else { Error::unknown(code, said) }
    }

    /// Waits for room and hands a request over.
    pub(super) async fn send(self: &Arc<Self>, request: &Request) -> Result<Pending<O>> {
        if let Some(why) = self.lock().refusing {
            return Err(Error::not_started(Code::Unavailable, why));
        }
        // What the peer would refuse is not sent.
        check_size(&request.message, &self.theirs).map_err(|said| Error::not_started(Code::ResourceExhausted, said))?;
        let (room, reply_room) = tokio::select! {
            biased;
            taken = self.rooms.take(request.message.len(), request.context.reply_bytes_max) => {
                taken.map_err(|_| self.lost(true))?
            }
            () = self.over.cancelled() => return Err(self.lost(true)),
        };
        self.hand_over(request, room, reply_room)
    }

    fn hand_over(
        self: &Arc<Self>,
        request: &Request,
        room: Room,
        reply_room: OwnedSemaphorePermit,
    ) -> Result<Pending<O>> {
        let Request { verb, route, context, message, .. } = request;
        let reply_bytes_max = context.reply_bytes_max.min(self.rooms.reply_bytes_max());
        let header = put_request(O::HEADROOM, *verb, route, context, reply_bytes_max, message);
        if header.len() - O::HEADROOM > HEADER_BYTES_MAX {
            return Err(Error::invalid(format!("route and metadata take more than {HEADER_BYTES_MAX} bytes")));
        }
        let (sender, answer) = oneshot::channel();
        let crowded = self.rooms.is_crowded(CROWD);
        let call = self.outbox.post_request(header, message, room.clone(), crowded, |call| {
            let mut calls = self.lock();
            if let Some(why) = calls.refusing {
                return Err(Error::not_started(Code::Unavailable, why));
            }
            calls.waiting.insert(call, Waiting { answer: sender, reply_bytes_max, reply_room, _room: room });
            Ok(())
        })?;
        Ok(Pending { answer, call: CancelOnDrop { call: Some(call), end: Arc::clone(self) } })
    }

    /// Takes no new calls; `leaving`: the last one closes the connection.
    pub(super) fn refuse(&self, why: &'static str, leaving: bool) {
        let mut calls = self.lock();
        calls.refusing.get_or_insert(why);
        calls.leaving |= leaving;
        self.look_at_rest(calls);
    }

    /// Takes no new calls, waits up to `grace` for the running ones, and ends the connection.
    pub(super) async fn close(&self, grace: Duration) -> Result<()> {
        self.refuse("the channel was closed", false);
        let drained = tokio::time::timeout(grace, async {
            loop {
                let idle = self.idle.notified();
                if self.lock().waiting.is_empty() {
                    return;
                }
                idle.await;
            }
        })
        .await;
        self.end(&Error::unknown(Code::Unavailable, "the channel was closed"));
        drained.map_err(|_| Error::unknown(Code::DeadlineExceeded, "calls were still running when the channel closed"))
    }

    /// Takes a call off the list; the last of a connection that is to end closes it.
    fn remove(&self, call: u64) -> Option<Waiting> {
        let mut calls = self.lock();
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

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<O> fmt::Debug for CallingEnd<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting = self.calls.lock().unwrap_or_else(PoisonError::into_inner).waiting.len();
        write!(f, "CallingEnd({waiting} calls under way)")
    }
}

/// Why a peer with these limits would not take the message.
pub(super) fn check_size(message: &Message, theirs: &Greeting) -> Result<(), String> {
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

/// A call that was handed over.
pub(super) struct Pending<O: Outbox> {
    answer: oneshot::Receiver<Result<Answer>>,
    call: CancelOnDrop<O>,
}

impl<O: Outbox> Pending<O> {
    pub(super) async fn answered(mut self) -> Result<Response> {
        let answered = (&mut self.answer).await;
        self.call.call = None;
        match answered {
            Ok(answer) => answer.map(|answer| answer.response),
            Err(_) => Err(self.call.end.lost(false)),
        }
    }
}

/// Tells the peer that nobody waits any more.
struct CancelOnDrop<O: Outbox> {
    call: Option<u64>,
    end: Arc<CallingEnd<O>>,
}

impl<O: Outbox> Drop for CancelOnDrop<O> {
    fn drop(&mut self) {
        if let Some(call) = self.call.take()
            && let Some(waiting) = self.end.remove(call)
        {
            self.end.outbox.cancel(call, Room::of([waiting.reply_room]));
        }
    }
}
