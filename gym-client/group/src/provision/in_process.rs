//! Ranks as tasks and threads of this process, for all-in-one programs, tests and laptops.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use futures_util::stream::BoxStream;
use gym_client::transport::Transports;
use gym_core::base::watch;
use gym_core::group::collective::InProcessCollectives;
use gym_core::group::{ExitCause, Rank, RankExit, WorkerEnv, WorkerHost};
use gym_core::transport::{ListenOptions, Listener};
use gym_core::{CallContext, CancelToken, Code, Error, Handler, Incarnation, Result};
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::time::Instant;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::provision::deployment::{Deployment, LaunchSpec, Provisioner, Reservation, ReserveRequest};
use crate::provision::events::{EventLog, RankEvent};
use crate::provision::machine::{MachineReservation, PreparedRanks, PreparesRanks};
use crate::provision::place::{HeldPlace, RankPlace, Rendezvous};
use crate::provision::variables::RankEnvironment;
use crate::provision::workers::{WorkerKind, Workers, start_inputs};
use crate::usage::process::ProcessUsage;

/// Starts ranks in this process. They are called in memory, each by its own name.
///
/// The environment variables of a rank are only in [`WorkerEnv::variables`], because a process has a single environment.
///
/// ```
/// use gym_core::transport::InProcess;
/// use gym_group::prelude::*;
/// use gym_group::{Group, GroupOptions, InProcessRanks, LaunchSpec, RankPlace, WorkerKind, Workers};
/// # struct Seeded(String);
/// # worker! {
/// #     impl Worker for Seeded as seeded {
/// #         fn start(env: WorkerEnv, _: ()) -> Result<Self> { Ok(Self(env.variables["SEED"].clone())) }
/// #         shared async fn seed(&self, _: &CallContext, _: Payload<()>) -> Result<Payload<String>> { Ok(self.0.clone().into()) }
/// #     }
/// # }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let network = InProcess::new();
/// let ranks = InProcessRanks::new(Workers::new().with("seeded", WorkerKind::of::<Seeded>()), network.clone());
/// let init = serde_json::value::to_raw_value(&()).expect("a unit is JSON");
/// let mut spec = LaunchSpec::new("samplers", "seeded", init, vec![RankPlace::on_one_node(0, 1)]);
/// spec.variables.insert("SEED".to_owned(), "7".to_owned());
/// let group = Group::start(&CallContext::default(), &ranks, spec, GroupOptions::new(network.into())).await?;
/// assert_eq!(group.call(seeded::seed, ()).await?.into_values(), ["7"]);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct InProcessRanks {
    workers: Workers,
    transports: Transports,
    /// The start of the clock of leases.
    began: Instant,
}

impl InProcessRanks {
    /// Creates a provisioner of these worker types. The ranks listen over those of `transports` that need no socket; the controller
    /// must have the same transports.
    #[must_use]
    pub fn new(workers: Workers, transports: impl Into<Transports>) -> Self {
        Self { workers, transports: transports.into(), began: Instant::now() }
    }
}

#[async_trait]
impl Provisioner for InProcessRanks {
    async fn reserve(&self, cx: &CallContext, request: &ReserveRequest) -> Result<Arc<dyn Reservation>> {
        MachineReservation::reserve(self.clone(), cx, request).await
    }
}

#[async_trait]
impl PreparesRanks for InProcessRanks {
    async fn prepare(
        &self,
        cx: &CallContext,
        spec: LaunchSpec,
        rendezvous: Rendezvous,
        held: Option<HeldPlace>,
    ) -> Result<Arc<dyn PreparedRanks>> {
        cx.check()?;
        let subject = format!("start group {}", spec.group);
        self.workers.kind(&spec.worker).map_err(|error| error.about(subject.clone()))?;
        if spec.memory_limit_bytes.is_some() {
            let message = "a memory limit needs processes; ranks in one process share its memory";
            return Err(Error::not_started(Code::Unimplemented, message).about(subject));
        }
        let state = Arc::new(InProcessState {
            launch: fastrand::u64(..),
            workers: self.workers.clone(),
            transports: self.transports.clone(),
            spec,
            rendezvous: Mutex::new(rendezvous),
            log: EventLog::new(),
            collectives: Arc::new(InProcessCollectives::new()),
            live: Mutex::default(),
            tasks: TaskTracker::new(),
        });
        Ok(Arc::new(InProcessDeployment {
            state,
            began: self.began,
            _held: held,
            lease: watch::Sender::new(None),
            watchdog: Mutex::default(),
        }))
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }
}

