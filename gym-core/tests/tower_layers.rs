//! tower's layers around both ends of a call: a [`Channel`], and a handler made of a tower service.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use gym_core::transport::{Handler, from_tower, handler_fn, mem};
use gym_core::{CallContext, CancelToken, Channel, Code, Error, Execution, Request, Response, Result};
use tokio::time::{Instant, Sleep, sleep};
use tower::retry::{Policy, RetryLayer};
use tower::timeout::error::Elapsed;
use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};

const SECOND: Duration = Duration::from_secs(1);

/// The most requests that ran at once, and the number of all.
#[derive(Debug, Default)]
struct Runs {
    now: AtomicUsize,
    most: AtomicUsize,
    all: AtomicUsize,
}

impl Runs {
    /// Runs a request for a second and returns its number, from 0.
    async fn run(&self) -> usize {
        let number = self.all.fetch_add(1, Ordering::SeqCst);
        self.most.fetch_max(self.now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        sleep(SECOND).await;
        self.now.fetch_sub(1, Ordering::SeqCst);
        number
    }
}

fn request() -> Request {
    Request::post(CallContext::within(60 * SECOND), "/", "{}")
}

fn channel_to(handler: impl Handler) -> Channel {
    mem::channel_to("peer", Arc::new(handler), false, CancelToken::new())
}

/// Returns a server whose first `refused` requests fail after a second, with an error of code `Unavailable`.
fn server(runs: &Arc<Runs>, refused: usize, execution: Execution) -> impl Handler {
    let runs = Arc::clone(runs);
    handler_fn(move |_| {
        let runs = Arc::clone(&runs);
        async move {
            match runs.run().await {
                number if number < refused => Err(Error::new(Code::Unavailable, execution, "busy")),
                number => Ok(Response::json(number.to_string())),
            }
        }
    })
}

/// Converts what a channel below a timeout returns: a timeout has a code, and a response with an error status is an error.
fn outcome(returned: Result<Response, BoxError>) -> Result<Response> {
    match returned {
        Err(error) if error.is::<Elapsed>() => Err(Error::unknown(Code::DeadlineExceeded, "too slow")),
        returned => returned?.into_result(),
    }
}

/// Allows a number of resends, by the rule of the SDK.
#[derive(Clone)]
struct Resends(usize);

impl Policy<Request, Response, Error> for Resends {
    type Future = Sleep;

    fn retry(&mut self, request: &mut Request, returned: &mut Result<Response>) -> Option<Sleep> {
        returned.as_ref().err().filter(|error| error.may_resend(request.context.repeatable))?;
        self.0 = self.0.checked_sub(1)?;
        Some(sleep(SECOND))
    }

    fn clone_request(&mut self, request: &Request) -> Option<Request> {
        Some(request.clone())
    }
}

fn layered(
    channel: Channel,
    resends: usize,
    timeout: Duration,
) -> impl Service<Request, Response = Response, Error = Error, Future: Send> + Clone {
    let layers = ServiceBuilder::new().layer(RetryLayer::new(Resends(resends))).map_result(outcome).timeout(timeout);
    layers.service(channel)
}

#[tokio::test(start_paused = true)]
async fn retries_around_a_channel_follow_the_rule_of_the_errors() {
    // Execution, resends allowed, requests that the server sees, success.
    let table = [
        (Execution::NotStarted, 5, 3, true),
        (Execution::NotStarted, 1, 2, false),
        (Execution::Unknown, 5, 1, false),
        (Execution::Finished, 5, 1, false),
    ];
    for (execution, resends, seen, succeeds) in table {
        let runs = Arc::new(Runs::default());
        let service = layered(channel_to(server(&runs, 2, execution)), resends, 10 * SECOND);
        let returned = service.oneshot(request()).await;
        assert_eq!(runs.all.load(Ordering::SeqCst), seen, "{execution:?}, {resends} resends");
        match returned {
            Ok(response) => assert_eq!((&response.message.head.to_bytes()[..], succeeds), (&b"2"[..], true)),
            Err(error) => {
                assert_eq!((error.code(), error.execution(), succeeds), (Code::Unavailable, execution, false))
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_timeout_around_a_channel_ends_the_call() {
    let runs = Arc::new(Runs::default());
    let service = layered(channel_to(server(&runs, 0, Execution::Finished)), 0, SECOND / 2);
    let started = Instant::now();
    let error = service.oneshot(request()).await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::DeadlineExceeded, Execution::Unknown));
    assert!(started.elapsed() < SECOND, "the timeout ended it, not the server");
}

#[tokio::test(start_paused = true)]
async fn a_concurrency_limit_around_a_channel_holds_for_its_clones() {
    let runs = Arc::new(Runs::default());
    let service = ServiceBuilder::new().concurrency_limit(3).service(channel_to(server(&runs, 0, Execution::Finished)));
    for returned in join_all((0..9).map(|_| service.clone().oneshot(request()))).await {
        assert!(returned.unwrap().status.is_success());
    }
    assert_eq!((runs.most.load(Ordering::SeqCst), runs.all.load(Ordering::SeqCst)), (3, 9));
}

#[tokio::test(start_paused = true)]
async fn layers_around_a_service_hold_for_all_calls_of_its_handler() {
    let runs = Arc::new(Runs::default());
    let inner = Arc::new(server(&runs, 0, Execution::Finished));
    let service = service_fn(move |request| inner.handle(request));
    // One request a second, and at most two at once.
    let layers = ServiceBuilder::new().concurrency_limit(2).buffer(16).rate_limit(1, 2 * SECOND).timeout(10 * SECOND);
    let channel = channel_to(from_tower(layers.service(service)));
    let started = Instant::now();
    for returned in join_all((0..4).map(|_| channel.call(request()))).await {
        assert!(returned.unwrap().status.is_success());
    }
    assert!(started.elapsed() >= 6 * SECOND, "the first at 0 s, the fourth at 6 s: {:?}", started.elapsed());
    assert!(runs.most.load(Ordering::SeqCst) <= 2);
}

/// The caller receives the errors of a layered service with their code and execution, and the SDK's own unchanged.
#[tokio::test(start_paused = true)]
async fn errors_of_a_layered_service_reach_the_caller() {
    let runs = Arc::new(Runs::default());
    let inner = Arc::new(server(&runs, 1, Execution::NotStarted));
    let service = service_fn(move |request| inner.handle(request));
    let layered = |timeout| ServiceBuilder::new().timeout(timeout).service(service.clone());
    let call = |channel: Channel| async move { channel.call(request()).await.unwrap().into_result() };

    let own = call(channel_to(from_tower(layered(10 * SECOND)))).await.unwrap_err();
    assert_eq!((own.code(), own.execution(), own.message()), (Code::Unavailable, Execution::NotStarted, "busy"));

    let unnamed = call(channel_to(from_tower(layered(SECOND / 2)))).await.unwrap_err();
    assert_eq!((unnamed.code(), unnamed.execution()), (Code::Internal, Execution::Unknown));
    assert!(unnamed.to_string().contains(&Elapsed::new().to_string()), "{unnamed}");

    let named = ServiceBuilder::new().map_result(outcome).service(layered(SECOND / 2));
    let named = call(channel_to(from_tower(named))).await.unwrap_err();
    assert_eq!((named.code(), named.execution()), (Code::DeadlineExceeded, Execution::Unknown));
}
