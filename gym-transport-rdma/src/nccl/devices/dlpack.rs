//! DLPack: tensors that libraries of one process hand to each other without a copy, such as torch, CuPy and JAX.
//!
//! Source: `dlpack.h` of DLPack 1.1, and the older `DLManagedTensor`, which version 1 keeps. In Python, a capsule of the name `dltensor` points to a
//! [`DLManagedTensor`], and one of the name `dltensor_versioned` to a [`DLManagedTensorVersioned`]; whoever takes the tensor renames the capsule to `used_…`.
//!
//! Neither side waits for work of the other: end what writes to the tensor first (`torch.cuda.synchronize()`).
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;

use gym_core::group::{DType, Device, DeviceTensor};
use thiserror::Error;

use crate::nccl::cuda::{CudaDevice, CudaMemory};

/// `kDLCUDA`.
pub const CUDA: i32 = 2;
/// `kDLCUDAManaged`: memory that all GPUs and the host reach. Its device id is 0.
pub const CUDA_MANAGED: i32 = 13;
/// `DLPACK_MAJOR_VERSION` of the layout of [`DLManagedTensorVersioned`].
pub const MAJOR_VERSION: u32 = 1;
/// `DLPACK_MINOR_VERSION` that exported tensors have: the first one of the layout.
const MINOR_VERSION: u32 = 0;
/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
pub const READ_ONLY: u64 = 1;

/// A device.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// The kind, such as [`CUDA`]; 1 is the CPU.
    pub device_type: i32,
    /// The number among the devices of the kind.
    pub device_id: i32,
}

/// The type of the elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// 0 for signed and 1 for unsigned integers, 2 for IEEE floats, 4 for bfloat, 6 for bool.
    pub code: u8,
    /// The bits of one lane.
    pub bits: u8,
    /// 1, or the lanes of a vector.
    pub lanes: u16,
}

/// A tensor, without its owner.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLTensor {
    /// The address in the memory of the device; null if there are no elements.
    pub data: *mut c_void,
    /// The device.
    pub device: DLDevice,
    /// The number of dimensions.
    pub ndim: i32,
    /// The type of the elements.
    pub dtype: DLDataType,
    /// The sizes of the dimensions.
    pub shape: *mut i64,
    /// The distances of the elements of each dimension, in elements; null if the tensor is row-major and compact.
    pub strides: *mut i64,
    /// The bytes between `data` and the first element.
    pub byte_offset: u64,
}

/// A tensor and its owner, as before DLPack 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The owner's own pointer.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor and this structure, once; null if nothing is to be freed.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// A version of DLPack.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Changes with the layout.
    pub major: u32,
    /// Changes with new codes.
    pub minor: u32,
}

/// A tensor and its owner, since DLPack 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// The version of the layout.
    pub version: DLPackVersion,
    /// The owner's own pointer.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor and this structure, once; null if nothing is to be freed.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
    /// Such as [`READ_ONLY`].
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

/// Why a tensor cannot be handed over.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DlpackError {
    /// The layout is of another version.
    #[error("the tensor is of DLPack {}.{}; version {MAJOR_VERSION} is read", .0.major, .0.minor)]
    Version(DLPackVersion),
    /// The tensor may not be written to, as operations do.
    #[error("the tensor is read-only, and operations write to it; export a copy")]
    ReadOnly,
    /// The tensor is elsewhere.
    #[error("the tensor is on {}, not on cuda:{wanted}; move it there first", name(*found))]
    Device {
        /// The device of the tensor.
        found: DLDevice,
        /// The number of the GPU that was asked for.
        wanted: u32,
    },
    /// Tensors have no such elements.
    #[error("elements of DLPack's type code {}, {} bits and {} lanes have no type here; convert them first", .0.code, .0.bits, .0.lanes)]
    Type(DLDataType),
    /// The number of dimensions is negative.
    #[error("the tensor has {0} dimensions")]
    Dimensions(i32),
    /// A size is negative, or there are more bytes than can be counted.
    #[error("{0:?} is no shape")]
    Shape(Vec<i64>),
    /// The elements are not adjacent in row-major order.
    #[error(
        "a tensor of shape {shape:?} and strides {strides:?} is not row-major and compact; call contiguous() first"
    )]
    Strides {
        /// The sizes of the dimensions.
        shape: Vec<i64>,
        /// The distances of the elements of each dimension, in elements.
        strides: Vec<i64>,
    },
    /// The offset leads beyond all addresses.
    #[error("the tensor begins {0} bytes after its address, which is beyond all addresses")]
    Offset(u64),
    /// A pointer is missing.
    #[error("the pointer to the {0} of the tensor is null")]
    Null(&'static str),
    /// The tensor's memory is not that of [`CudaMemory`].
    #[error("{0} is no CudaMemory")]
    Foreign(String),
}

