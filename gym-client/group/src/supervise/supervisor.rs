//! The supervisor's task: receives the events of a group's ranks, connects to them, probes them and restarts them.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use gym_client::transport::Transports;
use gym_core::base::watch;
use gym_core::group::{
    CONTROL_ROUTE, ExitCause, GroupView, Rank, RankExit, RankLayout, RankState, RankView, RunningCall, SEATS_ROUTE,
    STATUS_ROUTE, WorkerStatus,
};
use gym_core::transport::{ConnectOptions, TransportPolicy};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Incarnation, Request, Response, Result, Route};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, sleep};

use crate::call::{CallSupport, Gate};
use crate::health::HealthEvent;
use crate::provision::deployment::Deployment;
use crate::provision::events::RankEvent;
use crate::supervise::options::GroupOptions;
use crate::supervise::record::{self, AfterExit, RankRecord};
use crate::supervise::reports::GroupReports;
use crate::supervise::seating::{Seating, SeatsPost};
use crate::supervise::status::{self, StuckChange, StuckRank};
use crate::supervise::subset::RankSubset;

/// Time to connect to a rank that has reported its endpoints.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the report of an exit, after the connections of the rank have broken.
const EXIT_REPORT_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two attempts to connect again.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);
/// Time for a status request, which takes microseconds; the limit leaves time for a machine that swaps.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// A turn of the supervisor that is later than this was delayed by a pause of the process, and not by a busy machine.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// A method that has blocked its thread for this long is named in the log, once.
const BLOCKED_MIN: Duration = Duration::from_secs(10);

/// State shared by the group and its supervisor.
#[derive(Debug)]
pub(super) struct GroupState {
    pub(super) name: Arc<str>,
    pub(super) options: GroupOptions,
    pub(super) deployment: Arc<dyn Deployment>,
    pub(super) view: watch::Sender<Arc<GroupView>>,
    pub(super) support: CallSupport,
    /// The records in rank order, from 0.
    records: Mutex<Vec<RankRecord>>,
}

/// A command of the group to its supervisor.
#[derive(Debug)]
pub(super) enum SupervisorCommand {
    /// Restarts the ranks that have ended. The reply lists the ranks that restart, and those without restarts left.
    RestartFailed(oneshot::Sender<RestartReply>),
    /// Takes these ranks out of service until they are prepared again.
    Outdated(Vec<Rank>, oneshot::Sender<()>),
}

/// Result of [`SupervisorCommand::RestartFailed`].
#[derive(Debug, Default)]
pub(super) struct RestartReply {
    pub(super) begun: Vec<Rank>,
    pub(super) refused: Vec<Rank>,
}

impl GroupState {
    pub(super) fn new(
        name: Arc<str>,
        options: GroupOptions,
        deployment: Arc<dyn Deployment>,
        gate: Option<Arc<dyn Gate>>,
        records: Vec<RankRecord>,
    ) -> Self {
        let members = records.iter().map(RankRecord::member).collect();
        let view = watch::Sender::new(Arc::new(GroupView::new(1, members)));
        let reports = GroupReports(records.iter().map(RankRecord::reports).collect());
        let backlog = options.async_communication.then(Arc::default);
        let support = CallSupport { gate, backlog, monitor: Some(Arc::new(reports)) };
        Self { name, options, deployment, view, support, records: Mutex::new(records) }
    }

    pub(super) fn records(&self) -> MutexGuard<'_, Vec<RankRecord>> {
        self.records.lock()
    }

    /// Rejects new calls and ends all ranks.
    pub(super) async fn stop(&self, grace: Duration) -> Result<()> {
        for record in self.records().iter_mut() {
            record.note(HealthEvent::Stopped, &self.options);
        }
        self.publish();
        self.deployment.shutdown(grace).await
    }

    /// Publishes the records as a new view.
    pub(super) fn publish(&self) {
        let members: Vec<_> = self.records().iter().map(RankRecord::member).collect();
        self.view.send_modify(|view| *view = Arc::new(view.with(members)));
    }

    /// Requests the status of a rank.
    pub(super) async fn probe(control: &Channel) -> Result<WorkerStatus> {
        let request = Request::get(CallContext::within(PROBE_TIMEOUT), Route::from_static(STATUS_ROUTE));
        let response = control.call(request).await?.into_result()?;
        serde_json::from_slice(&response.message.head.to_bytes())
            .map_err(|error| Error::internal("the status cannot be read").caused_by(error))
    }
}

