//! The activity of UCX in this process, as Prometheus metrics.

use std::collections::BTreeMap;
use std::fmt;

use gym_transport_rdma::Ucx;
use gym_transport_rdma::transport::{ConnectionReport, UcxStats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;

use crate::transport::metrics::UCX_METRICS;

/// Prometheus collector of UCX, read at each scrape.
///
/// [`UCX_METRICS`] describes the metrics.
/// The values of a peer cover its open connections.
pub struct UcxMetrics(Option<Ucx>);

impl UcxMetrics {
    pub(in crate::transport) fn of(ucx: Option<Ucx>) -> Self {
        Self(ucx)
    }
}

impl fmt::Debug for UcxMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UcxMetrics")
    }
}

/// One series of a family: its label values and its count.
type Series = (Vec<(&'static str, String)>, u64);

impl Collector for UcxMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Some(stats) = self.0.as_ref().and_then(Ucx::stats) else { return Ok(()) };
        for (name, help, series) in families(&stats) {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (labels, count) in series {
                ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

fn families(stats: &UcxStats) -> [(&'static str, &'static str, Vec<Series>); 5] {
    let fabric = &stats.fabric;
    let wakeups = [
        ("event", fabric.woken_by_event),
        ("command", fabric.woken_by_command),
        ("tick", fabric.woken_by_tick),
        ("busy", fabric.rounds_busy),
    ];
    let wakeups = wakeups.map(|(source, count)| (vec![("source", source.to_owned())], count)).to_vec();
    let by_peer = |label: &'static str, read: &dyn Fn(&ConnectionReport) -> Vec<(String, u64)>| {
        // A peer has two connections if heartbeats have a separate one.
        let mut sums: BTreeMap<(String, String), u64> = BTreeMap::new();
        for connection in &stats.connections {
            for (value, count) in read(connection) {
                *sums.entry((connection.peer.to_string(), value)).or_default() += count;
            }
        }
        let series = sums.into_iter();
        series.map(|((peer, value), count)| (vec![("peer", peer), (label, value)], count)).collect::<Vec<Series>>()
    };
    let bytes = by_peer("direction", &|connection| {
        let messages = &connection.messages;
        vec![("sent".to_owned(), messages.bytes_sent), ("received".to_owned(), messages.bytes_received)]
    });
    let parcels = by_peer("way", &|connection| {
        let messages = &connection.messages;
        let ways = [
            ("sent", messages.messages_sent),
            ("eager", messages.eager_received),
            ("rendezvous", messages.rendezvous_received),
        ];
        ways.map(|(way, count)| (way.to_owned(), count)).to_vec()
    });
    let round_trips = by_peer("below_us", &|connection| {
        let mut below = 0;
        let buckets = connection.round_trips.buckets().map(|(bound, count)| {
            below += count;
            let bound =
                if bound == std::time::Duration::MAX { "inf".to_owned() } else { bound.as_micros().to_string() };
            (bound, below)
        });
        buckets.collect()
    });
    let unregistered = vec![(Vec::new(), fabric.bytes_unregistered)];
    let mut series = [wakeups, bytes, parcels, round_trips, unregistered].into_iter();
    UCX_METRICS.map(|metric| (metric.name, metric.help, series.next().unwrap_or_default()))
}
