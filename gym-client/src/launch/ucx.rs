//! Prepares a process for UCX: environment variables, and a separate process that only reports on UCX.
//!
//! UCX reads some settings once, when it is loaded, and only from the environment. Without them, it replaces the
//! handlers of SIGSEGV and similar signals (so Rust's report of a stack overflow is lost) and patches libc's `mmap` in
//! memory. A library must not change the environment of its process. A *program* that uses UCX therefore executes
//! itself again with these variables, and a launcher sets them for its children.

use gym_core::transport::TransportPolicy;

/// The environment variables and their values. Variables that the user has set are kept.
pub const UCX_SETTINGS: [(&str, &str); 2] = [("UCX_HANDLE_ERRORS", "none"), ("UCX_MEM_MMAP_HOOK_MODE", "none")];

/// Environment variable that marks a program that was executed again.
#[cfg(feature = "rdma")]
const RESTARTED_VARIABLE: &str = "GYM_UCX_RESTARTED";

/// Executes this program again, with the same arguments and process ID, if `policy` may use UCX and the environment
/// lacks [`UCX_SETTINGS`]. In this case it does not return. Otherwise it returns at once: also without the feature
/// `rdma`, and in a process that was already executed again.
///
/// Call it when the configuration is known and before anything is started: children, threads with work to lose, output.
///
/// # Errors
/// If the program's file cannot be executed. UCX can still be used; its crash reports then replace Rust's.
pub fn prepare_ucx(policy: &TransportPolicy) -> std::io::Result<()> {
    #[cfg(feature = "rdma")]
    if policy.uses_ucx() {
        return restart();
    }
    #[cfg(not(feature = "rdma"))]
    let _ = policy;
    Ok(())
}

#[cfg(feature = "rdma")]
fn restart() -> std::io::Result<()> {
    use std::os::unix::process::CommandExt;

    let missing = UCX_SETTINGS.iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let missing: Vec<_> = missing.copied().collect();
    if missing.is_empty() || std::env::var_os(RESTARTED_VARIABLE).is_some() {
        return Ok(());
    }
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_default();
    // Uses the program's own path if the file still exists, because `ps` shows it.
    let program = std::env::current_exe().ok().filter(|path| path.is_file()).unwrap_or_else(|| "/proc/self/exe".into());
    let mut command = std::process::Command::new(program);
    command.arg0(name).args(arguments).envs(missing).env(RESTARTED_VARIABLE, "1");
    Err(command.exec())
}

#[cfg(feature = "rdma")]
pub(super) use report::be_reporter;
#[cfg(feature = "rdma")]
pub use report::ucx_report;

#[cfg(feature = "rdma")]
mod report {
    use std::io::Write;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Output, Stdio};
    use std::time::Duration;

    use gym_transport_rdma::fabric::LoadOptions;
    use gym_transport_rdma::transport::UcxReport;
    use tokio::process::Command;

    use crate::launch::process::roles::{self, REPORT_ROLE};
    use crate::launch::ucx::UCX_SETTINGS;

    /// Prefix of the report, because UCX also writes lines to standard output.
    const MARK: &str = "gym-ucx-report ";

    /// Returns UCX's report on itself. A child process loads UCX, because loading changes a process permanently.
    /// [`enter`] must have been called in this program.
    ///
    /// [`enter`]: crate::launch::enter
    ///
    /// # Errors
    /// The reason why UCX cannot be used: it was not found (with all searched paths and how to install it), it crashed,
    /// or it took longer than `within`.
    pub async fn ucx_report(within: Duration) -> Result<UcxReport, String> {
        if !roles::entered() {
            return Err("UCX was not checked: call launch::enter() as the first line of main".to_owned());
        }
        let mut command = Command::new("/proc/self/exe");
        let missing = UCX_SETTINGS.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
        command.arg(REPORT_ROLE).envs(missing).stdin(Stdio::null()).kill_on_drop(true);
        match tokio::time::timeout(within, command.output()).await {
            Ok(Ok(output)) => read(&output),
            Ok(Err(error)) => Err(format!("cannot start the process that checks UCX: {error}")),
            Err(_) => Err(format!("loading UCX took longer than {within:?}")),
        }
    }

    fn read(output: &Output) -> Result<UcxReport, String> {
        let text = String::from_utf8_lossy(&output.stdout);
        let said = text.lines().find_map(|line| line.strip_prefix(MARK));
        match said.and_then(|said| serde_json::from_str::<Result<UcxReport, String>>(said).ok()) {
            Some(found) => found,
            None => {
                let how = match output.status.signal() {
                    Some(signal) => format!("died by signal {signal}"),
                    None => format!("ended with {:?}", output.status.code()),
                };
                let errors = String::from_utf8_lossy(&output.stderr);
                let last = errors.lines().chain(text.lines()).last().unwrap_or("nothing");
                Err(format!("the process that loaded UCX {how}; its last line: {last}"))
            }
        }
    }

    pub(in crate::launch) fn be_reporter() -> ! {
        let found = UcxReport::take(&LoadOptions::default()).map_err(|error| error.to_string());
        let text = serde_json::to_string(&found).expect("a report can be written as JSON");
        // Starts a new line, whatever UCX has printed.
        let written = writeln!(std::io::stdout(), "\n{MARK}{text}");
        std::process::exit(i32::from(written.is_err()));
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn output(status: i32, stdout: &str, stderr: &str) -> Output {
            Output {
                status: std::process::ExitStatus::from_raw(status),
                stdout: stdout.as_bytes().to_vec(),
                stderr: stderr.as_bytes().to_vec(),
            }
        }

        #[test]
        fn the_report_is_found_in_the_output_of_ucx() {
            let answer = "[1] UCX  WARN unused environment variable\n\ngym-ucx-report {\"Err\":\"not there\"}\n";
            assert_eq!(read(&output(0, answer, "")), Err("not there".to_owned()));
        }

        #[test]
        fn a_crash_is_reported_with_the_last_line() {
            let error = read(&output(11, "", "loading\n")).expect_err("crashed");
            assert!(error.contains("died by signal 11") && error.contains("loading"), "{error}");
            let error = read(&output(0, "gym-ucx-report rubbish\n", "")).expect_err("rubbish");
            assert!(error.contains("ended with Some(0)"), "{error}");
        }
    }
}
