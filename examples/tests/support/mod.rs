//! What the tests of whole programs share: a stack on free ports, and the command line as a process beside it.

#![allow(dead_code, reason = "every test binary takes what it needs")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use gym_client::config::{ConfigLoader, Overrides, free_port};
use gym_core::World;
use gym_server::{Servers, Stack, StackOptions};
use tokio::process::Command;

/// No wait of these tests may be longer: what has not happened by then hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// The folder of the examples.
pub(crate) fn examples() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Starts the servers of configuration files, the head on a free port, and gives the head's URL.
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
    let starting = tokio::time::timeout(PATIENCE, Stack::start(config, servers, &world, options));
    let stack = starting.await.expect("the stack starts in time").expect("the stack starts");
    let head = stack.servers().iter().find(|row| row.kind == "head_server").expect("a head").url.clone();
    (stack, head)
}

/// The command line with the examples' servers, in a folder, without what the environment would tell it.
pub(crate) fn gym_examples(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gym-examples"));
    command.current_dir(folder).stdin(Stdio::null()).kill_on_drop(true);
    clean(&mut command);
    // No interpreter is found, whatever this machine has.
    command.env("PATH", "");
    command
}

/// Takes away the variables that the command line reads.
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

/// Writes a line past the test runner's capture: the log of a run is wanted when it passes, too.
pub(crate) fn say(line: &str) {
    use std::io::Write as _;
    // A closed standard output is no reason to fail.
    let _ = writeln!(std::io::stdout(), "{line}");
}
