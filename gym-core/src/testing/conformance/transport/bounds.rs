//! Cases of bounds: deadlines, cancellation, capacity and sizes.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;

use super::{Fixture, Make, SHORT_TIMEOUT, far, near, post, probe, run_cases};
use crate::base::error::{Code, Error, Execution};
use crate::message::CallContext;
use crate::message::{Request, Response};
use crate::transport::{Handler, handler_fn};

pub(super) async fn run(make: Make<'_>) {
    run_cases!(make;
        a_passed_deadline_is_refused_before_anything_is_sent,
        a_caller_that_has_left_sends_nothing,
        the_deadline_ends_the_wait_for_room,
        the_deadline_ends_the_wait_for_an_answer,
        the_cancel_token_ends_the_wait_for_an_answer,
        dropping_a_reply_drops_the_handler,
        dropping_a_call_anywhere_gives_back_its_room,
        a_reply_above_its_limit_names_the_limit,
    );
}

/// Responds to `/now` immediately, and to all other routes when released.
fn held(probe: super::CallProbe) -> impl Handler {
    handler_fn(move |request: Request| {
        let told = probe.enter(&request);
        let release = std::sync::Arc::clone(&probe.release);
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

async fn a_passed_deadline_is_refused_before_anything_is_sent(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(make, held(probe)).await;
    let channel = fixture.channel().await;
    let passed = CallContext::until(tokio::time::Instant::now());
    let error = channel.call(post(passed.clone(), "/now")).await.expect_err("refused");
    assert_eq!(code_and_execution(&error), (Code::DeadlineExceeded, Execution::NotStarted), "{error}");
    let error = channel.start(post(passed, "/now")).await.err().expect("refused");
    assert_eq!(code_and_execution(&error), (Code::DeadlineExceeded, Execution::NotStarted), "{error}");
    channel.call(post(far(), "/now")).await.expect("an answer");
    seen.started().await;
    assert!(seen.nothing_started(), "only the last call was sent");
}

async fn a_caller_that_has_left_sends_nothing(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(make, held(probe)).await;
    let channel = fixture.channel().await;
    let cx = far();
    cx.cancel.cancel();
    let error = channel.call(post(cx, "/now")).await.expect_err("refused");
    assert_eq!(code_and_execution(&error), (Code::Cancelled, Execution::NotStarted), "{error}");
    channel.call(post(far(), "/now")).await.expect("an answer");
    seen.started().await;
    assert!(seen.nothing_started(), "only the last call was sent");
}

async fn the_deadline_ends_the_wait_for_room(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::with_calls_max(make, 1, held(probe)).await;
    let channel = fixture.channel().await;
    let holder = tokio::spawn({
        let channel = channel.clone();
        async move { channel.call(post(far(), "/hold")).await }
    });
    seen.started().await;
    let error = channel.call(post(near(), "/now")).await.expect_err("there is no room");
    assert_eq!(code_and_execution(&error), (Code::DeadlineExceeded, Execution::NotStarted), "{error}");
    assert!(seen.nothing_started(), "a call without room is not sent");
    seen.release.notify_one();
    holder.await.expect("no panic").expect("an answer");
    channel.call(post(far(), "/now")).await.expect("there is room again");
}

async fn the_deadline_ends_the_wait_for_an_answer(make: Make<'_>) {
    // On a busy machine a call needs longer to reach its handler, and a call that does not reach it waits for something else.
    let mut time = SHORT_TIMEOUT;
    while !the_handler_is_reached_and_the_deadline_ends_the_wait(make, time).await {
        time *= 2;
    }
}

/// Returns `false` if a call ended before it reached its handler. Each try has a peer of its own, so that no late call of an earlier one is seen.
async fn the_handler_is_reached_and_the_deadline_ends_the_wait(make: Make<'_>, time: Duration) -> bool {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(make, held(probe)).await;
    let channel = fixture.channel().await;
    let called = async { channel.call(post(CallContext::within(time), "/hold")).await };
    let started = async { channel.start(post(CallContext::within(time), "/hold")).await?.await };
    for mut call in [called.boxed_local(), started.boxed_local()] {
        tokio::select! {
            biased;
            _ = seen.started() => {}
            ended = &mut call => {
                let error = ended.expect_err("nobody answers");
                assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
                return false;
            }
        }
        let error = call.await.expect_err("nobody answers");
        assert_eq!(code_and_execution(&error), (Code::DeadlineExceeded, Execution::Unknown), "{error}");
        seen.dropped().await;
    }
    channel.call(post(far(), "/now")).await.expect("the channel still works");
    true
}

async fn the_cancel_token_ends_the_wait_for_an_answer(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(make, held(probe)).await;
    let channel = fixture.channel().await;
    let cx = far();
    let cancel = cx.cancel.clone();
    let call = tokio::spawn({
        let channel = channel.clone();
        async move { channel.call(post(cx, "/hold")).await }
    });
    seen.started().await;
    cancel.cancel();
    let error = call.await.expect("no panic").expect_err("cancelled");
    assert_eq!(code_and_execution(&error), (Code::Cancelled, Execution::Unknown), "{error}");
    seen.dropped().await;
}

async fn dropping_a_reply_drops_the_handler(make: Make<'_>) {
    let (probe, mut seen) = probe();
    let fixture = Fixture::new(make, held(probe)).await;
    let channel = fixture.channel().await;
    let mut reply = channel.start(post(far(), "/hold")).await.expect("handed over");
    let request = tokio::select! {
        biased;
        answer = &mut reply => panic!("answered with {answer:?}"),
        request = seen.started() => request,
    };
    drop(reply);
    seen.dropped().await;
    // The token that the handler passed on fires too.
    request.context.cancel.cancelled().await;
    channel.call(post(far(), "/now")).await.expect("the channel still works");
}

/// Drops a call after each number of polls, so at each of its waits.
async fn dropping_a_call_anywhere_gives_back_its_room(make: Make<'_>) {
    let (probe, _seen) = probe();
    let fixture = Fixture::with_calls_max(make, 2, held(probe)).await;
    let channel = fixture.channel().await;
    for polls in 0..12 {
        let mut call = pin!(channel.call(post(far(), "/hold")));
        for _ in 0..polls {
            let done = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_ready())).await;
            assert!(!done, "nobody answers");
            tokio::task::yield_now().await;
        }
    }
    // As many concurrent calls as there is capacity for.
    let both = futures_util::future::join(channel.call(post(far(), "/now")), channel.call(post(far(), "/now"))).await;
    both.0.and(both.1).expect("all the room is there");
}

async fn a_reply_above_its_limit_names_the_limit(make: Make<'_>) {
    let fixture = Fixture::new(
        make,
        handler_fn(|request: Request| async move {
            let mut response = Response::json("[".repeat(600));
            if request.route.path() == "/segments" {
                response.message.segments = vec![vec![0; 600].into()];
            }
            Ok(response)
        }),
    )
    .await;
    let channel = fixture.channel().await;
    for (route, reply_bytes_max, fits) in
        [("/head", 599, false), ("/head", 600, true), ("/segments", 1_199, false), ("/segments", 1_200, true)]
    {
        let mut cx = far();
        cx.reply_bytes_max = reply_bytes_max;
        match channel.call(post(cx, route)).await {
            Ok(_) => assert!(fits, "{route} within {reply_bytes_max}"),
            Err(error) => {
                assert!(!fits, "{route} within {reply_bytes_max}: {error}");
                assert_eq!(code_and_execution(&error), (Code::ResourceExhausted, Execution::Finished), "{error}");
                assert!(error.to_string().contains("reply_bytes_max"), "{error}");
            }
        }
    }
}
