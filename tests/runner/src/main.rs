//! Runs the tests of the gate: each in a process of its own, several beside each other, each with a limit.
//!
//! cargo runs one test program after the other, although most tests wait, and a test that hangs hangs the gate. nextest would do better, but a fresh
//! machine does not have it, and it does not see what remains. This program is started by `.ci/test`, with the messages of the build:
//!
//! - A test that exceeds its limit is killed. Before, its processes and threads are printed with state and wait channel, and with stacks where gdb is
//!   installed.
//! - A test whose processes outlive it has failed. So has the run if a process, a network namespace, a listening socket or a file in `/dev/shm` remains.
//! - A test that cannot run here prints `NOT RUN: REASON` and is named at the end, apart from those that passed.
//! - What failed comes last, with the command that repeats it.

#![expect(clippy::disallowed_methods, reason = "it supervises real processes")]

mod cases;
mod process;
mod remains;
mod report;
mod run;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Parser;

/// Runs the tests of a build, each in a process of its own.
#[derive(Parser)]
struct Options {
    /// The output of `cargo test --no-run --message-format=json`.
    messages: PathBuf,
    /// Further cases, one a line: name, limit in seconds, cores (0 if it waits), shell command, separated by tabs.
    #[arg(long)]
    commands: Option<PathBuf>,
    /// Only cases whose name contains this text; several are alternatives.
    #[arg(long = "case")]
    cases: Vec<String>,
    /// Without the cases whose name contains this text, unless `--case` asks for some.
    #[arg(long)]
    without: Vec<String>,
    /// Folder of the outputs, one file a case.
    #[arg(long)]
    outputs: PathBuf,
    /// Cases that run beside each other. One that computes on all cores runs alone.
    #[arg(long, default_value_t = 4)]
    jobs: usize,
    /// Runs everything so often, and checks that each time the same cases ran.
    #[arg(long, default_value_t = 1)]
    repeat: usize,
    /// Beside a process that uses one core.
    #[arg(long)]
    busy: bool,
    /// Seconds that the processes of a case may outlive it: a watchdog ends some moments after what it watches.
    #[arg(long, default_value_t = 10)]
    ending: u64,
    /// Folder in which no file may remain.
    #[arg(long, default_value = "/dev/shm")]
    shared_memory: PathBuf,
    /// File for the numbers of cases that passed, failed and were not run.
    #[arg(long)]
    counts: Option<PathBuf>,
    /// Prints the names of the cases.
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    match start(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("test-runner: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns `true` if every case passed that could run.
fn start(options: &Options) -> Result<bool> {
    let mut cases = cases::of_build(&options.messages)?;
    if let Some(file) = &options.commands {
        cases.extend(cases::of_commands(file)?);
    }
    let names: BTreeSet<&str> = cases.iter().map(|case| case.name.as_str()).collect();
    if names.len() < cases.len() {
        bail!("two cases have one name");
    }
    let named = |name: &str, texts: &[String]| texts.iter().any(|text| name.contains(text));
    let chosen = |name: &str| match &options.cases[..] {
        [] => !named(name, &options.without),
        asked => named(name, asked),
    };
    cases.retain(|case| chosen(&case.name));
    if cases.is_empty() {
        bail!("no case has a name with {:?}", options.cases);
    }
    if options.list {
        cases.iter().for_each(|case| println!("{}", case.name));
        return Ok(true);
    }
    process::adopt_orphans().context("become the parent of orphans")?;
    process::note_interrupts();
    std::fs::create_dir_all(&options.outputs).with_context(|| options.outputs.display().to_string())?;
    let ending = Duration::from_secs(options.ending);
    let busy = options.busy.then(process::Busy::start).transpose()?;
    let (mut passed, mut ran) = (true, None);
    for round in 1..=options.repeat {
        let before = remains::Remains::now(&options.shared_memory);
        let mut outcome = run::run(&cases, options.jobs, ending, &options.outputs)?;
        outcome.remains = before.added(&options.shared_memory, ending, busy.as_ref());
        report::print(&outcome);
        if options.repeat > 1 {
            println!("round {round} of {}: {}", options.repeat, report::totals(&outcome));
        }
        passed &= outcome.passed();
        let names = outcome.ran();
        if ran.get_or_insert_with(|| names.clone()) != &names {
            println!("round {round} ran other cases than round 1");
            passed = false;
        }
        if let Some(file) = &options.counts {
            std::fs::write(file, report::counts(&outcome)).with_context(|| file.display().to_string())?;
        }
    }
    Ok(passed)
}
