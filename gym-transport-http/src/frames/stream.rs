//! Framed messages over any byte stream: the building block for your own transports.
//!
//! ```text
//!   your Connector ── ByteStream ── FramedClient ──► Channel        TCP, a Unix socket, QUIC, TLS, a pipe, …
//!   your Listener  ── ByteStream ── FramedServer ──► Handler
//! ```

use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::task::AtomicWaker;
use gym_core::message::PeerInfo;
use gym_core::transport::{ConnectOptions, PathInfo};
use gym_core::{CallContext, CancelToken, Channel, Code, Endpoint, Error, Execution, Handler, Result};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, Semaphore};

use crate::frames::buffers::ReceiveBufferPool;
use crate::frames::config::FramesConfig;
use crate::frames::connection::answering::{self, ListenerState};
use crate::frames::connection::calling::open;
use crate::frames::connection::socket::{Socket, WriteHalf};

/// A connected, ordered and reliable byte stream in both directions, for [`FramedClient::connect`] and [`FramedServer::serve`].
#[derive(Debug)]
pub struct ByteStream {
    socket: Socket,
    /// Bytes that were received before the first frame was read.
    received: Bytes,
}

impl ByteStream {
    /// A stream of two halves. Writes are vectored if the writer supports them, and flushed when nothing else waits to be sent.
    #[must_use]
    pub fn new(
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
    ) -> Self {
        let state = Arc::new(StreamState::default());
        let reader = StreamReader { reader, state: Arc::clone(&state) };
        let waker = Waker::from(Arc::clone(&state));
        let writer = StreamWriter { writer: Mutex::new(Box::new(writer)), state, waker };
        Self { socket: Socket::Halves(Box::new(reader), Box::new(writer)), received: Bytes::new() }
    }

    /// A stream that reads and writes.
    #[must_use]
    pub fn of(stream: impl AsyncRead + AsyncWrite + Send + 'static) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        Self::new(reader, writer)
    }

    pub(crate) fn socket(socket: Socket, received: Bytes) -> Self {
        Self { socket, received }
    }
}

/// Opens channels over byte streams of one scheme. Cheap to clone; clones share the receive buffers.
///
/// | event | error of the caller |
/// |---|---|
/// | cannot connect, or no handshake within `connect_timeout` | `Unavailable`, not started |
/// | no capacity by the deadline | `DeadlineExceeded`, not started |
/// | the message exceeds a limit of the peer | `InvalidArgument`, not started |
/// | the connection breaks, or the peer is silent for `silence_max` | `Unavailable`; unknown for calls in flight |
/// | malformed frames | `DataLoss`, unknown |
/// | the reply is larger than `reply_bytes_max` | `ResourceExhausted`, finished |
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use gym_core::message::PeerInfo;
/// use gym_core::transport::{ConnectOptions, handler_fn};
/// use gym_core::{CallContext, CancelToken, Endpoint, Request, Response};
/// use gym_transport_http::frames::{ByteStream, FramedClient, FramedServer, FramesConfig};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> gym_core::Result<()> {
/// let (near, far) = tokio::io::duplex(1 << 16);
/// let echo = Arc::new(handler_fn(|request: Request| async move { Ok(Response::json(request.message.head)) }));
/// let server = FramedServer::new(FramesConfig::default());
/// let peer = PeerInfo { address: "the other end".into() };
/// tokio::spawn(server.serve(ByteStream::of(far), echo, peer, CancelToken::new()));
///
/// let client = FramedClient::new("pipe", FramesConfig::default());
/// let (cx, to) = (CallContext::within(Duration::from_secs(5)), Endpoint::parse("pipe://here")?);
/// let connecting = async { Ok(ByteStream::of(near)) };
/// let channel = client.connect(&cx, &to, &ConnectOptions::default(), connecting).await?;
/// let answer = channel.call(Request::post(cx, "/echo", r#"{"n": 1E5}"#)).await?;
/// assert_eq!(&answer.message.head.to_bytes()[..], br#"{"n": 1E5}"#);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct FramedClient {
    scheme: &'static str,
    config: FramesConfig,
    pool: Arc<ReceiveBufferPool>,
}

impl FramedClient {
    /// Creates a client for endpoints of this scheme.
    #[must_use]
    pub fn new(scheme: &'static str, config: FramesConfig) -> Self {
        let pool = ReceiveBufferPool::new(config.pool_bytes_max);
        Self { scheme, config, pool }
    }

