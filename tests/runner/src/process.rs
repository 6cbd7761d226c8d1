//! Processes as `/proc` shows them: those of a case, what their threads wait for, and those that outlive it.

use std::fmt::Write as _;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use rustix::process::{Pid, Signal, getpid, kill_process, set_child_subreaper};
use tokio::signal::unix::{SignalKind, signal};

/// The variable by which the processes of a case are found, wherever they are in the tree: its value is unique.
pub(crate) const MARK: &str = "GYM_TEST_CASE";

/// Orphans become children of this process, so that none is lost.
pub(crate) fn adopt_orphans() -> Result<()> {
    Ok(set_child_subreaper(Some(getpid()))?)
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on, a signal to end is noted: the cases have groups of processes of their own, which a terminal does not reach.
pub(crate) fn note_interrupts() {
    std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let mut terminated = signal(SignalKind::terminate()).expect("a signal handler");
            tokio::select! { biased; _ = terminated.recv() => {} _ = tokio::signal::ctrl_c() => {} }
        });
        INTERRUPTED.store(true, Ordering::Relaxed);
    });
}

pub(crate) fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// The processes of a case at one look.
#[derive(Default)]
pub(crate) struct CaseProcesses {
    pub(crate) pids: Vec<i32>,
    /// `true` if an orphan that this process has adopted shows no environment, so that nobody can tell whose it is: while a process executes another
    /// program, it has none for a moment.
    pub(crate) may_have_more: bool,
}

/// Returns the processes whose environment has this mark. The dead, which only wait to be reaped, do not count. `known` are processes that are no
/// orphans.
pub(crate) fn of_case(mark: &str, known: impl Fn(i32) -> bool) -> CaseProcesses {
    let (variable, own) = (format!("{MARK}={mark}"), getpid().as_raw_pid());
    let mut found = CaseProcesses::default();
    // Each environment is read once: two reads could each miss it.
    for pid in all() {
        let Ok(environment) = fs::read(format!("/proc/{pid}/environ")) else { continue };
        if environment.is_empty() {
            found.may_have_more |= parent(pid) == Some(own) && !known(pid) && lives(pid);
        } else if environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes()) && lives(pid) {
            found.pids.push(pid);
        }
    }
    found
}

/// Returns the children of this process that live.
pub(crate) fn children() -> Vec<i32> {
    let own = getpid().as_raw_pid();
    all().into_iter().filter(|pid| parent(*pid) == Some(own) && lives(*pid)).collect()
}

/// Returns `true` if a process is this one or below it.
pub(crate) fn is_descendant(pid: i32) -> bool {
    let own = getpid().as_raw_pid();
    let mut at = Some(pid);
    while let Some(pid) = at.filter(|pid| *pid > 1) {
        if pid == own {
            return true;
        }
        at = parent(pid);
    }
    false
}

pub(crate) fn all() -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Kills a process, stopped or not.
pub(crate) fn kill(pid: i32) {
    // It may have ended.
    let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
}

/// Returns number, parent, state and command line of a process.
pub(crate) fn describe(pid: i32) -> String {
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let command = String::from_utf8_lossy(&command).replace('\0', " ");
    let command: String = command.chars().take(200).collect();
    format!("process {pid} (parent {}, state {}): {command}", parent(pid).unwrap_or(0), state(pid).unwrap_or('?'))
}

/// Describes processes that hang: each thread with its name, state and wait channel, and the stacks where gdb is installed.
pub(crate) fn autopsy(pids: &[i32]) -> String {
    let mut text = String::new();
    for pid in pids {
        let _ = writeln!(text, "{}", describe(*pid));
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for thread in threads {
            let file = |name: &str| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
            let (name, stat, channel) = (file("comm"), file("stat"), file("wchan"));
            let state = fields(&stat).and_then(|mut fields| fields.next()).unwrap_or("?").to_owned();
            let channel = if channel.is_empty() || channel == "0" { "no wait channel" } else { &channel };
            let number = thread.file_name().to_string_lossy().into_owned();
            let _ = writeln!(text, "  thread {number} {}: state {state}, {channel}", name.trim());
        }
    }
    for pid in pids {
        let Some(stacks) = stacks(*pid) else {
            let _ = writeln!(text, "no stacks: gdb is not installed");
            break;
        };
        let _ = writeln!(text, "stacks of process {pid}:\n{stacks}");
    }
    text
}

/// Returns the stacks of all threads, or `None` without gdb. A process that gdb cannot stop costs ten seconds.
fn stacks(pid: i32) -> Option<String> {
    let mut gdb = Command::new("timeout");
    gdb.args(["-s", "KILL", "10", "gdb", "-batch", "-nx", "-p", &pid.to_string(), "-ex", "thread apply all bt 24"]);
    let output = gdb.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    // 127: `timeout` found no such program.
    if output.status.code() == Some(127) {
        return None;
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some(text.lines().filter(|line| line.starts_with(['#', 'T'])).map(|line| format!("  {line}\n")).collect())
}

fn lives(pid: i32) -> bool {
    state(pid).is_some_and(|state| state != 'Z' && state != 'X')
}

fn state(pid: i32) -> Option<char> {
    fields(&stat(pid))?.next()?.chars().next()
}

fn parent(pid: i32) -> Option<i32> {
    fields(&stat(pid))?.nth(1)?.parse().ok()
}

fn stat(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default()
}

/// Returns the fields of a `stat` file from the state on: the name before it may contain anything.
fn fields(stat: &str) -> Option<impl Iterator<Item = &str>> {
    Some(stat.rsplit_once(')')?.1.split_ascii_whitespace())
}

/// A process that uses one core until it is dropped.
pub(crate) struct Busy(Child);

impl Busy {
    pub(crate) fn start() -> Result<Self> {
        Ok(Self(Command::new("bash").args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn()?))
    }

    pub(crate) fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // It may have been killed by hand.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
