//! UCX as a backend of a program.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use async_trait::async_trait;
use gym_core::transport::{Backend, BoundListener, Connector, ListenOptions, Listener, Transport, TransportPolicy};
use gym_core::{Handler, Result};

use crate::fabric::FabricOptions;
use crate::transport::config::{Ucx, UcxConfig};
use crate::transport::connector::UcxConnector;
use crate::transport::listener::UcxListener;

/// Backend that connects and listens over UCX, with one fabric that is opened on first use.
///
/// `bootstrap` carries the requests by which peers exchange their UCX addresses.
#[derive(Clone, Debug)]
pub struct UcxBackend {
    bootstrap: Arc<dyn Connector>,
    ucx: Ucx,
}

impl UcxBackend {
    /// Creates a backend whose peers exchange their addresses over `bootstrap`. Loads nothing.
    #[must_use]
    pub fn new(bootstrap: Arc<dyn Connector>, ucx: Ucx) -> Self {
        Self { bootstrap, ucx }
    }

    /// The UCX state that connectors and listeners share, for its statistics.
    #[must_use]
    pub fn ucx(&self) -> &Ucx {
        &self.ucx
    }
}

#[async_trait]
impl Backend for UcxBackend {
    fn connectors(&self) -> Vec<Arc<dyn Connector>> {
        vec![Arc::new(UcxConnector::new(Arc::clone(&self.bootstrap), self.ucx.clone()))]
    }

    async fn listen(&self, options: &ListenOptions, handler: Arc<dyn Handler>) -> Result<Option<BoundListener>> {
        let scheme = self.bootstrap.scheme();
        let met: Vec<_> = options.bound.iter().filter(|endpoint| endpoint.scheme() == scheme).cloned().collect();
        if met.is_empty() {
            return Ok(None);
        }
        let listener = UcxListener::open(self.ucx.clone(), &met).await?;
        let handler = Arc::new(listener.bootstrap(handler));
        Ok(Some(BoundListener { listener: Box::new(listener) as Box<dyn Listener>, handler }))
    }

    fn scoped(&self, policy: &TransportPolicy, host: Option<IpAddr>) -> Option<Arc<dyn Backend>> {
        let names = [(Transport::SHM, "shm"), (Transport::UCX_TCP, "tcp")];
        let allowed = names.into_iter().filter(|(transport, _)| policy.allows(*transport)).map(|(_, name)| name);
        let transports =
            (!policy.allows(Transport::RDMA)).then(|| allowed.chain(["self"]).collect::<Vec<_>>().join(","));
        let listen = host.map(|host| SocketAddr::new(host, 0));
        let fabric = FabricOptions { listen, transports, ..self.ucx.config().fabric.clone() };
        let ucx = Ucx::new(UcxConfig { fabric, ..self.ucx.config().clone() });
        Some(Arc::new(Self { bootstrap: Arc::clone(&self.bootstrap), ucx }))
    }
}