#[derive(Debug)]
struct InProcessDeployment {
    state: Arc<InProcessState>,
    /// The start of the clock of the lease.
    began: Instant,
    /// The ports of the rendezvous and the GPUs, if this process holds them for the group.
    _held: Option<HeldPlace>,
    lease: watch::Sender<Option<Instant>>,
    /// Ends the ranks when the lease ends. Runs from the first lease on.
    watchdog: Mutex<Option<AbortOnDropHandle<()>>>,
}

#[derive(Debug)]
struct InProcessState {
    /// Unlike that of any other launch: a group may start before the names of an earlier group with the same name are free.
    launch: u64,
    workers: Workers,
    transports: Transports,
    spec: LaunchSpec,
    rendezvous: Mutex<Rendezvous>,
    log: EventLog,
    /// Where the ranks of the group meet.
    collectives: Arc<InProcessCollectives>,
    live: Mutex<LiveRanks>,
    /// All incarnations, including those that are stopping.
    tasks: TaskTracker,
}

#[derive(Debug, Default)]
struct LiveRanks {
    ranks: BTreeMap<Rank, LiveRank>,
    /// The last incarnation of each rank that was started.
    started: BTreeMap<Rank, Incarnation>,
    /// The ranks were shut down or dropped: no further rank is started.
    closed: bool,
}

impl LiveRanks {
    /// Removes and returns all incarnations; none is started afterwards.
    fn close(&mut self) -> BTreeMap<Rank, LiveRank> {
        self.closed = true;
        std::mem::take(&mut self.ranks)
    }
}

/// The current incarnation of a rank: a task that creates the worker, serves it, and reports its exit.
#[derive(Debug)]
struct LiveRank {
    incarnation: Incarnation,
    end: StopSignals,
    ended: CancelToken,
    task: AbortOnDropHandle<()>,
}

/// Reports the exit of an incarnation, also of one whose task is dropped.
struct ExitReport {
    state: Arc<InProcessState>,
    rank: Rank,
    exit: Option<RankExit>,
    ended: CancelToken,
}

impl Drop for ExitReport {
    fn drop(&mut self) {
        if let Some(exit) = self.exit.take() {
            self.state.log.push(RankEvent::Exited { rank: self.rank, exit });
        }
        self.ended.cancel();
    }
}

/// Signals that end an incarnation.
#[derive(Clone, Debug, Default)]
struct StopSignals {
    /// Requests a stop; running calls may finish.
    ask: CancelToken,
    kill: CancelToken,
}

impl InProcessState {
    fn start(this: &Arc<Self>, place: RankPlace, incarnation: Incarnation) -> Result<()> {
        let (rank, end, ended) = (place.rank, StopSignals::default(), CancelToken::new());
        let ends = end.clone();
        // Held during the start, so that `close` finds every incarnation that was started.
        let mut live = this.live.lock();
        if live.closed {
            let message = format!("the ranks of group {} were shut down", this.spec.group);
            return Err(Error::not_started(Code::Unavailable, message));
        }
        let exit = Some(RankExit::new(incarnation, ExitCause::Died));
        let mut report = ExitReport { state: Arc::clone(this), rank, exit, ended: ended.clone() };
        let task = AbortOnDropHandle::new(this.tasks.spawn(async move {
            report.state.log.push(RankEvent::Started { rank, incarnation, pid: None });
            let state = Arc::clone(&report.state);
            let exit = state.live(&place, incarnation, &ends).await;
            report.exit.replace(exit);
        }));
        live.started.insert(rank, incarnation);
        live.ranks.insert(rank, LiveRank { incarnation, end, ended, task });
        Ok(())
    }

    async fn live(&self, place: &RankPlace, incarnation: Incarnation, end: &StopSignals) -> RankExit {
        let made = tokio::select! { biased;
            () = end.kill.cancelled() => return RankExit::new(incarnation, ExitCause::Died),
            () = end.ask.cancelled() => return RankExit::new(incarnation, ExitCause::Stopped),
            made = tokio::time::timeout(self.spec.start_timeout, self.make(place, incarnation)) => made,
        };
        let (host, listener, handler) = match made {
            Ok(Ok(made)) => made,
            Ok(Err(error)) => return RankExit::start_failed(incarnation, error.to_string()),
            Err(_) => return RankExit::not_ready(incarnation, self.spec.start_timeout),
        };
        let host = KillOnDrop(host);
        let endpoints = listener.endpoints().to_vec();
        self.log.push(RankEvent::Ready { rank: place.rank, incarnation, endpoints });
        // A kill closes the connections below; until then, running calls have no time limit.
        let serving = gym_core::transport::serve(listener, handler, end.ask.clone(), Duration::MAX);
        tokio::select! { biased;
            () = end.kill.cancelled() => RankExit::new(incarnation, ExitCause::Died),
            _ = serving => {
                let _ = host.0.stop(Duration::ZERO).await;
                RankExit::new(incarnation, ExitCause::Stopped)
            }
        }
    }

