//! Kills and stops peer processes during calls: every call fails in time.
//!
//! UCX reports a killed peer on networks, and the kernel reports it over shared memory. Only heartbeats detect a
//! stopped peer.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fmt;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use common::{Way, open};
use gym_core::transport::mux::ConnectionLimits;
use gym_core::transport::{ConnectOptions, Connector, Link, Listener, PathInfo, Reply, handler_fn};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Execution, Handler, Request, Response, Result, Status};
use gym_transport_rdma::transport::{UcxConnector, UcxListener};
use gym_transport_rdma::{Ucx, UcxConfig};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

/// Set for the peer process.
const ROLE: &str = "GYM_UCX_TEST_PEER";
/// Heartbeat timeout: short for the test, long for a busy machine.
const SILENCE_MAX: Duration = Duration::from_secs(6);
/// Maximum time to detect a loss: some heartbeats more than the timeout, on a busy machine.
const NOTICED: Duration = Duration::from_secs(45);
/// Concurrent peers.
const PEERS: usize = 5;

fn limits() -> ConnectionLimits {
    let mut limits = ConnectionLimits::default();
    limits.silence_max = SILENCE_MAX;
    limits
}

/// A serving process. Its bootstrap uses standard input and output, with one line per request and response.
struct Peer {
    process: Child,
    pipes: Arc<Pipes>,
}

#[derive(Debug)]
struct Pipes(Mutex<(ChildStdin, BufReader<ChildStdout>)>, PathInfo);

impl Peer {
    fn start(test: &str, way: Way) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{way:?}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let pipes = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        Self { process, pipes: Arc::new(Pipes(Mutex::new(pipes), PathInfo::new("pipes", "child", true))) }
    }

    async fn signal(&self, signal: &str) {
        let id = self.process.id().unwrap().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().await.unwrap().success());
    }

    async fn connect(&self, ucx: &Ucx) -> Channel {
        let connector = UcxConnector::new(Arc::new(Bootstrap(Arc::clone(&self.pipes))), ucx.clone());
        let (cx, endpoint) = (CallContext::within(NOTICED), Endpoint::parse("ucx://child").unwrap());
        connector.connect(&cx, &endpoint, &ConnectOptions::default()).await.unwrap()
    }
}

struct Bootstrap(Arc<Pipes>);

impl fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Bootstrap")
    }
}

#[async_trait]
impl Connector for Bootstrap {
    fn scheme(&self) -> &'static str {
        "pipes"
    }

    async fn connect(&self, _: &CallContext, _: &Endpoint, _: &ConnectOptions) -> Result<Channel> {
        Ok(Channel::new(Ask(Arc::clone(&self.0))))
    }
}

#[derive(Debug)]
struct Ask(Arc<Pipes>);

#[async_trait]
impl Link for Ask {
    async fn send(&self, request: Request) -> Result<Reply> {
        let pipes = Arc::clone(&self.0);
        Ok(Box::pin(async move {
            let (input, output) = &mut *pipes.0.lock().await;
            let broken = |error| Error::unknown(Code::Unavailable, "the child has ended").caused_by(error);
            input.write_all(&[&request.message.head.to_bytes()[..], b"\n"].concat()).await.map_err(broken)?;
            // The test harness writes other lines, and the test's name without an end of line.
            let mut line = String::new();
            while output.read_line(&mut line).await.map_err(broken)? > 0 {
                if let Some((_, answer)) = line.split_once("answer ") {
                    return Ok(Response::json(answer.trim().to_owned()));
                }
                line.clear();
            }
            Err(Error::unknown(Code::Unavailable, "the child has ended"))
        }))
    }

    fn path(&self) -> &PathInfo {
        &self.0.1
    }

    async fn closed(&self) -> Error {
        std::future::pending().await
    }

    async fn close(&self, _: Duration) -> Result<()> {
        Ok(())
    }
}

/// Body of the peer process until it is killed or its parent has ended. It echoes requests, but never responds to
/// `/hold`.
async fn be_peer(way: Way) {
    let mut config = UcxConfig::default();
    config.fabric = way.answering();
    config.limits = limits();
    let ucx = Ucx::new(config);
    let mut listener = UcxListener::open(ucx, &[Endpoint::parse("pipes://child").unwrap()]).await.unwrap();
    let bootstrap = listener.bootstrap(Arc::new(handler_fn(|_| std::future::pending())));
    let handler = Arc::new(handler_fn(|request: Request| async move {
        if request.route.path() == "/hold" {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(Status::OK, request.message))
    }));
    tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok(incoming) = listener.accept().await {
            connections.spawn(incoming.serve(Arc::clone(&handler) as _, Default::default()));
        }
    });
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let asked = Request::post(CallContext::within(NOTICED), gym_transport_rdma::transport::ROUTE, line);
        let answer = bootstrap.handle(asked).await.unwrap();
        println!("\nanswer {}", String::from_utf8_lossy(&answer.message.head.to_bytes()));
    }
    std::process::exit(0);
}