/// Stops a group from its cluster, if the group still exists.
#[derive(Clone, Debug)]
pub(crate) struct GroupStop(Weak<GroupState>);

impl GroupStop {
    pub(super) fn of(shared: &Arc<GroupState>) -> Self {
        Self(Arc::downgrade(shared))
    }

    pub(crate) async fn stop(&self, grace: Duration) -> Result<()> {
        match self.0.upgrade() {
            Some(shared) => shared.stop(grace).await,
            None => Ok(()),
        }
    }
}

/// The next step of the supervisor's task.
enum Turn {
    Event(RankEvent),
    Done(std::result::Result<JobResult, tokio::task::JoinError>),
    Command(SupervisorCommand),
    Tick,
}

/// Result of a job of the supervisor.
enum JobResult {
    Connected(Rank, Incarnation, Result<RankChannels>),
    /// These tied ranks were prepared after a restart.
    Prepared(Vec<(Rank, Incarnation)>, Result<()>),
    PauseOver(Rank, Incarnation),
    /// A restart of these ranks began, or failed because their last incarnations did not end.
    Restarted(Vec<(Rank, Incarnation)>, Result<()>),
    Probed(Rank, Incarnation, Option<WorkerStatus>),
    /// A rank was told the seats of an epoch.
    Seated(Rank, Incarnation, u64, Result<()>),
    Nothing,
}

/// The channels to one incarnation of a rank.
#[derive(Clone)]
struct RankChannels {
    calls: Channel,
    control: Channel,
    endpoints: Vec<Endpoint>,
    /// Where the rank serves its status on a thread of its own; empty if it does not.
    control_endpoints: Vec<Endpoint>,
}

pub(super) struct GroupSupervisor {
    shared: Arc<GroupState>,
    jobs: JoinSet<JobResult>,
    seating: Seating,
    /// Tied ranks that are restarting, and those of them that must restart once more.
    restarting: BTreeSet<u32>,
    again: BTreeSet<u32>,
    /// The methods that block their thread, as far as the log has named them.
    blocking_methods: BTreeSet<String>,
}

impl GroupSupervisor {
    pub(super) fn new(shared: Arc<GroupState>, layout: RankLayout) -> Self {
        Self {
            shared,
            jobs: JoinSet::new(),
            seating: Seating::new(layout),
            restarting: BTreeSet::new(),
            again: BTreeSet::new(),
            blocking_methods: BTreeSet::new(),
        }
    }

    /// Runs until it or the deployment is dropped.
    pub(super) async fn run(
        mut self,
        mut events: BoxStream<'static, RankEvent>,
        mut commands: mpsc::Receiver<SupervisorCommand>,
    ) {
        let mut tick = tokio::time::interval(self.shared.options.heartbeat);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_turn = Instant::now();
        loop {
            let turn = tokio::select! { biased;
                event = events.next() => match event {
                    Some(event) => Turn::Event(event),
                    None => return,
                },
                Some(done) = self.jobs.join_next(), if !self.jobs.is_empty() => Turn::Done(done),
                Some(command) = commands.recv() => Turn::Command(command),
                _ = tick.tick() => Turn::Tick,
            };
            self.forgive_pause(last_turn.elapsed());
            match turn {
                Turn::Event(event) => self.on_event(event),
                Turn::Done(Ok(done)) => self.done(done),
                Turn::Done(Err(error)) => tracing::error!(group = %self.shared.name, %error, "supervisor job failed"),
                Turn::Command(SupervisorCommand::RestartFailed(reply)) => {
                    let _ = reply.send(self.restart_failed());
                }
                Turn::Command(SupervisorCommand::Outdated(ranks, reply)) => {
                    let unprepared = record::outdated(&mut self.shared.records(), &ranks, &self.shared.options);
                    self.shared.publish();
                    unprepared.into_iter().for_each(|members| self.prepare(members));
                    let _ = reply.send(());
                }
                Turn::Tick => {
                    self.report_stuck();
                    self.probe_all();
                    self.seating.retry();
                }
            }
            self.seat_ranks();
            last_turn = Instant::now();
        }
    }

