//! The quickstart: a head server, three environments with their agents, a scripted model and a collector in one process.
//!
//! `cargo run --release -p gym-examples --bin quickstart` collects 1,440 rollouts; further arguments are those of `rgym collect`, such as
//! `--resume` or `--concurrency 64`. It replaces its earlier results, unless `--resume` is given.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use gym_examples::{servers, tasks};

fn main() -> Result<ExitCode> {
    gym_client::launch::enter();
    let input = Path::new("results/quickstart_tasks.jsonl");
    write_tasks(input).with_context(|| format!("write {}", input.display()))?;
    let fixed = [
        "quickstart collect --config examples/configs/quickstart.yaml --output results/quickstart.jsonl --num-repeats 2",
        "--overwrite-by-default --add-seed --input",
    ];
    let arguments = fixed.iter().flat_map(|line| line.split(' ')).map(OsString::from);
    let arguments = arguments.chain([input.as_os_str().to_owned()]).chain(std::env::args_os().skip(1));
    Ok(gym_server::cli::main_with(servers::servers(), arguments))
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
