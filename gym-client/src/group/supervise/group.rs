//! A group as users hold it: its start and end, restarts on request, status and usage.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use gym_core::group::{Balancer, Gate, GroupView, Member, Rank, RankExit, RankLayout, RankState, WorkerGroup};
use gym_core::{CallContext, Code, Error, Execution, Result};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::group::provision::{LaunchSpec, Provisioner};
use crate::group::supervise::options::GroupOptions;
use crate::group::supervise::record::RankRecord;
use crate::group::supervise::registration::{ClusterBinding, GroupRegistration};
use crate::group::supervise::status::{self, RankStatus, RankUsage, StuckRank};
use crate::group::supervise::supervisor::{GroupState, GroupStop, GroupSupervisor, RestartReply, SupervisorCommand};
use crate::group::usage::node::NodeMonitor;

/// Wishes that wait for the supervisor, which answers them at once: more callers than this at the same instant queue.
const COMMANDS: usize = 8;
/// The death of a process is told when everything that it had started is gone as well, which takes this long at most.
const EXIT_WAIT: Duration = Duration::from_secs(10);

/// Ranks that are kept alive. Dropping it ends them at once; [`Group::shutdown`] does so in order.
pub struct Group {
    pub(super) shared: Arc<GroupState>,
    layout: RankLayout,
    memory_limit_bytes: Option<u64>,
    commands: mpsc::Sender<SupervisorCommand>,
    monitor: Option<Arc<NodeMonitor>>,
    /// Given up when the group is shut down or dropped: others may use the bundles then.
    registration: Mutex<Option<GroupRegistration>>,
    _supervisor: AbortOnDropHandle<()>,
}

/// Why a group did not start: which ranks, and how each of them ended.
pub struct StartError {
    group: Arc<str>,
    cause: Error,
    failed: Vec<Member>,
}

impl Group {
    /// Starts the ranks of `spec` and waits until all of them take calls.
    ///
    /// # Errors
    /// When `provisioner` starts none; when a rank ended and may not be started again; when `cx` ends first. Nothing is left
    /// of the group then.
    pub async fn start(
        cx: &CallContext,
        provisioner: &dyn Provisioner,
        spec: LaunchSpec,
        options: GroupOptions,
    ) -> Result<Self, StartError> {
        Self::start_on(cx, provisioner, spec, options, None).await
    }

    pub(crate) async fn start_on(
        cx: &CallContext,
        provisioner: &dyn Provisioner,
        spec: LaunchSpec,
        options: GroupOptions,
        on: Option<ClusterBinding>,
    ) -> Result<Self, StartError> {
        let (gate, registration, monitor) = match on {
            Some(ClusterBinding { gate, registration, monitor }) => (gate, Some(registration), monitor),
            None => (None, None, None),
        };
        let name = Arc::clone(&spec.group);
        let refused = |cause: Error| StartError { group: Arc::clone(&name), cause, failed: Vec::new() };
        let layout = layout(&spec, &options).map_err(refused)?;
        let records = spec.ranks.iter().cloned().map(RankRecord::new).collect();
        let memory_limit_bytes = spec.memory_limit_bytes;
        let deployment = provisioner.launch(cx, spec).await.map_err(refused)?;
        let events = deployment.events();
        let shared = Arc::new(GroupState::new(Arc::clone(&name), options, deployment, gate, records));
        let (commands, receiver) = mpsc::channel(COMMANDS);
        let supervisor = tokio::spawn(GroupSupervisor::new(Arc::clone(&shared)).run(events, receiver));
        let supervisor = AbortOnDropHandle::new(supervisor);
        if let Some(registration) = &registration {
            registration.ends_by(GroupStop::of(&shared));
        }
        let registration = Mutex::new(registration);
        let group =
            Self { shared, layout, memory_limit_bytes, commands, monitor, registration, _supervisor: supervisor };
        match group.ready(cx).await {
            Ok(()) => Ok(group),
            Err(error) => {
                let _ = group.shutdown(Duration::ZERO).await;
                Err(error)
            }
        }
    }

