//! The watchdog: a process that outlives the controller briefly and ends the processes that the controller started.
//!
//! `PDEATHSIG` reaches a child but not its descendants. A launcher therefore starts one watchdog with its first child:
//! this program, executed again, which holds the read end of a pipe. Only the controller holds the write end. However
//! the controller dies (`kill -9`, out of memory, a panic that aborts), the kernel closes the pipe. The watchdog then
//! sends `SIGTERM` to every registered process tree, `SIGKILL` after a grace, and exits.
//!
//! A controller can give its children a lease, and extends it while it may. The watchdog ends the children when the lease ends: a
//! controller that is stopped cannot do that itself.
//!
//! Files that must stay locked as long as the children run are locked by the watchdog, because it ends after them.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;
use tokio::process::{Child, ChildStdin, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::launch::process::roles::{WATCHDOG_ROLE, parse_pid, tie_to};
use crate::launch::process::spawner;
use crate::launch::process::tree::{ProcessTree, SessionLeader};

/// The first output of a watchdog, which proves that the executable calls [`enter`](crate::launch::enter) first.
const READY: &[u8] = b"gym-launch-watchdog 1\n";
/// Limit for the start. A loaded machine starts a process in less than a second; ten seconds allow for a cold binary on
/// a network disk.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit for a write. The watchdog reads continuously, so a pipe that stays full for this long has no reader.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a line. A registration consists of two numbers, so a longer line does not come from this program.
const LINE_BYTES_MAX: u64 = 128;

/// The controller's handle on the watchdog.
#[derive(Debug)]
pub(in crate::launch) struct Watchdog {
    process: Child,
    pipe: ChildStdin,
}

impl Watchdog {
    /// Starts the watchdog and waits until it reports that it is ready.
    pub(in crate::launch) async fn start(
        shim: &Path,
        launcher: &str,
        grace: Duration,
        locks: &[PathBuf],
    ) -> Result<Self, String> {
        let mut command = Command::new(shim);
        command
            .arg(WATCHDOG_ROLE)
            .arg(std::process::id().to_string())
            .arg(launcher)
            .arg(grace.as_millis().to_string())
            .args(locks)
            // It must not keep a file system busy or hold the controller's output open.
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut process = spawner::spawn(command).await.map_err(|error| error.to_string())?;
        let (Some(pipe), Some(mut stdout)) = (process.stdin.take(), process.stdout.take()) else {
            return Err("the process has no pipes".to_owned());
        };
        let mut output = vec![0_u8; READY.len()];
        match timeout(START_TIMEOUT, stdout.read_exact(&mut output)).await {
            Ok(Ok(_)) if output == READY => Ok(Self { process, pipe }),
            outcome => {
                let _ = process.start_kill();
                let _ = timeout(WRITE_TIMEOUT, process.wait()).await;
                Err(match outcome {
                    Err(_) => format!("no output within {} s", START_TIMEOUT.as_secs()),
                    Ok(Err(_)) => "it ended without output".to_owned(),
                    Ok(Ok(_)) => "its output was not that of a watchdog".to_owned(),
                })
            }
        }
    }

    pub(in crate::launch) async fn register(&mut self, leader: SessionLeader) -> std::io::Result<()> {
        self.say(format!("+{} {}\n", leader.pid, leader.start_ticks)).await
    }

    pub(in crate::launch) async fn forget(&mut self, leader: SessionLeader) -> std::io::Result<()> {
        self.say(format!("-{} {}\n", leader.pid, leader.start_ticks)).await
    }

    pub(in crate::launch) async fn lease(&mut self, until: Duration) -> std::io::Result<()> {
        self.say(format!("={}\n", until.as_millis())).await
    }

    async fn say(&mut self, line: String) -> std::io::Result<()> {
        timeout(WRITE_TIMEOUT, self.pipe.write_all(line.as_bytes())).await.unwrap_or_else(|late| Err(late.into()))
    }

    /// Ends a watchdog that no longer reads. It is killed before the pipe closes, because a watchdog that is only slow
    /// would take the closed pipe for the controller's death.
    pub(in crate::launch) async fn discard(mut self) {
        let _ = self.process.start_kill();
        let _ = timeout(WRITE_TIMEOUT, self.process.wait()).await;
    }

    /// Closes the pipe and reaps the process.
    pub(in crate::launch) async fn end(self, wait: Duration) {
        let Self { mut process, pipe } = self;
        drop(pipe);
        if timeout(wait, process.wait()).await.is_err() {
            let _ = process.start_kill();
            let _ = timeout(WRITE_TIMEOUT, process.wait()).await;
        }
    }
}

/// Runs as the watchdog process.
pub(in crate::launch) fn run(mut arguments: impl Iterator<Item = OsString>) -> ! {
    let controller = arguments.next().and_then(|text| parse_pid(&text));
    let launcher = arguments.next().and_then(|text| text.into_string().ok());
    let grace = arguments.next().and_then(|text| text.to_str()?.parse().ok()).map(Duration::from_millis);
    let (Some(controller), Some(launcher), Some(grace)) = (controller, launcher, grace) else { std::process::exit(2) };
    // Held until this process ends. Others lock them alone only for a moment.
    let locked = |path: OsString| File::open(path).and_then(|file| file.lock_shared().map(|()| file));
    let Ok(_locks) = arguments.map(locked).collect::<Result<Vec<_>, _>>() else { std::process::exit(1) };
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { std::process::exit(1) };
    let status = runtime.block_on(async {
        // Signals to all processes of this name, or to the terminal's group, ask the controller to stop; the watchdog
        // must survive until the controller has ended. Installing a handler is sufficient to survive.
        let ignored = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), SignalKind::quit()];
        let _kept: Vec<_> = ignored.into_iter().filter_map(|kind| signal(kind).ok()).collect();
        // The pipe does not report the death of a controller that forked without `exec`, because the forked process
        // still holds it.
        let Ok(mut controller_died) = signal(SignalKind::user_defined1()) else { return 1 };
        let alive = tie_to(controller, Signal::USR1).is_ok();
        let Ok(input) = std::io::stdin().as_fd().try_clone_to_owned() else { return 1 };
        let Ok(input) = pipe::Receiver::from_owned_fd(input) else { return 1 };
        let mut lines =
            Registrations { input: BufReader::new(input), leaders: Vec::new(), lease: watch::Sender::new(None) };
        let lease = lines.lease.subscribe();
        if alive {
            if std::io::stdout().write_all(READY).and_then(|()| std::io::stdout().flush()).is_err() {
                return 1;
            }
            tokio::select! { biased;
                () = lines.follow() => {}
                _ = controller_died.recv() => {}
                () = lease_ended(lease) => {}
            }
        }
        // Reads the last registrations of the dead controller. Reading a full pipe takes much less than this limit,
        // which is needed because a forked copy of the controller may hold the pipe open forever.
        let _ = timeout(Duration::from_millis(100), lines.follow()).await;
        let tree = ProcessTree { leaders: lines.leaders, mark: format!("{launcher}.") };
        let stages = [(Duration::ZERO, Signal::TERM), (grace, Signal::KILL)];
        let left = tree.end(if grace.is_zero() { &stages[1..] } else { &stages }).await;
        i32::from(!left.is_empty())
    });
    std::process::exit(status)
}