    /// Tells the ranks who meets, as far as they do not know it.
    fn seat_ranks(&mut self) {
        let due = self.seating.due(&self.shared.records());
        for post in due {
            let (rank, incarnation, epoch) = (post.rank, post.incarnation, post.epoch);
            let posting = async move { post_seats(post).await };
            self.spawn(posting, move |posted| JobResult::Seated(rank, incarnation, epoch, posted));
        }
    }

    /// Moves the heartbeats of all ranks by a pause of this process, which was suspended, stopped, or computed on all threads: such a pause says nothing
    /// about ranks. Without one, the supervisor has a turn at each heartbeat.
    fn forgive_pause(&self, since_last_turn: Duration) {
        let pause = since_last_turn.saturating_sub(self.shared.options.heartbeat);
        if pause >= PAUSE_MIN {
            tracing::warn!(group = %self.shared.name, pause_seconds = pause.as_secs(), "this process was paused: heartbeats of its ranks count from now on");
            self.shared.records().iter_mut().for_each(|record| record.forgive(pause));
        }
    }

    /// Changes the record of a rank and publishes it, if this is still the rank's incarnation.
    fn change<T>(&self, rank: Rank, incarnation: Incarnation, change: impl FnOnce(&mut RankRecord) -> T) -> Option<T> {
        let changed = {
            let mut records = self.shared.records();
            let record = records.get_mut(rank as usize).filter(|record| record.incarnation == incarnation)?;
            change(record)
        };
        self.shared.publish();
        Some(changed)
    }

    fn on_event(&mut self, event: RankEvent) {
        let options = self.shared.options.clone();
        match event {
            RankEvent::Placed { rank, incarnation, node, gpus } => {
                self.change(rank, incarnation, |record| {
                    (record.node_name, record.place.gpus) = (Some(node.into()), gpus);
                });
            }
            RankEvent::Started { rank, incarnation, pid } => {
                self.change(rank, incarnation, |record| record.started(pid));
            }
            RankEvent::Ready { rank, incarnation, endpoints } => {
                let transports = options.transports;
                let connecting = async move { RankChannels::open(&transports, incarnation, endpoints).await };
                self.spawn(connecting, move |connected| JobResult::Connected(rank, incarnation, connected));
            }
            RankEvent::Draining { rank, incarnation } => {
                self.change(rank, incarnation, |record| record.draining = true);
            }
            RankEvent::MemoryHigh { rank, incarnation, .. } => {
                self.change(rank, incarnation, |record| record.memory_high = true);
            }
            RankEvent::Exited { rank, exit } => {
                let (group, incarnation) = (&self.shared.name, exit.incarnation);
                if exit.cause == ExitCause::Stopped {
                    tracing::info!(%group, rank, incarnation, %exit, "rank ended");
                } else {
                    tracing::warn!(%group, rank, incarnation, %exit, "rank ended");
                }
                let incarnation = Incarnation(exit.incarnation);
                let ending = record::ended(&mut self.shared.records(), rank, exit, Instant::now(), &options);
                self.shared.publish();
                let Some(record::GroupExit { next, others }) = ending else { return };
                self.end(others);
                if let AfterExit::Restart(pause) = next {
                    self.jobs.spawn(async move {
                        sleep(pause).await;
                        JobResult::PauseOver(rank, incarnation)
                    });
                }
            }
        }
    }

