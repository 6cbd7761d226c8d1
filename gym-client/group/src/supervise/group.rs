//! The supervised group: start and shutdown, restarts on request, status and usage.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use gym_core::base::watch;
use gym_core::group::{GroupView, Rank, RankExit, RankLayout, RankState, RankView, WorkerGroup};
use gym_core::{CallContext, Code, Error, Execution, Incarnation, Result};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::call::{Balancer, CallSupport, WorkerGroupExt};
use crate::provision::{LaunchSpec, Provisioner, RankEnvironment, Reservation, ReserveRequest};
use crate::supervise::options::GroupOptions;
use crate::supervise::record::RankRecord;
use crate::supervise::registration::{ClusterBinding, GroupRegistration};
use crate::supervise::status::{self, RankStatus, RankUsage, StuckRank};
use crate::supervise::supervisor::{GroupState, GroupStop, GroupSupervisor, RestartReply, SupervisorCommand};
use crate::usage::node::NodeMonitor;

/// Capacity of the supervisor's command queue; the supervisor answers each command at once. Further callers wait for capacity.
const COMMANDS: usize = 8;
/// The exit of a process is reported when all its descendants have exited, at most this long after it.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// A supervised group. Dropping it kills its ranks; [`Group::shutdown`] lets running calls finish.
///
/// ```
/// use std::time::Duration;
///
/// use gym_core::transport::InProcess;
/// use gym_group::prelude::*;
/// use gym_group::{Group, GroupOptions, InProcessRanks, LaunchSpec, RankPlace, WorkerKind, Workers};
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
/// let ranks = InProcessRanks::new(Workers::new().with("counter", WorkerKind::of::<Counter>()), network.clone());
/// let init = serde_json::value::to_raw_value(&10).expect("a number is JSON");
/// let places = (0..2).map(|rank| RankPlace::on_one_node(rank, 2)).collect();
/// let (cx, spec) = (CallContext::default(), LaunchSpec::new("counters", "counter", init, places));
/// let group = Group::start(&cx, &ranks, spec, GroupOptions::new(network.into())).await?;
/// assert_eq!(group.call(counter::add, 5).await?.into_values(), [15, 15]);
/// // A rank that is killed begins anew.
/// assert_eq!(group.restart_workers(&cx, [1]).await?, [1]);
/// assert_eq!(group.call(counter::add, 5).await?.into_values(), [20, 15]);
/// group.shutdown(Duration::from_secs(1)).await?;
/// # Ok(()) }
/// ```
pub struct Group {
    pub(super) shared: Arc<GroupState>,
    layout: RankLayout,
    memory_limit_bytes: Option<u64>,
    commands: mpsc::Sender<SupervisorCommand>,
    monitor: Option<Arc<NodeMonitor>>,
    /// Released when the group is shut down or dropped: other groups can then use the bundles.
    registration: Mutex<Option<GroupRegistration>>,
    /// The bundles of a group that has them for itself.
    reservation: Option<Arc<dyn Reservation>>,
    _supervisor: AbortOnDropHandle<()>,
}

/// The error of a group that did not start, with the ranks that failed and how each of them ended.
pub struct StartError {
    group: Arc<str>,
    cause: Error,
    failed: Vec<RankView>,
}

impl Group {
    /// Starts the ranks of `spec` and waits until all of them accept calls.
    ///
    /// # Errors
    /// If `provisioner` fails; if a rank ends and is not restarted; if `cx` ends first. No rank is left running then.
    pub async fn start(
        cx: &CallContext,
        provisioner: &dyn Provisioner,
        spec: LaunchSpec,
        options: GroupOptions,
    ) -> Result<Self, StartError> {
        let ranks = u32::try_from(spec.ranks.len()).unwrap_or(u32::MAX);
        let reservation = provisioner.reserve(cx, &ReserveRequest::for_ranks(ranks)).await;
        let refused = |cause| StartError { group: Arc::clone(&spec.group), cause, failed: Vec::new() };
        let reservation = reservation.map_err(refused)?;
        match Self::start_on(cx, &*reservation, spec, options, None).await {
            Ok(group) => Ok(Self { reservation: Some(reservation), ..group }),
            Err(error) => {
                // What it has held is nobody's now.
                if let Err(error) = reservation.release(Duration::ZERO).await {
                    tracing::warn!(group = %error.subject(), %error, "the bundles of a group that did not start were not released");
                }
                Err(error)
            }
        }
    }

