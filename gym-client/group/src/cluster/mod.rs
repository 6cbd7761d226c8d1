//! Virtual clusters: bundles on nodes, and the groups that run on them.
//!
//! ```no_run
//! # use gym_core::{CallContext, Result, transport::InProcess};
//! # use gym_client::Transports; use gym_group::{GroupOptions, GroupRequest, Local, VirtualCluster, Workers, placement::ClusterSpec};
//! # async fn example(workers: Workers) -> Result<()> {
//! let cluster = VirtualCluster::new(ClusterSpec::new([4, 8, 2]), Local::new(workers))?.simulate_nodes(&[4, 8, 2]);
//! let options = GroupOptions::new(Transports::from_features(InProcess::new()));
//! let request = GroupRequest::new("policy", "policy_worker", &"/models/tiny", options)?;
//! let policy = cluster.start(&CallContext::default(), request).await?;
//! # Ok(()) }
//! ```

mod file;
mod turn;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::stream::BoxStream;
use gym_core::group::batch::json;
use gym_core::{CallContext, Error, Result};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::Gate;
use crate::placement::{
    ClusterSpec, ModelSpan, NodeResources, Placement, WorkerGroupConfig, WorkerPlacement, WorkersOn, engine_port,
};
use crate::provision::{
    DEFAULT_START_TIMEOUT, LaunchSpec, NodeEvent, NodeStatus, Provisioner, RankPlace, Reservation, ReserveRequest,
    Variables, count_local,
};
use crate::supervise::{ClusterBinding, ClusterGroups, Group, GroupOptions};
use crate::usage::node::{NodeMonitor, NodeUsage};

pub use file::ClusterFile;
use turn::{BundleTurns, TurnGate};

/// A set of bundles on nodes. They are reserved on first use.
///
/// No other cluster of the machine, and no node agent, gets their GPUs before [`shutdown`](VirtualCluster::shutdown), or before the cluster and its groups
/// are dropped, unless both set [`share_gpus`](ClusterSpec::share_gpus). That holds for all programs of this SDK with the same temporary folder (`TMPDIR`),
/// of all users. Processes in containers with a folder of their own do not see each other. A GPU is the same whether `CUDA_VISIBLE_DEVICES` names it by index or
/// identifier; an index is that of the order of bus addresses, and a MIG device is divided by its own name only. CPUs are counted for each cluster by itself.
///
/// ```
/// use std::time::Duration;
///
/// use gym_core::transport::InProcess;
/// use gym_group::placement::ClusterSpec;
/// use gym_group::prelude::*;
/// use gym_group::{GroupOptions, GroupRequest, InProcessRanks, VirtualCluster, WorkerKind, Workers};
/// # struct Counter(u64);
/// # worker! {
/// #     impl Worker for Counter as counter {
/// #         fn start(_: WorkerEnv, from: u64) -> Result<Self> { Ok(Self(from)) }
/// #         exclusive async fn add(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
/// #             self.0 += call.value;
/// #             Ok(self.0.into())
/// #         }
/// #     }
/// # }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let network = InProcess::new();
/// let workers = Workers::new().with("counter", WorkerKind::of::<Counter>());
/// let ranks = InProcessRanks::new(workers, network.clone());
/// let cluster = VirtualCluster::new(ClusterSpec::new([2, 2]), ranks)?.simulate_nodes(&[2, 2]);
/// let request = GroupRequest::new("counters", "counter", &10, GroupOptions::new(network.into()))?;
/// let counters = cluster.start(&CallContext::default(), request).await?;
/// assert_eq!(counters.call(counter::add, 5).await?.into_values(), [15; 4]);
/// cluster.shutdown(Duration::from_secs(1)).await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct VirtualCluster {
    spec: ClusterSpec,
    provisioner: Box<dyn Provisioner>,
    /// The simulated nodes, if the cluster is simulated.
    simulated: Option<Vec<NodeResources>>,
    unified: bool,
    turns: BundleTurns,
    groups: Arc<ClusterGroups>,
    reserved: tokio::sync::Mutex<Option<Arc<dyn Reservation>>>,
    /// Runs from the start of the first group, if `monitor_memory` is set.
    monitor: Mutex<Option<Arc<NodeMonitor>>>,
}

