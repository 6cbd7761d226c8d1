//! One connection: the link of the client, the end of the server, and the state of its calls.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;

use super::SCHEME;
use super::wire::{Packet, SimState, drained};
use crate::base::cancel::CancelToken;
use crate::base::error::{Code, Error, Result};
use crate::message::PeerInfo;
use crate::message::frame::{MessageLimits, decode, encode};
use crate::message::{CallContext, TraceContext};
use crate::message::{Message, Request, Response};
use crate::transport::Handler;
use crate::transport::Incoming;
use crate::transport::{Link, PathInfo, Reply};

/// The state that both ends share. It has no reference to the network, so that messages in flight do not keep the
/// network alive.
pub(super) struct Conn {
    pub(super) id: u64,
    pub(super) client: Arc<str>,
    pub(super) server: Arc<str>,
    /// The incarnation of the server.
    pub(super) server_life: u64,
    /// Fires when the client has noticed the end of the connection; ends its calls.
    pub(super) client_closed: CancelToken,
    /// Fires when the server has noticed the end of the connection; its handlers are dropped.
    pub(super) server_closed: CancelToken,
    drained: AtomicBool,
    next_call: AtomicU64,
    arrivals: mpsc::Sender<SimRequest>,
    ends: Mutex<Ends>,
    idle: Notify,
}

#[derive(Default)]
struct Ends {
    /// Calls whose reply is awaited.
    waiting: BTreeMap<u64, oneshot::Sender<Result<Response>>>,
    /// Calls that have arrived or were cancelled.
    present: BTreeMap<u64, CancelToken>,
    /// The client makes no new calls.
    closing: bool,
    /// All channels were dropped: the last reply closes the connection.
    abandoned: bool,
    /// The arrival times of the last request and of the last reply.
    last_arrival: [Option<Instant>; 2],
}

/// A request on the wire.
#[derive(Clone)]
pub(super) struct SimRequest {
    pub(super) call: u64,
    request: Request,
    remaining: Duration,
}

impl fmt::Display for SimRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} as #{}", self.request.verb, self.request.route, self.call)
    }
}

impl SimRequest {
    pub(super) fn route(&self) -> &str {
        self.request.route.path()
    }

    /// Serializes the request as a wire would: text instead of shared memory, the remaining time instead of an instant.
    fn write(call: u64, request: Request) -> Result<Self> {
        let remaining = request.context.remaining();
        let message = rewritten(&request.message)?;
        Ok(Self { call, remaining, request: Request { message, ..request } })
    }

    /// The request as the server reads it: with a deadline by the server's clock, and a token that fires when the
    /// server notices that the client disconnected.
    fn read(self, from: &Arc<str>, gone: &CancelToken) -> Request {
        let sent = self.request.context;
        let mut context = CallContext::within(self.remaining);
        context.cancel = gone.clone();
        context.trace =
            sent.trace.to_traceparent().as_deref().and_then(TraceContext::from_traceparent).unwrap_or_default();
        context.reply_bytes_max = sent.reply_bytes_max;
        context.incarnation = sent.incarnation;
        context.metadata = sent.metadata;
        Request { context, peer: Some(PeerInfo { address: Arc::clone(from) }), ..self.request }
    }
}

fn rewritten(message: &Message) -> Result<Message> {
    Ok(decode(encode(message).to_bytes(), &MessageLimits::default(), message.content_type.clone())?)
}

impl Conn {
    pub(super) fn new(
        id: u64,
        client: Arc<str>,
        (server, server_life): (Arc<str>, u64),
        arrivals: mpsc::Sender<SimRequest>,
    ) -> Self {
        Self {
            id,
            client,
            server,
            server_life,
            client_closed: CancelToken::new(),
            server_closed: CancelToken::new(),
            drained: AtomicBool::new(false),
            next_call: AtomicU64::new(0),
            arrivals,
            ends: Mutex::default(),
            idle: Notify::new(),
        }
    }

    pub(super) fn direction(&self, to_server: bool) -> (&Arc<str>, &Arc<str>) {
        if to_server { (&self.client, &self.server) } else { (&self.server, &self.client) }
    }

    /// Returns the latest arrival before this message, and stores the arrival of this one.
    pub(super) fn last_arrival(&self, to_server: bool, at: Instant) -> Instant {
        let last = &mut self.ends.lock().last_arrival[usize::from(to_server)];
        let before = last.unwrap_or(at);
        *last = Some(before.max(at));
        before
    }