    pub(crate) async fn start_on(
        cx: &CallContext,
        reservation: &dyn Reservation,
        spec: LaunchSpec,
        options: GroupOptions,
        on: Option<ClusterBinding>,
    ) -> Result<Self, StartError> {
        let (gate, registration, monitor) = match on {
            Some(ClusterBinding { gate, registration, monitor }) => (gate, Some(registration), monitor),
            None => (None, None, None),
        };
        let name = Arc::clone(&spec.group);
        spec.collectives.warn(&name);
        let refused = |cause: Error| StartError { group: Arc::clone(&name), cause, failed: Vec::new() };
        let layout = layout(&spec, &options).map_err(refused)?;
        let records = spec.ranks.iter().cloned().map(RankRecord::new).collect();
        let memory_limit_bytes = spec.memory_limit_bytes;
        let deployment = reservation.launch(cx, spec).await.map_err(refused)?;
        let events = deployment.events();
        let shared = Arc::new(GroupState::new(Arc::clone(&name), options, deployment, gate, records));
        let (commands, receiver) = mpsc::channel(COMMANDS);
        let supervisor = tokio::spawn(GroupSupervisor::new(Arc::clone(&shared), layout.clone()).run(events, receiver));
        let supervisor = AbortOnDropHandle::new(supervisor);
        if let Some(registration) = &registration {
            registration.ends_by(GroupStop::of(&shared));
        }
        let registration = Mutex::new(registration);
        let group = Self {
            shared,
            layout,
            memory_limit_bytes,
            commands,
            monitor,
            registration,
            reservation: None,
            _supervisor: supervisor,
        };
        match group.ready(cx).await {
            Ok(()) => Ok(group),
            Err(error) => {
                let _ = group.shutdown(Duration::ZERO).await;
                Err(error)
            }
        }
    }

