//! The report of the head server to Prometheus: the state of the cluster, and the processes that have metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gym_client::work::COLLECTOR_POOL;
use gym_core::Endpoint;
use gym_core::registry::{Heartbeat, Instance, Member, MemberState};
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
#[cfg(feature = "http")]
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use serde::Serialize;

/// From 100 µs, the same rack, to 13 s, more than a heartbeat may be late.
const ROUND_TRIP_BUCKETS: (f64, f64, u16) = (100e-6, 2.0, 18);

/// Names of workers between two outputs of the metrics: the most members that a head server has.
const NAMES_MAX: usize = 4_096;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MemberLabels {
    worker: String,
}

/// The workers of a cluster by state, and the time that a request between them and the head server takes.
#[derive(Clone)]
pub(super) struct ClusterMetrics {
    servers: Gauge,
    workers: Family<StateLabels, Gauge>,
    round_trips: Histogram,
    round_trip: Family<MemberLabels, Gauge<f64, std::sync::atomic::AtomicU64>>,
    /// The last round trip of each worker, in microseconds.
    last: Arc<Mutex<BTreeMap<String, u64>>>,
}

impl Default for ClusterMetrics {
    fn default() -> Self {
        let (first, factor, count) = ROUND_TRIP_BUCKETS;
        Self {
            servers: Gauge::default(),
            workers: Family::default(),
            round_trips: Histogram::new(exponential_buckets(first, factor, count)),
            round_trip: Family::default(),
            last: Arc::default(),
        }
    }
}

impl ClusterMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("gym_registered_servers", "Servers with a live lease", self.servers.clone());
        registry.register("gym_cluster_workers", "Workers and nodes of the cluster by state", self.workers.clone());
        let help = "Time of a request between a worker and the head server and back, measured at each heartbeat";
        registry.register_with_unit("gym_cluster_round_trip", help, Unit::Seconds, self.round_trips.clone());
        let help = "Last measured time of a request between the worker and the head server and back";
        registry.register_with_unit("gym_cluster_worker_round_trip", help, Unit::Seconds, self.round_trip.clone());
    }

    /// Adds the number of workers that the head server was started to expect (`--expected-workers`).
    #[cfg(feature = "http")]
    pub(super) fn register_expected(registry: &mut Registry, workers: usize) {
        let help = "Workers that the head server was started to expect; without a value if it was not told";
        let workers = ConstGauge::new(i64::try_from(workers).unwrap_or(i64::MAX));
        registry.register("gym_cluster_workers_expected", help, workers);
    }

    /// Notes what a heartbeat tells. One of an unknown member changes no series: [`ClusterMetrics::update`] reads the members.
    pub(super) fn heard(&self, heartbeat: &Heartbeat) {
        if let Some(micros) = heartbeat.round_trip_us {
            #[expect(clippy::cast_precision_loss, reason = "seconds as a float")]
            self.round_trips.observe(micros as f64 / 1e6);
            let mut last = self.last.lock();
            if last.len() < NAMES_MAX || last.contains_key(&heartbeat.lease.name) {
                last.insert(heartbeat.lease.name.clone(), micros);
            }
        }
    }

    /// Reads the cluster, before the metrics are written.
    pub(super) fn update(&self, servers: usize, members: &[Member]) {
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.servers.set(count(servers));
        let states = [
            MemberState::Joining,
            MemberState::Serving,
            MemberState::Suspect,
            MemberState::Draining,
            MemberState::Gone,
        ];
        for state in states {
            let workers = members.iter().filter(|member| member.state == state).count();
            self.workers.get_or_create(&StateLabels { state: state.as_str() }).set(count(workers));
        }
        let present = || members.iter().filter(|member| member.state != MemberState::Gone);
        let mut last = self.last.lock();
        let names: BTreeSet<&str> = present().map(|member| member.spec.name.as_str()).collect();
        last.retain(|name, _| names.contains(name.as_str()));
        self.round_trip.clear();
        for (worker, micros) in &*last {
            #[expect(clippy::cast_precision_loss, reason = "seconds as a float")]
            self.round_trip.get_or_create(&MemberLabels { worker: worker.clone() }).set(*micros as f64 / 1e6);
        }
    }
}

/// One entry of Prometheus' HTTP service discovery.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct TargetGroup {
    targets: [String; 1],
    labels: BTreeMap<&'static str, String>,
}

/// Lists one address for each process with metrics, as other machines reach it. The servers of a process print the same metrics; servers
/// in Python print none. The head server itself is not listed: whoever asks knows it.
pub(super) fn targets(members: &[Member], servers: &[Instance]) -> Vec<TargetGroup> {
    let mut found = BTreeMap::new();
    let present = members.iter().filter(|member| member.state != MemberState::Gone);
    for Member { spec, .. } in present {
        let servers = spec.servers.iter().filter(|server| is_native(&server.labels));
        let endpoints = servers.flat_map(|server| &server.endpoints);
        let address = endpoints.chain(spec.node.iter().flat_map(|node| &node.endpoints)).find_map(http);
        if let Some(address) = address {
            found.insert(format!("member {}", spec.name), (address, "worker", spec.name.clone()));
        }
    }
    for server in servers.iter().filter(|server| server.member.is_none() && is_native(&server.labels)) {
        let Some(address) = server.endpoints.iter().find_map(http) else { continue };
        let host = address.rsplit_once(':').map_or("", |(host, _)| host);
        let process = server.labels.get("pid").map_or_else(|| address.clone(), |pid| format!("{host} {pid}"));
        let role = if server.implementation == COLLECTOR_POOL { "collector" } else { "server" };
        found.entry(format!("process {process}")).or_insert_with(|| (address, role, server.name.clone()));
    }
    let group = |(address, role, name): (String, &str, String)| TargetGroup {
        targets: [address],
        labels: BTreeMap::from([("role", role.to_owned()), ("process", name)]),
    };
    found.into_values().map(group).collect()
}

fn is_native<V>(labels: &BTreeMap<String, V>) -> bool {
    !labels.contains_key("entrypoint")
}

fn http(endpoint: &Endpoint) -> Option<String> {
    (endpoint.scheme() == "http").then(|| endpoint.address().to_owned())
}
