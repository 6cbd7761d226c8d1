//! The in-process transport: calls between servers of one process, without a socket and without a copy.
//!
//! All-in-one runs use no other transport. [`InProcess::faithful`] serializes and parses every message as a wire would, so that
//! tests find code that works only because it shares memory.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::base::cancel::CancelToken;
use crate::base::error::{Code, Error, Execution, Result};
use crate::message::PeerInfo;
use crate::message::frame::{MessageLimits, decode, encode};
use crate::message::{CALL_WAIT_METADATA, Message, Request};
use crate::message::{CallContext, TraceContext};
use crate::transport::Handler;
use crate::transport::{
    Backend, BoundListener, ConnectOptions, Connector, Endpoint, Incoming, ListenOptions, Listener, Transport,
};
use crate::transport::{Channel, Link, PathInfo, Reply};

mod connection;
mod reply;

use connection::{CallSlot, CloseOnDrop, Connection};
use reply::{InProcessReply, RunningCall};

/// The scheme of in-process endpoints: `mem://name`.
pub const SCHEME: &str = "mem";

/// Maximum number of peers that have connected and are not accepted yet. A server accepts at once, so more peers mean that it is
/// stuck.
const ACCEPT_QUEUE_MAX: usize = 1_024;

/// Maximum concurrent calls on one link, unless its handler bounds them. The default queue of an HTTP server has the same size,
/// so that moving a server out of the process does not change its capacity.
const CALLS_MAX: usize = 16_384;

/// The in-process transport and its registry of listeners by name. Cheap to clone; clones share the names.
#[derive(Clone, Debug)]
pub struct InProcess {
    listeners: Arc<Mutex<BTreeMap<String, mpsc::Sender<Arc<Connection>>>>>,
    calls_max: usize,
    faithful: bool,
}

impl InProcess {
    /// Creates a transport without listeners.
    #[must_use]
    pub fn new() -> Self {
        Self { listeners: Arc::default(), calls_max: CALLS_MAX, faithful: false }
    }

    /// Returns the transport, with the same names and another bound on the concurrent calls of one link, for handlers that do not
    /// [bound](ListenOptions::bounded_by_handler) them. A further call waits, within its deadline, until the response of another call is read.
    #[must_use]
    pub fn with_calls_max(mut self, calls_max: usize) -> Self {
        self.calls_max = calls_max;
        self
    }

    /// Returns the transport, with the same names. Every message is serialized and parsed as over a wire.
    #[must_use]
    pub fn faithful(mut self) -> Self {
        self.faithful = true;
        self
    }

    /// Registers the name and accepts peers under it until the listener is dropped.
    ///
    /// # Errors
    /// `AlreadyExists` if the name is already registered.
    pub fn listen(&self, name: &str) -> Result<InProcessListener> {
        self.listen_at(name, false)
    }

    fn listen_at(&self, name: &str, bounded_by_handler: bool) -> Result<InProcessListener> {
        let (sender, accepted) = mpsc::channel(ACCEPT_QUEUE_MAX);
        let mut listeners = self.listeners.lock();
        if listeners.get(name).is_some_and(|known| !known.is_closed()) {
            return Err(Error::not_started(Code::AlreadyExists, "the name is taken in this process")
                .about(format!("listen on {SCHEME}://{name}")));
        }
        listeners.insert(name.to_owned(), sender);
        let endpoints = [Endpoint::parse(&format!("{SCHEME}://{name}"))?];
        Ok(InProcessListener { endpoints, accepted, bounded_by_handler })
    }
}

impl Default for InProcess {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Connector for InProcess {
    fn scheme(&self) -> &'static str {
        SCHEME
    }

