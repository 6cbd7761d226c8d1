//! One incarnation of a rank as a child process: its start, handshake, usage, end and exit reason.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gym_client::launch::ProcessTree;
use gym_client::launch::{ChildHandle, ChildSpec, ChildState, Launcher, LineSink, RestartPolicy, Stream};
use gym_core::Incarnation;
use gym_core::group::{ExitCause, Rank, RankExit};
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::sync::{mpsc, watch};

use crate::provision::events::{EventLog, RankEvent};
use crate::provision::local::cgroup::Cgroup;
use crate::provision::local::handshake::{ASSIGNMENT_VARIABLE, HandshakeReply, WORKER_ROLE, WorkerAssignment};
use crate::provision::variables::Variables;

/// Time for the remaining descendants of a dead worker to exit before they are killed.
const LEFTOVER_TIMEOUT: Duration = Duration::from_secs(1);
/// Capacity for replies between the pipe and the task that waits for them. A worker sends one reply; a second one is logged and
/// dropped.
const REPLIES: usize = 4;

/// Specifies one incarnation to start.
#[derive(Debug)]
pub(crate) struct ProcessStart {
    /// Unique among the running processes of the deployment; prefixes the log lines.
    pub(crate) name: String,
    pub(crate) program: PathBuf,
    /// The command that runs the program, with its arguments; if empty, the program runs directly.
    pub(crate) runner: Vec<String>,
    pub(crate) environment: Variables,
    pub(crate) assignment: WorkerAssignment,
    pub(crate) memory_limit_bytes: Option<u64>,
    pub(crate) start_timeout: Duration,
}

/// The receivers of pending worker replies, by the name of the process.
#[derive(Clone, Debug, Default)]
pub(crate) struct PendingHandshakes(Arc<Mutex<BTreeMap<String, PendingHandshake>>>);

#[derive(Debug)]
struct PendingHandshake {
    token: String,
    replies: mpsc::Sender<HandshakeReply>,
}

impl PendingHandshakes {
    /// Returns a sink that takes out the workers' replies, with the blank line before each, and passes the other lines to `rest`.
    pub(crate) fn sink(&self, rest: LineSink) -> LineSink {
        let handshakes = self.clone();
        Arc::new(move |name, stream, line| {
            if stream != Stream::Stdout || !(line.is_empty() || handshakes.take(name, line)) {
                rest(name, stream, line);
            }
        })
    }

    fn expect(&self, name: &str, token: &str) -> mpsc::Receiver<HandshakeReply> {
        let (replies, receiver) = mpsc::channel(REPLIES);
        let expected = PendingHandshake { token: token.to_owned(), replies };
        self.0.lock().insert(name.to_owned(), expected);
        receiver
    }

    fn take(&self, name: &str, line: &str) -> bool {
        let handshakes = self.0.lock();
        let Some(expected) = handshakes.get(name) else { return false };
        let Some(reply) = HandshakeReply::read(line, &expected.token) else { return false };
        if expected.replies.try_send(reply).is_err() {
            tracing::warn!(worker = %name, "a worker said more than once where it serves; only the first counts");
        }
        true
    }
}

/// A running process of a rank.
#[derive(Debug)]
pub(crate) struct RankProcess {
    pub(crate) incarnation: Incarnation,
    /// Refers to the process itself, because its process ID can be reused after it exits. `None` if the process exited before
    /// this was opened.
    pidfd: Option<OwnedFd>,
    handle: ChildHandle,
    kill_reason: KillReason,
    limit: Option<u64>,
    /// The kernel enforces the limit, so sampling does not have to.
    kernel_limit: bool,
}

/// The reason why we killed the process, if we did. It is set before the kill and read when the process has exited.
#[derive(Clone, Debug, Default)]
struct KillReason(Arc<Mutex<Option<RankExit>>>);

impl KillReason {
    /// Sets the reason; only the first one counts.
    fn set_first(&self, exit: RankExit) {
        self.0.lock().get_or_insert(exit);
    }

