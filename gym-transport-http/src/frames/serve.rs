//! The answering end of a framed connection.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_core::{Code, Error, Handler, Message, PeerInfo, Request, Response, Result};
use tokio::io::AsyncReadExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use super::config::FramesConfig;
use super::decode::{Decoder, Event, Opening};
use super::layout::{
    FRAME_BYTES, Greeting, HEADER_BYTES_MAX, Kind, RequestHeader, bare, failed_frame, malformed, response_frame,
};
use super::link::{CROWD, broken, check_size, greeting};
use super::outbox::{Outbox, Parcel};
use super::pool::LandingPool;
use super::pulse::{Heard, heartbeat};
use super::socket::{ReadHalf, Socket};

/// What the connections of a listener share.
#[derive(Clone, Debug)]
pub(crate) struct Hall {
    config: FramesConfig,
    pool: Arc<LandingPool>,
    /// Calls of all connections.
    calls: Arc<Semaphore>,
}

impl Hall {
    pub(crate) fn new(config: FramesConfig, calls: Arc<Semaphore>) -> Self {
        let pool = LandingPool::new(config.pool_bytes_max);
        Self { config, pool, calls }
    }
}

/// Answers the calls of one connection. Ends when the peer leaves, which it does soon after it was told that `drain` fired.
/// Dropping the future drops its running calls.
pub(crate) async fn serve(
    socket: Socket,
    already: &[u8],
    hall: Hall,
    handler: Arc<dyn Handler>,
    peer: PeerInfo,
    drain: CancellationToken,
) -> Result<()> {
    let (mut read, write) = socket.split();
    let outbox = Outbox::new(write);
    outbox.post_urgent(Greeting::of(&hall.config).frame());
    let mut decoder = Decoder::new(hall.config.limits(), Arc::clone(&hall.pool), already);
    let patience = hall.config.connect_timeout;
    let theirs = tokio::time::timeout(patience, greeting(&mut read, &mut decoder))
        .await
        .map_err(|_| Error::unknown(Code::DeadlineExceeded, format!("no greeting within {patience:?}")))
        .flatten()?;
    let shared = Arc::new(Shared {
        outbox,
        running: Mutex::default(),
        draining: AtomicBool::new(false),
        theirs,
        config: hall.config,
        calls: hall.calls,
    });
    let heard = Heard::default();
    let mut writer = JoinSet::new();
    let writing = Arc::clone(&shared);
    writer.spawn(async move { writing.outbox.run().await });
    let reader = Reader {
        _closing: CloseOnDrop(Arc::clone(&shared)),
        tasks: JoinSet::new(),
        shared: &shared,
        handler,
        peer,
        header: None,
        last_call: 0,
    };
    let ended = tokio::select! {
        biased;
        ended = reader.run(read, decoder, &heard) => ended,
        Some(ended) = writer.join_next() => Err(broken(ended.ok())),
        error = heartbeat(&shared.outbox, &heard, &hall.pool, shared.config.silence_max, &shared.theirs) => Err(error),
        never = tell_of_drain(&shared, &drain) => never,
    };
    hall.pool.trim(Duration::ZERO);
    ended
}

async fn tell_of_drain(shared: &Shared, drain: &CancellationToken) -> Result<()> {
    // A child of its own: the parent's lock is shared by all connections.
    drain.child_token().cancelled().await;
    shared.draining.store(true, Ordering::Relaxed);
    shared.outbox.post_urgent(bare(Kind::Drain, 0));
    // The peer closes when its last call is answered; only it knows that none is on its way.
    std::future::pending().await
}

struct CloseOnDrop(Arc<Shared>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.outbox.close();
    }
}

struct Shared {
    outbox: Outbox,
    running: Mutex<Running>,
    draining: AtomicBool,
    theirs: Greeting,
    config: FramesConfig,
    calls: Arc<Semaphore>,
}

#[derive(Default)]
struct Running {
    calls: HashMap<u64, Call>,
    bytes: usize,
}

/// A call from its first byte to its answer.
struct Call {
    bytes: usize,
    cancel: CancellationToken,
    task: Option<AbortHandle>,
    _room: OwnedSemaphorePermit,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a call in before its message is there, so that what has no room is never allocated.
    fn admit(&self, opening: &Opening, cancel: CancellationToken) -> Result<()> {
        let full = |said: String| Error::not_started(Code::ResourceExhausted, said);
        if self.draining.load(Ordering::Relaxed) {
            return Err(Error::not_started(Code::Unavailable, "the peer takes no new calls"));
        }
        let room = Arc::clone(&self.calls)
            .try_acquire_owned()
            .map_err(|_| full("the peer has as many calls under way as requests_max allows".into()))?;
        let mut running = self.lock();
        let FramesConfig { calls_max, request_bytes_in_flight_max: bytes_max, .. } = self.config;
        if running.calls.len() >= calls_max {
            return Err(full(format!("this connection has calls_max = {calls_max} calls under way")));
        }
        if running.bytes > 0 && running.bytes.saturating_add(opening.total) > bytes_max {
            return Err(full(format!("the requests under way exceed request_bytes_in_flight_max = {bytes_max}")));
        }
        running.bytes += opening.total;
        running.calls.insert(opening.call, Call { bytes: opening.total, cancel, task: None, _room: room });
        Ok(())
    }

    fn remove(&self, call: u64) -> Option<Call> {
        let mut running = self.lock();
        let removed = running.calls.remove(&call)?;
        running.bytes -= removed.bytes;
        Some(removed)
    }

