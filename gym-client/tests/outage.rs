//! A server that is away for a while: calls that have not started wait for it, and one of them asks for all.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::future::join_all;
use gym_client::{CallOptions, SERVER_TIMEOUT, ServerClient, Transports};
use gym_core::registry::{MemoryRegistry, Registration, Registry};
use gym_core::rollout::FailureClass;
use gym_core::server::ServerKind;
use gym_core::testing::{Faults, SimFiles, SimNet};
use gym_core::transport::{handler_fn, serve};
use gym_core::{CallContext, CancelToken, Code, Endpoint, Execution, Handler, Request, Response, Result, World};
use tokio::time::{Instant, sleep};

const LONG: Duration = Duration::from_secs(100_000);
/// Longer than a server takes to be started again.
const OUTAGE: Duration = Duration::from_secs(6);

/// A server `math` on a host that can be killed, and its client.
struct Ground {
    net: SimNet,
    client: ServerClient,
    calls: Arc<AtomicUsize>,
    questions: Arc<AtomicUsize>,
}

impl Ground {
    async fn new() -> Self {
        let net = SimNet::new(1, Faults::calm());
        let world = World::new(Arc::new(SimFiles::new(1)), 1, Duration::from_secs(1));
        let registry = MemoryRegistry::default();
        let endpoint = Endpoint::parse("sim://math/math").expect("an endpoint");
        let mut registration = Registration::new("math", ServerKind::Resources, &[endpoint]);
        registration.ttl = LONG;
        registry.register(&CallContext::default(), registration).await.expect("room");
        let transports = Transports::new().with_connector(Arc::new(net.host("agent")));
        let client = ServerClient::new(Arc::new(registry), transports, &world);
        Self { net, client, calls: Arc::default(), questions: Arc::default() }
    }

    fn start(&self) {
        let (calls, questions) = (Arc::clone(&self.calls), Arc::clone(&self.questions));
        self.serve(handler_fn(move |request: Request| {
            let counter = if request.route.path() == "/health" { &questions } else { &calls };
            counter.fetch_add(1, Relaxed);
            async { Ok(Response::json("{}")) }
        }));
    }

    /// Starts the host anew, with this handler.
    fn serve(&self, handler: impl Handler) {
        let host = self.net.host("math");
        let listener = Box::new(host.listen("math").expect("a new host listens nowhere"));
        let serving = serve(listener, Arc::new(handler), CancelToken::new(), LONG);
        host.spawn(async move {
            let _ = serving.await;
        });
    }

    async fn call(&self, within: Duration) -> Result<Response> {
        self.client.post(&CallContext::within(within), "math", "/verify", "{}", CallOptions::default()).await
    }
}

#[tokio::test(start_paused = true)]
async fn calls_wait_for_a_server_that_is_away_and_one_of_them_asks() {
    let ground = Ground::new().await;
    ground.start();
    ground.call(LONG).await.unwrap();
    ground.net.crash("math");
    // What was under way has failed.
    drop(ground.call(Duration::from_secs(1)).await);
    let returns = async {
        sleep(OUTAGE).await;
        let awaited = ground.client.awaited().list();
        assert_eq!((awaited[0].server.as_str(), awaited[0].waiting), ("math", 1_024), "{awaited:?}");
        assert!(awaited[0].seconds >= 4 && !awaited[0].reason.is_empty(), "{awaited:?}");
        ground.start();
        Instant::now()
    };
    let calls = join_all((0..1_024).map(|_| async { (ground.call(LONG).await, Instant::now()) }));
    let (results, back) = tokio::join!(calls, returns);
    assert!(results.iter().all(|(result, _)| result.is_ok()), "{:?}", results[0]);
    let last = results.iter().map(|(_, at)| *at).max().unwrap();
    assert!(last - back <= Duration::from_millis(2_100), "{:?}", last - back);
    // No stampede: all calls wait for the answer to one question.
    assert_eq!((ground.calls.load(Relaxed), ground.questions.load(Relaxed)), (1 + 1_024, 1));
    assert_eq!(ground.client.awaited().list(), []);
}

#[tokio::test(start_paused = true)]
async fn a_call_waits_for_a_limited_time_and_has_not_started() {
    let ground = Ground::new().await;
    let began = Instant::now();
    let error = ground.call(LONG).await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::NotStarted), "{error}");
    assert_eq!(error.failure_class(), FailureClass::TransportUnreachable);
    assert!(error.chain().iter().any(|link| link.message.contains("was away for all of the 300 s")), "{error}");
    let took = began.elapsed();
    assert!(took >= SERVER_TIMEOUT && took <= SERVER_TIMEOUT + Duration::from_secs(5), "{took:?}");
    // Its own deadline may be earlier.
    let began = Instant::now();
    assert_eq!(ground.call(OUTAGE).await.unwrap_err().code(), Code::DeadlineExceeded);
    assert_eq!(began.elapsed(), OUTAGE);
    assert_eq!(ground.client.awaited().list(), []);
}

/// The call that asks may be cancelled: the next one goes on asking.
#[tokio::test(start_paused = true)]
async fn a_cancelled_call_leaves_the_others_waiting() {
    let ground = Ground::new().await;
    let first = ground.call(Duration::from_secs(2));
    let second = ground.call(LONG);
    let returns = async {
        sleep(OUTAGE).await;
        ground.start();
    };
    let (first, second, ()) = tokio::join!(first, second, returns);
    assert_eq!(first.unwrap_err().code(), Code::DeadlineExceeded);
    second.unwrap();
}

#[tokio::test(start_paused = true)]
async fn neither_a_question_nor_a_call_of_an_unknown_name_waits() {
    let ground = Ground::new().await;
    let began = Instant::now();
    let cx = CallContext::within(LONG);
    assert_eq!(ground.client.get(&cx, "math", "/health").await.unwrap_err().code(), Code::Unavailable);
    let unknown = ground.client.post(&cx, "mth", "/verify", "{}", CallOptions::default()).await;
    assert_eq!(unknown.unwrap_err().code(), Code::Unavailable);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    // A configuration that names it makes it known.
    ground.client.expect(["mth".to_owned()]);
    let cx = CallContext::within(OUTAGE);
    let awaited = ground.client.post(&cx, "mth", "/verify", "{}", CallOptions::default()).await;
    assert_eq!(awaited.unwrap_err().code(), Code::DeadlineExceeded);
}

/// A server that answers and rejects calls is there: its rejection is the result, after the usual repetitions.
#[tokio::test(start_paused = true)]
async fn a_server_that_rejects_calls_is_not_away() {
    let ground = Ground::new().await;
    ground.serve(handler_fn(|request: Request| async move {
        if request.route.path() == "/health" {
            return Ok(Response::json("{}"));
        }
        Err(gym_core::Error::not_started(Code::Unavailable, "it drains"))
    }));
    let began = Instant::now();
    let error = ground.call(LONG).await.unwrap_err();
    assert!(error.chain().iter().any(|link| link.message.contains("it drains")), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}
