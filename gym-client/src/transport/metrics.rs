//! The connections to peers, as Prometheus metrics.

use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::transport::paths::{PathRecords, Paths};

/// A metric of UCX. All of them are counters.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct UcxMetric {
    /// The name, without the suffix `_total`.
    pub name: &'static str,
    /// The description.
    pub help: &'static str,
    /// The labels.
    pub labels: &'static [&'static str],
}

/// The metrics of UCX, which a process has once it has loaded UCX.
pub const UCX_METRICS: [UcxMetric; 5] = [
    UcxMetric {
        name: "gym_ucx_wakeups",
        help: "Ends of the progress thread's waits by source (event, command or tick), and rounds without a wait (busy)",
        labels: &["source"],
    },
    UcxMetric {
        name: "gym_ucx_bytes",
        help: "Bytes of payloads by peer and direction (sent or received)",
        labels: &["peer", "direction"],
    },
    UcxMetric {
        name: "gym_ucx_parcels",
        help: "Active messages by peer and way: sent, or received as eager or by rendezvous",
        labels: &["peer", "way"],
    },
    UcxMetric {
        name: "gym_ucx_round_trips",
        help: "Heartbeats that returned within below_us microseconds, by peer",
        labels: &["peer", "below_us"],
    },
    UcxMetric {
        name: "gym_ucx_unregistered_bytes",
        help: "Bytes of payloads outside of the registered memory",
        labels: &[],
    },
];

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
        let help = "Connections opened, by transport";
        let mut family = encoder.encode_descriptor("gym_transport_connections", help, None, MetricType::Counter)?;
        for (transport, count) in &records.opened {
            ConstCounter::new(*count).encode(family.encode_family(&[("transport", *transport)])?)?;
        }
        let help = "Preferred transports that were rejected when a peer was connected to, by transport";
        let mut family = encoder.encode_descriptor("gym_transport_refusals", help, None, MetricType::Counter)?;
        for (transport, count) in &records.refused {
            ConstCounter::new(*count).encode(family.encode_family(&[("transport", transport.as_str())])?)?;
        }
        let help = "Current connection to a peer (always 1); lanes are those of UCX";
        let mut family = encoder.encode_descriptor("gym_transport_peer", help, None, MetricType::Gauge)?;
        for (_, path) in records.peers.values() {
            let labels =
                [("peer", path.peer.as_str()), ("transport", path.transport_name()), ("lanes", path.lanes.as_str())];
            ConstGauge::new(1_u64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