    /// Connects to a rank again when a connection breaks and the rank runs on: a link may break between two hosts that are well.
    fn keep(&mut self, rank: Rank, incarnation: Incarnation, channels: RankChannels) {
        let (mut view, transports) = (self.shared.view.subscribe(), self.shared.options.transports.clone());
        let group = Arc::clone(&self.shared.name);
        let states = self.shared.view.subscribe();
        let again = async move {
            let calls_end = tokio::select! { biased;
                _ = channels.calls.closed() => true,
                _ = channels.control.closed() => false,
            };
            // The exit of a rank is reported some time after its connections have broken.
            sleep(EXIT_REPORT_TIMEOUT).await;
            loop {
                // After a long silence, the connection for calls may wait for minutes before it sends again.
                let silent = states.borrow().member(rank).is_none_or(|member| member.state == RankState::Suspect);
                let opened = if calls_end || silent {
                    channels.reopen(&transports, incarnation).await
                } else {
                    channels.reopen_control(&transports, incarnation).await
                };
                match opened {
                    Ok(channels) => return channels,
                    Err(error) => {
                        tracing::warn!(%group, rank, %incarnation, %error, "a rank cannot be reached; trying again")
                    }
                }
                sleep(RECONNECT_INTERVAL).await;
            }
        };
        self.jobs.spawn(async move {
            let over = view.wait_for(|view| {
                view.member(rank).is_none_or(|member| {
                    let ended = matches!(member.state, RankState::Dead | RankState::Retired | RankState::Stopped);
                    ended || member.incarnation != incarnation
                })
            });
            tokio::select! { biased;
                _ = over => JobResult::Nothing,
                channels = again => JobResult::Connected(rank, incarnation, Ok(channels)),
            }
        });
    }

    /// Runs a job. The job runs code of transports, provisioners and methods. If that code panics, the job fails, because its
    /// result is awaited.
    fn spawn<T>(
        &mut self,
        job: impl Future<Output = Result<T>> + Send + 'static,
        done: impl FnOnce(Result<T>) -> JobResult + Send + 'static,
    ) {
        let job = AssertUnwindSafe(job).catch_unwind();
        self.jobs.spawn(async move {
            let outcome = job.await.unwrap_or_else(|panic| {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&'static str>().copied()).unwrap_or("not a text");
                Err(Error::internal(format!("it panicked: {text}")))
            });
            done(outcome)
        });
    }

    /// Kills the processes of these ranks. Their exits follow as events.
    fn end(&mut self, incarnations: Vec<(Rank, Incarnation)>) {
        for (rank, incarnation) in incarnations {
            let shared = Arc::clone(&self.shared);
            self.jobs.spawn(async move {
                // An incarnation that has already ended needs no kill, and the next one must not be killed.
                let _ = shared.deployment.kill(rank, Some(incarnation)).await;
                JobResult::Nothing
            });
        }
    }

