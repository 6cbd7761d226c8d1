//! UCX as one of this program's backends.

pub(super) mod metrics;

use std::sync::Arc;

use gym_transport_http::http1::HttpConnector;
use gym_transport_rdma::{Ucx, UcxBackend, UcxConfig};

use crate::transport::inquiry;

/// Returns a backend that loads UCX when it is first used.
pub(super) fn backend() -> UcxBackend {
    let backend = UcxBackend::new(Arc::new(HttpConnector::default()), Ucx::new(UcxConfig::default()));
    backend.reported_by(|within| Box::pin(inquiry::ucx_report(within)))
}

/// Returns the reason why this host cannot use RDMA, as far as its files show.
pub(super) async fn rdma_fault() -> Option<String> {
    let look = || gym_transport_rdma::probe::ProbeOptions::new().without_loading().probe();
    let probe = tokio::task::spawn_blocking(look).await.ok()?;
    probe.rdma_fault().map(|fault| match &fault.fix {
        Some(fix) => format!("for rdma, here: {}: {fix}", fault.found),
        None => format!("for rdma, here: {}", fault.found),
    })
}
