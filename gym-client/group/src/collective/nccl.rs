//! NCCL as the backend of a group: for memory of GPUs, on top of the backend `host`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use gym_core::Error;
use gym_core::group::collective::Collectives;
use gym_core::group::register_device_provider;

pub use gym_client::transport::rdma::nccl::cuda::{CudaDevice, CudaError, CudaMemory};
pub use gym_client::transport::rdma::nccl::devices::{CudaDevices, dlpack};
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

/// Registers the GPUs of this process as the devices `cuda` of batches. Call it at the start of the program; it loads nothing, so it may be called on a machine
/// without a GPU.
///
/// # Errors
/// `AlreadyExists` if `cuda` has a device provider.
pub fn register() -> Result<(), Error> {
    register_device_provider(Arc::new(CudaDevices::new(&options())))
}

/// Puts NCCL on top of the backend of a rank.
///
/// # Errors
/// Those of [`NcclCollectives::open`].
pub(super) fn over(host: Arc<dyn Collectives>) -> Result<Arc<dyn Collectives>, Error> {
    Ok(Arc::new(NcclCollectives::open(host, &options())?))
}

#[cfg(test)]
mod tests {
    use gym_core::Code;
    use gym_core::group::device_provider;

    use super::*;

    #[test]
    fn the_gpus_of_a_process_are_registered_once_and_without_one() {
        register().expect("nothing else registers in this process");
        let provider = device_provider("cuda").expect("it is registered");
        assert!(format!("{provider:?}").starts_with("CudaDevices"), "{provider:?}");
        let error = register().expect_err("the second one");
        assert_eq!(error.code(), Code::AlreadyExists);
    }
}
