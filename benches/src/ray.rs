//! Ray's figures, measured by `peers/ray_calls.py` in the same run as those of the SDK.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

/// The output of the script.
#[derive(Clone, Debug, Deserialize)]
pub struct Ray {
    /// Latency of small calls in sequence.
    pub call: RayLatency,
    /// Small calls per second to one actor, with 1,000 in flight.
    pub pipelined_1_per_s: f64,
    /// Small calls per second to eight actors, with 1,000 in flight.
    pub pipelined_8_per_s: f64,
    /// Latency of a kilobyte to each of eight actors, including all responses.
    pub fan_out_8: RayLatency,
    /// Latency of a mebibyte in both directions.
    pub echo_1mib: RayLatency,
    /// Latency of 64 MiB in both directions.
    pub echo_64mib: RayLatency,
    /// Transfer of a gibibyte, an eighth to each of eight actors.
    pub shard_to_8: RayShard,
}

/// Times in microseconds.
#[derive(Clone, Debug, Deserialize)]
pub struct RayLatency {
    /// The median.
    pub p50_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
}

/// A number of bytes and the time of their transfer.
#[derive(Clone, Debug, Deserialize)]
pub struct RayShard {
    bytes: f64,
    seconds: f64,
}

impl RayShard {
    /// Returns the milliseconds for a gibibyte.
    #[must_use]
    pub fn ms_per_gib(&self) -> f64 {
        self.seconds * 1_000.0 * f64::from(1 << 30) / self.bytes
    }
}

impl Ray {
    /// Runs the script with a Python installation that has Ray.
    ///
    /// # Errors
    /// An error if the script cannot be run or fails, with its output.
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
