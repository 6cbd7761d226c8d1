//! The effect of each fault of the simulated network on clients and servers.

use std::sync::Arc;
use std::time::Duration;

use gym_core::testing::net::{SimHost, kind};
use gym_core::testing::{Faults, SimNet};
use gym_core::transport::{ConnectOptions, Connector, Listener, handler_fn};
use gym_core::{CallContext, CancelToken, Channel, Code, Endpoint, Error, Execution, Request, Response, Result};
use tokio::sync::mpsc;

/// Sends a message when it is dropped.
struct DropNotice(mpsc::Sender<()>);

impl Drop for DropNotice {
    fn drop(&mut self) {
        let _ = self.0.try_send(());
    }
}

struct Fixture {
    net: SimNet,
    client: SimHost,
    /// A message for each handler whose future was dropped.
    dropped: mpsc::Receiver<()>,
}

impl Fixture {
    /// A server that responds to all routes except `/hang`.
    fn new(faults: Faults) -> Self {
        let net = SimNet::new(7, faults);
        let (client, server) = (net.host("client"), net.host("server"));
        let (tell, dropped) = mpsc::channel(64);
        let handler = Arc::new(handler_fn(move |request: Request| {
            let told = DropNotice(tell.clone());
            async move {
                let _told = told;
                if request.route.path() == "/hang" {
                    std::future::pending::<()>().await;
                }
                Ok(Response::json("{}"))
            }
        }));
        let mut listener = server.listen("gym").expect("a new life listens nowhere");
        let host = server.clone();
        server.spawn(async move {
            while let Ok(peer) = listener.accept().await {
                let serving = peer.serve(Arc::clone(&handler) as _, CancelToken::new());
                host.spawn(async move {
                    let _ = serving.await;
                });
            }
        });
        Self { net, client, dropped }
    }

    async fn connect(&self) -> Result<Channel> {
        let to = Endpoint::parse("sim://server/gym")?;
        self.client.connect(&CallContext::within(Duration::from_secs(60)), &to, &ConnectOptions::default()).await
    }

    fn injected(&self, kind: &str) -> u64 {
        self.net.trace().faults().get(kind).copied().unwrap_or_default()
    }
}

async fn call(channel: &Channel, route: &'static str) -> Result<Response> {
    channel.call(Request::post(CallContext::within(Duration::from_secs(5)), route, "{}")).await
}

fn code_and_execution(error: &Error) -> (Code, Execution) {
    (error.code(), error.execution())
}

