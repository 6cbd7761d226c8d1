//! Programs that run once, within limits: code that a model wrote, for a verifier in a rank or in a resources server.
//!
//! The bounds of a run are not a sandbox: the code has the rights of this process's user. See [`LimitedProgram`].

mod run;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Once;
use std::time::Duration;

use bytes::Bytes;
use gym_core::{CallContext, Code, Error, Result};
use tokio::sync::oneshot;

use crate::launch::spec::ChildSpec;

/// A program that runs once in a child process, within [`Limits`], such as the answer of a model to a programming task.
///
/// ```
/// use gym_client::launch::{Limit, LimitedProgram};
/// use gym_core::{CallContext, Result};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let code = "a, b = map(int, input().split())\nprint(a + b)";
/// let run = LimitedProgram::new("python3").args(["-I", "main.py"]).file("main.py", code).stdin("2 3\n").run(&CallContext::default()).await?;
/// assert_eq!((run.succeeded(), run.stdout_text().trim()), (true, "5"));
///
/// let mut endless = LimitedProgram::new("python3").args(["-I", "-c", "while True: pass"]);
/// endless.limits.cpu = std::time::Duration::from_millis(300);
/// assert_eq!(endless.run(&CallContext::default()).await?.limit, Some(Limit::Cpu));
/// # Ok(()) }
/// ```
///
/// # Not a sandbox
///
/// The program runs as the user of this process. It can read and write that user's files, use the network, and see and signal other processes of
/// the user. Its parent is a process of its own, which ends with it: code that kills, stops or traces its parent ends its own run, or lets it reach
/// [`Limits::wall`]; code that searches for other processes finds them. The limits bound what it uses by accident; code that means harm needs a container or a virtual machine of its own. [`LimitedRun::sandboxed`] is
/// therefore `false`, and the first run writes a warning.
///
/// # What it gets, and what is left of it
///
/// It runs in a new, empty directory, which is removed afterwards, and in a process group of its own, below a shell that is its parent. Its environment has `PATH`
/// (`/usr/local/bin:/usr/bin:/bin`), `HOME` and `TMPDIR` (the directory), `LANG` (`C.UTF-8`), the variables given to it, and `GYM_LAUNCH_MARK`, by which its
/// processes are found; that shell may add `PWD`. When the program ends, or a limit ends it, or its caller gives up, all of them are killed: those of the group, those that left it, and
/// their descendants. What escapes is a process whose parents have ended and that has also replaced its environment.
///
/// If this process is killed, the processes of a rank and of a server that a [`Launcher`](crate::launch::Launcher) started are ended with it. A program that
/// no launcher started should be run in a container, or its programs may survive its own `SIGKILL`.
#[derive(Clone, Debug)]
pub struct LimitedProgram {
    program: PathBuf,
    args: Vec<OsString>,
    env: BTreeMap<OsString, OsString>,
    files: Vec<(String, Bytes)>,
    stdin: Bytes,
    /// The limits of each run.
    pub limits: Limits,
}

/// The limits of a [`LimitedProgram`]. The kernel enforces the limits of each process; those of all its processes together are checked every 100 ms.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// CPU time, user and system, of all processes together. Default: 10 s.
    pub cpu: Duration,
    /// Wall time. Default: 20 s.
    pub wall: Duration,
    /// Bytes of address space of each process, and of memory of all processes together, of which shared pages count once. Default: 1 GiB.
    pub memory_bytes: u64,
    /// Bytes of standard output, and of standard error. Default: 1 MiB each.
    pub output_bytes: usize,
    /// Bytes of each file that it writes. Default: 16 MiB.
    pub file_bytes: u64,
    /// Open files of each process. Default: 64.
    pub open_files: u64,
    /// Processes at the same time. Default: 16.
    pub processes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            cpu: Duration::from_secs(10),
            wall: Duration::from_secs(20),
            memory_bytes: 1 << 30,
            output_bytes: 1 << 20,
            file_bytes: 16 << 20,
            open_files: 64,
            processes: 16,
        }
    }
}

/// The limit that ended a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Limit {
    /// [`Limits::cpu`].
    Cpu,
    /// [`Limits::wall`].
    Wall,
    /// [`Limits::memory_bytes`], of all processes together. A single process that reaches it is refused more, and decides by itself; Python
    /// raises `MemoryError`.
    Memory,
    /// [`Limits::output_bytes`].
    Output,
    /// [`Limits::file_bytes`]. A program that ignores the signal is refused more and decides by itself; Python raises `OSError`.
    FileSize,
    /// [`Limits::processes`].
    Processes,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "CPU time",
            Self::Wall => "wall time",
            Self::Memory => "memory",
            Self::Output => "output",
            Self::FileSize => "file size",
            Self::Processes => "processes",
        })
    }
}

