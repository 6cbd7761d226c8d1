//! Transport selection and fallback, on connectors that only say what they can.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gym_client::Transports;
use gym_client::transport::PeerPath;
use gym_core::transport::{
    Backend, BoundListener, ConnectOptions, Connector, Link, ListenOptions, PathInfo, Reply, Transport,
    TransportPolicy, TransportReport,
};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Request, Result};
use parking_lot::Mutex;

/// What a transport does when it is requested.
#[derive(Clone, Copy, Debug)]
enum Behavior {
    Holds,
    Refuses(&'static str),
    Negotiates(Transport),
    Hangs,
}

#[derive(Debug)]
struct Fake {
    scheme: &'static str,
    behaviors: BTreeMap<Transport, Behavior>,
    asked: Mutex<Vec<Option<Transport>>>,
}

impl Fake {
    fn new(scheme: &'static str, behaviors: impl IntoIterator<Item = (Transport, Behavior)>) -> Arc<Self> {
        Arc::new(Self { scheme, behaviors: behaviors.into_iter().collect(), asked: Mutex::default() })
    }

    fn asked(&self) -> Vec<Option<Transport>> {
        self.asked.lock().clone()
    }
}

#[async_trait]
impl Connector for Fake {
    fn scheme(&self) -> &'static str {
        self.scheme
    }

    fn transports(&self) -> Vec<Transport> {
        match self.scheme {
            "ucx" => vec![gym_client::transport::SHM, gym_client::transport::RDMA, gym_client::transport::UCX_TCP],
            "http" => vec![gym_client::transport::HTTP],
            other => vec![Transport::new(other, 350)],
        }
    }

    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel> {
        self.asked.lock().push(options.transport);
        let transport = options.transport.unwrap_or(gym_client::transport::HTTP);
        let path = |transport: Transport| {
            PathInfo::new(self.scheme, to.address(), true).at(transport, format!("{transport}/0"))
        };
        match self.behaviors.get(&transport).copied().unwrap_or(Behavior::Refuses("not there")) {
            Behavior::Holds => Ok(Channel::new(FakeLink(path(transport)))),
            Behavior::Negotiates(other) => Ok(Channel::new(FakeLink(path(other)))),
            Behavior::Refuses(why) => Err(Error::not_started(Code::Unavailable, why)),
            Behavior::Hangs => cx.bound(gym_core::Execution::NotStarted, std::future::pending()).await,
        }
    }
}

#[derive(Debug)]
struct FakeLink(PathInfo);

#[async_trait]
impl Link for FakeLink {
    async fn send(&self, _: Request) -> Result<Reply> {
        Err(Error::not_started(Code::Unimplemented, "moves nothing"))
    }

    fn path(&self) -> &PathInfo {
        &self.0
    }

    async fn closed(&self) -> Error {
        std::future::pending().await
    }

    async fn close(&self, _: Duration) -> Result<()> {
        Ok(())
    }
}

const NO_SHM: (Transport, Behavior) = (gym_client::transport::SHM, Behavior::Refuses("another host"));
const NO_RDMA: (Transport, Behavior) = (gym_client::transport::RDMA, Behavior::Refuses("no RDMA lane"));
const TCP: (Transport, Behavior) = (gym_client::transport::UCX_TCP, Behavior::Holds);
const HTTP: (Transport, Behavior) = (gym_client::transport::HTTP, Behavior::Holds);

fn endpoints(texts: &[&str]) -> Vec<Endpoint> {
    texts.iter().map(|text| Endpoint::parse(text).unwrap()).collect()
}

async fn connect(transports: &Transports, texts: &[&str]) -> Result<Channel> {
    transports.connect(&CallContext::default(), &endpoints(texts), &ConnectOptions::default()).await
}

const BOTH: [&str; 2] = ["ucx://h:1", "http://h:1"];

fn policy(text: &str) -> TransportPolicy {
    text.parse().unwrap()
}

fn transports_of(path: &PeerPath) -> Vec<Transport> {
    path.refused.iter().map(|refusal| refusal.transport).collect()
}

#[tokio::test(start_paused = true)]
async fn transports_are_requested_in_order_of_preference_until_one_connects() {
    let ucx = Fake::new("ucx", [NO_SHM, NO_RDMA, TCP]);
    let http = Fake::new("http", [HTTP]);
    let transports = Transports::new().with_connector(ucx.clone()).with_connector(http.clone());
    let channel = connect(&transports, &BOTH).await.unwrap();
    assert_eq!(channel.path().transport, Some(gym_client::transport::UCX_TCP));
    assert_eq!(
        ucx.asked(),
        [Some(gym_client::transport::SHM), Some(gym_client::transport::RDMA), Some(gym_client::transport::UCX_TCP)]
    );
    assert_eq!(http.asked(), [], "nothing less preferred than the transport that connects is tried");
    let paths = transports.paths();
    assert_eq!(
        (paths[0].peer.as_str(), paths[0].transport_name(), paths[0].lanes.as_str()),
        ("http://h:1", "ucx_tcp", "ucx_tcp/0")
    );
    let reasons: Vec<String> = paths[0].refused.iter().map(ToString::to_string).collect();
    assert_eq!(reasons, ["shm: another host", "rdma: no RDMA lane"]);
}

