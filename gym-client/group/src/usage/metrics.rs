//! The use of this machine's GPUs as Prometheus metrics.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::usage::gpu::{GpuSampler, GpuUsage};

/// Prometheus collector of the GPUs of this machine: the last sample at each output.
#[derive(Debug)]
pub struct GpuMetrics(Arc<GpuSampler>);

impl GpuMetrics {
    /// Begins to sample the GPUs, in the background. Must be called within a tokio runtime. Returns `None` if there is no GPU, or no `nvidia-smi`.
    #[must_use]
    pub fn of_this_machine() -> Option<Self> {
        let sampler = GpuSampler::shared()?;
        // The first question starts the sampling.
        let _ = sampler.gpus();
        Some(Self(sampler))
    }
}

/// The names and descriptions of the metrics. The labels are `gpu`, its index, and `uuid`.
pub const GPU_METRICS: [(&str, &str); 3] = [
    ("gym_gpu_utilization_ratio", "Share of the time in which the GPU was busy, from 0 to 1"),
    ("gym_gpu_memory_used_bytes", "GPU memory in use by all processes"),
    ("gym_gpu_memory_capacity_bytes", "Memory of the GPU"),
];

/// The values of [`GPU_METRICS`], in their order; `None` if the driver does not report one.
#[expect(clippy::cast_precision_loss, reason = "a gauge is a float")]
const VALUES: [fn(&GpuUsage) -> Option<f64>; 3] = [
    |gpu| gpu.busy_percent.map(|percent| percent / 100.0),
    |gpu| Some(gpu.used_bytes as f64),
    |gpu| Some(gpu.memory_bytes as f64),
];

impl Collector for GpuMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let gpus = self.0.gpus().unwrap_or_default();
        for ((name, help), value) in GPU_METRICS.iter().zip(VALUES) {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for gpu in &gpus {
                if let Some(value) = value(gpu) {
                    let labels = [("gpu", gpu.index.to_string()), ("uuid", gpu.uuid.clone())];
                    ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
                }
            }
        }
        Ok(())
    }
}