    /// Waits until every rank accepts calls.
    ///
    /// # Errors
    /// If a rank has ended and is not restarted, with the rank and its exit; if `cx` ends first.
    pub async fn ready(&self, cx: &CallContext) -> Result<(), StartError> {
        let lost = |member: &&RankView| match member.state {
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
        let unprepared = |member: &&RankView| member.state != RankState::Healthy;
        let failed: Vec<RankView> = view.members().iter().filter(unprepared).cloned().collect();
        if failed.is_empty() {
            return Ok(());
        }
        Err(StartError { group: Arc::clone(&self.shared.name), cause, failed })
    }

    /// Restarts all exited ranks, waits until every rank accepts calls, and returns the restarted ranks. Returns an empty list if
    /// no rank had exited. A silent rank counts as exited once it has been silent for [`GroupOptions::silence_restart`]: it is killed then.
    ///
    /// Works without `restart_on_failure`, too. Each restart counts against the budget. The pause of an automatic restart ends at
    /// once.
    ///
    /// # Errors
    /// `ResourceExhausted` with the ranks whose budget is spent, after the others have restarted; if a restarted rank ends again;
    /// if `cx` ends first.
    pub async fn restart_failed_workers(&self, cx: &CallContext) -> Result<Vec<Rank>> {
        let subject = format!("restart the failed ranks of {}", self.shared.name);
        self.await_exits(cx).await;
        let ended = self.end_silent(cx).await.map_err(|error| error.about(subject.clone()))?;
        let mut restarted: BTreeSet<Rank> = ended.into_iter().collect();
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
                Ok(()) => return Ok(restarted.into_iter().collect()),
                // The exit of a rank was reported in the meantime. The next round restarts or rejects it, each rank at most once.
                Err(error) if cx.check().is_ok() && error.failed().any(|rank| fresh(&rank, &restarted)) => {}
                Err(error) => return Err(Error::from(error).about(subject)),
            }
        }
    }

    /// Kills these ranks and starts them again, with the ranks tied to them, and waits until every rank accepts calls. For ranks that hang: those of
    /// [`GroupError::unanswered`](crate::GroupError::unanswered) or [`Group::detect_stuck_workers`]. Calls that run on them fail. Returns the
    /// restarted ranks.
    ///
    /// ```no_run
    /// # use gym_group::{Method, WorkerGroupExt}; use gym_core::{CallContext, Result};
    /// # use gym_group::Group;
    /// # #[derive(Clone, Copy, Debug)] struct Train;
    /// # impl Method for Train { const NAME: &'static str = "train"; type Args = u64; type Reply = u64; }
    /// # async fn example(group: &Group, cx: &CallContext) -> Result<()> {
    /// if let Err(error) = group.call(Train, 1).await {
    ///     group.restart_workers(cx, error.unanswered()).await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Group::restart_failed_workers`]: each restart counts against the budget. `NotFound` for a rank that the group does not have.
    pub async fn restart_workers(&self, cx: &CallContext, ranks: impl IntoIterator<Item = Rank>) -> Result<Vec<Rank>> {
        let running: Vec<_> = {
            let records = self.shared.records();
            let incarnation_of = |rank: Rank| {
                let record = records.get(rank as usize).ok_or_else(|| {
                    let text = format!("the group has no rank {rank}; it has ranks 0 to {}", records.len() - 1);
                    Error::not_started(Code::NotFound, text).about(format!("restart ranks of {}", self.shared.name))
                })?;
                Ok((rank, record.incarnation))
            };
            ranks.into_iter().map(incarnation_of).collect::<Result<_>>()?
        };
        self.end(cx, &running).await?;
        // With `restart_on_failure`, their restarts may have begun already.
        let restarted = self.restart_failed_workers(cx).await?.into_iter();
        let all: BTreeSet<Rank> = restarted.chain(running.iter().map(|(rank, _)| *rank)).collect();
        Ok(all.into_iter().collect())
    }

    /// Takes these ranks out of service, with the ranks tied to them, until `on_restart` has given them the state that they need, as after a restart. For ranks
    /// whose parameters differ ([`StepMark::outdated`](crate::train::StepMark::outdated)). Waits until every rank accepts calls.
    ///
    /// # Errors
    /// `FailedPrecondition` if the group has no [`GroupOptions::on_restart`]; if a rank ends, or cannot be prepared; if `cx` ends first.
    pub async fn mark_stale(&self, cx: &CallContext, ranks: impl IntoIterator<Item = Rank>) -> Result<()> {
        let subject = format!("give ranks of {} the state of the others", self.shared.name);
        if self.shared.options.on_restart.is_none() {
            let why = "the group has no on_restart; set GroupOptions::on_restart to a method that loads the newest state, or restart the ranks";
            return Err(Error::not_started(Code::FailedPrecondition, why).about(subject));
        }
        let (reply, answer) = oneshot::channel();
        let gone = || Error::internal("the group's supervisor is gone");
        let command = SupervisorCommand::Outdated(ranks.into_iter().collect(), reply);
        self.commands.send(command).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?;
        self.ready(cx).await.map_err(|error| Error::from(error).about(subject))
    }

    /// Kills these incarnations, and waits for their exits.
    async fn end(&self, cx: &CallContext, running: &[(Rank, Incarnation)]) -> Result<()> {
        let mut refused = None;
        for (rank, incarnation) in running {
            // A rank that has already exited needs no kill. Ranks tied to a killed one are killed with it.
            if let Err(error) = self.shared.deployment.kill(*rank, Some(*incarnation)).await {
                refused.get_or_insert(error);
            }
        }
        let ended = |view: &Arc<GroupView>| {
            running.iter().all(|(rank, incarnation)| {
                view.member(*rank).is_none_or(|member| {
                    let over = matches!(member.state, RankState::Dead | RankState::Retired | RankState::Stopped);
                    over || member.incarnation != *incarnation
                })
            })
        };
        let mut view = self.shared.view.subscribe();
        let exits = async {
            let seen = view.wait_for(ended).await;
            seen.map(drop).map_err(|_| Error::internal("the group's supervisor is gone"))
        };
        let subject = || format!("restart ranks of {}: wait for their exits", self.shared.name);
        let ended = cx.bound(Execution::Unknown, exits).await.map_err(|error| error.about(subject()));
        ended.map_err(|error| match refused {
            Some(refusal) => error.caused_by(refusal),
            None => error,
        })
    }

    /// Waits until each suspect rank has a heartbeat again, or has been silent for [`GroupOptions::silence_restart`] and is killed. Returns the killed ranks.
    async fn end_silent(&self, cx: &CallContext) -> Result<Vec<Rank>> {
        let mut killed = Vec::new();
        loop {
            let (now, limit) = (Instant::now(), self.shared.options.silence_restart);
            let (due, next) = {
                let records = self.shared.records();
                let silent = records.iter().filter(|record| record.state() == RankState::Suspect);
                let silent: Vec<_> =
                    silent.map(|record| (record.place.rank, record.incarnation, record.silence(now))).collect();
                let due: Vec<_> = silent.iter().filter(|(.., silence)| *silence >= limit).copied().collect();
                (due, silent.iter().map(|(.., silence)| limit.saturating_sub(*silence)).min())
            };
            let Some(next) = next else { return Ok(killed) };
            if due.is_empty() {
                let mut view = self.shared.view.subscribe();
                view.borrow_and_update();
                let change = async {
                    let _ = tokio::time::timeout(next, view.changed()).await;
                    Ok(())
                };
                cx.bound(Execution::NotStarted, change).await?;
                continue;
            }
            tracing::warn!(group = %self.shared.name, ranks = ?due.iter().map(|(rank, ..)| *rank).collect::<Vec<_>>(), silent_seconds = limit.as_secs(), "ranks are killed, because they are silent");
            killed.extend(due.iter().map(|(rank, ..)| *rank));
            self.end(cx, &due.into_iter().map(|(rank, incarnation, _)| (rank, incarnation)).collect::<Vec<_>>())
                .await?;
        }
    }

    async fn ask_for_restarts(&self) -> Result<RestartReply> {
        let (reply, answer) = oneshot::channel();
        let gone = || Error::internal("the group's supervisor is gone");
        self.commands.send(SupervisorCommand::RestartFailed(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())
    }

    /// Waits as [`Group::ready`] does, except for the ranks in `except`.
    async fn settled(&self, cx: &CallContext, except: &[Rank]) -> Result<(), StartError> {
        let mut view = self.shared.view.subscribe();
        let moving = |member: &RankView| {
            !except.contains(&member.rank)
                && matches!(member.state, RankState::Starting | RankState::Restarting | RankState::Stale)
        };
        let waited = cx.bound(Execution::NotStarted, async {
            let _ = view.wait_for(|view| !view.members().iter().any(moving)).await;
            Ok(())
        });
        waited.await.map_err(|cause| StartError { group: Arc::clone(&self.shared.name), cause, failed: Vec::new() })
    }

    /// Waits for the exits of ranks that do not respond to a probe. A call fails as soon as the connection breaks, before the
    /// exit is reported.
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
            let _ = tokio::time::timeout(cx.remaining().min(EXIT_TIMEOUT), news).await;
        });
        join_all(waits).await;
    }

    /// Returns a balancer of calls that any rank can run, with the rule of [`GroupOptions::balance`].
    ///
    /// # Errors
    /// `InvalidArgument` if there is not one weight for each rank.
    pub fn balancer(self: &Arc<Self>) -> Result<Balancer> {
        let balance = self.shared.options.balance.clone().unwrap_or_default();
        Balancer::new(Arc::clone(self) as Arc<dyn WorkerGroupExt>, balance)
    }

    /// Returns the status of each rank, in rank order. Never waits for a rank.
    #[must_use]
    pub fn worker_status(&self) -> Vec<RankStatus> {
        let now = Instant::now();
        self.shared.records().iter().map(|record| status::status(record, now, &self.shared.options)).collect()
    }

    /// Returns the environment with which a rank starts, with the source of each variable. Its text is a table without secrets.
    ///
    /// It is the one of the last start unless a program has changed its own variables since.
    ///
    /// # Errors
    /// `NotFound` for a rank that the group does not have. The errors of the agent, for a rank on another machine.
    pub async fn environment(&self, cx: &CallContext, rank: Rank) -> Result<RankEnvironment> {
        let environment = self.shared.deployment.environment(cx, rank).await;
        environment.map_err(|error| error.about(format!("environment of rank {rank} of {}", self.shared.name)))
    }

    /// Returns the resource usage of each rank, in rank order, as last sampled. Never waits for a rank.
    #[must_use]
    pub fn resource_usage(&self) -> Vec<RankUsage> {
        let usage = self.shared.deployment.usage();
        let (nodes, here) =
            (self.shared.deployment.node_usage(), self.monitor.as_ref().and_then(|monitor| monitor.usage()));
        let memory_limit_bytes = self.memory_limit_bytes;
        let rank = |record: &RankRecord| {
            let node = match &nodes {
                Some(nodes) => record.node_name.as_deref().and_then(|name| nodes.get(name)),
                None => here.as_ref(),
            };
            let rank = record.place.rank;
            let gpus = node.map(|node| node.gpus_of(&record.place.gpus)).unwrap_or_default();
            RankUsage { rank, host: usage.get(&rank).copied(), memory_limit_bytes, gpus }
        };
        self.shared.records().iter().map(rank).collect()
    }

    /// Returns the ranks that run without a heartbeat, or with a call without progress. Kills no rank; [`Group::restart_workers`] does. The supervisor
    /// also writes a warning for each of them.
    #[must_use]
    pub fn detect_stuck_workers(&self) -> Vec<StuckRank> {
        let now = Instant::now();
        self.shared.records().iter().filter_map(|record| status::stuck(record, now, &self.shared.options)).collect()
    }

    /// Kills a rank as a crash would, for tests of failures.
    ///
    /// # Errors
    /// `NotFound` if the rank does not run.
    pub async fn kill(&self, rank: Rank) -> Result<()> {
        self.shared.deployment.kill(rank, None).await
    }

    /// Rejects new calls, asks every rank to stop, kills ranks that still run after `grace`, and returns when all have exited.
    /// Later calls have no effect.
    ///
    /// # Errors
    /// If a rank could not be killed.
    pub async fn shutdown(&self, grace: Duration) -> Result<()> {
        let stopped = self.shared.stop(grace).await;
        self.registration.lock().take();
        match &self.reservation {
            Some(reservation) => reservation.release(grace).await.and(stopped),
            None => stopped,
        }
    }
}

/// Returns `true` if a rank is dead and this call has not restarted it.
fn fresh((rank, state, _): &(Rank, RankState, Option<&RankExit>), restarted: &BTreeSet<Rank>) -> bool {
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
}

impl WorkerGroupExt for Group {
    fn call_support(&self) -> CallSupport {
        self.shared.support.clone()
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group({}, {} ranks)", self.shared.name, self.layout.size())
    }
}

impl StartError {
    /// Returns the cause.
    #[must_use]
    pub fn cause(&self) -> &Error {
        &self.cause
    }

    /// Returns the ranks that do not accept calls, in ascending order, with their states and the exits of their current incarnations.
    pub fn failed(&self) -> impl Iterator<Item = (Rank, RankState, Option<&RankExit>)> {
        self.failed.iter().map(|member| {
            // A rank that starts again has not exited; an exit of an earlier incarnation says nothing about this one.
            let exit = member.exit.as_deref().filter(|exit| exit.incarnation == member.incarnation.0);
            (member.rank, member.state, exit)
        })
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
