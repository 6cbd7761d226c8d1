//! NCCL as the backend of a group: for memory of GPUs, on top of the backend `host`.

use std::sync::Arc;

use gym_core::Error;
use gym_core::group::collective::Collectives;

pub use gym_client::transport::rdma::nccl::cuda::{CudaDevice, CudaError, CudaMemory};
pub use gym_client::transport::rdma::nccl::{
    CUDA_LIBRARY_VARIABLE, LoadOptions, NCCL_LIBRARY_VARIABLE, Nccl, NcclCollectives, NcclError, NcclOptions,
    NcclVersion, UniqueId,
};

/// Puts NCCL on top of the backend of a rank.
///
/// # Errors
/// Those of [`NcclCollectives::open`].
pub(super) fn over(host: Arc<dyn Collectives>) -> Result<Arc<dyn Collectives>, Error> {
    Ok(Arc::new(NcclCollectives::open(host, &NcclOptions::default())?))
}