/// How a [`LimitedProgram`] ended.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LimitedRun {
    /// The exit status. A program that a limit ended has the signal that killed it, or the status that it chose before it was killed. As in shells, an exit
    /// code above 128 is the signal of that number less 128.
    pub status: ExitStatus,
    /// The limit that ended it, if one did.
    pub limit: Option<Limit>,
    /// Its standard output, up to the limit.
    pub stdout: Vec<u8>,
    /// Its standard error, up to the limit.
    pub stderr: Vec<u8>,
    /// CPU time of the program, and of those of its processes for which it has waited, in steps of 10 ms.
    pub cpu: Duration,
    /// Time from its start to its end.
    pub wall: Duration,
    /// Whether it could not reach anything outside its directory. Always `false`: there is no sandbox yet.
    pub sandboxed: bool,
}

impl LimitedRun {
    /// Returns `true` if the program exited with status 0, within its limits.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        self.limit.is_none() && self.status.success()
    }

    /// Returns the signal that ended the program, if one did.
    #[must_use]
    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    /// Returns the standard output as text; what is no UTF-8 is replaced.
    #[must_use]
    pub fn stdout_text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Returns the standard error as text; what is no UTF-8 is replaced.
    #[must_use]
    pub fn stderr_text(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }
}

impl fmt::Display for LimitedRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            Some(limit) => write!(f, "ended by the limit of {limit}")?,
            None => write!(f, "{}", self.status)?,
        }
        let error = self.stderr_text();
        match error.trim().lines().last() {
            Some(last) => write!(f, ": {last}"),
            None => Ok(()),
        }
    }
}

impl LimitedProgram {
    /// Creates a program, by its path or by its name in the directories of `PATH`, without arguments and input.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            env: BTreeMap::new(),
            files: Vec::new(),
            stdin: Bytes::new(),
            limits: Limits::default(),
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a variable to its environment, or replaces one.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Adds a file to its directory, by a name without `/`.
    #[must_use]
    pub fn file(mut self, name: impl Into<String>, content: impl Into<Bytes>) -> Self {
        self.files.push((name.into(), content.into()));
        self
    }

    /// Sets its standard input.
    #[must_use]
    pub fn stdin(mut self, input: impl Into<Bytes>) -> Self {
        self.stdin = input.into();
        self
    }

    /// Sets the limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Runs the program and waits until it and all its processes have ended. What the program does is a result, whatever it is.
    ///
    /// # Errors
    /// An error is no statement about the program: it has not run, or not to its end. `Unavailable` if it cannot be started here (another machine may have
    /// it), or if the kernel killed it because the memory of the container or the machine was used up; `InvalidArgument` for an invalid name or limit,
    /// `DeadlineExceeded` and `Cancelled` as `cx` says.
    ///
    /// # Cancel safety
    /// Dropping the future kills the program and all its processes; a task of the runtime then removes the directory.
    pub async fn run(&self, cx: &CallContext) -> Result<LimitedRun> {
        static WARNING: Once = Once::new();
        WARNING.call_once(|| {
            tracing::warn!(
                "untrusted code runs within limits, which are no sandbox: use a container for code that may mean harm"
            );
        });
        let subject = || format!("run {} within limits", self.program.display());
        let prepared = self.check().map_err(|error| error.about(subject()))?;
        cx.check().map_err(|error| error.about(subject()))?;
        // A task of its own, so that processes and directory are gone even if the caller is. It ends when `caller` is dropped.
        let (caller, gone) = oneshot::channel();
        let task = tokio::spawn(run::run(self.clone(), prepared, cx.child(), gone));
        let done = task.await;
        drop(caller);
        let done =
            done.map_err(|error| Error::internal("the run was interrupted").caused_by(error).about(subject()))?;
        done.map_err(|error| error.about(subject()))
    }

    /// Checks what is given, and returns what resolves the program, which looks only where the program itself would.
    fn check(&self) -> Result<ChildSpec> {
        let Limits { cpu, wall, memory_bytes, open_files, processes, .. } = &self.limits;
        if cpu.is_zero() || wall.is_zero() || *memory_bytes == 0 || *open_files < 4 || *processes == 0 {
            let message = "a limit is 0, or open_files is below 4\n  fix: set limits above what an empty program needs";
            return Err(Error::invalid(message));
        }
        let is_name = |name: &str| !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0']);
        if let Some((name, _)) = self.files.iter().find(|(name, _)| !is_name(name)) {
            return Err(Error::invalid(format!("{name:?} is no name of a file\n  fix: use a name without `/`")));
        }
        let mut spec = ChildSpec::new("program", &self.program);
        spec.args.clone_from(&self.args);
        spec.env.clone_from(&self.env);
        spec.env_clear = true;
        Ok(spec)
    }
}

/// Returns the error of a program that this machine cannot start. Another machine may.
fn cannot_start(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    let text = format!("{error}\n  fix: install the program on this machine, or name another one");
    Error::finished(Code::Unavailable, text).caused_by(error)
}
