//! The page on metrics, from those of running servers and of a running worker group.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gym_client::Transports;
use gym_client::config::{ConfigLoader, Overrides};
use gym_client::registry::RemoteRegistry;
use gym_client::transport::UCX_METRICS;
use gym_client::work::WorkPullerOptions;
use gym_core::registry::{Heartbeat, MemberRegistry as _, MemberSpec, MemberState};
use gym_core::transport::InProcess;
use gym_core::{CallContext, Endpoint, Incarnation, World};
use gym_group::placement::ClusterSpec;
use gym_group::prelude::*;
use gym_group::{
    GPU_METRICS, GroupOptions, GroupRequest, InProcessRanks, NodeAgent, NodeOptions, VirtualCluster, WorkerKind,
    Workers,
};
use gym_server::{Stack, StackOptions};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::page::{Page, code, workspace};

/// Maximum wait for what must happen at once.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The labels of each metric. The name is that of the samples, except for the suffixes of a histogram.
const LABELS: [(&str, &[&str]); 71] = [
    ("gym_cluster_round_trip_seconds", &[]),
    ("gym_cluster_worker_round_trip_seconds", &["worker"]),
    ("gym_cluster_workers", &["state"]),
    ("gym_cluster_workers_expected", &[]),
    ("gym_collect_attempts_total", &["class"]),
    ("gym_collect_done", &[]),
    ("gym_collect_in_flight", &[]),
    ("gym_collect_mean_reward", &["agent"]),
    ("gym_collect_oldest_seconds", &[]),
    ("gym_collect_requested", &[]),
    ("gym_collect_rollouts_total", &["outcome"]),
    ("gym_collective_aborts_total", RANK),
    ("gym_collective_moved_bytes_total", COLLECTIVE),
    ("gym_collective_operations_total", COLLECTIVE),
    ("gym_collective_time_seconds_total", COLLECTIVE),
    ("gym_collective_waiting_seconds", RANK),
    ("gym_completions_unverified_total", &["server"]),
    ("gym_gpu_memory_capacity_bytes", GPU),
    ("gym_gpu_memory_used_bytes", GPU),
    ("gym_gpu_utilization_ratio", GPU),
    ("gym_handler_stalled_seconds", &["server", "route", "thread"]),
    ("gym_handler_stalls_total", &["server", "route"]),
    ("gym_model_affinity_hits_total", &["server", "among"]),
    ("gym_model_affinity_lost_total", &["server", "among"]),
    ("gym_model_affinity_placed_total", &["server", "among"]),
    ("gym_model_affinity_sheds_total", &["server", "among"]),
    ("gym_model_affinity_skew", &["server", "among"]),
    ("gym_node_controllers", &[]),
    ("gym_node_cpus", &[]),
    ("gym_node_cpus_free", &[]),
    ("gym_node_gpus", &[]),
    ("gym_node_gpus_free", &[]),
    ("gym_pool_held", &["server"]),
    ("gym_pool_late_responses_total", &["server"]),
    ("gym_pool_waiting", &["server"]),
    ("gym_pool_weight", &["server", "of"]),
    ("gym_pool_worker_capacity", &["server", "worker"]),
    ("gym_pool_worker_finished_total", &["server", "worker"]),
    ("gym_pool_worker_held", &["server", "worker"]),
    ("gym_pool_workers", &["server"]),
    ("gym_pool_workers_lost_total", &["server"]),
    ("gym_prefix_breaks_total", &["server"]),
    ("gym_registered_servers", &[]),
    ("gym_request_seconds", &["server", "route"]),
    ("gym_requests_in_flight", &["server", "route"]),
    ("gym_requests_total", &["server", "route", "status"]),
    ("gym_sessions_closed_total", &["server"]),
    ("gym_sessions_expired_total", &["server"]),
    ("gym_sessions_open", &["server"]),
    ("gym_tool_errors_total", &["server", "cause"]),
    ("gym_transport_connections_total", &["transport"]),
    ("gym_transport_peer", &["peer", "transport", "lanes"]),
    ("gym_transport_refusals_total", &["transport"]),
    ("gym_ucx_bytes_total", UCX_METRICS[1].labels),
    ("gym_ucx_parcels_total", UCX_METRICS[2].labels),
    ("gym_ucx_round_trips_total", UCX_METRICS[3].labels),
    ("gym_ucx_unregistered_bytes_total", UCX_METRICS[4].labels),
    ("gym_ucx_wakeups_total", UCX_METRICS[0].labels),
    ("gym_worker_cpu_cores", RANK),
    ("gym_worker_gpu_memory_bytes", RANK),
    ("gym_worker_heartbeat_age_seconds", RANK),
    ("gym_worker_incarnation", RANK),
    ("gym_worker_memory_high", RANK),
    ("gym_worker_path", &["group", "rank", "scheme", "lanes"]),
    ("gym_worker_resident_memory_bytes", RANK),
    ("gym_worker_resident_memory_peak_bytes", RANK),
    ("gym_worker_restarts", RANK),
    ("gym_worker_stuck", RANK),
    ("gym_worker_up", RANK),
    ("process_cpu_seconds_total", &[]),
    ("process_resident_memory_bytes", &[]),
];

