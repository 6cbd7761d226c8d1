//! The connections to peers, as Prometheus metrics.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::transport::paths::{PathRecords, Paths};

/// Prometheus collector of the connections to peers, read at each scrape. By `transport`: connections opened
/// (`gym_transport_connections`) and transports rejected (`gym_transport_refusals`). By `peer`: its current connection
/// (`gym_transport_peer`, always 1, with `transport` and `lanes`).
pub struct PathMetrics(Weak<Mutex<PathRecords>>);

impl PathMetrics {
    pub(super) fn of(paths: &Paths) -> Self {
        Self(Arc::downgrade(&paths.0))
    }
}

impl fmt::Debug for PathMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PathMetrics")
    }
}

impl Collector for PathMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(records) = self.0.upgrade() else { return Ok(()) };
        let records = Paths(records);
        let records = records.lock();
        let help = "Connections opened";
        let mut family = encoder.encode_descriptor("gym_transport_connections", help, None, MetricType::Counter)?;
        for (transport, count) in &records.opened {
            ConstCounter::new(*count).encode(family.encode_family(&[("transport", *transport)])?)?;
        }
        let help = "Transports that were rejected when a peer was connected to";
        let mut family = encoder.encode_descriptor("gym_transport_refusals", help, None, MetricType::Counter)?;
        for (transport, count) in &records.refused {
            ConstCounter::new(*count).encode(family.encode_family(&[("transport", transport.as_str())])?)?;
        }
        let help = "How a peer is reached (always 1)";
        let mut family = encoder.encode_descriptor("gym_transport_peer", help, None, MetricType::Gauge)?;
        for (_, path) in records.peers.values() {
            let labels =
                [("peer", path.peer.as_str()), ("transport", path.transport_name()), ("lanes", path.lanes.as_str())];
            ConstGauge::new(1_u64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
