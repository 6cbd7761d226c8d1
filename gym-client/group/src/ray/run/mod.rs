//! A job of ours on a Ray cluster: its events are followed, it is submitted again if its driver dies, and stopped.

mod child;

use std::net::{IpAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use gym_core::base::watch;
use gym_core::{CallContext, Code, Error, Execution, Result};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;

use crate::ray::RayDriver;
use crate::ray::dashboard::{RayDashboard, RayJob, RayNode};
use crate::ray::event::{MARK, NOT_PLACED, PendingJob, RunEnd, RunState};
use crate::ray::job::JobTemplate;
use crate::ray::run::child::ChildDriver;

/// Pause between two looks at the log while an agent is awaited.
const FIRST_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Pause between two looks at the log of a job that runs.
const LATER_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Pause between two looks at the status of the job.
const STATUS_INTERVAL: Duration = Duration::from_secs(2);
/// Limit of one look.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which bundles wait before the program says so.
const LOG_AFTER: Duration = Duration::from_secs(3);
/// Time between two such messages.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Limit of a submission, with the upload of the program.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Limit of a request to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of the start of a driver that is a child of this program until it is connected. Ray itself tries for a minute.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(90);
/// Pauses before another driver is started as a child of this program, if those before had no agents: the first one, which doubles, and the longest.
const CHILD_PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// Lines of a driver that an error quotes.
const LINES_QUOTED: usize = 5;

/// A job on the cluster. Dropping it stops the job.
///
/// If its driver dies, the job is submitted again: Ray has ended the agents with it.
#[derive(Debug)]
pub(super) struct RayRun {
    job: JobTemplate,
    name: String,
    attempt: Mutex<Attempt>,
    state: watch::Sender<RunState>,
    /// `true` once no further attempt is to be begun.
    stopped: AtomicBool,
    /// `true` once nothing is left to be stopped.
    gone: AtomicBool,
    /// Held while a further attempt is begun: whoever stops the job waits for it, and stops that attempt.
    beginning: tokio::sync::Mutex<()>,
    /// `true` once the job has ended and is not submitted again.
    over: AtomicBool,
    follower: Mutex<Option<AbortOnDropHandle<()>>>,
}

/// A job that was submitted, or a driver that was started as a child of this program.
#[derive(Clone, Debug, Default)]
struct Attempt {
    /// Its identifier, which is also the name of its placement group. Empty before the first attempt.
    id: Arc<str>,
    child: Option<ChildDriver>,
}

impl Attempt {
    /// Stops a driver that is a child, and waits for its end; asks Ray to stop a job.
    async fn stop(&self, dashboard: &RayDashboard) -> Result<()> {
        match &self.child {
            Some(child) => child.stop().await,
            None => dashboard.stop(&CallContext::within(STOP_TIMEOUT), &self.id).await.map(drop),
        }
    }
}

impl RayRun {
    /// Submits a job, or starts a driver.
    pub(super) async fn submit(cx: &CallContext, job: JobTemplate) -> Result<Arc<Self>> {
        let name = format!("gym-{:012x}", fastrand::u64(..) >> 16);
        let id = format!("{name}-a1").into();
        let state = watch::Sender::new(RunState::new(job.plan.bundles.len()));
        let (stopped, gone, over) = (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
        let (attempt, follower) = (Mutex::default(), Mutex::default());
        // Made before the request is sent: from then on Ray may have the job, whose response may be lost, and dropping the run stops it.
        let beginning = tokio::sync::Mutex::default();
        let run = Arc::new(Self { job, name, attempt, state, stopped, gone, beginning, over, follower });
        if let Err(error) = run.begin(cx, id).await {
            // Ray has rejected the job, or the name is that of another one.
            run.gone.store(error.execution() == Execution::Finished, Ordering::Release);
            return Err(error);
        }
        let following = tokio::spawn(follow(Arc::downgrade(&run)));
        *run.follower.lock() = Some(AbortOnDropHandle::new(following));
        Ok(run)
    }

    /// Begins an attempt with this identifier.
    async fn begin(&self, cx: &CallContext, id: Arc<str>) -> Result<()> {
        let now = |attempt| *self.attempt.lock() = attempt;
        if let RayDriver::Child { python } = &self.job.options.driver {
            let spec = self.job.prepare_child(cx, &id).await?;
            let auth_mode = self.job.dashboard.auth_mode(cx).await?;
            self.check_wanted()?;
            let child = ChildDriver::start(cx, python, &self.job.options.name, spec, auth_mode).await?;
            now(Attempt { id, child: Some(child) });
            return Ok(());
        }
        let request = self.job.prepare(cx, &id).await?;
        self.check_wanted()?;
        // Before the request is sent: if its response is lost, this is the job to stop.
        now(Attempt { id, child: None });
        let dashboard = &self.job.dashboard;
        dashboard.submit(cx, &request, &|| self.check_wanted()).await?;
        tracing::info!(job = request.submission_id, ray = %dashboard.address(), "a job was submitted to Ray");
        Ok(())
    }

    /// Fails once no further attempt is to be begun.
    fn check_wanted(&self) -> Result<()> {
        if self.stopped.load(Ordering::Acquire) {
            return Err(Error::not_started(Code::Cancelled, "the reservation was released"));
        }
        Ok(())
    }

    /// Returns the identifier of the job.
    pub(super) fn id(&self) -> Arc<str> {
        self.attempt().id
    }

    fn attempt(&self) -> Attempt {
        self.attempt.lock().clone()
    }

    /// Returns `true` if the job has ended and is not submitted again.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    pub(super) fn state(&self) -> RunState {
        self.state.borrow().clone()
    }

    /// Returns the state and its changes.
    pub(super) fn watch(&self) -> watch::Receiver<RunState> {
        self.state.subscribe()
    }

    /// Waits until every share has an agent.
    pub(super) async fn ready(&self, cx: &CallContext) -> Result<()> {
        let wait_if_infeasible = self.job.options.wait_if_infeasible;
        let mut state = self.state.subscribe();
        let begin = Instant::now();
        let mut said: Option<Instant> = None;
        let mut infeasible_before = false;
        loop {
            let now = self.state.borrow().clone();
            if now.is_ready() {
                if let Some(warning) = self.job.plan.asks_for_several_nodes().then(|| now.crowded()).flatten() {
                    tracing::warn!(job = %self.id(), "{warning}");
                }
                return Ok(());
            }
            if let Some(end) = &now.ended {
                return Err(self.ended_early(cx, &now, end).await);
            }
            if let Err(end) = cx.check() {
                let what = match (&now.pending, now.waiting) {
                    (Some(pending), _) => self.unstarted(pending).await,
                    (None, Some(_)) => self.unplaced("its bundles still wait for room").await,
                    (None, None) if self.is_unconnected(&now) => self.unconnected().await,
                    (None, None) => format!("the agents have not all started:\n  {}", now.missing()),
                };
                return Err(Error::new(end.code(), Execution::NotStarted, what));
            }
            let due = said.map_or(begin + LOG_AFTER, |said| said + LOG_INTERVAL);
            if let Some(pending) = &now.pending
                && Instant::now() >= due
            {
                said = Some(Instant::now());
                tracing::warn!(job = %self.id(), "{}", self.unstarted(pending).await);
            }
            // An interpreter that imports Ray takes seconds.
            if self.is_unconnected(&now) && Instant::now() >= due.max(begin + LOG_INTERVAL) {
                said = Some(Instant::now());
                tracing::warn!(job = %self.id(), "{}", self.unconnected().await);
            }
            if now.waiting.is_some() && Instant::now() >= due {
                said = Some(Instant::now());
                let infeasible = self.is_infeasible().await;
                if infeasible && infeasible_before && !wait_if_infeasible {
                    return Err(Error::not_started(
                        Code::ResourceExhausted,
                        self.unplaced("no node can ever have them").await,
                    ));
                }
                infeasible_before = infeasible;
                if infeasible && !wait_if_infeasible {
                    // Ray says so for a moment while a node is joining: a second look decides.
                    said = Some(Instant::now() - LOG_INTERVAL + Duration::from_secs(1));
                } else {
                    tracing::warn!(job = %self.id(), "{}", self.unplaced("they wait for room").await);
                }
            }
            tokio::select! { biased;
                _ = state.changed() => {}
                () = sleep(FIRST_POLL_INTERVAL) => {}
            }
        }
    }

    async fn is_infeasible(&self) -> bool {
        let cx = CallContext::within(LOOK_TIMEOUT);
        match self.job.dashboard.placement_group(&cx, &self.id()).await {
            Ok(Some(group)) if group.stats.as_ref().is_some_and(|stats| stats.scheduling_state == "INFEASIBLE") => true,
            Ok(Some(_)) => {
                let nodes = self.job.dashboard.nodes(&cx).await;
                nodes.is_ok_and(|nodes| !nodes.is_empty() && self.job.plan.exceeds_every_node(&nodes))
            }
            Ok(None) => false,
            Err(error) => {
                tracing::warn!(%error, "Ray was not asked why the bundles wait");
                false
            }
        }
    }

    async fn ended_early(&self, cx: &CallContext, state: &RunState, end: &RunEnd) -> Error {
        if end.code == Some(NOT_PLACED) {
            return Error::not_started(Code::ResourceExhausted, self.unplaced(&end.why).await);
        }
        let mut message = format!("job {} has ended: {}", self.id(), end.why);
        if state.shares.iter().any(|share| share.failure.is_some()) {
            message = format!("{message}\n  {}", state.missing());
        } else if self.is_unconnected(state) {
            message = format!("{message}\n  {}", self.unconnected().await);
        } else {
            // The driver itself has failed: its last words are the cause.
            message.push_str(&self.last_lines(cx).await);
        }
        Error::not_started(Code::FailedPrecondition, message)
    }

    /// Returns `true` for a driver that is a child of this program and has not connected.
    fn is_unconnected(&self, state: &RunState) -> bool {
        state.driver.is_none() && matches!(self.job.options.driver, RayDriver::Child { .. })
    }

    /// Explains why such a driver has not connected, as far as that is known.
    async fn unconnected(&self) -> String {
        let cx = CallContext::within(LOOK_TIMEOUT);
        let mut message = "the driver, a child of this program, has not connected to Ray".to_owned();
        if let Ok(nodes) = self.job.dashboard.nodes(&cx).await {
            let alive: Vec<&str> =
                nodes.iter().filter(|node| node.is_alive()).map(|node| node.node_ip.as_str()).collect();
            let is_own = |ip: &str| ip.parse::<IpAddr>().is_ok_and(|ip| UdpSocket::bind((ip, 0)).is_ok());
            if !alive.iter().copied().any(is_own) {
                let nodes = alive.join(", ");
                message = format!("{message}: this machine has none of the addresses of the cluster's nodes: {nodes}");
            }
        }
        message.push_str(&self.last_lines(&cx).await);
        if let RayDriver::Child { python } = &self.job.options.driver {
            message = format!(
                "{message}\n  fix: RayDriver::Child needs a node of the cluster (`ray start --address=HEAD:6379` on this machine), and in {} the cluster's version of \
                 Ray; elsewhere, use RayDriver::Head",
                python.display()
            );
        }
        message
    }

    /// Returns the last lines of the driver, quoted, without its events and the stack of a thread of Ray that gave up.
    async fn last_lines(&self, cx: &CallContext) -> String {
        let attempt = self.attempt();
        let mut lines: Vec<String> = match attempt.child {
            Some(child) => child.last_lines().to_vec(),
            None => match self.job.dashboard.logs(&cx.child().at_most(LOOK_TIMEOUT), &attempt.id).await {
                Ok(log) => log.lines().filter(|line| !line.starts_with(MARK)).map(str::to_owned).collect(),
                Err(_) => Vec::new(),
            },
        };
        lines.retain(|line| !line.contains(" [0x"));
        let last = &lines[lines.len().saturating_sub(LINES_QUOTED)..];
        last.iter().map(|line| format!("\n  | {line}")).collect()
    }

    /// Explains what was asked for and what there is.
    async fn unplaced(&self, why: &str) -> String {
        let cx = CallContext::within(LOOK_TIMEOUT);
        let used = self.job.dashboard.usage(&cx).await.unwrap_or_default();
        let used = used.iter().filter(|(name, _)| matches!(name.as_str(), "CPU" | "GPU"));
        let used: Vec<String> = used.map(|(name, (used, total))| format!("{used} of {total} {name}")).collect();
        format!(
            "Ray has not placed {} with {}: {why}\n  {}\n  in use: {}\n  fix: ask for fewer or smaller bundles, wait for other jobs, or add nodes (`ray start \
             --address=HEAD:6379`)",
            self.job.plan.describe(),
            self.job.plan.strategy,
            self.nodes(&cx).await,
            if used.is_empty() { "unknown".to_owned() } else { used.join(", ") },
        )
    }

    /// Explains that Ray has not started the driver, as far as Ray says why.
    async fn unstarted(&self, pending: &PendingJob) -> String {
        let on_worker = self.job.options.driver == RayDriver::Worker;
        let asked = if on_worker { "; its driver must be on a node other than the head" } else { "" };
        format!(
            "job {} is PENDING for {:.0} s: Ray has not started its driver{asked}. Ray says: {}\n  {}\n  fix: the logs of the head say what Ray waits for: in \
             /tmp/ray/session_latest/logs, runtime_env_setup-*.log if the program does not arrive, and raylet.out if no process starts. Ray ends the job after 15 \
             minutes; `rgym ray stop` ends it now",
            self.id(),
            pending.since.elapsed().as_secs_f64(),
            pending.why,
            self.nodes(&CallContext::within(LOOK_TIMEOUT)).await,
        )
    }

    /// Returns what each node that is alive has.
    async fn nodes(&self, cx: &CallContext) -> String {
        let nodes = match self.job.dashboard.nodes(cx).await {
            Ok(nodes) => nodes,
            Err(error) => return error.to_string(),
        };
        let shown = |name: &str| !name.starts_with("node:") && name != "object_store_memory" && name != "memory";
        let node = |node: &RayNode| {
            let resources = node.resources_total.iter().filter(|(name, _)| shown(name));
            let resources: Vec<String> = resources.map(|(name, many)| format!("{many} {name}")).collect();
            let resources = if resources.is_empty() { "nothing".to_owned() } else { resources.join(", ") };
            format!("{} has {resources}", node.node_ip)
        };
        let alive: Vec<String> = nodes.iter().filter(|node| node.is_alive()).map(node).collect();
        if alive.is_empty() { "no node is alive".to_owned() } else { alive.join("; ") }
    }

    /// Lets no further attempt begin: the end of the agents is none that the job is to recover from.
    pub(super) fn begin_no_more(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// Stops the job, and waits until it has ended. After an error, it can be tried again.
    pub(super) async fn stop(&self, grace: Duration) -> Result<()> {
        if self.gone.load(Ordering::Acquire) {
            return Ok(());
        }
        self.begin_no_more();
        self.stop_within(&CallContext::within(grace + STOP_TIMEOUT))
            .await
            .map_err(|error| error.about(format!("stop job {} on Ray", self.id())))?;
        self.gone.store(true, Ordering::Release);
        Ok(())
    }

    async fn stop_within(&self, cx: &CallContext) -> Result<()> {
        // An attempt that is being begun is the one to stop. If it takes longer than this, it is stopped once it has begun.
        drop(cx.bound(Execution::Unknown, async { Ok(self.beginning.lock().await) }).await?);
        if let Some(child) = self.attempt().child {
            return child.stop().await;
        }
        self.job.dashboard.stop(cx, &self.id()).await?;
        loop {
            match self.job.dashboard.job(cx, &self.id()).await? {
                Some(job) if !job.has_ended() => sleep(FIRST_POLL_INTERVAL).await,
                _ => return Ok(()),
            }
            cx.check()?;
        }
    }
}

impl Drop for RayRun {
    fn drop(&mut self) {
        if self.gone.load(Ordering::Acquire) {
            return;
        }
        let attempt = self.attempt();
        if attempt.id.is_empty() {
            // Nothing was begun.
            return;
        }
        // Without this, the job would end when its agents find that they have no controller.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let dashboard = Arc::clone(&self.job.dashboard);
        runtime.spawn(async move {
            if let Err(error) = attempt.stop(&dashboard).await {
                tracing::warn!(job = %attempt.id, %error, "a job on Ray was not stopped; it ends without us");
            }
        });
    }
}

/// Returns what Ray says about a job. The message of a failed one has the last 20,000 characters of its log.
fn reason(job: &RayJob) -> String {
    let message = job.message.as_deref().unwrap_or(&job.status);
    let message = message.split_once(", last available logs").map_or(message, |(message, _)| message);
    message.trim().chars().take(2_000).collect()
}

/// Reads the log of the job until it is stopped, and keeps its state. Submits it again if its driver dies after it ran.
async fn follow(run: Weak<RayRun>) {
    let mut silent_since: Option<Instant> = None;
    let mut status_due = Instant::now() + STATUS_INTERVAL;
    let (mut was_ready, mut attempt) = (false, 1);
    let mut say_missing_at: Option<Instant> = None;
    // Whether this attempt had agents, and how many in a row had none.
    let (mut served, mut failures) = (false, 0);
    loop {
        let Some(run) = run.upgrade() else { return };
        let (had_ended, before) = (run.state.borrow().ended.is_some(), attempt);
        let looked = if !had_ended {
            run.look(&mut status_due).await
        } else if was_ready && attempt <= run.job.options.max_restarts && !run.stopped.load(Ordering::Acquire) {
            run.submit_again(&mut attempt).await
        } else {
            run.over.store(true, Ordering::Release);
            return;
        };
        match looked {
            Ok(()) => {
                if let Some(since) = silent_since.take() {
                    tracing::info!(job = %run.id(), after = ?since.elapsed(), "the head of the Ray cluster responds again");
                }
            }
            // The log of a job that has just been submitted may not exist yet.
            Err(error) if error.code() == Code::NotFound => {}
            Err(_) if run.stopped.load(Ordering::Acquire) => {}
            Err(error) if silent_since.is_none() => {
                silent_since = Some(Instant::now());
                tracing::warn!(
                    job = %run.id(), %error,
                    "the head of the Ray cluster does not respond: ranks go on, but no lost node is replaced until it responds again"
                );
            }
            Err(_) => {}
        }
        let (ready, has_ended) = {
            let state = run.state.borrow();
            (state.is_ready(), state.ended.is_some())
        };
        was_ready |= ready;
        if !was_ready || ready || has_ended {
            say_missing_at = None;
        } else if Instant::now() >= *say_missing_at.get_or_insert_with(|| Instant::now() + LOG_AFTER) {
            run.say_missing().await;
            say_missing_at = Some(Instant::now() + LOG_INTERVAL);
        }
        served |= ready;
        let child = run.attempt().child;
        let mut pause = if ready { LATER_POLL_INTERVAL } else { FIRST_POLL_INTERVAL };
        if has_ended && (!had_ended || attempt > before) {
            failures = if served { 0 } else { failures + 1 };
            served = false;
            if child.is_some() && was_ready && attempt <= run.job.options.max_restarts {
                pause = child_pause(failures);
            }
        }
        drop(run);
        match child {
            Some(child) if !has_ended => child.changed(pause).await,
            _ => sleep(pause).await,
        }
    }
}

/// Returns the pause before the next driver, after this many in a row that had no agents.
fn child_pause(failures: u32) -> Duration {
    let (first, longest) = CHILD_PAUSES;
    if failures == 0 { FIRST_POLL_INTERVAL } else { first.saturating_mul(1 << (failures - 1).min(16)).min(longest) }
}

impl RayRun {
    /// Takes the events, and notes the end of the job.
    async fn look(&self, status_due: &mut Instant) -> Result<()> {
        let Attempt { id, child } = self.attempt();
        let looked = match child {
            Some(child) => self.look_at_child(&child).await,
            None => self.look_at_job(&id, status_due).await,
        };
        let ended = self.state.borrow().ended.clone();
        if let Some(end) = ended
            && !self.stopped.load(Ordering::Acquire)
        {
            tracing::warn!(job = %id, why = end.why, "the job on Ray has ended; its agents have ended with it");
        }
        looked
    }

    /// Notes what the log says, if that is new.
    fn read(&self, log: &str) {
        self.state.send_if_modified(|state| state.read(log));
    }

    /// Notes the end, if the driver has not said why it ends.
    fn note_end(&self, end: RunEnd) {
        self.state.send_if_modified(|state| {
            let news = state.ended.is_none();
            state.ended.get_or_insert(end);
            news
        });
    }

    /// Reads what the driver has printed.
    async fn look_at_child(&self, child: &ChildDriver) -> Result<()> {
        let (events, ended) = child.news();
        if !child.is_checked() {
            let mut seen = RunState::default();
            seen.read(&events);
            if let Some(node) = seen.driver {
                // No agent of another cluster counts.
                let nodes = self.job.dashboard.nodes(&CallContext::within(LOOK_TIMEOUT)).await;
                let nodes = nodes.inspect_err(|_| child.put_back(&events))?;
                if !nodes.iter().any(|known| known.node_id == node) {
                    let why = format!(
                        "its driver is on node {node} of another cluster than {}\n  fix: `ray stop` and `ray start --address=HEAD:6379` on this machine, or the \
                         address of the cluster that it belongs to",
                        self.job.dashboard.address()
                    );
                    self.state.send_if_modified(|state| {
                        state.driver = Some(node);
                        false
                    });
                    self.note_end(RunEnd { code: None, why });
                    return child.stop().await;
                }
                child.set_checked();
            } else if ended.is_none() && child.age() > CONNECT_TIMEOUT {
                let why = format!("its driver has not connected within {} s", CONNECT_TIMEOUT.as_secs());
                self.note_end(RunEnd { code: None, why });
                return child.stop().await;
            }
        }
        self.read(&events);
        if let Some(end) = ended {
            self.note_end(end);
        }
        Ok(())
    }

    /// Reads the log, and from time to time the status.
    async fn look_at_job(&self, id: &str, status_due: &mut Instant) -> Result<()> {
        let cx = CallContext::within(LOOK_TIMEOUT);
        let log = self.job.dashboard.logs(&cx, id).await;
        if let Ok(log) = &log {
            self.read(log);
        }
        if Instant::now() < *status_due {
            return log.map(drop);
        }
        *status_due = Instant::now() + STATUS_INTERVAL;
        let end = match self.job.dashboard.job(&cx, id).await? {
            Some(job) if job.has_ended() => {
                // Its last events may have come after the look above.
                if let Ok(log) = self.job.dashboard.logs(&cx, id).await {
                    self.read(&log);
                }
                RunEnd { code: job.driver_exit_code, why: reason(&job) }
            }
            // Ray takes a minute to notice it by itself.
            Some(job) if self.is_dead(&cx, job.driver_node_id.as_deref()).await? => {
                RunEnd { code: None, why: "the node of its driver is lost".to_owned() }
            }
            Some(job) => {
                if job.status == "PENDING" {
                    self.state.send_if_modified(|state| {
                        state.note_pending(Instant::now(), reason(&job));
                        true
                    });
                }
                return log.map(drop);
            }
            None => RunEnd { code: None, why: "the cluster was restarted, and does not know it".to_owned() },
        };
        self.note_end(end);
        log.map(drop)
    }

    /// Says what lost shares wait for: the start of a job that was submitted again, or room.
    async fn say_missing(&self) {
        let cx = CallContext::within(LOOK_TIMEOUT);
        let state = self.state();
        if self.is_unconnected(&state) {
            tracing::warn!(job = %self.id(), "{}", self.unconnected().await);
            return;
        }
        if let Some(pending) = state.pending {
            tracing::warn!(job = %self.id(), "{}", self.unstarted(&pending).await);
            return;
        }
        match self.job.dashboard.placement_group(&cx, &self.id()).await {
            Ok(Some(group)) if group.waits() => {
                let missing = self.state().missing();
                tracing::warn!(job = %self.id(), "{}", self.unplaced(&format!("lost shares wait for room\n  {missing}")).await);
            }
            // Ray has placed them, and their agents start.
            Ok(_) => {}
            // The loop has said that the head does not respond.
            Err(error) => tracing::debug!(%error, "Ray was not asked why lost shares wait"),
        }
    }

    async fn is_dead(&self, cx: &CallContext, node: Option<&str>) -> Result<bool> {
        let Some(node) = node else { return Ok(false) };
        let nodes = self.job.dashboard.nodes(cx).await?;
        Ok(nodes.iter().any(|known| known.node_id == node && !known.is_alive()))
    }

    async fn submit_again(&self, attempt: &mut u32) -> Result<()> {
        let _beginning = self.beginning.lock().await;
        self.check_wanted()?;
        let id: Arc<str> = format!("{}-a{}", self.name, *attempt + 1).into();
        let begun = self.begin(&CallContext::within(SUBMIT_TIMEOUT), Arc::clone(&id)).await;
        if self.stopped.load(Ordering::Acquire) {
            // Whoever stopped it may not have waited for this, and Ray may have the job whatever the outcome was.
            return self.attempt().stop(&self.job.dashboard).await;
        }
        let state = || RunState::new(self.job.plan.bundles.len());
        if let (RayDriver::Child { .. }, Err(error)) = (&self.job.options.driver, &begun)
            && error.code() == Code::FailedPrecondition
        {
            // The cause is on this machine, and another attempt may find it gone.
            tracing::warn!(job = %id, %error, "the driver was not started");
            *attempt += 1;
            let mut ended = state();
            ended.ended = Some(RunEnd { code: None, why: error.to_string() });
            self.state.send_replace(ended);
            return Ok(());
        }
        begun?;
        *attempt += 1;
        self.state.send_replace(state());
        Ok(())
    }
}
