//! Calls the version function of CUDA.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::path::Path;

use libloading::Library;

use crate::machine::loader_message;

/// Returns the newest CUDA version that the driver supports, such as `12.8`.
///
/// # Errors
/// If the library cannot be loaded, or its version function is missing or fails.
pub(crate) fn cuda_driver_version(library: &Path) -> Result<String, String> {
    let code = version(library)?;
    Ok(format!("{}.{}", code / 1_000, code % 1_000 / 10))
}

/// Calls `CUresult cuDriverGetVersion(int *)`. The result is a C enum, passed as `int`, with 0 for success.
fn version(library: &Path) -> Result<i32, String> {
    // SAFETY: loading runs the library's constructors. Callers pass a file with the library's own soname, in a
    // directory of the dynamic loader or of the user. Any user of CUDA in this process would run the same code.
    // It changes neither signal handlers nor libc, and can be loaded on any thread.
    let library = unsafe { Library::new(library) }.map_err(|error| loader_message(&error))?;
    // SAFETY: the symbol has this signature in every version of its header.
    let function = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"cuDriverGetVersion\0") };
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
    // a valid, exclusive place for one int during the call. It works without a device or an earlier call.
    let result = unsafe { function(&raw mut code) };
    std::mem::forget(library);
    if result == 0 { Ok(code) } else { Err(format!("its version function failed with code {result}")) }
}