const RANK: &[&str] = &["group", "rank"];
const COLLECTIVE: &[&str] = &["group", "rank", "operation", "path"];
const GPU: &[&str] = &["gpu", "uuid"];

/// Metrics without a sample in the test, and the reason. Their type and description are in the output all the same.
const WITHOUT_SAMPLES: [(&str, &str); 18] = [
    ("gym_collect_mean_reward", "the collection has no rollout"),
    ("gym_collective_aborts_total", NO_COLLECTIVES),
    ("gym_collective_moved_bytes_total", NO_COLLECTIVES),
    ("gym_collective_operations_total", NO_COLLECTIVES),
    ("gym_collective_time_seconds_total", NO_COLLECTIVES),
    ("gym_collective_waiting_seconds", NO_COLLECTIVES),
    ("gym_handler_stalled_seconds", "no handler blocks a thread"),
    ("gym_handler_stalls_total", "no handler blocks a thread"),
    ("gym_model_affinity_hits_total", ONE_MODEL),
    ("gym_model_affinity_lost_total", ONE_MODEL),
    ("gym_model_affinity_placed_total", ONE_MODEL),
    ("gym_model_affinity_sheds_total", ONE_MODEL),
    ("gym_model_affinity_skew", ONE_MODEL),
    ("gym_transport_refusals_total", "the preferred transport is the first that is tried"),
    ("gym_worker_cpu_cores", NO_PROCESS),
    ("gym_worker_gpu_memory_bytes", NO_PROCESS),
    ("gym_worker_resident_memory_bytes", NO_PROCESS),
    ("gym_worker_resident_memory_peak_bytes", NO_PROCESS),
];

const ONE_MODEL: &str = "the model of the test has one replica";
const NO_COLLECTIVES: &str = "the ranks of the test call no collective operation";
const NO_PROCESS: &str = "the ranks of the test are in its own process";

/// A metric of the output.
#[derive(Clone, Debug, Default)]
struct Metric {
    kind: String,
    help: String,
    /// The labels of its samples; `None` without a sample.
    labels: Option<BTreeSet<String>>,
}

/// Parses the text format of OpenMetrics.
fn parse(text: &str) -> BTreeMap<String, Metric> {
    let mut found: BTreeMap<String, Metric> = BTreeMap::new();
    let mut family = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            found.entry(name.to_owned()).or_default().help = help.trim_end_matches('.').to_owned();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            name.clone_into(&mut family);
            found.entry(name.to_owned()).or_default().kind = kind.to_owned();
        } else if !line.starts_with('#') {
            assert!(line.starts_with(family.as_str()), "{line} is no sample of {family}");
            let labels = line.split_once('{').map_or("", |(_, rest)| rest.split_once('}').unwrap().0);
            let names = labels.split("\",").filter_map(|label| label.split_once('=')).map(|(name, _)| name.to_owned());
            let names = names.filter(|name| name != "le");
            found.get_mut(&family).unwrap().labels.get_or_insert_default().extend(names);
        }
    }
    let named = |(name, metric): (String, Metric)| match metric.kind.as_str() {
        "counter" => (format!("{name}_total"), metric),
        _ => (name, metric),
    };
    found.into_iter().map(named).collect()
}