    pub(super) fn was_drained(&self) -> bool {
        self.drained.load(Ordering::Relaxed)
    }

    pub(super) fn arrive(&self, request: SimRequest) -> Result<()> {
        self.arrivals
            .try_send(request)
            .map_err(|_| Error::not_started(Code::ResourceExhausted, "too many calls wait on this connection"))
    }

    pub(super) fn cancel(&self, call: u64) {
        self.ends.lock().present.entry(call).or_default().cancel();
    }

    pub(super) fn answer(&self, call: u64, result: Result<Response>) {
        if let Some(waiting) = self.ends.lock().waiting.remove(&call) {
            // An error: the caller has just cancelled the call.
            let _ = waiting.send(result);
        }
    }

    fn lost(&self) -> Error {
        Error::unknown(Code::Unavailable, "the peer disconnected").about(self.server.to_string())
    }
}

/// The end of the client.
pub(super) struct SimLink {
    shared: Arc<SimState>,
    conn: Arc<Conn>,
    path: PathInfo,
    slots: Arc<Semaphore>,
}

impl SimLink {
    pub(super) fn new(shared: Arc<SimState>, conn: Arc<Conn>, calls_max: usize, ordered: bool) -> Self {
        let path = PathInfo::new(SCHEME, Arc::clone(&conn.server), ordered);
        Self { shared, conn, path, slots: Arc::new(Semaphore::new(calls_max)) }
    }
}

impl fmt::Debug for SimLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimLink({} to {})", self.conn.client, self.conn.server)
    }
}

fn close_client(shared: &SimState, conn: &Arc<Conn>) {
    if !conn.client_closed.is_cancelled() {
        conn.client_closed.cancel();
        shared.transmit(conn, true, Packet::Gone);
    }
}

impl Drop for SimLink {
    fn drop(&mut self) {
        // The last channel was dropped. Replies may still arrive; the last one closes the connection.
        let mut ends = self.conn.ends.lock();
        (ends.closing, ends.abandoned) = (true, true);
        let busy = !ends.waiting.is_empty();
        drop(ends);
        if !busy {
            close_client(&self.shared, &self.conn);
        }
    }
}

/// A caller that waits for its reply. Dropping it before the reply cancels the call.
struct Waiting {
    shared: Arc<SimState>,
    conn: Arc<Conn>,
    call: u64,
    _slot: OwnedSemaphorePermit,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut ends = self.conn.ends.lock();
        let unanswered = ends.waiting.remove(&self.call).is_some();
        let (idle, abandoned) = (ends.waiting.is_empty(), ends.abandoned);
        drop(ends);
        if unanswered && !self.conn.client_closed.is_cancelled() {
            self.shared.transmit(&self.conn, true, Packet::Cancel { call: self.call });
        }
        if idle {
            self.conn.idle.notify_waiters();
            if abandoned {
                close_client(&self.shared, &self.conn);
            }
        }
    }
}

#[async_trait]
impl Link for SimLink {
    async fn send(&self, request: Request) -> Result<Reply> {
        let conn = &self.conn;
        let unavailable =
            || Error::not_started(Code::Unavailable, "the connection is closed").about(conn.server.to_string());
        let slot = tokio::select! {
            biased;
            () = conn.client_closed.cancelled() => return Err(unavailable()),
            slot = Arc::clone(&self.slots).acquire_owned() => slot.map_err(|_| unavailable())?,
        };
        let call = conn.next_call.fetch_add(1, Ordering::Relaxed);
        let reply_bytes_max = request.context.reply_bytes_max;
        let request = SimRequest::write(call, request)?;
        let (sender, answer) = oneshot::channel();
        {
            let mut ends = conn.ends.lock();
            if ends.closing {
                return Err(unavailable());
            }
            ends.waiting.insert(call, sender);
        }
        let waiting = Waiting { shared: Arc::clone(&self.shared), conn: Arc::clone(conn), call, _slot: slot };
        self.shared.transmit(conn, true, Packet::Request(Box::new(request)));
        Ok(Box::pin(async move {
            let conn = Arc::clone(&waiting.conn);
            let answered = tokio::select! {
                biased;
                answered = answer => answered.unwrap_or_else(|_| Err(conn.lost())),
                () = conn.client_closed.cancelled() => Err(conn.lost()),
            };
            drop(waiting);
            let response = answered?;
            if response.message.len() > reply_bytes_max {
                let bytes = response.message.len();
                return Err(Error::finished(
                    Code::ResourceExhausted,
                    format!("the reply has {bytes} bytes, more than the {reply_bytes_max} of reply_bytes_max"),
                ));
            }
            Ok(response)
        }))
    }

