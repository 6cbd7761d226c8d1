//! Prometheus metrics of one process: requests by server and route, and resource usage.

mod collection;
mod own;
mod pools;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use gym_client::collect::CollectProgress;
use gym_client::metrics::{ProcessMetrics, open_metrics};
use gym_client::work::WorkPool;
use gym_core::observe::stall::{self, StalledHandler};
use gym_core::registry::AffinityCounts;
use gym_core::rollout::EpisodeRecord;
use gym_core::server::SessionCounts;
use gym_core::{Response, Status};
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tokio::time::Instant;

pub use gym_core::base::process::{process_cpu, resident_bytes};
pub use own::{OwnCounter, OwnGauge};

use crate::metrics::collection::CollectionMetrics;
use crate::metrics::pools::PoolMetrics;

/// The metrics of one process; `GET /metrics` of each of its servers prints them. Cheap to clone.
///
/// ```
/// use gym_server::metrics::Metrics;
///
/// // Of a stack: `stack.metrics()`.
/// let metrics = Metrics::new();
/// let documents = metrics.counter("shop_documents_read", "Documents that the shop has read");
/// let stock = metrics.gauge("shop_items_in_stock", "Items in stock");
/// documents.add(3);
/// stock.set(12.0);
/// assert!(metrics.text().contains("shop_documents_read_total 3"));
/// ```
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    requests: Family<RequestLabels, Counter>,
    seconds: Family<RouteLabels, Histogram>,
    in_flight: Family<RouteLabels, Gauge>,
    sessions: SessionMetrics,
    affinity: AffinityMetrics,
    pools: PoolMetrics,
    tool_errors: Family<ToolErrorLabels, Counter>,
    prefix_breaks: Family<ServerLabels, Counter>,
    unverified: Family<ServerLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ServerLabels {
    server: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    server: String,
    route: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    server: String,
    route: String,
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ToolErrorLabels {
    server: String,
    cause: &'static str,
}

impl Metrics {
    /// Creates empty metrics.
    #[must_use]
    pub fn new() -> Self {
        // From 50 µs, an in-memory hop, to 1.7 hours, an agent with many turns.
        let seconds =
            Family::new_with_constructor((|| Histogram::new(exponential_buckets(50e-6, 2.0, 28))) as fn() -> Histogram);
        let metrics = Self {
            registry: Arc::default(),
            requests: Family::default(),
            seconds,
            in_flight: Family::default(),
            sessions: SessionMetrics::default(),
            affinity: AffinityMetrics::default(),
            pools: PoolMetrics::default(),
            tool_errors: Family::default(),
            prefix_breaks: Family::default(),
            unverified: Family::default(),
        };
        metrics.with(|registry| {
            registry.register("gym_requests", "Responses by server, route and status class", metrics.requests.clone());
            registry.register("gym_request_seconds", "Time from the request to the response", metrics.seconds.clone());
            registry.register("gym_requests_in_flight", "Requests in flight", metrics.in_flight.clone());
            registry.register("gym_sessions_open", "Open sessions of environments", metrics.sessions.open.clone());
            let help = "Sessions of environments that were closed";
            registry.register("gym_sessions_closed", help, metrics.sessions.closed.clone());
            let help = "Sessions of environments that expired, or were dropped to make room";
            registry.register("gym_sessions_expired", help, metrics.sessions.expired.clone());
            let help = "Tool calls of completed episodes whose error went to the model, by agent and cause";
            registry.register("gym_tool_errors", help, metrics.tool_errors.clone());
            let help = "Turns of completed episodes whose prompt does not begin with the token ids of the turn before, by agent";
            registry.register("gym_prefix_breaks", help, metrics.prefix_breaks.clone());
            let help = "Completed episodes with a response that the engine may have aborted, by agent";
            registry.register("gym_completions_unverified", help, metrics.unverified.clone());
            registry.register_collector(Box::new(ProcessMetrics));
            metrics.pools.register(registry);
            registry.register_collector(Box::new(StallMetrics));
            registry.register_collector(Box::new(metrics.affinity.clone()));
        });
        metrics
    }

    /// Adds a counter of the program's own, from 0. It is printed as `NAME_total`. Use each name once.
    #[must_use]
    pub fn counter(&self, name: &str, help: &str) -> OwnCounter {
        let counter = OwnCounter::default();
        self.with(|registry| registry.register(name, help, counter.0.clone()));
        counter
    }

    /// Adds a gauge of the program's own, which is 0 until it is set. Use each name once.
    #[must_use]
    pub fn gauge(&self, name: &str, help: &str) -> OwnGauge {
        let gauge = OwnGauge::default();
        self.with(|registry| registry.register(name, help, gauge.0.clone()));
        gauge
    }

    /// Calls `register` with the registry.
    pub(crate) fn with<T>(&self, register: impl FnOnce(&mut Registry) -> T) -> T {
        register(&mut self.registry.lock())
    }

    /// Returns the metrics in the text format of OpenMetrics.
    #[must_use]
    pub fn text(&self) -> String {
        self.sessions.update();
        self.pools.update();
        self.with(|registry| open_metrics(registry))
    }

    /// Counts the sessions of a server from now on, if it has any. Each output of the metrics calls `counts`, until it returns
    /// `None` because the server has ended. A server whose first `counts` is `None` has no sessions, and gets no series.
    pub(crate) fn watch_sessions(
        &self,
        server: &str,
        counts: impl Fn() -> Option<SessionCounts> + Send + Sync + 'static,
    ) {
        if counts().is_none() {
            return;
        }
        let watched = WatchedSessions {
            labels: ServerLabels { server: server.to_owned() },
            counts: Box::new(counts),
            last: SessionCounts::default(),
        };
        self.sessions.lock().push(watched);
    }

    /// Adds choices by session affinity: each output of the metrics calls `counts`, which returns them by server. `among` is what is
    /// chosen: the replicas of a model server, or the endpoints that it calls.
    pub(crate) fn watch_affinity(
        &self,
        among: &'static str,
        counts: impl Fn() -> Vec<(String, AffinityCounts)> + Send + Sync + 'static,
    ) {
        self.affinity.lock().push((among, Box::new(counts)));
    }

    /// Shows the counters of a collection from now on ([`Driver::progress`](gym_client::collect::Driver::progress)), and its pool if workers
    /// take the rollouts from one. `rgym collect` does this.
    pub fn watch_collection(&self, progress: Arc<CollectProgress>, pool: Option<WorkPool>) {
        self.with(|registry| registry.register_collector(Box::new(CollectionMetrics(progress))));
        if let Some(pool) = pool {
            self.watch_pool("collector", pool);
        }
    }

    /// Shows the queue and the workers of a server's pool from now on.
    pub(crate) fn watch_pool(&self, server: &str, pool: WorkPool) {
        self.pools.watch(ServerLabels { server: server.to_owned() }, pool);
    }

    /// Returns the counters of what episodes of an agent report.
    #[must_use]
    pub(crate) fn episodes(&self, server: &str) -> EpisodeMetrics {
        let tool_errors =
            |cause| self.tool_errors.get_or_create(&ToolErrorLabels { server: server.to_owned(), cause }).clone();
        let labels = ServerLabels { server: server.to_owned() };
        EpisodeMetrics {
            of_model: tool_errors("model"),
            of_server: tool_errors("server"),
            prefix_breaks: self.prefix_breaks.get_or_create(&labels).clone(),
            unverified: self.unverified.get_or_create(&labels).clone(),
        }
    }

    /// Returns the counters of one route.
    #[must_use]
    pub(crate) fn route(&self, server: &str, route: &str) -> RouteMetrics {
        let labels = RouteLabels { server: server.to_owned(), route: route.to_owned() };
        let requests = ["2xx", "4xx", "5xx"].map(|status| {
            let RouteLabels { server, route } = labels.clone();
            self.requests.get_or_create(&RequestLabels { server, route, status }).clone()
        });
        RouteMetrics {
            requests,
            seconds: self.seconds.get_or_create(&labels).clone(),
            in_flight: self.in_flight.get_or_create(&labels).clone(),
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

/// The handlers that block or have blocked a thread of the process, read from the watchdog at each output.
#[derive(Debug)]
struct StallMetrics;

impl Collector for StallMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let labels = |handler: &StalledHandler| [("server", handler.server.clone()), ("route", handler.route.clone())];
        let totals = stall::totals();
        let help = "Times that a handler blocked a thread of the runtime for a second or longer";
        let mut family = encoder.encode_descriptor("gym_handler_stalls", help, None, MetricType::Counter)?;
        for (handler, count) in &totals {
            ConstCounter::new(*count).encode(family.encode_family(&labels(handler))?)?;
        }
        let help = "Time for which a handler has blocked a thread of the runtime until now";
        let seconds = Some(&Unit::Seconds);
        let mut family = encoder.encode_descriptor("gym_handler_stalled", help, seconds, MetricType::Gauge)?;
        for stall in stall::current() {
            let labels = [&labels(&stall.handler)[..], &[("thread", stall.thread.clone())]].concat();
            ConstGauge::new(stall.lasted.as_secs_f64()).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// The choices by session affinity, read at each output.
#[derive(Clone, Default)]
struct AffinityMetrics(Arc<Mutex<Vec<(&'static str, AffinitySource)>>>);

type AffinityCount = fn(&AffinityCounts) -> u64;

type AffinitySource = Box<dyn Fn() -> Vec<(String, AffinityCounts)> + Send + Sync>;

impl AffinityMetrics {
    fn lock(&self) -> MutexGuard<'_, Vec<(&'static str, AffinitySource)>> {
        self.0.lock()
    }
}

impl fmt::Debug for AffinityMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AffinityMetrics")
    }
}

impl Collector for AffinityMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut all: BTreeMap<(String, &'static str), AffinityCounts> = BTreeMap::new();
        for (among, counts) in &*self.lock() {
            for (server, counts) in counts() {
                all.entry((server, among)).or_default().add(&counts);
            }
        }
        let counters: [(&str, &str, AffinityCount); 4] = [
            ("hits", "Model calls sent to the replica of their session or prompt", |counts| counts.hits),
            ("sheds", "Model calls sent elsewhere because too many were in flight there", |counts| counts.sheds),
            ("lost", "Model calls sent elsewhere because the replica had failed", |counts| counts.lost),
            ("placed", "Model calls of unknown sessions and prompts", |counts| counts.placed),
        ];
        for (name, help, count) in counters {
            let name = format!("gym_model_affinity_{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
            for ((server, among), counts) in &all {
                let labels = [("server", server.as_str()), ("among", among)];
                ConstCounter::new(count(counts)).encode(family.encode_family(&labels)?)?;
            }
        }
        let help = "Most model calls in flight at one replica, relative to the mean, at the last choice";
        let mut family = encoder.encode_descriptor("gym_model_affinity_skew", help, None, MetricType::Gauge)?;
        for ((server, among), counts) in &all {
            let labels = [("server", server.as_str()), ("among", among)];
            ConstGauge::new(counts.skew).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// The sessions of the servers of a process. Tables count independently; each output adds the difference since the last output.
#[derive(Clone, Default)]
struct SessionMetrics {
    open: Family<ServerLabels, Gauge>,
    closed: Family<ServerLabels, Counter>,
    expired: Family<ServerLabels, Counter>,
    watched: Arc<Mutex<Vec<WatchedSessions>>>,
}

struct WatchedSessions {
    labels: ServerLabels,
    counts: Box<dyn Fn() -> Option<SessionCounts> + Send + Sync>,
    last: SessionCounts,
}

impl SessionMetrics {
    fn lock(&self) -> MutexGuard<'_, Vec<WatchedSessions>> {
        self.watched.lock()
    }

    fn update(&self) {
        self.lock().retain_mut(|watched| {
            let (labels, last, now) = (&watched.labels, watched.last, (watched.counts)());
            let mut ended = last;
            ended.open = 0;
            let counts = now.unwrap_or(ended);
            let difference = counts.open.cast_signed() - last.open.cast_signed();
            self.open.get_or_create(labels).inc_by(difference);
            self.closed.get_or_create(labels).inc_by(counts.closed - last.closed);
            self.expired.get_or_create(labels).inc_by(counts.expired - last.expired);
            watched.last = counts;
            now.is_some()
        });
    }
}

/// The counters of the episodes of one agent: tool errors, prefix breaks and unverified responses.
#[derive(Clone, Debug)]
pub(crate) struct EpisodeMetrics {
    of_model: Counter,
    of_server: Counter,
    prefix_breaks: Counter,
    unverified: Counter,
}

impl EpisodeMetrics {
    /// Adds an episode, as its metadata says. Only those with errors or with token ids pay for a parse.
    pub(crate) fn count(&self, metadata: &str) {
        if !["tool_errors", "prefix_breaks", "unverified"].iter().any(|key| metadata.contains(key)) {
            return;
        }
        let Some(record) = EpisodeRecord::from_text(metadata) else { return };
        self.of_server.inc_by(record.tool_failures.into());
        self.of_model.inc_by(record.tool_errors.saturating_sub(record.tool_failures).into());
        self.prefix_breaks.inc_by(record.prefix_breaks.unwrap_or(0).into());
        self.unverified.inc_by(record.completion_unverified.into());
    }
}

/// The counters of one route of one server.
#[derive(Clone, Debug)]
pub(crate) struct RouteMetrics {
    requests: [Counter; 3],
    seconds: Histogram,
    in_flight: Gauge,
}

impl RouteMetrics {
    /// Counts a request as in flight until the guard is finished or dropped.
    pub(crate) fn begin(&self) -> RouteGuard<'_> {
        self.in_flight.inc();
        RouteGuard { metrics: self, began: Instant::now() }
    }

    /// Returns the number of requests in flight.
    pub(crate) fn in_flight(&self) -> i64 {
        self.in_flight.get()
    }
}

/// One request in flight. If it is dropped without [`RouteGuard::finish`], its caller has disconnected.
#[derive(Debug)]
pub(crate) struct RouteGuard<'a> {
    metrics: &'a RouteMetrics,
    began: Instant,
}

impl RouteGuard<'_> {
    /// Returns the time at which the request arrived.
    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    pub(crate) fn finish(self, response: &Response) {
        let class = match response.status {
            Status(..400) => 0,
            Status(400..500) => 1,
            Status(_) => 2,
        };
        self.metrics.requests[class].inc();
        self.metrics.seconds.observe(self.began.elapsed().as_secs_f64());
    }
}

impl Drop for RouteGuard<'_> {
    fn drop(&mut self) {
        self.metrics.in_flight.dec();
    }
}
