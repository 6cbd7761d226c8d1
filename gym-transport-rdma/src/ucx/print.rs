//! Captures descriptions that UCX can only print.

use std::ffi::c_char;

/// Runs a function that prints into a C stream, and returns its output. `None` if there is no memory.
pub(super) fn printed(print: impl FnOnce(*mut libc::FILE)) -> Option<String> {
    let mut text: *mut c_char = std::ptr::null_mut();
    let mut length: libc::size_t = 0;
    // SAFETY: two valid places, which outlive the stream, because it is closed below.
    let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut length) };
    if stream.is_null() {
        return None;
    }
    print(stream);
    // SAFETY: opened above and closed once. Closing sets `text` and `length`.
    unsafe { libc::fclose(stream) };
    if text.is_null() {
        return None;
    }
    // SAFETY: the buffer holds `length` bytes at `text`, and belongs to us since the stream is closed.
    let copy = String::from_utf8_lossy(unsafe { std::slice::from_raw_parts(text.cast(), length) }).into_owned();
    // SAFETY: allocated by the stream with malloc and freed once.
    unsafe { libc::free(text.cast()) };
    Some(copy)
}
