//! The quickstart: a head server, three environments with their agents, a scripted model and a collector in one process.
//!
//! `cargo run --release -p gym-examples --bin quickstart` collects 1,440 rollouts; further arguments are those of `rgym collect`, such as
//! `--resume` or `--concurrency 64`. It replaces its earlier results, unless `--resume` is given.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use gym_examples::{servers, tasks};

fn main() -> Result<ExitCode> {
    gym_client::launch::enter();
    let input = Path::new("results/quickstart_tasks.jsonl");
    write_tasks(input).with_context(|| format!("write {}", input.display()))?;
    let config = configuration()?;
    let fixed = "quickstart collect --output results/quickstart.jsonl --num-repeats 2 --overwrite-by-default --add-seed --input";
    let arguments = fixed.split(' ').map(OsString::from).chain([input.into(), "--config".into(), config.into()]);
    let arguments = arguments.chain(std::env::args_os().skip(1));
    Ok(gym_server::cli::main_with(servers::servers(), arguments))
}

/// Returns the configuration file: that of the checkout, or outside of it a copy of the one that this program was built with.
fn configuration() -> Result<PathBuf> {
    let checkout = PathBuf::from("examples/configs/quickstart.yaml");
    if checkout.is_file() {
        return Ok(checkout);
    }
    let copy = PathBuf::from("results/quickstart.yaml");
    std::fs::write(&copy, include_str!("../../configs/quickstart.yaml"))
        .with_context(|| format!("write {}", copy.display()))?;
    Ok(copy)
}

/// Writes the tasks of the three environments, alternating between them.
fn write_tasks(path: &Path) -> Result<()> {
    let files: Vec<String> = tasks::ENVIRONMENTS
        .iter()
        .map(|name| tasks::jsonl(name).context("every environment has tasks"))
        .collect::<Result<_>>()?;
    let mut lines: Vec<_> = files.iter().map(|file| file.lines()).collect();
    let mut all = String::new();
    while let Some(round) = lines.iter_mut().map(Iterator::next).collect::<Option<Vec<_>>>() {
        for line in round {
            all.push_str(line);
            all.push('\n');
        }
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(path, all)?;
    Ok(())
}