    fn read(&self) -> Option<RankExit> {
        self.0.lock().clone()
    }
}

impl RankProcess {
    /// Starts the process and monitors it; its events go to `log`.
    pub(crate) async fn start(
        launcher: &Launcher,
        handshakes: &PendingHandshakes,
        log: &EventLog,
        start: ProcessStart,
    ) -> Result<Self, RankExit> {
        let ProcessStart { name, program, runner, mut environment, assignment, memory_limit_bytes, start_timeout } =
            start;
        let (rank, incarnation) = (assignment.rank, Incarnation(assignment.incarnation));
        let failed = |why: String| RankExit::start_failed(incarnation, why);
        let text =
            serde_json::to_string(&assignment).map_err(|error| failed(format!("write its assignment: {error}")))?;
        environment.insert(ASSIGNMENT_VARIABLE.to_owned(), text);
        let spec = match runner.split_first() {
            Some((first, rest)) => rest.iter().fold(ChildSpec::new(name.clone(), first), ChildSpec::arg).arg(program),
            None => ChildSpec::new(name.clone(), program),
        };
        let mut spec = spec.arg(WORKER_ROLE).restart(RestartPolicy::NEVER).stop_grace(LEFTOVER_TIMEOUT);
        spec.env_clear = true;
        spec.env = environment.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        let cgroup = memory_limit_bytes.and_then(|limit| kernel_limit(&name, incarnation, limit));
        if let Some(cgroup) = &cgroup {
            spec = spec.cgroup(cgroup.path());
        }
        let replies = handshakes.expect(&name, &assignment.token);
        let handle = launcher.spawn(spec).await.map_err(|error| failed(error.to_string()))?;
        let pid = pid_of(&handle).await;
        log.push(RankEvent::Started { rank, incarnation, pid });
        let process = Self {
            incarnation,
            pidfd: pid.and_then(open),
            handle,
            kill_reason: KillReason::default(),
            limit: memory_limit_bytes,
            kernel_limit: cgroup.is_some(),
        };
        let monitor = ProcessMonitor {
            rank,
            incarnation,
            handle: process.handle.clone(),
            kill_reason: process.kill_reason.clone(),
            limit: memory_limit_bytes,
            cgroup,
            log: log.clone(),
        };
        // Ends with the child process, which the launcher ends.
        tokio::spawn(monitor.run(replies, start_timeout));
        Ok(process)
    }

    /// Returns the limit that sampling must enforce, in bytes.
    pub(crate) fn sampled_limit(&self) -> Option<u64> {
        self.limit.filter(|_| !self.kernel_limit)
    }

    pub(crate) fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Returns what finds its processes.
    pub(crate) fn tree(&self) -> ProcessTree {
        self.handle.tree()
    }

    /// Kills the process because it uses too much memory.
    pub(crate) fn exceeded(&self, resident_bytes: u64, limit_bytes: u64) {
        self.kill_reason.set_first(RankExit::over_memory_limit(self.incarnation, Some(resident_bytes), limit_bytes));
        let handle = self.handle.clone();
        tokio::spawn(async move { handle.stop(Duration::ZERO).await });
    }

    /// Kills the process as a crash would. Has no effect if it has already exited.
    pub(crate) fn crash(&self) -> rustix::io::Result<()> {
        match self.pidfd.as_ref().map(|pidfd| pidfd_send_signal(pidfd, Signal::KILL)) {
            None | Some(Ok(()) | Err(rustix::io::Errno::SRCH)) => Ok(()),
            Some(Err(error)) => Err(error),
        }
    }

    /// Asks the process to exit, and kills it after `grace`. Returns when it has exited.
    pub(crate) async fn stop(&self, grace: Duration) -> Result<(), gym_client::launch::LaunchError> {
        self.kill_reason.set_first(RankExit::new(self.incarnation, ExitCause::Stopped));
        self.handle.stop(grace).await.map(drop)
    }
}

