//! What a server listens on besides HTTP: UCX, where its ladder may use it.

use std::net::IpAddr;
#[cfg(all(feature = "http", feature = "rdma"))]
use std::net::SocketAddr;
use std::sync::Arc;

use gym_core::{Endpoint, Handler, Ladder, Level, Listener, Result};

use super::both::Both;

/// The UCX that the servers and the callers of one process share, if its ladder may use UCX. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Offer {
    ladder: Ladder,
    #[cfg(all(feature = "http", feature = "rdma"))]
    ucx: Option<gym_transport_rdma::Ucx>,
}

impl Offer {
    /// What `ladder` allows. Peers of other hosts are taken at `address`, on a port of UCX's own; without it nobody listens for
    /// them. Nothing is loaded yet.
    #[must_use]
    pub fn new(ladder: &Ladder, address: Option<IpAddr>) -> Self {
        #[cfg(not(all(feature = "http", feature = "rdma")))]
        let _ = address;
        Self {
            ladder: ladder.clone(),
            #[cfg(all(feature = "http", feature = "rdma"))]
            ucx: ladder
                .uses_ucx()
                .then(|| super::ucx::configured(ladder, address.map(|address| SocketAddr::new(address, 0)))),
        }
    }

    /// The same transports on this ladder, calling with the UCX that is listened on.
    #[must_use]
    pub fn calling(&self, transports: super::Transports) -> super::Transports {
        #[cfg(all(feature = "http", feature = "rdma"))]
        let transports = match &self.ucx {
            Some(ucx) => transports.with_ucx(ucx.clone()),
            None => transports,
        };
        transports.with_ladder(self.ladder.clone())
    }

    /// `http` together with UCX, best first, and what is to be served on it: `handler`, behind what tells callers the way to UCX.
    ///
    /// # Errors
    /// When UCX cannot be had, and the ladder does not allow HTTP instead. Where it does, UCX is left out, which is logged.
    pub async fn listen(
        &self,
        http: Box<dyn Listener>,
        handler: Arc<dyn Handler>,
    ) -> Result<(Box<dyn Listener>, Arc<dyn Handler>)> {
        if !self.ladder.uses_ucx() {
            return Ok((http, handler));
        }
        // Not the listener itself: it is not to be shared between threads.
        let endpoints = http.endpoints().to_vec();
        match self.ucx(&endpoints, Arc::clone(&handler)).await {
            Ok((ucx, handler)) => Ok((Box::new(Both::new(ucx, http)), handler)),
            Err(error) if self.ladder.allows(Level::Http) => {
                tracing::warn!(?endpoints, %error, "no UCX is offered; callers come over http");
                Ok((http, handler))
            }
            Err(error) => Err(error.about(format!("offer transport {}", self.ladder))),
        }
    }

    #[cfg(all(feature = "http", feature = "rdma"))]
    async fn ucx(&self, http: &[Endpoint], handler: Arc<dyn Handler>) -> Result<(Box<dyn Listener>, Arc<dyn Handler>)> {
        match &self.ucx {
            Some(ucx) => super::ucx::listen(ucx, http, handler).await,
            None => Err(gym_core::Error::internal("a ladder that uses UCX has none")),
        }
    }

    #[cfg(not(all(feature = "http", feature = "rdma")))]
    #[expect(clippy::unused_async, reason = "the same as with the features")]
    async fn ucx(&self, _: &[Endpoint], _: Arc<dyn Handler>) -> Result<(Box<dyn Listener>, Arc<dyn Handler>)> {
        let message = "this program has no ucx transport, which comes with the features `http` and `rdma`";
        Err(gym_core::Error::not_started(gym_core::Code::Unimplemented, message))
    }
}
