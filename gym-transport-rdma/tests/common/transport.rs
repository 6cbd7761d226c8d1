//! Both ends of the transport over one UCX transport, with an in-process bootstrap.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use gym_core::testing::conformance::{TransportPair, TransportSetup};
use gym_core::transport::mux::ConnectionLimits;
use gym_core::transport::{ConnectOptions, Connector, InProcess, Listener, handler_fn};
use gym_core::{CallContext, Channel, Endpoint, Error, Result};
use gym_transport_rdma::transport::{UcxConnector, UcxListener};
use gym_transport_rdma::{Ucx, UcxConfig};

use super::{Way, open};

/// Two fabrics, one per end, as in two processes.
pub(crate) struct Ends {
    pub(crate) way: Way,
    pub(crate) caller: Ucx,
    pub(crate) server: Ucx,
    names: InProcess,
}

impl Ends {
    /// Opens both fabrics. Returns `None`, with a message on stderr, if there is no UCX and none is required.
    pub(crate) async fn open(way: Way) -> Option<Self> {
        // Reports a missing UCX.
        drop(open(way.calling())?);
        let ucx = |fabric| {
            let mut config = UcxConfig::default();
            config.fabric = fabric;
            Ucx::new(config)
        };
        Some(Self { way, caller: ucx(way.calling()), server: ucx(way.answering()), names: InProcess::new() })
    }

    /// Creates a connector and a listener over this transport.
    pub(crate) async fn pair(&self, limits: ConnectionLimits) -> (OnWay, UcxListener) {
        static NAMES: AtomicUsize = AtomicUsize::new(0);
        let name = format!("bootstrap-{}", NAMES.fetch_add(1, Ordering::Relaxed));
        let mut bootstrap = self.names.listen(&name).unwrap();
        let listener = UcxListener::open(self.server.with_limits(limits.clone()), bootstrap.endpoints()).await.unwrap();
        let nothing =
            handler_fn(|request| async move { Err(Error::invalid(format!("{} is not served here", request.route))) });
        let handler = Arc::new(listener.bootstrap(Arc::new(nothing)));
        // Ends with the test's runtime.
        tokio::spawn(async move {
            while let Ok(incoming) = bootstrap.accept().await {
                tokio::spawn(incoming.serve(handler.clone(), Default::default()));
            }
        });
        let connector = UcxConnector::new(Arc::new(self.names.clone()), self.caller.with_limits(limits));
        (OnWay { connector, way: self.way }, listener)
    }

    pub(crate) async fn conformance_pair(&self, setup: TransportSetup) -> TransportPair {
        let TransportSetup { calls_max, request_bytes_in_flight_max, .. } = setup;
        let mut limits = ConnectionLimits::default();
        limits.calls_max = calls_max;
        limits.request_bytes_in_flight_max = request_bytes_in_flight_max;
        let (connector, listener) = self.pair(limits).await;
        (Box::new(connector), Box::new(listener))
    }
}

/// A connector that requests one transport and checks that it was negotiated.
#[derive(Debug)]
pub(crate) struct OnWay {
    pub(crate) connector: UcxConnector,
    way: Way,
}

#[async_trait]
impl Connector for OnWay {
    fn scheme(&self) -> &'static str {
        self.connector.scheme()
    }

    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel> {
        let rdma = std::env::var("GYM_UCX_TRANSPORTS").is_ok_and(|transports| transports != "tcp");
        let level = match self.way {
            Way::SharedMemory => gym_transport_rdma::SHM,
            Way::Network if rdma => gym_transport_rdma::RDMA,
            Way::Network => gym_transport_rdma::UCX_TCP,
        };
        let channel = self.connector.connect(cx, to, &options.clone().at(level)).await?;
        let path = channel.path();
        assert_eq!(path.transport, Some(level), "{path:?}");
        let lane = match level {
            gym_transport_rdma::SHM => "posix/memory",
            gym_transport_rdma::RDMA => "rc_",
            _ => "tcp/",
        };
        assert!(path.lanes.contains(lane), "{path:?}");
        Ok(channel)
    }
}
