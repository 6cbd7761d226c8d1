//! Sampled usage of ranks, nodes and GPUs: CPU, memory, GPU memory.

pub(in crate::group) mod devices;
pub(in crate::group) mod gpu;
mod metrics;
pub(in crate::group) mod node;
pub(in crate::group) mod process;

pub use devices::visible_gpus;
pub use gpu::GpuUsage;
pub use metrics::{GPU_METRICS, GpuMetrics};
pub use node::NodeUsage;
pub use process::ProcessUsage;
