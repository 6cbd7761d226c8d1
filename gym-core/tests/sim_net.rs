//! What each fault of the simulated network looks like to those who call and to those who answer.

use std::sync::Arc;
use std::time::Duration;

use gym_core::testing::net::{SimHost, kind};
use gym_core::testing::{Faults, SimNet};
use gym_core::{
    CallContext, Channel, Code, ConnectOptions, Connector, Endpoint, Error, Execution, Listener, Request, Response,
    Result, handler_fn,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Tells when it is dropped.
struct Told(mpsc::Sender<()>);

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.0.try_send(());
    }
}

struct Bench {
    net: SimNet,
    client: SimHost,
    /// A message for each handler whose future is gone.
    dropped: mpsc::Receiver<()>,
}

impl Bench {
    /// A server that answers everything but `/hang`.
    fn new(faults: Faults) -> Self {
        let net = SimNet::new(7, faults);
        let (client, server) = (net.host("client"), net.host("server"));
        let (tell, dropped) = mpsc::channel(64);
        let handler = Arc::new(handler_fn(move |request: Request| {
            let told = Told(tell.clone());
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
                let serving = peer.serve(Arc::clone(&handler) as _, CancellationToken::new());
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

fn facts(error: &Error) -> (Code, Execution) {
    (error.code(), error.execution())
}

#[tokio::test(start_paused = true)]
async fn a_lost_message_lets_its_caller_wait_until_the_deadline() {
    let mut bench = Bench::new(Faults::NONE);
    let channel = bench.connect().await.unwrap();
    let with = |change: fn(&mut Faults)| {
        let mut faults = Faults::calm();
        change(&mut faults);
        faults
    };
    bench.net.set_faults(with(|faults| faults.loss_request = 1.0));
    let error = call(&channel, "/run").await.unwrap_err();
    assert_eq!(facts(&error), (Code::DeadlineExceeded, Execution::Unknown));
    assert!(bench.dropped.try_recv().is_err(), "it never arrived");
    bench.net.set_faults(with(|faults| faults.loss_reply = 1.0));
    let error = call(&channel, "/run").await.unwrap_err();
    assert_eq!(facts(&error), (Code::DeadlineExceeded, Execution::Unknown));
    bench.dropped.recv().await.expect("it ran");
    bench.net.set_faults(Faults::calm());
    call(&channel, "/run").await.unwrap();
    // The cancellation of the call that never arrived was lost too.
    assert_eq!((bench.injected(kind::REQUEST_LOST), bench.injected(kind::REPLY_LOST)), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_reset_ends_every_call_of_its_connection() {
    let mut bench = Bench::new(Faults::NONE);
    let channel = bench.connect().await.unwrap();
    let hanging = call(&channel, "/hang");
    let (hanging, other) = tokio::join!(hanging, async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let mut faults = Faults::calm();
        faults.reset = 1.0;
        bench.net.set_faults(faults);
        call(&channel, "/run").await
    });
    for error in [hanging.unwrap_err(), other.unwrap_err()] {
        assert_eq!(facts(&error), (Code::Unavailable, Execution::Unknown), "{error}");
    }
    bench.dropped.recv().await.expect("the handler is dropped");
    assert_eq!(facts(&call(&channel, "/run").await.unwrap_err()), (Code::Unavailable, Execution::NotStarted));
}

#[tokio::test(start_paused = true)]
async fn a_refused_and_an_unanswered_connect_started_nothing() {
    let mut faults = Faults::calm();
    faults.refuse_connect = 1.0;
    let bench = Bench::new(faults);
    assert_eq!(facts(&bench.connect().await.unwrap_err()), (Code::Unavailable, Execution::NotStarted));
    bench.net.set_faults(Faults::calm());
    bench.net.cut("server", "client");
    let began = tokio::time::Instant::now();
    assert_eq!(facts(&bench.connect().await.unwrap_err()), (Code::Unavailable, Execution::NotStarted));
    assert_eq!(began.elapsed(), Faults::NONE.connect_timeout);
    bench.net.set_faults(Faults::calm());
    call(&bench.connect().await.unwrap(), "/run").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_crash_drops_the_handlers_and_is_told_unless_it_is_silent() {
    for silent in [false, true] {
        let mut faults = Faults::calm();
        faults.silent_crash = if silent { 1.0 } else { 0.0 };
        let mut bench = Bench::new(faults);
        let channel = bench.connect().await.unwrap();
        let (answer, ()) = tokio::join!(call(&channel, "/hang"), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            bench.net.crash("server");
            bench.dropped.recv().await.expect("the handler is dropped");
        });
        let code = if silent { Code::DeadlineExceeded } else { Code::Unavailable };
        assert_eq!(facts(&answer.unwrap_err()), (code, Execution::Unknown));
        assert_eq!(facts(&bench.connect().await.unwrap_err()), (Code::Unavailable, Execution::NotStarted));
        // The machine is back and knows nothing of the old connection: it says so at once.
        let _back = bench.net.host("server");
        assert_eq!(call(&channel, "/run").await.unwrap_err().code(), Code::Unavailable);
    }
}
