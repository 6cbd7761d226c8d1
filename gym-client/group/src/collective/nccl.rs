//! NCCL as the backend of a group: for memory of GPUs, on top of the backend `host`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use gym_core::Error;
use gym_core::group::collective::Collectives;

pub use gym_client::transport::rdma::nccl::cuda::{CudaDevice, CudaError, CudaMemory};
pub use gym_client::transport::rdma::nccl::{Nccl, NcclCollectives, NcclError, NcclOptions, NcclVersion, UniqueId};

/// Environment variable with the path of NCCL's library. Default: `libnccl.so.2`, as the dynamic loader finds it.
pub const NCCL_LIBRARY_VARIABLE: &str = "GYM_NCCL_LIBRARY";
/// Environment variable with the path of the library of CUDA's driver. Default: `libcuda.so.1`, as the dynamic loader finds it.
pub const CUDA_LIBRARY_VARIABLE: &str = "GYM_CUDA_LIBRARY";

/// Returns the options that the environment of a rank gives.
#[must_use]
pub fn options() -> NcclOptions {
    let set = |name: &str| std::env::var_os(name).filter(|path: &OsString| !path.is_empty()).map(PathBuf::from);
    let mut options = NcclOptions::default();
    if let Some(path) = set(NCCL_LIBRARY_VARIABLE) {
        options.nccl = path;
    }
    if let Some(path) = set(CUDA_LIBRARY_VARIABLE) {
        options.cuda = path;
    }
    options
}

/// Puts NCCL on top of the backend of a rank.
///
/// # Errors
/// Those of [`NcclCollectives::open`].
pub(super) fn over(host: Arc<dyn Collectives>) -> Result<Arc<dyn Collectives>, Error> {
    Ok(Arc::new(NcclCollectives::open(host, &options())?))
}
