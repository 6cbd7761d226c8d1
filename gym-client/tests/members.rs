//! Members of a cluster as clients see them: calls to a lost server end at once, and a restarted head server forgets nobody.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use futures_util::stream::BoxStream;
use gym_client::registry::{MemberKeeper, MemberOptions};
use gym_client::{CallOptions, ServerClient, Transports};
use gym_core::registry::{
    Heartbeat, HeartbeatReply, Instance, JoinedMember, Lease, Member, MemberLease, MemberLimits, MemberRegistry,
    MemberServer, MemberSpec, MemberState, MemberTiming, MemoryRegistry, Registration, Registry, RosterUpdate,
    RosterVersion,
};
use gym_core::server::ServerKind;
use gym_core::testing::SimFiles;
use gym_core::transport::{InProcess, handler_fn, serve};
use gym_core::{
    CallContext, CancelToken, Code, Endpoint, Error, Execution, Incarnation, Request, Response, Result, World,
};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};

const TIMING: MemberTiming = MemberTiming {
    heartbeat: Duration::from_secs(1),
    timeout: Duration::from_secs(3),
    reconnect: Duration::from_millis(100),
};

/// Time for which a head server waits for the members of its earlier life.
const RECOVERY: Duration = Duration::from_secs(6);

/// A head server that can be killed and restarted: each life has a registry of its own.
#[derive(Clone)]
struct Head {
    life: Arc<Mutex<Option<MemoryRegistry>>>,
    killed: Arc<Mutex<CancelToken>>,
    /// The member whose process is stopped: it sends no heartbeats, and its connection stays open.
    frozen: Arc<Mutex<Option<String>>>,
    /// Members that find no way to the head when they join.
    away: Arc<Mutex<Vec<String>>>,
    /// The number of responses to heartbeats that are lost on the way next.
    loses: Arc<AtomicUsize>,
    /// Milliseconds that each response to a heartbeat takes on the way.
    slow: Arc<AtomicUsize>,
}

impl fmt::Debug for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Head")
    }
}

impl Head {
    fn new() -> Self {
        let head = Self {
            life: Arc::default(),
            killed: Arc::default(),
            frozen: Arc::default(),
            away: Arc::default(),
            loses: Arc::default(),
            slow: Arc::default(),
        };
        head.start(1);
        head
    }

    fn start(&self, term: u64) {
        let registry = MemoryRegistry::with_limits(term, MemberLimits::default());
        if term > 1 {
            registry.recover_for(RECOVERY);
        }
        *self.life.lock() = Some(registry);
        *self.killed.lock() = CancelToken::new();
    }

    fn kill(&self) {
        *self.life.lock() = None;
        self.killed.lock().cancel();
    }

    /// These members find no way to the head when they join.
    fn away(&self, members: &[&str]) {
        *self.away.lock() = members.iter().map(|name| (*name).to_owned()).collect();
    }

    fn freeze(&self, member: &str) {
        *self.frozen.lock() = Some(member.to_owned());
    }

    /// Runs a call in this life of the head; its connections break when it is killed.
    async fn call<T>(&self, call: impl AsyncFnOnce(MemoryRegistry) -> Result<T>) -> Result<T> {
        let away = || Error::new(Code::Unavailable, Execution::Unknown, "the head server is away");
        let (life, killed) = (self.life.lock().clone().ok_or_else(away)?, self.killed.lock().clone());
        tokio::select! {
            biased;
            () = killed.cancelled() => Err(away()),
            result = call(life) => result,
        }
    }
}

#[async_trait]
impl Registry for Head {
    async fn register(&self, cx: &CallContext, registration: Registration) -> Result<Lease> {
        self.call(async |life| life.register(cx, registration).await).await
    }

    async fn renew(&self, cx: &CallContext, lease: &Lease) -> Result<()> {
        self.call(async |life| life.renew(cx, lease).await).await
    }

