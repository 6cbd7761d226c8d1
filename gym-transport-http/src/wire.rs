//! Sockets that tell what hyper keeps to itself: has anything of a request left, has the peer closed an idle connection, when
//! did bytes last move.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// What a wire reports to, and is asked by, the code around hyper.
pub(crate) trait Watch: Send + Sync + 'static {
    /// Before a read; `true` means that the connection counts as closed.
    fn before_read(&self, _: &TcpStream) -> bool {
        false
    }
    /// Bytes have come in.
    fn has_read(&self) {}
    /// Bytes have gone out.
    fn has_written(&self) {}
}

/// A socket that is watched.
pub(crate) struct Wire<W> {
    stream: TcpStream,
    watch: Arc<W>,
}

impl<W> Wire<W> {
    pub(crate) fn new(stream: TcpStream, watch: Arc<W>) -> Self {
        Self { stream, watch }
    }

    /// The socket, no longer watched.
    pub(crate) fn into_inner(self) -> TcpStream {
        self.stream
    }
}

impl<W: Watch> AsyncRead for Wire<W> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.watch.before_read(&self.stream) {
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.watch.has_read();
        }
        polled
    }
}

impl<W: Watch> Wire<W> {
    fn note(&self, polled: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if matches!(polled, Poll::Ready(Ok(written)) if written > 0) {
            self.watch.has_written();
        }
        polled
    }
}

impl<W: Watch> AsyncWrite for Wire<W> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.note(polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.note(polled)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Watches an outgoing connection.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    ask_kernel: AtomicBool,
    wrote: AtomicBool,
}

impl Outgoing {
    /// Has the next read ask the kernel itself whether the peer has closed. The runtime learns of that only when it next looks
    /// for events, which may be after a request was written into the closed connection.
    pub(crate) fn ask_kernel(&self) {
        self.ask_kernel.store(true, Relaxed);
    }

    /// Whether the kernel has been asked; from now on reads are plain again.
    pub(crate) fn was_asked(&self) -> bool {
        !self.ask_kernel.swap(false, Relaxed)
    }

    /// Forgets what was written before.
    pub(crate) fn start(&self) {
        self.wrote.store(false, Relaxed);
    }

    /// Whether any byte has left since `start`: if not, the peer cannot have seen the request.
    pub(crate) fn has_left(&self) -> bool {
        self.wrote.load(Relaxed)
    }
}

impl Watch for Outgoing {
    fn before_read(&self, stream: &TcpStream) -> bool {
        // A plain load first: this is on the path of every read.
        if !self.ask_kernel.load(Relaxed) {
            return false;
        }
        self.ask_kernel.store(false, Relaxed);
        let mut byte = [0; 1];
        // An idle connection has nothing to say; whatever comes other than "not yet" makes it unusable.
        !matches!(
            rustix::net::recv(stream, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT),
            Err(Errno::AGAIN | Errno::INTR)
        )
    }

    fn has_written(&self) {
        self.wrote.store(true, Relaxed);
    }
}

/// Watches an accepted connection: what it is doing and since when, so that one timer per connection ends the idle and the
/// slow ones. hyper's own timer is set anew for each request, and does not tell an idle connection from a slow head.
#[derive(Debug)]
pub(crate) struct Accepted {
    began: Instant,
    phase: AtomicU8,
    moved_us: AtomicU64,
}

const IDLE: u8 = 0;
const HEAD: u8 = 1;
const CALL: u8 = 2;

impl Accepted {
    pub(crate) fn new() -> Self {
        Self { began: Instant::now(), phase: AtomicU8::new(IDLE), moved_us: AtomicU64::new(0) }
    }

    /// A call has begun.
    pub(crate) fn call_began(&self) {
        self.phase.store(CALL, Relaxed);
    }

    /// The answer is ready to be written.
    pub(crate) fn call_ended(&self) {
        self.moved();
        self.phase.store(IDLE, Relaxed);
    }

    fn moved(&self) {
        let since = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.moved_us.store(since, Relaxed);
    }

    /// When to look again, or what the peer has exceeded.
    pub(crate) fn due(&self, head_timeout: Duration, keep_alive_timeout: Duration) -> Result<Instant, &'static str> {
        let now = Instant::now();
        let moved = self.began + Duration::from_micros(self.moved_us.load(Relaxed));
        match self.phase.load(Relaxed) {
            CALL => Ok(now + head_timeout),
            HEAD if now >= moved + head_timeout => Err("head_timeout"),
            HEAD => Ok(moved + head_timeout),
            _ if now >= moved + keep_alive_timeout => Err("keep_alive_timeout"),
            // A head may begin at any time, and is to be cut off on time.
            _ => Ok((moved + keep_alive_timeout).min(now + head_timeout)),
        }
    }
}

impl Watch for Accepted {
    fn has_read(&self) {
        if self.phase.load(Relaxed) == IDLE {
            self.moved();
            self.phase.store(HEAD, Relaxed);
        }
    }

    fn has_written(&self) {
        // A reader of a long answer is not idle.
        if self.phase.load(Relaxed) == IDLE {
            self.moved();
        }
    }
}
