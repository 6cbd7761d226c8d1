//! The options of a stack that a command starts.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::cli::args::options::Starting;
use crate::cli::console::Console;
use crate::cli::setup::configuration::LoadedConfig;
use crate::stack::StackOptions;

/// Re-executes this program with the environment variables that UCX reads when it loads, if the configuration may use UCX. Call
/// it before anything is started.
pub(in crate::cli) fn prepare_ucx(loaded: &LoadedConfig, console: &Console) {
    if let Some(policy) = &loaded.config.transport_policy
        && let Err(error) = gym_client::launch::prepare_ucx(policy)
    {
        console.warn(format!("cannot re-execute this program with the environment variables for UCX: {error}"));
    }
}

/// Returns the options of a stack of this configuration, without the instances to serve.
pub(in crate::cli) fn options(loaded: &LoadedConfig, starting: &Starting, console: &Console) -> StackOptions {
    StackOptions {
        python: loaded.python.as_ref().map(|python| python.path.clone()),
        python_roots: loaded.roots.clone(),
        python_env: extra_roots(&loaded.searched),
        lines: Some(console.lines()),
        start_timeout: starting.start_timeout,
        ..StackOptions::default()
    }
}

/// Returns the search directories as the variable in which NeMo Gym's servers look for prompts and skills.
fn extra_roots(searched: &[PathBuf]) -> Vec<(String, OsString)> {
    if searched.is_empty() {
        return Vec::new();
    }
    // Fails for a directory with a colon in its name, which the variable cannot contain.
    let list = std::env::join_paths(searched).ok();
    list.map(|list| ("NEMO_GYM_EXTRA_ROOTS".to_owned(), list)).into_iter().collect()
}
