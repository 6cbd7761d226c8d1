//! The client side of one peer: [`Link`], which transports implement, and [`Channel`], through which calls are made.
//!
//! A call has two steps: the transport accepts the request, then the peer responds. Until the transport has accepted the request,
//! the peer has seen nothing. A failure in the first step is therefore `NotStarted`, and one in the second is `Unknown`. Every
//! wait in either step ends at the call's deadline.

use std::any::Any;
use std::fmt;
use std::future::{Future, poll_fn, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;

use crate::base::error::{Code, Error, Execution, Result};
use crate::message::{CallBounds, Incarnation, Request, Response};
use crate::transport::Transport;

/// A future that resolves to the response. Dropping it cancels the call; buffers stay alive until the transport has finished with
/// them.
///
/// A reply that is not polled keeps its capacity on the link: await it or drop it.
pub type Reply = BoxFuture<'static, Result<Response>>;

/// A path to one peer, implemented by each transport and called through [`Channel`].
///
/// A link can wrap another link to inject faults, record or throttle.
/// - **Order.** If `path().ordered`, the peer receives requests in the order in which [`Link::send`] returned.
/// - **Errors.** Until `send` returns, the peer has seen nothing: fail with `NotStarted`. After that, fail with `Unknown`, unless
///   the peer reports that it rejected the request.
/// - **Cancellation.** Dropping the future of `send` sends nothing. Dropping the [`Reply`] cancels the call.
/// - **Deadlines.** Implementations set no timers; `Channel` enforces the deadline.
#[async_trait]
pub trait Link: Any + fmt::Debug + Send + Sync {
    /// Waits for capacity, accepts the request, and returns the future of its response.
    ///
    /// # Errors
    /// `NotStarted`; the peer has seen nothing.
    async fn send(&self, request: Request) -> Result<Reply>;

    /// Returns the description of the path to the peer.
    fn path(&self) -> &PathInfo;

    /// Resolves when the peer has disconnected. A link that connects for each call cannot detect this, and never resolves.
    async fn closed(&self) -> Error;

    /// Rejects new calls, waits up to `grace` for the calls in flight, and closes.
    ///
    /// # Errors
    /// `DeadlineExceeded` if calls were still in flight after `grace`.
    async fn close(&self, grace: Duration) -> Result<()>;
}

/// The path to a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathInfo {
    /// The scheme of the endpoint.
    pub scheme: &'static str,
    /// The peer's address, for logs.
    pub peer: Arc<str>,
    /// `true` if requests arrive in the order in which `send` returned.
    pub ordered: bool,
    /// `true` if the peer shares the caller's memory, so that messages need not be serialized.
    pub shares_memory: bool,
    /// The transport that was negotiated; `None` if the scheme has only one.
    pub transport: Option<Transport>,
    /// The lanes of UCX, such as `posix/memory, cma/memory`; empty for other transports.
    pub lanes: Arc<str>,
}

impl PathInfo {
    /// Creates a path over a scheme to a peer.
    #[must_use]
    pub fn new(scheme: &'static str, peer: impl Into<Arc<str>>, ordered: bool) -> Self {
        Self { scheme, peer: peer.into(), ordered, ..Self::default() }
    }

    /// Returns the path, to a peer that shares the caller's memory.
    #[must_use]
    pub fn sharing_memory(mut self) -> Self {
        self.shares_memory = true;
        self
    }

    /// Returns the path with the negotiated transport and its lanes.
    #[must_use]
    pub fn at(mut self, transport: Transport, lanes: impl Into<Arc<str>>) -> Self {
        (self.transport, self.lanes) = (Some(transport), lanes.into());
        self
    }
}

