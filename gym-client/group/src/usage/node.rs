//! Memory of a node and of its GPUs, sampled while a cluster with `monitor_memory` exists: by this process for this machine, and by the agent of
//! another node for the polls of its controller.
//!
//! The usage of a GPU is that of all its processes. [`ProcessUsage`](crate::usage::process::ProcessUsage) has the GPU
//! memory of one rank.

use std::sync::Arc;
use std::time::Duration;

use gym_core::base::process::SystemMemory;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::task::AbortOnDropHandle;

use crate::usage::gpu::{GpuSampler, GpuUsage};

/// Pause between two samples of the node: a read of `/proc/meminfo` costs some ten microseconds.
const NODE_INTERVAL: Duration = Duration::from_secs(1);

/// Memory usage of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NodeUsage {
    /// Its memory, in bytes.
    pub memory_bytes: u64,
    /// Memory that can still be used without swapping, in bytes.
    pub available_bytes: u64,
    /// The least available memory since sampling began, in bytes.
    pub available_bytes_min: u64,
    /// Its GPUs; empty if there are none, or `nvidia-smi` is missing.
    pub gpus: Vec<GpuUsage>,
}

impl NodeUsage {
    /// Returns the usage of these GPUs, as far as it is known. The names are those of `CUDA_VISIBLE_DEVICES`.
    pub(crate) fn gpus_of(&self, names: &[String]) -> Vec<GpuUsage> {
        let is = |gpu: &GpuUsage, name: &str| {
            name.parse() == Ok(gpu.index) || (!name.is_empty() && gpu.uuid.starts_with(name))
        };
        self.gpus.iter().filter(|gpu| names.iter().any(|name| is(gpu, name))).cloned().collect()
    }
}

/// Samples in the background until it is dropped.
#[derive(Debug)]
pub(crate) struct NodeMonitor {
    last: Arc<Mutex<Option<NodeUsage>>>,
    _task: AbortOnDropHandle<()>,
}

impl NodeMonitor {
    /// Starts the monitor. Must be called within a tokio runtime.
    pub(crate) fn start() -> Self {
        let last = Arc::default();
        let _task = AbortOnDropHandle::new(tokio::spawn(sample(Arc::clone(&last))));
        Self { last, _task }
    }

    pub(crate) fn usage(&self) -> Option<NodeUsage> {
        self.last.lock().clone()
    }
}

async fn sample(last: Arc<Mutex<Option<NodeUsage>>>) {
    let mut tick = interval(NODE_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let gpu = GpuSampler::shared();
    loop {
        tick.tick().await;
        let gpus = gpu.as_ref().and_then(|gpu| gpu.gpus());
        let memory = SystemMemory::read();
        let mut last = last.lock();
        if let Some(memory) = memory {
            let before = last.take();
            *last = Some(after(before, memory.total_bytes, memory.available_bytes, gpus));
        }
    }
}

/// Returns the next sample, with the extremes since sampling began.
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

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn gpu(used_mib: u64) -> GpuUsage {
        let used_bytes = used_mib * MIB;
        let (uuid, memory_bytes) = ("GPU-a".to_owned(), 1000 * MIB);
        GpuUsage { index: 0, uuid, used_bytes, used_bytes_peak: used_bytes, memory_bytes, busy_percent: None }
    }

    #[test]
    fn extremes_are_kept_from_sample_to_sample() {
        let (busy, idle) = (gpu(900), gpu(10));
        let first = after(None, 100, 40, Some(vec![busy]));
        let second = after(Some(first), 100, 70, Some(vec![idle]));
        assert_eq!((second.available_bytes, second.available_bytes_min), (70, 40));
        assert_eq!((second.gpus[0].used_bytes, second.gpus[0].used_bytes_peak), (10 * MIB, 900 * MIB));
        let third = after(Some(second.clone()), 100, 70, None);
        assert_eq!(third.gpus, second.gpus, "GPUs are asked less often");
    }
}
