//! What ranks, nodes and GPUs use, sampled.

pub(in crate::group) mod devices;
pub(in crate::group) mod gpu;
pub(in crate::group) mod node;
pub(in crate::group) mod process;

pub use devices::visible_gpus;
pub use node::{GpuUsage, NodeUsage};
pub use process::ProcessUsage;
