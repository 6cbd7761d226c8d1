//! Sampled usage of ranks, nodes and GPUs: CPU, memory, GPU memory.

pub(in crate::group) mod devices;
pub(in crate::group) mod gpu;
pub(in crate::group) mod node;
pub(in crate::group) mod process;

pub use devices::visible_gpus;
pub use gpu::GpuUsage;
pub use node::NodeUsage;
pub use process::ProcessUsage;
