//! The functions of the library.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::path::Path;

use libloading::Library;

use crate::nccl::elf::check_whole;
use crate::nccl::{NcclError, NcclVersion, UNIQUE_ID_BYTES, UniqueId};

/// `ncclNcclResultt` is a C enum, passed as `int`; 0 is success.
pub(super) type NcclResult = c_int;

/// `typedef struct { char internal[NCCL_UNIQUE_ID_BYTES]; } ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawId {
    pub(super) internal: [c_char; UNIQUE_ID_BYTES],
}

/// The functions, whose code stays loaded for good.
#[derive(Clone, Copy)]
pub(super) struct Functions {
    get_version: unsafe extern "C" fn(*mut c_int) -> NcclResult,
    get_error_string: unsafe extern "C" fn(NcclResult) -> *const c_char,
    get_unique_id: unsafe extern "C" fn(*mut RawId) -> NcclResult,
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Functions")
    }
}

impl Functions {
    pub(super) fn load(path: &Path) -> Result<Self, NcclError> {
        check_whole(path).map_err(|why| NcclError::Load { path: path.to_owned(), why })?;
        // SAFETY: loading runs the library's constructors. Callers pass a file with NCCL's own soname, in a directory of the dynamic loader or of the
        // user. Any user of NCCL in this process would run the same code. NCCL changes neither signal handlers nor libc, and can be loaded on any thread.
        let loaded = unsafe { Library::new(path) };
        let library = loaded.map_err(|error| NcclError::Load { path: path.to_owned(), why: loader_message(&error) })?;
        let not_nccl = |function| NcclError::NotNccl { path: path.to_owned(), function };
        // SAFETY: the symbols have these signatures in `nccl.h` of all supported versions.
        let functions = unsafe {
            (
                library.get(b"ncclGetVersion\0").map(|function| *function),
                library.get(b"ncclGetErrorString\0").map(|function| *function),
                library.get(b"ncclGetUniqueId\0").map(|function| *function),
            )
        };
        // Not unloaded on any path: constructors may have left threads or exit handlers behind, and the functions outlive this call.
        std::mem::forget(library);
        Ok(Self {
            get_version: functions.0.map_err(|_| not_nccl("ncclGetVersion"))?,
            get_error_string: functions.1.map_err(|_| not_nccl("ncclGetErrorString"))?,
            get_unique_id: functions.2.map_err(|_| not_nccl("ncclGetUniqueId"))?,
        })
    }

    pub(super) fn version(&self) -> Result<NcclVersion, NcclError> {
        let mut code: c_int = 0;
        // SAFETY: the library stays loaded. `code` is a valid, exclusive place for one int during the call, which needs neither a device nor an earlier call.
        let result = unsafe { (self.get_version)(&raw mut code) };
        self.check("ncclGetVersion", result)?;
        Ok(NcclVersion::from_code(u32::try_from(code).unwrap_or(0)))
    }

    pub(super) fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = RawId { internal: [0; UNIQUE_ID_BYTES] };
        // SAFETY: the library stays loaded. `id` is a valid, exclusive place for one `ncclUniqueId` during the call, which copies the id into it.
        let result = unsafe { (self.get_unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", result)?;
        Ok(UniqueId(id.internal.map(|byte| byte.to_ne_bytes()[0])))
    }

    pub(super) fn check(&self, function: &'static str, code: NcclResult) -> Result<(), NcclError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library stays loaded. The function takes any code, and returns a static text or null.
        let text = unsafe { (self.get_error_string)(code) };
        let text = if text.is_null() {
            "no text".to_owned()
        } else {
            // SAFETY: a C string that lives as long as the library.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(NcclError::Failed { function, code, text })
    }
}

/// Returns the loader's own message, which is the source of libloading's error.
pub(crate) fn loader_message(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
