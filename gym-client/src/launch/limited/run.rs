//! One run of a program: start below a guard, watch, kill, reap, in this order.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use bytes::Bytes;
use gym_core::base::temporary_folder;
use gym_core::{CallContext, Code, Error, Execution, Result};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit, kill_process_group, prlimit, waitid,
};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout};

use super::{Limit, LimitedProgram, LimitedRun, Limits, cannot_start};
use crate::launch::process::spawner;
use crate::launch::process::tree::{KILL_TIMEOUT, ProcessTree, SessionLeader, TreeProcess, TreeUsage};
use crate::launch::spec::{ChildSpec, DEFAULT_PATH};
use gym_core::base::cgroup::MemoryWatch;
use gym_core::base::process::{MARK_VARIABLE, ProcessStat, start_ticks};

/// The shell waits for a line, so that the limits are set before the program begins. `read` takes byte by byte and leaves the rest of the input to the program.
///
/// Then it stays as the program's parent: code that kills, stops or traces its parent hits the shell and not this process. It ends as the program has ended, by
/// the same signal where a signal ended it. Its own words about that go nowhere.
const GUARD: &str = r#"IFS= read -r gate || exit 125; exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); s=$?; [ $s -le 128 ] || kill -$((s - 128)) $$; exit $s"#;
/// The guard is one of the processes of a run.
const GUARDS: usize = 1;
/// Each look reads files of all processes of the machine, which takes some milliseconds.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Limit for reading what is left in the pipes after all processes have ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of one read: the size of a pipe.
const READ_BYTES: usize = 64 << 10;

/// A directory of the run, removed when dropped.
struct Directory(PathBuf);

impl Directory {
    fn create(files: &[(String, Bytes)]) -> io::Result<Self> {
        let path = temporary_folder(usize::MAX).join(format!("gym-limited-{:032x}", fastrand::u128(..)));
        DirBuilder::new().mode(0o700).create(&path)?;
        let directory = Self(path);
        for (name, content) in files {
            fs::write(directory.0.join(name), content)?;
        }
        Ok(directory)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(directory = %self.0.display(), %error, "the directory of a program was not removed");
        }
    }
}

/// A started program, below its guard, which is the child. Dropping it kills the group, which exists at least as a zombie until the child is reaped.
struct Started {
    child: Child,
    group: Pid,
    tree: ProcessTree,
    /// Notifies when any child of this process has ended.
    children: tokio::signal::unix::Signal,
    memory: Option<MemoryWatch>,
    reaped: bool,
}

impl Drop for Started {
    fn drop(&mut self) {
        if !self.reaped {
            let _ = kill_process_group(self.group, Signal::KILL);
        }
    }
}

/// The reason for which a run ended.
enum Ending {
    Exited,
    Limit(Limit),
    /// The context ended, or this process could not go on.
    Failed(Error),
}

