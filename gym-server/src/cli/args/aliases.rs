//! `rgym aliases` and `rgym completions`: what a shell should know about this program.

use std::io::Write;
use std::process::ExitCode;

use clap_complete::Shell;
use gym_core::transport::Transport;

use crate::cli::args::options;
use crate::cli::args::translation;
use crate::cli::exit::{Failure, Outcome};

/// Prints a completion script for this program, under the name that it was started with.
pub(in crate::cli) fn completions(shell: Shell, program: &str, transports: &[Transport]) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut options::command(program, transports), program, &mut script);
    let mut out = std::io::stdout().lock();
    // Fails if the reader closed the pipe, which is not an error.
    let _ = out.write_all(&script);
    Ok(ExitCode::SUCCESS)
}

/// Prints an alias for each of NeMo Gym's old command names.
pub(in crate::cli) fn print() -> Outcome {
    let program = std::env::current_exe()
        .map_err(|error| Failure::Failed(format!("cannot find the path of this program: {error}")))?;
    let quoted = format!("'{}'", program.display().to_string().replace('\'', r"'\''"));
    let mut out = std::io::stdout().lock();
    for name in translation::aliases() {
        // Quoted twice: for the alias, and for the command that the alias expands to.
        let command = format!("{quoted} {name}").replace('\'', r"'\''");
        if writeln!(out, "alias {name}='{command}'").is_err() {
            // The reader closed the pipe, which is not an error.
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}