    /// Waits until every rank takes calls.
    ///
    /// # Errors
    /// When a rank has ended for good, which names it and says how; when `cx` ends first.
    pub async fn ready(&self, cx: &CallContext) -> Result<(), StartError> {
        let lost = |member: &&Member| match member.state {
            RankState::Dead => !self.shared.options.restart_on_failure,
            RankState::Retired | RankState::Stopped => true,
            _ => false,
        };
        let mut view = self.shared.view.subscribe();
        let settled = |view: &Arc<GroupView>| {
            let members = view.members();
            members.iter().all(|member| member.state == RankState::Healthy) || members.iter().any(|m| lost(&m))
        };
        let settled = cx.bound(Execution::NotStarted, async {
            let settled = view.wait_for(settled).await;
            settled.map(|view| Arc::clone(&view)).map_err(|_| Error::internal("the group's supervisor is gone"))
        });
        let late = |cause| (cause, self.shared.view.borrow().clone());
        let (cause, view) = match settled.await {
            Ok(view) => (Error::not_started(Code::Unavailable, "a rank ended and is not started again"), view),
            Err(error) => late(error),
        };
        let unprepared = |member: &&Member| member.state != RankState::Healthy;
        let failed: Vec<Member> = view.members().iter().filter(unprepared).cloned().collect();
        if failed.is_empty() {
            return Ok(());
        }
        Err(StartError { group: Arc::clone(&self.shared.name), cause, failed })
    }

    /// Starts every rank again that has ended, and returns those ranks when all ranks take calls. Nothing has failed: none.
    ///
    /// Works without `restart_on_failure` too; each restart counts against the budget. Ranks whose restart is under way by
    /// itself are waited for.
    ///
    /// # Errors
    /// `ResourceExhausted` naming the ranks whose budget is spent, after the others are restarted; when a restarted rank ends
    /// again; when `cx` ends first.
    pub async fn restart_failed_workers(&self, cx: &CallContext) -> Result<Vec<Rank>> {
        let subject = format!("restart the failed ranks of {}", self.shared.name);
        self.await_exits(cx).await;
        let mut restarted = Vec::new();
        loop {
            let RestartReply { begun, refused } = self.ask_for_restarts().await?;
            restarted.extend(begun);
            if !refused.is_empty() {
                self.settled(cx, &refused).await.map_err(|error| Error::from(error).about(subject.clone()))?;
                let max = self.shared.options.max_restarts;
                let message = format!("ranks {refused:?} have used their {max} restarts; raise max_restarts");
                return Err(Error::not_started(Code::ResourceExhausted, message).about(subject));
            }
            match self.ready(cx).await {
                Ok(()) => return Ok(restarted),
                // One whose end was told only meanwhile. It is begun or refused next, each rank once at most, so this ends.
                Err(error) if cx.check().is_ok() && error.failed().any(|rank| fresh(&rank, &restarted)) => {}
                Err(error) => return Err(Error::from(error).about(subject)),
            }
        }
    }

