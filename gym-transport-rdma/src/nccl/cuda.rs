//! Memory of NVIDIA's GPUs, by CUDA's driver. No CUDA runtime is needed.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::{CStr, c_int};
use std::fmt;
use std::sync::Arc;

use gym_core::group::collective::DeviceMemory;
use thiserror::Error;

use crate::machine::{Attempt, LoadOptions};
use crate::nccl::bindings::{Address, CudaFunctions, CudaResult, Handle, NOT_READY};
use crate::nccl::library::{CUDA, DriverFunctions, Library};

/// Why the driver did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No location has the library.
    #[error("{}", CUDA.missing(tried))]
    NotFound {
        /// All locations that were tried, in order.
        tried: Vec<Attempt>,
    },
    /// A function has failed.
    #[error("{function} failed with code {code} ({text})")]
    Failed {
        /// The function.
        function: &'static str,
        /// The `CUresult`.
        code: i32,
        /// The driver's text for the code.
        text: String,
    },
}

/// A GPU in this process, with its primary context, which every library of this process shares. Cheap to clone.
#[derive(Clone)]
pub struct CudaDevice(Arc<Device>);

struct Device {
    functions: CudaFunctions,
    number: u32,
    handle: c_int,
    /// Never released: memory and streams of other libraries may be in it.
    context: Handle,
}

// SAFETY: a context may be made current on any thread, and on several at a time; the driver's functions lock what they need.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{}", self.0.number)
    }
}

impl CudaDevice {
    /// Loads the driver's library (`libcuda.so.1`), and opens a GPU by its number among those that `CUDA_VISIBLE_DEVICES` leaves. The search is that of
    /// [`LoadOptions`], and then the folders that containers and WSL mount.
    ///
    /// # Errors
    /// The library cannot be loaded, or there is no such GPU.
    pub fn open(library: &LoadOptions, number: u32) -> Result<Self, CudaError> {
        let functions =
            Library::load(&CUDA, library, CudaFunctions::of).map_err(|tried| CudaError::NotFound { tried })?;
        let check = |function, code| check(&functions, function, code);
        let index = c_int::try_from(number).unwrap_or(c_int::MAX);
        let (mut handle, mut context) = (0, std::ptr::null_mut());
        // SAFETY: the driver is initialized before anything else, and any number of times.
        check("cuInit", unsafe { (functions.init)(0) })?;
        // SAFETY: a valid, exclusive place for one handle.
        check("cuDeviceGet", unsafe { (functions.device)(&raw mut handle, index) })?;
        // SAFETY: a valid, exclusive place for one context, of a device that was found.
        check("cuDevicePrimaryCtxRetain", unsafe { (functions.retain_context)(&raw mut context, handle) })?;
        Ok(Self(Arc::new(Device { functions, number, handle, context })))
    }

    /// Returns the newest version of CUDA that the driver supports, such as `12.8`. Needs no GPU.
    ///
    /// # Errors
    /// [`CudaError::NotFound`] and [`CudaError::Failed`].
    pub fn driver_version(library: &LoadOptions) -> Result<String, CudaError> {
        let functions =
            Library::load(&CUDA, library, DriverFunctions::of).map_err(|tried| CudaError::NotFound { tried })?;
        let failed = |code| CudaError::Failed { function: "cuDriverGetVersion", code, text: "no text".to_owned() };
        functions.driver_version().map_err(failed)
    }

    /// Returns the number among the visible GPUs.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.0.number
    }

    /// Returns the identity of the GPU, the same in every process.
    ///
    /// # Errors
    /// [`CudaError::Failed`].
    pub fn uuid(&self) -> Result<[u8; 16], CudaError> {
        let mut uuid = [0; 16];
        // SAFETY: a valid, exclusive place for one identity, of a device that was found.
        self.check("cuDeviceGetUuid_v2", unsafe { (self.0.functions.uuid)(&raw mut uuid, self.0.handle) })?;
        Ok(uuid)
    }

    /// Returns the name, such as `NVIDIA H100 80GB HBM3`.
    ///
    /// # Errors
    /// [`CudaError::Failed`].
    pub fn name(&self) -> Result<String, CudaError> {
        let mut name = [0; 256];
        // SAFETY: a valid, exclusive place for 255 bytes, and a device that was found. The byte behind them stays zero.
        let code = unsafe { (self.0.functions.name)(name.as_mut_ptr(), 255, self.0.handle) };
        self.check("cuDeviceGetName", code)?;
        // SAFETY: a C string within `name`, which ends with a zero.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Returns the bytes of the GPU's memory that are free, and all of them.
    ///
    /// # Errors
    /// [`CudaError::Failed`].
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: two valid, exclusive places for one number each; the context is current.
        self.check("cuMemGetInfo_v2", unsafe { (self.0.functions.memory)(&raw mut free, &raw mut total) })?;
        Ok((free, total))
    }

    /// Allocates memory, whose contents are undefined.
    ///
    /// # Errors
    /// [`CudaError::Failed`], such as code 2, out of memory.
    pub fn allocate(&self, bytes: usize) -> Result<CudaMemory, CudaError> {
        self.enter()?;
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: a valid, exclusive place for one address; the context is current.
            self.check("cuMemAlloc_v2", unsafe { (self.0.functions.allocate)(&raw mut address, bytes) })?;
        }
        Ok(CudaMemory { address, bytes, device: self.clone(), owner: None })
    }

    /// Copies bytes into fresh memory of the GPU. Blocks until it is done.
    ///
    /// # Errors
    /// [`CudaError::Failed`].
    pub fn upload(&self, bytes: &[u8]) -> Result<CudaMemory, CudaError> {
        let memory = self.allocate(bytes.len())?;
        if !bytes.is_empty() {
            // SAFETY: both regions have this length and are alive; the call ends when the bytes are read.
            let code = unsafe { (self.0.functions.upload)(memory.address, bytes.as_ptr().cast(), bytes.len()) };
            self.check("cuMemcpyHtoD_v2", code)?;
        }
        Ok(memory)
    }

    /// Makes the context current on this thread.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: a context that was retained for good.
        self.check("cuCtxSetCurrent", unsafe { (self.0.functions.set_context)(self.0.context) })
    }

    pub(super) fn stream(&self) -> Result<Stream, CudaError> {
        self.enter()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: a valid, exclusive place for one handle. 1 is CU_STREAM_NON_BLOCKING: it waits for no other stream.
        self.check("cuStreamCreate", unsafe { (self.0.functions.create_stream)(&raw mut stream, 1) })?;
        Ok(Stream { handle: stream, device: self.clone() })
    }

    fn check(&self, function: &'static str, code: CudaResult) -> Result<(), CudaError> {
        check(&self.0.functions, function, code)
    }
}

