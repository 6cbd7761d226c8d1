//! Calls the version functions of CUDA and NCCL.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::path::Path;

use libloading::Library;

/// Returns NCCL's version, such as `2.27.3`.
///
/// # Errors
/// If the library cannot be loaded, or its version function is missing or fails.
pub(crate) fn nccl_version(library: &Path) -> Result<String, String> {
    let code = version(library, b"ncclGetVersion\0")?;
    // Since 2.9 the code is major * 10000 + minor * 100 + patch; before, major * 1000.
    let (major, rest) = if code >= 10_000 { (code / 10_000, code % 10_000) } else { (code / 1_000, code % 1_000) };
    Ok(format!("{major}.{}.{}", rest / 100, rest % 100))
}

/// Returns the newest CUDA version that the driver supports, such as `12.8`.
///
/// # Errors
/// If the library cannot be loaded, or its version function is missing or fails.
pub(crate) fn cuda_driver_version(library: &Path) -> Result<String, String> {
    let code = version(library, b"cuDriverGetVersion\0")?;
    Ok(format!("{}.{}", code / 1_000, code % 1_000 / 10))
}

/// Calls a version function. `ncclResult_t ncclGetVersion(int *)` and `CUresult cuDriverGetVersion(int *)` have the
/// same form. Both results are C enums, passed as `int`, with 0 for success.
fn version(library: &Path, symbol: &'static [u8]) -> Result<i32, String> {
    // SAFETY: loading runs the library's constructors. Callers pass a file with the library's own soname, in a
    // directory of the dynamic loader or of the user. Any user of NCCL or CUDA in this process would run the same code.
    // Neither library changes signal handlers or libc, and both can be loaded on any thread.
    let library = unsafe { Library::new(library) }.map_err(|error| loader_message(&error))?;
    // SAFETY: both symbols have this signature in every version of their headers.
    let function = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(symbol) };
    let function = match function {
        Ok(function) => *function,
        Err(error) => {
            let message = loader_message(&error);
            // Not unloaded on this path either, because constructors may have left threads or exit handlers behind.
            std::mem::forget(library);
            return Err(message);
        }
    };
    let mut code: c_int = 0;
    // SAFETY: the library stays loaded permanently (forgotten below), so even an exit handler finds its code. `code` is
    // a valid, exclusive place for one int during the call. Both functions work without a device or an earlier call.
    let result = unsafe { function(&raw mut code) };
    std::mem::forget(library);
    if result == 0 { Ok(code) } else { Err(format!("its version function failed with code {result}")) }
}

/// Returns the loader's own message, which is the source of libloading's error.
fn loader_message(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
