//! The fallback ladder, on connectors that only say what they can.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use gym_client::{PeerPath, Transports};
use gym_core::{
    CallContext, Channel, Code, ConnectOptions, Connector, Endpoint, Error, Ladder, Level, Link, PathInfo, Reply,
    Request, Result,
};

/// What a rung does when it is asked for.
#[derive(Clone, Copy, Debug)]
enum Rung {
    Holds,
    Refuses(&'static str),
    Negotiates(Level),
    Hangs,
}

#[derive(Debug)]
struct Fake {
    scheme: &'static str,
    rungs: BTreeMap<Level, Rung>,
    asked: Mutex<Vec<Option<Level>>>,
}

impl Fake {
    fn new(scheme: &'static str, rungs: impl IntoIterator<Item = (Level, Rung)>) -> Arc<Self> {
        Arc::new(Self { scheme, rungs: rungs.into_iter().collect(), asked: Mutex::default() })
    }

    fn asked(&self) -> Vec<Option<Level>> {
        self.asked.lock().unwrap().clone()
    }
}

#[async_trait]
impl Connector for Fake {
    fn scheme(&self) -> &'static str {
        self.scheme
    }

    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel> {
        self.asked.lock().unwrap().push(options.level);
        let level = options.level.unwrap_or(Level::Http);
        let path = |level: Level| PathInfo::new(self.scheme, to.address(), true).at(level, format!("{level}/0"));
        match self.rungs.get(&level).copied().unwrap_or(Rung::Refuses("not there")) {
            Rung::Holds => Ok(Channel::new(FakeLink(path(level)))),
            Rung::Negotiates(other) => Ok(Channel::new(FakeLink(path(other)))),
            Rung::Refuses(why) => Err(Error::not_started(Code::Unavailable, why)),
            Rung::Hangs => cx.bound(gym_core::Execution::NotStarted, std::future::pending()).await,
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

const NO_SHM: (Level, Rung) = (Level::SharedMemory, Rung::Refuses("another host"));
const NO_RDMA: (Level, Rung) = (Level::Rdma, Rung::Refuses("no RDMA lane"));
const TCP: (Level, Rung) = (Level::UcxTcp, Rung::Holds);
const HTTP: (Level, Rung) = (Level::Http, Rung::Holds);

fn endpoints(texts: &[&str]) -> Vec<Endpoint> {
    texts.iter().map(|text| Endpoint::parse(text).unwrap()).collect()
}

async fn connect(transports: &Transports, texts: &[&str]) -> Result<Channel> {
    transports.connect(&CallContext::default(), &endpoints(texts), &ConnectOptions::default()).await
}

const BOTH: [&str; 2] = ["ucx://h:1", "http://h:1"];

fn ladder(text: &str) -> Ladder {
    text.parse().unwrap()
}

fn levels(path: &PeerPath) -> Vec<Level> {
    path.refused.iter().map(|refusal| refusal.level).collect()
}

#[tokio::test(start_paused = true)]
async fn rungs_are_asked_for_best_first_until_one_holds() {
    let ucx = Fake::new("ucx", [NO_SHM, NO_RDMA, TCP]);
    let http = Fake::new("http", [HTTP]);
    let transports = Transports::new().with(ucx.clone()).with(http.clone());
    let channel = connect(&transports, &BOTH).await.unwrap();
    assert_eq!(channel.path().level, Some(Level::UcxTcp));
    assert_eq!(ucx.asked(), [Some(Level::SharedMemory), Some(Level::Rdma), Some(Level::UcxTcp)]);
    assert_eq!(http.asked(), [], "nothing below the rung that holds is tried");
    let paths = transports.paths();
    assert_eq!(
        (paths[0].peer.as_str(), paths[0].over(), paths[0].lanes.as_str()),
        ("http://h:1", "ucx_tcp", "ucx_tcp/0")
    );
    let reasons: Vec<String> = paths[0].refused.iter().map(ToString::to_string).collect();
    assert_eq!(reasons, ["shm: another host", "rdma: no RDMA lane"]);
}

#[tokio::test(start_paused = true)]
async fn http_is_the_last_rung_and_the_reasons_above_it_are_kept() {
    let ucx = Fake::new("ucx", [NO_SHM, NO_RDMA, (Level::UcxTcp, Rung::Refuses("UCX cannot be loaded"))]);
    let transports = Transports::new().with(ucx).with(Fake::new("http", [HTTP]));
    connect(&transports, &BOTH).await.unwrap();
    let path = transports.paths().remove(0);
    assert_eq!((path.over(), levels(&path)), ("http", vec![Level::SharedMemory, Level::Rdma, Level::UcxTcp]));
}

#[tokio::test(start_paused = true)]
async fn a_program_without_the_transport_falls_and_says_so() {
    let transports = Transports::new().with(Fake::new("http", [HTTP]));
    connect(&transports, &BOTH).await.unwrap();
    let why = &transports.paths()[0].refused[0].why;
    assert!(why.starts_with("this program has no ucx transport"), "{why}");
}

#[tokio::test(start_paused = true)]
async fn a_required_level_fails_instead_of_falling_and_says_what_was_found_and_what_to_do() {
    let ucx = Fake::new("ucx", [NO_SHM, NO_RDMA, TCP]);
    let http = Fake::new("http", [HTTP]);
    let required = Ladder::auto().require(Level::Rdma).unwrap();
    let transports = Transports::new().with(ucx.clone()).with(http.clone()).with_ladder(required);
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
        "rgym doctor",
    ] {
        assert!(text.contains(words), "{words:?} in {text}");
    }
    assert_eq!(ucx.asked(), [Some(Level::SharedMemory), Some(Level::Rdma)], "nothing below it is tried");
    assert_eq!(http.asked(), []);
    assert_eq!(transports.paths()[0].over(), "none");
}

#[tokio::test(start_paused = true)]
async fn a_peer_without_the_offer_is_told_apart_from_one_that_cannot_be_reached() {
    let transports = Transports::new().with(Fake::new("http", [HTTP])).with_ladder(ladder("shm,rdma"));
    let error = connect(&transports, &["http://h:1"]).await.unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    assert!(error.to_string().contains("it offers no ucx endpoint"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn only_the_rungs_that_are_named_are_used() {
    let ucx = Fake::new("ucx", [(Level::SharedMemory, Rung::Holds), TCP]);
    let transports = Transports::new().with(ucx.clone()).with(Fake::new("http", [HTTP]));
    let channel = connect(&transports.clone().with_ladder(ladder("ucx_tcp,http")), &BOTH).await.unwrap();
    assert_eq!((channel.path().level, ucx.asked()), (Some(Level::UcxTcp), vec![Some(Level::UcxTcp)]));
    let channel = connect(&transports.clone().with_ladder(Ladder::without_ucx()), &BOTH).await.unwrap();
    assert_eq!((channel.path().scheme, ucx.asked().len()), ("http", 1), "UCX is not touched");
    let shm = transports.with_ladder(ladder("shm"));
    assert_eq!(connect(&shm, &BOTH).await.unwrap().path().level, Some(Level::SharedMemory));
    assert_eq!(levels(&shm.paths()[0]), [], "what is below the rung that holds is not told");
}

#[tokio::test(start_paused = true)]
async fn what_was_negotiated_counts_and_not_what_was_asked_for() {
    let ucx = Fake::new("ucx", [(Level::SharedMemory, Rung::Negotiates(Level::UcxTcp)), TCP]);
    let transports = Transports::new().with(ucx).with_ladder(ladder("shm"));
    let error = connect(&transports, &BOTH).await.unwrap_err();
    assert!(error.to_string().contains("asked for shm, negotiated ucx_tcp (ucx_tcp/0)"), "{error}");
    let ucx = Fake::new("ucx", [(Level::UcxTcp, Rung::Negotiates(Level::Rdma))]);
    let better = Transports::new().with(ucx.clone()).with_ladder(ladder("rdma,ucx_tcp"));
    assert_eq!(connect(&better, &BOTH).await.unwrap().path().level, Some(Level::Rdma), "better than asked for will do");
    let error = connect(&Transports::new().with(ucx).with_ladder(ladder("ucx_tcp")), &BOTH).await.unwrap_err();
    assert!(error.to_string().contains("negotiated rdma"), "unless it may not be used: {error}");
}

#[tokio::test(start_paused = true)]
async fn a_rung_that_hangs_leaves_time_for_those_below_it() {
    let ucx = Fake::new("ucx", [(Level::SharedMemory, Rung::Hangs), (Level::Rdma, Rung::Hangs), TCP]);
    let transports = Transports::new().with(ucx);
    let began = tokio::time::Instant::now();
    let cx = CallContext::within(Duration::from_secs(8));
    let channel = transports.connect(&cx, &endpoints(&BOTH), &ConnectOptions::default()).await.unwrap();
    assert_eq!((channel.path().level, began.elapsed().as_secs()), (Some(Level::UcxTcp), 6));
    cx.cancel.cancel();
    let error = transports.connect(&cx, &endpoints(&BOTH), &ConnectOptions::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::Cancelled, "who has left is not told about rungs");
}

#[tokio::test(start_paused = true)]
async fn a_transport_of_ones_own_is_on_no_rung_and_used_whatever_the_ladder_says() {
    let own = Fake::new("pigeon", [(Level::Http, Rung::Holds)]);
    let transports = Transports::new().with(own.clone()).with_ladder(ladder("shm"));
    connect(&transports, &["pigeon://roof", "http://h:1"]).await.unwrap();
    assert_eq!(own.asked(), [None]);
}

#[tokio::test(start_paused = true)]
async fn metrics_tell_connections_refusals_and_how_each_peer_is_reached() {
    let ucx = Fake::new("ucx", [NO_SHM, NO_RDMA, TCP]);
    let transports = Transports::new().with(ucx).with(Fake::new("http", [HTTP]));
    let mut registry = prometheus_client::registry::Registry::default();
    registry.register_collector(Box::new(transports.metrics()));
    connect(&transports, &BOTH).await.unwrap();
    connect(&transports.clone(), &["http://other:2"]).await.unwrap();
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    for line in [
        r#"gym_transport_connections_total{level="http"} 1"#,
        r#"gym_transport_connections_total{level="ucx_tcp"} 1"#,
        r#"gym_transport_refusals_total{level="shm"} 1"#,
        r#"gym_transport_peer{peer="http://h:1",level="ucx_tcp",lanes="ucx_tcp/0"} 1"#,
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_peers_that_are_remembered_are_bounded() {
    let transports = Transports::new().with(Fake::new("http", [HTTP]));
    for port in 0..1_100 {
        connect(&transports, &[&format!("http://h:{port}")]).await.unwrap();
    }
    let paths = transports.paths();
    assert_eq!(paths.len(), 1_024);
    assert!(!paths.iter().any(|path| path.peer == "http://h:75"), "the oldest are forgotten");
}