    fn done(&mut self, done: JobResult) {
        let options = self.shared.options.clone();
        match done {
            JobResult::Connected(rank, incarnation, Ok(channels)) => {
                let runs = self.change(rank, incarnation, |record| {
                    // The rank may have ended in the meantime.
                    let runs = !matches!(record.state(), RankState::Dead | RankState::Retired | RankState::Stopped);
                    if runs {
                        let endpoints = channels.endpoints.clone();
                        record.reached(channels.calls.clone(), endpoints, channels.control.clone(), Instant::now());
                    }
                    runs
                });
                if runs == Some(true) {
                    self.keep(rank, incarnation, channels);
                    self.serve_when_complete(rank);
                }
            }
            JobResult::Connected(rank, incarnation, Err(error)) => {
                // The rank cannot be used. Its exit follows as an event.
                let why = format!("it cannot be reached where it says that it serves: {error}");
                if self.change(rank, incarnation, |record| record.kill_reason = Some(why)).is_some() {
                    self.end(vec![(rank, incarnation)]);
                }
            }
            JobResult::Prepared(incarnations, prepared) => {
                let ranks: Vec<Rank> = incarnations.iter().map(|(rank, _)| *rank).collect();
                if let Err(error) = &prepared {
                    tracing::error!(group = %self.shared.name, ?ranks, %error, "on_restart failed for restarted ranks");
                }
                let prepared = prepared.map_err(|error| error.to_string());
                for (rank, incarnation) in incarnations {
                    self.change(rank, incarnation, |record| record.prepared(prepared.clone()));
                }
                if let Some(rank) = ranks.first() {
                    self.serve_when_complete(*rank);
                }
            }
            JobResult::PauseOver(rank, incarnation) => self.restart(rank, incarnation),
            JobResult::Restarted(incarnations, begun) => {
                self.restarted(&incarnations);
                if let (Err(error), Some(&(rank, incarnation))) = (begun, incarnations.first()) {
                    // An incarnation that never started has no event, and the exit of one rank ends all tied ranks.
                    let exit = RankExit::start_failed(incarnation, format!("it could not be started again: {error}"));
                    self.on_event(RankEvent::Exited { rank, exit });
                    // Some of the ranks may have started.
                    self.end(incarnations);
                }
            }
            JobResult::Probed(rank, incarnation, answer) => {
                self.name_blocking_methods(answer.as_ref());
                let changed = {
                    let mut records = self.shared.records();
                    let record = records.get_mut(rank as usize).filter(|record| record.incarnation == incarnation);
                    record.is_some_and(|record| record.probed(answer, Instant::now(), &options))
                };
                if changed {
                    self.shared.publish();
                }
            }
            JobResult::Seated(rank, incarnation, epoch, posted) => {
                if let Err(error) = &posted {
                    tracing::debug!(group = %self.shared.name, rank, %incarnation, epoch, %error, "a rank was not told the seats of its group");
                }
                self.seating.posted(rank, incarnation, epoch, posted.as_ref().copied());
            }
            JobResult::Nothing => {}
        }
    }

    /// Prepares a rank and the ranks tied to it once all are connected, or lets them serve.
    fn serve_when_complete(&mut self, rank: Rank) {
        let unprepared =
            record::serve_when_complete(&mut self.shared.records(), rank, Instant::now(), &self.shared.options);
        self.shared.publish();
        self.prepare(unprepared);
    }

    /// Runs `on_restart` for these ranks.
    fn prepare(&mut self, unprepared: Vec<RankView>) {
        let Some(on_restart) = self.shared.options.on_restart.clone() else { return };
        if unprepared.is_empty() {
            return;
        }
        let incarnations = unprepared.iter().map(|member| (member.rank, member.incarnation)).collect();
        // In one call, because the ranks may run a collective in it.
        let support = CallSupport { backlog: None, ..self.shared.support.clone() };
        let subset = RankSubset::of(Arc::clone(&self.shared.name), unprepared, support);
        let within = self.shared.options.prepare_timeout;
        let preparing = async move { on_restart(subset?, CallContext::within(within)).await.map_err(Error::from) };
        self.spawn(preparing, |prepared| JobResult::Prepared(incarnations, prepared));
    }

    /// Starts the incarnation after `last` of a rank and of the ranks tied to it, unless it has started already.
    fn restart(&mut self, rank: Rank, last: Incarnation) {
        let incarnations: Vec<(Rank, Incarnation)> = {
            let mut records = self.shared.records();
            let due = |record: &RankRecord| record.incarnation == last && record.state() == RankState::Dead;
            let Some(tied) = records.get(rank as usize).filter(|record| due(record)).map(|record| record.place.tied)
            else {
                return;
            };
            // An incarnation that is starting can be killed only when it has started.
            if !self.restarting.insert(tied) {
                self.again.insert(tied);
                return;
            }
            record::tied(&mut records, rank)
                .map(|record| (record.place.rank, record.restarting(&self.shared.options)))
                .collect()
        };
        self.shared.publish();
        let shared = Arc::clone(&self.shared);
        let again = incarnations.clone();
        // If a single rank fails to start, an event reports it.
        let restarting = async move { shared.deployment.restart(&CallContext::default(), &again).await };
        self.spawn(restarting, |begun| JobResult::Restarted(incarnations, begun));
    }