    async fn deregister(&self, cx: &CallContext, lease: Lease) -> Result<()> {
        self.call(async |life| life.deregister(cx, lease).await).await
    }

    async fn resolve(&self, cx: &CallContext, name: &str) -> Result<Vec<Instance>> {
        self.call(async |life| life.resolve(cx, name).await).await
    }

    async fn list(&self, cx: &CallContext) -> Result<Vec<Instance>> {
        self.call(async |life| life.list(cx).await).await
    }

    fn watch(&self, name: &str) -> BoxStream<'static, Vec<Instance>> {
        self.life.lock().as_ref().unwrap().watch(name)
    }
}

#[async_trait]
impl MemberRegistry for Head {
    async fn join(&self, cx: &CallContext, spec: MemberSpec) -> Result<JoinedMember> {
        if self.away.lock().contains(&spec.name) {
            return Err(Error::not_started(Code::Unavailable, "the name of the head server is unknown"));
        }
        self.call(async |life| life.join(cx, spec).await).await
    }

    async fn heartbeat(&self, cx: &CallContext, heartbeat: &Heartbeat) -> Result<HeartbeatReply> {
        if self.frozen.lock().as_ref() == Some(&heartbeat.lease.name) {
            std::future::pending::<()>().await;
        }
        let replied = self.call(async |life| life.heartbeat(cx, heartbeat).await).await;
        if self.loses.fetch_update(Relaxed, Relaxed, |loses| loses.checked_sub(1)).is_ok() {
            // A lost message is not the end of its connection.
            cx.bound(Execution::Unknown, std::future::pending::<Result<()>>()).await?;
        }
        sleep(Duration::from_millis(self.slow.load(Relaxed) as u64)).await;
        replied
    }

    async fn leave(&self, cx: &CallContext, lease: MemberLease) -> Result<()> {
        self.call(async |life| life.leave(cx, lease).await).await
    }

    async fn drain(&self, cx: &CallContext, name: &str) -> Result<()> {
        self.call(async |life| life.drain(cx, name).await).await
    }

    async fn members(&self, cx: &CallContext) -> Result<Vec<Member>> {
        self.call(async |life| life.members(cx).await).await
    }

    async fn roster(&self, cx: &CallContext, seen: Option<RosterVersion>, wait: Duration) -> Result<RosterUpdate> {
        self.call(async |life| life.roster(cx, seen, wait).await).await
    }
}

/// Replicas of one server, each in a process of its own.
struct Cluster {
    head: Head,
    client: ServerClient,
    network: InProcess,
    world: World,
    calls: Arc<Mutex<Vec<String>>>,
    servers: tokio::task::JoinSet<Result<()>>,
}

impl Cluster {
    fn new() -> Self {
        let (head, network) = (Head::new(), InProcess::new());
        let world = World::new(Arc::new(SimFiles::new(1)), 1, Duration::from_secs(1));
        let transports = Transports::new().with_connector(Arc::new(network.clone()));
        let client = ServerClient::new(Arc::new(head.clone()), transports, &world);
        client.follow(Arc::new(head.clone()));
        Self { head, client, network, world, calls: Arc::default(), servers: tokio::task::JoinSet::new() }
    }

    /// Starts a process with a replica that takes `takes` for each call; its heartbeats end with the keeper.
    async fn start(&mut self, name: &str, takes: Duration) -> MemberKeeper {
        let (calls, note) = (Arc::clone(&self.calls), name.to_owned());
        let handler = handler_fn(move |_: Request| {
            calls.lock().push(note.clone());
            async move {
                sleep(takes).await;
                Ok(Response::json("{}"))
            }
        });
        let listener = self.network.listen(name).unwrap();
        self.servers.spawn(serve(Box::new(listener), Arc::new(handler), CancelToken::new(), Duration::ZERO));
        let mut spec = MemberSpec::new(name, Incarnation(1));
        spec.timing = TIMING;
        spec.clock_ms = 1;
        let endpoint = Endpoint::parse(&format!("mem://{name}")).unwrap();
        spec.servers = vec![MemberServer::new("agent", ServerKind::Agent, [endpoint])];
        let cx = CallContext::within(Duration::from_secs(10));
        MemberKeeper::join(Arc::new(self.head.clone()), &cx, spec, MemberOptions::default(), &self.world).await.unwrap()
    }

