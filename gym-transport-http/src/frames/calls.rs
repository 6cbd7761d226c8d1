//! The calls of one framed connection: their room, their numbers, and who waits for which answer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use gym_core::{Code, Error, Message, Request, Response, Result};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

use super::config::FramesConfig;
use super::layout::{FRAME_BYTES, Greeting, HEADER_BYTES_MAX, request_frame};
use super::outbox::{Outbox, Parcel, Room};

/// Calls under way from which on requests are left to the writer task: it writes many at once, and with so many on their way
/// nobody waits for this one alone.
pub(super) const CROWD: usize = 8;

/// Room is counted in these, because a semaphore hands out at most `u32::MAX` at once.
const ROOM_BYTES: usize = 1 << 10;

/// What the link, its calls and its task share.
pub(super) struct Shared {
    pub(super) outbox: Outbox,
    calls: Mutex<Calls>,
    /// No call is left.
    pub(super) idle: Notify,
    pub(super) closed: CancellationToken,
    why: OnceLock<(Code, String)>,
    pub(super) theirs: Greeting,
    slots: Arc<Semaphore>,
    slots_max: usize,
    replies: Arc<Semaphore>,
    replies_max: usize,
    requests: Arc<Semaphore>,
    requests_max: usize,
}

#[derive(Default)]
pub(super) struct Calls {
    pub(super) waiting: HashMap<u64, Waiting>,
    /// Why no new calls are taken.
    refusing: Option<&'static str>,
    /// The last call is to close the connection.
    leaving: bool,
}

/// A call that awaits its answer.
pub(super) struct Waiting {
    pub(super) answer: oneshot::Sender<Result<Answer>>,
    pub(super) reply_bytes_max: usize,
    pub(super) reply_room: OwnedSemaphorePermit,
    _room: Room,
}

/// An answer, and the room that it takes until somebody has it.
pub(super) struct Answer {
    pub(super) response: Response,
    pub(super) _room: Option<OwnedSemaphorePermit>,
}

pub(super) fn units(bytes: usize) -> usize {
    bytes.div_ceil(ROOM_BYTES).min(u32::MAX as usize)
}

