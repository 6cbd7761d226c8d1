//! One child over all its incarnations: start, watch, report, restart, stop.

use std::fmt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rustix::process::Signal;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::launch::context::SupervisionContext;
use crate::launch::error::LaunchError;
use crate::launch::lines::{OutputTail, Stream, forward};
use crate::launch::process::tree::{KILL_WAIT, MARK_VARIABLE, ProcessTree, SessionLeader, TreeProcess, start_ticks};
use crate::launch::process::{shim, spawner};
use crate::launch::spec::ChildSpec;
use crate::launch::spec::RestartBudget;

/// What is still in the output pipes when everybody is dead is read in this time.
const DRAIN_WAIT: Duration = Duration::from_secs(1);
/// The shim reads its gate within milliseconds; one that does not in this time never will.
const GATE_WAIT: Duration = Duration::from_secs(10);
/// What comes on top of grace and the killing of the family: the wait for its leader, and for the last of its output.
const STOP_SLACK: Duration = Duration::from_secs(7);

/// How one incarnation of a child ended.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ExitReport {
    /// Counts from 1; grows with each restart.
    pub incarnation: u32,
    /// The exit status; `None` when it could not be started again (then [`reason`](Self::reason) says why) or did not
    /// end although killed.
    pub status: Option<ExitStatus>,
    /// In words: `exit status: 1`, or why the start failed.
    pub reason: String,
    /// The last lines of its standard error, oldest first.
    pub stderr_tail: Arc<[String]>,
}

impl fmt::Display for ExitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        for line in self.stderr_tail.iter() {
            write!(f, "\n  {line}")?;
        }
        Ok(())
    }
}

/// Where a child stands. `GaveUp` and `Stopped` are final.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ChildState {
    /// The process is being made.
    Starting {
        /// Counts from 1.
        incarnation: u32,
    },
    /// The program runs; whether it serves already, only its health route knows.
    Running {
        /// Its process id, also its process group and session.
        pid: u32,
        /// Counts from 1.
        incarnation: u32,
    },
    /// It ended by itself, with all that it had started; what follows is decided next.
    Exited(ExitReport),
    /// It will be started again.
    Backoff {
        /// The pause before the restart.
        delay: Duration,
        /// How the last incarnation ended.
        last: ExitReport,
    },
    /// The restart budget is spent.
    GaveUp(ExitReport),
    /// It was asked to stop, and is gone. `None`: it was not running at that moment and had not run before.
    Stopped(Option<ExitReport>),
}

impl ChildState {
    /// Whether nothing follows.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, Self::GaveUp(_) | Self::Stopped(_))
    }
}

/// A running child's controls. Cheap to clone; dropping it leaves the child to its [`Launcher`](crate::launch::Launcher).
#[derive(Debug, Clone)]
pub struct ChildHandle {
    pub(super) name: Arc<str>,
    pub(super) stop: watch::Sender<Option<Instant>>,
    pub(super) state: watch::Receiver<ChildState>,
}

impl ChildHandle {
    /// The child's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The child's state and its changes. A slow reader sees the newest state only; each state of an ended child
    /// carries the report of how it ended, so none is needed to understand the next.
    #[must_use]
    pub fn events(&self) -> watch::Receiver<ChildState> {
        self.state.clone()
    }

    /// Stops the child with all that it started: `SIGINT` now (what NeMo Gym sends), `SIGTERM` after half of `grace`,
    /// `SIGKILL` after all of it. Returns the final state; at once when the child is final already.
    ///
    /// A second call can shorten the grace, never lengthen it. Waits at most `grace` and twelve seconds.
    ///
    /// # Errors
    /// [`LaunchError::StillAlive`] when a process does not even go after `SIGKILL`.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn stop(&self, grace: Duration) -> BoxFuture<'_, Result<ChildState, LaunchError>> {
        Box::pin(async move {
            let until = Instant::now() + grace;
            self.stop.send_if_modified(|wanted| {
                let sooner = wanted.is_none_or(|already| until < already);
                if sooner {
                    *wanted = Some(until);
                }
                sooner
            });
            let mut state = self.state.clone();
            if let Ok(Ok(last)) = timeout(grace + KILL_WAIT + STOP_SLACK, state.wait_for(ChildState::is_final)).await {
                return Ok(last.clone());
            }
            // Too late, or the supervisor is gone: its first start failed, or the launcher or runtime was dropped.
            let pids = match &*self.state.borrow() {
                ChildState::Running { pid, .. } => i32::try_from(*pid).into_iter().collect(),
                last if self.state.has_changed().is_err() => {
                    return Ok(match last {
                        ChildState::Exited(last) | ChildState::Backoff { last, .. } => {
                            ChildState::Stopped(Some(last.clone()))
                        }
                        _ => ChildState::Stopped(None),
                    });
                }
                _ => Vec::new(),
            };
            Err(LaunchError::StillAlive { name: self.name.to_string(), pids, waited: KILL_WAIT })
        })
    }
}

