//! Compares sequence packing with plain Python of the same algorithms, in CPU time; their bins must be equal.
//!
//! The Python is `python3`, or the one given by `--peer`; it needs no package.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use gym_benches::measure;
use gym_benches::options::Options;
use gym_benches::report::{Aim, figure};
use gym_group::batch::packing::{Packing, PackingAlgorithm, PackingMetrics};
use rustix::time::{ClockId, clock_gettime};
use serde::Deserialize;

/// Tokens per bin.
const CAPACITY: usize = 8_192;
/// Runs of the SDK per figure, which is their mean: a single run is close to the clock's resolution.
const REPEATS: u32 = 5;

#[derive(Deserialize)]
struct Answer {
    cpu_s: f64,
    bins: Vec<Vec<usize>>,
}

fn main() -> Result<()> {
    let options = Options::of_arguments()?;
    let sequences = if options.quick { 5_000 } else { 100_000 };
    let python = options.peer.clone().unwrap_or_else(|| PathBuf::from("python3"));
    let lengths = lengths(sequences);
    println!("# load average {:.1}; {sequences} sequences into bins of {CAPACITY}", measure::load_average());
    for algorithm in [
        PackingAlgorithm::Concatenative,
        PackingAlgorithm::FirstFitDecreasing,
        PackingAlgorithm::ModifiedFirstFitDecreasing,
    ] {
        let name = format!("packing_{algorithm}_cpu");
        if !options.wants(&name) {
            continue;
        }
        let packing = Packing::new(algorithm, CAPACITY);
        let begun = cpu_ms();
        for _ in 1..REPEATS {
            std::hint::black_box(packing.pack(std::hint::black_box(&lengths))?);
        }
        let bins = packing.pack(&lengths)?;
        let ours = (cpu_ms() - begun) / f64::from(REPEATS);
        let peer = ask(&python, algorithm, &lengths)?;
        ensure!(peer.bins == bins, "{algorithm}: the bins differ");
        let peer_ms = peer.cpu_s * 1_000.0;
        // Concatenative packing needs no search, so the only gain is the cost of the interpreter.
        let searches = algorithm != PackingAlgorithm::Concatenative;
        figure(&name, "ms", &[ours], &[peer_ms], searches.then_some(Aim::AtMost(peer_ms / 50.0)));
        let metrics = PackingMetrics::of(&lengths, &bins, CAPACITY);
        println!("#   {} equal bins, {:.1}% full", metrics.num_bins, metrics.average_utilization * 100.0);
    }
    Ok(())
}

/// Returns the lengths of a rollout batch: most are short, and some fill more than half a bin.
fn lengths(count: usize) -> Vec<usize> {
    let mut random = fastrand::Rng::with_seed(4);
    let mut length = || {
        let tokens = 300.0 * (-(1.0 - random.f64()).ln()).powf(1.6) + 16.0;
        (tokens as usize).clamp(1, CAPACITY)
    };
    (0..count).map(|_| length()).collect()
}

fn ask(python: &Path, algorithm: PackingAlgorithm, lengths: &[usize]) -> Result<Answer> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/packing.py");
    let mut child = Command::new(python)
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {}", python.display()))?;
    let asked = serde_json::json!({"algorithm": algorithm.as_str(), "capacity": CAPACITY, "lengths": lengths});
    child.stdin.take().context("the script's input is a pipe")?.write_all(asked.to_string().as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "the script ended with {}", output.status);
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Returns the CPU time of this process in milliseconds.
fn cpu_ms() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1_000.0 + time.tv_nsec as f64 / 1e6
}