impl Shared {
    pub(super) fn new(outbox: Outbox, config: &FramesConfig, theirs: Greeting) -> Self {
        let replies_max = units(config.reply_bytes_in_flight_max);
        let requests_max = units(config.request_bytes_in_flight_max.min(theirs.request_bytes_in_flight_max));
        let slots_max = config.calls_max.min(theirs.calls_max).clamp(1, Semaphore::MAX_PERMITS);
        Self {
            outbox,
            calls: Mutex::default(),
            idle: Notify::new(),
            closed: CancellationToken::new(),
            why: OnceLock::new(),
            slots: Arc::new(Semaphore::new(slots_max)),
            slots_max,
            replies: Arc::new(Semaphore::new(replies_max)),
            replies_max,
            requests: Arc::new(Semaphore::new(requests_max)),
            requests_max,
            theirs,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn check_open(&self) -> Result<()> {
        match self.lock().refusing {
            Some(why) => Err(Error::not_started(Code::Unavailable, why)),
            None => Ok(()),
        }
    }

    /// What the peer would refuse is not sent.
    pub(super) fn check_size(&self, message: &Message) -> Result<()> {
        check_size(message, &self.theirs).map_err(|said| Error::not_started(Code::ResourceExhausted, said))
    }

    /// A slot, room for the reply, room for the request: always in this order, so that nobody waits for what a waiter holds.
    pub(super) async fn room(&self, request: &Request) -> Result<(Room, OwnedSemaphorePermit)> {
        let reply = units(request.context.reply_bytes_max).min(self.replies_max);
        let bytes = units(request.message.len()).min(self.requests_max);
        let taken = async {
            let slot = take(&self.slots, 1).await?;
            let reply = take(&self.replies, reply).await?;
            let bytes = take(&self.requests, bytes).await?;
            Ok::<_, tokio::sync::AcquireError>((Arc::new([slot, bytes]), reply))
        };
        tokio::select! {
            biased;
            taken = taken => taken.map_err(|_| self.lost(true)),
            () = self.closed.cancelled() => Err(self.lost(true)),
        }
    }

    pub(super) fn hand_over(
        self: &Arc<Self>,
        request: &Request,
        room: Room,
        reply_room: OwnedSemaphorePermit,
    ) -> Result<Pending> {
        let reply_bytes_max = request.context.reply_bytes_max.min(self.replies_max.saturating_mul(ROOM_BYTES));
        let frame = request_frame(0, request.verb, &request.route, &request.context, reply_bytes_max, &request.message);
        if frame.len() - FRAME_BYTES > HEADER_BYTES_MAX {
            return Err(Error::invalid(format!("route and metadata take more than {HEADER_BYTES_MAX} bytes")));
        }
        let (sender, answer) = oneshot::channel();
        let crowded = self.slots.available_permits() + CROWD < self.slots_max;
        let parcel = Parcel::new(0, frame, &request.message, Some(Arc::clone(&room)));
        let call = self.outbox.post_request(parcel, crowded, |call| {
            let mut calls = self.lock();
            if let Some(why) = calls.refusing {
                return Err(Error::not_started(Code::Unavailable, why));
            }
            calls.waiting.insert(call, Waiting { answer: sender, reply_bytes_max, reply_room, _room: room });
            Ok(())
        })?;
        Ok(Pending { answer, call: CancelOnDrop { call: Some(call), shared: Arc::clone(self) } })
    }

    /// Takes a call off the list; the last of a connection that is to end closes it.
    pub(super) fn remove(&self, call: u64) -> Option<Waiting> {
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

    /// Takes no new calls; `leaving`: the last one closes the connection.
    pub(super) fn refuse(&self, why: &'static str, leaving: bool) {
        let mut calls = self.lock();
        calls.refusing.get_or_insert(why);
        calls.leaving |= leaving;
        self.look_at_rest(calls);
    }

    /// The connection is over.
    pub(super) fn end(&self, error: &Error) {
        let _ = self.why.set((error.code(), error.to_string()));
        let waiting = {
            let mut calls = self.lock();
            calls.refusing.get_or_insert("the connection has ended");
            std::mem::take(&mut calls.waiting)
        };
        self.closed.cancel();
        self.outbox.close();
        // Their callers see that nobody will answer, and ask `lost` why.
        drop(waiting);
        self.idle.notify_waiters();
    }

    /// What the end of the connection means for a call.
    pub(super) fn lost(&self, before: bool) -> Error {
        let (code, said) = self.why.get().cloned().unwrap_or((Code::Unavailable, "the connection has ended".into()));
        if before { Error::not_started(Code::Unavailable, said) } else { Error::unknown(code, said) }
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

async fn take(from: &Arc<Semaphore>, count: usize) -> Result<OwnedSemaphorePermit, tokio::sync::AcquireError> {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    match Arc::clone(from).try_acquire_many_owned(count) {
        Ok(room) => Ok(room),
        Err(_) => Arc::clone(from).acquire_many_owned(count).await,
    }
}

/// A call that was handed over.
pub(super) struct Pending {
    answer: oneshot::Receiver<Result<Answer>>,
    call: CancelOnDrop,
}

impl Pending {
    pub(super) async fn answered(mut self) -> Result<Response> {
        let answered = (&mut self.answer).await;
        self.call.call = None;
        match answered {
            Ok(answer) => answer.map(|answer| answer.response),
            Err(_) => Err(self.call.shared.lost(false)),
        }
    }
}

/// Tells the peer that nobody waits any more.
struct CancelOnDrop {
    call: Option<u64>,
    shared: Arc<Shared>,
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(call) = self.call.take()
            && self.shared.remove(call).is_some()
        {
            self.shared.outbox.cancel(call);
        }
    }
}
