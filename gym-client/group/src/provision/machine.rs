//! Bundles held on this machine.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use futures_util::stream::BoxStream;
use gym_core::base::host_name;
use gym_core::group::Rank;
use gym_core::{CallContext, Code, Error, Incarnation, Result};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use crate::placement::{Devices, NodeResources, Placement, place};
use crate::provision::deployment::{Deployment, LaunchSpec, Reservation, ReserveRequest};
use crate::provision::events::{EventLog, NodeEvent, NodeState, NodeStatus};
use crate::provision::place::{GpuFolder, HeldGpus, HeldPlace, HeldRendezvous, Rendezvous, listed};
use crate::usage::visible_gpus;

/// Time for the end of ranks that still run on GPUs which their cluster no longer holds. Those of a program that was killed get 3 s, and then die.
const RANKS_END_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two looks at such GPUs.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Prepares ranks on this machine, for a reservation and for the agent of a node.
#[async_trait]
pub(super) trait PreparesRanks: fmt::Debug + Send + Sync + 'static {
    /// Prepares the ranks of `spec`, and starts none. `held` are the ports of the rendezvous, and the GPUs, if this machine is
    /// not divided otherwise: they are held as long as the ranks are.
    async fn prepare(
        &self,
        cx: &CallContext,
        spec: LaunchSpec,
        rendezvous: Rendezvous,
        held: Option<HeldPlace>,
    ) -> Result<Arc<dyn PreparedRanks>>;

    /// Returns the time on the clock of the leases.
    fn now(&self) -> Duration;
}

/// Ranks that were prepared on this machine. Dropping them ends them.
#[async_trait]
pub(super) trait PreparedRanks: Deployment {
    /// Starts these incarnations, with another rendezvous if one is given. An incarnation that was started before, or was followed by another one, is
    /// not started again.
    ///
    /// # Errors
    /// `NotFound` for a rank that was not launched. A rank that fails to start is an event.
    async fn start(&self, incarnations: &[(Rank, Incarnation)], rendezvous: Option<Rendezvous>) -> Result<()>;

    /// Kills the incarnations of these ranks that run, and returns when they have ended.
    async fn end(&self, ranks: &[Rank]) -> Result<()>;

    /// Lets the ranks run until this [time](PreparesRanks::now), unless it is extended. They end then even if the agent is stopped.
    async fn lease(&self, until: Duration);
}

/// A reservation on this machine. Reservations divide its GPUs with those of all its programs; its CPUs they share, as all programs do.
#[derive(Debug)]
pub(super) struct MachineReservation {
    ranks: Arc<dyn PreparesRanks>,
    placement: Arc<Placement>,
    nodes: Vec<NodeResources>,
    gpus: Arc<HeldGpus>,
    log: EventLog<NodeEvent>,
    /// `None` after the release.
    deployments: Mutex<Option<Vec<Weak<dyn Deployment>>>>,
}

impl MachineReservation {
    pub(super) async fn reserve(
        ranks: impl PreparesRanks,
        cx: &CallContext,
        request: &ReserveRequest,
    ) -> Result<Arc<dyn Reservation>> {
        cx.check()?;
        let (nodes, placement, gpus) = match &request.simulated {
            Some(nodes) => (nodes.clone(), place(&request.cluster, nodes, request.unified)?, HeldGpus::default()),
            None => {
                let here = request.counted(this_machine());
                let (placement, gpus) = hold(cx, &GpuFolder::of_this_machine(), request, &here).await?;
                (vec![here], placement, gpus)
            }
        };
        let log = EventLog::new();
        nodes.iter().for_each(|node| log.push(NodeEvent::Serving { node: node.name.clone() }));
        let (placement, gpus, deployments) = (Arc::new(placement), Arc::new(gpus), Mutex::new(Some(Vec::new())));
        Ok(Arc::new(Self { ranks: Arc::new(ranks), placement, nodes, gpus, log, deployments }))
    }

    /// Holds a rendezvous, and starts the first incarnation of every rank.
    async fn start(&self, cx: &CallContext, spec: LaunchSpec) -> Result<Arc<dyn Deployment>> {
        let subject = format!("start group {}", spec.group);
        let held = HeldRendezvous::hold(spec.ranks.len(), &spec.ports).map_err(|error| error.about(subject))?;
        let first: Vec<(Rank, Incarnation)> = spec.ranks.iter().map(|place| (place.rank, Incarnation(1))).collect();
        let addresses = held.addresses.clone();
        let held = HeldPlace::new(held, Arc::clone(&self.gpus));
        let ranks = self.ranks.prepare(cx, spec, addresses, Some(held)).await?;
        ranks.start(&first, None).await?;
        Ok(ranks)
    }
}

#[async_trait]
impl Reservation for MachineReservation {
    fn placement(&self) -> Arc<Placement> {
        Arc::clone(&self.placement)
    }

    fn nodes(&self) -> Vec<NodeStatus> {
        let node = |node: &NodeResources| NodeStatus {
            resources: node.clone(),
            address: None,
            state: NodeState::Serving,
            usage: None,
        };
        self.nodes.iter().map(node).collect()
    }

