//! Whether the file of a library is whole.
//!
//! The dynamic loader maps what the headers promise, and the process dies (SIGBUS) where the file is shorter: a download that was cut off, a full disk.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Most program headers that a library has; NVIDIA's have about ten.
const HEADERS_MAX: u64 = 256;

/// Rejects a file that is shorter than its ELF headers say. What is no 64-bit ELF file, or no file with a path, is left to the loader, which says so.
pub(super) fn check_whole(path: &Path) -> Result<(), String> {
    if path.components().count() < 2 {
        return Ok(());
    }
    let Ok(file) = File::open(path) else { return Ok(()) };
    let Ok(length) = file.metadata().map(|metadata| metadata.len()) else { return Ok(()) };
    match needed(&file) {
        Some(needed) if needed > length => {
            Err(format!("the file has {length} bytes, and its headers say {needed}: it was cut off; install it again"))
        }
        _ => Ok(()),
    }
}

/// Returns the length that the program headers need; `None` if there are none to read. Source: `elf.h`, ELF64, little-endian.
fn needed(file: &File) -> Option<u64> {
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0).ok()?;
    if header[..6] != [0x7f, b'E', b'L', b'F', 2, 1] {
        return None;
    }
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    let (at, size, count) = (number(&header[32..40]), number(&header[54..56]), number(&header[56..58]));
    let mut needed = at.checked_add(size * count)?;
    for index in 0..count.min(HEADERS_MAX) {
        let mut entry = [0; 56];
        // A header that is not there is beyond the end.
        if file.read_exact_at(&mut entry, at.checked_add(index * size)?).is_err() {
            return Some(needed);
        }
        needed = needed.max(number(&entry[8..16]).saturating_add(number(&entry[32..40])));
    }
    Some(needed)
}