    async fn state(&self, name: &str) -> MemberState {
        let members = self.head.members(&CallContext::default()).await.unwrap();
        members.iter().find(|member| member.spec.name == name).unwrap().state
    }

    async fn call(&self) -> Result<Response> {
        let cx = CallContext::within(Duration::from_secs(7_200));
        self.client.post(&cx, "agent", "/run", "{}", CallOptions::default()).await
    }

    /// Returns how many of the next calls each replica gets.
    async fn shares(&self, count: usize) -> std::collections::BTreeMap<String, usize> {
        self.calls.lock().clear();
        for result in join_all((0..count).map(|_| self.call())).await {
            result.unwrap();
        }
        let mut shares = std::collections::BTreeMap::new();
        for name in self.calls.lock().iter() {
            *shares.entry(name.clone()).or_insert(0) += 1;
        }
        shares
    }
}

const MARGIN_TIMEOUT: Duration = Duration::from_millis(10);

#[tokio::test(start_paused = true)]
async fn calls_to_a_killed_worker_end_at_once_and_new_ones_go_elsewhere() {
    let mut cluster = Cluster::new();
    let _first = cluster.start("a", MARGIN_TIMEOUT).await;
    let second = cluster.start("b", Duration::from_secs(7_000)).await;
    sleep(MARGIN_TIMEOUT).await;
    let calls = join_all((0..32).map(|_| cluster.call()));
    let killed = async {
        sleep(Duration::from_secs(5)).await;
        let began = Instant::now();
        drop(second);
        began
    };
    let (results, began) = tokio::join!(calls, killed);
    assert!(began.elapsed() <= Duration::from_millis(150), "{:?}", began.elapsed());
    let (done, lost): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    assert_eq!((done.len(), lost.len()), (16, 16));
    for error in lost.into_iter().filter_map(Result::err) {
        assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::Unknown));
        assert!(error.to_string().contains("b is gone: its connection broke"), "{error}");
    }
    assert_eq!(cluster.shares(8).await, [("a".to_owned(), 8)].into());
}

