//! Ray as the engine past one machine: Ray decides where node agents run, and notices which machine died; everything between processes is ours.
//!
//! ```text
//!   Ray ── REST ──► dashboard ──► job: one Python file ──► placement group, one actor for each share
//!    │                                                        │ starts and ends with it
//!    └── reserve, launch, calls, leases ────────────────────► NodeAgent (this program) ──► ranks
//! ```
//!
//! A share is what one agent has: the bundles of a logical node, or one bundle of a unified cluster. A rank restarts without Ray; an agent that died, or
//! whose node was lost, is started again by the job, and its ranks restart there when the lease of the old agent is over.
//!
//! ```no_run
//! # use gym_core::Result; use gym_group::placement::ClusterSpec;
//! # use gym_group::{VirtualCluster, Workers, ray::{Ray, RayAddress}};
//! # fn example(workers: Workers) -> Result<()> {
//! let address = RayAddress::parse("ray://10.0.0.1:10001", "--ray-address")?;
//! let cluster = VirtualCluster::new(ClusterSpec::new([8, 8]), Ray::at(address, workers))?;
//! # Ok(()) }
//! ```
//!
//! Nothing of Ray is needed to build this program, and no Python unless an address is set.

mod address;
mod dashboard;
mod event;
mod job;
mod local;
mod package;
mod run;
mod share;
mod source;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use gym_core::{CallContext, Code, Error, Result};
use tokio_util::task::AbortOnDropHandle;

use crate::placement::Placement;
use crate::provision::{
    Deployment, LaunchSpec, Local, NodeEvent, NodeSource, NodeStatus, Nodes, NodesOptions, NodesReservation,
    Provisioner, Reservation, ReserveRequest, Workers,
};

pub use address::RayAddress;
pub use dashboard::{RayDashboard, RayJob, RayMemory, RayNode, RayTask, RayVersion};
use job::JobTemplate;
use local::HeadShare;
pub use local::LocalHead;
use run::RayRun;
use share::SharePlan;
use source::{PlacedShares, pass_on_drains};

/// Reserves bundles on the nodes of a Ray cluster, and starts ranks there.
#[derive(Clone)]
pub struct Ray {
    address: RayAddress,
    workers: Workers,
    options: RayOptions,
}

/// Options of bundles on a Ray cluster.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct RayOptions {
    /// The name of our jobs in Ray's dashboard. Default: the name of this program's file.
    pub name: String,
    /// The path of this program on the nodes. It must be the same build. Agents start sooner, in the working directory of `ray start` on their node.
    /// Default: none; the file of this program is sent, if Ray's limit of 100 MiB for a compressed package allows it.
    pub program: Option<PathBuf>,
    /// Environment variables of the agents and their ranks. They take precedence over those of the node, and for the ranks also over those of this program.
    /// Default: none.
    pub variables: BTreeMap<String, String>,
    /// Resources of each bundle in addition to its CPUs and its GPU, by the names of the cluster. Default: none.
    pub resources: BTreeMap<String, f64>,
    /// Where the driver of a job runs. All agents of a job end with its driver, and another one is then started. Default: on the head.
    pub driver: RayDriver,
    /// Time for which a placement group waits for room, in each attempt. Default: 180 s, as NeMo RL.
    pub placement_timeout: Duration,
    /// The number of such attempts. Default: `None`, for the number in the variable `NRL_VIRTUAL_CLUSTER_MAX_RETRIES`, or 6, as NeMo RL.
    pub placement_attempts: Option<u32>,
    /// Waits even if no node of the cluster can ever have the bundles: for a cluster whose autoscaler adds nodes. Default: `false`.
    pub wait_if_infeasible: bool,
    /// Time for an agent to start, once Ray has placed it. Default: 60 s.
    pub start_timeout: Duration,
    /// How often the agent of one share may fail before the job is given up, and how often a job whose driver died is submitted again. Lost nodes of
    /// agents do not count. Default: 10.
    pub max_restarts: u32,
    /// The lease of the agents. Default: that of [`NodesOptions`], with 180 s to wait for room, because Ray takes its time to notice that a node died.
    pub nodes: NodesOptions,
}