#[tokio::test(start_paused = true)]
async fn a_lost_message_lets_its_caller_wait_until_the_deadline() {
    let mut fixture = Fixture::new(Faults::NONE);
    let channel = fixture.connect().await.unwrap();
    let with = |change: fn(&mut Faults)| {
        let mut faults = Faults::calm();
        change(&mut faults);
        faults
    };
    fixture.net.set_faults(with(|faults| faults.loss_request = 1.0));
    let error = call(&channel, "/run").await.unwrap_err();
    assert_eq!(code_and_execution(&error), (Code::DeadlineExceeded, Execution::Unknown));
    assert!(fixture.dropped.try_recv().is_err(), "it never arrived");
    fixture.net.set_faults(with(|faults| faults.loss_reply = 1.0));
    let error = call(&channel, "/run").await.unwrap_err();
    assert_eq!(code_and_execution(&error), (Code::DeadlineExceeded, Execution::Unknown));
    fixture.dropped.recv().await.expect("it ran");
    fixture.net.set_faults(Faults::calm());
    call(&channel, "/run").await.unwrap();
    // The cancellation of the lost call was lost too.
    assert_eq!((fixture.injected(kind::REQUEST_LOST), fixture.injected(kind::REPLY_LOST)), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_reset_ends_every_call_of_its_connection() {
    let mut fixture = Fixture::new(Faults::NONE);
    let channel = fixture.connect().await.unwrap();
    let hanging = call(&channel, "/hang");
    let (hanging, other) = tokio::join!(hanging, async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let mut faults = Faults::calm();
        faults.reset = 1.0;
        fixture.net.set_faults(faults);
        call(&channel, "/run").await
    });
    for error in [hanging.unwrap_err(), other.unwrap_err()] {
        assert_eq!(code_and_execution(&error), (Code::Unavailable, Execution::Unknown), "{error}");
    }
    fixture.dropped.recv().await.expect("the handler is dropped");
    assert_eq!(
        code_and_execution(&call(&channel, "/run").await.unwrap_err()),
        (Code::Unavailable, Execution::NotStarted)
    );
}

#[tokio::test(start_paused = true)]
async fn a_refused_and_an_unanswered_connect_started_nothing() {
    let mut faults = Faults::calm();
    faults.refuse_connect = 1.0;
    let fixture = Fixture::new(faults);
    assert_eq!(code_and_execution(&fixture.connect().await.unwrap_err()), (Code::Unavailable, Execution::NotStarted));
    fixture.net.set_faults(Faults::calm());
    fixture.net.cut("server", "client");
    let began = tokio::time::Instant::now();
    assert_eq!(code_and_execution(&fixture.connect().await.unwrap_err()), (Code::Unavailable, Execution::NotStarted));
    assert_eq!(began.elapsed(), Faults::NONE.connect_timeout);
    fixture.net.set_faults(Faults::calm());
    call(&fixture.connect().await.unwrap(), "/run").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_crash_drops_the_handlers_and_is_told_unless_it_is_silent() {
    for silent in [false, true] {
        let mut faults = Faults::calm();
        faults.silent_crash = if silent { 1.0 } else { 0.0 };
        let mut fixture = Fixture::new(faults);
        let channel = fixture.connect().await.unwrap();
        let (answer, ()) = tokio::join!(call(&channel, "/hang"), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            fixture.net.crash("server");
            fixture.dropped.recv().await.expect("the handler is dropped");
        });
        let code = if silent { Code::DeadlineExceeded } else { Code::Unavailable };
        assert_eq!(code_and_execution(&answer.unwrap_err()), (code, Execution::Unknown));
        assert_eq!(
            code_and_execution(&fixture.connect().await.unwrap_err()),
            (Code::Unavailable, Execution::NotStarted)
        );
        // The machine is up again without the old connection, and reports so immediately.
        let _back = fixture.net.host("server");
        assert_eq!(call(&channel, "/run").await.unwrap_err().code(), Code::Unavailable);
    }
}

#[tokio::test(start_paused = true)]
async fn a_frozen_host_answers_when_it_goes_on_and_keeps_its_connections() {
    let fixture = Fixture::new(Faults::NONE);
    let channel = fixture.connect().await.unwrap();
    fixture.net.freeze("server");
    let waiting = call(&channel, "/run");
    tokio::pin!(waiting);
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut waiting).await.is_err());
    // Its system accepts connections.
    let other = fixture.connect().await.unwrap();
    fixture.net.thaw("server");
    assert!(waiting.await.is_ok());
    assert!(call(&other, "/run").await.is_ok());
    assert_eq!(fixture.injected(kind::FROZEN), 1);
}