/// Takes a tensor of another library, without a copy. Its deleter is called once: when the memory is no longer used, or before an error is returned.
///
/// # Errors
/// [`DlpackError`]: the tensor is not on this device, is not row-major and compact, or has elements that no [`DType`] names.
///
/// # Safety
/// The tensor must be valid as `dlpack.h` says, and nobody else may call its deleter, which any thread may call. Its memory is subject to the rules of
/// [`CudaMemory::from_raw`]; without a deleter, it must live as long as the process.
pub unsafe fn import(device: &CudaDevice, tensor: NonNull<DLManagedTensor>) -> Result<DeviceTensor, DlpackError> {
    // SAFETY: as the caller says.
    unsafe { import_owned(device, Owned(tensor)) }
}

/// Like [`import`], for the structure of DLPack 1. Of another major version only the deleter is used.
///
/// # Errors
/// Those of [`import`], and [`DlpackError::Version`] and [`DlpackError::ReadOnly`].
///
/// # Safety
/// As for [`import`].
pub unsafe fn import_versioned(
    device: &CudaDevice,
    tensor: NonNull<DLManagedTensorVersioned>,
) -> Result<DeviceTensor, DlpackError> {
    // SAFETY: as the caller says.
    unsafe { import_owned(device, Owned(tensor)) }
}

/// Hands a tensor to another library, without a copy: for a capsule of the name `dltensor`. The memory lives until the deleter is called, which the receiver
/// must do once. Clones of the tensor share the memory with the receiver.
///
/// # Errors
/// [`DlpackError::Foreign`] if the memory is not that of [`CudaMemory`], [`DlpackError::Shape`] if a size is over 2⁶³ − 1.
pub fn export(tensor: DeviceTensor) -> Result<NonNull<DLManagedTensor>, DlpackError> {
    Exported::of(tensor)
}

/// Like [`export`], for a capsule of the name `dltensor_versioned`.
///
/// # Errors
/// Those of [`export`].
pub fn export_versioned(tensor: DeviceTensor) -> Result<NonNull<DLManagedTensorVersioned>, DlpackError> {
    Exported::of(tensor)
}

/// One of the two structures.
trait Managed: Sized + 'static {
    /// Creates the structure of a tensor that [`Exported`] owns.
    fn new(dl_tensor: DLTensor) -> Self;

    /// Returns the deleter.
    ///
    /// # Safety
    /// The structure must be valid, of any version.
    unsafe fn deleter(this: NonNull<Self>) -> Option<unsafe extern "C" fn(*mut Self)>;

    /// Returns the tensor, unless nothing but the deleter may be used.
    ///
    /// # Safety
    /// The structure must be valid, of any version.
    unsafe fn tensor(this: NonNull<Self>) -> Result<DLTensor, DlpackError>;
}

impl Managed for DLManagedTensor {
    fn new(dl_tensor: DLTensor) -> Self {
        Self { dl_tensor, manager_ctx: std::ptr::null_mut(), deleter: Some(Exported::<Self>::delete) }
    }

