//! The client side of one peer: [`Link`], which transports implement, and [`Channel`], through which calls are made.
//!
//! A call has two steps: the transport accepts the request, then the peer responds. Until the transport has accepted the request,
//! the peer has seen nothing. A failure in the first step is therefore `NotStarted`, and one in the second is `Unknown`. Every
//! wait in either step ends at the call's deadline.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;

use crate::base::cancel::CancelToken;
use crate::base::error::{Code, Error, Execution, Result};
use crate::message::{Bounded, Incarnation, bounded};
use crate::message::{Request, Response};
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

/// The client side of one peer. Cheap to clone; also a tower service that is always ready.
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
        // Not an async fn: its future would keep the argument to the end, and a request is larger than the wait for its response.
        let begun = self.begin(request);
        async move {
            let SendingCall { incarnation, bounds, sending } = begun?;
            let reply = bounds.hold(Execution::NotStarted, sending).await?;
            let response = bounds.hold(Execution::Unknown, reply).await?;
            check_incarnation(incarnation, response)
        }
    }

    /// Sends a request and returns the future of its response, so that calls can be pipelined.
    ///
    /// # Errors
    /// `NotStarted` if the link did not accept the request by the deadline.
    pub async fn start(&self, request: Request) -> Result<Reply> {
        let SendingCall { incarnation, bounds, sending } = self.begin(request)?;
        let reply = bounds.hold(Execution::NotStarted, sending).await?;
        Ok(Box::pin(async move {
            let response = bounds.hold(Execution::Unknown, reply).await?;
            check_incarnation(incarnation, response)
        }))
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

    /// Rejects a call whose deadline has passed or that was cancelled, before anything is sent.
    fn begin(&self, mut request: Request) -> Result<SendingCall<'_>> {
        request.context.check()?;
        let incarnation = request.context.incarnation.or(self.incarnation);
        request.context.incarnation = incarnation;
        let bounds = CallBounds::of(&request);
        Ok(SendingCall { incarnation, bounds, sending: self.link.send(request) })
    }
}

/// Metadata key for the incarnation of a fenced host.
pub const INCARNATION_METADATA: &str = "x-gym-incarnation";

/// Rejects a response of another incarnation than `expected`.
pub(crate) fn check_incarnation(expected: Option<Incarnation>, response: Response) -> Result<Response> {
    let Some(expected) = expected else { return Ok(response) };
    match response.metadata.get(INCARNATION_METADATA) {
        Some(answered) if answered.parse() != Ok(expected.0) => Err(Error::unknown(
            Code::Unavailable,
            format!("the answer is of incarnation {answered}; the call was meant for {expected}"),
        )),
        _ => Ok(response),
    }
}

/// A call that is being sent.
struct SendingCall<'a> {
    incarnation: Option<Incarnation>,
    bounds: CallBounds,
    sending: BoxFuture<'a, Result<Reply>>,
}

/// The deadline and the cancel token of one call.
struct CallBounds {
    cancel: CancelToken,
    deadline: tokio::time::Instant,
}

impl CallBounds {
    fn of(request: &Request) -> Self {
        Self { cancel: request.context.cancel.clone(), deadline: request.context.deadline }
    }

    /// Waits for `future` within the bounds. If they end the wait, the error has the state `execution`.
    fn hold<T, F: Future<Output = Result<T>>>(&self, execution: Execution, future: F) -> Bounded<'_, F> {
        bounded(&self.cancel, self.deadline, execution, future)
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
