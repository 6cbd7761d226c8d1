//! Calls over UCX: properties that other transports do not have. The conformance suite tests the common ones.
#![allow(clippy::unwrap_used, reason = "a test says what went wrong by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use common::Way;
use common::transport::Ends;
use gym_core::testing::{Storm, with_segment};
use gym_core::transport::mux::ConnectionLimits;
use gym_core::transport::{ConnectOptions, Connector, InProcess, Listener, handler_fn};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Execution, Handler, Request, Response, Result, Status};
use gym_transport_rdma::UcxConfig;
use gym_transport_rdma::transport::{UcxConnector, UcxStats};
use tokio::task::JoinHandle;

/// Longer than any operation here, so that only a hang exceeds it.
const LONG_TIMEOUT: Duration = Duration::from_secs(60);

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONG_TIMEOUT, future).await.expect("it does not hang")
}

/// A channel and the server at its other end.
struct Both {
    ends: Ends,
    channel: Channel,
    serving: JoinHandle<Result<()>>,
}

impl Both {
    async fn open(way: Way, limits: ConnectionLimits, handler: impl Handler) -> Option<Self> {
        let ends = Ends::open(way).await?;
        let (connector, mut listener) = ends.pair(limits).await;
        let endpoint = listener.endpoints()[0].clone();
        let serving = tokio::spawn(async move {
            let incoming = listener.accept().await?;
            incoming.serve(Arc::new(handler), Default::default()).await
        });
        let (cx, options) = (CallContext::within(LONG_TIMEOUT), ConnectOptions::default());
        let channel = soon(connector.connect(&cx, &endpoint, &options)).await.unwrap();
        Some(Self { ends, channel, serving })
    }

    fn stats(&self) -> [UcxStats; 2] {
        [self.ends.caller.stats().unwrap(), self.ends.server.stats().unwrap()]
    }
}

fn echo() -> impl Handler {
    handler_fn(|request: Request| async move { Ok(Response::new(Status::OK, request.message)) })
}

fn post(route: &'static str) -> Request {
    Request::post(CallContext::within(LONG_TIMEOUT), route, "{}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_every_shape_come_back_and_large_segments_go_by_rendezvous_into_aligned_memory() {
    for &way in Way::all() {
        let Some(both) = Both::open(way, ConnectionLimits::default(), echo()).await else { return };
        for (head, segments) in [
            (0, vec![]),
            (1, vec![0, 0]),
            (70_000, vec![3, 65_535, 65_536, 65_537, 0, 1]),
            (200_000, vec![1 << 20, 64 << 10, 5, 3 << 20]),
            (2, vec![40_000; 60]),
            (2, vec![16; 20_000]),
        ] {
            let mut request = post("/echo");
            request.message.head = (0..head).map(|at| (at % 251) as u8).collect::<Vec<_>>().into();
            let segment =
                |(seed, length): (usize, &usize)| (0..*length).map(|at| (at * 7 + seed) as u8).collect::<Vec<_>>();
            request.message.segments = segments.iter().enumerate().map(segment).map(Bytes::from).collect();
            let sent = request.message.clone();
            let answer = soon(both.channel.call(request)).await.unwrap().message;
            assert!(answer == sent, "{way:?}: a head of {head} bytes with {} segments", segments.len());
            let aligned = |segment: &Bytes| segment.is_empty() || segment.as_ptr().addr().is_multiple_of(64);
            assert!(answer.segments.iter().all(aligned), "{way:?}: {segments:?}");
        }
        let [caller, server] = both.stats();
        for (stats, end) in [(&caller, "caller"), (&server, "server")] {
            let [connection] = &stats.connections[..] else { panic!("one connection: {stats:?}") };
            let messages = &connection.messages;
            // The heads of 70,000 and 200,000 bytes and five segments of at least 64 KiB.
            assert_eq!(messages.rendezvous_received, 7, "{way:?}, {end}: {messages:?}");
            assert!(messages.eager_received > 60, "{way:?}, {end}: {messages:?}");
            assert!(connection.lanes.names().iter().all(|lane| both.channel.path().lanes.contains(lane.as_str())));
        }
    }
}

#[tokio::test]
async fn memory_of_the_pool_leaves_without_a_copy_and_other_memory_is_counted() {
    for &way in Way::all() {
        let Some(both) = Both::open(way, ConnectionLimits::default(), echo()).await else { return };
        let unregistered = || both.ends.caller.stats().unwrap().fabric.bytes_unregistered;
        let pool = both.ends.caller.fabric().await.unwrap().pool().clone();
        let mut buffer = pool.take(1 << 20).unwrap();
        buffer.fill(7);
        let segment = buffer.freeze();
        for (segment, counted) in [(segment, 0), (Bytes::from(vec![7; 1 << 20]), 1 << 20)] {
            let before = unregistered();
            let mut request = post("/echo");
            request.message.segments.push(segment);
            let answer = soon(both.channel.call(request)).await.unwrap();
            assert!(answer.message.segments[0].iter().all(|byte| *byte == 7));
            assert_eq!(unregistered() - before, counted, "{way:?}");
        }
    }
}

#[tokio::test]
async fn a_header_that_is_longer_than_a_first_chunk_arrives() {
    let Some(both) = Both::open(Way::SharedMemory, ConnectionLimits::default(), echo()).await else { return };
    let handler_saw = |request: &mut Request, bytes: usize| request.context.metadata.push("cookie", "c".repeat(bytes));
    for bytes in [60_000, 66_000, 900_000] {
        let mut request = with_segment(post("/echo"), 100);
        handler_saw(&mut request, bytes);
        assert_eq!(soon(both.channel.call(request)).await.unwrap().message.segments[0].len(), 100);
    }
}

#[tokio::test]
async fn a_level_that_cannot_be_had_is_refused_with_what_there_is() {
    let Some(ends) = Ends::open(Way::Network).await else { return };
    for (level, said) in [
        (gym_transport_rdma::SHM, "the transports that this process may use have no shared memory"),
        (gym_transport_rdma::RDMA, "UCX finds no RDMA device here, only"),
        (gym_core::transport::Transport::new("http", 400), "UCX has no transport http"),
    ] {
        if level == gym_transport_rdma::RDMA && std::env::var_os("GYM_UCX_TRANSPORTS").is_some() {
            continue;
        }
        let (connector, mut listener) = ends.pair(ConnectionLimits::default()).await;
        let endpoint = listener.endpoints()[0].clone();
        let serving =
            tokio::spawn(async move { listener.accept().await?.serve(Arc::new(echo()), Default::default()).await });
        let (cx, options) = (CallContext::within(LONG_TIMEOUT), ConnectOptions::default().at(level));
        let error = soon(connector.connector.connect(&cx, &endpoint, &options)).await.unwrap_err();
        assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::NotStarted), "{error}");
        assert!(error.to_string().contains(said), "{error}");
        serving.abort();
    }
}

