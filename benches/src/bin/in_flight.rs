//! Measures many concurrent rollouts in one process: the memory of each, and its CPU time beside that with a thousand in flight.

use std::time::Duration;

use anyhow::{Result, ensure};
use gym_benches::options::Options;
use gym_benches::report::{Aim, figure};
use gym_benches::role::{self, Part};
use gym_benches::stack::{Collection, ModelAt, Plan, Scratch, free_port, write_config, write_rows};

/// Tasks of the input.
const TASKS: u32 = 5;

fn main() -> Result<()> {
    role::main(bench)
}

async fn bench(options: Options) -> Result<()> {
    let scratch = Scratch::new("in_flight")?;
    let input = write_rows(&scratch)?;
    let rollouts = options.rollouts.unwrap_or(if options.quick { 10_000 } else { 100_000 });
    ensure!(rollouts >= TASKS && rollouts.is_multiple_of(TASKS), "--rollouts {rollouts}: give a multiple of {TASKS}");
    // The model is slow enough that all requests are sent before its first response, even on a busy machine.
    let latency = Duration::from_secs(3) + Duration::from_micros(170) * rollouts;
    let few = Plan {
        input,
        output: scratch.path("few.jsonl"),
        repeats: if options.quick { 1_000 } else { 10_000 },
        concurrency: 1_000,
    };
    let many = Plan {
        output: scratch.path("rollouts.jsonl"),
        repeats: rollouts / TASKS,
        concurrency: rollouts as usize,
        ..few.clone()
    };
    let usual = cpu_us(&collected(&scratch, Duration::from_millis(10), &few).await?);
    let done = collected(&scratch, latency, &many).await?;
    println!("in_flight_max {} rows {} wall {:.1}s", done.in_flight_max, done.rows, done.wall_s);
    let each = (done.resident_max - done.resident_before) as f64 / done.in_flight_max.max(1) as f64;
    figure("in_flight_memory", "KiB", &[each / 1024.0], &[], Some(Aim::AtMost(8.0)));
    figure("in_flight_cpu", "us", &[cpu_us(&done)], &[], None);
    figure("in_flight_cpu_of_a_thousand", "us", &[usual], &[], None);
    figure("in_flight_cpu_ratio", "", &[cpu_us(&done) / usual], &[], Some(Aim::AtMost(1.0)));
    figure(
        "in_flight_share",
        "%",
        &[100.0 * done.in_flight_max as f64 / f64::from(rollouts)],
        &[],
        Some(Aim::AtLeast(99.0)),
    );
    Ok(())
}

async fn collected(scratch: &Scratch, latency: Duration, plan: &Plan) -> Result<Collection> {
    let config = write_config(scratch, "config.yaml", ModelAt::Embedded(latency), free_port()?)?;
    let mut part = Part::start(&["all-in-one", &config.to_string_lossy(), &plan.argument()])?;
    let rollouts = plan.repeats * TASKS;
    // A millisecond for each rollout is ten times what it takes.
    let done: Collection =
        part.told(latency * 2 + Duration::from_secs(60) + Duration::from_millis(1) * rollouts).await?;
    part.end(Duration::from_secs(60)).await?;
    let output = plan.output.display();
    ensure!(done.rows == u64::from(rollouts), "{output}: {} rows of {rollouts} were written", done.rows);
    ensure!(done.failures == 0, "{output}: {} attempts failed", done.failures);
    Ok(done)
}

fn cpu_us(done: &Collection) -> f64 {
    done.cpu_s * 1e6 / done.rows as f64
}