    /// Returns the scheme.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        self.scheme
    }

    /// Awaits `connecting`, exchanges handshakes, and returns an ordered channel over the stream. The deadline of the context and
    /// `connect_timeout` both apply.
    ///
    /// # Errors
    /// `InvalidArgument` for an endpoint of another scheme; the error of `connecting`; `Unavailable` if there is no handshake in
    /// time. No call has started.
    pub async fn connect(
        &self,
        cx: &CallContext,
        to: &Endpoint,
        options: &ConnectOptions,
        connecting: impl Future<Output = Result<ByteStream>> + Send,
    ) -> Result<Channel> {
        cx.check()?;
        if to.scheme() != self.scheme {
            return Err(Error::invalid(format!("`{to}` is not an endpoint of {}", self.scheme)));
        }
        let limit = self.config.connect_timeout;
        let opening = async {
            let ByteStream { socket, received } = connecting.await?;
            let path = PathInfo::new(self.scheme, to.address(), true);
            open(socket, &received, path, (&self.config, options), Arc::clone(&self.pool)).await
        };
        let opened = cx.bound(Execution::NotStarted, async {
            tokio::time::timeout(limit, opening)
                .await
                .map_err(|_| Error::not_started(Code::Unavailable, format!("no answer within {limit:?}")))
                .flatten()
        });
        // No call has been sent yet, whatever the error is.
        let link = opened
            .await
            .map_err(|error| error.with_execution(Execution::NotStarted).about(format!("connect to {to}")))?;
        Ok(Channel::new(link).fenced(options.incarnation))
    }
}

impl fmt::Debug for FramedClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FramedClient({})", self.scheme)
    }
}

/// Serves calls over the byte streams that a listener accepts. Cheap to clone; clones share the receive buffers.
#[derive(Clone, Debug)]
pub struct FramedServer {
    state: ListenerState,
}

impl FramedServer {
    /// Creates a server with these limits, which apply to each connection separately.
    #[must_use]
    pub fn new(config: FramesConfig) -> Self {
        let calls = Arc::new(Semaphore::new(Semaphore::MAX_PERMITS));
        Self { state: ListenerState::new(config, calls) }
    }

    /// Serves the calls of one connection, as [`Incoming::serve`](gym_core::transport::Incoming::serve) of a transport does.
    /// Returns when the peer disconnects, which it does soon after `drain` fires. Dropping the future drops the calls in flight.
    ///
    /// # Errors
    /// `Unavailable` if the connection breaks or the peer is silent; `DataLoss` for malformed frames; `DeadlineExceeded` if there
    /// is no handshake within `connect_timeout`.
    pub async fn serve(
        self,
        stream: ByteStream,
        handler: Arc<dyn Handler>,
        peer: PeerInfo,
        drain: CancelToken,
    ) -> Result<()> {
        let about = format!("serve {}", peer.address);
        let ByteStream { socket, received } = stream;
        answering::serve(socket, &received, self.state, handler, peer, drain).await.map_err(|error| error.about(about))
    }
}

/// State that both halves of a stream share.
#[derive(Default)]
struct StreamState {
    closed: AtomicBool,
    reader: AtomicWaker,
    writer: Notify,
}

impl Wake for StreamState {
    fn wake(self: Arc<Self>) {
        self.writer.notify_one();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.writer.notify_one();
    }
}

/// Reads until the connection is closed by either end.
struct StreamReader<R> {
    reader: R,
    state: Arc<StreamState>,
}

impl<R: AsyncRead + Unpin> AsyncRead for StreamReader<R> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.reader).poll_read(cx, buffer);
        if polled.is_pending() {
            self.state.reader.register(cx.waker());
            if self.state.closed.load(SeqCst) {
                return Poll::Ready(Ok(()));
            }
        }
        polled
    }
}

struct StreamWriter {
    writer: Mutex<Box<dyn AsyncWrite + Send + Unpin>>,
    state: Arc<StreamState>,
    /// Wakes the waiting tasks of the state.
    waker: Waker,
}

impl StreamWriter {
    fn now<T>(
        &self,
        poll: impl FnOnce(Pin<&mut (dyn AsyncWrite + Send + Unpin)>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> io::Result<T> {
        if self.state.closed.load(SeqCst) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let polled = poll(Pin::new(&mut **self.writer.lock()), &mut Context::from_waker(&self.waker));
        match polled {
            Poll::Ready(result) => result,
            Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

impl fmt::Debug for StreamWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StreamWriter")
    }
}

#[async_trait]
impl WriteHalf for StreamWriter {
    fn try_write(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        self.now(|writer, cx| writer.poll_write_vectored(cx, pieces))
    }

    fn try_flush(&self) -> io::Result<()> {
        self.now(|writer, cx| writer.poll_flush(cx))
    }

    async fn writable(&self) -> io::Result<()> {
        // A permit that remains from an earlier write costs one attempt to write.
        self.state.writer.notified().await;
        Ok(())
    }

    fn shut(&self) {
        if self.state.closed.swap(true, SeqCst) {
            return;
        }
        // If the shutdown cannot complete at once, it happens when the writer is dropped.
        let _ = Pin::new(&mut **self.writer.lock()).poll_shutdown(&mut Context::from_waker(&self.waker));
        self.state.reader.wake();
        self.state.writer.notify_one();
    }
}