    unsafe fn deleter(this: NonNull<Self>) -> Option<unsafe extern "C" fn(*mut Self)> {
        // SAFETY: the structure is valid, as the caller says.
        unsafe { (*this.as_ptr()).deleter }
    }

    unsafe fn tensor(this: NonNull<Self>) -> Result<DLTensor, DlpackError> {
        // SAFETY: as above.
        Ok(unsafe { (*this.as_ptr()).dl_tensor })
    }
}

impl Managed for DLManagedTensorVersioned {
    fn new(dl_tensor: DLTensor) -> Self {
        let version = DLPackVersion { major: MAJOR_VERSION, minor: MINOR_VERSION };
        let (manager_ctx, deleter) = (std::ptr::null_mut(), Some(Exported::<Self>::delete as _));
        Self { version, manager_ctx, deleter, flags: 0, dl_tensor }
    }

    unsafe fn deleter(this: NonNull<Self>) -> Option<unsafe extern "C" fn(*mut Self)> {
        // SAFETY: the fields up to the flags are at these places in all versions, so no other is touched.
        unsafe { (*this.as_ptr()).deleter }
    }

    unsafe fn tensor(this: NonNull<Self>) -> Result<DLTensor, DlpackError> {
        // SAFETY: the version is at this place in all versions.
        let version = unsafe { (*this.as_ptr()).version };
        if version.major != MAJOR_VERSION {
            return Err(DlpackError::Version(version));
        }
        // SAFETY: the major version is that of this layout.
        let (flags, tensor) = unsafe { ((*this.as_ptr()).flags, (*this.as_ptr()).dl_tensor) };
        if flags & READ_ONLY != 0 {
            return Err(DlpackError::ReadOnly);
        }
        Ok(tensor)
    }
}

/// A tensor of another library, whose deleter is called when this value is dropped.
struct Owned<M: Managed>(NonNull<M>);

// SAFETY: only the deleter is used after the import, and whoever imports says that any thread may call it.
unsafe impl<M: Managed> Send for Owned<M> {}
// SAFETY: nothing is done through a shared reference.
unsafe impl<M: Managed> Sync for Owned<M> {}

impl<M: Managed> Drop for Owned<M> {
    fn drop(&mut self) {
        // SAFETY: the structure is valid until its deleter is called, which nobody else does.
        if let Some(delete) = unsafe { M::deleter(self.0) } {
            // SAFETY: as above.
            unsafe { delete(self.0.as_ptr()) };
        }
    }
}

/// Takes a tensor that was handed over.
///
/// # Safety
/// As for [`import`].
unsafe fn import_owned<M: Managed>(device: &CudaDevice, owned: Owned<M>) -> Result<DeviceTensor, DlpackError> {
    // SAFETY: the structure is valid, as the caller says.
    let tensor = unsafe { M::tensor(owned.0) }?;
    let (found, wanted) = (tensor.device, device.number());
    let here = found.device_type == CUDA && i64::from(found.device_id) == i64::from(wanted);
    if !here && found.device_type != CUDA_MANAGED {
        return Err(DlpackError::Device { found, wanted });
    }
    let dtype = DType::ALL.into_iter().find(|dtype| data_type(*dtype) == tensor.dtype);
    let dtype = dtype.ok_or(DlpackError::Type(tensor.dtype))?;
    let ndim = usize::try_from(tensor.ndim).map_err(|_| DlpackError::Dimensions(tensor.ndim))?;
    // SAFETY: the shape has this many sizes, as the caller says.
    let sizes = unsafe { numbers(tensor.shape, ndim) }.ok_or(DlpackError::Null("shape"))?;
    let (shape, bytes) = bytes(dtype, &sizes).ok_or_else(|| DlpackError::Shape(sizes.clone()))?;
    // SAFETY: the strides are null or have this many distances, as the caller says.
    if let Some(strides) = unsafe { numbers(tensor.strides, ndim) }
        && !is_compact(&sizes, &strides)
    {
        return Err(DlpackError::Strides { shape: sizes, strides });
    }
    let address = match bytes {
        0 => 0,
        _ if tensor.data.is_null() => return Err(DlpackError::Null("data")),
        _ => (tensor.data as u64).checked_add(tensor.byte_offset).ok_or(DlpackError::Offset(tensor.byte_offset))?,
    };
    // SAFETY: the address is that of all bytes of the shape, which are adjacent; the owner keeps them until it is dropped. The rest is as the caller says.
    let memory = unsafe { CudaMemory::from_raw(device, address, bytes, Box::new(owned)) };
    Ok(DeviceTensor::new(dtype, shape, Box::new(memory)).expect("the bytes were counted from the shape"))
}

