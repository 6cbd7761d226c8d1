//! Disconnects and reconnects two RDMA devices. Runs only if `GYM_UCX_LINK_DOWN` and `GYM_UCX_LINK_UP` contain the
//! commands, as in the virtual machine of `.ci/rdma-vm`.

mod common;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use common::Way;
use common::transport::{Ends, OnWay};
use gym_core::testing::figures::{Figures, answering};
use gym_core::transport::mux::ConnectionLimits;
use gym_core::transport::{ConnectOptions, Connector, Listener};
use gym_core::{CallContext, Code, Endpoint, Execution, Request};
use tokio::time::{Instant, timeout};

/// Deadline of a call that gets no response.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// Tolerance for a busy, emulated machine.
const LATE: Duration = Duration::from_secs(5);
/// Time without heartbeats after which a peer is lost.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(6);
/// Maximum time to reconnect.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

fn sh(command: &str) {
    let status = Command::new("sh").args(["-c", command]).status().expect("a shell");
    assert!(status.success(), "{command}: {status}");
}

/// Connects until it succeeds, because the devices are not ready for a moment after the link is up.
async fn again(connector: &OnWay, endpoint: &Endpoint) -> Figures {
    let began = Instant::now();
    loop {
        match Figures::of(connector, endpoint).await {
            Ok(figures) => return figures,
            Err(error) => assert!(began.elapsed() < RETRY_INTERVAL, "not connected again: {error}"),
        }
    }
}

#[tokio::test]
async fn a_pulled_cable_ends_calls_within_their_deadlines_and_a_new_connection_works_when_it_is_back() {
    let variable = |name| std::env::var(name).ok();
    let (Some(down), Some(up)) = (variable("GYM_UCX_LINK_DOWN"), variable("GYM_UCX_LINK_UP")) else {
        eprintln!("NOT RUN: GYM_UCX_LINK_DOWN does not say how to pull the cable");
        return;
    };
    let Some(ends) = Ends::open(Way::Network).await else { return };
    let mut limits = ConnectionLimits::default();
    limits.silence_max = SILENCE_TIMEOUT;
    let (connector, mut listener) = ends.pair(limits).await;
    let endpoint = listener.endpoints()[0].clone();
    let handler = Arc::new(answering());
    tokio::spawn(async move {
        while let Ok(incoming) = listener.accept().await {
            tokio::spawn(incoming.serve(handler.clone(), Default::default()));
        }
    });
    let figures = again(&connector, &endpoint).await;
    let figure = figures.round_trips(None, Duration::from_millis(100)).await.unwrap();
    assert!(figure.calls > 0);

    // One call is in flight; the others are sent after the link is down.
    let waits = Request::post(CallContext::within(CALL_TIMEOUT * 10), "/figures/wait", "{}");
    let waiting = figures.channel().start(waits).await.unwrap();
    sh(&down);
    for _ in 0..3 {
        let began = Instant::now();
        let call = Request::post(CallContext::within(CALL_TIMEOUT), "/figures/echo", "{}");
        let error = figures.channel().call(call).await.expect_err("nothing comes through");
        assert!(matches!(error.code(), Code::DeadlineExceeded | Code::Unavailable), "{error}");
        assert!(began.elapsed() < CALL_TIMEOUT + LATE, "{error} after {:?}", began.elapsed());
    }
    // The heartbeats fail long before the deadline of the call in flight.
    timeout(SILENCE_TIMEOUT * 2 + LATE, figures.channel().closed()).await.expect("the link says that its peer is gone");
    let error = timeout(LATE, waiting).await.expect("at once").expect_err("it has no answer");
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::Unknown), "{error}");
    let began = Instant::now();
    let refused = connector.connect(&CallContext::within(CALL_TIMEOUT), &endpoint, &ConnectOptions::default()).await;
    assert_eq!(refused.expect_err("the cable is out").execution(), Execution::NotStarted);
    assert!(began.elapsed() < CALL_TIMEOUT + LATE);

    sh(&up);
    let figures = again(&connector, &endpoint).await;
    let segment = vec![7; 1 << 20].into();
    assert!(figures.round_trips(Some(&segment), Duration::from_millis(100)).await.unwrap().calls > 0);
}