#[tokio::test]
async fn what_is_unknown_to_a_bootstrap_goes_on_to_the_server() {
    let Some(ends) = Ends::open(Way::SharedMemory).await else { return };
    let (_, listener) = ends.pair(ConnectionLimits::default()).await;
    let bootstrap = listener.bootstrap(Arc::new(echo()));
    let answer = bootstrap.handle(post("/other")).await.unwrap();
    assert_eq!(answer.message.head.to_bytes(), "{}");
    let error = bootstrap.handle(post(gym_transport_rdma::transport::ROUTE)).await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::DataLoss, Execution::NotStarted), "{error}");
    drop(listener);
    let error = bootstrap.handle(post(gym_transport_rdma::transport::ROUTE)).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_calls_dropped_anywhere_leave_nothing_running_and_the_pools_whole() {
    for &way in Way::all() {
        let storm = Storm::default();
        let mut limits = ConnectionLimits::default();
        limits.calls_max = 64;
        limits.request_bytes_in_flight_max = 4 << 20;
        let Some(both) = Both::open(way, limits, storm.handler()).await else { return };
        storm.run(&both.channel).await;
        // All capacity is available again.
        let calls = (0..64).map(|_| both.channel.call(with_segment(post("/echo"), 60_000)));
        for answer in soon(futures_util::future::join_all(calls)).await {
            answer.unwrap();
        }
        soon(async {
            let whole = || both.stats().iter().all(|stats| stats.pool.bytes_free == stats.pool.bytes_kept);
            while storm.running() > 0 || !whole() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
        both.channel.close(LONG_TIMEOUT).await.expect("no call is left");
        soon(both.serving).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_peer_that_says_nothing_of_shared_memory_leaves_time_for_the_network() {
    let mut fabric = common::calling_network();
    fabric.transports = Some("tcp,posix,self".to_owned());
    // Reports a missing UCX.
    let Some(_) = common::open(fabric.clone()) else { return };
    let names = InProcess::new();
    let mut bootstrap_listener = names.listen("half").unwrap();
    let endpoint = Endpoint::parse(&format!("ucx://{}", bootstrap_listener.endpoints()[0].address())).unwrap();
    let asked = Arc::new(AtomicBool::new(false));
    let noted = Arc::clone(&asked);
    let bootstrap = handler_fn(move |request: Request| {
        let noted = Arc::clone(&noted);
        async move {
            if request.message.head.to_bytes().windows(8).any(|text| text == b"\"worker\"") {
                noted.store(true, Ordering::Relaxed);
                std::future::pending::<()>().await;
            }
            Err(Error::not_started(Code::Unavailable, "asked for the network"))
        }
    });
    let bootstrap = Arc::new(bootstrap);
    tokio::spawn(async move {
        while let Ok(incoming) = bootstrap_listener.accept().await {
            tokio::spawn(incoming.serve(bootstrap.clone(), Default::default()));
        }
    });
    let mut config = UcxConfig::default();
    config.fabric = fabric;
    config.connect_timeout = Duration::from_secs(10);
    let connector = UcxConnector::new(Arc::new(names), config);
    let connected =
        soon(connector.connect(&CallContext::within(LONG_TIMEOUT), &endpoint, &ConnectOptions::default())).await;
    let said = connected.unwrap_err().to_string();
    assert!(said.contains("asked for the network") && said.contains("no shared memory: no answer within"), "{said}");
    assert!(asked.load(Ordering::Relaxed), "{said}");
}
