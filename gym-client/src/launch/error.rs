//! Errors of starting and stopping child processes.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// An error of starting or stopping a child. Every message names the child and the fix.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// [`enter`](crate::launch::enter) was not called, so executing this program again would run its `main` a second
    /// time.
    #[error(
        "launch children from this program: call gym_client::launch::enter() as the first line of main, \
         or name an executable that does with Launcher::builder().shim(path)"
    )]
    NotEntered,
    /// The executable for shim and watchdog did not behave as expected.
    #[error(
        "start the watchdog from {}: {reason}; its main must call gym_client::launch::enter() before anything else",
        shim.display()
    )]
    Watchdog {
        /// The executable that was started.
        shim: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The launcher was shut down.
    #[error("start {name}: the launcher was shut down; create a new one")]
    ShutDown {
        /// Name of the child.
        name: String,
    },
    /// A running child has the same name.
    #[error("start {name}: a child of this name is running; stop it first or choose another name")]
    DuplicateName {
        /// Name of the child.
        name: String,
    },
    /// The specification contains text that cannot be passed to a process.
    #[error("start {name}: {what} {problem}")]
    Text {
        /// Name of the child.
        name: String,
        /// The argument or variable.
        what: String,
        /// The cause and the fix.
        problem: String,
    },
    /// The program was not found.
    #[error(
        "start {name}: program {} not found{}; install it or give its full path",
        program.display(),
        looked_in.as_ref().map(|path| format!(" (looked in {path})")).unwrap_or_default()
    )]
    ProgramNotFound {
        /// Name of the child.
        name: String,
        /// The program as specified.
        program: PathBuf,
        /// The search path, for a program without a directory.
        looked_in: Option<String>,
    },
    /// The program exists but is not an executable file.
    #[error("start {name}: {} is {problem}", program.display())]
    NotExecutable {
        /// Name of the child.
        name: String,
        /// The file that was found.
        program: PathBuf,
        /// The cause and the fix.
        problem: &'static str,
    },
    /// The working directory does not exist or is not a directory.
    #[error("start {name}: working directory {}: {problem}; create it or correct `cwd`", cwd.display())]
    WorkingDirectory {
        /// Name of the child.
        name: String,
        /// The directory as specified.
        cwd: PathBuf,
        /// The cause.
        problem: String,
    },
    /// The operating system rejected the start.
    #[error("start {name}: run {}: {source}{}", program.display(), hint(source))]
    Spawn {
        /// Name of the child.
        name: String,
        /// The program.
        program: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Processes did not end after they were killed.
    #[error(
        "stop {name}: processes {pids:?} still exist {} s after SIGKILL; they are blocked in the kernel \
         (often a dead network mount): see `cat /proc/PID/stack` as root",
        waited.as_secs()
    )]
    StillAlive {
        /// Name of the child.
        name: String,
        /// The remaining process IDs; empty if only the exit of the child itself was not observed.
        pids: Vec<i32>,
        /// Time waited after `SIGKILL`.
        waited: Duration,
    },
}

/// Returns the fix for errors that have a known one.
fn hint(error: &io::Error) -> &'static str {
    let Some(code) = error.raw_os_error() else { return "" };
    match rustix::io::Errno::from_raw_os_error(code) {
        rustix::io::Errno::MFILE => "; raise the limit on open files (ulimit -n)",
        rustix::io::Errno::NFILE => "; the machine is out of open files (fs.file-max)",
        rustix::io::Errno::AGAIN => "; raise the limit on processes (ulimit -u, or the pids limit of the container)",
        rustix::io::Errno::NOMEM => "; the machine or container is out of memory",
        rustix::io::Errno::TOOBIG => "; shorten the arguments or the environment, which are too long together",
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
