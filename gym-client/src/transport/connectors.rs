//! Which connector serves a scheme, and by which transports.

use std::collections::BTreeMap;
use std::sync::Arc;

use gym_core::transport::{Backend, Connector, ListenOptions, Transport};
use gym_core::{Handler, Result};

/// A backend that only calls.
#[derive(Debug)]
pub(super) struct ConnectOnly(pub(super) Arc<dyn Connector>);

#[async_trait::async_trait]
impl Backend for ConnectOnly {
    fn connectors(&self) -> Vec<Arc<dyn Connector>> {
        vec![Arc::clone(&self.0)]
    }

    async fn listen(
        &self,
        _: &ListenOptions,
        _: Arc<dyn Handler>,
    ) -> Result<Option<gym_core::transport::BoundListener>> {
        Ok(None)
    }
}

/// What calls to endpoints of a scheme, and by which transports.
#[derive(Clone, Debug)]
pub(crate) struct SchemeConnector {
    pub(crate) connector: Arc<dyn Connector>,
    pub(crate) transports: Vec<Transport>,
}

pub(crate) type Connectors = BTreeMap<&'static str, SchemeConnector>;

/// The transports of a scheme that this program may have been built without.
pub(super) fn transports_of(scheme: &str) -> &'static [Transport] {
    match scheme {
        "mem" => &[Transport::MEM],
        "ucx" => &[Transport::SHM, Transport::RDMA, Transport::UCX_TCP],
        "http" | "http+frames" | "unix+frames" => &[Transport::HTTP],
        _ => &[],
    }
}

/// Why a scheme has no connector here.
pub(super) fn missing(scheme: &str) -> String {
    let fix = match scheme {
        "ucx" if !cfg!(feature = "rdma") => ", which comes with the feature `rdma`",
        _ if scheme != "ucx" && !cfg!(feature = "http") => ", which comes with the feature `http`",
        _ => "",
    };
    format!("this program has no {scheme} transport{fix}")
}