/// A request to start a worker group on a cluster.
///
/// ```
/// use gym_client::Transports;
/// use gym_group::placement::WorkersOn;
/// use gym_group::{GroupOptions, GroupRequest};
///
/// let options = GroupOptions::new(Transports::standard());
/// let mut request = GroupRequest::new("policy", "policy_worker", &"/models/tiny", options)?;
/// // Two models, each of two tied ranks on the first node.
/// request.on = WorkersOn::Tied(vec![(0, vec![0, 1]), (0, vec![2, 3])]);
/// assert_eq!(request.init.get(), r#""/models/tiny""#);
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupRequest {
    /// Name of the group.
    pub name: String,
    /// Name under which the worker type is registered.
    pub worker: String,
    /// Value from which each worker is created, as JSON. [`json::to_raw`] also writes numbers that are not finite.
    pub init: Box<RawValue>,
    /// Assignment of workers to bundles. Default: one worker on each bundle.
    pub on: WorkersOn,
    /// Memory limit, restarts and transport from a configuration. Its keys take precedence over `options`. Default: none.
    pub config: Option<WorkerGroupConfig>,
    /// Transports, heartbeats and restarts of the group.
    pub options: GroupOptions,
    /// Environment variables of the group. Default: none.
    pub variables: Variables,
    /// Limit for a rank's start, until it accepts calls. Default: 600 s.
    pub start_timeout: Duration,
}

impl GroupRequest {
    /// Requests one worker on each bundle.
    ///
    /// # Errors
    /// `InvalidArgument` if `init` cannot be serialized as JSON.
    pub fn new(
        name: impl Into<String>,
        worker: impl Into<String>,
        init: &impl Serialize,
        options: GroupOptions,
    ) -> Result<Self> {
        let init =
            json::to_raw(init).map_err(|error| Error::invalid("init cannot be written as JSON").caused_by(error))?;
        Ok(Self {
            name: name.into(),
            worker: worker.into(),
            init,
            on: WorkersOn::EachBundle,
            config: None,
            options,
            variables: Variables::new(),
            start_timeout: DEFAULT_START_TIMEOUT,
        })
    }
}

impl VirtualCluster {
    /// Creates a cluster whose bundles `provisioner` finds room for.
    ///
    /// # Errors
    /// Errors of [`ClusterSpec::validate`]. Missing resources are reported when the cluster is placed.
    pub fn new(spec: ClusterSpec, provisioner: impl Provisioner) -> Result<Self> {
        spec.validate()?;
        Ok(Self {
            spec,
            provisioner: Box::new(provisioner),
            simulated: None,
            unified: false,
            turns: BundleTurns::default(),
            groups: Arc::default(),
            reserved: tokio::sync::Mutex::default(),
            monitor: Mutex::default(),
        })
    }

    /// Places the cluster on simulated nodes: `gpus` lists the GPUs of each node, and each node has as many CPUs as needed. The
    /// workers run on this machine and get no GPU. Clusters are never simulated by default.
    #[must_use]
    pub fn simulate_nodes(mut self, gpus: &[u32]) -> Self {
        let nodes = gpus.iter().enumerate();
        self.simulated =
            Some(nodes.map(|(at, gpus)| NodeResources::simulated(format!("simulated-{at}"), *gpus)).collect());
        self
    }

    /// Uses one placement group over all nodes, for models that span nodes.
    #[must_use]
    pub fn unified(mut self) -> Self {
        self.unified = true;
        self
    }

    /// Uses one placement group if a model that is trained with these degrees spans nodes.
    #[must_use]
    pub fn for_training(mut self, span: &ModelSpan) -> Self {
        self.unified = span.megatron_spans(self.spec.num_gpus_per_node.get());
        self
    }

    /// Uses one placement group if a generation engine of these degrees spans nodes. Its bundles are adjacent, unless the engine
    /// shares them with other groups.
    #[must_use]
    pub fn for_generation(mut self, span: &ModelSpan) -> Self {
        self.unified = span.engine_spans(self.spec.num_gpus_per_node.get());
        let colocated = self.spec.enable_colocation == Some(true);
        if let Some(strategy) = ModelSpan::generation_strategy(colocated) {
            self.spec.placement_group_strategy = strategy;
        }
        self
    }

