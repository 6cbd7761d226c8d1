//! The memory that a collective operation reads and writes.

use std::any::Any;
use std::fmt;

use bytes::{Bytes, BytesMut};

use crate::base::error::{Code, Error, Result};
use crate::group::batch::tensor::{DType, Device, Tensor};

/// Elements of one type in memory that an operation owns until its end. The transfer always returns it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Buffer {
    /// The type of the elements.
    pub dtype: DType,
    /// The memory.
    pub memory: Memory,
}

/// Memory of the host or of a device.
#[non_exhaustive]
pub enum Memory {
    /// Host memory: row-major, little-endian elements, of any alignment.
    Host(BytesMut),
    /// Host memory that the ranks of one node share, from [`Communicator::allocate`](super::Communicator::allocate). Another backend or another meeting
    /// copies it, and may return the result in private memory.
    Shared(Box<dyn SharedMemory>),
    /// Memory of a device, which only its own backend takes.
    Device(Box<dyn DeviceMemory>),
}

/// Memory that the ranks of one node share. A backend gets its own type back with `Box<dyn Any>::downcast`.
pub trait SharedMemory: Any + fmt::Debug + Send + Sync {
    /// Returns the bytes.
    fn bytes(&self) -> &[u8];

    /// Returns the bytes, to write to.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Memory of a device. A backend and a [`DeviceProvider`](crate::group::DeviceProvider) get their own type back with `Box<dyn Any>::downcast`.
pub trait DeviceMemory: Any + fmt::Debug + Send + Sync {
    /// Returns the device, which is never the host.
    fn device(&self) -> Device;

    /// Returns the number of bytes.
    fn bytes(&self) -> usize;
}

/// The owner of the bytes of a tensor.
struct Shared(Box<dyn SharedMemory>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl Buffer {
    /// Creates a buffer over memory.
    #[must_use]
    pub fn new(dtype: DType, memory: Memory) -> Self {
        Self { dtype, memory }
    }

    /// Creates a buffer over host memory.
    #[must_use]
    pub fn host(dtype: DType, bytes: BytesMut) -> Self {
        Self::new(dtype, Memory::Host(bytes))
    }

    /// Creates the buffer of a barrier.
    #[must_use]
    pub fn empty() -> Self {
        Self::host(DType::U8, BytesMut::new())
    }

    /// Creates a buffer from a tensor. Takes the memory if no other tensor shares it, and copies it otherwise. The memory of
    /// [`Tensor::from_vec`] is always copied, because the vector cannot be taken out again.
    #[must_use]
    pub fn from_tensor(tensor: Tensor) -> Self {
        let dtype = tensor.dtype();
        Self::host(dtype, tensor.into_bytes().try_into_mut().unwrap_or_else(|shared| BytesMut::from(&shared[..])))
    }

    /// Returns the buffer as a tensor of this shape, without a copy.
    ///
    /// # Errors
    /// `InvalidArgument` if the shape does not have exactly these elements, or if the memory is not in the host.
    pub fn into_tensor(self, shape: impl Into<Vec<usize>>) -> Result<Tensor> {
        match self.memory {
            Memory::Host(bytes) => Tensor::new(self.dtype, shape, bytes.freeze()),
            Memory::Shared(memory) => Tensor::new(self.dtype, shape, Bytes::from_owner(Shared(memory))),
            Memory::Device(memory) => {
                Err(Error::invalid(format!("{memory:?} is not in host memory; copy it there first")))
            }
        }
    }

    /// Takes the host memory out of the buffer, for a backend that moves no other.
    ///
    /// # Errors
    /// The buffer, with `Unimplemented`, if its memory is elsewhere.
    pub fn into_host(self, backend: &str) -> Result<BytesMut, (Self, Error)> {
        match self.memory {
            Memory::Host(bytes) => Ok(bytes),
            Memory::Shared(memory) => Ok(BytesMut::from(memory.bytes())),
            memory @ Memory::Device(_) => {
                let why =
                    format!("the backend `{backend}` moves host memory only, not {memory:?}; copy it to the host");
                Err((Self::new(self.dtype, memory), Error::not_started(Code::Unimplemented, why)))
            }
        }
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.memory {
            Memory::Host(bytes) => bytes.len(),
            Memory::Shared(memory) => memory.bytes().len(),
            Memory::Device(memory) => memory.bytes(),
        }
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.bytes() / self.dtype.size()
    }

    /// Returns the bytes in host memory, to write to; `None` if they are elsewhere.
    #[must_use]
    pub fn host_bytes_mut(&mut self) -> Option<&mut [u8]> {
        match &mut self.memory {
            Memory::Host(bytes) => Some(bytes),
            Memory::Shared(memory) => Some(memory.bytes_mut()),
            Memory::Device(_) => None,
        }
    }

    /// Returns the bytes in host memory; `None` if they are elsewhere.
    #[must_use]
    pub fn host_bytes(&self) -> Option<&[u8]> {
        match &self.memory {
            Memory::Host(bytes) => Some(bytes),
            Memory::Shared(memory) => Some(memory.bytes()),
            Memory::Device(_) => None,
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(bytes) => write!(f, "Host({} bytes)", bytes.len()),
            Self::Shared(memory) => f.debug_tuple("Shared").field(memory).finish(),
            Self::Device(memory) => f.debug_tuple("Device").field(memory).finish(),
        }
    }
}
