//! An accepted socket that records what hyper does not report: the time of the last read or write, and the phase of the call.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// A socket that records its activity.
pub(crate) struct WatchedSocket {
    stream: TcpStream,
    activity: Arc<ConnectionActivity>,
}

impl WatchedSocket {
    pub(crate) fn new(stream: TcpStream, activity: Arc<ConnectionActivity>) -> Self {
        Self { stream, activity }
    }

    /// Returns the socket and stops recording.
    pub(crate) fn into_inner(self) -> TcpStream {
        self.stream
    }

    fn note(&self, polled: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if matches!(polled, Poll::Ready(Ok(written)) if written > 0) {
            self.activity.has_written();
        }
        polled
    }
}

impl AsyncRead for WatchedSocket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.activity.has_read();
        }
        polled
    }
}

impl AsyncWrite for WatchedSocket {
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

/// The activity of an accepted connection: its phase, and since when. One timer per connection closes idle and slow connections.
/// The timer of hyper is reset for each request, and does not distinguish an idle connection from a slow header section.
#[derive(Debug)]
pub(crate) struct ConnectionActivity {
    began: Instant,
    phase: AtomicU8,
    moved_us: AtomicU64,
}

const IDLE: u8 = 0;
const HEAD: u8 = 1;
const CALL: u8 = 2;

impl ConnectionActivity {
    pub(crate) fn new() -> Self {
        Self { began: Instant::now(), phase: AtomicU8::new(IDLE), moved_us: AtomicU64::new(0) }
    }

    /// Records that a call has begun.
    pub(crate) fn call_began(&self) {
        self.phase.store(CALL, Relaxed);
    }

    /// Records that the response is ready to be written.
    pub(crate) fn call_ended(&self) {
        self.moved();
        self.phase.store(IDLE, Relaxed);
    }

    /// Records that the response is a rejection, and that the rest of its request must arrive within `head_timeout`.
    pub(crate) fn call_rejected(&self) {
        self.moved();
        self.phase.store(HEAD, Relaxed);
    }

    fn moved(&self) {
        let since = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.moved_us.store(since, Relaxed);
    }

    /// Returns the time of the next check, or the name of the limit that the peer has exceeded.
    pub(crate) fn due(&self, head_timeout: Duration, keep_alive_timeout: Duration) -> Result<Instant, &'static str> {
        let now = Instant::now();
        let moved = self.began + Duration::from_micros(self.moved_us.load(Relaxed));
        match self.phase.load(Relaxed) {
            CALL => Ok(now + head_timeout),
            HEAD if now >= moved + head_timeout => Err("head_timeout"),
            HEAD => Ok(moved + head_timeout),
            _ if now >= moved + keep_alive_timeout => Err("keep_alive_timeout"),
            // A header section may begin at any time and must be cut off in time.
            _ => Ok((moved + keep_alive_timeout).min(now + head_timeout)),
        }
    }

    /// Records that bytes were received.
    fn has_read(&self) {
        if self.phase.load(Relaxed) == IDLE {
            self.moved();
            self.phase.store(HEAD, Relaxed);
        }
    }

    /// Records that bytes were sent.
    fn has_written(&self) {
        // A client that reads a long response is not idle.
        if self.phase.load(Relaxed) == IDLE {
            self.moved();
        }
    }
}
