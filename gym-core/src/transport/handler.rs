//! The server side of a call, and its adapters for tower.

use std::fmt;
use std::future::{Future, poll_fn};
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::base::error::{Code, Error, Result};
use crate::message::{CallContext, Incarnation, Loan, Request, Response, Route};
use crate::transport::INCARNATION_METADATA;

/// Serves calls.
///
/// - **Order.** A handler with a queue enqueues the call *before `handle` returns*, so calls are queued in the order of arrival.
///   The position in the queue must not depend on polling the returned future.
/// - **Cancellation.** Dropping the returned future cancels the call.
/// - **Errors.** Every transport sends an `Err` to the caller as [`Response::from_error`].
///
/// ```
/// use std::pin::Pin;
///
/// use gym_core::{Handler, Request, Response, Result};
///
/// #[derive(Debug)]
/// struct Health;
///
/// impl Handler for Health {
///     fn handle(&self, _: Request) -> Pin<Box<dyn Future<Output = Result<Response>> + Send>> {
///         Box::pin(async { Ok(Response::text("ok")) })
///     }
/// }
/// ```
pub trait Handler: fmt::Debug + Send + Sync + 'static {
    /// Accepts one call and returns the future of its response.
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>>;

    /// Returns `true` if the futures of [`Handler::handle`] do nothing but wait for a task or thread that runs the calls. An ordered transport then polls a
    /// future where it is woken, without a task for each call. Such a future must be woken without a lock that polling or dropping it acquires.
    fn only_waits(&self) -> bool {
        false
    }

    /// Names the memory into which a segment of a request is received: called when the segment is about to arrive, with the request's route, its whole head, the
    /// segment's index and its length. The segment of the request is then that memory, which comes back when the request and its parts are dropped, or when the
    /// connection ends before all of it has arrived.
    ///
    /// The default is `None`: the transport provides memory. So it does where it must: for segments of a few KiB, for a loan of another length, and on paths
    /// that receive into registered or the sender's memory.
    fn place(&self, _route: &Route, _head: &Bytes, _segment: usize, _length: usize) -> Option<Loan> {
        None
    }
}

impl<H: Handler + ?Sized> Handler for Arc<H> {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        (**self).handle(request)
    }

    fn only_waits(&self) -> bool {
        (**self).only_waits()
    }

    fn place(&self, route: &Route, head: &Bytes, segment: usize, length: usize) -> Option<Loan> {
        (**self).place(route, head, segment, length)
    }
}

/// Creates a handler that calls a function.
pub fn handler_fn<F, Fut>(function: F) -> impl Handler
where
    F: Fn(Request) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Response>> + Send + 'static,
{
    FunctionHandler(function)
}

struct FunctionHandler<F>(F);

impl<F> fmt::Debug for FunctionHandler<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::any::type_name::<F>())
    }
}

impl<F, Fut> Handler for FunctionHandler<F>
where
    F: Fn(Request) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Response>> + Send + 'static,
{
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        Box::pin((self.0)(request))
    }
}

/// Creates a handler that calls a tower service, so that tower's layers can wrap a server: `tower::service_fn` makes a service of a function or of
/// another handler. The service is cloned for each call and polled for readiness within the call, so its backpressure delays only that call. A layer
/// that cannot be cloned, such as a rate limit, goes below a `buffer`.
///
/// An error of the service is sent to the caller. `Error::from` takes the boxed errors of tower's layers, but calls those of the layers themselves
/// `Internal`; put a `map_err` above a layer whose error needs a code, such as `DeadlineExceeded` for a timeout.
///
/// ```
/// # use std::time::Duration;
/// use gym_core::transport::{Handler, from_tower};
/// use gym_core::{CallContext, Request, Response, Result};
/// use tower::{ServiceBuilder, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let score = service_fn(|request: Request| async move { Ok::<_, gym_core::Error>(Response::json(request.message.head)) });
/// let handler = from_tower(ServiceBuilder::new().concurrency_limit(2).timeout(Duration::from_secs(5)).service(score));
/// let response = handler.handle(Request::post(CallContext::default(), "/", "1")).await?;
/// assert_eq!(response.message.head.to_bytes(), "1");
/// # Ok(()) }
/// ```
pub fn from_tower<S>(service: S) -> impl Handler
where
    S: tower_service::Service<Request, Response = Response> + Clone + Send + Sync + 'static,
    S::Error: Into<Error>,
    S::Future: Send,
{
    TowerHandler(service)
}

struct TowerHandler<S>(S);

impl<S> fmt::Debug for TowerHandler<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::any::type_name::<S>())
    }
}

impl<S> Handler for TowerHandler<S>
where
    S: tower_service::Service<Request, Response = Response> + Clone + Send + Sync + 'static,
    S::Error: Into<Error>,
    S::Future: Send,
{
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        let mut service = self.0.clone();
        Box::pin(async move {
            poll_fn(|cx| service.poll_ready(cx)).await.map_err(Into::into)?;
            service.call(request).await.map_err(Into::into)
        })
    }
}

/// Ties a server to one of its incarnations: rejects calls that are meant for another one, and marks responses.
#[derive(Debug)]
pub struct Fence {
    incarnation: Incarnation,
    /// The incarnation in the form that responses contain.
    text: String,
}

impl Fence {
    /// Creates the fence of `incarnation`.
    #[must_use]
    pub fn new(incarnation: Incarnation) -> Self {
        Self { incarnation, text: incarnation.to_string() }
    }

    /// Checks that a call is meant for this incarnation. A call that names none passes.
    ///
    /// # Errors
    /// `Unavailable`, not started, if the call names another incarnation.
    pub fn check(&self, context: &CallContext) -> Result<()> {
        let here = self.incarnation;
        match context.incarnation {
            Some(meant) if meant != here => Err(Error::not_started(
                Code::Unavailable,
                format!("the call is meant for incarnation {meant}; this is {here}"),
            )),
            _ => Ok(()),
        }
    }

    /// Adds the incarnation to the metadata of a response.
    pub fn mark(&self, response: &mut Response) {
        response.metadata.push(INCARNATION_METADATA, self.text.clone());
    }
}

/// A handler behind a [`Fence`], for handlers that do not hold a fence themselves.
#[derive(Debug)]
pub struct Fenced<H> {
    fence: Fence,
    handler: H,
}

impl<H: Handler> Fenced<H> {
    /// Fences `handler` to `incarnation`.
    #[must_use]
    pub fn new(incarnation: Incarnation, handler: H) -> Self {
        Self { fence: Fence::new(incarnation), handler }
    }
}

impl<H: Handler> Handler for Fenced<H> {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        if let Err(error) = self.fence.check(&request.context) {
            return Box::pin(async move { Err(error) });
        }
        let (response, incarnation) = (self.handler.handle(request), self.fence.text.clone());
        Box::pin(async move {
            let mut response = response.await?;
            response.metadata.push(INCARNATION_METADATA, incarnation);
            Ok(response)
        })
    }

    fn place(&self, route: &Route, head: &Bytes, segment: usize, length: usize) -> Option<Loan> {
        self.handler.place(route, head, segment, length)
    }
}