    /// Returns the number of bundles.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.spec.world_size()
    }

    /// Returns the number of nodes with at least one bundle.
    #[must_use]
    pub fn node_count(&self) -> usize {
        self.spec.node_count()
    }

    /// Returns the placement of the bundles, which the first call decides. Its `groups` are those with at least one bundle, by
    /// node.
    ///
    /// # Errors
    /// `ResourceExhausted`, with the request and the resources of each node, or with the clusters that hold its GPUs.
    pub async fn placement(&self, cx: &CallContext) -> Result<Arc<Placement>> {
        Ok(self.reservation(cx).await?.placement())
    }

    /// Returns the nodes of the placement, with the usage of other machines if the spec has `monitor_memory`.
    ///
    /// # Errors
    /// As [`VirtualCluster::placement`].
    pub async fn nodes(&self, cx: &CallContext) -> Result<Vec<NodeStatus>> {
        Ok(self.reservation(cx).await?.nodes())
    }

    /// Returns the events of the nodes so far, then new events as they happen: a node that is suspect or lost, and bundles that moved.
    ///
    /// # Errors
    /// As [`VirtualCluster::placement`].
    pub async fn node_events(&self, cx: &CallContext) -> Result<BoxStream<'static, NodeEvent>> {
        Ok(self.reservation(cx).await?.events())
    }

    /// Returns the reservation of the bundles, which the first call makes.
    async fn reservation(&self, cx: &CallContext) -> Result<Arc<dyn Reservation>> {
        let mut reserved = self.reserved.lock().await;
        if let Some(reserved) = &*reserved {
            return Ok(Arc::clone(reserved));
        }
        let mut request = ReserveRequest::new(self.spec.clone());
        (request.unified, request.simulated) = (self.unified, self.simulated.clone());
        let fresh = self.provisioner.reserve(cx, &request).await?;
        Ok(Arc::clone(reserved.insert(fresh)))
    }

    /// Returns the usage of this machine and its GPUs, as last sampled. Returns `None` unless the spec has `monitor_memory` and a
    /// group was started. The usage of other machines is part of [`nodes`](Self::nodes): their agents sample it.
    #[must_use]
    pub fn node_usage(&self) -> Option<NodeUsage> {
        let monitor = self.monitor.lock();
        monitor.as_ref()?.usage()
    }

    /// Starts a worker group and waits until all its ranks accept calls. Errors in bundles, colocation and configuration are
    /// reported before any process is started.
    ///
    /// With `enable_colocation`, each call of a group takes a turn on the bundles that it shares with other groups. A turn ends with its
    /// call. After a deadline or a failed rank, a rank's exclusive handler may still run at that moment. The handler receives a
    /// cancellation signal and runs to completion.
    ///
    /// # Errors
    /// As [`VirtualCluster::placement`] and [`Group::start`]; `ResourceExhausted` if other groups use the bundles and the spec
    /// does not allow another group on them.
    pub async fn start(&self, cx: &CallContext, request: GroupRequest) -> Result<Group> {
        let GroupRequest { name, worker, init, on, config, mut options, variables, start_timeout } = request;
        let reservation = self.reservation(cx).await?;
        let placement = reservation.placement();
        let places = placement.workers(&name, &on)?;
        let group: Arc<str> = name.into();
        let world_size = u32::try_from(places.len()).map_err(|_| Error::invalid("too many ranks"))?;
        let bundles = Arc::new(places.iter().map(|place| (place.node, place.bundle)).collect::<BTreeSet<_>>());
        // Only tied ranks can be an engine, which needs these ports.
        let gpus_per_node = matches!(on, WorkersOn::Tied(_)).then_some(placement.gpus_per_node);
        let one = placement.groups.len() == 1;
        let of_bundle = RankPlace { cpus: self.spec.cpus_per_bundle(), ..RankPlace::on_one_node(0, world_size) };
        let ranks = places.into_iter().map(|place| rank_place(place, &of_bundle, gpus_per_node, one));
        let mut ranks: Vec<RankPlace> = ranks.collect();
        count_local(&placement, &mut ranks);
        let mut spec = LaunchSpec::new(Arc::clone(&group), worker, init, ranks);
        (spec.variables, spec.start_timeout, spec.ports) = (variables, start_timeout, self.spec.ports());
        spec.transport_policy = self.spec.transport_policy();
        spec.collectives.backend = self.spec.communication_backend;
        if let Some(config) = config {
            spec.transport_policy = config.transport_policy().or(spec.transport_policy);
            spec.memory_limit_bytes = config.memory_limit;
            spec.collectives.compress_gradients = config.enable_gradient_compression;
            options.configured(&config);
        }
        if let Some(transport_policy) = &spec.transport_policy {
            transport_policy.check(&options.transports.known()).map_err(|error| error.about("worker group"))?;
            options.transports = options.transports.with_policy(transport_policy.clone());
        }
        let registration = self.groups.admit(Arc::clone(&group), &bundles, self.spec.groups_max())?;
        let turns = (self.spec.enable_colocation == Some(true)).then(|| self.turns.clone());
        let gate =
            turns.map(|turns| Arc::new(TurnGate::new(turns, registration.number(), group, bundles)) as Arc<dyn Gate>);
        let monitor = self.spec.monitor_memory.then(|| {
            let mut monitor = self.monitor.lock();
            Arc::clone(monitor.get_or_insert_with(|| Arc::new(NodeMonitor::start())))
        });
        let on = ClusterBinding { gate, registration, monitor };
        Ok(Group::start_on(cx, &*reservation, spec, options, Some(on)).await?)
    }

    /// Ends every group of the cluster. Later calls have no effect. A cluster that is used again is placed again.
    ///
    /// # Errors
    /// The error of the first rank that could not be killed.
    pub async fn shutdown(&self, grace: Duration) -> Result<()> {
        let stops = self.groups.stops();
        let stopped = join_all(stops.iter().map(|stop| stop.stop(grace))).await;
        let reserved = self.reserved.lock().await.take();
        let released = match reserved {
            Some(reserved) => reserved.release(grace).await,
            None => Ok(()),
        };
        stopped.into_iter().chain([released]).collect()
    }
}

