//! Supervises one child process: starts, watches, restarts and stops it, and reports each exit.

use std::fmt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use rustix::process::Signal;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::launch::context::SupervisionContext;
use crate::launch::error::LaunchError;
use crate::launch::lines::{OutputTail, Stream, forward};
use crate::launch::process::tree::{KILL_TIMEOUT, ProcessTree, SessionLeader, TreeProcess};
use crate::launch::process::{shim, spawner};
use crate::launch::spec::{ChildSpec, RestartBudget, RestartPolicy};
use gym_core::base::cgroup::{MemoryKill, MemoryWatch};
use gym_core::base::process::{MARK_VARIABLE, start_ticks};

/// Limit for reading the rest of the output pipes after all processes have ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Limit for opening the shim's gate, which the shim reads within milliseconds.
const GATE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that a stop may take beyond its grace and the kill: the wait for the leader and for the last output.
const STOP_MARGIN_TIMEOUT: Duration = Duration::from_secs(7);

/// The report of the end of one incarnation of a child.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ExitReport {
    /// Number of the incarnation: counts from 1 and grows with each restart.
    pub incarnation: u32,
    /// The exit status. `None` if the child could not be restarted or did not end after `SIGKILL`;
    /// [`reason`](Self::reason) states the cause.
    pub status: Option<ExitStatus>,
    /// The exit as text: `exit status: 1`, or the reason why the start failed. A kill by the kernel because memory was used up is told with the limit that was
    /// reached, if the counters of the child's control group can be read.
    pub reason: String,
    /// The last lines of standard error, oldest first.
    pub stderr_tail: Arc<[String]>,
    /// The kill by the kernel that ended it, if that was it.
    pub memory_kill: Option<MemoryKill>,
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

/// The state of a child. `GaveUp` and `Stopped` are final.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ChildState {
    /// The process is being created.
    Starting {
        /// Number of the incarnation, from 1.
        incarnation: u32,
    },
    /// The program runs. Only its health route reports whether it serves requests.
    Running {
        /// Process ID, which is also the ID of its process group and session.
        pid: u32,
        /// Number of the incarnation, from 1.
        incarnation: u32,
    },
    /// The program exited on its own, and its descendants were ended. A restart or `GaveUp` follows.
    Exited(ExitReport),
    /// The program will be restarted.
    Backoff {
        /// Time until the restart.
        delay: Duration,
        /// The end of the last incarnation.
        last: ExitReport,
    },
    /// The restart limit was reached.
    GaveUp(ExitReport),
    /// The child was stopped and has ended. `None` if it was not running when the stop was requested and had never run.
    Stopped(Option<ExitReport>),
}

impl ChildState {
    /// Returns `true` if no other state follows.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, Self::GaveUp(_) | Self::Stopped(_))
    }
}

/// Controls a running child. Cheap to clone. Dropping it does not stop the child; its
/// [`Launcher`](crate::launch::Launcher) still manages it.
#[derive(Debug, Clone)]
pub struct ChildHandle {
    pub(super) name: Arc<str>,
    pub(super) stop: watch::Sender<Option<Instant>>,
    pub(super) state: watch::Receiver<ChildState>,
    /// The processes of the last incarnation.
    pub(super) tree: Arc<Mutex<ProcessTree>>,
}

impl ChildHandle {
    /// Returns what finds the processes of the last incarnation: those that end with it.
    #[must_use]
    pub fn tree(&self) -> ProcessTree {
        self.tree.lock().clone()
    }

    /// Returns the child's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the child's state and its changes. A slow reader sees only the newest state. Each state of an ended
    /// child contains the report of its end, so skipped states lose no information.
    #[must_use]
    pub fn events(&self) -> watch::Receiver<ChildState> {
        self.state.clone()
    }

    /// Stops the child and its descendants: sends `SIGINT` at once, as NeMo Gym does, `SIGTERM` after half of `grace`,
    /// and `SIGKILL` after all of it. Returns the final state, at once if the child already reached it.
    ///
    /// A later call can shorten the grace but not extend it. Waits at most `grace` and twelve seconds.
    ///
    /// # Errors
    /// [`LaunchError::StillAlive`] if a process does not end after `SIGKILL`.
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
            if let Ok(Ok(last)) =
                timeout(grace + KILL_TIMEOUT + STOP_MARGIN_TIMEOUT, state.wait_for(ChildState::is_final)).await
            {
                return Ok(last.clone());
            }
            // The child has ended, or its supervisor has: the first start failed, or the launcher or runtime was
            // dropped.
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
            Err(LaunchError::StillAlive { name: self.name.to_string(), pids, waited: KILL_TIMEOUT })
        })
    }
}

/// A running incarnation of a child.
pub(super) struct RunningChild {
    process: Child,
    leader: SessionLeader,
    tree: ProcessTree,
    output: JoinSet<()>,
    tail: OutputTail,
    number: u32,
    memory: Option<MemoryWatch>,
}

/// The state of a child's supervisor.
pub(super) struct ChildSupervisor {
    pub(super) shared: Arc<SupervisionContext>,
    pub(super) spec: ChildSpec,
    pub(super) tree: Arc<Mutex<ProcessTree>>,
    pub(super) state: watch::Sender<ChildState>,
    pub(super) stop: watch::Receiver<Option<Instant>>,
    pub(super) budget: RestartBudget,
}