    /// Handles a restart that has begun. The restarted ranks may have ended or been retired in the meantime.
    fn restarted(&mut self, incarnations: &[(Rank, Incarnation)]) {
        let Some(&(rank, incarnation)) = incarnations.first() else { return };
        let (tied, over) = {
            let records = self.shared.records();
            let Some(record) = records.get(rank as usize) else { return };
            (record.place.tied, matches!(record.state(), RankState::Dead | RankState::Retired))
        };
        self.restarting.remove(&tied);
        if self.again.remove(&tied) {
            self.restart(rank, incarnation);
        } else if over {
            self.end(incarnations.to_vec());
        }
    }

    fn restart_failed(&mut self) -> RestartReply {
        let mut restarts = RestartReply::default();
        let options = self.shared.options.clone();
        let (mut due, mut over) = (Vec::new(), Vec::new());
        {
            let mut records = self.shared.records();
            let firsts: BTreeSet<(u32, Rank)> =
                records.iter().map(|record| (record.place.tied, record.place.rank)).collect();
            let mut seen = BTreeSet::new();
            for (_, rank) in firsts.into_iter().filter(|(tied, _)| seen.insert(*tied)) {
                let incarnations: Vec<_> =
                    record::tied(&mut records, rank).map(|record| (record.place.rank, record.incarnation)).collect();
                let ranks = incarnations.iter().map(|(rank, _)| *rank);
                // Tied ranks are in the same state, except when the preparation of one failed: then all count as dead.
                let unprepared = record::tied(&mut records, rank)
                    .any(|record| record.state() == RankState::Stale && record.preparation_failed());
                let pending = options.restart_on_failure;
                let record = &records[rank as usize];
                let (state, incarnation) = (record.state(), record.incarnation);
                let allowed = match state {
                    // The restart of the rank is granted and waits for its pause, which ends now.
                    RankState::Dead if pending => true,
                    RankState::Dead => record::use_restarts(record::tied(&mut records, rank), &options),
                    RankState::Stale if unprepared => {
                        record::tied(&mut records, rank).for_each(|record| record.note(HealthEvent::Ended, &options));
                        record::use_restarts(record::tied(&mut records, rank), &options)
                    }
                    RankState::Retired => false,
                    _ => continue,
                };
                if allowed {
                    due.push((rank, incarnation));
                    restarts.begun.extend(ranks);
                } else {
                    restarts.refused.extend(ranks);
                    // Ranks whose preparation failed run until they are ended.
                    over.extend(incarnations.iter().copied().filter(|_| unprepared));
                }
            }
        }
        for (rank, incarnation) in due {
            self.restart(rank, incarnation);
        }
        self.end(over);
        restarts.begun.sort_unstable();
        restarts.refused.sort_unstable();
        self.shared.publish();
        restarts
    }

    /// Writes a warning for each rank that has become stuck, and a line for each that moves again.
    fn report_stuck(&self) {
        let (now, options, group) = (Instant::now(), &self.shared.options, &self.shared.name);
        for record in self.shared.records().iter_mut() {
            match status::stuck_change(record, now, options) {
                Some(StuckChange::Stuck(StuckRank { rank, incarnation, method, elapsed, still, reason })) => {
                    tracing::warn!(
                        %group,
                        rank,
                        %incarnation,
                        method = method.as_deref().unwrap_or("none"),
                        running_seconds = elapsed.as_secs(),
                        still_seconds = still.as_secs(),
                        %reason,
                        "a rank is stuck; `Group::restart_workers` kills and restarts it"
                    )
                }
                Some(StuckChange::Moves) => {
                    tracing::info!(%group, rank = record.place.rank, "a rank is no longer stuck");
                }
                None => {}
            }
        }
    }

    /// Writes a warning for each method that blocks its thread, once.
    fn name_blocking_methods(&mut self, status: Option<&WorkerStatus>) {
        let blocks = |call: &&RunningCall| Duration::from_millis(call.blocked_ms) >= BLOCKED_MIN;
        for call in status.into_iter().flat_map(|status| &status.running).filter(blocks) {
            if self.blocking_methods.insert(call.method.clone()) {
                tracing::warn!(
                    group = %self.shared.name,
                    method = call.method,
                    blocked_seconds = call.blocked_ms / 1_000,
                    "an async method blocks its thread: its other calls wait, and none ends at its deadline; declare it `blocking`"
                );
            }
        }
    }