/// Creates a control group for this incarnation, if the system allows it.
fn kernel_limit(name: &str, incarnation: Incarnation, limit: u64) -> Option<Cgroup> {
    let parent = Cgroup::delegated()?;
    let group = format!("gym-{}-{name}-{incarnation}", std::process::id());
    Cgroup::create(&parent, &group, limit)
        .inspect_err(|error| tracing::warn!(worker = %name, %error, "no control group; its memory is sampled instead"))
        .ok()
}

/// Opens a process by its ID, as long as the ID still belongs to it.
fn open(pid: u32) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Returns the process ID; `None` if the process exited before the ID could be read.
async fn pid_of(handle: &ChildHandle) -> Option<u32> {
    let mut events = handle.events();
    let state = events.wait_for(|state| !matches!(state, ChildState::Starting { .. })).await.ok()?;
    match &*state {
        ChildState::Running { pid, .. } => Some(*pid),
        _ => None,
    }
}

/// Reports the events of one incarnation.
struct ProcessMonitor {
    rank: Rank,
    incarnation: Incarnation,
    handle: ChildHandle,
    kill_reason: KillReason,
    limit: Option<u64>,
    cgroup: Option<Cgroup>,
    log: EventLog,
}

impl ProcessMonitor {
    async fn run(self, mut replies: mpsc::Receiver<HandshakeReply>, start_timeout: Duration) {
        let Self { rank, incarnation, handle, kill_reason, limit, cgroup, log } = self;
        let mut events = handle.events();
        tokio::select! { biased;
            reply = replies.recv() => match reply {
                Some(HandshakeReply::Serves(endpoints)) => log.push(RankEvent::Ready { rank, incarnation, endpoints }),
                Some(HandshakeReply::Failed(why)) => kill_reason.set_first(RankExit::start_failed(incarnation, why)),
                None => {}
            },
            () = ended(&mut events) => {}
            () = tokio::time::sleep(start_timeout) => {
                kill_reason.set_first(RankExit::not_ready(incarnation, start_timeout));
                // The result of the stop is awaited below.
                let _ = handle.stop(Duration::ZERO).await;
            }
        }
        ended(&mut events).await;
        // The last reply may be read after the exit was noticed.
        if let Ok(HandshakeReply::Failed(why)) = replies.try_recv() {
            kill_reason.set_first(RankExit::start_failed(incarnation, why));
        }
        let report = match &*events.borrow() {
            ChildState::Exited(report) | ChildState::GaveUp(report) | ChildState::Stopped(Some(report)) => {
                Some(report.clone())
            }
            _ => None,
        };
        let kill = report.as_ref().and_then(|report| report.memory_kill.as_ref());
        let of_its_own = kill.zip(cgroup.as_ref()).is_some_and(|(kill, cgroup)| kill.is_of(cgroup.path()));
        if let Some(limit_bytes) = limit.filter(|_| of_its_own) {
            kill_reason.set_first(RankExit::over_memory_limit(incarnation, None, limit_bytes));
        }
        let mut exit = kill_reason.read().unwrap_or_else(|| RankExit::new(incarnation, ExitCause::Died));
        if let Some(kill) = kill.filter(|_| exit.cause == ExitCause::Died) {
            // The limit of a container is that of all its processes, and the kernel chooses which of them it kills. The rank need not have exceeded a limit.
            exit.detail = kill.to_string();
        }
        if let Some(report) = report {
            exit.code = report.status.and_then(|status| status.code());
            exit.signal = report.status.and_then(|status| status.signal());
            exit.stderr_tail = report.stderr_tail.to_vec();
        }
        log.push(RankEvent::Exited { rank, exit });
    }
}

/// Waits until a child process has exited and will not be restarted. The end of the launcher counts as well.
async fn ended(events: &mut watch::Receiver<ChildState>) {
    let _ = events.wait_for(ChildState::is_final).await;
}
