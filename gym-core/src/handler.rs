//! The server end of a call, and how it meets tower.

use std::fmt;
use std::future::{Future, poll_fn};
use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::channel::INCARNATION_METADATA;
use crate::context::Incarnation;
use crate::error::{Code, Error, Result};
use crate::message::{Request, Response};

/// Answers calls. It takes its place in line *before `handle` returns*, so the order of these calls is the order of arrival;
/// a place that others wait behind must not need polling. Dropping the answer cancels the call.
///
/// An `Err` travels to the caller as [`Response::from_error`], on every transport.
pub trait Handler: fmt::Debug + Send + Sync + 'static {
    /// Takes one call.
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>>;

    /// Whether it bounds its calls itself: it refuses at once what is more than it takes, and an answer that nobody has read keeps no
    /// place. A link of the same process then bounds nothing, and nobody waits for room on it.
    fn bounds_calls(&self) -> bool {
        false
    }
}

impl<H: Handler + ?Sized> Handler for Arc<H> {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        (**self).handle(request)
    }

    fn bounds_calls(&self) -> bool {
        (**self).bounds_calls()
    }
}

/// A handler made of a function.
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

/// A handler made of a tower service, so that tower's layers can stand before a role. The service is cloned for each call and
/// readied inside it: its readiness is backpressure on that call only.
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

/// A handler of one life of a server: calls that are meant for another are refused before they run, and answers say which
/// life gave them.
#[derive(Debug)]
pub struct Fenced<H> {
    incarnation: Incarnation,
    /// As each answer tells it.
    told: String,
    handler: H,
}

impl<H: Handler> Fenced<H> {
    /// Fences `handler` to `incarnation`.
    #[must_use]
    pub fn new(incarnation: Incarnation, handler: H) -> Self {
        Self { incarnation, told: incarnation.to_string(), handler }
    }
}

impl<H: Handler> Handler for Fenced<H> {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        let here = self.incarnation;
        match request.context.incarnation {
            Some(meant) if meant != here => {
                let error = Error::not_started(
                    Code::Unavailable,
                    format!("the call is meant for incarnation {meant}; this is {here}"),
                );
                Box::pin(async move { Err(error) })
            }
            _ => {
                let (answer, told) = (self.handler.handle(request), self.told.clone());
                Box::pin(async move {
                    let mut response = answer.await?;
                    response.metadata.push(INCARNATION_METADATA, told);
                    Ok(response)
                })
            }
        }
    }

    fn bounds_calls(&self) -> bool {
        self.handler.bounds_calls()
    }
}