/// A tensor of ours at another library. The structure is first, so its address is that of the whole.
#[repr(C)]
struct Exported<M> {
    managed: M,
    // Vectors and not boxes, because `managed` points into them: a box that moves has no other pointers.
    shape: Vec<i64>,
    strides: Vec<i64>,
    /// Keeps the memory.
    tensor: DeviceTensor,
}

impl<M: Managed> Exported<M> {
    fn of(tensor: DeviceTensor) -> Result<NonNull<M>, DlpackError> {
        let memory = tensor.memory();
        let Some(cuda) = (memory as &dyn Any).downcast_ref::<CudaMemory>() else {
            return Err(DlpackError::Foreign(format!("{memory:?}")));
        };
        let sizes = tensor.shape().iter().map(|size| i64::try_from(*size).unwrap_or(-1));
        let mut shape: Vec<i64> = sizes.collect();
        if shape.contains(&-1) {
            return Err(DlpackError::Shape(shape));
        }
        let mut strides = compact_strides(&shape);
        let dl_tensor = DLTensor {
            data: cuda.address() as *mut c_void,
            device: DLDevice { device_type: CUDA, device_id: cuda.device().number().cast_signed() },
            ndim: i32::try_from(shape.len()).map_err(|_| DlpackError::Shape(shape.clone()))?,
            dtype: data_type(tensor.dtype()),
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        let exported = Box::new(Self { managed: M::new(dl_tensor), shape, strides, tensor });
        Ok(NonNull::from(Box::leak(exported)).cast())
    }

    /// The deleter.
    unsafe extern "C" fn delete(managed: *mut M) {
        // SAFETY: this function is the deleter of structures that `of` has made only, at the address of their box, and is called once for each.
        drop(unsafe { Box::from_raw(managed.cast::<Self>()) });
    }
}

/// Returns the numbers at a pointer, or `None` if it is null and there should be some.
///
/// # Safety
/// A pointer that is not null must point to this many numbers.
unsafe fn numbers(at: *const i64, count: usize) -> Option<Vec<i64>> {
    match (count, at.is_null()) {
        (0, _) => Some(Vec::new()),
        (_, true) => None,
        // SAFETY: as the caller says.
        _ => Some(unsafe { std::slice::from_raw_parts(at, count) }.to_vec()),
    }
}

/// Returns the shape and its number of bytes.
fn bytes(dtype: DType, sizes: &[i64]) -> Option<(Vec<usize>, usize)> {
    let shape = sizes.iter().map(|size| usize::try_from(*size).ok()).collect::<Option<Vec<_>>>()?;
    // Zeros are applied last: [huge, huge, 0] has no bytes, but those of its rows could not be counted.
    let whole = shape.iter().filter(|size| **size > 0).try_fold(dtype.size(), |all, size| all.checked_mul(*size))?;
    let bytes = if shape.contains(&0) { 0 } else { whole };
    Some((shape, bytes))
}

/// Returns `true` if the elements are adjacent in row-major order. Over a dimension of size 1 no step is made, so its stride may be any.
fn is_compact(shape: &[i64], strides: &[i64]) -> bool {
    let compact = compact_strides(shape);
    shape.contains(&0) || (0..shape.len()).all(|dim| shape[dim] == 1 || strides[dim] == compact[dim])
}

/// Returns the strides of a row-major tensor. Those of a shape without elements have no meaning.
fn compact_strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = shape.to_vec();
    let mut step = 1_i64;
    for (stride, size) in strides.iter_mut().zip(shape).rev() {
        *stride = step;
        step = step.saturating_mul(*size);
    }
    strides
}