#[tokio::test(start_paused = true)]
async fn http_is_the_last_transport_and_the_reasons_of_the_others_are_kept() {
    let ucx = Fake::new(
        "ucx",
        [NO_SHM, NO_RDMA, (gym_client::transport::UCX_TCP, Behavior::Refuses("UCX cannot be loaded"))],
    );
    let transports = Transports::new().with_connector(ucx).with_connector(Fake::new("http", [HTTP]));
    connect(&transports, &BOTH).await.unwrap();
    let path = transports.paths().remove(0);
    assert_eq!(
        (path.transport_name(), transports_of(&path)),
        ("http", vec![gym_client::transport::SHM, gym_client::transport::RDMA, gym_client::transport::UCX_TCP])
    );
}

#[tokio::test(start_paused = true)]
async fn a_program_without_the_transport_falls_and_says_so() {
    let transports = Transports::new().with_connector(Fake::new("http", [HTTP]));
    connect(&transports, &BOTH).await.unwrap();
    let why = &transports.paths()[0].refused[0].reason;
    assert!(why.starts_with("this program has no ucx transport"), "{why}");
}

#[tokio::test(start_paused = true)]
async fn a_required_level_fails_instead_of_falling_and_says_what_was_found_and_what_to_do() {
    let ucx = Fake::new("ucx", [NO_SHM, NO_RDMA, TCP]);
    let http = Fake::new("http", [HTTP]);
    let required = TransportPolicy::auto().require("rdma");
    let transports = Transports::new().with_connector(ucx.clone()).with_connector(http.clone()).with_policy(required);
    let error = connect(&transports, &BOTH).await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, gym_core::Execution::NotStarted));
    let text = error.to_string();
    for words in [
        "http://h:1",
        "shm: another host",
        "rdma: no RDMA lane",
        "ucx_tcp: below require_transport rdma",
        "fix: ",
        "require_transport",
        "the command `doctor`",
    ] {
        assert!(text.contains(words), "{words:?} in {text}");
    }
    assert_eq!(
        ucx.asked(),
        [Some(gym_client::transport::SHM), Some(gym_client::transport::RDMA)],
        "nothing below it is tried"
    );
    assert_eq!(http.asked(), []);
    assert_eq!(transports.paths()[0].transport_name(), "none");
}