/// Runs a program until it ends, a limit ends it, `cx` does, or `gone` resolves because the caller is gone.
pub(super) async fn run(
    program: LimitedProgram,
    spec: ChildSpec,
    cx: CallContext,
    mut gone: oneshot::Receiver<()>,
) -> Result<LimitedRun> {
    let LimitedProgram { args, env, files, stdin, limits, .. } = program;
    let prepare = move || -> Result<(PathBuf, Directory)> {
        let path = spec.resolve().map_err(cannot_start)?;
        let directory = Directory::create(&files).map_err(|error| here("create its directory", error))?;
        Ok((path, directory))
    };
    let (path, directory) = off_the_runtime(prepare).await??;
    let mark = format!("limited-{:032x}", fastrand::u128(..));
    // The processes of a run end with those of this process, if a launcher ends them by its mark.
    let outer = std::env::var(MARK_VARIABLE).ok().filter(|outer| !outer.is_empty());
    let marks = outer.map_or_else(|| mark.clone(), |outer| format!("{outer}:{mark}"));
    let mut command = Command::new("/bin/sh");
    command.args(["-c", GUARD, "sh"]).arg(&path).args(&args).current_dir(&directory.0).process_group(0);
    command.env_clear().env("PATH", DEFAULT_PATH).env("LANG", "C.UTF-8");
    command.env("HOME", &directory.0).env("TMPDIR", &directory.0).envs(&env).env(MARK_VARIABLE, marks);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);

    let begin = Instant::now();
    let mut started = Started::start(command, mark, &limits).await?;
    let pipes = (started.child.stdin.take(), started.child.stdout.take(), started.child.stderr.take());
    let (Some(input), Some(output), Some(errors)) = pipes else {
        return Err(here("start it", io::Error::other("the shell has no pipes")));
    };
    let (mut stdout, mut stderr, overflow) = (Vec::new(), Vec::new(), Notify::new());
    // The input is written while the output is read: each end could otherwise wait for the other one.
    let mut streams = Box::pin(async {
        let read_max = limits.output_bytes.saturating_add(1);
        let outputs =
            (capture(output, &mut stdout, read_max, &overflow), capture(errors, &mut stderr, read_max, &overflow));
        tokio::join!(feed(input, &stdin), outputs.0, outputs.1);
    });
    let mut closed = false;
    let ending = {
        let mut watched = pin!(watch(&mut started, &limits, &cx));
        loop {
            tokio::select! {
                biased;
                _ = &mut gone => break Ending::Failed(Error::finished(Code::Cancelled, "its caller is gone")),
                ending = &mut watched => break ending,
                () = overflow.notified() => break Ending::Limit(Limit::Output),
                () = &mut streams, if !closed => closed = true,
            }
        }
    };
    let wall = begin.elapsed();
    // A guard that is killed has not waited for the program, whose CPU time is known only while it lives.
    let seen = match ending {
        Ending::Limit(_) => usage(&started.tree, u64::MAX).await.map_or(0, |usage| usage.cpu_ticks),
        _ => 0,
    };
    // Before the program is reaped: until then, its id is that of its group and of nothing else.
    let left = started.tree.end(&[(Duration::ZERO, Signal::KILL)]).await;
    if !left.is_empty() {
        let pids: Vec<i32> = left.iter().map(TreeProcess::pid).collect();
        tracing::error!(?pids, "processes of a program did not end after SIGKILL");
    }
    if !closed {
        let _ = timeout(DRAIN_TIMEOUT, &mut streams).await;
    }
    drop(streams);
    let reaped = started.reap().await;
    let removed = off_the_runtime(move || drop(directory)).await;
    let (status, cpu) = match ending {
        Ending::Failed(error) => return Err(error),
        _ => reaped?,
    };
    removed?;
    let cpu = cpu.max(ticks(seen));
    let overflowed = [&mut stdout, &mut stderr].into_iter().fold(false, |any, bytes| {
        let over = bytes.len() > limits.output_bytes;
        bytes.truncate(limits.output_bytes);
        any || over
    });
    let limit = match ending {
        Ending::Limit(limit) => Some(limit),
        _ if overflowed => Some(Limit::Output),
        _ => limit_of(status, cpu, &limits),
    };
    // The program was ended within its limits, which is no statement about it.
    let kill = || started.memory.as_ref()?.explains(status);
    if let Some(kill) = limit.is_none().then(kill).flatten() {
        return Err(Error::finished(Code::Unavailable, kill.to_string()));
    }
    Ok(LimitedRun { status, limit, stdout, stderr, cpu, wall, sandboxed: false })
}

/// Returns the limit of the kernel that ended a program.
fn limit_of(status: ExitStatus, cpu: Duration, limits: &Limits) -> Option<Limit> {
    let signal = Signal::from_named_raw(status.signal()?)?;
    match signal {
        Signal::XCPU => Some(Limit::Cpu),
        // It ignored the first signal.
        Signal::KILL if cpu >= limits.cpu => Some(Limit::Cpu),
        Signal::XFSZ => Some(Limit::FileSize),
        _ => None,
    }
}

impl Started {
    /// Starts the guard, limits it and what it starts, and opens nothing: the first line of its input does.
    async fn start(command: Command, mark: String, limits: &Limits) -> Result<Self> {
        // Before the start, so that no end is missed.
        let children = signal(SignalKind::child()).map_err(|error| here("watch it", error))?;
        let child = spawner::spawn(command).await.map_err(cannot_start)?;
        // Until it is known, dropping the child kills the shell, which has started nothing.
        let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let group = group.ok_or_else(|| here("start it", io::Error::other("the shell has ended")))?;
        let pid = group.as_raw_nonzero().get();
        let leader = SessionLeader { pid, start_ticks: start_ticks(pid).unwrap_or(0) };
        let tree = ProcessTree { leaders: vec![leader], mark };
        let started = Self { child, group, tree, children, memory: MemoryWatch::start(pid), reaped: false };
        let seconds = limits.cpu.as_secs() + u64::from(limits.cpu.subsec_nanos() > 0);
        let kernel = [
            (Resource::Cpu, seconds, seconds + 1),
            (Resource::As, limits.memory_bytes, limits.memory_bytes),
            (Resource::Fsize, limits.file_bytes, limits.file_bytes),
            (Resource::Nofile, limits.open_files, limits.open_files),
            (Resource::Core, 0, 0),
        ];
        for (resource, current, maximum) in kernel {
            // Nobody may have more than this process has.
            let own = getrlimit(resource).maximum.unwrap_or(u64::MAX);
            let new = Rlimit { current: Some(current.min(own)), maximum: Some(maximum.min(own)) };
            prlimit(Some(group), resource, new)
                .map_err(|error| here(&format!("set its limit of {resource:?}"), error.into()))?;
        }
        Ok(started)
    }