    fn path(&self) -> &PathInfo {
        &self.path
    }

    async fn closed(&self) -> Error {
        self.conn.client_closed.cancelled().await;
        self.conn.lost()
    }

    async fn close(&self, grace: Duration) -> Result<()> {
        let conn = &self.conn;
        conn.ends.lock().closing = true;
        let drained = tokio::time::timeout(grace, async {
            loop {
                let idle = conn.idle.notified();
                if conn.ends.lock().waiting.is_empty() || conn.client_closed.is_cancelled() {
                    return;
                }
                tokio::select! {
                    biased;
                    () = conn.client_closed.cancelled() => return,
                    () = idle => {}
                }
            }
        })
        .await;
        close_client(&self.shared, conn);
        drained.map_err(|_| Error::unknown(Code::DeadlineExceeded, "calls were still running when the channel closed"))
    }
}

/// The end of the server, accepted or in the accept queue.
pub(super) struct SimIncoming {
    server: ServerEnd,
    arrived: mpsc::Receiver<SimRequest>,
    peer: PeerInfo,
}

/// Notifies the client when it is dropped.
struct ServerEnd {
    shared: Arc<SimState>,
    conn: Arc<Conn>,
}

impl Drop for ServerEnd {
    fn drop(&mut self) {
        if !self.conn.server_closed.is_cancelled() {
            self.conn.server_closed.cancel();
            self.shared.transmit(&self.conn, false, Packet::Gone);
        }
    }
}

impl SimIncoming {
    pub(super) fn new(shared: Arc<SimState>, conn: Arc<Conn>, arrived: mpsc::Receiver<SimRequest>) -> Self {
        let peer = PeerInfo { address: Arc::clone(&conn.client) };
        Self { server: ServerEnd { shared, conn }, arrived, peer }
    }
}

impl fmt::Debug for SimIncoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimIncoming({} at {})", self.peer.address, self.server.conn.server)
    }
}

#[async_trait]
impl Incoming for SimIncoming {
    fn peer(&self) -> &PeerInfo {
        &self.peer
    }

    async fn serve(self: Box<Self>, handler: Arc<dyn Handler>, drain: CancelToken) -> Result<()> {
        let Self { server, mut arrived, peer } = *self;
        let (shared, conn) = (&server.shared, &server.conn);
        let refuse = |request: SimRequest| {
            let refusal = Packet::Reply { call: request.call, result: Err(drained()) };
            shared.transmit(conn, false, refusal);
        };
        let mut running = FuturesUnordered::new();
        let mut draining = false;
        while !draining || !running.is_empty() {
            tokio::select! {
                biased;
                () = conn.server_closed.cancelled() => return Ok(()),
                () = drain.cancelled(), if !draining => draining = true,
                Some(()) = running.next(), if !running.is_empty() => {}
                Some(request) = arrived.recv() => {
                    if draining {
                        refuse(request);
                        continue;
                    }
                    let call = request.call;
                    let gone = conn.ends.lock().present.entry(call).or_default().clone();
                    if gone.is_cancelled() {
                        continue;
                    }
                    // Called in the order of arrival, and not at the first poll of the future.
                    let answer = handler.handle(request.read(&peer.address, &gone));
                    running.push(async move {
                        // Also cancels the calls that the handler made.
                        let _gone = gone.clone().drop_guard();
                        let answered = tokio::select! {
                            biased;
                            () = gone.cancelled() => None,
                            answered = answer => Some(answered),
                        };
                        conn.ends.lock().present.remove(&call);
                        let Some(answered) = answered else { return };
                        let mut response = answered.unwrap_or_else(|error| Response::from_error(&error));
                        let result = rewritten(&response.message).map(|message| {
                            response.message = message;
                            response
                        });
                        shared.transmit(conn, false, Packet::Reply { call, result });
                    });
                }
            }
        }
        conn.drained.store(true, Ordering::Relaxed);
        while let Ok(request) = arrived.try_recv() {
            refuse(request);
        }
        Ok(())
    }
}
