//! Measures an idle all-in-one stack: its start time and its memory.

use std::time::Duration;

use anyhow::{Result, ensure};
use gym_benches::measure;
use gym_benches::options::Options;
use gym_benches::peer::get;
use gym_benches::report::{Aim, figure};
use gym_benches::role;
use gym_benches::stack::{INSTANCES, ModelAt, Scratch, Served, free_port, write_config};
use tokio::time::Instant;

fn main() -> Result<()> {
    role::main(bench)
}

async fn bench(options: Options) -> Result<()> {
    let scratch = Scratch::new("idle")?;
    let (mut ready_ms, mut resident_mib) = (Vec::new(), Vec::new());
    for _ in 0..if options.quick { 3 } else { 11 } {
        let head_port = free_port()?;
        let config = write_config(&scratch, "config.yaml", ModelAt::Embedded(Duration::ZERO), head_port)?;
        let began = Instant::now();
        let served = Served::start(&config, head_port, false).await?;
        let (status, _) = get(served.address(INSTANCES[3])?, "/health").await?;
        ready_ms.push(began.elapsed().as_secs_f64() * 1e3);
        ensure!(status == 200, "/health answered {status}");
        tokio::time::sleep(Duration::from_secs(1)).await;
        resident_mib.push(measure::resident(served.pids()[0]) as f64 / f64::from(1 << 20));
        served.stop().await?;
    }
    figure("idle_ready", "ms", &ready_ms, &[], Some(Aim::AtMost(100.0)));
    figure("idle_resident", "MiB", &resident_mib, &[], Some(Aim::AtMost(40.0)));
    Ok(())
}
