//! Collective operations between the ranks of a group: the trait, meetings and the backend `mem` of [`gym_core::group::collective`], and the backends
//! `host`, whose ranks are in processes, on nodes or on Ray, and `nccl`, for memory of GPUs.

mod host;
#[cfg(feature = "nccl")]
pub mod nccl;
#[cfg(not(feature = "nccl"))]
#[path = "without_nccl.rs"]
mod nccl;
mod options;

pub use gym_core::group::collective::*;

pub use host::{HostCollectives, Sharing};
pub use options::CollectiveOptions;
