//! Connectors by scheme, and the transports that each of them serves.

use std::collections::BTreeMap;
use std::sync::Arc;

use gym_core::transport::{Backend, Connector, ListenOptions, Transport};
use gym_core::{Handler, Result};

use crate::transport::{HTTP, RDMA, SHM, UCX_TCP};

/// A backend that connects but does not listen.
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

/// The connector of a scheme, and its transports.
#[derive(Clone, Debug)]
pub(crate) struct SchemeConnector {
    pub(crate) connector: Arc<dyn Connector>,
    pub(crate) transports: Vec<Transport>,
}

pub(crate) type Connectors = BTreeMap<&'static str, SchemeConnector>;

/// Returns the transports of a scheme, even if this program was built without the scheme.
pub(super) fn transports_of(scheme: &str) -> &'static [Transport] {
    match scheme {
        "mem" => &[Transport::MEM],
        "ucx" => &[SHM, RDMA, UCX_TCP],
        "http" | "http+frames" | "unix+frames" => &[HTTP],
        _ => &[],
    }
}

/// Returns the reason why this program has no connector for a scheme.
pub(super) fn missing(scheme: &str) -> String {
    let fix = match scheme {
        "ucx" if !cfg!(feature = "rdma") => ", which comes with the feature `rdma`",
        _ if scheme != "ucx" && !cfg!(feature = "http") => ", which comes with the feature `http`",
        _ => "",
    };
    format!("this program has no {scheme} transport{fix}")
}
