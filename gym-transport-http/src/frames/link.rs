//! The calling end of a framed connection.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use gym_core::{Code, Error, Link, Message, PathInfo, Reply, Request, Response, Result};
use tokio::io::AsyncReadExt;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::config::FramesConfig;
use super::decode::{Decoder, Event};
use super::layout::{
    FRAME_BYTES, Greeting, HEADER_BYTES_MAX, Kind, ResponseHeader, malformed, read_failed, request_frame,
};
use super::outbox::{Outbox, Parcel, Room};
use super::pool::LandingPool;
use super::pulse::{Heard, heartbeat};
use super::socket::{ReadHalf, Socket};

/// Calls under way from which on requests are left to the writer task: it writes many at once, and with so many on their way
/// nobody waits for this one alone.
pub(super) const CROWD: usize = 8;

/// Room is counted in these, because a semaphore hands out at most `u32::MAX` at once.
const ROOM_BYTES: usize = 1 << 10;

/// One connection that takes many calls at a time.
pub(super) struct FramesLink {
    shared: Arc<Shared>,
    path: PathInfo,
}

impl FramesLink {
    /// Exchanges greetings over a connected socket.
    pub(super) async fn open(
        socket: Socket,
        already: &[u8],
        path: PathInfo,
        config: &FramesConfig,
        pool: Arc<LandingPool>,
    ) -> Result<Self> {
        let (mut read, write) = socket.split();
        let outbox = Outbox::new(write);
        outbox.post_urgent(Greeting::of(config).frame());
        let mut decoder = Decoder::new(config.limits(), Arc::clone(&pool), already);
        let theirs = greeting(&mut read, &mut decoder).await?;
        let shared = Arc::new(Shared::new(outbox, config, theirs));
        // It ends when `closed` fires: with the last channel and call, or with the connection.
        tokio::spawn(drive(Arc::clone(&shared), read, decoder, pool, config.silence_max));
        Ok(Self { shared, path })
    }

    fn subject(&self, request: &Request) -> String {
        format!("{} {} at {}://{}", request.verb, request.route, self.path.scheme, self.path.peer)
    }
}

impl fmt::Debug for FramesLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FramesLink({}://{})", self.path.scheme, self.path.peer)
    }
}

/// Reads until the peer's greeting is there.
pub(super) async fn greeting(read: &mut ReadHalf, decoder: &mut Decoder) -> Result<Greeting> {
    loop {
        match decoder.next()? {
            Some(Event::Greeting(payload)) => return Greeting::read(payload),
            Some(_) => return Err(malformed("the first frame is not a greeting")),
            None => {}
        }
        match read.read(decoder.space()).await {
            Ok(0) => return Err(Error::unknown(Code::Unavailable, "the peer left before its greeting")),
            Ok(count) => decoder.advance(count),
            Err(error) => {
                return Err(Error::unknown(Code::Unavailable, "no greeting came").caused_by(error));
            }
        }
    }
}

/// What the link, its calls and its task share.
struct Shared {
    outbox: Outbox,
    calls: Mutex<Calls>,
    /// No call is left.
    idle: Notify,
    closed: CancellationToken,
    why: OnceLock<(Code, String)>,
    theirs: Greeting,
    slots: Arc<Semaphore>,
    slots_max: usize,
    replies: Arc<Semaphore>,
    replies_max: usize,
    requests: Arc<Semaphore>,
    requests_max: usize,
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

fn units(bytes: usize) -> usize {
    bytes.div_ceil(ROOM_BYTES).min(u32::MAX as usize)
}

impl Shared {
    fn new(outbox: Outbox, config: &FramesConfig, theirs: Greeting) -> Self {
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

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_open(&self) -> Result<()> {
        match self.lock().refusing {
            Some(why) => Err(Error::not_started(Code::Unavailable, why)),
            None => Ok(()),
        }
    }

    /// What the peer would refuse is not sent.
    fn check_size(&self, message: &Message) -> Result<()> {
        check_size(message, &self.theirs).map_err(|said| Error::not_started(Code::ResourceExhausted, said))
    }

    /// A slot, room for the reply, room for the request: always in this order, so that nobody waits for what a waiter holds.
    async fn room(&self, request: &Request) -> Result<(Room, OwnedSemaphorePermit)> {
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

    fn hand_over(self: &Arc<Self>, request: &Request, room: Room, reply_room: OwnedSemaphorePermit) -> Result<Pending> {
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
                self.end(Error::unknown(Code::Unavailable, "the peer takes no new calls"));
            }
        }
    }

    /// Takes no new calls; `leaving`: the last one closes the connection.
    fn refuse(&self, why: &'static str, leaving: bool) {
        let mut calls = self.lock();
        calls.refusing.get_or_insert(why);
        calls.leaving |= leaving;
        self.look_at_rest(calls);
    }

