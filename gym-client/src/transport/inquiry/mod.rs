//! Questions that a child process answers: what would change this process permanently, or may crash or hang, runs in a process of its own, under a deadline.
//!
//! The child is this program again, with a hidden first argument. [`enter`](crate::launch::enter) turns it into the one that answers.

#[cfg(feature = "rdma")]
mod nccl;
mod self_test;
#[cfg(feature = "rdma")]
mod ucx;

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gym_core::base::process::OWN_PROGRAM;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::process::Command;

#[cfg(feature = "rdma")]
pub use nccl::{NcclMeeting, nccl_meeting};
pub use self_test::{SelfTest, self_test};
#[cfg(feature = "rdma")]
pub use ucx::ucx_report;

/// Prefix of an answer's line; libraries print other lines to standard output.
const MARK: &str = "gym-answer ";

static ENTERED: AtomicBool = AtomicBool::new(false);

/// Records that this executable supports roles: running it again does not run the user's `main` twice.
pub(crate) fn set_entered() {
    ENTERED.store(true, Ordering::Release);
}

/// Answers if the process was started to answer. Otherwise returns.
pub(crate) fn enter(role: &OsString, arguments: impl Iterator<Item = OsString>) {
    let mut arguments = arguments.map(|argument| argument.to_string_lossy().into_owned());
    match role.to_str() {
        #[cfg(feature = "rdma")]
        Some(ucx::ROLE) => answer(&ucx::report()),
        #[cfg(feature = "rdma")]
        Some(nccl::ROLE) => answer(&nccl::meeting(&arguments.next().unwrap_or_default())),
        Some(self_test::LISTENING_ROLE) => self_test::listen(&arguments.next().unwrap_or_default()),
        Some(self_test::CALLING_ROLE) => answer(&self_test::call(arguments)),
        _ => {}
    }
}

/// Returns the command of a child that answers.
fn child(role: &str) -> Result<Command, String> {
    if !ENTERED.load(Ordering::Acquire) {
        return Err("nothing was asked: call launch::enter() as the first line of main".to_owned());
    }
    let mut command = Command::new(OWN_PROGRAM);
    command.arg(role).stdin(Stdio::null()).kill_on_drop(true);
    Ok(command)
}

/// Runs a child that answers, and reads the answer. `does` is what it does, such as `loads UCX`.
async fn ask<T: DeserializeOwned>(command: Command, does: &str, within: Duration) -> Result<T, String> {
    read(&run(command, does, within).await?, does)
}

/// Runs a child that answers, and returns all that it has printed.
async fn run(mut command: Command, does: &str, within: Duration) -> Result<Output, String> {
    match tokio::time::timeout(within, command.output()).await {
        Ok(Ok(output)) => Ok(output),
        Ok(Err(error)) => Err(format!("the process that {does} cannot be started: {error}")),
        Err(_) => Err(format!("the process that {does} took longer than {within:?}")),
    }
}

fn read<T: DeserializeOwned>(output: &Output, does: &str) -> Result<T, String> {
    let text = String::from_utf8_lossy(&output.stdout);
    let answered = text.lines().find_map(|line| line.strip_prefix(MARK));
    if let Some(answer) = answered.and_then(|answer| serde_json::from_str::<Result<T, String>>(answer).ok()) {
        return answer;
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let last = errors.lines().chain(text.lines()).last().unwrap_or("nothing");
    Err(format!("the process that {does} {}; it said last: {last}", ended(output.status)))
}

fn ended(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("died by signal {signal}"),
        None => format!("ended with {:?}", status.code()),
    }
}

/// Prints an answer on a separate line, whatever a library has printed before.
fn say<T: Serialize>(answer: &Result<T, String>) -> std::io::Result<()> {
    let text = serde_json::to_string(answer).expect("an answer can be written as JSON");
    let mut out = std::io::stdout();
    writeln!(out, "\n{MARK}{text}")?;
    out.flush()
}

fn answer<T: Serialize>(answer: &Result<T, String>) -> ! {
    std::process::exit(i32::from(say(answer).is_err()));
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
    fn the_answer_is_found_among_what_a_library_prints() {
        let answer = "[1] UCX  WARN unused environment variable\n\ngym-answer {\"Err\":\"not there\"}\n";
        assert_eq!(read::<()>(&output(0, answer, ""), "loads UCX"), Err("not there".to_owned()));
    }

    #[test]
    fn a_crash_is_told_with_the_last_words() {
        let error = read::<()>(&output(11, "", "loading\n"), "loads UCX").expect_err("crashed");
        assert!(error.contains("that loads UCX died by signal 11") && error.contains("loading"), "{error}");
        let error = read::<()>(&output(0, "gym-answer rubbish\n", ""), "loads UCX").expect_err("rubbish");
        assert!(error.contains("ended with Some(0)"), "{error}");
    }
}
