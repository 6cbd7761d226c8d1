//! Virtual clusters: bundles on nodes, and the groups that run on them.
//!
//! ```no_run
//! # use gym_core::{CallContext, Result, group::cluster::ClusterSpec, transport::InProcess};
//! # use gym_client::{Transports, group::{GroupOptions, GroupRequest, Local, VirtualCluster, Workers}};
//! # async fn example(workers: Workers) -> Result<()> {
//! let cluster = VirtualCluster::new(ClusterSpec::new([4, 8, 2]), Local::new(workers))?.simulate_nodes(&[4, 8, 2]);
//! let options = GroupOptions::new(Transports::from_features(InProcess::new()));
//! let request = GroupRequest::new("policy", "policy_worker", &"/models/tiny", options)?;
//! let policy = cluster.start(&CallContext::default(), request).await?;
//! # Ok(()) }
//! ```

mod blocks;
mod file;
mod lease;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use gym_core::group::Gate;
use gym_core::group::cluster::{
    ClusterSpec, ModelSpan, NodeResources, Placement, WorkerGroupConfig, WorkerPlacement, WorkersOn, engine_port, place,
};
use gym_core::{CallContext, Error, Result};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::group::provision::{DEFAULT_START_TIMEOUT, LaunchSpec, Provisioner, RankPlace, Variables};
use crate::group::supervise::{ClusterBinding, ClusterGroups, DEFAULT_MAX_RESTARTS, Group, GroupOptions};
use crate::group::usage::node::{NodeMonitor, NodeUsage};
use crate::group::usage::visible_gpus;
pub use file::ClusterFile;
use lease::{BundleLeases, LeaseGate};

/// A set of bundles placed on nodes. Placement and processes start on first use.
#[derive(Debug)]
pub struct VirtualCluster {
    spec: ClusterSpec,
    provisioner: Box<dyn Provisioner>,
    /// The simulated nodes, if the cluster is simulated.
    simulated: Option<Vec<NodeResources>>,
    unified: bool,
    leases: BundleLeases,
    groups: Arc<ClusterGroups>,
    placed: Mutex<Option<Arc<Placement>>>,
    /// Runs from the start of the first group, if `monitor_memory` is set.
    monitor: Mutex<Option<Arc<NodeMonitor>>>,
}