#[tokio::test(start_paused = true)]
async fn a_peer_without_the_offer_is_told_apart_from_one_that_cannot_be_reached() {
    let transports = Transports::new().with_connector(Fake::new("http", [HTTP])).with_policy(policy("shm,rdma"));
    let error = connect(&transports, &["http://h:1"]).await.unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    assert!(error.to_string().contains("it offers no ucx endpoint"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn only_the_transports_that_are_named_are_used() {
    let ucx = Fake::new("ucx", [(gym_client::transport::SHM, Behavior::Holds), TCP]);
    let transports = Transports::new().with_connector(ucx.clone()).with_connector(Fake::new("http", [HTTP]));
    let channel = connect(&transports.clone().with_policy(policy("ucx_tcp,http")), &BOTH).await.unwrap();
    assert_eq!(
        (channel.path().transport, ucx.asked()),
        (Some(gym_client::transport::UCX_TCP), vec![Some(gym_client::transport::UCX_TCP)])
    );
    let channel = connect(&transports.clone().with_policy(TransportPolicy::unconfigured()), &BOTH).await.unwrap();
    assert_eq!((channel.path().scheme, ucx.asked().len()), ("http", 1), "UCX is not touched");
    let shm = transports.with_policy(policy("shm"));
    assert_eq!(connect(&shm, &BOTH).await.unwrap().path().transport, Some(gym_client::transport::SHM));
    assert_eq!(transports_of(&shm.paths()[0]), [], "less preferred transports are not reported");
}

#[tokio::test(start_paused = true)]
async fn what_was_negotiated_counts_and_not_what_was_asked_for() {
    let ucx =
        Fake::new("ucx", [(gym_client::transport::SHM, Behavior::Negotiates(gym_client::transport::UCX_TCP)), TCP]);
    let transports = Transports::new().with_connector(ucx).with_policy(policy("shm"));
    let error = connect(&transports, &BOTH).await.unwrap_err();
    assert!(error.to_string().contains("asked for shm, negotiated ucx_tcp (ucx_tcp/0)"), "{error}");
    let ucx = Fake::new("ucx", [(gym_client::transport::UCX_TCP, Behavior::Negotiates(gym_client::transport::RDMA))]);
    let better = Transports::new().with_connector(ucx.clone()).with_policy(policy("rdma,ucx_tcp"));
    assert_eq!(
        connect(&better, &BOTH).await.unwrap().path().transport,
        Some(gym_client::transport::RDMA),
        "better than asked for will do"
    );
    let error =
        connect(&Transports::new().with_connector(ucx).with_policy(policy("ucx_tcp")), &BOTH).await.unwrap_err();
    assert!(error.to_string().contains("negotiated rdma"), "unless it may not be used: {error}");
}

#[tokio::test(start_paused = true)]
async fn a_transport_that_hangs_leaves_time_for_the_next_ones() {
    let ucx = Fake::new(
        "ucx",
        [(gym_client::transport::SHM, Behavior::Hangs), (gym_client::transport::RDMA, Behavior::Hangs), TCP],
    );
    let transports = Transports::new().with_connector(ucx);
    let began = tokio::time::Instant::now();
    let cx = CallContext::within(Duration::from_secs(8));
    let channel = transports.connect(&cx, &endpoints(&BOTH), &ConnectOptions::default()).await.unwrap();
    assert_eq!((channel.path().transport, began.elapsed().as_secs()), (Some(gym_client::transport::UCX_TCP), 6));
    cx.cancel.cancel();
    let error = transports.connect(&cx, &endpoints(&BOTH), &ConnectOptions::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::Cancelled, "a cancelled caller gets no report about transports");
}

#[tokio::test(start_paused = true)]
async fn an_own_transport_obeys_the_policy() {
    let own = Fake::new("pigeon", [(gym_client::transport::HTTP, Behavior::Holds)]);
    let transports = Transports::new().with_connector(own.clone());
    let endpoints = ["pigeon://roof", "http://h:1"];
    connect(&transports.clone().with_policy(policy("shm")), &endpoints).await.unwrap_err();
    assert_eq!(own.asked(), [], "the policy does not name it");
    connect(&transports.with_policy(policy("pigeon,http")), &endpoints).await.unwrap();
    assert_eq!(own.asked(), [None]);
}

#[tokio::test(start_paused = true)]
async fn metrics_tell_connections_refusals_and_how_each_peer_is_reached() {
    let ucx = Fake::new("ucx", [NO_SHM, NO_RDMA, TCP]);
    let transports = Transports::new().with_connector(ucx).with_connector(Fake::new("http", [HTTP]));
    let mut registry = prometheus_client::registry::Registry::default();
    registry.register_collector(Box::new(transports.metrics()));
    connect(&transports, &BOTH).await.unwrap();
    connect(&transports.clone(), &["http://other:2"]).await.unwrap();
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    for line in [
        r#"gym_transport_connections_total{transport="http"} 1"#,
        r#"gym_transport_connections_total{transport="ucx_tcp"} 1"#,
        r#"gym_transport_refusals_total{transport="shm"} 1"#,
        r#"gym_transport_peer{peer="http://h:1",transport="ucx_tcp",lanes="ucx_tcp/0"} 1"#,
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_peers_that_are_remembered_are_bounded() {
    let transports = Transports::new().with_connector(Fake::new("http", [HTTP]));
    for port in 0..1_100 {
        connect(&transports, &[&format!("http://h:{port}")]).await.unwrap();
    }
    let paths = transports.paths();
    assert_eq!(paths.len(), 1_024);
    assert!(!paths.iter().any(|path| path.peer == "http://h:75"), "the oldest are forgotten");
}

/// A backend whose device is missing.
#[derive(Debug)]
struct WithoutDevice(Arc<Fake>);

#[async_trait]
impl Backend for WithoutDevice {
    fn connectors(&self) -> Vec<Arc<dyn Connector>> {
        vec![self.0.clone()]
    }

    async fn listen(&self, _: &ListenOptions, _: Arc<dyn gym_core::Handler>) -> Result<Option<BoundListener>> {
        Ok(None)
    }

    async fn diagnose(&self, _: Duration) -> Vec<TransportReport> {
        self.0
            .transports()
            .into_iter()
            .map(|pigeon| TransportReport::unusable(pigeon, "no loft", "build one"))
            .collect()
    }
}

#[tokio::test]
async fn a_required_transport_without_its_device_is_refused_with_the_reason() {
    let transports = Transports::new().with(WithoutDevice(Fake::new("pigeon", [])));
    let required = |text: &str, minimum: &str| {
        let policy = policy(text).require(minimum);
        let transports = transports.clone().with_policy(policy);
        async move { transports.check_required().await }
    };
    let error = required("pigeon", "pigeon").await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::FailedPrecondition, gym_core::Execution::NotStarted));
    let text = error.to_string();
    assert!(
        text.starts_with(
            "require_transport is pigeon, which this machine cannot use (pigeon: no loft; fix: build one)"
        ),
        "{text}"
    );
    let backed = transports.clone().with_connector(Fake::new("http", [HTTP]));
    backed
        .with_policy(policy("pigeon,http").require("http"))
        .check_required()
        .await
        .expect("http is above the minimum");
    transports.clone().with_policy(policy("pigeon,mem")).check_required().await.expect("nothing is required");
}