/// The client side of one peer. Cheap to clone.
///
/// A channel is also a tower service that is always ready, so tower's layers can wrap it. Layers erase the types of errors; `Error::from` returns the
/// SDK error that is inside. A response with an error status is `Ok` here: a layer that repeats failed calls needs
/// [`Response::into_result`] below it. `examples/src/bin/tower_layers.rs` has retries, a limit and a timeout.
///
/// ```
/// # use std::{sync::Arc, time::Duration};
/// use gym_core::transport::{handler_fn, mem};
/// use gym_core::{CallContext, CancelToken, Request, Response, Result};
/// use tower::{ServiceBuilder, ServiceExt};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let echo = handler_fn(|request: Request| async move { Ok(Response::json(request.message.head)) });
/// let channel = mem::channel_to("echo", Arc::new(echo), false, CancelToken::new());
/// let limited = ServiceBuilder::new().concurrency_limit(8).timeout(Duration::from_secs(5)).service(channel);
/// let response = limited.oneshot(Request::post(CallContext::default(), "/", "[1]")).await?;
/// assert_eq!(response.into_result()?.message.head.to_bytes(), "[1]");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Channel {
    link: Arc<dyn Link>,
    incarnation: Option<Incarnation>,
}

impl Channel {
    /// Creates a channel over a link.
    #[must_use]
    pub fn new(link: impl Link) -> Self {
        Self { link: Arc::new(link), incarnation: None }
    }

    /// Returns the channel, limited to one incarnation of the peer: calls contain it, and responses of another incarnation are
    /// rejected.
    #[must_use]
    pub fn fenced(mut self, incarnation: Option<Incarnation>) -> Self {
        self.incarnation = incarnation;
        self
    }

    /// Sends a request and waits for the response, both within the request's deadline.
    ///
    /// # Errors
    /// `NotStarted` until the link has accepted the request, `Unknown` after that. Any complete response is `Ok`, including 404
    /// and 500.
    pub fn call(&self, request: Request) -> impl Future<Output = Result<Response>> + Send {
        let (terms, sending) = self.begin(request);
        ChannelCall { step: CallStep::Sending(sending), terms }
    }

    /// Sends a request and returns the future of its response, so that calls can be pipelined.
    ///
    /// # Errors
    /// `NotStarted` if the link did not accept the request by the deadline.
    pub async fn start(&self, request: Request) -> Result<Reply> {
        let (mut terms, mut sending) = self.begin(request);
        let reply = poll_fn(|cx| terms.poll_sent(&mut sending, cx)).await?;
        Ok(Box::pin(ChannelCall { step: CallStep::Replying(reply), terms }))
    }

    /// Returns the link, which sets no timer, for callers that have one timer for many calls.
    #[must_use]
    pub fn link(&self) -> &dyn Link {
        &*self.link
    }

    /// Returns `true` if both are clones of one channel.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.link, &other.link)
    }

    /// Returns the description of the path to the peer.
    #[must_use]
    pub fn path(&self) -> &PathInfo {
        self.link.path()
    }

    /// Resolves when the peer has disconnected.
    pub async fn closed(&self) -> Error {
        self.link.closed().await
    }

    /// Rejects new calls, waits up to `grace` for the calls in flight, and closes.
    ///
    /// # Errors
    /// `DeadlineExceeded` if calls were still in flight after `grace`.
    pub async fn close(&self, grace: Duration) -> Result<()> {
        self.link.close(grace).await
    }

    /// Begins a call. Rejects it if its deadline has passed or it was cancelled, before anything is sent.
    fn begin(&self, mut request: Request) -> (CallTerms, SendingFuture<'_>) {
        let incarnation = request.context.incarnation.or(self.incarnation);
        request.context.incarnation = incarnation;
        let terms = CallTerms { bounds: request.context.bounds(), incarnation };
        let sending = match request.context.check() {
            Ok(()) => self.link.send(request),
            Err(error) => Box::pin(ready(Err(error))),
        };
        (terms, sending)
    }
}

/// Metadata key for the incarnation of a fenced host.
pub const INCARNATION_METADATA: &str = "x-gym-incarnation";

