//! What can go wrong before a child runs, each with its fix.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a child could not be started or stopped. Every message names the child and says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// [`enter`](crate::launch::enter) was not called, so running this executable again would run its `main` a second time.
    #[error(
        "launch children from this program: call gym_client::launch::enter() as the first line of main, \
         or name an executable that does with Launcher::builder().shim(path)"
    )]
    NotEntered,
    /// The executable that should be shim and watchdog did not behave as one.
    #[error(
        "start the watchdog from {}: {reason}; its main must call gym_client::launch::enter() before anything else",
        shim.display()
    )]
    Watchdog {
        /// The executable that was started.
        shim: PathBuf,
        /// What happened instead.
        reason: String,
    },
    /// The launcher was shut down.
    #[error("start {name}: the launcher is shut down; make a new one")]
    ShutDown {
        /// The child.
        name: String,
    },
    /// A living child has the name already.
    #[error("start {name}: a child of this name is running; stop it first or choose another name")]
    DuplicateName {
        /// The child.
        name: String,
    },
    /// The specification holds text that cannot be handed to a process.
    #[error("start {name}: {what} {problem}")]
    Text {
        /// The child.
        name: String,
        /// Which argument or variable.
        what: String,
        /// What is wrong with it, and the fix.
        problem: String,
    },
    /// No such program.
    #[error(
        "start {name}: program {} not found{}; install it or give its full path",
        program.display(),
        looked_in.as_ref().map(|path| format!(" (looked in {path})")).unwrap_or_default()
    )]
    ProgramNotFound {
        /// The child.
        name: String,
        /// The program as given.
        program: PathBuf,
        /// The search path, for a program given without a folder.
        looked_in: Option<String>,
    },
    /// The program is there but is no executable file.
    #[error("start {name}: {} is {problem}", program.display())]
    NotExecutable {
        /// The child.
        name: String,
        /// The file found.
        program: PathBuf,
        /// What it is instead, and the fix.
        problem: &'static str,
    },
    /// The working directory is missing or is no directory.
    #[error("start {name}: working directory {}: {problem}; create it or correct `cwd`", cwd.display())]
    WorkingDirectory {
        /// The child.
        name: String,
        /// The directory as given.
        cwd: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The operating system refused.
    #[error("start {name}: run {}: {source}{}", program.display(), hint(source))]
    Spawn {
        /// The child.
        name: String,
        /// The program.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Processes are left although they were killed.
    #[error(
        "stop {name}: processes {pids:?} still there {} s after SIGKILL; they hang in the kernel \
         (often a dead network mount): see `cat /proc/PID/stack` as root",
        waited.as_secs()
    )]
    StillAlive {
        /// The child.
        name: String,
        /// Who is left; empty when the child itself was not seen to end.
        pids: Vec<i32>,
        /// How long we waited after the kill.
        waited: Duration,
    },
}

/// The fix for the refusals that have one.
fn hint(error: &io::Error) -> &'static str {
    let Some(code) = error.raw_os_error() else { return "" };
    match rustix::io::Errno::from_raw_os_error(code) {
        rustix::io::Errno::MFILE => "; raise the limit on open files (ulimit -n)",
        rustix::io::Errno::NFILE => "; the machine is out of open files (fs.file-max)",
        rustix::io::Errno::AGAIN => "; raise the limit on processes (ulimit -u, or the pids limit of the container)",
        rustix::io::Errno::NOMEM => "; the machine or container is out of memory",
        rustix::io::Errno::TOOBIG => "; arguments and environment together are too long: make them shorter",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_out_of_files_names_the_limit() {
        let error = LaunchError::Spawn {
            name: "math".to_owned(),
            program: "/usr/bin/python3".into(),
            source: io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error()),
        };
        let text = error.to_string();
        assert!(text.contains("math") && text.contains("/usr/bin/python3") && text.contains("ulimit -n"), "{text}");
    }
}
