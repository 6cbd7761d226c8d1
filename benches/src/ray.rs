//! Ray's figures, taken by `peers/ray_calls.py` in the same run as ours.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

/// What the script prints.
#[derive(Clone, Debug, Deserialize)]
pub struct Ray {
    /// One small call after another.
    pub call: RayLatency,
    /// Small calls a second to one actor, 1,000 under way.
    pub pipelined_1_per_s: f64,
    /// The same to eight.
    pub pipelined_8_per_s: f64,
    /// A kilobyte to each of eight actors, and all the answers.
    pub fan_out_8: RayLatency,
    /// A mebibyte there and back.
    pub echo_1mib: RayLatency,
    /// 64 MiB there and back.
    pub echo_64mib: RayLatency,
    /// A gibibyte, an eighth to each of eight actors.
    pub shard_to_8: RayShard,
}

/// Times in microseconds.
#[derive(Clone, Debug, Deserialize)]
pub struct RayLatency {
    /// The median.
    pub p50_us: f64,
    /// 99 of 100 are at most this.
    pub p99_us: f64,
}

/// Some bytes and how long they took.
#[derive(Clone, Debug, Deserialize)]
pub struct RayShard {
    bytes: f64,
    seconds: f64,
}

impl RayShard {
    /// Milliseconds for a gibibyte.
    #[must_use]
    pub fn ms_per_gib(&self) -> f64 {
        self.seconds * 1_000.0 * f64::from(1 << 30) / self.bytes
    }
}

impl Ray {
    /// Runs the script with a Python that has Ray.
    ///
    /// # Errors
    /// When it cannot be run, or fails: with what it says.
    pub fn measure(python: &Path, quick: bool) -> Result<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/ray_calls.py");
        let mut command = Command::new(python);
        command.arg(&script).args(quick.then_some("--quick"));
        let output = command.output().with_context(|| format!("run {} with {}", script.display(), python.display()))?;
        ensure!(output.status.success(), "{}: {}", script.display(), String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout)?;
        let line = text.lines().last().with_context(|| format!("{} printed nothing", script.display()))?;
        serde_json::from_str(line).with_context(|| format!("{} printed {line}", script.display()))
    }
}
