//! tower's layers on both sides of a call: a limit and a timeout around a server, and retries and a timeout around the channel to it.
//!
//! `cargo run --release -p gym-examples --bin tower_layers` sends eight requests to a server that refuses the first three and runs two at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use gym_core::prelude::*;
use gym_core::transport::{from_tower, mem};
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep};
use tower::retry::{Policy, RetryLayer};
use tower::timeout::error::Elapsed;
use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};

/// Sends a request again where the SDK's rule allows it, at most this many times.
#[derive(Clone)]
struct Resends(u32);

impl Policy<Request, Response, Error> for Resends {
    type Future = Sleep;

    fn retry(&mut self, request: &mut Request, returned: &mut Result<Response>) -> Option<Sleep> {
        returned.as_ref().err().filter(|error| error.may_resend(request.context.repeatable))?;
        self.0 = self.0.checked_sub(1)?;
        Some(sleep(Duration::from_millis(20)))
    }

    fn clone_request(&mut self, request: &Request) -> Option<Request> {
        Some(request.clone())
    }
}

/// Gives a timeout of tower its code, and turns a response with an error status into an error.
fn outcome(returned: Result<Response, BoxError>) -> Result<Response> {
    match returned {
        Err(error) if error.is::<Elapsed>() => Err(Error::unknown(Code::DeadlineExceeded, "slower than its timeout")),
        returned => returned?.into_result(),
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let received = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&received);
    let score = service_fn(move |_: Request| {
        let number = count.fetch_add(1, Ordering::Relaxed);
        async move {
            if number < 3 {
                return Err(Error::not_started(Code::Unavailable, "busy"));
            }
            sleep(Duration::from_millis(10)).await;
            Ok(Response::json("1.0"))
        }
    });
    let server = ServiceBuilder::new().map_result(outcome).concurrency_limit(2).timeout(Duration::from_secs(5));
    let server = from_tower(server.service(score));

    let channel = mem::channel_to("scorer", Arc::new(server), false, CancelToken::new());
    let client = ServiceBuilder::new().layer(RetryLayer::new(Resends(3))).map_result(outcome);
    let client = client.timeout(Duration::from_secs(10)).service(channel);
    let mut calls = JoinSet::new();
    for row in 0..8 {
        let context = CallContext::within(Duration::from_secs(60));
        let call = client.clone().oneshot(Request::post(context, "/score", format!("{{\"row\": {row}}}")));
        calls.spawn(async move { (row, call.await) });
    }
    for (row, returned) in calls.join_all().await {
        println!("row {row}: {}", String::from_utf8_lossy(&returned?.message.head.to_bytes()));
    }
    println!("the server received {} requests", received.load(Ordering::Relaxed));
    Ok(())
}
