//! UCX as one of this program's transports: called with and listened on by one fabric of the process, opened when it is first used.

use std::net::SocketAddr;
use std::sync::Arc;

use gym_core::{Endpoint, Handler, Ladder, Level, Listener, Result};
use gym_transport_http::HttpConnector;
use gym_transport_rdma::fabric::FabricOptions;
use gym_transport_rdma::{Ucx, UcxConfig, UcxConnector, UcxListener};

use super::Transports;

/// UCX restricted to the rungs of `ladder`, taking peers at `listen`.
#[must_use]
pub(crate) fn configured(ladder: &Ladder, listen: Option<SocketAddr>) -> Ucx {
    let fabric = FabricOptions { listen, transports: transports(ladder), ..FabricOptions::default() };
    Ucx::new(UcxConfig { fabric, ..UcxConfig::default() })
}

/// `UCX_TLS` for a ladder. Where RDMA may be used UCX chooses among all that it has; else it must not find it by itself.
fn transports(ladder: &Ladder) -> Option<String> {
    let names = [(Level::SharedMemory, "shm"), (Level::UcxTcp, "tcp")];
    let allowed: Vec<&str> =
        names.into_iter().filter(|(level, _)| ladder.allows(*level)).map(|(_, name)| name).chain(["self"]).collect();
    (!ladder.allows(Level::Rdma)).then(|| allowed.join(","))
}

impl Transports {
    /// The same, with this UCX: peers that offer it are asked over HTTP how they are reached.
    #[must_use]
    pub fn with_ucx(self, ucx: Ucx) -> Self {
        let connector = UcxConnector::new(Arc::new(HttpConnector::default()), ucx.clone());
        Self { ucx: Some(ucx), ..self.with(Arc::new(connector)) }
    }

    /// The UCX of these transports, for its statistics.
    #[must_use]
    pub fn ucx(&self) -> Option<&Ucx> {
        self.ucx.as_ref()
    }
}

/// A listener beside another one, whose endpoints these are, and what that one has to serve from now on: the way to this one, before all else.
///
/// # Errors
/// When UCX cannot be loaded or opened.
pub(crate) async fn listen(
    ucx: &Ucx,
    beside: &[Endpoint],
    handler: Arc<dyn Handler>,
) -> Result<(Box<dyn Listener>, Arc<dyn Handler>)> {
    let bootstraps: Vec<_> = beside.iter().filter(|endpoint| endpoint.scheme() == "http").cloned().collect();
    let listener = UcxListener::open(ucx.clone(), &bootstraps).await?;
    let handler = Arc::new(listener.bootstrap(handler));
    Ok((Box::new(listener), handler))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ucx_is_kept_to_the_rungs_that_may_be_used() {
        let of = |text: &str| transports(&text.parse().expect("a ladder"));
        assert_eq!(of("auto"), None);
        assert_eq!(of("ucx_tcp").as_deref(), Some("tcp,self"));
        assert_eq!(of("shm,ucx_tcp,http").as_deref(), Some("shm,tcp,self"));
    }
}
