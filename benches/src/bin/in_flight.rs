//! Measures a hundred thousand concurrent rollouts in one process: the memory of each.

use std::time::Duration;

use anyhow::{Result, ensure};
use gym_benches::options::Options;
use gym_benches::report::{Aim, figure};
use gym_benches::role::{self, Part};
use gym_benches::stack::{Collection, ModelAt, Plan, Scratch, free_port, write_config, write_rows};

fn main() -> Result<()> {
    role::main(bench)
}

async fn bench(options: Options) -> Result<()> {
    let scratch = Scratch::new("in_flight")?;
    let input = write_rows(&scratch)?;
    let rollouts: u32 = if options.quick { 10_000 } else { 100_000 };
    // The model is slow enough that all requests are sent before its first response, even on a busy machine.
    let latency = if options.quick { Duration::from_secs(3) } else { Duration::from_secs(20) };
    let config = write_config(&scratch, "config.yaml", ModelAt::Embedded(latency), free_port()?)?;
    let output = scratch.path("rollouts.jsonl");
    let plan = Plan { input, output, repeats: rollouts / 5, concurrency: rollouts as usize };
    let mut part = Part::start(&["all-in-one", &config.to_string_lossy(), &plan.argument()])?;
    let done: Collection = part.told(Duration::from_secs(300)).await?;
    part.end(Duration::from_secs(10)).await?;
    ensure!(done.rows == u64::from(rollouts), "{} rows of {rollouts} were written", done.rows);
    ensure!(done.failures == 0, "{} attempts failed", done.failures);
    println!("in_flight_max {} rows {} wall {:.1}s", done.in_flight_max, done.rows, done.wall_s);
    let each = (done.resident_max - done.resident_before) as f64 / done.in_flight_max.max(1) as f64;
    figure("in_flight_memory", "KiB", &[each / 1024.0], &[], Some(Aim::AtMost(16.0)));
    let cpu = done.cpu_s * 1e6 / done.rows as f64;
    figure("in_flight_cpu", "us", &[cpu], &[], None);
    figure(
        "in_flight_share",
        "%",
        &[100.0 * done.in_flight_max as f64 / f64::from(rollouts)],
        &[],
        Some(Aim::AtLeast(99.0)),
    );
    Ok(())
}
