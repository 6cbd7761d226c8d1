//! Calling by name: replicas that restart, sessions that are lost, many callers at once. Over the simulated network.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use futures_util::stream::BoxStream;
use gym_client::{CallOptions, ServerClient, Transports};
use gym_core::registry::{Balance, Instance, Lease, MemoryRegistry, Registration, Registry};
use gym_core::server::ServerKind;
use gym_core::testing::{Faults, SimFiles, SimHost, SimNet};
use gym_core::transport::{Fenced, Listener, RetryPolicy, handler_fn};
use gym_core::{
    CallContext, CancelToken, Code, Endpoint, Error, Execution, Incarnation, Request, Response, Result, World,
};
use parking_lot::Mutex;

/// A registry that takes its time, counts the questions, and is away on demand.
#[derive(Debug, Default)]
struct Asked {
    registry: MemoryRegistry,
    questions: AtomicU64,
    away: AtomicBool,
}

#[async_trait]
impl Registry for Asked {
    async fn register(&self, cx: &CallContext, registration: Registration) -> Result<Lease> {
        self.registry.register(cx, registration).await
    }

    async fn renew(&self, cx: &CallContext, lease: &Lease) -> Result<()> {
        self.registry.renew(cx, lease).await
    }

    async fn deregister(&self, cx: &CallContext, lease: Lease) -> Result<()> {
        self.registry.deregister(cx, lease).await
    }

    async fn resolve(&self, cx: &CallContext, name: &str) -> Result<Vec<Instance>> {
        self.questions.fetch_add(1, Ordering::Relaxed);
        if self.away.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_secs(10)).await;
            return Err(Error::not_started(Code::Unavailable, "the head is away"));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.registry.resolve(cx, name).await
    }

    async fn list(&self, cx: &CallContext) -> Result<Vec<Instance>> {
        self.registry.list(cx).await
    }

    fn watch(&self, name: &str) -> BoxStream<'static, Vec<Instance>> {
        self.registry.watch(name)
    }
}

struct Bench {
    net: SimNet,
    registry: Arc<Asked>,
    client: ServerClient,
}

impl Bench {
    fn new() -> Self {
        let net = SimNet::new(1, Faults::calm());
        let registry = Arc::new(Asked::default());
        let world = World::new(Arc::new(SimFiles::new(1)), 1, Duration::ZERO);
        let transports = Transports::new().with_connector(Arc::new(net.host("caller")));
        let client = ServerClient::new(Arc::clone(&registry) as _, transports, &world);
        Self { net, registry, client }
    }

    /// A replica of `name`, which notes that it was called.
    async fn start_replica(&self, name: &str, rank: u32, called: &Arc<Mutex<Vec<String>>>) {
        self.start_replica_of(ServerKind::Agent, name, rank, called).await;
    }

    async fn start_replica_of(&self, kind: ServerKind, name: &str, rank: u32, called: &Arc<Mutex<Vec<String>>>) {
        let host = self.net.host(&format!("{name}{rank}"));
        let (called, note) = (Arc::clone(called), format!("{name}{rank}"));
        let answer = handler_fn(move |_| {
            called.lock().push(note.clone());
            async { Ok(Response::json("{}")) }
        });
        serve(&host, Fenced::new(Incarnation(1), answer));
        let endpoint = format!("sim://{name}{rank}/gym");
        let mut registration = Registration::new(name, kind, [Endpoint::parse(&endpoint).expect("an endpoint")]);
        registration.replica = Some(rank);
        registration.ttl = Duration::from_secs(60);
        self.registry.register(&CallContext::default(), registration).await.expect("a new server");
    }

    /// The next life of the agent's host, which answers with its number.
    async fn start_agent(&self) {
        let host = self.net.host("agent");
        let life = Incarnation(host.life() + 1);
        let answer = handler_fn(move |request: Request| async move {
            if request.route.path() == "/hang" {
                std::future::pending::<()>().await;
            }
            Ok(Response::json(life.to_string()))
        });
        serve(&host, Fenced::new(life, answer));
        let mut registration =
            Registration::new("agent", ServerKind::Agent, [Endpoint::parse("sim://agent/gym").expect("an endpoint")]);
        registration.replica = Some(0);
        registration.incarnation = life;
        registration.ttl = Duration::from_secs(60);
        self.registry.register(&CallContext::default(), registration).await.expect("a newer life");
    }