/// Returns what `GET /metrics` of a head server prints after rollouts in all environments of the quickstart.
async fn of_servers() -> String {
    let examples = workspace().join("examples");
    // The rollouts of one agent are taken from a pool.
    let block = "+a_pool.environment_servers.pool";
    let pool = [
        format!("{block}.entrypoint=app.py"),
        format!("{block}.agent_server.type=responses_api_agents"),
        format!("{block}.agent_server.name=math_simple_agent"),
        format!("{block}.weights.math_simple_agent=2"),
        "+head_server.port=0".to_owned(),
    ];
    let overrides = Overrides::parse(&pool).unwrap();
    let file = examples.join("configs/quickstart.yaml").display().to_string();
    let config = ConfigLoader::new(&examples).environment(|_| None).load(&[file], &overrides).unwrap();
    let servers = gym_examples::servers::servers();
    let mut options = StackOptions::default();
    options.expected_workers = 1;
    let stack = Stack::start(config, &servers, &World::real(), options).await.unwrap();
    stack.metrics().watch_collection(Arc::default(), None);
    let registry = stack.client().registry().clone();
    let worker = stack.take_work(registry, WorkPullerOptions::of_this_process(&World::real()));
    for environment in gym_examples::tasks::ENVIRONMENTS {
        let rows = gym_examples::tasks::rows(environment).unwrap().into_iter().take(24);
        let agent = format!("{environment}_simple_agent");
        let mut rollouts = stack.rollouts(&agent, rows).unwrap();
        while let Some(rollout) = rollouts.next().await {
            rollout.unwrap();
        }
    }
    let head = stack.servers().iter().find(|row| row.kind == "head_server").unwrap().url.clone();
    let address = head.trim_start_matches("http://").trim_end_matches('/').to_owned();
    joins(&head).await;
    let body = scraped(&address).await;
    worker.drain(WAIT_TIMEOUT).await;
    stack.stop().await;
    body
}

/// Joins a head server and reports a round trip, as a worker does.
async fn joins(head: &str) {
    let transports = Transports::from_features(InProcess::new());
    let head = RemoteRegistry::new(Endpoint::parse(head).unwrap(), transports, World::real());
    let cx = CallContext::within(WAIT_TIMEOUT);
    let lease = head.join(&cx, MemberSpec::new("worker-1", Incarnation(1))).await.unwrap().lease;
    let known = MemberState::Joining;
    let heartbeat = Heartbeat { lease, seq: 1, healthy: true, draining: false, round_trip_us: Some(300), known };
    assert_eq!(head.heartbeat(&cx, &heartbeat).await.unwrap().state, MemberState::Serving);
}

/// Returns what `GET /metrics` prints for a scraper of OpenMetrics.
async fn scraped(address: &str) -> String {
    let mut connection = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!(
        "GET /metrics HTTP/1.1\r\nhost: {address}\r\naccept: application/openmetrics-text\r\nconnection: close\r\n\r\n"
    );
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    connection.read_to_string(&mut response).await.unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    body.to_owned()
}

struct Idle;
worker! {
    impl Worker for Idle as idle {
        fn start(_: WorkerEnv, (): ()) -> Result<Self> { Ok(Self) }
        /// Returns the number of the call.
        exclusive async fn count(&mut self, _: &CallContext, call: Payload<u32>) -> Result<Payload<u32>> {
            Ok((call.value + 1).into())
        }
    }
}

/// Returns what the agent of a node prints.
async fn of_node() -> String {
    Workers::new().enter();
    let agent = NodeAgent::listen(Workers::new(), NodeOptions::new("secret")).await.unwrap();
    let http = agent.endpoints().iter().find(|endpoint| endpoint.scheme() == "http").unwrap();
    let text = scraped(http.address()).await;
    agent.stop(Duration::ZERO).await;
    text
}