    /// Returns what the worker of a rank is started with.
    fn inputs(&self, kind: &WorkerKind, place: &RankPlace) -> Result<(RankEnvironment, Box<RawValue>)> {
        let rendezvous = self.rendezvous.lock().clone();
        start_inputs(kind, &self.workers.transports(), &self.spec, place, &rendezvous)
    }

    async fn make(
        &self,
        place: &RankPlace,
        incarnation: Incarnation,
    ) -> Result<(WorkerHost, Box<dyn Listener>, Arc<dyn Handler>)> {
        let kind = self.workers.kind(&self.spec.worker)?;
        let (environment, init) = self.inputs(kind, place)?;
        let mut env = WorkerEnv::new(Arc::clone(&self.spec.group), place.rank, place.world_size);
        env.local_rank = place.local_rank;
        env.node_rank = place.node_rank;
        env.incarnation = incarnation;
        env.variables = environment.into_variables();
        env.peers = self.spec.collectives.peers(&self.spec.group, place.rank, self.collectives.clone());
        let host = kind.start(env, init).await?;
        let name = format!("{}.{:x}/{}/{incarnation}", self.spec.group, self.launch, place.rank);
        let options = ListenOptions::named(name).bounded_by_handler();
        let (listener, handler) = self.transports.listen(options, Arc::new(host.clone()), &[]).await?;
        Ok((host, listener, handler))
    }

    fn places(&self, incarnations: &[(Rank, Incarnation)]) -> Result<Vec<(RankPlace, Incarnation)>> {
        let place_of = |rank: Rank| self.spec.ranks.iter().find(|place| place.rank == rank).cloned();
        incarnations
            .iter()
            .map(|(rank, incarnation)| Ok((place_of(*rank).ok_or_else(|| self.no_such(*rank))?, *incarnation)))
            .collect()
    }

    fn no_such(&self, rank: Rank) -> Error {
        Error::not_started(Code::NotFound, format!("group {} has no rank {rank}", self.spec.group))
    }
}

/// Ends a worker however its incarnation ends, even if the task is aborted or another task still holds a channel to it.
struct KillOnDrop(WorkerHost);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.kill();
    }
}

impl LiveRank {
    /// Ends the incarnation as a crash would, without a stop request, and returns when it has ended.
    async fn kill(self) {
        self.end.kill.cancel();
        let _ = self.task.await;
    }

    /// Stops the incarnation, and returns when it has ended.
    async fn finish(self, grace: Duration) {
        let Self { end, task, .. } = self;
        end.ask.cancel();
        let mut task = task;
        if tokio::time::timeout(grace, &mut task).await.is_err() {
            end.kill.cancel();
            let _ = task.await;
        }
    }
}

#[async_trait]
impl PreparedRanks for InProcessDeployment {
    async fn start(&self, incarnations: &[(Rank, Incarnation)], rendezvous: Option<Rendezvous>) -> Result<()> {
        let places = self.state.places(incarnations)?;
        if let Some(rendezvous) = rendezvous {
            *self.state.rendezvous.lock() = rendezvous;
        }
        for (place, incarnation) in places {
            if self.state.live.lock().started.get(&place.rank).is_none_or(|started| *started < incarnation) {
                InProcessState::start(&self.state, place, incarnation)?;
            }
        }
        Ok(())
    }

    async fn end(&self, ranks: &[Rank]) -> Result<()> {
        // They stay where they are, so that they end in order even if this future is dropped.
        let ending: Vec<CancelToken> = {
            let live = self.state.live.lock();
            let ending = ranks.iter().filter_map(|rank| live.ranks.get(rank));
            ending.inspect(|rank| rank.end.kill.cancel()).map(|rank| rank.ended.clone()).collect()
        };
        join_all(ending.iter().map(CancelToken::cancelled)).await;
        Ok(())
    }

    async fn lease(&self, until: Duration) {
        self.lease.send_replace(Some(self.began + until));
        let mut watchdog = self.watchdog.lock();
        watchdog.get_or_insert_with(|| {
            let (state, lease) = (Arc::clone(&self.state), self.lease.subscribe());
            AbortOnDropHandle::new(tokio::spawn(async move {
                lease_ended(lease).await;
                let ranks = state.live.lock().close();
                drop(ranks);
            }))
        });
    }
}

