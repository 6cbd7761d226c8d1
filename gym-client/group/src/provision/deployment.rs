//! The interfaces between a group and the provisioner that starts its ranks.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use gym_core::group::Rank;
use gym_core::transport::TransportPolicy;
use gym_core::{CallContext, Code, Error, Incarnation, Result};
use serde_json::value::RawValue;

use crate::collective::CollectiveOptions;
use crate::placement::{ClusterSpec, NodeResources, Placement};
use crate::provision::events::{NodeEvent, NodeStatus, RankEvent};
use crate::provision::place::RankPlace;
use crate::provision::variables::{RankEnvironment, Variables};
use crate::usage::node::NodeUsage;
use crate::usage::process::ProcessUsage;

/// Default limit for a rank's start, until it accepts calls: loading weights takes minutes.
pub const DEFAULT_START_TIMEOUT: Duration = Duration::from_secs(600);

/// Finds room for bundles: on this machine, on the nodes of a cluster, or by another engine.
///
/// ```
/// use std::sync::Arc;
///
/// use async_trait::async_trait;
/// use gym_core::{CallContext, Code, Error, Result};
/// use gym_group::placement::ClusterSpec;
/// use gym_group::{Local, Provisioner, Reservation, ReserveRequest, VirtualCluster, Workers};
///
/// /// At most eight bundles for each cluster, on this machine.
/// #[derive(Debug)]
/// struct AtMostEight(Local);
///
/// #[async_trait]
/// impl Provisioner for AtMostEight {
///     async fn reserve(&self, cx: &CallContext, request: &ReserveRequest) -> Result<Arc<dyn Reservation>> {
///         match request.cluster.world_size() {
///             0..=8 => self.0.reserve(cx, request).await,
///             bundles => Err(Error::not_started(Code::ResourceExhausted, format!("{bundles} bundles, of at most 8"))),
///         }
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let cluster = VirtualCluster::new(ClusterSpec::new([9]), AtMostEight(Local::new(Workers::new())))?;
/// let error = cluster.placement(&CallContext::default()).await.unwrap_err();
/// assert_eq!(error.code(), Code::ResourceExhausted);
/// # Ok(()) }
/// ```
#[async_trait]
pub trait Provisioner: fmt::Debug + Send + Sync + 'static {
    /// Places the bundles of a cluster on nodes and holds them. Waits for room no longer than `cx` allows. On this machine, waits at most 10 s for ranks
    /// that are ending, and not for GPUs that another cluster holds: it may be one of this program.
    ///
    /// # Errors
    /// The errors of [`place`](crate::placement::place). `ResourceExhausted`, with the request and what each node has, if there is no room.
    async fn reserve(&self, cx: &CallContext, request: &ReserveRequest) -> Result<Arc<dyn Reservation>>;
}

#[async_trait]
impl Provisioner for Box<dyn Provisioner> {
    async fn reserve(&self, cx: &CallContext, request: &ReserveRequest) -> Result<Arc<dyn Reservation>> {
        (**self).reserve(cx, request).await
    }
}

/// Bundles that are held on nodes. Dropping the reservation and its deployments releases them.
#[async_trait]
pub trait Reservation: fmt::Debug + Send + Sync + 'static {
    /// Returns the placement of the bundles. A bundle's host is a position in [`nodes`](Self::nodes). Bundles of a lost node move to another
    /// one when a rank on them restarts.
    fn placement(&self) -> Arc<Placement>;

    /// Returns the nodes of the placement. A node that was lost stays in the list.
    fn nodes(&self) -> Vec<NodeStatus>;

    /// Returns the events of the nodes so far, then new events as they happen. The stream ends when the bundles are released.
    fn events(&self) -> BoxStream<'static, NodeEvent>;

    /// Starts the first incarnation of every rank of `spec` on its bundle, and returns when they are started. The ranks may not accept calls
    /// yet: the deployment's events report when a rank accepts calls, and ranks that failed to start. A deployment keeps its bundles
    /// after the reservation was dropped.
    ///
    /// # Errors
    /// If no rank can be started: an unknown worker type, no free port, or a program that cannot be executed.
    async fn launch(&self, cx: &CallContext, spec: LaunchSpec) -> Result<Arc<dyn Deployment>>;

    /// Releases the bundles. Ranks that still run on them are asked to stop, and killed after `grace`. Later calls have no effect.
    ///
    /// # Errors
    /// If a rank could not be killed.
    async fn release(&self, grace: Duration) -> Result<()>;
}