/// One incarnation.
pub(super) struct RunningChild {
    process: Child,
    leader: SessionLeader,
    tree: ProcessTree,
    output: JoinSet<()>,
    tail: OutputTail,
    number: u32,
}

/// Everything a supervisor needs.
pub(super) struct ChildSupervisor {
    pub(super) shared: Arc<SupervisionContext>,
    pub(super) spec: ChildSpec,
    pub(super) mark: String,
    pub(super) state: watch::Sender<ChildState>,
    pub(super) stop: watch::Receiver<Option<Instant>>,
    pub(super) budget: RestartBudget,
}

impl ChildSupervisor {
    /// Starts one incarnation: shim first, then the watchdog's register, then the program.
    pub(super) async fn start(&self, number: u32) -> Result<RunningChild, LaunchError> {
        let program = self.spec.resolve()?;
        let refused = |program: PathBuf, source| LaunchError::Spawn { name: self.spec.name.clone(), program, source };
        let mut process =
            spawner::spawn(self.command(&program)).await.map_err(|error| refused(program.clone(), error))?;
        let tail = OutputTail::default();
        let mut output = JoinSet::new();
        let name: Arc<str> = self.spec.name.as_str().into();
        if let Some(out) = process.stdout.take() {
            output.spawn(
                forward(Box::new(out), name.clone(), Stream::Stdout, self.shared.sink.clone(), tail.clone()).boxed(),
            );
        }
        if let Some(err) = process.stderr.take() {
            output.spawn(forward(Box::new(err), name, Stream::Stderr, self.shared.sink.clone(), tail.clone()).boxed());
        }
        let pid = process.id().and_then(|pid| i32::try_from(pid).ok());
        // The shim waits at its gate, so both are there; without them nothing could be registered, and `process` is
        // killed when it is dropped here.
        let (Some(pid), Some(mut gate)) = (pid, process.stdin.take()) else {
            return Err(refused(program, std::io::Error::other("it has no process id or input pipe")));
        };
        let leader = SessionLeader { pid, start_ticks: start_ticks(pid).unwrap_or(0) };
        if let Some(cgroup) = &self.spec.cgroup {
            // The kernel's answer to a write of one number; nothing here waits for a disk.
            std::fs::write(cgroup.join("cgroup.procs"), pid.to_string())
                .map_err(|error| refused(cgroup.clone(), error))?;
        }
        self.shared.register(leader).await?;
        let opened = timeout(GATE_WAIT, gate.write_all(&[shim::GATE_OPEN])).await;
        if let Err(error) = opened.unwrap_or_else(|late| Err(late.into()))
            // A shim that ended already says why on its standard error, which the exit report carries.
            && error.kind() != std::io::ErrorKind::BrokenPipe
        {
            self.shared.forget(leader).await;
            return Err(refused(program, error));
        }
        let tree = ProcessTree { leaders: vec![leader], mark: self.mark.clone() };
        Ok(RunningChild { process, leader, tree, output, tail, number })
    }

