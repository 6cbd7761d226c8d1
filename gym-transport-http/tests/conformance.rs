//! The HTTP transport passes the suite that every transport passes.

use gym_core::testing::conformance::{TransportPair, TransportSetup, transport};
use gym_transport_http::{HttpConfig, HttpConnector, HttpListener};

fn pair(setup: TransportSetup) -> TransportPair {
    let config = HttpConfig { connections_max: setup.calls_max, ..HttpConfig::default() };
    let listener = HttpListener::bind(([127, 0, 0, 1], 0).into(), config.clone()).expect("a free port");
    (Box::new(HttpConnector::new(config)), Box::new(listener))
}

#[tokio::test]
async fn http() {
    transport(async |setup| pair(setup)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http_on_two_threads() {
    transport(async |setup| pair(setup)).await;
}