    fn cancel(&self, call: u64) {
        if let Some(call) = self.remove(call) {
            call.cancel.cancel();
            if let Some(task) = call.task {
                task.abort();
            }
        }
    }

    fn answer(&self, call: u64, reply_bytes_max: usize, response: &Response) {
        let too_large = |said: String| {
            let error = Error::finished(Code::ResourceExhausted, said);
            self.outbox.post_urgent(failed_frame(call, &error));
        };
        let crowded = {
            let running = self.lock();
            running.calls.len() > CROWD
        };
        // Before the answer leaves, which lets the next request come.
        if self.remove(call).is_none() {
            return;
        }
        let length = response.message.len();
        if length > reply_bytes_max {
            return too_large(format!(
                "the reply of {length} bytes is larger than reply_bytes_max = {reply_bytes_max}; raise it if this is wanted"
            ));
        }
        if let Err(said) = check_size(&response.message, &self.theirs) {
            return too_large(format!("the reply is too large: {said}"));
        }
        let frame = response_frame(call, response);
        if frame.len() - FRAME_BYTES > HEADER_BYTES_MAX {
            return too_large(format!("the metadata of the reply take more than {HEADER_BYTES_MAX} bytes"));
        }
        self.outbox.post(Parcel::new(call, frame, &response.message, None), crowded);
    }
}

/// One call's task: whatever becomes of it, its caller hears of it.
struct Duty {
    shared: Arc<Shared>,
    call: u64,
    reply_bytes_max: usize,
    cancel: CancellationToken,
    done: bool,
}

impl Duty {
    async fn run(mut self, answer: BoxFuture<'static, Result<Response>>) {
        let response = answer.await.unwrap_or_else(|error| Response::from_error(&error));
        self.done = true;
        self.shared.answer(self.call, self.reply_bytes_max, &response);
    }
}

impl Drop for Duty {
    fn drop(&mut self) {
        if !self.done {
            // The caller has left, or the connection is gone: what was handed on is to end too. A call that is still on the
            // list was ended by neither.
            self.cancel.cancel();
            if self.shared.remove(self.call).is_some() {
                let error = Error::internal("the handler panicked");
                self.shared.outbox.post_urgent(failed_frame(self.call, &error));
            }
        }
    }
}

struct Reader<'a> {
    /// Dropped before the tasks: of calls that end with the connection nobody is told.
    _closing: CloseOnDrop,
    tasks: JoinSet<()>,
    shared: &'a Arc<Shared>,
    handler: Arc<dyn Handler>,
    peer: PeerInfo,
    /// Of the request that is on its way in.
    header: Option<RequestHeader>,
    last_call: u64,
}

impl Reader<'_> {
    async fn run(mut self, mut read: ReadHalf, mut decoder: Decoder, heard: &Heard) -> Result<()> {
        loop {
            while let Some(event) = decoder.next()? {
                self.take_event(&mut decoder, event)?;
            }
            match read.read(decoder.space()).await {
                Ok(0) if decoder.is_at_rest() => return Ok(()),
                Ok(0) => return Err(Error::unknown(Code::DataLoss, "the peer left in the middle of a request")),
                Ok(count) => decoder.advance(count),
                Err(error) => return Err(broken(Some(error))),
            }
            heard.set();
        }
    }

    fn take_event(&mut self, decoder: &mut Decoder, event: Event) -> Result<()> {
        match event {
            Event::Opening(opening) if opening.kind == Kind::Request => {
                if opening.call <= self.last_call {
                    let (call, last) = (opening.call, self.last_call);
                    return Err(malformed(format!("call {call} after call {last}: numbers only grow")));
                }
                self.last_call = opening.call;
                let header = RequestHeader::read(opening.header.clone())?;
                match self.shared.admit(&opening, header.context.cancel.clone()) {
                    Ok(()) => {
                        self.header = Some(header);
                        decoder.keep()?;
                    }
                    // Its message is read past.
                    Err(error) => self.shared.outbox.post_urgent(failed_frame(opening.call, &error)),
                }
            }
            Event::Landed(landed) => {
                let header = self.header.take().ok_or_else(|| malformed("a request without its beginning"))?;
                let RequestHeader { verb, route, context, content_type } = header;
                let message = Message { content_type, head: landed.head.into(), segments: landed.segments };
                let peer = Some(self.peer.clone());
                self.begin(landed.call, Request { verb, route, context, peer, message });
            }
            Event::Cancel(call) => self.shared.cancel(call),
            Event::Heartbeat => {}
            Event::Greeting(_) | Event::Opening(_) | Event::Failed(..) | Event::Drain => {
                return Err(malformed(format!("{event:?} is not for a server")));
            }
        }
        Ok(())
    }

    fn begin(&mut self, call: u64, request: Request) {
        // Reaped as others come, so that the set holds few that are done.
        while self.tasks.try_join_next().is_some() {}
        if let Err(error) = request.context.check() {
            if self.shared.remove(call).is_some() {
                self.shared.outbox.post_urgent(failed_frame(call, &error));
            }
            return;
        }
        let duty = Duty {
            shared: Arc::clone(self.shared),
            call,
            reply_bytes_max: request.context.reply_bytes_max,
            cancel: request.context.cancel.clone(),
            done: false,
        };
        // Here and not in the task: the order of these calls is the order of arrival.
        let answer = self.handler.handle(request);
        let task = self.tasks.spawn(duty.run(answer));
        if let Some(call) = self.shared.lock().calls.get_mut(&call) {
            call.task = Some(task);
        }
    }
}