impl ChildSupervisor {
    /// Starts one incarnation: first the shim, then the registration with the watchdog, then the program.
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
        // The shim waits at its gate, so both exist. Without them the process cannot be registered; `process` is then
        // dropped, which kills it.
        let (Some(pid), Some(mut gate)) = (pid, process.stdin.take()) else {
            return Err(refused(program, std::io::Error::other("the shim has no process ID or standard input")));
        };
        let leader = SessionLeader { pid, start_ticks: start_ticks(pid).unwrap_or(0) };
        if let Some(cgroup) = &self.spec.cgroup {
            // Writes one number to the kernel; does not wait for a disk.
            std::fs::write(cgroup.join("cgroup.procs"), pid.to_string())
                .map_err(|error| refused(cgroup.clone(), error))?;
        }
        let tree = {
            let mut tree = self.tree.lock();
            tree.leaders = vec![leader];
            tree.clone()
        };
        // Before the program runs, and in its control group.
        let memory = MemoryWatch::start(pid);
        self.shared.register(leader).await?;
        let opened = timeout(GATE_TIMEOUT, gate.write_all(&[shim::GATE_OPEN])).await;
        if let Err(error) = opened.unwrap_or_else(|late| Err(late.into()))
            // A shim that ended has printed the reason to standard error, which the exit report contains.
            && error.kind() != std::io::ErrorKind::BrokenPipe
        {
            self.shared.forget(leader).await;
            return Err(refused(program, error));
        }
        Ok(RunningChild { process, leader, tree, output, tail, number, memory })
    }

    fn command(&self, program: &std::path::Path) -> Command {
        let mut command = Command::new(&self.shared.shim);
        command.args(shim::shim_arguments(std::process::id(), program)).args(&self.spec.args);
        if self.spec.env_clear {
            command.env_clear();
        }
        command.envs(&self.spec.env);
        // Launchers can be nested: a child that is a launcher belongs to both.
        let mark = self.tree.lock().mark.clone();
        let mark = match std::env::var(MARK_VARIABLE) {
            Ok(outer) if !outer.is_empty() => format!("{outer}:{mark}"),
            _ => mark,
        };
        command.env(MARK_VARIABLE, mark);
        if let Some(cwd) = &self.spec.cwd {
            command.current_dir(cwd);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }

    /// Runs until the child reaches a final state.
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
                    memory_kill: None,
                },
            };
            tracing::warn!(server = %self.spec.name, incarnation = number, reason = %last.reason, "child exited");
            self.state.send_replace(ChildState::Exited(last.clone()));
            let Some(delay) = self.budget.next(Instant::now()) else {
                // Without restarts of its own, the child is restarted by its owner, or not at all.
                let RestartPolicy { max_restarts, window, .. } = self.budget.policy();
                if max_restarts > 0 {
                    tracing::error!(server = %self.spec.name, max_restarts, ?window, "restart limit reached: the child stays down");
                }
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

    /// Called after the program exited on its own: ends its remaining descendants, which may hold its port, and reports
    /// the exit.
    async fn reap(&self, incarnation: RunningChild, status: std::io::Result<ExitStatus>) -> ExitReport {
        // Before its other processes are killed. The kernel counts before it kills.
        let memory_kill = incarnation.memory.as_ref().and_then(|memory| memory.explains(*status.as_ref().ok()?));
        let steps = [(Duration::ZERO, Signal::TERM), (self.spec.stop_grace, Signal::KILL)];
        let mut stop = self.stop.clone();
        let left = tokio::select! { biased;
            left = incarnation.tree.end(&steps) => left,
            // A stop may have been requested with a shorter grace than this child's.
            () = stop_due(&mut stop) => incarnation.tree.end(&[(Duration::ZERO, Signal::KILL)]).await,
        };
        let mut report = self.report(incarnation, status.map_err(|error| error.to_string()), &left).await;
        report.memory_kill = memory_kill;
        if let Some(kill) = &report.memory_kill {
            report.reason = format!("{}: {kill}", report.reason);
        }
        report
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
            // The grace was shortened in the meantime.
            () = stop_due(&mut stop) => tree.end(&[(Duration::ZERO, Signal::KILL)]).await,
        };
        // Reaped only now: until then the kernel cannot reuse its process ID, which is also the ID of the group.
        let status = match timeout(KILL_TIMEOUT, process.wait()).await {
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
        // Another process may hold the pipes open; the report then contains the lines received so far.
        let _ = timeout(DRAIN_TIMEOUT, async { while incarnation.output.join_next().await.is_some() {} }).await;
        incarnation.output.abort_all();
        if left.is_empty() {
            self.shared.forget(incarnation.leader).await;
        } else {
            let pids: Vec<i32> = left.iter().map(TreeProcess::pid).collect();
            tracing::error!(server = %self.spec.name, ?pids, "processes did not end after SIGKILL");
        }
        let (status, reason) = match status {
            Ok(status) => (Some(status), status.to_string()),
            Err(reason) => (None, reason),
        };
        ExitReport {
            incarnation: incarnation.number,
            status,
            reason,
            stderr_tail: incarnation.tail.lines(),
            memory_kill: None,
        }
    }
}

/// Waits until a stop is requested. The launcher holds the sender, so it exists while this runs.
async fn stop_wanted(stop: &mut watch::Receiver<Option<Instant>>) -> Instant {
    match stop.wait_for(Option::is_some).await.map(|wanted| *wanted) {
        Ok(Some(until)) => until,
        Ok(None) | Err(_) => std::future::pending().await,
    }
}

/// Waits until the grace of a stop has passed, and follows it when it is shortened.
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
