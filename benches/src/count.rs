//! Counts the instructions of a process with valgrind. The count for the same work is the same on a busy machine.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::process::Command;
use tokio::time::timeout;

/// Returns a command that runs the program given as its next argument, and finally writes the number of instructions to `log`.
#[must_use]
pub fn valgrind(log: &Path) -> Command {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(format!("--log-file={}", log.display()));
    command
}

/// Returns the instructions of the process that wrote this log.
///
/// # Errors
/// An error if the log cannot be read or contains no total, as after a kill.
pub fn instructions(log: &Path) -> Result<u64> {
    let text = fs::read_to_string(log).with_context(|| format!("read {}", log.display()))?;
    let total = text.lines().find_map(|line| line.split_once("Collected :")).map(|(_, total)| total.trim());
    let total = total.with_context(|| format!("{} holds no total:\n{text}", log.display()))?;
    total.parse().with_context(|| format!("{}: {total:?} is not a number", log.display()))
}

/// Runs a program to its end, and returns its number of instructions.
///
/// # Errors
/// An error if the program cannot be started, fails, or takes longer than `limit`.
pub async fn run(program: &Path, arguments: &[String], log: &Path, limit: Duration) -> Result<u64> {
    ensure!(
        program.is_file(),
        "{} is missing; build it: cargo build --release -p gym-benches --bins",
        program.display()
    );
    let mut command = valgrind(log);
    command.arg(program).args(arguments).stdout(Stdio::null()).kill_on_drop(true);
    let status = timeout(limit, command.status()).await.context("the counted program takes too long")?;
    let status = status.context("start valgrind; install it: apt-get install valgrind")?;
    ensure!(status.success(), "{} {arguments:?} ended with {status}", program.display());
    instructions(log)
}