/// Waits until the lease has ended.
async fn lease_ended(mut lease: watch::Receiver<Option<Instant>>) {
    loop {
        let until = *lease.borrow_and_update();
        let over = async {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! { biased;
            () = over => return,
            // An error means that the deployment was dropped, and this task with it.
            Ok(()) = lease.changed() => {}
        }
    }
}

#[async_trait]
impl Deployment for InProcessDeployment {
    fn events(&self) -> BoxStream<'static, RankEvent> {
        self.state.log.stream()
    }

    async fn restart(&self, cx: &CallContext, incarnations: &[(Rank, Incarnation)]) -> Result<()> {
        cx.check()?;
        let places = self.state.places(incarnations)?;
        let old: Vec<LiveRank> = {
            let mut live = self.state.live.lock();
            incarnations.iter().filter_map(|(rank, _)| live.ranks.remove(rank)).collect()
        };
        join_all(old.into_iter().map(LiveRank::kill)).await;
        places.into_iter().try_for_each(|(place, incarnation)| InProcessState::start(&self.state, place, incarnation))
    }

    async fn kill(&self, rank: Rank, incarnation: Option<Incarnation>) -> Result<()> {
        let live = {
            let ranks = &mut self.state.live.lock().ranks;
            let meant = ranks.get(&rank).is_some_and(|now| incarnation.is_none_or(|meant| now.incarnation == meant));
            meant.then(|| ranks.remove(&rank)).flatten()
        };
        let live = live.ok_or_else(|| self.state.no_such(rank))?;
        tracing::debug!(group = %self.state.spec.group, rank, incarnation = %live.incarnation, "killed");
        live.kill().await;
        Ok(())
    }

    fn usage(&self) -> BTreeMap<Rank, ProcessUsage> {
        BTreeMap::new()
    }

    async fn environment(&self, cx: &CallContext, rank: Rank) -> Result<RankEnvironment> {
        cx.check()?;
        let place = self.state.spec.ranks.iter().find(|place| place.rank == rank);
        let place = place.ok_or_else(|| self.state.no_such(rank))?;
        Ok(self.state.inputs(self.state.workers.kind(&self.state.spec.worker)?, place)?.0)
    }

    async fn shutdown(&self, grace: Duration) -> Result<()> {
        let ranks = self.state.live.lock().close();
        join_all(ranks.into_values().map(|rank| rank.finish(grace))).await;
        // Also waits for incarnations that a restart or a kill is ending.
        self.state.tasks.close();
        self.state.tasks.wait().await;
        Ok(())
    }
}

impl Drop for InProcessDeployment {
    fn drop(&mut self) {
        // The incarnations hold references to this state, so dropping it cannot end them.
        let ranks = self.state.live.lock().close();
        drop(ranks);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt, StreamExt};
    use gym_core::transport::InProcess;

    use super::*;
    use crate::provision::workers::tests::Idle;

    async fn idle() -> Arc<dyn Deployment> {
        let workers = Workers::new().with("idle", WorkerKind::of::<Idle>());
        let provisioner = InProcessRanks::new(workers, InProcess::new());
        let init = serde_json::value::to_raw_value(&()).unwrap();
        let ranks = (0..2).map(|rank| RankPlace::on_one_node(rank, 2)).collect();
        let spec = LaunchSpec::new("group", "idle", init, ranks);
        let reservation = provisioner.reserve(&CallContext::default(), &ReserveRequest::for_ranks(2)).await.unwrap();
        reservation.launch(&CallContext::default(), spec).await.unwrap()
    }

    #[tokio::test]
    async fn a_life_that_is_over_is_not_killed_in_the_next_one() {
        let deployment = idle().await;
        deployment.restart(&CallContext::default(), &[(0, Incarnation(2))]).await.unwrap();
        let late = deployment.kill(0, Some(Incarnation(1))).await.unwrap_err();
        assert_eq!(late.code(), Code::NotFound);
        deployment.kill(0, Some(Incarnation(2))).await.unwrap();
        deployment.kill(1, None).await.unwrap();
        assert_eq!(deployment.kill(1, None).await.unwrap_err().code(), Code::NotFound);
    }

    #[tokio::test]
    async fn a_restart_that_a_shutdown_overtakes_starts_nothing() {
        let deployment = idle().await;
        let (cx, incarnations) = (CallContext::default(), [(0, Incarnation(2)), (1, Incarnation(2))]);
        let mut restart = deployment.restart(&cx, &incarnations);
        assert!(restart.as_mut().now_or_never().is_none(), "the old incarnations end first");
        deployment.shutdown(Duration::from_secs(20)).await.unwrap();
        assert_eq!(restart.await.unwrap_err().code(), Code::Unavailable);
        assert_eq!(deployment.restart(&cx, &incarnations).await.unwrap_err().code(), Code::Unavailable);
        let mut events = deployment.events();
        drop(deployment);
        let mut ended = 0;
        while let Some(event) = events.next().await {
            match event {
                RankEvent::Started { incarnation, .. } => assert_eq!(incarnation, Incarnation(1)),
                RankEvent::Exited { .. } => ended += 1,
                _ => {}
            }
        }
        assert_eq!(ended, 2, "gone before the shutdown returns");
    }
}