/// A request for bundles.
///
/// ```
/// use gym_core::transport::InProcess;
/// use gym_core::{CallContext, Result};
/// use gym_group::placement::{ClusterSpec, NodeResources};
/// use gym_group::{InProcessRanks, Provisioner, ReserveRequest, Workers};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let mut request = ReserveRequest::new(ClusterSpec::new([4, 2]));
/// request.simulated = Some(vec![NodeResources::simulated("a", 4), NodeResources::simulated("b", 4)]);
/// let ranks = InProcessRanks::new(Workers::new(), InProcess::new());
/// let reservation = ranks.reserve(&CallContext::default(), &request).await?;
/// assert_eq!(reservation.placement().groups.len(), 2);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReserveRequest {
    /// The bundles.
    pub cluster: ClusterSpec,
    /// Places each bundle individually, for models that span nodes. Default: `false`.
    pub unified: bool,
    /// Places the bundles on these nodes instead of real ones. The ranks run wherever the provisioner can run them, without GPUs. Default: `None`.
    pub simulated: Option<Vec<NodeResources>>,
    /// Counts CPUs. Default: `true`.
    pub counts_cpus: bool,
}

impl ReserveRequest {
    /// Requests the bundles of `cluster`.
    #[must_use]
    pub fn new(cluster: ClusterSpec) -> Self {
        Self { cluster, unified: false, simulated: None, counts_cpus: true }
    }

    /// Requests a bundle for each of `ranks` ranks, without GPUs, on nodes with any number of CPUs: for a group without a cluster.
    #[must_use]
    pub fn for_ranks(ranks: u32) -> Self {
        let mut cluster = ClusterSpec::new([ranks]);
        cluster.use_gpus = false;
        Self { unified: true, counts_cpus: false, ..Self::new(cluster) }
    }

    /// Returns `node` as this request counts it.
    pub(crate) fn counted(&self, mut node: NodeResources) -> NodeResources {
        if !self.counts_cpus {
            node.cpus = None;
        }
        node
    }
}

/// The ranks of one launch. Dropping it ends the ranks; [`Deployment::shutdown`] stops them in order.
#[async_trait]
pub trait Deployment: fmt::Debug + Send + Sync + 'static {
    /// Returns the events so far, then new events as they happen. The stream ends when the deployment is dropped.
    fn events(&self) -> BoxStream<'static, RankEvent>;

    /// Starts a new incarnation of each of these ranks, and returns when they are started. Kills all old incarnations that still
    /// run before any new one starts. So an old incarnation cannot meet a new one at the rendezvous. If the node of a rank is lost, first waits
    /// until the old incarnation cannot be alive, and starts the rank on another node.
    ///
    /// # Errors
    /// `NotFound` for a rank that was not launched. If a rank fails to start, for example after a shutdown, that is an error or
    /// an event.
    async fn restart(&self, cx: &CallContext, incarnations: &[(Rank, Incarnation)]) -> Result<()>;

    /// Kills a rank as a crash would. If `incarnation` is given, kills only that incarnation, so a late decision cannot kill a restarted
    /// rank.
    ///
    /// # Errors
    /// `NotFound` if the rank does not run, or runs another incarnation.
    async fn kill(&self, rank: Rank, incarnation: Option<Incarnation>) -> Result<()>;

    /// Returns the usage of each running rank at the last sample. Never waits for a rank. Empty if ranks have no process of their
    /// own.
    fn usage(&self) -> BTreeMap<Rank, ProcessUsage>;

    /// Returns the usage of the nodes of the ranks, by name, as their agents last sampled it; empty for a cluster without `monitor_memory`. Never waits
    /// for a node. `None` if the ranks run on this machine, which their cluster samples itself.
    fn node_usage(&self) -> Option<BTreeMap<String, NodeUsage>> {
        None
    }

    /// Returns the environment with which the rank starts, with the source of each variable. It is the one of the last start unless a program has
    /// changed its own variables since. Without the variables by which the SDK starts a process (`GYM_WORKER`, `GYM_LAUNCH_MARK`).
    ///
    /// # Errors
    /// `NotFound` for a rank that was not launched. `Unimplemented` for a deployment without environments.
    async fn environment(&self, cx: &CallContext, rank: Rank) -> Result<RankEnvironment> {
        cx.check()?;
        let message = format!("the provisioner of rank {rank} does not tell its environment");
        Err(Error::not_started(Code::Unimplemented, message))
    }

    /// Asks all ranks to stop, kills ranks that still run after `grace`, and returns when all have exited. Later calls have no
    /// effect.
    ///
    /// # Errors
    /// If a rank could not be killed.
    async fn shutdown(&self, grace: Duration) -> Result<()>;
}

