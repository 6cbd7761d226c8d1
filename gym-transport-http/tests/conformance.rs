//! Runs the conformance suite of all transports on the transports of this crate.

use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use gym_core::testing::conformance::{TransportPair, TransportSetup, ordered_transport, transport};
use gym_core::transport::mux::ConnectionLimits;
use gym_core::transport::{Incoming, Listener};
use gym_core::{Endpoint, Result};
use gym_transport_http::frames::{FramesConfig, FramesConnector, UnixListener};
use gym_transport_http::http1::{HttpConfig, HttpConnector, HttpListener};

fn http_pair(setup: TransportSetup) -> TransportPair {
    let mut config = HttpConfig::default();
    config.connections_max = setup.calls_max;
    let listener = HttpListener::bind(([127, 0, 0, 1], 0).into(), config.clone()).expect("a free port");
    (Box::new(HttpConnector::new(config)), Box::new(listener))
}

fn frames_config(setup: TransportSetup) -> FramesConfig {
    let TransportSetup { calls_max, request_bytes_in_flight_max, .. } = setup;
    let mut config = FramesConfig::default();
    config.limits = {
        let mut limits = ConnectionLimits::default();
        limits.calls_max = calls_max;
        limits.request_bytes_in_flight_max = request_bytes_in_flight_max;
        limits
    };
    config
}

/// A listener that offers only its frames endpoint.
#[derive(Debug)]
struct FramesAlone(HttpListener);

#[async_trait]
impl Listener for FramesAlone {
    fn endpoints(&self) -> &[Endpoint] {
        &self.0.endpoints()[1..]
    }

    async fn accept(&mut self) -> Result<Box<dyn Incoming>> {
        self.0.accept().await
    }
}

fn frames_pair(setup: TransportSetup) -> TransportPair {
    let frames = frames_config(setup);
    let mut config = HttpConfig::default();
    config.frames = frames.clone();
    let listener = HttpListener::bind(([127, 0, 0, 1], 0).into(), config).expect("a free port");
    (Box::new(FramesConnector::tcp(frames)), Box::new(FramesAlone(listener)))
}

fn unix_pair(setup: TransportSetup) -> TransportPair {
    static PAIRS: AtomicUsize = AtomicUsize::new(0);
    let frames = frames_config(setup);
    let name = format!("gym-conformance-{}-{}", std::process::id(), PAIRS.fetch_add(1, Ordering::Relaxed));
    let listener = UnixListener::bind(std::env::temp_dir().join(name), frames.clone()).expect("a free path");
    (Box::new(FramesConnector::unix(frames)), Box::new(listener))
}

#[tokio::test]
async fn http() {
    transport(async |setup| http_pair(setup)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http_on_two_threads() {
    transport(async |setup| http_pair(setup)).await;
}

#[tokio::test]
async fn frames_over_tcp() {
    transport(async |setup| frames_pair(setup)).await;
    ordered_transport(async |setup| frames_pair(setup)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_over_tcp_on_two_threads() {
    transport(async |setup| frames_pair(setup)).await;
    ordered_transport(async |setup| frames_pair(setup)).await;
}

#[tokio::test]
async fn frames_over_a_unix_socket() {
    transport(async |setup| unix_pair(setup)).await;
    ordered_transport(async |setup| unix_pair(setup)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_over_a_unix_socket_on_two_threads() {
    transport(async |setup| unix_pair(setup)).await;
    ordered_transport(async |setup| unix_pair(setup)).await;
}
