//! Counts the instructions of one rollout and of one worker call with valgrind, for machines that are too busy for timings.
//!
//! Each figure is the difference between a long and a short run, divided by the difference of their rollouts or calls.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gym_benches::count;
use gym_benches::options::Options;
use gym_benches::role::{self, Part};
use gym_benches::stack::{Collection, INSTANCES, ModelAt, Plan, Scratch, Served, free_port, write_config, write_rows};

/// The limit of one counted run; valgrind is about fifty times slower than the processor.
const WAIT_TIMEOUT: Duration = Duration::from_secs(600);

/// Rows of the input; each is repeated as often as needed.
const TASKS: u64 = 5;

fn main() -> Result<()> {
    role::main(bench)
}

async fn bench(options: Options) -> Result<()> {
    let scratch = Scratch::new("instructions")?;
    let logs = scratch.path("logs");
    std::fs::create_dir_all(&logs)?;
    let times = if options.quick { 1 } else { 4 };
    // Name, program, its first argument, the count of the short run, and the additional count of the long run.
    let alone = [
        ("all_in_one", "rollout_costs", None, 1_000, 750 * times),
        ("pulled", "rollout_costs", Some("pulled"), 1_000, 750 * times),
        ("pipelined_call", "call_costs", Some("pipelined"), 10_000, 2_500 * times),
        ("single_call", "call_costs", Some("call"), 10_000, 2_500 * times),
    ];
    for (name, program, how, short, more) in alone {
        if options.wants(name) {
            let mut counted = Vec::new();
            for count in [short, short + more] {
                let mut arguments = vec![count.to_string()];
                if program == "rollout_costs" {
                    arguments.push("1000".to_owned());
                    arguments.extend(how.map(str::to_owned));
                } else {
                    arguments.splice(..0, how.map(str::to_owned));
                }
                counted.push(count::run(&sibling(program)?, &arguments, &logs.join(name), WAIT_TIMEOUT).await?);
            }
            print(name, counted[1].saturating_sub(counted[0]) / more);
        }
    }
    if options.wants("separated") {
        separated(&scratch, &logs, 250 * times).await?;
    }
    Ok(())
}

/// Returns the path of another program of this build.
fn sibling(name: &str) -> Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(name))
}

fn print(name: &str, instructions: u64) {
    println!("{name}_instructions ours={instructions}");
}

/// Counts the cost of a rollout for each server, with 32 in flight and a process for each server.
async fn separated(scratch: &Scratch, logs: &Path, more: u64) -> Result<()> {
    let input = write_rows(scratch)?;
    let mut counted = [[0; INSTANCES.len()]; 2];
    let short = 250;
    for (run, rollouts) in [short, short + more].into_iter().enumerate() {
        let head_port = free_port()?;
        let config = write_config(scratch, "separated.yaml", ModelAt::Embedded(Duration::ZERO), head_port)?;
        let served = Served::start_counted(&config, head_port, logs).await?;
        let plan = Plan {
            input: input.clone(),
            output: scratch.path(&format!("separated-{rollouts}.jsonl")),
            repeats: u32::try_from(rollouts / TASKS).context("too many rollouts")?,
            concurrency: 32,
        };
        let mut part = Part::start(&["collect", &served.head, &plan.argument()])?;
        let done: Collection = part.told(WAIT_TIMEOUT).await?;
        part.end(Duration::from_secs(10)).await?;
        ensure!(done.rows == rollouts, "{} of {rollouts} rollouts were recorded", done.rows);
        served.stop().await?;
        for (at, name) in INSTANCES.into_iter().enumerate() {
            counted[run][at] = count::instructions(&logs.join(name).with_extension("log"))?;
        }
    }
    for (at, name) in ["model", "resources", "agent", "environment"].into_iter().enumerate() {
        print(&format!("separated_{name}"), counted[1][at].saturating_sub(counted[0][at]) / more);
    }
    Ok(())
}
