//! Detects patches of libc's memory functions.
//!
//! libucm writes jumps over the first bytes of these functions, to notice when registered memory is unmapped. The
//! patches can conflict with those of other allocators and profilers, so they are reported.
#![allow(unsafe_code)]

use std::ffi::CStr;

const FUNCTIONS: [&CStr; 8] = [c"mmap", c"munmap", c"mremap", c"madvise", c"brk", c"sbrk", c"shmat", c"shmdt"];
/// At least the length of every jump that is written: 14 bytes on x86_64, 16 on aarch64.
const FIRST_BYTES: usize = 16;

/// The first bytes of the functions at one point in time.
pub(super) struct FunctionStarts([Option<[u8; FIRST_BYTES]>; FUNCTIONS.len()]);

impl FunctionStarts {
    pub(super) fn now() -> Self {
        Self(FUNCTIONS.map(first_bytes))
    }

    /// Returns the names of the functions that have changed since.
    pub(super) fn patched(&self) -> Vec<&'static str> {
        let now = Self::now();
        let changed = self.0.iter().zip(&now.0).zip(FUNCTIONS).filter(|((before, after), _)| before != after);
        changed.map(|(_, name)| name.to_str().expect("our own constant")).collect()
    }
}

fn first_bytes(name: &CStr) -> Option<[u8; FIRST_BYTES]> {
    // SAFETY: looks a name up among the loaded symbols, without side effects.
    let code = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    // SAFETY: the address of a function in libc's text, which stays mapped and readable. At least 16 bytes of text
    // follow each of these addresses. The read is volatile, because the compiler does not see the patch as a write.
    (!code.is_null()).then(|| unsafe { std::ptr::read_volatile(code.cast()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_is_found_and_a_changed_one_is_named() {
        let mut before = FunctionStarts::now();
        assert!(before.0.iter().all(Option::is_some));
        assert_eq!(before.patched(), [""; 0]);
        before.0[1] = Some([0xCC; FIRST_BYTES]);
        assert_eq!(before.patched(), ["munmap"]);
    }
}