/// Waits until the lease has ended; forever without one. Looks at the clock at least once a second, because a timer does not count
/// the time for which the machine was suspended.
async fn lease_ended(mut lease: watch::Receiver<Option<Duration>>) {
    loop {
        let until = *lease.borrow_and_update();
        let wait = match until.map(|until| until.saturating_sub(gym_core::base::process::since_boot())) {
            Some(Duration::ZERO) => return,
            Some(left) => left.min(Duration::from_secs(1)),
            None => Duration::MAX,
        };
        if let Ok(Err(_)) = timeout(wait, lease.changed()).await {
            return std::future::pending().await;
        }
    }
}

struct Registrations {
    input: BufReader<pipe::Receiver>,
    leaders: Vec<SessionLeader>,
    lease: watch::Sender<Option<Duration>>,
}

impl Registrations {
    /// Reads until the pipe closes. If dropped in the middle of a line, that line may be lost; its child is then still
    /// at its gate and ends on its own.
    async fn follow(&mut self) {
        let mut line = String::new();
        loop {
            line.clear();
            match (&mut self.input).take(LINE_BYTES_MAX).read_line(&mut line).await {
                Ok(0) | Err(_) => return,
                Ok(_) => self.take(line.trim_end()),
            }
        }
    }

    fn take(&mut self, line: &str) {
        let Some((sign, rest)) = line.split_at_checked(1) else { return };
        if sign == "=" {
            let until = rest.parse().ok().map(Duration::from_millis);
            self.lease.send_if_modified(|lease| {
                let later = until > *lease;
                *lease = (*lease).max(until);
                later
            });
            return;
        }
        let Some((pid, start)) = rest.split_once(' ') else { return };
        let (Ok(pid), Ok(start_ticks)) = (pid.parse(), start.parse()) else { return };
        let leader = SessionLeader { pid, start_ticks };
        self.leaders.retain(|known| *known != leader);
        if sign == "+" {
            self.leaders.push(leader);
        }
    }
}