    fn events(&self) -> BoxStream<'static, NodeEvent> {
        self.log.stream()
    }

    async fn launch(&self, cx: &CallContext, spec: LaunchSpec) -> Result<Arc<dyn Deployment>> {
        let lock = || self.deployments.lock();
        let released = || Error::not_started(Code::Unavailable, "the bundles were released");
        if lock().is_none() {
            return Err(released());
        }
        let deployment = self.start(cx, spec).await?;
        let mut deployments = lock();
        let deployments = deployments.as_mut().ok_or_else(released)?;
        deployments.retain(|known| known.strong_count() > 0);
        deployments.push(Arc::downgrade(&deployment));
        Ok(deployment)
    }

    async fn release(&self, grace: Duration) -> Result<()> {
        let held: Vec<_> = {
            let mut deployments = self.deployments.lock();
            deployments.take().into_iter().flatten().filter_map(|known| known.upgrade()).collect()
        };
        let ended = join_all(held.iter().map(|deployment| deployment.shutdown(grace))).await;
        ended.into_iter().collect::<Result<()>>()?;
        // Whoever still has a group of it holds no GPU.
        self.gpus.release();
        Ok(())
    }
}

/// Places the bundles of `request` on this machine, and holds their GPUs.
///
/// A GPU that another cluster holds is an error at once: that cluster may well be one of this program, which waits here. A GPU whose cluster has ended,
/// but not its ranks, is waited for.
async fn hold(
    cx: &CallContext,
    folder: &GpuFolder,
    request: &ReserveRequest,
    here: &NodeResources,
) -> Result<(Placement, HeldGpus)> {
    let cluster = &request.cluster;
    let on = |node: &NodeResources| place(cluster, std::slice::from_ref(node), request.unified);
    // What the whole machine has no room for is a mistake of the request.
    let placement = on(here)?;
    let Devices::Named(names) = &here.gpus else { return Ok((placement, HeldGpus::default())) };
    if !cluster.use_gpus {
        return Ok((placement, HeldGpus::default()));
    }
    let until = Instant::now() + RANKS_END_TIMEOUT;
    loop {
        let look = folder.look(cx, names, cluster.share_gpus).await?;
        let free = NodeResources { gpus: Devices::Named(look.free()), ..here.clone() };
        if let Ok(placement) = on(&free) {
            let bundles = placement.groups.iter().flat_map(|group| &group.bundles);
            let wanted: Vec<String> = bundles.filter_map(|bundle| bundle.gpu.clone()).collect();
            let holder = match cluster.name.as_str() {
                "" => "a cluster without a name".to_owned(),
                name => format!("cluster {name}"),
            };
            let held = look.hold(folder, &wanted, &holder)?;
            return Ok((placement, held));
        }
        if !look.is_ending() || Instant::now() >= until {
            return Err(not_free(request, here, &look.free(), &look.taken()));
        }
        drop(look);
        sleep(POLL_INTERVAL).await;
    }
}

fn not_free(request: &ReserveRequest, here: &NodeResources, free: &[String], taken: &[String]) -> Error {
    let cluster = &request.cluster;
    let message = format!(
        "not enough free GPUs for bundles {:?}: of the GPUs of {}, [{}] are free{}\n  fix: shut down what holds them, or ask for fewer bundles. \
         Groups that share GPUs start on one VirtualCluster; clusters that share them set share_gpus, each of them",
        cluster.bundle_ct_per_node_list,
        here.name,
        free.join(", "),
        listed(taken)
    );
    let error = Error::not_started(Code::ResourceExhausted, message);
    error.about(format!("place cluster {}", cluster.name).trim_end().to_owned())
}

/// Returns what this machine has.
pub(super) fn this_machine() -> NodeResources {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    NodeResources::new(host_name(), u32::try_from(cpus).unwrap_or(u32::MAX), visible_gpus())
}

#[cfg(test)]
mod tests {
    use crate::placement::{ClusterSpec, GpuIds};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_another_holds_is_no_mistake_of_the_request_and_what_the_machine_has_not_is() {
        let parent = tempfile::tempdir().unwrap();
        let folder = GpuFolder::at(parent.path().join("gpus"));
        let here = NodeResources::new("here", 4, vec!["900".to_owned(), "901".to_owned()]);
        let reserve = async |gpu_ids: GpuIds, shares: bool| {
            let mut cluster = ClusterSpec::new([1]);
            (cluster.gpu_ids, cluster.share_gpus, cluster.name) = (gpu_ids, shares, "named".to_owned());
            hold(&CallContext::default(), &folder, &ReserveRequest::new(cluster), &here).await
        };
        let gpu = |held: &(Placement, HeldGpus)| held.0.groups[0].bundles[0].gpu.clone().unwrap();
        let first = reserve(GpuIds::Flat(vec![901]), false).await.unwrap();
        assert_eq!(gpu(&first), "901");
        let error = reserve(GpuIds::Flat(vec![901]), false).await.expect_err("it is held");
        assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
        assert!(error.to_string().contains("place cluster named: not enough free GPUs for bundles [1]"), "{error}");
        assert!(error.to_string().contains("[900] are free\n  GPU 901 is held by this process ("), "{error}");
        let error = reserve(GpuIds::Flat(vec![902]), false).await.expect_err("there is none");
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        let second = reserve(GpuIds::Auto, true).await.unwrap();
        assert_eq!(gpu(&second), "900", "the next one that is free");
        assert_eq!(gpu(&reserve(GpuIds::Auto, true).await.unwrap()), "900", "two that share it");
        // Ranks that do not end are waited for, but not for ever.
        let ranks = std::fs::File::open(&folder.rank_files(["901".to_owned()].iter())[0]).unwrap();
        ranks.try_lock_shared().unwrap();
        drop(first);
        let error = reserve(GpuIds::Auto, false).await.expect_err("they never end");
        assert!(error.to_string().contains("GPU 901 is free when the ranks have ended"), "{error}");
        ranks.unlock().unwrap();
        assert_eq!(gpu(&reserve(GpuIds::Auto, false).await.unwrap()), "901");
    }
}
