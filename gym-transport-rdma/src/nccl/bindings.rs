//! The functions of NCCL and of CUDA's driver that communicators need.
//!
//! Sources: `nccl.h` of NCCL 2.19, the oldest version that is supported, and `cuda.h` of CUDA 12. Later versions keep these signatures.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::nccl::library::{NcclResult, RawId, functions};

/// `ncclComm_t`.
pub(super) type RawComm = *mut c_void;
/// `CUstream`, `CUevent` and `CUcontext` are pointers to structures without members.
pub(super) type Handle = *mut c_void;
/// `CUdeviceptr`.
pub(super) type Address = u64;
/// `CUresult`, a C enum; 0 is success.
pub(super) type CudaResult = c_int;

/// `ncclInProgress`.
pub(super) const IN_PROGRESS: NcclResult = 7;
/// `CUDA_ERROR_NOT_READY`.
pub(super) const NOT_READY: CudaResult = 600;

/// `ncclConfig_t` as of NCCL 2.17. NCCL reads `size` bytes and fills in what later versions have added.
#[repr(C)]
pub(super) struct RawConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl RawConfig {
    /// Returns NCCL's defaults, without blocking calls.
    pub(super) fn non_blocking() -> Self {
        // `NCCL_CONFIG_UNDEF_INT`.
        let undefined = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_703,
            blocking: 0,
            cga_cluster_size: undefined,
            min_ctas: undefined,
            max_ctas: undefined,
            net_name: std::ptr::null(),
            split_share: undefined,
        }
    }
}

functions! {
    /// The functions that communicators call.
    CommunicatorFunctions {
        get_last_error: "ncclGetLastError"(RawComm) -> *const c_char;
        init: "ncclCommInitRankConfig"(*mut RawComm, c_int, RawId, c_int, *mut RawConfig) -> NcclResult;
        abort: "ncclCommAbort"(RawComm) -> NcclResult;
        async_error: "ncclCommGetAsyncError"(RawComm, *mut NcclResult) -> NcclResult;
        all_reduce: "ncclAllReduce"(Address, Address, usize, c_int, c_int, RawComm, Handle) -> NcclResult;
        broadcast: "ncclBroadcast"(Address, Address, usize, c_int, c_int, RawComm, Handle) -> NcclResult;
        all_gather: "ncclAllGather"(Address, Address, usize, c_int, RawComm, Handle) -> NcclResult;
        reduce: "ncclReduce"(Address, Address, usize, c_int, c_int, c_int, RawComm, Handle) -> NcclResult;
        send: "ncclSend"(Address, usize, c_int, c_int, RawComm, Handle) -> NcclResult;
        receive: "ncclRecv"(Address, usize, c_int, c_int, RawComm, Handle) -> NcclResult;
        group_start: "ncclGroupStart"() -> NcclResult;
        group_end: "ncclGroupEnd"() -> NcclResult;
        reduce_scatter: "ncclReduceScatter"(Address, Address, usize, c_int, c_int, RawComm, Handle) -> NcclResult;
    }
}

functions! {
    /// The driver's functions. No CUDA runtime is needed.
    CudaFunctions {
        init: "cuInit"(c_uint) -> CudaResult;
        device: "cuDeviceGet"(*mut c_int, c_int) -> CudaResult;
        name: "cuDeviceGetName"(*mut c_char, c_int, c_int) -> CudaResult;
        memory: "cuMemGetInfo_v2"(*mut usize, *mut usize) -> CudaResult;
        uuid: "cuDeviceGetUuid_v2"(*mut [u8; 16], c_int) -> CudaResult;
        retain_context: "cuDevicePrimaryCtxRetain"(*mut Handle, c_int) -> CudaResult;
        set_context: "cuCtxSetCurrent"(Handle) -> CudaResult;
        allocate: "cuMemAlloc_v2"(*mut Address, usize) -> CudaResult;
        free: "cuMemFree_v2"(Address) -> CudaResult;
        upload: "cuMemcpyHtoD_v2"(Address, *const c_void, usize) -> CudaResult;
        download: "cuMemcpyDtoH_v2"(*mut c_void, Address, usize) -> CudaResult;
        copy: "cuMemcpyDtoD_v2"(Address, Address, usize) -> CudaResult;
        create_stream: "cuStreamCreate"(*mut Handle, c_uint) -> CudaResult;
        create_event: "cuEventCreate"(*mut Handle, c_uint) -> CudaResult;
        record_event: "cuEventRecord"(Handle, Handle) -> CudaResult;
        query_event: "cuEventQuery"(Handle) -> CudaResult;
        destroy_event: "cuEventDestroy_v2"(Handle) -> CudaResult;
        error_string: "cuGetErrorString"(CudaResult, *mut *const c_char) -> CudaResult;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_layout_of_nccl_2_17() {
        assert_eq!(size_of::<RawConfig>(), 48);
        assert_eq!(std::mem::offset_of!(RawConfig, blocking), 16);
        assert_eq!(std::mem::offset_of!(RawConfig, net_name), 32);
        assert_eq!(std::mem::offset_of!(RawConfig, split_share), 40);
    }
}