    fn transports(&self) -> Vec<Transport> {
        vec![Transport::MEM]
    }

    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel> {
        cx.check()?;
        let refused = |why| Error::not_started(Code::Unavailable, why).about(format!("connect to {to}"));
        let listener = self.listeners.lock().get(to.address()).cloned();
        let listener = listener.ok_or_else(|| refused("nobody listens under this name in this process"))?;
        let connection = Arc::new(Connection::new(to.address().into(), self.calls_max, CancelToken::new()));
        // Created before the peer is notified, so that every failure from here on closes the connection.
        let link = InProcessLink {
            connection: Arc::clone(&connection),
            path: path(to.address(), self.faithful),
            faithful: self.faithful,
        };
        cx.bound(Execution::NotStarted, async {
            listener.send(Arc::clone(&connection)).await.map_err(|_| refused("the listener has left"))?;
            tokio::select! {
                biased;
                () = connection.closed.cancelled() => Err(refused("the peer left before serving")),
                () = connection.served.notified() => Ok(()),
            }
        })
        .await?;
        Ok(Channel::new(link).fenced(options.incarnation))
    }
}

#[async_trait]
impl Backend for InProcess {
    fn connectors(&self) -> Vec<Arc<dyn Connector>> {
        vec![Arc::new(self.clone())]
    }

    async fn listen(&self, options: &ListenOptions, handler: Arc<dyn Handler>) -> Result<Option<BoundListener>> {
        let Some(name) = &options.name else { return Ok(None) };
        let listener = self.listen_at(name, options.bounded_by_handler)?;
        Ok(Some(BoundListener { listener: Box::new(listener), handler }))
    }
}

/// Creates a channel to a handler of this process that bounds its calls itself, without a name and a listener. If `faithful`, every message is serialized and
/// parsed as over a wire. The channel breaks when `closed` fires: running calls end as `Unavailable, Unknown`.
#[must_use]
pub fn channel_to(peer: &str, handler: Arc<dyn Handler>, faithful: bool, closed: CancelToken) -> Channel {
    let connection = Connection::new(peer.into(), CALLS_MAX, closed);
    connection.serve_with(handler, true);
    Channel::new(InProcessLink { connection: Arc::new(connection), path: path(peer, faithful), faithful })
}

fn path(peer: &str, faithful: bool) -> PathInfo {
    let path = PathInfo::new(SCHEME, peer, true);
    if faithful { path } else { path.sharing_memory() }
}

/// Accepts in-process peers under one name.
#[derive(Debug)]
pub struct InProcessListener {
    endpoints: [Endpoint; 1],
    accepted: mpsc::Receiver<Arc<Connection>>,
    bounded_by_handler: bool,
}

#[async_trait]
impl Listener for InProcessListener {
    fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    async fn accept(&mut self) -> Result<Box<dyn Incoming>> {
        match self.accepted.recv().await {
            Some(connection) => Ok(Box::new(InProcessIncoming(CloseOnDrop(connection), self.bounded_by_handler))),
            None => Err(Error::not_started(Code::Unavailable, "the name was taken over")),
        }
    }
}

impl Drop for InProcessListener {
    fn drop(&mut self) {
        // Otherwise, peers in the queue would wait forever.
        self.accepted.close();
        while let Ok(connection) = self.accepted.try_recv() {
            connection.closed.cancel();
        }
    }
}

/// An accepted peer, and whether the handler bounds its calls itself.
struct InProcessIncoming(CloseOnDrop, bool);

impl fmt::Debug for InProcessIncoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InProcessIncoming({})", self.peer().address)
    }
}

#[async_trait]
impl Incoming for InProcessIncoming {
    fn peer(&self) -> &PeerInfo {
        &self.0.0.caller
    }

    async fn serve(self: Box<Self>, handler: Arc<dyn Handler>, drain: CancelToken) -> Result<()> {
        let connection = &self.0.0;
        connection.serve_with(handler, self.1);
        connection.served.notify_one();
        tokio::select! {
            biased;
            () = connection.closed.cancelled() => {}
            () = drain.cancelled() => connection.drain().await,
        }
        Ok(())
    }
}

struct InProcessLink {
    connection: Arc<Connection>,
    path: PathInfo,
    faithful: bool,
}

impl fmt::Debug for InProcessLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InProcessLink({})", self.path.peer)
    }
}

impl Drop for InProcessLink {
    fn drop(&mut self) {
        self.connection.abandon();
    }
}

impl InProcessLink {
    fn unavailable(&self) -> Error {
        Error::not_started(Code::Unavailable, "the peer has left").about(self.path.peer.to_string())
    }