    async fn ask_for_restarts(&self) -> Result<RestartReply> {
        let (reply, answer) = oneshot::channel();
        let gone = || Error::internal("the group's supervisor is gone");
        self.commands.send(SupervisorCommand::RestartFailed(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())
    }

    /// As [`Group::ready`], apart from the ranks in `except`.
    async fn settled(&self, cx: &CallContext, except: &[Rank]) -> Result<(), StartError> {
        let mut view = self.shared.view.subscribe();
        let moving = |member: &Member| {
            !except.contains(&member.rank)
                && matches!(member.state, RankState::Starting | RankState::Restarting | RankState::Stale)
        };
        let waited = cx.bound(Execution::NotStarted, async {
            let _ = view.wait_for(|view| !view.members().iter().any(moving)).await;
            Ok(())
        });
        waited.await.map_err(|cause| StartError { group: Arc::clone(&self.shared.name), cause, failed: Vec::new() })
    }

    /// A call fails as soon as the connection to a dead rank breaks, which is before its death is told. So: who does not
    /// answer now is waited for until something is known of it.
    async fn await_exits(&self, cx: &CallContext) {
        let healthy: Vec<_> = {
            let records = self.shared.records();
            let healthy = records.iter().filter(|record| record.state() == RankState::Healthy);
            healthy
                .filter_map(|record| Some((record.place.rank, record.incarnation, record.control.clone()?)))
                .collect()
        };
        let waits = healthy.into_iter().map(|(rank, incarnation, control)| async move {
            if GroupState::probe(&control).await.is_ok() {
                return;
            }
            let mut view = self.shared.view.subscribe();
            let news = view.wait_for(|view| {
                view.member(rank).is_none_or(|m| m.incarnation != incarnation || m.state != RankState::Healthy)
            });
            let _ = tokio::time::timeout(cx.remaining().min(EXIT_WAIT), news).await;
        });
        join_all(waits).await;
    }

    /// Sends calls that any rank may take to the ranks in turn, to the least busy, …: as the group's configuration says.
    ///
    /// # Errors
    /// `InvalidArgument` when it has weights that are not one for each rank.
    pub fn balancer(self: &Arc<Self>) -> Result<Balancer> {
        let balance = self.shared.options.balance.clone().unwrap_or_default();
        Balancer::new(Arc::clone(self) as Arc<dyn WorkerGroup>, balance)
    }

    /// How each rank is, in rank order. Never waits for a rank.
    #[must_use]
    pub fn worker_status(&self) -> Vec<RankStatus> {
        let now = Instant::now();
        self.shared.records().iter().map(|record| status::status(record, now, &self.shared.options)).collect()
    }

    /// What each rank uses, in rank order, as last sampled. Never waits for a rank.
    #[must_use]
    pub fn resource_usage(&self) -> Vec<RankUsage> {
        let usage = self.shared.deployment.usage();
        let places: Vec<_> =
            self.shared.records().iter().map(|record| (record.place.rank, record.place.gpus.clone())).collect();
        let gpus = |names: Vec<String>| self.monitor.as_ref().map(|monitor| monitor.gpus(&names)).unwrap_or_default();
        let memory_limit_bytes = self.memory_limit_bytes;
        let rank =
            |(rank, names)| RankUsage { rank, host: usage.get(&rank).copied(), memory_limit_bytes, gpus: gpus(names) };
        places.into_iter().map(rank).collect()
    }

    /// Ranks that live and do not move: no heartbeat, or a call without progress. Reads only; ends nothing.
    #[must_use]
    pub fn detect_stuck_workers(&self) -> Vec<StuckRank> {
        let now = Instant::now();
        self.shared.records().iter().filter_map(|record| status::stuck(record, now, &self.shared.options)).collect()
    }

    /// Ends a rank as a crash would: for drills.
    ///
    /// # Errors
    /// `NotFound` for a rank that does not live.
    pub async fn kill(&self, rank: Rank) -> Result<()> {
        self.shared.deployment.kill(rank, None).await
    }

    /// Takes no new calls, asks every rank to end, kills after `grace` those that have not, and returns when they are gone.
    /// Again: nothing.
    ///
    /// # Errors
    /// A rank that could not even be killed.
    pub async fn shutdown(&self, grace: Duration) -> Result<()> {
        let stopped = self.shared.stop(grace).await;
        self.registration.lock().unwrap_or_else(PoisonError::into_inner).take();
        stopped
    }
}

/// Whether a rank is dead without having been started again by this call.
fn fresh((rank, state, _): &(Rank, RankState, Option<&RankExit>), restarted: &[Rank]) -> bool {
    *state == RankState::Dead && !restarted.contains(rank)
}

fn layout(spec: &LaunchSpec, options: &GroupOptions) -> Result<RankLayout> {
    let ranks = spec.ranks.len();
    for (index, place) in spec.ranks.iter().enumerate() {
        if usize::try_from(place.rank).ok() != Some(index) {
            return Err(Error::invalid(format!("place {index} is of rank {}; list them in rank order", place.rank)));
        }
    }
    match &options.layout {
        None => Ok(RankLayout::line(ranks)?),
        Some(layout) if layout.size() == ranks => Ok(layout.clone()),
        Some(layout) => Err(Error::invalid(format!("the layout has {} ranks, the group {ranks}", layout.size()))),
    }
}

impl WorkerGroup for Group {
    fn name(&self) -> &Arc<str> {
        &self.shared.name
    }

    fn layout(&self) -> &RankLayout {
        &self.layout
    }

    fn view(&self) -> watch::Receiver<Arc<GroupView>> {
        self.shared.view.subscribe()
    }

    fn gate(&self) -> Option<Arc<dyn Gate>> {
        self.shared.gate.clone()
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group({}, {} ranks)", self.shared.name, self.layout.size())
    }
}

impl StartError {
    /// What ended the wait.
    #[must_use]
    pub fn cause(&self) -> &Error {
        &self.cause
    }

    /// The ranks that do not take calls, ascending.
    pub fn failed(&self) -> impl Iterator<Item = (Rank, RankState, Option<&RankExit>)> {
        self.failed.iter().map(|member| (member.rank, member.state, member.exit.as_deref()))
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let subject = format!("start group {}", self.group);
        if self.cause.subject() != subject {
            write!(f, "{subject}: ")?;
        }
        write!(f, "{}", self.cause)?;
        for (rank, state, exit) in self.failed() {
            write!(f, "; rank {rank} is {state}")?;
            if let Some(exit) = exit {
                write!(f, ": incarnation {} {exit}", exit.incarnation)?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StartError").field("text", &self.to_string()).field("failed", &self.failed).finish()
    }
}

impl std::error::Error for StartError {}

impl From<StartError> for Error {
    fn from(error: StartError) -> Self {
        Self::new(error.cause.code(), error.cause.execution(), error.to_string())
    }
}
