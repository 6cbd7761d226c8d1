//! Calls that are dropped at arbitrary points: a transport must release everything that it keeps for them.

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

/// Far beyond what a call needs, so that only its drop ends one that is held.
const FAR: Duration = Duration::from_secs(60);
const CALLS: usize = 10_000;
/// Answers that are kept for a while, unread.
const KEPT_MAX: usize = 16;
/// Echoed at once.
const ECHO: &str = "/echo";
/// Answered when the call is cancelled.
const HOLD: &str = "/hold";
/// A fixed seed, so that a failure comes again.
const SEED: u64 = 0x2545_F491_4F6C_DD17;

/// Ten thousand calls of many sizes, each dropped after a few polls, and the handler that they are for.
#[derive(Clone, Debug, Default)]
pub struct Storm {
    running: Arc<AtomicUsize>,
}

impl Storm {
    /// The handler for the other end: echoes a call, or holds it until it is cancelled.
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

    /// Number of calls that the handler still holds.
    #[must_use]
    pub fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// Makes the calls and drops each at some point; returns when the last is dropped, which may be before the peer is notified.
    pub async fn run(&self, channel: &Channel) {
        let mut random = fastrand::Rng::with_seed(SEED);
        let mut kept = Vec::new();
        for call in 0..CALLS {
            let bytes = if call % 20 == 0 { 300_000 } else { random.usize(..3_000) };
            let route = if random.bool() { HOLD } else { ECHO };
            let request = with_segment(Request::post(CallContext::within(FAR), route, "{}"), bytes);
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

/// The request with a segment of so many bytes.
#[must_use]
pub fn with_segment(mut request: Request, bytes: usize) -> Request {
    request.message.segments.push(Bytes::from(vec![7; bytes]));
    request
}

/// What a future gives within one poll and so many more.
async fn polled<T>(mut future: impl Future<Output = Result<T>> + Unpin, polls: u8) -> Option<T> {
    for _ in 0..=polls {
        if let Poll::Ready(done) = futures_util::poll!(&mut future) {
            return done.ok();
        }
        tokio::task::yield_now().await;
    }
    None
}