fn request(route: &'static str, bytes: usize) -> Request {
    let mut request = Request::post(CallContext::within(4 * NOTICED), route, "{}");
    request.message.segments.push(Bytes::from(vec![7; bytes]));
    request
}

/// Starts peers, keeps calls in flight to each, and sends each the signal at a random time.
async fn peers_that_get(test: &'static str, signal: &'static str, rounds: usize) {
    let role = std::env::var(ROLE).unwrap_or_default();
    for &way in Way::all() {
        if role == format!("{way:?}") {
            return be_peer(way).await;
        }
    }
    let seed = std::env::var("GYM_UCX_SEED").map_or(1, |text| text.parse().unwrap());
    let mut random = fastrand::Rng::with_seed(seed);
    for &way in Way::all() {
        if open(way.calling()).is_none() {
            return;
        }
        let mut config = UcxConfig::default();
        config.fabric = way.calling();
        config.limits = limits();
        let ucx = Ucx::new(config);
        let bystander = Peer::start(test, way);
        let beside = bystander.connect(&ucx).await;
        for round in 0..rounds {
            let mut meetings = JoinSet::new();
            for _ in 0..PEERS {
                let (ucx, random) = (ucx.clone(), random.fork());
                meetings.spawn(async move { meet(test, way, &ucx, signal, random).await });
            }
            while let Some(met) = meetings.join_next().await {
                met.unwrap_or_else(|error| panic!("{way:?}, round {round}, seed {seed}: {error}"));
            }
            if let Err(error) = beside.call(request("/echo", 100_000)).await {
                panic!("{way:?}, round {round}: a bystander notices: {error}; its end: {}", beside.closed().await);
            }
        }
        let another = Peer::start(test, way);
        another.connect(&ucx).await.call(request("/echo", 100_000)).await.unwrap();
    }
}

async fn meet(test: &str, way: Way, ucx: &Ucx, signal: &str, mut random: fastrand::Rng) {
    let peer = Peer::start(test, way);
    let channel = peer.connect(ucx).await;
    let mut calls = JoinSet::new();
    for call in 0..20 {
        let bytes = [10, 10_000, 100_000, 3 << 20][random.usize(..4)];
        let channel = channel.clone();
        // At least one call is in flight when the signal arrives.
        let route = if call == 0 || random.bool() { "/hold" } else { "/echo" };
        calls.spawn(async move { channel.call(request(route, bytes)).await });
    }
    for _ in 0..random.usize(..30) {
        tokio::task::yield_now().await;
    }
    peer.signal(signal).await;
    let (mut answered, mut lost) = (0, 0);
    tokio::time::timeout(NOTICED, async {
        while let Some(call) = calls.join_next().await {
            match call.unwrap() {
                Ok(_) => answered += 1,
                Err(error) => {
                    assert_eq!(error.code(), Code::Unavailable, "{error}");
                    assert_ne!(error.execution(), Execution::Finished, "{error}");
                    lost += 1;
                }
            }
        }
    })
    .await
    .unwrap_or_else(|_| panic!("{answered} answered and {lost} lost; nobody told the others"));
    assert!(lost >= 1, "those that were held");
    let error = tokio::time::timeout(NOTICED, channel.closed()).await.unwrap();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    let error = channel.call(request("/echo", 1)).await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::NotStarted), "{error}");
}

/// Number of rounds with [`PEERS`] peers each, per transport.
fn rounds(name: &str) -> usize {
    std::env::var(name).map_or(1, |text| text.parse::<usize>().unwrap().div_ceil(PEERS))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_peers_are_missed_by_every_call() {
    peers_that_get("killed_peers_are_missed_by_every_call", "-KILL", rounds("GYM_UCX_KILLS")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_peers_are_missed_by_every_call() {
    peers_that_get("stopped_peers_are_missed_by_every_call", "-STOP", rounds("GYM_UCX_STOPS")).await;
}