/// Rejects a response of another incarnation than `expected`; without one, accepts any.
///
/// # Errors
/// `Unavailable` if the response is of another incarnation.
pub fn check_incarnation(expected: Option<Incarnation>, response: Response) -> Result<Response> {
    let Some(expected) = expected else { return Ok(response) };
    match response.metadata.get(INCARNATION_METADATA) {
        Some(answered) if answered.parse() != Ok(expected.0) => Err(Error::unknown(
            Code::Unavailable,
            format!("the answer is of incarnation {answered}; the call was meant for {expected}"),
        )),
        _ => Ok(response),
    }
}

type SendingFuture<'a> = BoxFuture<'a, Result<Reply>>;

/// A call in progress. Not an async block, which would hold the futures of both steps, and the request to the end: every rollout in flight
/// waits in several of these.
struct ChannelCall<'a> {
    step: CallStep<'a>,
    terms: CallTerms,
}

enum CallStep<'a> {
    Sending(SendingFuture<'a>),
    Replying(Reply),
    /// The futures are dropped as soon as the call has ended, even if this one is kept.
    Ended,
}

/// The bounds of one call, and the incarnation that must respond.
struct CallTerms {
    bounds: CallBounds,
    incarnation: Option<Incarnation>,
}

impl CallTerms {
    fn poll_sent(&mut self, sending: &mut SendingFuture<'_>, cx: &mut Context<'_>) -> Poll<Result<Reply>> {
        let sent = ready!(self.bounds.poll_within(Execution::NotStarted, cx, |cx| sending.as_mut().poll(cx)));
        self.bounds.begin_next();
        Poll::Ready(sent)
    }

    fn poll_response(&mut self, reply: &mut Reply, cx: &mut Context<'_>) -> Poll<Result<Response>> {
        let response = self.bounds.poll_within(Execution::Unknown, cx, |cx| reply.as_mut().poll(cx));
        response.map_ok(|response| check_incarnation(self.incarnation, response)).map(Result::flatten)
    }
}

impl Future for ChannelCall<'_> {
    type Output = Result<Response>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Response>> {
        let Self { step, terms } = &mut *self;
        let ended = loop {
            match step {
                CallStep::Sending(sending) => match ready!(terms.poll_sent(sending, cx)) {
                    Ok(reply) => *step = CallStep::Replying(reply),
                    Err(error) => break Err(error),
                },
                CallStep::Replying(reply) => break ready!(terms.poll_response(reply, cx)),
                CallStep::Ended => break Err(Error::internal("a call was polled after its end")),
            }
        };
        *step = CallStep::Ended;
        Poll::Ready(ended)
    }
}

impl tower_service::Service<Request> for Channel {
    type Response = Response;
    type Error = Error;
    type Future = Reply;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Reply {
        let channel = self.clone();
        Box::pin(async move { Self::call(&channel, request).await })
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::pin::pin;

    use super::*;
    use crate::base::cancel::CancelToken;
    use crate::message::CallContext;
    use crate::transport::{Handler, mem};

    /// Never responds; each running call holds a clone.
    #[derive(Debug)]
    struct Holds(Arc<()>);

    impl Handler for Holds {
        fn handle(&self, _: Request) -> BoxFuture<'static, Result<Response>> {
            let held = Arc::clone(&self.0);
            Box::pin(async move {
                let _held = held;
                pending().await
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_has_ended_leaves_its_handler_even_if_its_future_is_kept() {
        let held = Arc::new(());
        let channel = mem::channel_to("peer", Arc::new(Holds(Arc::clone(&held))), false, CancelToken::new());
        let request = || Request::get(CallContext::within(Duration::from_secs(1)), "/");
        let mut call = pin!(channel.call(request()));
        assert_eq!(call.as_mut().await.unwrap_err().code(), Code::DeadlineExceeded);
        assert_eq!(Arc::strong_count(&held), 2, "the handler's own");
        let mut started = channel.start(request()).await.unwrap();
        assert_eq!((&mut started).await.unwrap_err().code(), Code::DeadlineExceeded);
        assert_eq!(Arc::strong_count(&held), 2);
        assert_eq!(call.await.unwrap_err().code(), Code::Internal);
    }
}
