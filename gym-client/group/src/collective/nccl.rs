//! NCCL as the backend of a group: for memory of GPUs, on top of the backend `host`.

use std::sync::Arc;

use gym_client::transport::rdma::machine::Live;
use gym_client::transport::rdma::probe::{ProbeOptions, Status, Topic};
use gym_client::transport::rdma::{nccl, tuning};
use gym_core::Error;
use gym_core::group::collective::Collectives;
use gym_core::group::{device_provider, register_device_provider};

pub use nccl::cuda::{CudaDevice, CudaError, CudaMemory};
pub use nccl::devices::{CudaDevices, dlpack};
pub use nccl::{
    CUDA_LIBRARY_VARIABLE, LoadOptions, NCCL_LIBRARY_VARIABLE, Nccl, NcclCollectives, NcclError, NcclOptions,
    NcclVersion, UniqueId,
};

/// Why this build cannot use it.
pub(super) const MISSING: Option<&str> = None;

/// Registers the GPUs of this process as the devices `cuda` of batches. Call it at the start of the program; it loads nothing, so it may be called on a machine
/// without a GPU.
///
/// With `communication_backend: auto`, the ranks of a meeting then move memory of GPUs over NCCL, if all of them have registered a provider.
///
/// # Errors
/// `AlreadyExists` if `cuda` has a device provider.
pub fn register() -> Result<(), Error> {
    register_device_provider(Arc::new(CudaDevices::new(&NcclOptions::default())))
}

/// Puts NCCL on top of the backend of a rank, which must have a GPU. A rank without one gives all ranks of its meetings the error that says what is missing.
pub(super) fn over(host: Arc<dyn Collectives>) -> Arc<dyn Collectives> {
    Arc::new(NcclCollectives::open(Arc::clone(&host), &options()).unwrap_or_else(|error| {
        let fault = fault_of_machine().map(|fault| format!("; {fault}")).unwrap_or_default();
        let why = format!("{}{fault}; use communication_backend 'auto' or 'host' for ranks on CPUs", error.message());
        NcclCollectives::missing(host, why)
    }))
}

/// Returns what `rgym doctor` says of GPUs and NCCL on this machine, and its fix, if it finds a fault.
fn fault_of_machine() -> Option<String> {
    let probe = ProbeOptions::new().without_loading().probe();
    let findings = [Topic::Gpu, Topic::Nccl].into_iter().filter_map(|topic| probe.finding(topic));
    let fault = findings.into_iter().find(|finding| finding.status != Status::Ok)?;
    let fix = fault.fix.as_ref().map(|fix| format!(" (fix: {fix})")).unwrap_or_default();
    Some(format!("rgym doctor: {}{fix}", fault.found))
}

/// Puts NCCL on top of the backend of a rank, for the meetings whose ranks all use GPUs.
pub(super) fn if_used(host: Arc<dyn Collectives>) -> Arc<dyn Collectives> {
    Arc::new(NcclCollectives::if_used(host, || device_provider("cuda").map(|_| options())))
}

/// Returns the options of a rank, with those settings of its machine that all ranks must share.
fn options() -> NcclOptions {
    let mut options = NcclOptions::default();
    options.settings = tuning::agreement(&Live::new()).unwrap_or_default();
    options
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
