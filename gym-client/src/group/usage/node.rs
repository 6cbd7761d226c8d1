//! Memory of this node and of its GPUs, sampled while a cluster with `monitor_memory` lives.
//!
//! This is what all processes of a GPU use together; what a rank's own hold is in its [`ProcessUsage`](crate::group::usage::process::Usage).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::task::AbortOnDropHandle;

use crate::group::usage::devices::visible_gpus;
use crate::group::usage::gpu;

/// Pause between two samples of the node: a read of `/proc/meminfo` costs some ten microseconds.
const NODE_PERIOD: Duration = Duration::from_secs(1);
/// Pause between two samples of the GPUs: a process that opens all of them costs tenths of a second.
const GPU_PERIOD: Duration = Duration::from_secs(10);
const QUERY: &str = "--query-gpu=index,uuid,memory.used,memory.total,utilization.gpu";
const MIB: u64 = 1 << 20;

/// What a node uses.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct NodeUsage {
    /// Its memory, in bytes.
    pub memory_bytes: u64,
    /// What can still be used without swapping, in bytes.
    pub available_bytes: u64,
    /// The least of that that was seen, in bytes.
    pub available_bytes_min: u64,
    /// Its GPUs; empty where there are none, and where `nvidia-smi` is missing.
    pub gpus: Vec<GpuUsage>,
}

/// What a GPU's processes use of it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct GpuUsage {
    /// Its index, as `nvidia-smi` counts.
    pub index: u32,
    /// Its own identifier, `GPU-…`.
    pub uuid: String,
    /// Memory in use, in bytes.
    pub used_bytes: u64,
    /// The most of it that was seen, in bytes.
    pub used_bytes_peak: u64,
    /// Its memory, in bytes.
    pub memory_bytes: u64,
    /// Share of the time in which it worked, in percent; `None` where it does not say.
    pub busy_percent: Option<f64>,
}

/// Samples as long as it lives.
#[derive(Debug)]
pub(crate) struct NodeMonitor {
    last: Arc<Mutex<Option<NodeUsage>>>,
    _task: AbortOnDropHandle<()>,
}

impl NodeMonitor {
    /// Within a tokio runtime.
    pub(crate) fn start() -> Self {
        let last = Arc::default();
        let _task = AbortOnDropHandle::new(tokio::spawn(sample(Arc::clone(&last))));
        Self { last, _task }
    }

    pub(crate) fn usage(&self) -> Option<NodeUsage> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Those of these GPUs of which something is known; they are named as `CUDA_VISIBLE_DEVICES` does it.
    pub(crate) fn gpus(&self, names: &[String]) -> Vec<GpuUsage> {
        let all = self.usage().map(|usage| usage.gpus).unwrap_or_default();
        let is = |gpu: &GpuUsage, name: &str| {
            name.parse() == Ok(gpu.index) || (!name.is_empty() && gpu.uuid.starts_with(name))
        };
        all.into_iter().filter(|gpu| names.iter().any(|name| is(gpu, name))).collect()
    }
}

async fn sample(last: Arc<Mutex<Option<NodeUsage>>>) {
    let mut tick = interval(NODE_PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let tool = if visible_gpus().is_empty() { None } else { gpu::tool() };
    let mut gpus_due = Instant::now();
    loop {
        tick.tick().await;
        let gpus = match &tool {
            Some(tool) if gpus_due <= Instant::now() => {
                gpus_due = Instant::now() + GPU_PERIOD;
                gpu::answer(tool, QUERY).await.ok().map(|text| text.lines().filter_map(read).collect())
            }
            _ => None,
        };
        let memory = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text));
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((memory_bytes, available_bytes)) = memory {
            let before = last.take();
            *last = Some(after(before, memory_bytes, available_bytes, gpus));
        }
    }
}

/// The next sample, with the extremes so far.
fn after(before: Option<NodeUsage>, memory_bytes: u64, available_bytes: u64, gpus: Option<Vec<GpuUsage>>) -> NodeUsage {
    let available_bytes_min =
        before.as_ref().map_or(available_bytes, |before| before.available_bytes_min.min(available_bytes));
    let known = before.map(|before| before.gpus).unwrap_or_default();
    let mut gpus = gpus.unwrap_or_else(|| known.clone());
    for gpu in &mut gpus {
        let peak = known.iter().find(|known| known.uuid == gpu.uuid).map_or(0, |known| known.used_bytes_peak);
        gpu.used_bytes_peak = gpu.used_bytes_peak.max(peak);
    }
    NodeUsage { memory_bytes, available_bytes, available_bytes_min, gpus }
}

/// Memory and what is available of it, in bytes.
fn meminfo(text: &str) -> Option<(u64, u64)> {
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
    };
    Some((bytes("MemTotal")?, bytes("MemAvailable")?))
}

/// One line of the driver's answer to [`QUERY`].
fn read(line: &str) -> Option<GpuUsage> {
    let mut cells = line.split(',').map(str::trim);
    let (index, uuid) = (cells.next()?.parse().ok()?, cells.next()?.to_owned());
    let mut bytes = || cells.next()?.parse::<u64>().ok()?.checked_mul(MIB);
    let (used_bytes, memory_bytes) = (bytes()?, bytes()?);
    let busy_percent = cells.next().and_then(|cell| cell.parse().ok());
    Some(GpuUsage { index, uuid, used_bytes, used_bytes_peak: used_bytes, memory_bytes, busy_percent })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_does_not_say_is_not_made_up() {
        let told = read("1, GPU-8f2a, 1024, 143771, 37").expect("a GPU");
        assert_eq!((told.index, told.used_bytes, told.memory_bytes), (1, 1024 * MIB, 143_771 * MIB));
        assert_eq!(told.busy_percent, Some(37.0));
        assert_eq!(read("1, GPU-8f2a, 1024, 143771, [N/A]").expect("a GPU").busy_percent, None);
        assert_eq!(read("1, GPU-8f2a, [N/A], 143771, 5"), None);
        assert_eq!(read("No devices were found"), None);
    }

    #[test]
    fn extremes_are_kept_from_sample_to_sample() {
        let busy = read("0, GPU-a, 900, 1000, 1").expect("a GPU");
        let idle = read("0, GPU-a, 10, 1000, 0").expect("a GPU");
        let first = after(None, 100, 40, Some(vec![busy]));
        let second = after(Some(first), 100, 70, Some(vec![idle]));
        assert_eq!((second.available_bytes, second.available_bytes_min), (70, 40));
        assert_eq!((second.gpus[0].used_bytes, second.gpus[0].used_bytes_peak), (10 * MIB, 900 * MIB));
        let third = after(Some(second.clone()), 100, 70, None);
        assert_eq!(third.gpus, second.gpus, "GPUs are asked less often");
    }

    #[test]
    fn memory_is_read_as_the_kernel_writes_it() {
        let text = "MemTotal:       16384 kB\nMemFree:            1 kB\nMemAvailable:    8192 kB\n";
        assert_eq!(meminfo(text), Some((16_384 << 10, 8_192 << 10)));
        assert_eq!(meminfo("MemTotal: 3 kB\n"), None);
    }
}