/// A request to start a worker group on a cluster.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupRequest {
    /// Name of the group.
    pub name: String,
    /// Name under which the worker type is registered.
    pub worker: String,
    /// Value from which each worker is created, as JSON.
    pub init: Box<RawValue>,
    /// Assignment of workers to bundles. Default: one worker on each bundle.
    pub on: WorkersOn,
    /// Memory limit, restarts and transport from a configuration; they take precedence over `options`. Default: none.
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
        let init = serde_json::value::to_raw_value(init)
            .map_err(|error| Error::invalid("init cannot be written as JSON").caused_by(error))?;
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
    /// Creates a cluster on this machine, whose ranks `provisioner` starts.
    ///
    /// # Errors
    /// Errors of [`ClusterSpec::validate`]. Missing resources of the machine are reported when the cluster is placed.
    pub fn new(spec: ClusterSpec, provisioner: impl Provisioner) -> Result<Self> {
        spec.validate()?;
        Ok(Self {
            spec,
            provisioner: Box::new(provisioner),
            simulated: None,
            unified: false,
            leases: BundleLeases::default(),
            groups: Arc::default(),
            placed: Mutex::default(),
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
    /// `ResourceExhausted`, with the request and the resources of each node.
    pub fn placement(&self) -> Result<Arc<Placement>> {
        let mut placed = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(placed) = &*placed {
            return Ok(Arc::clone(placed));
        }
        let nodes = self.simulated.clone().unwrap_or_else(|| vec![this_machine()]);
        let fresh = Arc::new(place(&self.spec, &nodes, self.unified)?);
        Ok(Arc::clone(placed.insert(fresh)))
    }

    /// Returns the usage of this machine and its GPUs, as last sampled. Returns `None` unless the spec has `monitor_memory` and a
    /// group was started.
    #[must_use]
    pub fn node_usage(&self) -> Option<NodeUsage> {
        let monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
        monitor.as_ref()?.usage()
    }

    /// Starts a worker group and waits until all its ranks accept calls. Errors in bundles, colocation and configuration are
    /// reported before any process is started.
    ///
    /// With `enable_colocation`, each call of a group leases the bundles that it shares with other groups. A lease ends with its
    /// call. After a deadline or a failed rank, a rank's exclusive handler may still run at that moment. The handler receives a
    /// cancellation signal and runs to completion.
    ///
    /// # Errors
    /// As [`VirtualCluster::placement`] and [`Group::start`]; `ResourceExhausted` if other groups use the bundles and the spec
    /// does not allow another group on them.
    pub async fn start(&self, cx: &CallContext, request: GroupRequest) -> Result<Group> {
        let GroupRequest { name, worker, init, on, config, mut options, variables, start_timeout } = request;
        let placement = self.placement()?;
        let places = placement.workers(&name, &on)?;
        let group: Arc<str> = name.into();
        let world_size = u32::try_from(places.len()).map_err(|_| Error::invalid("too many ranks"))?;
        let bundles = Arc::new(places.iter().map(|place| (place.node, place.bundle)).collect::<BTreeSet<_>>());
        // Only tied ranks can be an engine, which needs these ports.
        let gpus_per_node = matches!(on, WorkersOn::Tied(_)).then_some(placement.gpus_per_node);
        let ranks = places.into_iter().map(|place| rank_place(place, world_size, gpus_per_node)).collect();
        let mut spec = LaunchSpec::new(Arc::clone(&group), worker, init, ranks);
        (spec.variables, spec.start_timeout, spec.ports) = (variables, start_timeout, self.spec.ports());
        spec.transport_policy = self.spec.transport_policy();
        if let Some(config) = config {
            config.validate()?;
            spec.transport_policy = config.transport_policy().or(spec.transport_policy);
            spec.memory_limit_bytes = config.memory_limit;
            options.restart_on_failure = config.restart_on_failure;
            options.async_communication = config.async_communication;
            options.balance = config.balancing().or(options.balance);
            options.max_restarts = config.max_restarts.unwrap_or(DEFAULT_MAX_RESTARTS);
        }
        if let Some(transport_policy) = &spec.transport_policy {
            transport_policy.check(&options.transports.known()).map_err(|error| error.about("worker group"))?;
            options.transports = options.transports.with_policy(transport_policy.clone());
        }
        let registration = self.groups.admit(Arc::clone(&group), &bundles, self.spec.groups_max())?;
        let leases = (self.spec.enable_colocation == Some(true)).then(|| self.leases.clone());
        let gate = leases
            .map(|leases| Arc::new(LeaseGate::new(leases, registration.number(), group, bundles)) as Arc<dyn Gate>);
        let monitor = self.spec.monitor_memory.then(|| {
            let mut monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(monitor.get_or_insert_with(|| Arc::new(NodeMonitor::start())))
        });
        let on = ClusterBinding { gate, registration, monitor };
        Ok(Group::start_on(cx, &*self.provisioner, spec, options, Some(on)).await?)
    }

    /// Ends every group of the cluster. Later calls have no effect. A cluster that is used again is placed again.
    ///
    /// # Errors
    /// The error of the first rank that could not be killed.
    pub async fn shutdown(&self, grace: Duration) -> Result<()> {
        let stops = self.groups.stops();
        let stopped = join_all(stops.iter().map(|stop| stop.stop(grace))).await;
        self.placed.lock().unwrap_or_else(PoisonError::into_inner).take();
        stopped.into_iter().collect()
    }
}

fn this_machine() -> NodeResources {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    NodeResources::new(name, u32::try_from(cpus).unwrap_or(u32::MAX), visible_gpus())
}

fn rank_place(place: WorkerPlacement, world_size: u32, engines: Option<u32>) -> RankPlace {
    let engine_port = engines.and_then(|gpus_per_node| engine_port(place.bundles.as_ref()?, gpus_per_node));
    RankPlace {
        rank: place.rank,
        name: place.name,
        world_size,
        local_rank: place.bundle,
        node_rank: place.node,
        gpus: place.gpu.into_iter().collect(),
        bundles: place.bundles,
        tied: place.group,
        engine_port,
    }
}

#[cfg(test)]
mod tests {
    use gym_core::group::cluster::PlacementStrategy;

    use super::*;
    use crate::group::provision::Local;
    use crate::group::provision::Workers;

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

    #[test]
    fn a_cluster_for_a_model_is_unified_if_it_spans_nodes() {
        let wide = ModelSpan { tensor: 4, pipeline: 2, ..ModelSpan::default() };
        let groups = |cluster: VirtualCluster| cluster.placement().unwrap().groups.len();
        assert_eq!(groups(nodes_of(None, wide, VirtualCluster::for_generation)), 1, "an engine is one group of ranks");
        assert_eq!(groups(nodes_of(None, wide, VirtualCluster::for_training)), 2, "stages may be on different nodes");
        let strategy =
            |colocated| nodes_of(colocated, wide, VirtualCluster::for_generation).spec.placement_group_strategy;
        assert_eq!(strategy(None), PlacementStrategy::Pack);
        assert_eq!(strategy(Some(true)), ClusterSpec::new([1]).placement_group_strategy);
    }
}
