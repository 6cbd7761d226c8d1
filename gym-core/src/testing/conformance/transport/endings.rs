//! Cases of the ends of channels and servers.

use std::sync::Arc;
use std::time::Duration;

use super::{Fixture, LONG_TIMEOUT, Make, far, post, probe, run_cases};
use crate::base::error::{Code, Error, Execution};
use crate::message::{Request, Response};
use crate::transport::ConnectOptions;
use crate::transport::{Handler, handler_fn};

pub(super) async fn run(make: Make<'_>) {
    run_cases!(make;
        a_peer_that_is_not_there_is_unavailable_and_nothing_started,
        a_drain_lets_running_calls_finish_and_takes_no_new_ones,
        a_peer_that_dies_leaves_its_calls_unknown,
        closing_a_channel_waits_for_its_calls,
        closing_a_channel_without_grace_ends_its_calls,
        two_channels_are_independent,
    );
}

/// Responds to `/now` immediately, and to all other routes when released.
fn held(probe: super::CallProbe) -> impl Handler {
    handler_fn(move |request: Request| {
        let told = probe.enter(&request);
        let release = Arc::clone(&probe.release);
        async move {
            let _told = told;
            if request.route.path() != "/now" {
                release.notified().await;
            }
            Ok(Response::json("{}"))
        }
    })
}

fn code_and_execution(error: &Error) -> (Code, Execution) {
    (error.code(), error.execution())
}

const REFUSED: (Code, Execution) = (Code::Unavailable, Execution::NotStarted);

async fn a_peer_that_is_not_there_is_unavailable_and_nothing_started(make: Make<'_>) {
    let (probe, _seen) = probe();
    let mut fixture = Fixture::new(make, held(probe)).await;
    fixture.begin_drain().await;
    fixture.end().await;
    // A transport that connects lazily fails at the first call.
    let error = match fixture.connector.connect(&far(), &fixture.endpoint, &ConnectOptions::default()).await {
        Ok(channel) => channel.call(post(far(), "/now")).await.expect_err("nobody is there"),
        Err(error) => error,
    };
    assert_eq!(code_and_execution(&error), REFUSED, "{error}");
    assert!(error.may_resend(false), "{error}");
}

async fn a_drain_lets_running_calls_finish_and_takes_no_new_ones(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let mut fixture = Fixture::new(make, held(probe)).await;
    let channel = fixture.channel().await;
    let running = tokio::spawn({
        let channel = channel.clone();
        async move { channel.call(post(far(), "/hold")).await }
    });
    seen.started().await;
    // Leaves an unused connection to the peer, if the transport pools connections.
    channel.call(post(far(), "/now")).await.expect("an answer");
    seen.started().await;
    fixture.begin_drain().await;
    seen.release.notify_one();
    running.await.expect("no panic").expect("a running call is answered");
    fixture.end().await;
    let error = channel.call(post(far(), "/now")).await.expect_err("drained");
    assert_eq!(code_and_execution(&error), REFUSED, "{error}");
    assert!(seen.nothing_started(), "a refused call is not run");
}

async fn a_peer_that_dies_leaves_its_calls_unknown(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let mut fixture = Fixture::new(make, held(probe)).await;
    let channel = fixture.channel().await;
    let mut running = Vec::new();
    for _ in 0..4 {
        let channel = channel.clone();
        running.push(tokio::spawn(async move { channel.call(post(far(), "/hold")).await }));
        seen.started().await;
    }
    fixture.kill().await;
    for call in running {
        let error = call.await.expect("no panic").expect_err("the peer is dead");
        assert_eq!(code_and_execution(&error), (Code::Unavailable, Execution::Unknown), "{error}");
        seen.dropped().await;
    }
    let error = channel.call(post(far(), "/now")).await.expect_err("the peer is dead");
    assert_eq!(code_and_execution(&error), REFUSED, "{error}");
}

async fn closing_a_channel_waits_for_its_calls(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(make, held(probe)).await;
    let channel = fixture.channel().await;
    let running = tokio::spawn({
        let channel = channel.clone();
        async move { channel.call(post(far(), "/hold")).await }
    });
    seen.started().await;
    // `join!` polls the close first, so it has begun before the other futures continue.
    let (closed, ()) = tokio::join!(biased; channel.close(LONG_TIMEOUT), async {
        let error = channel.call(post(far(), "/now")).await.expect_err("it is closing");
        assert_eq!(code_and_execution(&error), REFUSED, "{error}");
        assert!(seen.nothing_started(), "a refused call is not run");
        seen.release.notify_one();
    });
    closed.expect("all calls were answered");
    running.await.expect("no panic").expect("a running call is answered");
    let error = channel.call(post(far(), "/now")).await.expect_err("closed");
    assert_eq!(code_and_execution(&error), REFUSED, "{error}");
    channel.closed().await;
}

async fn closing_a_channel_without_grace_ends_its_calls(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(make, held(probe)).await;
    let channel = fixture.channel().await;
    let running = tokio::spawn({
        let channel = channel.clone();
        async move { channel.call(post(far(), "/hold")).await }
    });
    seen.started().await;
    let error = channel.close(Duration::ZERO).await.expect_err("a call was running");
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    let error = running.await.expect("no panic").expect_err("ended");
    assert_eq!(code_and_execution(&error), (Code::Unavailable, Execution::Unknown), "{error}");
    seen.dropped().await;
}

async fn two_channels_are_independent(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::with_calls_max(make, 1, held(probe)).await;
    let (one, other) = (fixture.channel().await, fixture.channel().await);
    let running = tokio::spawn({
        let one = one.clone();
        async move { one.call(post(far(), "/hold")).await }
    });
    seen.started().await;
    other.call(post(far(), "/now")).await.expect("it has room of its own");
    other.close(LONG_TIMEOUT).await.expect("nothing is running on it");
    seen.release.notify_one();
    running.await.expect("no panic").expect("the other one's end is not its own");
}