    /// Probes every connected rank that is not being probed.
    fn probe_all(&mut self) {
        let mut probes: Vec<(Rank, Incarnation, Channel)> = Vec::new();
        for record in self.shared.records().iter_mut().filter(|record| !record.probing) {
            if let Some(control) = record.control.clone() {
                record.probing = true;
                probes.push((record.place.rank, record.incarnation, control));
            }
        }
        for (rank, incarnation, control) in probes {
            let probe = async move { GroupState::probe(&control).await };
            self.spawn(probe, move |probed| JobResult::Probed(rank, incarnation, probed.ok()));
        }
    }
}

/// Tells a rank who meets.
async fn post_seats(post: SeatsPost) -> Result<()> {
    let mut cx = CallContext::within(PROBE_TIMEOUT);
    cx.incarnation = Some(post.incarnation);
    let request = Request::post(cx, Route::from_static(SEATS_ROUTE), post.seats);
    post.channel.call(request).await?.into_result().map(drop)
}

impl RankChannels {
    /// Connects to a rank for calls, and for heartbeats: where the rank serves its status on a thread of its own, or else where it serves calls.
    async fn open(transports: &Transports, incarnation: Incarnation, endpoints: Vec<Endpoint>) -> Result<Self> {
        let cx = CallContext::within(CONNECT_TIMEOUT);
        let calls = open_calls(&cx, transports, incarnation, &endpoints).await?;
        let request = Request::get(cx.child(), Route::from_static(CONTROL_ROUTE));
        let answer = calls.call(request).await.and_then(Response::into_result);
        let control_endpoints = match answer {
            // A host of another kind has no thread for heartbeats.
            Ok(answer) => serde_json::from_slice(&answer.message.head.to_bytes()).unwrap_or_default(),
            Err(error) if error.code() == Code::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        let control = open_control(&cx, transports, incarnation, (&endpoints, &control_endpoints)).await?;
        Ok(Self { calls, control, endpoints, control_endpoints })
    }

    /// Opens both channels again.
    async fn reopen(&self, transports: &Transports, incarnation: Incarnation) -> Result<Self> {
        let cx = CallContext::within(CONNECT_TIMEOUT);
        let calls = open_calls(&cx, transports, incarnation, &self.endpoints).await?;
        Ok(Self { calls, ..self.reopen_control(transports, incarnation).await? })
    }

    /// Opens the channel for heartbeats again.
    async fn reopen_control(&self, transports: &Transports, incarnation: Incarnation) -> Result<Self> {
        let cx = CallContext::within(CONNECT_TIMEOUT);
        let control = open_control(&cx, transports, incarnation, (&self.endpoints, &self.control_endpoints)).await?;
        Ok(Self { control, ..self.clone() })
    }
}

/// Connects for calls. Heartbeats tell whether the rank lives, so its silence on this connection, while a method computes, tells nothing.
async fn open_calls(
    cx: &CallContext,
    transports: &Transports,
    incarnation: Incarnation,
    endpoints: &[Endpoint],
) -> Result<Channel> {
    transports.connect_ordered(cx, endpoints, &ConnectOptions::to_incarnation(incarnation).watched()).await
}

async fn open_control(
    cx: &CallContext,
    transports: &Transports,
    incarnation: Incarnation,
    (endpoints, control_endpoints): (&[Endpoint], &[Endpoint]),
) -> Result<Channel> {
    let options = ConnectOptions::to_incarnation(incarnation);
    if control_endpoints.is_empty() {
        return transports.connect(cx, endpoints, &options).await;
    }
    // The policy is about the paths of calls.
    let transports = transports.clone().with_policy(TransportPolicy::unconfigured()).aside();
    transports.connect(cx, control_endpoints, &options).await
}
