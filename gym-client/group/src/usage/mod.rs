//! Sampled usage of ranks, nodes and GPUs: CPU, memory, GPU memory.

pub(crate) mod devices;
pub(crate) mod gpu;
mod metrics;
pub(crate) mod node;
pub(crate) mod process;

pub use devices::visible_gpus;
pub use gpu::GpuUsage;
pub use metrics::{GPU_METRICS, GpuMetrics};
pub use node::NodeUsage;
pub use process::ProcessUsage;