    async fn call(&self) -> Result<String> {
        let cx = CallContext::within(Duration::from_secs(30));
        let answer = self.client.post(&cx, "agent", "/run", "{}", CallOptions::default()).await?;
        assert!(answer.status.is_success(), "{answer:?}");
        Ok(String::from_utf8_lossy(&answer.message.head.to_bytes()).into_owned())
    }
}

fn serve(host: &SimHost, handler: impl gym_core::Handler) {
    let (mut listener, handler) = (host.listen("gym").expect("a new life listens nowhere"), Arc::new(handler));
    let served = host.clone();
    host.spawn(async move {
        while let Ok(peer) = listener.accept().await {
            let serving = peer.serve(Arc::clone(&handler) as _, CancelToken::new());
            served.spawn(async move {
                let _ = serving.await;
            });
        }
    });
}

#[tokio::test(start_paused = true)]
async fn a_server_that_was_restarted_at_its_address_is_found_by_the_very_next_call() {
    let bench = Bench::new();
    bench.start_agent().await;
    assert_eq!(bench.call().await.unwrap(), "1");
    let cx = CallContext::within(Duration::from_secs(30));
    let hanging = bench.client.post(&cx, "agent", "/hang", "{}", CallOptions::default());
    let (lost, ()) = tokio::join!(hanging, async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        bench.start_agent().await;
    });
    assert_eq!(lost.unwrap_err().execution(), Execution::Unknown);
    // The name is still resolved to the first life; what the second one's fence says is no answer of the agent.
    assert_eq!(bench.call().await.unwrap(), "2");
}

#[tokio::test(start_paused = true)]
async fn a_session_whose_server_was_restarted_is_lost() {
    let bench = Bench::new();
    bench.start_agent().await;
    let mut session = bench.client.session();
    let cx = CallContext::within(Duration::from_secs(30));
    session.post(&cx, "agent", "/seed_session", "{}").await.unwrap();
    bench.start_agent().await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let error = session.post(&cx, "agent", "/verify", "{}").await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::FailedPrecondition, Execution::NotStarted), "{error}");
}

#[tokio::test(start_paused = true)]
async fn callers_that_come_together_ask_the_registry_once_and_share_a_channel() {
    let bench = Bench::new();
    bench.start_agent().await;
    let asked = || bench.registry.questions.load(Ordering::Relaxed);
    for answer in join_all((0..200).map(|_| bench.call())).await {
        assert_eq!(answer.unwrap(), "1");
    }
    assert_eq!(asked(), 1);
    let connects = bench.net.trace().to_string().matches("connects to sim://agent/gym").count();
    assert_eq!(connects, 1);
    // Later on one of them asks again, and the others do not wait for it.
    tokio::time::sleep(Duration::from_secs(5)).await;
    for answer in join_all((0..200).map(|_| bench.call())).await {
        assert_eq!(answer.unwrap(), "1");
    }
    assert_eq!(asked(), 2);
}

#[tokio::test(start_paused = true)]
async fn callers_that_wait_for_one_answer_of_the_registry_get_its_failure_together() {
    let bench = Bench::new();
    bench.registry.away.store(true, Ordering::Relaxed);
    let began = tokio::time::Instant::now();
    for answer in join_all((0..50).map(|_| bench.call())).await {
        assert_eq!(answer.unwrap_err().code(), Code::Unavailable);
    }
    assert!(began.elapsed() < Duration::from_secs(25), "{:?}", began.elapsed());
    bench.registry.away.store(false, Ordering::Relaxed);
    bench.registry.questions.store(0, Ordering::Relaxed);
    for answer in join_all((0..50).map(|_| bench.call())).await {
        assert_eq!(answer.unwrap_err().code(), Code::Unavailable);
    }
    // Together each time, and again as often as a call is sent.
    assert!(bench.registry.questions.load(Ordering::Relaxed) <= 10);
}

