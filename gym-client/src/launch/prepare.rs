//! Environment variables that a transport reads when its library is loaded.
//!
//! A library must not write its process's environment. So a *program* that uses such a transport starts itself again with the
//! variables, and a launcher gives them to its children.

use gym_core::base::process::OWN_PROGRAM;

use crate::transport::Transports;

/// Set in a process that was started again already.
const RESTARTED_VARIABLE: &str = "GYM_UCX_RESTARTED";

/// Starts this program again, with the same arguments and under the same process id, if the environment lacks
/// [variables](Transports::variables) of the transports that the policy allows; then it does not return. Otherwise it returns at
/// once, also in a process that was started again already.
///
/// Call it when the configuration is known and before anything is started: children, threads with work to lose, output.
///
/// # Errors
/// When the program's file cannot be executed. The transports still work; with UCX, its reports of crashes then replace Rust's.
pub fn prepare(transports: &Transports) -> std::io::Result<()> {
    use std::os::unix::process::CommandExt;

    let mut missing = transports.variables();
    missing.retain(|(name, _)| std::env::var_os(name).is_none());
    if missing.is_empty() || std::env::var_os(RESTARTED_VARIABLE).is_some() {
        return Ok(());
    }
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_default();
    // By its own name if it is still there, because that is what `ps` shows.
    let program = std::env::current_exe().ok().filter(|path| path.is_file()).unwrap_or_else(|| OWN_PROGRAM.into());
    let mut command = std::process::Command::new(program);
    command.arg0(name).args(arguments).envs(missing).env(RESTARTED_VARIABLE, "1");
    Err(command.exec())
}
