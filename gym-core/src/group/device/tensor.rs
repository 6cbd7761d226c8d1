//! A tensor in the memory of a device.

use std::fmt;
use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::group::batch::tensor::{DType, Device, Side, Tensor, bytes_of_shape};
use crate::group::collective::{Buffer, DeviceMemory, Memory};
use crate::group::device::provider::provider_of;

/// Element type, shape, padding side, and shared memory of a device: row-major, little-endian. Cheap to clone.
#[derive(Clone)]
pub struct DeviceTensor {
    pub(super) spec: TensorSpec,
    memory: Arc<Box<dyn DeviceMemory>>,
}

/// The description of a tensor without its memory.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorSpec {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) side: Option<Side>,
}

impl TensorSpec {
    pub(super) fn of(tensor: &Tensor) -> Self {
        Self { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), side: tensor.padding_side() }
    }

    /// Returns the number of rows; 1 for a scalar.
    pub(super) fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Rejects memory that does not have exactly the bytes of the shape.
    pub(super) fn check(&self, bytes: usize) -> Result<()> {
        let (dtype, shape) = (self.dtype, &self.shape);
        let expected = bytes_of_shape(dtype, shape)?;
        if expected != bytes {
            return Err(Error::invalid(format!("{dtype} of shape {shape:?} takes {expected} bytes, got {bytes}")));
        }
        Ok(())
    }
}

impl DeviceTensor {
    /// Creates a tensor over memory of a device, such as that of another library.
    ///
    /// # Errors
    /// `InvalidArgument` if the size of the shape is not exactly that of the memory.
    pub fn new(dtype: DType, shape: impl Into<Vec<usize>>, memory: Box<dyn DeviceMemory>) -> Result<Self> {
        Self::over(TensorSpec { dtype, shape: shape.into(), side: None }, memory)
    }

    pub(super) fn over(spec: TensorSpec, memory: Box<dyn DeviceMemory>) -> Result<Self> {
        spec.check(memory.bytes())?;
        Ok(Self::of_checked(spec, memory))
    }

    /// Creates a tensor over memory that has exactly the bytes of the shape.
    pub(super) fn of_checked(spec: TensorSpec, memory: Box<dyn DeviceMemory>) -> Self {
        Self { spec, memory: Arc::new(memory) }
    }

    pub(super) fn upload(tensor: &Tensor, device: Device) -> Result<Self> {
        let memory = provider_of(device)?.upload(index(device), tensor.bytes())?;
        Self::over(TensorSpec::of(tensor), on(device, memory)?)
    }

    /// Returns the type of the elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.spec.dtype
    }

    /// Returns the sizes of the dimensions, outermost first; empty for a scalar.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.spec.shape
    }

    /// Returns the side on which dimension 1 is padded; `None` if nothing declares it.
    #[must_use]
    pub fn padding_side(&self) -> Option<Side> {
        self.spec.side
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> Device {
        self.memory.device()
    }

    /// Returns the memory. It is a `&dyn Any`, too, which finds the type of its owner.
    #[must_use]
    pub fn memory(&self) -> &dyn DeviceMemory {
        &**self.memory
    }

    /// Returns the tensor on another device, copied by the device provider. On its own device it shares the memory. Blocks.
    pub(super) fn to_device(&self, device: Device) -> Result<Self> {
        if device == self.device() {
            return Ok(self.clone());
        }
        let memory = provider_of(device)?.copy(self.memory(), index(device))?;
        Self::over(self.spec.clone(), on(device, memory)?)
    }

    /// Copies the tensor to the host. Blocks.
    ///
    /// # Errors
    /// `FailedPrecondition` if no device provider is registered, and those of [`DeviceProvider::download`](crate::group::DeviceProvider::download).
    pub fn cpu(&self) -> Result<Tensor> {
        let bytes = provider_of(self.device())?.download(self.memory())?;
        Ok(Tensor::new(self.dtype(), self.shape(), bytes)?.with_side(self.spec.side))
    }

    /// Returns the memory as the buffer of a collective operation. Takes it if no other tensor shares it; otherwise the device provider copies it, and
    /// that blocks.
    ///
    /// # Errors
    /// The tensor, with `FailedPrecondition` if no device provider is registered, or with the error of
    /// [`DeviceProvider::copy`](crate::group::DeviceProvider::copy).
    pub fn into_buffer(self) -> Result<Buffer, (Self, Error)> {
        let Self { spec, memory } = self;
        let own = Arc::try_unwrap(memory).or_else(|memory| {
            let device = memory.device();
            let copied = provider_of(device).and_then(|provider| provider.copy(&**memory, index(device)));
            copied.map_err(|error| (Self { spec: spec.clone(), memory }, error))
        })?;
        Ok(Buffer::new(spec.dtype, Memory::Device(own)))
    }
}

impl fmt::Debug for DeviceTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceTensor({} {:?} on {})", self.dtype(), self.shape(), self.device())
    }
}

/// Rejects memory that a provider has put elsewhere.
fn on(device: Device, memory: Box<dyn DeviceMemory>) -> Result<Box<dyn DeviceMemory>> {
    if memory.device() != device {
        return Err(Error::internal(format!("the device provider has returned memory of {}", memory.device())));
    }
    Ok(memory)
}

/// Returns the index that a provider knows the device by.
fn index(device: Device) -> u32 {
    match device {
        Device::Cuda(index) => index,
        Device::Cpu => 0,
    }
}