#[tokio::test(start_paused = true)]
async fn while_the_head_is_away_what_was_known_is_used_by_all_alike() {
    let bench = Bench::new();
    bench.start_agent().await;
    bench.call().await.unwrap();
    bench.registry.away.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let began = tokio::time::Instant::now();
    for answer in join_all((0..50).map(|_| bench.call())).await {
        assert_eq!(answer.unwrap(), "1");
    }
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn each_name_has_a_turn_of_its_own() {
    let bench = Bench::new();
    let called = Arc::default();
    for (name, rank) in [("a", 0), ("a", 1), ("b", 0), ("b", 1)] {
        bench.start_replica(name, rank, &called).await;
    }
    let cx = CallContext::within(Duration::from_secs(30));
    for balance in [Balance::RoundRobin, Balance::Weighted(vec![1, 1])] {
        let client = bench.client.with(balance.clone(), RetryPolicy::default());
        for name in ["a", "b", "a", "b"] {
            client.post(&cx, name, "/run", "{}", CallOptions::default()).await.unwrap();
        }
        // Still so after the registry was asked again.
        tokio::time::sleep(Duration::from_secs(5)).await;
        for name in ["a", "b"] {
            client.post(&cx, name, "/run", "{}", CallOptions::default()).await.unwrap();
        }
        let called = std::mem::take(&mut *called.lock());
        assert_eq!(called, ["a0", "b0", "a1", "b1", "a0", "b0"], "{balance:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn replicas_that_all_have_weight_0_are_told_apart_from_none() {
    let bench = Bench::new();
    let called = Arc::default();
    bench.start_replica("a", 0, &called).await;
    let client = bench.client.with(Balance::Weighted(vec![0, 1]), RetryPolicy::default());
    let cx = CallContext::within(Duration::from_secs(5));
    let error = client.post(&cx, "a", "/run", "{}", CallOptions::default()).await.unwrap_err();
    assert_eq!(error.execution(), Execution::NotStarted);
    assert!(error.to_string().contains("its 1 replicas have weight 0"), "{error}");
    bench.start_replica("a", 1, &called).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let cx = CallContext::within(Duration::from_secs(5));
    client.post(&cx, "a", "/run", "{}", CallOptions::default()).await.unwrap();
    assert_eq!(*called.lock(), ["a1"]);
}

#[tokio::test(start_paused = true)]
async fn a_weight_is_that_of_the_rank_whoever_else_lives() {
    let bench = Bench::new();
    let called = Arc::default();
    bench.start_replica("a", 1, &called).await;
    bench.start_replica("a", 2, &called).await;
    let client = bench.client.with(Balance::Weighted(vec![0, 3, 1]), RetryPolicy::default());
    let cx = CallContext::within(Duration::from_secs(5));
    for _ in 0..4 {
        client.post(&cx, "a", "/run", "{}", CallOptions::default()).await.unwrap();
    }
    assert_eq!(*called.lock(), ["a1", "a1", "a2", "a1"]);
}

#[tokio::test(start_paused = true)]
async fn a_call_waits_for_a_replica_with_a_weight_as_for_any() {
    let bench = Bench::new();
    let called = Arc::default();
    bench.start_replica("a", 0, &called).await;
    let client = bench.client.with(Balance::Weighted(vec![0, 1]), RetryPolicy::default());
    let cx = CallContext::within(Duration::from_secs(5));
    let (answer, ()) = tokio::join!(client.post(&cx, "a", "/run", "{}", CallOptions::default()), async {
        // Not before it has seen that there is none.
        while bench.registry.questions.load(Ordering::Relaxed) < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        bench.start_replica("a", 1, &called).await;
    });
    answer.unwrap();
    assert_eq!(*called.lock(), ["a1"]);
}

fn request(prompt: u32, turn: u32) -> String {
    format!(r#"{{"input":[{{"role":"user","content":"{prompt}"}},{{"role":"assistant","content":"{turn}"}}]}}"#)
}

#[tokio::test(start_paused = true)]
async fn the_attempts_at_a_prompt_meet_at_one_replica_of_a_model() {
    let bench = Bench::new();
    let called = Arc::default();
    for rank in 0..3 {
        bench.start_replica_of(ServerKind::Model, "m", rank, &called).await;
        bench.start_replica("a", rank, &called).await;
    }
    let cx = CallContext::within(Duration::from_secs(600));
    let mut replicas = std::collections::BTreeSet::new();
    for prompt in 0..20 {
        for _ in 0..4 {
            let mut session = bench.client.session();
            for turn in 0..3 {
                session.post(&cx, "m", "/v1/responses", request(prompt, turn)).await.unwrap();
            }
        }
        let mut called = std::mem::take(&mut *called.lock());
        called.dedup();
        assert_eq!(called.len(), 1, "prompt {prompt}: {called:?}");
        replicas.insert(called[0].clone());
    }
    assert_eq!(replicas.len(), 3, "prompts spread");
    let counts = bench.client.affinity_counts()();
    assert_eq!(counts.len(), 1, "{counts:?}");
    assert_eq!((counts[0].0.as_str(), counts[0].1.hits, counts[0].1.placed), ("m", 220, 20));
    // Servers of other kinds are balanced by load.
    for _ in 0..3 {
        bench.client.post(&cx, "a", "/run", request(1, 1), CallOptions::default()).await.unwrap();
    }
    assert_eq!(*called.lock(), ["a0", "a1", "a2"]);
}

#[tokio::test(start_paused = true)]
async fn a_session_moves_to_another_replica_of_a_model_and_keeps_that_of_other_servers() {
    let bench = Bench::new();
    let called = Arc::default();
    for rank in 0..2 {
        bench.start_replica_of(ServerKind::Model, "m", rank, &called).await;
        bench.start_replica("a", rank, &called).await;
    }
    let cx = CallContext::within(Duration::from_secs(600));
    let mut session = bench.client.session();
    session.post(&cx, "m", "/v1/responses", request(1, 1)).await.unwrap();
    session.post(&cx, "a", "/step", "{}").await.unwrap();
    let first = std::mem::take(&mut *called.lock());
    for host in &first {
        bench.net.crash(host);
    }
    // A call in flight would be `Unknown`, and no call of a session is repeated then.
    tokio::time::sleep(Duration::from_millis(100)).await;
    for turn in 2..5 {
        session.post(&cx, "m", "/v1/responses", request(1, turn)).await.unwrap();
    }
    let other = if first[0] == "m0" { "m1" } else { "m0" };
    assert_eq!(*called.lock(), [other; 3]);
    let lost = session.post(&cx, "a", "/step", "{}").await.unwrap_err();
    assert_eq!(lost.code(), Code::FailedPrecondition, "{lost}");
}

#[tokio::test(start_paused = true)]
async fn a_session_does_not_leave_its_replica_because_another_one_joins() {
    let bench = Bench::new();
    let called = Arc::default();
    bench.start_replica_of(ServerKind::Model, "m", 0, &called).await;
    let cx = CallContext::within(Duration::from_secs(600));
    let mut sessions: Vec<_> = (0..20).map(|_| bench.client.session()).collect();
    for (session, prompt) in sessions.iter_mut().zip(0..) {
        session.post(&cx, "m", "/v1/responses", request(prompt, 1)).await.unwrap();
    }
    bench.start_replica_of(ServerKind::Model, "m", 1, &called).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    bench.client.session().post(&cx, "m", "/v1/responses", request(0, 1)).await.unwrap();
    called.lock().clear();
    for (session, prompt) in sessions.iter_mut().zip(0..) {
        session.post(&cx, "m", "/v1/responses", request(prompt, 2)).await.unwrap();
    }
    assert_eq!(*called.lock(), ["m0"; 20]);
}