impl Default for RayOptions {
    fn default() -> Self {
        let program =
            std::env::current_exe().ok().and_then(|path| Some(path.file_stem()?.to_string_lossy().into_owned()));
        Self {
            name: program.unwrap_or_else(|| "gym".to_owned()),
            program: None,
            variables: BTreeMap::new(),
            resources: BTreeMap::new(),
            driver: RayDriver::default(),
            placement_timeout: Duration::from_secs(180),
            placement_attempts: None,
            wait_if_infeasible: false,
            start_timeout: Duration::from_secs(60),
            max_restarts: 10,
            nodes: NodesOptions { wait_for_room: Duration::from_secs(180), ..NodesOptions::default() },
        }
    }
}

/// Where the driver of a job runs: the Python process that asks Ray for the bundles and holds the actors of the agents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RayDriver {
    /// On the head, as Ray does it for a job that is submitted to its dashboard.
    #[default]
    Head,
    /// On a node other than the head: for a cluster whose head restarts without losing its state (GCS fault tolerance).
    Worker,
    /// As a child of this program, which must run on a node of the cluster: agents start about two seconds sooner, because nothing of Ray has to be
    /// started first. The driver ends with this program.
    Child {
        /// The Python that has Ray, of the same version as the cluster: a path, or a name in `PATH`.
        python: PathBuf,
    },
}

/// The variable with the number of attempts to place the bundles.
const ATTEMPTS_VARIABLE: &str = "NRL_VIRTUAL_CLUSTER_MAX_RETRIES";
/// The number without it.
const ATTEMPTS: u32 = 6;

impl RayOptions {
    /// Returns the number of attempts to place the bundles.
    ///
    /// # Errors
    /// `InvalidArgument` for a variable that is no number from 1.
    fn attempts(&self) -> Result<u32> {
        match (self.placement_attempts, std::env::var(ATTEMPTS_VARIABLE)) {
            (Some(attempts), _) => Ok(attempts.max(1)),
            (None, Ok(text)) => parse_attempts(&text),
            (None, Err(_)) => Ok(ATTEMPTS),
        }
    }
}

fn parse_attempts(text: &str) -> Result<u32> {
    match text.trim().parse() {
        Ok(attempts) if attempts > 0 => Ok(attempts),
        _ => Err(Error::invalid(format!(
            "{ATTEMPTS_VARIABLE} is '{text}'\n  fix: write a number from 1, or unset it for {ATTEMPTS}"
        ))),
    }
}

impl fmt::Debug for RayOptions {
    /// Leaves the values of the variables out: some of them are secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&String> = self.variables.keys().collect();
        f.debug_struct("RayOptions")
            .field("name", &self.name)
            .field("program", &self.program)
            .field("driver", &self.driver)
            .field("variables", &names)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Ray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ray").field("address", &self.address).field("options", &self.options).finish_non_exhaustive()
    }
}

impl Ray {
    /// Uses the cluster at this address. The program must have called [`Workers::enter`] first.
    #[must_use]
    pub fn at(address: RayAddress, workers: Workers) -> Self {
        Self { address, workers, options: RayOptions::default() }
    }

    /// Replaces the options.
    #[must_use]
    pub fn with(mut self, options: RayOptions) -> Self {
        self.options = options;
        self
    }
}

/// Returns the provisioner of a program that runs anywhere: the Ray cluster at `address`, or without one, processes of this machine.
///
/// The address `local` starts a Ray head of this machine with the first reservation, and stops it with the last, as [`LocalHead`] says.
#[must_use]
pub fn ray_or_local(address: Option<RayAddress>, workers: Workers) -> Box<dyn Provisioner> {
    match address {
        Some(address) => Box::new(Ray::at(address, workers)),
        None => Box::new(Local::new(workers)),
    }
}

#[async_trait]
impl Provisioner for Ray {
    async fn reserve(&self, cx: &CallContext, request: &ReserveRequest) -> Result<Arc<dyn Reservation>> {
        request.cluster.validate()?;
        if request.cluster.share_gpus {
            let message = "share_gpus is set, and Ray gives each bundle a GPU of its own\n  fix: start the groups that share GPUs on one VirtualCluster";
            return Err(Error::not_started(Code::Unimplemented, message).about("place cluster"));
        }
        // A wrong variable is an error before anything is asked of the cluster.
        self.options.attempts()?;
        let (head, address) = if self.address.is_local() {
            let (head, address) = HeadShare::take(cx, &self.address).await?;
            (Some(head), address)
        } else {
            (None, self.address.clone())
        };
        let reserved = self.reserve_at(cx, request, &address).await;
        match (reserved, head) {
            (Ok((nodes, run)), head) => {
                let drains = tokio::spawn(pass_on_drains(Arc::downgrade(&run), Arc::downgrade(&nodes)));
                Ok(Arc::new(RayReservation { nodes, run, head, _drains: AbortOnDropHandle::new(drains) }))
            }
            (Err(error), Some(head)) => {
                if let Err(error) = head.give_back().await {
                    tracing::warn!(%error, "the Ray head of this machine was not stopped");
                }
                Err(error)
            }
            (Err(error), None) => Err(error),
        }
    }
}