/// Returns DLPack's name of a type.
fn data_type(dtype: DType) -> DLDataType {
    let code = match dtype {
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => 0,
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => 1,
        DType::F16 | DType::F32 | DType::F64 => 2,
        DType::Bf16 => 4,
        DType::Bool => 6,
    };
    DLDataType { code, bits: 8 * dtype.size() as u8, lanes: 1 }
}

/// Returns the name of a device.
fn name(device: DLDevice) -> String {
    let id = device.device_id;
    match device.device_type {
        1 => Device::Cpu.to_string(),
        CUDA => format!("cuda:{id}"),
        3 => "the host, in pinned memory".to_owned(),
        kind => format!("device {id} of DLPack's type {kind}"),
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn the_structures_have_the_layout_of_dlpack_h() {
        assert_eq!((size_of::<DLDevice>(), size_of::<DLDataType>(), size_of::<DLPackVersion>()), (8, 4, 8));
        assert_eq!(
            (offset_of!(DLDevice, device_id), offset_of!(DLDataType, bits), offset_of!(DLDataType, lanes)),
            (4, 1, 2)
        );
        let tensor = [
            offset_of!(DLTensor, data),
            offset_of!(DLTensor, device),
            offset_of!(DLTensor, ndim),
            offset_of!(DLTensor, dtype),
            offset_of!(DLTensor, shape),
            offset_of!(DLTensor, strides),
            offset_of!(DLTensor, byte_offset),
            size_of::<DLTensor>(),
        ];
        assert_eq!(tensor, [0, 8, 16, 20, 24, 32, 40, 48]);
        let managed = [
            offset_of!(DLManagedTensor, dl_tensor),
            offset_of!(DLManagedTensor, manager_ctx),
            offset_of!(DLManagedTensor, deleter),
            size_of::<DLManagedTensor>(),
        ];
        assert_eq!(managed, [0, 48, 56, 64]);
        let versioned = [
            offset_of!(DLManagedTensorVersioned, version),
            offset_of!(DLManagedTensorVersioned, manager_ctx),
            offset_of!(DLManagedTensorVersioned, deleter),
            offset_of!(DLManagedTensorVersioned, flags),
            offset_of!(DLManagedTensorVersioned, dl_tensor),
            size_of::<DLManagedTensorVersioned>(),
        ];
        assert_eq!(versioned, [0, 8, 16, 24, 32, 80]);
    }

    #[test]
    fn each_type_has_a_name_of_its_own() {
        let names = DType::ALL.map(data_type);
        for (at, name) in names.iter().enumerate() {
            assert_eq!(names.iter().position(|other| other == name), Some(at));
            assert_eq!(usize::from(name.bits), 8 * DType::ALL[at].size());
        }
    }

    #[test]
    fn strides_are_compact_if_each_step_reaches_the_next_element() {
        for (shape, strides, compact) in [
            (&[][..], &[][..], true),
            (&[5], &[1], true),
            (&[2, 3], &[3, 1], true),
            (&[2, 3], &[1, 2], false),
            (&[2, 3], &[4, 1], false),
            (&[3, 1, 2], &[2, 77, 1], true),
            (&[1, 1], &[0, 0], true),
            (&[2, 0, 3], &[9, 9, 9], true),
            (&[4], &[2], false),
            (&[4], &[-1], false),
            (&[2, 3], &[0, 1], false),
        ] {
            assert_eq!(is_compact(shape, strides), compact, "{shape:?} {strides:?}");
        }
    }
}
