//! `rgym aliases`: shell aliases under which NeMo Gym's old names reach this program.

use std::io::Write;
use std::process::ExitCode;

use crate::cli::args::translation;
use crate::cli::exit::{Failure, Outcome};

pub(in crate::cli) fn print() -> Outcome {
    let program = std::env::current_exe()
        .map_err(|error| Failure::Failed(format!("this program does not know where it is: {error}")))?;
    let quoted = format!("'{}'", program.display().to_string().replace('\'', r"'\''"));
    let mut out = std::io::stdout().lock();
    for name in translation::aliases() {
        // Doubly quoted: once for the alias, once for the command that it becomes.
        let command = format!("{quoted} {name}").replace('\'', r"'\''");
        if writeln!(out, "alias {name}='{command}'").is_err() {
            // Nobody reads any more, which is no failure of ours.
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}
