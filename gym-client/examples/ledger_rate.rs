//! Rows a second and processor time a row of the ledger, over the machine's files.
//!
//! `cargo run --release -p gym-client --example ledger_rate -- [folder] [rows] [bytes a row]`; a folder on the disk that is
//! meant, because a memory file system syncs for nothing.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use gym_client::collect::ledger::{JsonlLedger, OpenMode};
use gym_core::base::RealFiles;
use gym_core::rollout::{Ledger as _, Outcome, TaskKey};
use gym_core::{CallContext, RawObject};
use tokio::task::JoinSet;
use tokio::time::Instant;

type AnyResult<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main(worker_threads = 2)]
async fn main() -> AnyResult {
    tokio::spawn(measure()).await?
}

async fn measure() -> AnyResult {
    let mut arguments = std::env::args().skip(1).collect::<Vec<_>>().into_iter();
    let folder = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let rows: u32 = arguments.next().map_or(Ok(200_000), |text| text.parse())?;
    let bytes: usize = arguments.next().map_or(Ok(2_000), |text| text.parse())?;
    let output = folder.join(format!("ledger-rate-{}.jsonl", std::process::id()));
    floor(&output, rows, bytes)?;
    println!("tasks   rows/s  µs cpu/row  ack p50 ms  ack p99 ms  reopen ms (of it without index)");
    for tasks in [1, 32, 256, 1_024] {
        let rows = if tasks == 1 { rows.min(5_000) } else { rows };
        one(&output, tasks, rows, bytes).await?;
    }
    for path in [output.clone(), ledger_paths(&output).0, ledger_paths(&output).1] {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

fn ledger_paths(output: &std::path::Path) -> (PathBuf, PathBuf) {
    (gym_client::collect::ledger::failures_path(output), gym_client::collect::ledger::index_path(output))
}

fn row(number: u32, padding: &str) -> RawObject {
    let (task, rollout) = (number / 8, number % 8);
    let text =
        format!(r#"{{"_ng_task_index":{task},"_ng_rollout_index":{rollout},"reward":1.0,"padding":"{padding}"}}"#);
    RawObject::parse(text).expect("an object")
}

/// The time that the machine takes for the same bytes without a ledger: making the rows, and writing them 100 to a sync.
fn floor(output: &std::path::Path, rows: u32, bytes: usize) -> AnyResult {
    let padding = "x".repeat(bytes.saturating_sub(80));
    let cpu = processor_time()?;
    for number in 0..rows {
        std::hint::black_box(row(number, &padding));
    }
    let making = processor_time()?.saturating_sub(cpu);
    let group = vec![b'x'; bytes * 100];
    let mut file = std::fs::File::create(output)?;
    let (began, cpu) = (Instant::now(), processor_time()?);
    for _ in 0..rows / 100 {
        file.write_all(&group)?;
        file.sync_data()?;
    }
    let (wall, writing) = (began.elapsed(), processor_time()?.saturating_sub(cpu));
    println!(
        "making a row {:.2} µs cpu; writing it, 100 to a sync, {:.2} µs cpu, {:.0} rows/s",
        making.as_secs_f64() * 1e6 / f64::from(rows),
        writing.as_secs_f64() * 1e6 / f64::from(rows),
        f64::from(rows) / wall.as_secs_f64()
    );
    Ok(())
}

async fn one(output: &std::path::Path, tasks: usize, rows: u32, bytes: usize) -> AnyResult {
    let cx = CallContext::within(Duration::from_secs(3_600));
    let (ledger, _) = JsonlLedger::open(&cx, Arc::new(RealFiles::new()), output, OpenMode::Fresh).await?;
    let ledger = Arc::new(ledger);
    let next = Arc::new(AtomicU32::new(0));
    let padding = "x".repeat(bytes.saturating_sub(80));
    let (began, cpu) = (Instant::now(), processor_time()?);
    let mut submitting = JoinSet::new();
    for _ in 0..tasks {
        let (ledger, next, padding, cx) = (Arc::clone(&ledger), Arc::clone(&next), padding.clone(), cx.clone());
        submitting.spawn(async move {
            let mut waited = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= rows {
                    return Ok::<_, gym_core::Error>(waited);
                }
                let attempt = ledger.begin(TaskKey::new(number / 8, number % 8))?;
                // Making and indexing the row is the collector's work, and is in the processor time.
                let row = row(number, &padding);
                let from = Instant::now();
                ledger.record(&cx, attempt, Outcome::Completed(row)).await?;
                waited.push(from.elapsed());
            }
        });
    }
    let mut waited = Vec::new();
    while let Some(done) = submitting.join_next().await {
        waited.append(&mut done??);
    }
    let (wall, cpu) = (began.elapsed(), processor_time()?.saturating_sub(cpu));
    ledger.close(&cx).await?;
    waited.sort_unstable();
    let at = |share: f64| waited[((waited.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    let reopened = Instant::now();
    JsonlLedger::open(&cx, Arc::new(RealFiles::new()), output, OpenMode::Resume).await?.0.close(&cx).await?;
    let with_index = reopened.elapsed();
    std::fs::remove_file(ledger_paths(output).1)?;
    let reopened = Instant::now();
    JsonlLedger::open(&cx, Arc::new(RealFiles::new()), output, OpenMode::Resume).await?.0.close(&cx).await?;
    println!(
        "{tasks:>5} {:>8.0} {:>11.2} {:>11.3} {:>11.3} {:>10.1} ({:.1})",
        f64::from(rows) / wall.as_secs_f64(),
        cpu.as_secs_f64() * 1e6 / f64::from(rows),
        at(0.5),
        at(0.99),
        with_index.as_secs_f64() * 1e3,
        reopened.elapsed().as_secs_f64() * 1e3,
    );
    Ok(())
}

/// User and system time of this process, in the kernel's ticks of 10 ms.
fn processor_time() -> AnyResult<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: u64 =
        fields.get(11).ok_or("no utime")?.parse::<u64>()? + fields.get(12).ok_or("no stime")?.parse::<u64>()?;
    Ok(Duration::from_millis(ticks * 10))
}