    /// Passes a request that has a slot to the handler.
    fn dispatch(&self, mut request: Request, slot: CallSlot) -> Result<Reply> {
        let handler = self.connection.handler().ok_or_else(|| self.unavailable())?;
        if self.faithful {
            request = rewritten_request(request)?;
        }
        request.peer = Some(self.connection.caller.clone());
        // No connection can break: a caller that leaves does not come back.
        if request.context.metadata.get(CALL_WAIT_METADATA).is_some() {
            request.context.metadata.retain(|name| name != CALL_WAIT_METADATA);
            request.context.metadata.push(CALL_WAIT_METADATA, "0");
        }
        // The call's own token: calls that the handler makes are cancelled when the reply is dropped, as over a wire.
        let cancel = request.context.cancel.into_child();
        request.context.cancel = cancel.clone();
        let reply_bytes_max = request.context.reply_bytes_max;
        let running = RunningCall {
            answer: handler.handle(request),
            closed: self.connection.closed.clone().into_cancelled(),
            cancel_guard: cancel.drop_guard(),
            slot,
        };
        Ok(Box::pin(InProcessReply { running: Some(running), reply_bytes_max, faithful: self.faithful }))
    }
}

#[async_trait]
impl Link for InProcessLink {
    async fn send(&self, request: Request) -> Result<Reply> {
        let slot = self.connection.acquire_slot().await?;
        self.dispatch(request, slot)
    }

    fn path(&self) -> &PathInfo {
        &self.path
    }

    async fn closed(&self) -> Error {
        self.connection.closed.cancelled().await;
        Error::unknown(Code::Unavailable, "the peer has left").about(self.path.peer.to_string())
    }

    async fn close(&self, grace: Duration) -> Result<()> {
        let drained = tokio::time::timeout(grace, self.connection.drain()).await;
        self.connection.closed.cancel();
        drained.map_err(|_| Error::unknown(Code::DeadlineExceeded, "calls were still running when the channel closed"))
    }
}

/// The outcome of [`try_send`].
#[allow(clippy::large_enum_variant, reason = "a request is returned only where a call has to wait for capacity")]
pub enum TrySendOutcome {
    /// The link accepted the request, or failed before it did.
    Done(Result<Reply>),
    /// Sending would wait. Nothing has happened; this is the request.
    WouldBlock(Request),
}

impl fmt::Debug for TrySendOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Done(Ok(_)) => "Done",
            Self::Done(Err(_)) => "Failed",
            Self::WouldBlock(_) => "WouldBlock",
        })
    }
}

/// Accepts the request if the link is in-process and has capacity, and returns it otherwise, for [`Link::send`]. Order, capacity
/// and errors are those of `send`; this spares calls within a process a boxed future.
#[must_use]
pub fn try_send(link: &dyn Link, request: Request) -> TrySendOutcome {
    let Some(link) = (link as &dyn Any).downcast_ref::<InProcessLink>() else {
        return TrySendOutcome::WouldBlock(request);
    };
    match link.connection.try_acquire_slot() {
        Ok(Some(slot)) => TrySendOutcome::Done(link.dispatch(request, slot)),
        Ok(None) => TrySendOutcome::WouldBlock(request),
        Err(error) => TrySendOutcome::Done(Err(error)),
    }
}

/// Returns the number of bytes of a message. A lazy value counts as zero, because it is not serialized.
fn bytes_taken(message: &Message) -> usize {
    if message.head.is_lazy() { message.segments.iter().map(Bytes::len).sum() } else { message.len() }
}

/// Returns the request as a wire would deliver it: the deadline is computed from the remaining time, and texts are serialized and
/// parsed.
fn rewritten_request(request: Request) -> Result<Request> {
    let mut context = CallContext::within(request.context.remaining());
    context.cancel = request.context.cancel.clone();
    context.trace =
        request.context.trace.to_traceparent().as_deref().and_then(TraceContext::from_traceparent).unwrap_or_default();
    context.reply_bytes_max = request.context.reply_bytes_max;
    context.incarnation = request.context.incarnation;
    context.metadata = request.context.metadata;
    let message = rewritten_message(&request.message)?;
    Ok(Request { context, message, ..request })
}

fn rewritten_message(message: &Message) -> Result<Message> {
    Ok(decode(encode(message).to_bytes(), &MessageLimits::default(), message.content_type.clone())?)
}
