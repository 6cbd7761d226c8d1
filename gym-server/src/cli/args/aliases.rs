//! `rgym aliases`: prints shell aliases that map NeMo Gym's old command names to this program.

use std::io::Write;
use std::process::ExitCode;

use crate::cli::args::translation;
use crate::cli::exit::{Failure, Outcome};

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
