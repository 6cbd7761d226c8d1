//! `rgym aliases` and `rgym completions`: what a shell should know about this program.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::cli::args::options::Cli;
use crate::cli::args::translation;
use crate::cli::exit::{Failure, Outcome};

/// Prints a completion script for this program, under the name that it was started with.
pub(in crate::cli) fn completions(shell: Shell) -> Outcome {
    let program = std::env::args_os().next().map(PathBuf::from).unwrap_or_default();
    let program = program.file_name().map_or_else(|| "rgym".to_owned(), |name| name.to_string_lossy().into_owned());
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), program, &mut script);
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
