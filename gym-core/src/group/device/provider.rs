//! Device providers: what copies bytes between the host and the devices of a kind, and the ones that this process has.

use std::fmt;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use crate::base::error::{Code, Error, Result};
use crate::group::batch::Device;
use crate::group::collective::DeviceMemory;

/// The provider of `cuda`, the only kind of [`Device`] besides the host.
static CUDA: OnceLock<Arc<dyn DeviceProvider>> = OnceLock::new();

/// Copies bytes between host memory and the devices of one kind.
///
/// [`Batch::to_device`](crate::group::Batch::to_device) and the methods of [`DeviceBatch`](crate::group::DeviceBatch) call it, from any thread and from several at
/// a time. Each method blocks until the copy is done, and keeps the source, also after an error. A provider may be registered on a machine without such a
/// device: then its methods fail with what is missing and the fix.
pub trait DeviceProvider: fmt::Debug + Send + Sync {
    /// Returns the kind of the devices, as [`Device::kind`] spells it: `cuda`.
    fn kind(&self) -> &'static str;

    /// Copies bytes into fresh memory of the device with this index.
    ///
    /// # Errors
    /// `FailedPrecondition` if there is no such device, `ResourceExhausted` if its memory is full, `Internal` if the copy has failed.
    fn upload(&self, index: u32, bytes: &[u8]) -> Result<Box<dyn DeviceMemory>>;

    /// Copies memory of a device to the host.
    ///
    /// # Errors
    /// `InvalidArgument` if the memory is of a type that the provider does not know, `Internal` if the copy has failed.
    fn download(&self, memory: &dyn DeviceMemory) -> Result<Bytes>;

    /// Copies memory of a device into fresh memory of the device with this index, which may be the same. By default over the host.
    ///
    /// # Errors
    /// Those of [`Self::upload`] and [`Self::download`].
    fn copy(&self, memory: &dyn DeviceMemory, index: u32) -> Result<Box<dyn DeviceMemory>> {
        self.upload(index, &self.download(memory)?)
    }
}

/// Makes a provider the one for its kind of devices, in this process and until it ends. Call it at the start of the program.
///
/// # Errors
/// `AlreadyExists` if the kind has a provider, `InvalidArgument` if there are no such devices.
pub fn register_device_provider(provider: Arc<dyn DeviceProvider>) -> Result<()> {
    let (kind, cuda) = (provider.kind(), Device::Cuda(0).kind());
    if kind != cuda {
        return Err(Error::invalid(format!("{kind:?} is no kind of device; there is {cuda}")));
    }
    CUDA.set(provider).map_err(|second| {
        let first = device_provider(kind);
        let why = format!("{kind} has the device provider {first:?} already; {second:?} is not registered");
        Error::not_started(Code::AlreadyExists, why)
    })
}

/// Returns the provider for a kind of devices, such as `cuda`; `None` if the program has registered none.
#[must_use]
pub fn device_provider(kind: &str) -> Option<Arc<dyn DeviceProvider>> {
    CUDA.get().filter(|provider| provider.kind() == kind).cloned()
}

/// Returns the provider for a device, or the error that says how to register one.
pub(super) fn provider_of(device: Device) -> Result<Arc<dyn DeviceProvider>> {
    let kind = device.kind();
    device_provider(kind).ok_or_else(|| {
        let why = format!(
            "no device provider for {kind} is registered; call gym_group::collective::nccl::register() at the start of the program (feature `nccl`), \
             or register_device_provider() with your own"
        );
        Error::not_started(Code::FailedPrecondition, why)
    })
}

#[cfg(test)]
mod tests {
    use crate::base::error::Code;
    use crate::group::batch::{Batch, Device};
    use crate::group::{Tensor, device_provider};

    /// The tests of this crate's library register no provider; those of `tests/devices.rs` do.
    #[test]
    fn without_a_provider_the_error_names_it_and_the_fix() {
        let batch = Batch::empty().with("x", Tensor::from_vec([2], vec![1_i64, 2]).unwrap()).unwrap();
        assert!(device_provider("cuda").is_none());
        for error in [batch.to_device("cuda:1").unwrap_err(), batch.to_device(Device::Cuda(1)).unwrap_err()] {
            assert_eq!(error.code(), Code::FailedPrecondition);
            assert_eq!(
                error.to_string(),
                "move column \"x\" to cuda:1: no device provider for cuda is registered; call gym_group::collective::nccl::register() at the start of the \
                 program (feature `nccl`), or register_device_provider() with your own"
            );
        }
        assert_eq!(Batch::empty().to_device("cuda").unwrap().cpu().unwrap(), Batch::empty(), "nothing to move");
    }

    #[test]
    fn on_the_host_the_memory_is_shared() {
        let batch = Batch::empty().with("x", Tensor::from_vec([2], vec![1_i64, 2]).unwrap()).unwrap();
        let same = batch.to_device(Device::Cpu).unwrap().cpu().unwrap();
        assert_eq!(same.encode().1[0].as_ptr(), batch.encode().1[0].as_ptr());
        assert_eq!((batch.device(), same), (Device::Cpu, batch));
    }
}