#[tokio::test(start_paused = true)]
async fn a_frozen_host_that_crashes_closes_its_connections() {
    let fixture = Fixture::new(Faults::NONE);
    let channel = fixture.connect().await.unwrap();
    fixture.net.freeze("server");
    let crash = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        fixture.net.crash("server");
    };
    let (response, ()) = tokio::join!(call(&channel, "/run"), crash);
    assert_eq!(response.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn an_isolated_host_reaches_nobody_until_its_cable_is_back() {
    let fixture = Fixture::new(Faults::NONE);
    let channel = fixture.connect().await.unwrap();
    fixture.net.isolate("client");
    assert_eq!(call(&channel, "/run").await.unwrap_err().code(), Code::DeadlineExceeded);
    assert_eq!(fixture.connect().await.unwrap_err().execution(), Execution::NotStarted);
    fixture.net.reconnect("client");
    assert!(call(&channel, "/run").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_damaged_message_closes_its_connection_and_reaches_no_handler() {
    let mut fixture = Fixture::new(Faults::NONE);
    let channel = fixture.connect().await.unwrap();
    let mut faults = Faults::calm();
    faults.corrupt = 1.0;
    fixture.net.set_faults(faults);
    let error = call(&channel, "/run").await.unwrap_err();
    assert_eq!(code_and_execution(&error), (Code::Unavailable, Execution::Unknown), "{error}");
    assert!(fixture.dropped.try_recv().is_err(), "no handler saw it");
    assert_eq!(fixture.injected(kind::CORRUPTED), 1);
    fixture.net.set_faults(Faults::calm());
    assert_eq!(call(&channel, "/run").await.unwrap_err().execution(), Execution::NotStarted);
    assert!(call(&fixture.connect().await.unwrap(), "/run").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn only_requests_of_the_named_routes_arrive_twice() {
    let mut faults = Faults::calm();
    (faults.duplicate, faults.duplicate_routes) = (1.0, &["/twice"]);
    let mut fixture = Fixture::new(faults);
    let channel = fixture.connect().await.unwrap();
    for (route, times) in [("/twice/or/so", 2), ("/once", 1)] {
        call(&channel, route).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(std::iter::from_fn(|| fixture.dropped.try_recv().ok()).count(), times, "{route}");
    }
    assert_eq!(fixture.injected(kind::DUPLICATED), 1);
}

#[tokio::test(start_paused = true)]
async fn a_slow_host_delays_each_message() {
    let fixture = Fixture::new(Faults::NONE);
    let channel = fixture.connect().await.unwrap();
    for (delay, took) in [(Duration::from_secs(1), Duration::from_secs(2)), (Duration::ZERO, Duration::ZERO)] {
        fixture.net.slow("server", delay);
        let began = tokio::time::Instant::now();
        call(&channel, "/run").await.unwrap();
        assert_eq!(began.elapsed(), took, "to it and back");
    }
    assert_eq!(fixture.injected(kind::SLOWED), 2);
}

#[tokio::test(start_paused = true)]
async fn a_half_open_link_carries_requests_and_no_replies() {
    let mut fixture = Fixture::new(Faults::NONE);
    let channel = fixture.connect().await.unwrap();
    fixture.net.mute("server");
    let error = call(&channel, "/run").await.unwrap_err();
    assert_eq!(code_and_execution(&error), (Code::DeadlineExceeded, Execution::Unknown));
    fixture.dropped.recv().await.expect("it ran");
    fixture.net.unmute("server");
    assert!(call(&channel, "/run").await.is_ok());
    assert_eq!(fixture.injected(kind::MUTE), 1);
}

#[tokio::test(start_paused = true)]
async fn an_older_process_goes_on_beside_the_newer_one_until_it_is_ended() {
    let fixture = Fixture::new(Faults::NONE);
    let older = fixture.connect().await.unwrap();
    let newer = fixture.net.host_beside("server");
    assert!(call(&older, "/run").await.is_ok());
    // The newer one has the address, and listens nowhere yet.
    assert_eq!(fixture.connect().await.unwrap_err().execution(), Execution::NotStarted);
    let mut listener = newer.listen("gym").unwrap();
    let server = newer.clone();
    newer.spawn(async move {
        while let Ok(peer) = listener.accept().await {
            let handler = handler_fn(|_| async { Ok(Response::json("{\"newer\":true}")) });
            server.spawn(async move {
                let _ = peer.serve(Arc::new(handler), CancelToken::new()).await;
            });
        }
    });
    let channel = fixture.connect().await.unwrap();
    fixture.net.end_older("server");
    assert_eq!(call(&older, "/run").await.unwrap_err().code(), Code::Unavailable);
    let response = call(&channel, "/run").await.unwrap();
    assert_eq!(&*response.message.head.to_bytes(), b"{\"newer\":true}");
}