fn check(functions: &CudaFunctions, function: &'static str, code: CudaResult) -> Result<(), CudaError> {
    if code == 0 {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: a valid, exclusive place for one pointer; the function takes any code.
    let known = unsafe { (functions.error_string)(code, &raw mut text) } == 0 && !text.is_null();
    let text = if known {
        // SAFETY: a C string that lives as long as the library, which is never unloaded.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        "no text".to_owned()
    };
    Err(CudaError::Failed { function, code, text })
}

/// Memory of a GPU: its own, or that of another library.
pub struct CudaMemory {
    address: Address,
    bytes: usize,
    device: CudaDevice,
    /// The owner of another library's memory; `None` if the memory is freed with this value.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

impl CudaMemory {
    /// Wraps memory of another library, such as a tensor of torch (by the fields of DLPack), candle or cudarc, without a copy. `owner` is dropped when the
    /// memory is no longer used.
    ///
    /// # Safety
    /// `address` must be the beginning of `bytes` bytes of the device, which `owner` keeps alive. Until it is dropped, nothing else may write to them, and while
    /// an operation runs nothing else may read them. What was enqueued for them on other streams must have ended.
    #[must_use]
    pub unsafe fn from_raw(device: &CudaDevice, address: u64, bytes: usize, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { address, bytes, device: device.clone(), owner: Some(owner) }
    }

    /// Returns the address in the device's memory, 0 for no bytes. It stays the same for the life of this value.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Copies the bytes of other memory of the device, which has the same length. Blocks until it is done.
    pub(super) fn copy_from(&self, other: &Self) -> Result<(), CudaError> {
        self.device.enter()?;
        let bytes = self.bytes.min(other.bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both regions are of the device, alive, and at least so long.
        let code = unsafe { (self.device.0.functions.copy)(self.address, other.address, bytes) };
        self.device.check("cuMemcpyDtoD_v2", code)
    }

    /// Copies the bytes into memory of the host. Blocks until it is done.
    ///
    /// # Errors
    /// [`CudaError::Failed`].
    pub fn download(&self) -> Result<Vec<u8>, CudaError> {
        self.device.enter()?;
        let mut bytes = vec![0; self.bytes];
        if self.bytes > 0 {
            // SAFETY: both regions have this length and are alive; the call ends when the bytes are written.
            let code =
                unsafe { (self.device.0.functions.download)(bytes.as_mut_ptr().cast(), self.address, self.bytes) };
            self.device.check("cuMemcpyDtoH_v2", code)?;
        }
        Ok(bytes)
    }
}

impl DeviceMemory for CudaMemory {
    fn device(&self) -> gym_core::group::Device {
        gym_core::group::Device::Cuda(self.device.number())
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {:?}", self.bytes, self.device)
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if self.owner.is_none() && self.address != 0 && self.device.enter().is_ok() {
            // SAFETY: this value has allocated the memory, and nobody has its address any more.
            let _ = unsafe { (self.device.0.functions.free)(self.address) };
        }
    }
}

/// A queue of work of a device. It stays with the process: a communicator that was aborted may leave work in it.
pub(super) struct Stream {
    handle: Handle,
    device: CudaDevice,
}

// SAFETY: a stream may be used from any thread on which its context is current; it is used from one at a time.
unsafe impl Send for Stream {}

impl Stream {
    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    pub(super) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Marks the end of what was enqueued so far. The context must be current.
    pub(super) fn mark(&self) -> Result<Event, CudaError> {
        let mut event = std::ptr::null_mut();
        // SAFETY: a valid, exclusive place for one handle. 2 is CU_EVENT_DISABLE_TIMING.
        let code = unsafe { (self.device.0.functions.create_event)(&raw mut event, 2) };
        self.device.check("cuEventCreate", code)?;
        let event = Event { handle: event, device: self.device.clone() };
        // SAFETY: an event and a stream of this context.
        let code = unsafe { (self.device.0.functions.record_event)(event.handle, self.handle) };
        self.device.check("cuEventRecord", code)?;
        Ok(event)
    }
}

/// A place in a stream.
pub(super) struct Event {
    handle: Handle,
    device: CudaDevice,
}

// SAFETY: as for `Stream`.
unsafe impl Send for Event {}

impl Event {
    /// Returns `true` once the device has come to the place.
    pub(super) fn is_past(&self) -> Result<bool, CudaError> {
        // SAFETY: an event that was recorded.
        match unsafe { (self.device.0.functions.query_event)(self.handle) } {
            NOT_READY => Ok(false),
            code => self.device.check("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: this value has created the event. The driver frees it when the device has come to it.
        let _ = unsafe { (self.device.0.functions.destroy_event)(self.handle) };
    }
}
