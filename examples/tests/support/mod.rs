//! Support for tests of whole programs: a stack on free ports, and the command line as a separate process.

#![allow(dead_code, reason = "every test binary takes what it needs")]

pub(crate) mod collections;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use gym_client::config::{ConfigLoader, Overrides, free_port};
use gym_core::World;
use gym_server::{Servers, Stack, StackOptions};
use tokio::process::Command;

/// Maximum wait of these tests; anything that takes longer is considered hung.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the directory of the examples.
pub(crate) fn examples() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Starts the servers of configuration files, with the head server on a free port. Returns the stack and the URL of its head
/// server.
pub(crate) async fn start(
    files: &[PathBuf],
    overrides: &[&str],
    servers: &Servers,
    options: StackOptions,
) -> (Stack, String) {
    let world = World::real();
    let mut random = world.rng();
    let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    let overrides = ["+head_server.port=0"].iter().chain(overrides);
    let config = ConfigLoader::new(examples())
        .environment(|_| None)
        .pick_port(move |wish| free_port(wish, &mut random))
        .load(&files, &Overrides::parse(overrides).expect("overrides"))
        .expect("a configuration");
    let starting = tokio::time::timeout(WAIT_TIMEOUT, Stack::start(config, servers, &world, options));
    let stack = starting.await.expect("the stack starts in time").expect("the stack starts");
    let head = stack.servers().iter().find(|row| row.kind == "head_server").expect("a head").url.clone();
    (stack, head)
}

/// Returns the command line with the examples' servers, in this directory, without environment variables that affect it.
pub(crate) fn gym_examples(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gym-examples"));
    command.current_dir(folder).stdin(Stdio::null()).kill_on_drop(true);
    clean(&mut command);
    // Hides all Python interpreters of this machine.
    command.env("PATH", "");
    command
}

/// Removes the environment variables that the command line reads.
pub(crate) fn clean(command: &mut Command) {
    for name in [
        "HEAD_SERVER_URL",
        "NEMO_GYM_MAX_ROLLOUT_ATTEMPTS",
        "NEMO_GYM_EXTRA_ROOTS",
        "OPENAI_API_KEY",
        "RUST_LOG",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
    ] {
        command.env_remove(name);
    }
}

/// Writes a line that the test runner does not capture, because the log is also wanted if the test passes.
pub(crate) fn say(line: &str) {
    use std::io::Write as _;
    // A closed standard output is not a failure.
    let _ = writeln!(std::io::stdout(), "{line}");
}