    /// The connection is over.
    fn end(&self, error: Error) {
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
    fn lost(&self, before: bool) -> Error {
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
struct Pending {
    answer: oneshot::Receiver<Result<Answer>>,
    call: CancelOnDrop,
}

impl Pending {
    async fn answered(mut self) -> Result<Response> {
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

#[async_trait]
impl Link for FramesLink {
    async fn send(&self, request: Request) -> Result<Reply> {
        let pending = async {
            self.shared.check_open()?;
            self.shared.check_size(&request.message)?;
            let (room, reply_room) = self.shared.room(&request).await?;
            self.shared.hand_over(&request, room, reply_room)
        };
        let pending = pending.await.map_err(|error| error.about(self.subject(&request)))?;
        let Request { verb, route, .. } = request;
        let path = self.path.clone();
        Ok(Box::pin(async move {
            pending
                .answered()
                .await
                .map_err(|error| error.about(format!("{verb} {route} at {}://{}", path.scheme, path.peer)))
        }))
    }

    fn path(&self) -> &PathInfo {
        &self.path
    }

    async fn closed(&self) -> Error {
        self.shared.closed.cancelled().await;
        self.shared.lost(false).about(format!("{}://{}", self.path.scheme, self.path.peer))
    }

    async fn close(&self, grace: Duration) -> Result<()> {
        self.shared.refuse("the channel was closed", false);
        let drained = tokio::time::timeout(grace, async {
            loop {
                let idle = self.shared.idle.notified();
                if self.shared.lock().waiting.is_empty() {
                    return;
                }
                idle.await;
            }
        })
        .await;
        self.shared.end(Error::unknown(Code::Unavailable, "the channel was closed"));
        drained.map_err(|_| {
            Error::unknown(Code::DeadlineExceeded, "calls were still running when the channel closed")
                .about(self.path.peer.to_string())
        })
    }
}

impl Drop for FramesLink {
    fn drop(&mut self) {
        // Replies that were started may still come, and the last of them closes.
        self.shared.refuse("the channel was dropped", true);
    }
}

/// Moves bytes until the connection is over.
async fn drive(shared: Arc<Shared>, read: ReadHalf, decoder: Decoder, pool: Arc<LandingPool>, silence_max: Duration) {
    let heard = Heard::default();
    let mut writer = JoinSet::new();
    let writing = Arc::clone(&shared);
    // A task of its own, so that both directions can be busy at once.
    writer.spawn(async move { writing.outbox.run().await });
    let error = tokio::select! {
        biased;
        () = shared.closed.cancelled() => Error::unknown(Code::Unavailable, "the channel was closed"),
        error = read_answers(&shared, read, decoder, &heard) => error,
        Some(ended) = writer.join_next() => broken(ended.ok()),
        error = heartbeat(&shared.outbox, &heard, &pool, silence_max, &shared.theirs) => error,
    };
    shared.end(error);
    pool.trim(Duration::ZERO);
}

/// What it means that the socket failed.
pub(super) fn broken(error: Option<std::io::Error>) -> Error {
    let said = Error::unknown(Code::Unavailable, "the connection broke");
    match error {
        Some(error) => said.caused_by(error),
        None => said,
    }
}

async fn read_answers(shared: &Shared, mut read: ReadHalf, mut decoder: Decoder, heard: &Heard) -> Error {
    let mut header = None;
    loop {
        loop {
            match decoder.next() {
                Ok(Some(event)) => {
                    if let Err(error) = take_event(shared, &mut decoder, &mut header, event) {
                        return error;
                    }
                }
                Ok(None) => break,
                Err(error) => return error,
            }
        }
        match read.read(decoder.space()).await {
            Ok(0) if decoder.is_at_rest() => return Error::unknown(Code::Unavailable, "the peer has left"),
            Ok(0) => return Error::unknown(Code::Unavailable, "the peer left in the middle of an answer"),
            Ok(count) => decoder.advance(count),
            Err(error) => return broken(Some(error)),
        }
        heard.set();
    }
}

fn take_event(shared: &Shared, decoder: &mut Decoder, header: &mut Option<ResponseHeader>, event: Event) -> Result<()> {
    match event {
        Event::Opening(opening) if opening.kind == Kind::Response => {
            let most = shared.lock().waiting.get(&opening.call).map(|waiting| waiting.reply_bytes_max);
            match most {
                // Its caller has left: read past it.
                None => {}
                Some(most) if opening.total > most => {
                    return Err(malformed(format!("an answer of {} bytes; {most} was the most", opening.total)));
                }
                Some(_) => {
                    *header = Some(ResponseHeader::read(opening.header)?);
                    decoder.keep()?;
                }
            }
        }
        Event::Landed(landed) => {
            let header = header.take().ok_or_else(|| malformed("an answer without its beginning"))?;
            if let Some(waiting) = shared.remove(landed.call) {
                let message =
                    Message { content_type: header.content_type, head: landed.head.into(), segments: landed.segments };
                // What has arrived keeps only its own bytes of room.
                let mut reply_room = waiting.reply_room;
                let room = reply_room.split(units(message.len()).min(reply_room.num_permits()));
                let response = Response { status: header.status, metadata: header.metadata, message };
                let _ = waiting.answer.send(Ok(Answer { response, _room: room }));
            }
        }
        Event::Failed(call, payload) => {
            let error = read_failed(payload)?;
            if let Some(waiting) = shared.remove(call) {
                let _ = waiting.answer.send(Err(error));
            }
        }
        Event::Drain => shared.refuse("the peer takes no new calls", true),
        Event::Heartbeat => {}
        Event::Greeting(_) | Event::Opening(_) | Event::Cancel(_) => {
            return Err(malformed(format!("{event:?} is not for a caller")));
        }
    }
    Ok(())
}
