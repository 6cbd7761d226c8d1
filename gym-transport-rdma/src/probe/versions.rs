//! The two calls into foreign libraries: their version functions.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::path::Path;

use libloading::Library;

/// NCCL's version as `2.27.3`.
pub(crate) fn nccl_version(library: &Path) -> Result<String, String> {
    let code = version(library, b"ncclGetVersion\0")?;
    // Since 2.9 the code is major * 10000 + minor * 100 + patch; before, major * 1000.
    let (major, rest) = if code >= 10_000 { (code / 10_000, code % 10_000) } else { (code / 1_000, code % 1_000) };
    Ok(format!("{major}.{}.{}", rest / 100, rest % 100))
}

/// The newest CUDA that the driver serves, as `12.8`.
pub(crate) fn cuda_driver_version(library: &Path) -> Result<String, String> {
    let code = version(library, b"cuDriverGetVersion\0")?;
    Ok(format!("{}.{}", code / 1_000, code % 1_000 / 10))
}

/// `ncclResult_t ncclGetVersion(int *)` and `CUresult cuDriverGetVersion(int *)` have one shape; both results are C
/// enums, passed as `int`, with 0 for success.
fn version(library: &Path, symbol: &'static [u8]) -> Result<i32, String> {
    // SAFETY: loading runs the library's constructors. Callers pass a file found under the library's own soname in a
    // folder of the dynamic loader or one that the user named, so this is the code that any user of NCCL or CUDA in
    // this process would run; neither touches signal handlers or libc, and both may be loaded from any thread.
    let library = unsafe { Library::new(library) }.map_err(|error| words(&error))?;
    // SAFETY: the two symbols that this module asks for have this signature in every version of their headers.
    let function = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(symbol) };
    let function = match function {
        Ok(function) => *function,
        Err(error) => {
            let message = words(&error);
            // Not unloaded on this path either: constructors may have left threads or exit handlers behind.
            std::mem::forget(library);
            return Err(message);
        }
    };
    let mut code: c_int = 0;
    // SAFETY: the library stays loaded for ever (forgotten below, so even an exit handler finds its code), and `code`
    // is a valid, exclusive place for one int during the call. Both functions work without a device or earlier call.
    let result = unsafe { function(&raw mut code) };
    std::mem::forget(library);
    if result == 0 { Ok(code) } else { Err(format!("its version function failed with code {result}")) }
}

/// The loader's own words are the source of libloading's.
fn words(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
