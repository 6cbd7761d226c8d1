//! Calls that are dropped at arbitrary points. A transport must release everything that it stored for them.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;

use crate::base::error::Result;
use crate::message::CallContext;
use crate::message::{Request, Response, Status};
use crate::transport::Channel;
use crate::transport::{Handler, handler_fn};

/// A deadline that no call reaches: a held call ends only when it is dropped.
const LONG_TIMEOUT: Duration = Duration::from_secs(60);
const CALLS: usize = 10_000;
/// Maximum number of replies that are kept unread for a while.
const KEPT_MAX: usize = 16;
/// The route that echoes the request immediately.
const ECHO: &str = "/echo";
/// The route that responds when the call is cancelled.
const HOLD: &str = "/hold";
/// A fixed seed, so that failures can be repeated.
const SEED: u64 = 0x2545_F491_4F6C_DD17;

/// Ten thousand calls of many sizes, each dropped after a few polls, and their handler.
#[derive(Clone, Debug, Default)]
pub struct Storm {
    running: Arc<AtomicUsize>,
}

impl Storm {
    /// Returns the handler for the server: it echoes a call, or holds it until it is cancelled.
    #[must_use]
    pub fn handler(&self) -> impl Handler + use<> {
        let running = Arc::clone(&self.running);
        handler_fn(move |request: Request| {
            running.fetch_add(1, Ordering::SeqCst);
            let guard = Running(Arc::clone(&running));
            async move {
                let _guard = guard;
                if request.route.path() == HOLD {
                    request.context.cancel.cancelled().await;
                }
                Ok(Response::new(Status::OK, request.message))
            }
        })
    }

    /// Returns the number of calls that the handler holds.
    #[must_use]
    pub fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// Makes the calls and drops each at some point. Returns when the last is dropped, possibly before the peer is
    /// notified.
    pub async fn run(&self, channel: &Channel) {
        let mut random = fastrand::Rng::with_seed(SEED);
        let mut kept = Vec::new();
        for call in 0..CALLS {
            let bytes = if call % 20 == 0 { 300_000 } else { random.usize(..3_000) };
            let route = if random.bool() { HOLD } else { ECHO };
            let request = with_segment(Request::post(CallContext::within(LONG_TIMEOUT), route, "{}"), bytes);
            let Some(mut reply) = polled(pin!(channel.start(request)), random.u8(..3)).await else { continue };
            match random.u8(..10) {
                0 => kept.push(reply),
                polls => drop(polled(&mut reply, polls).await),
            }
            if kept.len() > KEPT_MAX {
                drop(kept.swap_remove(random.usize(..KEPT_MAX)));
            }
        }
    }
}

struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Adds a segment of this many bytes to a request.
#[must_use]
pub fn with_segment(mut request: Request, bytes: usize) -> Request {
    request.message.segments.push(Bytes::from(vec![7; bytes]));
    request
}

/// Polls a future up to `polls + 1` times; `None` if it was not ready or failed.
async fn polled<T>(mut future: impl Future<Output = Result<T>> + Unpin, polls: u8) -> Option<T> {
    for _ in 0..=polls {
        if let Poll::Ready(done) = futures_util::poll!(&mut future) {
            return done.ok();
        }
        tokio::task::yield_now().await;
    }
    None
}
