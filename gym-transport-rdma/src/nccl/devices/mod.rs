//! The GPUs of this process as devices of batches, and tensors of other libraries.
//!
//! ```no_run
//! use std::sync::Arc;
//! use gym_core::group::{Batch, Tensor, register_device_provider};
//! use gym_transport_rdma::nccl::{NcclOptions, devices::CudaDevices};
//!
//! # fn main() -> gym_core::Result<()> {
//! register_device_provider(Arc::new(CudaDevices::new(&NcclOptions::default())))?;
//! let batch = Batch::empty().with("gradient", Tensor::from_vec([2], vec![1.0_f32, 2.0])?)?;
//! let placed = batch.to_device("cuda")?;
//! assert_eq!(placed.cpu()?, batch);
//! # Ok(()) }
//! ```

pub mod dlpack;

use std::any::Any;
use std::collections::BTreeMap;

use bytes::Bytes;
use gym_core::group::collective::DeviceMemory;
use gym_core::group::{Device, DeviceProvider};
use gym_core::{Code, Error, Result};
use parking_lot::Mutex;

use crate::nccl::NcclOptions;
use crate::nccl::cuda::{CudaDevice, CudaError, CudaMemory};
use crate::nccl::failure::no_gpu;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;

/// The device provider of `cuda`: opens each GPU when it is first used, and then keeps it.
#[derive(Debug)]
pub struct CudaDevices {
    options: NcclOptions,
    open: Mutex<BTreeMap<u32, CudaDevice>>,
}

impl CudaDevices {
    /// Creates the provider, over the library of CUDA's driver that the options name. It loads nothing before it is used, so a program may register it on a
    /// machine without a GPU.
    #[must_use]
    pub fn new(options: &NcclOptions) -> Self {
        Self { options: options.clone(), open: Mutex::default() }
    }

    /// Returns a GPU by its number among those that `CUDA_VISIBLE_DEVICES` leaves.
    ///
    /// # Errors
    /// `FailedPrecondition` if the driver cannot be loaded, or if there is no such GPU.
    pub fn device(&self, number: u32) -> Result<CudaDevice> {
        // The lock is held while the driver starts, so that each GPU is opened once.
        let mut open = self.open.lock();
        if let Some(device) = open.get(&number) {
            return Ok(device.clone());
        }
        let device = CudaDevice::open(&self.options.cuda, number).map_err(|error| no_gpu(number, &error))?;
        open.insert(number, device.clone());
        Ok(device)
    }
}

impl DeviceProvider for CudaDevices {
    fn kind(&self) -> &'static str {
        Device::Cuda(0).kind()
    }

    fn upload(&self, index: u32, bytes: &[u8]) -> Result<Box<dyn DeviceMemory>> {
        let memory = self.device(index)?.upload(bytes).map_err(|error| {
            let code = match error {
                CudaError::Failed { code: OUT_OF_MEMORY, .. } => Code::ResourceExhausted,
                _ => Code::Internal,
            };
            Error::not_started(code, format!("upload of {} bytes: {error}", bytes.len()))
        })?;
        Ok(Box::new(memory))
    }

    fn download(&self, memory: &dyn DeviceMemory) -> Result<Bytes> {
        let Some(memory) = (memory as &dyn Any).downcast_ref::<CudaMemory>() else {
            return Err(Error::invalid(format!("{memory:?} is no CudaMemory; wrap it with CudaMemory::from_raw")));
        };
        let bytes = memory.download();
        bytes.map(Bytes::from).map_err(|error| {
            Error::not_started(Code::Internal, format!("download of {} bytes: {error}", memory.bytes()))
        })
    }
}