/// Specifies the ranks to start.
///
/// ```
/// use gym_group::{LaunchSpec, RankPlace};
///
/// let init = serde_json::value::to_raw_value("/models/tiny")?;
/// let places = (0..4).map(|rank| RankPlace::on_one_node(rank, 4)).collect();
/// let mut spec = LaunchSpec::new("policy", "policy_worker", init, places);
/// spec.memory_limit_bytes = Some(64 << 30);
/// assert_eq!(spec.ranks[3].world_size, 4);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaunchSpec {
    /// The group's name.
    pub group: Arc<str>,
    /// Name under which the worker type is registered in [`Workers`](crate::Workers).
    pub worker: String,
    /// Value from which each worker is created, as JSON. [`json::to_raw`](gym_core::group::batch::json::to_raw) also writes numbers
    /// that are not finite.
    pub init: Box<RawValue>,
    /// The place of each rank, in rank order, from 0.
    pub ranks: Vec<RankPlace>,
    /// Environment variables of the group. Default: none.
    pub variables: Variables,
    /// The variables that the controller has sent, if another process starts the ranks.
    pub(super) controller: Option<Variables>,
    /// Memory limit of one rank with all processes that it started, in bytes. Default: none.
    ///
    /// Where this process may create control groups (version 2), the kernel enforces the limit and counts all memory that it charges to the rank. Elsewhere
    /// [`ProcessUsage::counted_bytes`](crate::ProcessUsage::counted_bytes) is compared with it four times a second, more rarely for ranks so large that a look takes long, and the rank is killed
    /// above it. What no process has open or mapped belongs to none, and is not counted: files that were left in `/dev/shm`, and detached segments of
    /// System V. Neither are pages of a mapped file that no process has touched, huge pages of `hugetlbfs`, and what was swapped out.
    pub memory_limit_bytes: Option<u64>,
    /// Limit for a rank's start, until it accepts calls. Default: 600 s.
    pub start_timeout: Duration,
    /// Range of the ports for the rendezvous. Default: 1400 to 1998.
    pub ports: Range<u16>,
    /// Transport policy of the configuration, if it has one. Ranks advertise UCX if the policy allows it. Default: none.
    pub transport_policy: Option<TransportPolicy>,
    /// How the ranks meet for collective operations.
    pub collectives: CollectiveOptions,
}

impl LaunchSpec {
    /// Specifies one rank for each place, with defaults for the other fields.
    #[must_use]
    pub fn new(
        group: impl Into<Arc<str>>,
        worker: impl Into<String>,
        init: Box<RawValue>,
        ranks: Vec<RankPlace>,
    ) -> Self {
        Self {
            group: group.into(),
            worker: worker.into(),
            init,
            ranks,
            variables: Variables::new(),
            controller: None,
            memory_limit_bytes: None,
            start_timeout: DEFAULT_START_TIMEOUT,
            ports: crate::placement::MASTER_PORTS,
            transport_policy: None,
            collectives: CollectiveOptions::default(),
        }
    }
}