    /// Returns `true` if the program has ended. Does not reap it, so its process and group keep their id.
    fn has_ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // An error means that it is no child any more.
        !matches!(waitid(WaitId::Pid(self.group), options), Ok(None))
    }

    /// Waits until the program has ended. Does not reap it.
    async fn ended(&mut self) {
        while !self.has_ended() {
            // Looks now and then as well: a library may have replaced the handler of the signal.
            let _ = timeout(POLL_INTERVAL, self.children.recv()).await;
        }
    }

    /// Waits for the end of the program, which has been killed if it had not ended, and returns its status and CPU time.
    async fn reap(&mut self) -> Result<(ExitStatus, Duration)> {
        let hangs = |_| here("end it", io::Error::other("it did not end after SIGKILL"));
        timeout(KILL_TIMEOUT, self.ended()).await.map_err(hangs)?;
        let cpu =
            ProcessStat::read(self.group.as_raw_nonzero().get()).map_or(0, |stat| stat.cpu_ticks + stat.waited_ticks);
        let status = timeout(KILL_TIMEOUT, self.child.wait())
            .await
            .map_err(hangs)?
            .map_err(|error| here("wait for it", error))?;
        self.reaped = true;
        Ok((status, ticks(cpu)))
    }
}

fn ticks(count: u64) -> Duration {
    Duration::from_secs(count) / u32::try_from(rustix::param::clock_ticks_per_second()).unwrap_or(100).max(1)
}

/// Waits until the program has ended, or has to be ended.
async fn watch(started: &mut Started, limits: &Limits, cx: &CallContext) -> Ending {
    let mut wall = pin!(sleep(limits.wall));
    let mut context = pin!(cx.bound(Execution::Unknown, std::future::pending::<Result<()>>()));
    let mut look = interval_at(Instant::now() + POLL_INTERVAL, POLL_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = started.ended() => return Ending::Exited,
            Err(error) = &mut context => return Ending::Failed(error),
            () = &mut wall => return Ending::Limit(Limit::Wall),
            _ = look.tick() => {
                if let Some(limit) = exceeded(&started.tree, limits).await {
                    return Ending::Limit(limit);
                }
            }
        }
    }
}

/// Looks at all processes of a run together.
async fn exceeded(tree: &ProcessTree, limits: &Limits) -> Option<Limit> {
    // Without `/proc`, the kernel's limits of each process and the wall time remain.
    let usage = usage(tree, limits.memory_bytes).await?;
    let over = [
        (usage.processes > limits.processes.saturating_add(GUARDS), Limit::Processes),
        (usage.memory.for_limit() > limits.memory_bytes, Limit::Memory),
        (ticks(usage.cpu_ticks) >= limits.cpu, Limit::Cpu),
    ];
    over.into_iter().find(|(over, _)| *over).map(|(_, limit)| limit)
}

async fn usage(tree: &ProcessTree, precise_above: u64) -> Option<TreeUsage> {
    let tree = tree.clone();
    off_the_runtime(move || tree.usage(precise_above)).await.ok()?.ok()
}

/// Opens the gate and writes the input. A program need not read it.
async fn feed(mut input: ChildStdin, bytes: &[u8]) {
    for part in [b"\n", bytes] {
        if input.write_all(part).await.is_err() {
            return;
        }
    }
}

/// Reads up to `max` bytes, and then discards the rest, so that the program does not wait for a reader before it is killed.
async fn capture(mut from: impl AsyncRead + Unpin, into: &mut Vec<u8>, max: usize, overflow: &Notify) {
    let mut buffer = vec![0; READ_BYTES];
    while let Ok(read) = from.read(&mut buffer).await
        && read > 0
    {
        into.extend_from_slice(&buffer[..read.min(max - into.len())]);
        if into.len() == max {
            overflow.notify_one();
        }
    }
}

async fn off_the_runtime<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    spawn_blocking(work).await.map_err(|error| Error::internal("the work was interrupted").caused_by(error))
}

/// Returns the error of something that this machine does not do. Another one may.
fn here(what: &str, error: io::Error) -> Error {
    Error::finished(Code::Unavailable, format!("cannot {what}: {error}")).caused_by(error)
}
