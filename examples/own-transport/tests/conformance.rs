//! QUIC passes the conformance suites of all transports.

use gym_client::transport::http::frames::FramesConfig;
use gym_core::testing::conformance::{TransportPair, TransportSetup, ordered_transport, transport};
use gym_core::transport::mux::ConnectionLimits;
use gym_core::transport::{Backend, ListenOptions, handler_fn};
use gym_core::{Error, Request};
use gym_own_transport::QuicBackend;

async fn pair(setup: TransportSetup) -> TransportPair {
    let TransportSetup { calls_max, request_bytes_in_flight_max, .. } = setup;
    let mut limits = ConnectionLimits::default();
    limits.calls_max = calls_max;
    limits.request_bytes_in_flight_max = request_bytes_in_flight_max;
    let mut config = FramesConfig::default();
    config.limits = limits;
    let backend = QuicBackend::new("conformance", config).expect("a key");
    let unused = std::sync::Arc::new(handler_fn(|_: Request| async { Err(Error::internal("not served")) }));
    let options = ListenOptions::default().at("127.0.0.1", 0);
    let bound = backend.listen(&options, unused).await.expect("a free port").expect("an address");
    (Box::new(FirstConnector(backend.connectors().remove(0))), bound.listener)
}

/// Owns a connector, because the suite takes one by value.
#[derive(Debug)]
struct FirstConnector(std::sync::Arc<dyn gym_core::transport::Connector>);

#[gym_core::transport::async_trait]
impl gym_core::transport::Connector for FirstConnector {
    fn scheme(&self) -> &'static str {
        self.0.scheme()
    }

    async fn connect(
        &self,
        cx: &gym_core::CallContext,
        to: &gym_core::Endpoint,
        options: &gym_core::transport::ConnectOptions,
    ) -> gym_core::Result<gym_core::Channel> {
        self.0.connect(cx, to, options).await
    }
}

#[tokio::test]
async fn quic() {
    transport(pair).await;
    ordered_transport(pair).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quic_on_two_threads() {
    transport(pair).await;
    ordered_transport(pair).await;
}
