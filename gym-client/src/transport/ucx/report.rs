//! A report on UCX from a child process.

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gym_core::base::process::OWN_PROGRAM;
use gym_transport_rdma::fabric::LoadOptions;
use gym_transport_rdma::transport::UcxReport;
use tokio::process::Command;

use gym_transport_rdma::UCX_VARIABLES;

/// First argument that makes a process load UCX and print the report.
pub(crate) const REPORT_ROLE: &str = "--gym-ucx-report";
static ENTERED: AtomicBool = AtomicBool::new(false);

/// Records that this executable supports roles: running it again does not run the user's `main` twice.
pub(crate) fn set_entered() {
    ENTERED.store(true, Ordering::Release);
}

/// Prefix of the report's line; UCX prints other lines to standard output.
const MARK: &str = "gym-ucx-report ";

/// Returns UCX's report on itself. A child process loads UCX, because loading it changes a process permanently. [`enter`] must have
/// been called in this program.
///
/// [`enter`]: crate::launch::enter
///
/// # Errors
/// The reason why UCX cannot be used. It was not found (with all searched paths and how to install it), it crashed, or it took
/// longer than `within`.
pub async fn ucx_report(within: Duration) -> Result<UcxReport, String> {
    if !ENTERED.load(Ordering::Acquire) {
        return Err("UCX was not looked at: call launch::enter() as the first line of main".to_owned());
    }
    let mut command = Command::new(OWN_PROGRAM);
    let missing = UCX_VARIABLES.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    command.arg(REPORT_ROLE).envs(missing).stdin(Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(within, command.output()).await {
        Ok(Ok(output)) => read(&output),
        Ok(Err(error)) => Err(format!("the process that looks at UCX cannot be started: {error}")),
        Err(_) => Err(format!("loading UCX took longer than {within:?}")),
    }
}

fn read(output: &Output) -> Result<UcxReport, String> {
    let text = String::from_utf8_lossy(&output.stdout);
    let said = text.lines().find_map(|line| line.strip_prefix(MARK));
    match said.and_then(|said| serde_json::from_str::<Result<UcxReport, String>>(said).ok()) {
        Some(found) => found.map(|mut report| {
            let errors = String::from_utf8_lossy(&output.stderr);
            report.warnings = text.lines().chain(errors.lines()).filter_map(warning).collect();
            report
        }),
        None => {
            let how = match output.status.signal() {
                Some(signal) => format!("died by signal {signal}"),
                None => format!("ended with {:?}", output.status.code()),
            };
            let errors = String::from_utf8_lossy(&output.stderr);
            let last = errors.lines().chain(text.lines()).last().unwrap_or("nothing");
            Err(format!("the process that loaded UCX {how}; it said last: {last}"))
        }
    }
}

/// Returns the text of a line with a warning of UCX: `[1.2] [host:1:0] ucp_context.c:1014 UCX  WARN  transport …`.
fn warning(line: &str) -> Option<String> {
    let (before, text) = line.split_once(" WARN ")?;
    before.trim_end().ends_with("UCX").then(|| text.trim().to_owned())
}

pub(crate) fn be_reporter() -> ! {
    let found = UcxReport::take(&LoadOptions::default()).map_err(|error| error.to_string());
    let text = serde_json::to_string(&found).expect("a report can be written as JSON");
    // On a separate line, whatever UCX has printed before.
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
    fn the_answer_is_found_among_what_ucx_prints() {
        let answer = "[1] UCX  WARN unused environment variable\n\ngym-ucx-report {\"Err\":\"not there\"}\n";
        assert_eq!(read(&output(0, answer, "")), Err("not there".to_owned()));
    }

    #[test]
    fn warnings_of_ucx_are_part_of_the_report() {
        let report = r#"gym-ucx-report {"Ok":{"version":"1.13.1","path":"/x","resources":[],"signals_restored":[],"patched":[]}}"#;
        let line = "[17.4] [vm:1:0]  parser.c:1908 UCX  WARN  unused env variable: UCX_FOO";
        for (stdout, stderr) in [(format!("{line}\n{report}\n"), String::new()), (report.to_owned(), line.to_owned())] {
            let report = read(&output(0, &stdout, &stderr)).expect("a report");
            assert_eq!(report.warnings, ["unused env variable: UCX_FOO"]);
        }
    }

    #[test]
    fn a_crash_is_told_with_the_last_words() {
        let error = read(&output(11, "", "loading\n")).expect_err("crashed");
        assert!(error.contains("died by signal 11") && error.contains("loading"), "{error}");
        let error = read(&output(0, "gym-ucx-report rubbish\n", "")).expect_err("rubbish");
        assert!(error.contains("ended with Some(0)"), "{error}");
    }
}