impl Ray {
    /// Reserves on the cluster at this address.
    async fn reserve_at(
        &self,
        cx: &CallContext,
        request: &ReserveRequest,
        address: &RayAddress,
    ) -> Result<(Arc<NodesReservation>, Arc<RayRun>)> {
        let (dashboard, version) = RayDashboard::connect(cx, address).await?;
        let dashboard = Arc::new(dashboard);
        tracing::info!(%address, ray = version.ray_version, "connected to the Ray cluster");
        let subject = || format!("reserve bundles on the Ray cluster at {}", address.written());
        let reserved = async {
            let nodes = dashboard.nodes(cx).await?;
            let plan = SharePlan::of(request, &nodes, &self.options.resources)?;
            if !self.options.wait_if_infeasible {
                plan.check_possible(request, &nodes)?;
            }
            // Short-lived, and known to whoever may read the jobs of the cluster, who may also run programs there.
            let secret = format!("{:032x}", fastrand::u128(..));
            let placed = plan.placed;
            let job = JobTemplate { dashboard, plan, options: self.options.clone(), secret: secret.clone() };
            let run = RayRun::submit(cx, job).await?;
            let reserved = async {
                run.ready(cx).await?;
                let shares: Arc<dyn NodeSource> =
                    if placed { Arc::new(PlacedShares(Arc::clone(&run))) } else { Arc::clone(&run) as _ };
                let nodes = Nodes::of(shares, self.workers.transports(), secret.into());
                let nodes = nodes.with(self.options.nodes.clone()).with_variables(self.options.variables.clone());
                nodes.reserve_nodes(cx, request).await
            };
            match reserved.await {
                Ok(nodes) => Ok((nodes, run)),
                Err(error) => {
                    if let Err(error) = run.stop(Duration::ZERO).await {
                        tracing::warn!(job = %run.id(), %error, "a job on Ray was not stopped");
                    }
                    Err(error)
                }
            }
        };
        reserved.await.map_err(|error| error.about(subject()))
    }
}

/// Bundles on a Ray cluster. Its agents end with the job.
#[derive(Debug)]
struct RayReservation {
    nodes: Arc<NodesReservation>,
    run: Arc<RayRun>,
    /// The head of this machine, if the cluster is that.
    head: Option<HeadShare>,
    _drains: AbortOnDropHandle<()>,
}

#[async_trait]
impl Reservation for RayReservation {
    fn placement(&self) -> Arc<Placement> {
        self.nodes.placement()
    }

    fn nodes(&self) -> Vec<NodeStatus> {
        self.nodes.nodes()
    }

    fn events(&self) -> BoxStream<'static, NodeEvent> {
        self.nodes.events()
    }

    async fn launch(&self, cx: &CallContext, spec: LaunchSpec) -> Result<Arc<dyn Deployment>> {
        self.nodes.launch(cx, spec).await
    }

    async fn release(&self, grace: Duration) -> Result<()> {
        self.run.begin_no_more();
        let released = self.nodes.release(grace).await;
        let stopped = self.run.stop(grace).await;
        let ended = match &self.head {
            Some(head) => head.give_back().await,
            None => Ok(()),
        };
        stopped.and(released).and(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_number_of_attempts_is_an_error_that_names_the_variable() {
        assert_eq!(parse_attempts(" 3 ").unwrap(), 3);
        for text in ["0", "", "many", "-1", "1.5"] {
            let error = parse_attempts(text).expect_err(text).to_string();
            assert!(error.contains("NRL_VIRTUAL_CLUSTER_MAX_RETRIES is '") && error.contains("fix: "), "{error}");
        }
    }

    #[test]
    fn values_of_variables_are_not_shown() {
        let mut options = RayOptions::default();
        options.variables.insert("NCCL_DEBUG".to_owned(), "hunter2".to_owned());
        let text = format!("{options:?}");
        assert!(text.contains("NCCL_DEBUG") && !text.contains("hunter2"), "{text}");
    }
}