/// `each` has what all ranks have in common. `one` is `true` if the placement has a single group; the node of a worker is then only a label.
fn rank_place(place: WorkerPlacement, each: &RankPlace, engines: Option<u32>, one: bool) -> RankPlace {
    let engine_port = engines.and_then(|gpus_per_node| engine_port(place.bundles.as_ref()?, gpus_per_node));
    RankPlace {
        rank: place.rank,
        name: place.name,
        local_rank: place.bundle,
        node_rank: place.node,
        bundle: (if one { 0 } else { place.node }, place.bundle),
        gpus: place.gpu.into_iter().collect(),
        bundles: place.bundles,
        tied: place.group,
        engine_port,
        ..each.clone()
    }
}

#[cfg(test)]
mod tests {
    use crate::placement::PlacementStrategy;
    use gym_core::group::{Payload, WorkerEnv};
    use gym_core::transport::InProcess;
    use gym_core::worker;
    use serde::Deserialize;

    use super::*;
    use crate::provision::{Local, RankOverrides, WorkerKind, Workers};
    use gym_client::Transports;

    fn nodes_of(
        colocated: Option<bool>,
        span: ModelSpan,
        made: fn(VirtualCluster, &ModelSpan) -> VirtualCluster,
    ) -> VirtualCluster {
        let mut spec = ClusterSpec::new([4, 4]);
        spec.num_gpus_per_node = std::num::NonZeroU32::new(4).unwrap();
        spec.enable_colocation = colocated;
        let cluster = VirtualCluster::new(spec, Local::new(Workers::new())).unwrap().simulate_nodes(&[4, 4]);
        made(cluster, &span)
    }

    #[derive(Debug, Serialize, Deserialize)]
    struct Settings {
        clip: f32,
        warm: Option<f64>,
        seed: u64,
    }

    /// A worker whose start tells its settings in an error.
    struct Telling;
    worker! {
        impl Worker for Telling as telling {
            fn start(_: WorkerEnv, settings: Settings) -> Result<Self> { Err(Error::invalid(format!("{settings:?}"))) }
            exclusive async fn nothing(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> { Ok(().into()) }
        }
    }

    #[tokio::test]
    async fn an_init_keeps_numbers_that_are_not_finite_also_below_added_keys() {
        let settings = Settings { clip: f32::INFINITY, warm: Some(f64::NAN), seed: 1 };
        let options = GroupOptions::new(Transports::from_features(InProcess::new()));
        let request = GroupRequest::new("group", "telling", &settings, options).unwrap();
        let init = RankOverrides::default().with_init("seed", 7).over(&request.init).unwrap();
        let started = WorkerKind::of::<Telling>().start(WorkerEnv::new("group", 0, 1), init).await;
        let told = started.unwrap_err().to_string();
        assert!(told.contains("Settings { clip: inf, warm: Some(NaN), seed: 7 }"), "{told}");
    }

    #[tokio::test]
    async fn a_cluster_for_a_model_is_unified_if_it_spans_nodes() {
        let wide = ModelSpan { tensor: 4, pipeline: 2, ..ModelSpan::default() };
        let groups =
            async |cluster: VirtualCluster| cluster.placement(&CallContext::default()).await.unwrap().groups.len();
        let engine = groups(nodes_of(None, wide, VirtualCluster::for_generation)).await;
        assert_eq!(engine, 1, "an engine is one group of ranks");
        let stages = groups(nodes_of(None, wide, VirtualCluster::for_training)).await;
        assert_eq!(stages, 2, "stages may be on different nodes");
        let strategy =
            |colocated| nodes_of(colocated, wide, VirtualCluster::for_generation).spec.placement_group_strategy;
        assert_eq!(strategy(None), PlacementStrategy::Pack);
        assert_eq!(strategy(Some(true)), ClusterSpec::new([1]).placement_group_strategy);
    }
}