    fn command(&self, program: &std::path::Path) -> Command {
        let mut command = Command::new(&self.shared.shim);
        command.args(shim::shim_arguments(std::process::id(), program)).args(&self.spec.args);
        if self.spec.env_clear {
            command.env_clear();
        }
        command.envs(&self.spec.env);
        // Launchers nest: a child may be a launcher itself, and belongs to both.
        let mark = match std::env::var(MARK_VARIABLE) {
            Ok(outer) if !outer.is_empty() => format!("{outer}:{}", self.mark),
            _ => self.mark.clone(),
        };
        command.env(MARK_VARIABLE, mark);
        if let Some(cwd) = &self.spec.cwd {
            command.current_dir(cwd);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }

    /// Lives as long as the child does.
    pub(super) async fn run(mut self, first: RunningChild) {
        let mut number = first.number;
        let mut current = Ok(first);
        loop {
            let last = match current {
                Ok(mut incarnation) => {
                    let pid = incarnation.leader.pid.unsigned_abs();
                    self.state.send_replace(ChildState::Running { pid, incarnation: number });
                    let ended = tokio::select! { biased;
                        until = stop_wanted(&mut self.stop) => Err(until),
                        status = incarnation.process.wait() => Ok(status),
                    };
                    match ended {
                        Ok(status) => self.reap(incarnation, status).await,
                        Err(_) => {
                            let report = self.stop_incarnation(incarnation).await;
                            self.state.send_replace(ChildState::Stopped(Some(report)));
                            return;
                        }
                    }
                }
                Err(error) => ExitReport {
                    incarnation: number,
                    status: None,
                    reason: LaunchError::to_string(&error),
                    stderr_tail: Arc::default(),
                },
            };
            tracing::warn!(server = %self.spec.name, incarnation = number, reason = %last.reason, "child exited");
            self.state.send_replace(ChildState::Exited(last.clone()));
            let Some(delay) = self.budget.next(Instant::now()) else {
                tracing::error!(server = %self.spec.name, "restart budget spent");
                self.state.send_replace(ChildState::GaveUp(last));
                return;
            };
            self.state.send_replace(ChildState::Backoff { delay, last: last.clone() });
            tokio::select! { biased;
                _ = stop_wanted(&mut self.stop) => {
                    self.state.send_replace(ChildState::Stopped(Some(last)));
                    return;
                }
                () = sleep(delay) => {}
            }
            number += 1;
            self.state.send_replace(ChildState::Starting { incarnation: number });
            current = self.start(number).await;
        }
    }

    /// After the program ended by itself: ends what it left behind, which would hold its port, and reports.
    async fn reap(&self, incarnation: RunningChild, status: std::io::Result<ExitStatus>) -> ExitReport {
        let steps = [(Duration::ZERO, Signal::TERM), (self.spec.stop_grace, Signal::KILL)];
        let mut stop = self.stop.clone();
        let left = tokio::select! { biased;
            left = incarnation.tree.end(&steps) => left,
            // Somebody may not want to wait as long as this child's grace.
            () = stop_due(&mut stop) => incarnation.tree.end(&[(Duration::ZERO, Signal::KILL)]).await,
        };
        self.report(incarnation, status.map_err(|error| error.to_string()), &left).await
    }

    async fn stop_incarnation(&self, mut incarnation: RunningChild) -> ExitReport {
        let until = self.stop.borrow().unwrap_or_else(Instant::now);
        let grace = until.saturating_duration_since(Instant::now());
        let ask = [(Duration::ZERO, Signal::INT), (grace / 2, Signal::TERM), (grace, Signal::KILL)];
        let steps = if grace.is_zero() { &ask[2..] } else { &ask[..] };
        let mut stop = self.stop.clone();
        let RunningChild { process, tree, .. } = &mut incarnation;
        let left = tokio::select! { biased;
            left = tree.end(steps) => left,
            // The grace was shortened meanwhile.
            () = stop_due(&mut stop) => tree.end(&[(Duration::ZERO, Signal::KILL)]).await,
        };
        // Reaped only now: until here its number, which is the group's, could not go to anybody else.
        let status = match timeout(KILL_WAIT, process.wait()).await {
            Ok(status) => status.map_err(|error| error.to_string()),
            Err(_) => Err("did not end after SIGKILL".to_owned()),
        };
        self.report(incarnation, status, &left).await
    }

    async fn report(
        &self,
        mut incarnation: RunningChild,
        status: Result<ExitStatus, String>,
        left: &[TreeProcess],
    ) -> ExitReport {
        // Somebody outside the family may hold the pipes open; then the last lines are those that came so far.
        let _ = timeout(DRAIN_WAIT, async { while incarnation.output.join_next().await.is_some() {} }).await;
        incarnation.output.abort_all();
        if left.is_empty() {
            self.shared.forget(incarnation.leader).await;
        } else {
            let pids: Vec<i32> = left.iter().map(TreeProcess::pid).collect();
            tracing::error!(server = %self.spec.name, ?pids, "processes left after SIGKILL");
        }
        let (status, reason) = match status {
            Ok(status) => (Some(status), status.to_string()),
            Err(reason) => (None, reason),
        };
        ExitReport { incarnation: incarnation.number, status, reason, stderr_tail: incarnation.tail.lines() }
    }
}

/// Waits until a stop is asked for. The launcher keeps the sender, so it cannot be gone while this runs.
async fn stop_wanted(stop: &mut watch::Receiver<Option<Instant>>) -> Instant {
    match stop.wait_for(Option::is_some).await.map(|wanted| *wanted) {
        Ok(Some(until)) => until,
        Ok(None) | Err(_) => std::future::pending().await,
    }
}

/// Waits until the grace of a stop is over, following it when it is shortened.
async fn stop_due(stop: &mut watch::Receiver<Option<Instant>>) {
    loop {
        let until = stop_wanted(stop).await;
        stop.mark_unchanged();
        tokio::select! { biased;
            changed = stop.changed() => if changed.is_err() { std::future::pending::<()>().await },
            () = tokio::time::sleep_until(until) => return,
        }
    }
}