#[tokio::test(start_paused = true)]
async fn calls_to_a_frozen_worker_end_after_its_timeout_and_new_ones_avoid_it_before() {
    let mut cluster = Cluster::new();
    let _first = cluster.start("a", MARGIN_TIMEOUT).await;
    // Frozen: it has joined, was healthy, and then sends nothing more.
    let _frozen = cluster.start("b", Duration::from_secs(7_000)).await;
    sleep(MARGIN_TIMEOUT).await;
    let waiting = cluster.call();
    let lost = async {
        let second = cluster.call().await;
        (second, Instant::now())
    };
    let began = Instant::now();
    let freeze = async {
        sleep(MARGIN_TIMEOUT).await;
        cluster.head.freeze("b");
        sleep(Duration::from_millis(2_500)).await;
        assert_eq!(cluster.state("b").await, MemberState::Suspect);
        assert_eq!(cluster.shares(8).await, [("a".to_owned(), 8)].into());
    };
    let (one, (two, ended), ()) = tokio::join!(waiting, lost, freeze);
    assert_eq!([one.is_ok(), two.is_ok()].iter().filter(|ok| **ok).count(), 1);
    assert!(ended - began <= TIMING.timeout + Duration::from_secs(1), "{:?}", ended - began);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_is_killed_at_any_moment_is_noticed_at_once() {
    for after_ms in (0..2_500).step_by(50) {
        let mut cluster = Cluster::new();
        // Between a response and the next heartbeat, the head server would see only silence.
        cluster.head.slow.store(20, Relaxed);
        let worker = cluster.start("a", MARGIN_TIMEOUT).await;
        sleep(Duration::from_millis(1_000 + after_ms)).await;
        drop(worker);
        sleep(Duration::from_millis(150)).await;
        assert_eq!(cluster.state("a").await, MemberState::Gone, "killed after {after_ms} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_response_to_a_heartbeat_is_no_suspicion() {
    let mut cluster = Cluster::new();
    cluster.head.slow.store(700, Relaxed);
    let _first = cluster.start("a", MARGIN_TIMEOUT).await;
    sleep(Duration::from_secs(5)).await;
    let mut seen = cluster.head.roster(&CallContext::default(), None, Duration::ZERO).await.unwrap().now;
    for _ in 0..10 {
        sleep(Duration::from_secs(1)).await;
        let update = cluster.head.roster(&CallContext::default(), Some(seen), Duration::ZERO).await.unwrap();
        assert_eq!(update.changes, [], "the member serves all the time");
        seen = update.now;
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_is_not_given_up_because_a_response_to_a_heartbeat_was_lost() {
    let mut cluster = Cluster::new();
    let _first = cluster.start("a", MARGIN_TIMEOUT).await;
    for _ in 0..5 {
        sleep(Duration::from_millis(2_700)).await;
        cluster.head.loses.store(1, Relaxed);
        sleep(TIMING.timeout * 2).await;
        assert_eq!(cluster.head.loses.load(Relaxed), 0);
        assert_eq!(cluster.state("a").await, MemberState::Serving);
    }
    let events = cluster.head.members(&CallContext::default()).await.unwrap();
    assert_eq!(events.len(), 1, "it joined once: {events:?}");
}

#[tokio::test(start_paused = true)]
async fn after_a_restart_of_the_head_all_return_and_no_replica_takes_all_calls() {
    let mut cluster = Cluster::new();
    let mut keepers = Vec::new();
    for name in ["a", "b", "c", "d"] {
        keepers.push(cluster.start(name, MARGIN_TIMEOUT).await);
    }
    sleep(MARGIN_TIMEOUT).await;
    let even: std::collections::BTreeMap<String, usize> =
        ["a", "b", "c", "d"].into_iter().map(|name| (name.to_owned(), 10)).collect();
    assert_eq!(cluster.shares(40).await, even);
    cluster.head.kill();
    sleep(Duration::from_secs(5)).await;
    assert_eq!(cluster.shares(40).await, even, "known servers are called while the head is away");
    cluster.head.start(2);
    let began = Instant::now();
    loop {
        let shares = cluster.shares(40).await;
        assert!(shares.values().all(|share| *share <= 12), "{shares:?} after {:?}", began.elapsed());
        let members = cluster.head.members(&CallContext::default()).await.unwrap();
        let serving = members.iter().filter(|member| member.state == MemberState::Serving).count();
        if serving == 4 {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(2), "{serving} of 4 after {:?}", began.elapsed());
    }
    sleep(Duration::from_secs(3)).await;
    assert_eq!(cluster.shares(40).await, even);
    assert!(keepers.iter().all(|keeper| !keeper.draining().is_cancelled()), "no worker was asked to end");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_does_not_return_after_a_restart_of_the_head_is_given_up() {
    let mut cluster = Cluster::new();
    let _first = cluster.start("a", MARGIN_TIMEOUT).await;
    let second = cluster.start("b", Duration::from_secs(7_000)).await;
    sleep(MARGIN_TIMEOUT).await;
    let calls = join_all((0..2).map(|_| cluster.call()));
    let restarted = async {
        sleep(Duration::from_secs(1)).await;
        cluster.head.kill();
        drop(second);
        sleep(Duration::from_secs(1)).await;
        cluster.head.start(2);
    };
    let (results, ()) =
        timeout(Duration::from_secs(10), async { tokio::join!(calls, restarted) }).await.expect("they end");
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
}

/// Workers take seconds to find their head by its name. Calls in flight go on, and new ones go to those that have returned.
#[tokio::test(start_paused = true)]
async fn a_worker_that_returns_late_after_a_restart_of_the_head_loses_no_call() {
    let mut cluster = Cluster::new();
    let _first = cluster.start("a", MARGIN_TIMEOUT).await;
    let _second = cluster.start("b", Duration::from_secs(30)).await;
    sleep(MARGIN_TIMEOUT).await;
    let calls = join_all((0..2).map(|_| cluster.call()));
    let restarted = async {
        sleep(Duration::from_secs(1)).await;
        cluster.head.kill();
        sleep(Duration::from_secs(1)).await;
        cluster.head.away(&["b"]);
        cluster.head.start(2);
        sleep(Duration::from_secs(4)).await;
        assert_eq!(cluster.shares(8).await, [("a".to_owned(), 8)].into());
        cluster.head.away(&[]);
    };
    let (results, ()) = tokio::join!(calls, restarted);
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    assert_eq!(cluster.state("b").await, MemberState::Serving);
}

/// Its clock at its first start says nothing after an hour.
#[tokio::test(start_paused = true)]
async fn a_member_that_joins_again_tells_its_time_anew() {
    let mut cluster = Cluster::new();
    let _first = cluster.start("a", MARGIN_TIMEOUT).await;
    sleep(MARGIN_TIMEOUT).await;
    let clock = async || cluster.head.members(&CallContext::default()).await.unwrap()[0].spec.clock_ms;
    let before = clock().await;
    sleep(Duration::from_secs(90)).await;
    cluster.head.kill();
    cluster.head.start(2);
    sleep(Duration::from_secs(2)).await;
    let told = clock().await - before;
    assert!((90_000..92_000).contains(&told), "{told} ms");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_must_drain_finishes_its_calls_and_leaves() {
    let mut cluster = Cluster::new();
    let _first = cluster.start("a", MARGIN_TIMEOUT).await;
    let second = cluster.start("b", Duration::from_secs(30)).await;
    sleep(MARGIN_TIMEOUT).await;
    let calls = join_all((0..2).map(|_| cluster.call()));
    let drained = async {
        sleep(MARGIN_TIMEOUT).await;
        cluster.head.drain(&CallContext::default(), "b").await.unwrap();
        timeout(Duration::from_millis(200), second.draining().cancelled()).await.expect("it is told at once");
        assert_eq!(cluster.shares(8).await, [("a".to_owned(), 8)].into());
        // Its last response is sent after 30 s.
        sleep(Duration::from_secs(31)).await;
        second.leave(Duration::from_secs(1)).await;
    };
    let (results, ()) = tokio::join!(calls, drained);
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    assert_eq!(cluster.state("b").await, MemberState::Gone);
}

#[tokio::test(start_paused = true)]
async fn a_worker_waits_for_its_head_and_a_name_in_use_is_an_error() {
    let mut cluster = Cluster::new();
    cluster.head.kill();
    let head = cluster.head.clone();
    let started = async {
        sleep(Duration::from_secs(4)).await;
        head.start(3);
    };
    let (keeper, ()) = tokio::join!(cluster.start("a", MARGIN_TIMEOUT), started);
    sleep(MARGIN_TIMEOUT).await;
    assert_eq!(cluster.state("a").await, MemberState::Serving);
    let mut other = MemberSpec::new("a", Incarnation(2));
    other.timing = TIMING;
    other.host = "elsewhere".to_owned();
    let cx = CallContext::within(Duration::from_secs(5));
    let head: Arc<dyn MemberRegistry> = Arc::new(cluster.head.clone());
    let joined = MemberKeeper::join(head, &cx, other, MemberOptions::default(), &cluster.world).await;
    let error = joined.expect_err("the name is in use");
    assert_eq!(error.code(), Code::AlreadyExists);
    assert!(keeper.draining().cancelled().now_or_never().is_none());
}