/// Returns the metrics of a worker group in this process.
async fn of_group() -> String {
    let network = InProcess::new();
    let mut spec = ClusterSpec::new([2]);
    spec.use_gpus = false;
    let ranks = InProcessRanks::new(Workers::new().with("idle", WorkerKind::of::<Idle>()), network.clone());
    let cluster = VirtualCluster::new(spec, ranks).unwrap().simulate_nodes(&[2]);
    let options = GroupOptions::new(Transports::from_features(network));
    let request = GroupRequest::new("policy", "idle", &(), options).unwrap();
    let group = cluster.start(&CallContext::within(WAIT_TIMEOUT), request).await.unwrap();
    let counted = group.call(idle::count, 1).deadline(WAIT_TIMEOUT).await.unwrap().into_values();
    assert_eq!(counted, [2, 2]);
    let mut registry = Registry::default();
    registry.register_collector(Box::new(group.metrics()));
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    cluster.shutdown(WAIT_TIMEOUT).await.unwrap();
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_on_metrics_is_the_generated_one() {
    let (servers, node, group) = (parse(&of_servers().await), parse(&of_node().await), parse(&of_group().await));
    // Of the process and of its GPUs; those of the servers' page are the same.
    let node: BTreeMap<String, Metric> = node.into_iter().filter(|(name, _)| name.starts_with("gym_node_")).collect();
    let gpu: BTreeMap<String, Metric> = GPU_METRICS
        .iter()
        .map(|(name, help)| {
            let labels = Some(GPU.iter().map(|label| (*label).to_owned()).collect());
            ((*name).to_owned(), Metric { kind: "gauge".to_owned(), help: (*help).to_owned(), labels })
        })
        .collect();
    // UCX is loaded only where it is installed and a configuration names it.
    let ucx: BTreeMap<String, Metric> = UCX_METRICS
        .iter()
        .map(|metric| {
            let labels = Some(metric.labels.iter().map(|label| (*label).to_owned()).collect());
            (
                format!("{}_total", metric.name),
                Metric { kind: "counter".to_owned(), help: metric.help.to_owned(), labels },
            )
        })
        .collect();
    let labels: BTreeMap<&str, &[&str]> = LABELS.into_iter().collect();
    let found: BTreeSet<&str> =
        [&servers, &node, &gpu, &group, &ucx].into_iter().flat_map(|part| part.keys().map(String::as_str)).collect();
    assert_eq!(found, labels.keys().copied().collect(), "the metrics in the output, and those of the table LABELS");
    for (name, metric) in servers.iter().chain(&node).chain(&gpu).chain(&group).chain(&ucx) {
        assert!(!metric.help.is_empty() && !metric.kind.is_empty(), "{name}: {metric:?}");
        let known: BTreeSet<String> = labels[name.as_str()].iter().map(|label| (*label).to_owned()).collect();
        match &metric.labels {
            Some(found) => assert_eq!(*found, known, "the labels of {name}"),
            // Not the other way round: on a busy machine, a handler can block its thread.
            None => assert!(WITHOUT_SAMPLES.iter().any(|(without, _)| without == name), "{name} has no sample"),
        }
    }
    let mut page = Page::new(
        "metrics.md",
        "Metrics",
        "Prometheus metrics; [monitoring.md](../monitoring.md) has rules and a dashboard. `GET /metrics` of each server prints those of \
         its process, in the format of OpenMetrics if the request accepts it and otherwise in that of Prometheus; a program \
         adds its own with `stack.metrics().counter(name, help)` or `gauge(name, help)`. The samples of a histogram have the suffixes `_bucket`, `_sum` and \
         `_count`. A metric without a sample is left out until it has one.",
    );
    let row = |(name, metric): (&String, &Metric)| {
        let labels = labels[name.as_str()].iter().map(|label| code(label)).collect::<Vec<_>>().join(", ");
        [code(name), metric.kind.clone(), labels, metric.help.clone()]
    };
    let head = ["metric", "type", "labels", "meaning"];
    page.section(
        "Servers",
        "`gym_registered_servers` and `gym_cluster_…` are metrics of the head server only. `gym_collect_…` are those of a collector, or of a \
         program that calls `stack.metrics().watch_collection(…)`.",
    );
    page.table(head, servers.iter().map(row));
    page.section(
        "GPUs",
        "Of `rgym run` with the feature `ray`, and of node agents, on machines with GPUs and `nvidia-smi`.",
    );
    page.table(head, gpu.iter().map(row));
    page.section("Nodes", "The agent of a node has these metrics, those of its process and those of its GPUs.");
    page.table(head, node.iter().map(row));
    page.section(
        "UCX",
        "A process has these metrics once it has loaded UCX. The values of a peer cover its open connections.",
    );
    page.table(head, ucx.iter().map(row));
    page.section(
        "Worker groups",
        "A program registers the collector `group.metrics()`. A value that is not known is left out, such as the memory of ranks that \
         run in the program itself.",
    );
    page.table(head, group.iter().map(row));
    page.finish();
}
