//! Whether libc's memory functions are still what they were: libucm writes jumps over their first bytes, to see memory
//! go that it has registered. That meets other allocators' and profilers' own patches, so it is reported.
#![allow(unsafe_code)]

use std::ffi::CStr;

const FUNCTIONS: [&CStr; 8] = [c"mmap", c"munmap", c"mremap", c"madvise", c"brk", c"sbrk", c"shmat", c"shmdt"];
/// Long enough for every jump that is written: 14 bytes on x86_64, 16 on aarch64.
const FIRST_BYTES: usize = 16;

/// The first bytes of the functions at one moment.
pub(super) struct Beginnings([Option<[u8; FIRST_BYTES]>; FUNCTIONS.len()]);

impl Beginnings {
    pub(super) fn now() -> Self {
        Self(FUNCTIONS.map(first_bytes))
    }

    /// The names of those that have changed since.
    pub(super) fn patched(&self) -> Vec<&'static str> {
        let now = Self::now();
        let changed = self.0.iter().zip(&now.0).zip(FUNCTIONS).filter(|((before, after), _)| before != after);
        changed.map(|(_, name)| name.to_str().expect("our own constant")).collect()
    }
}

fn first_bytes(name: &CStr) -> Option<[u8; FIRST_BYTES]> {
    // SAFETY: a look-up by name in what is loaded; it changes nothing.
    let code = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    // SAFETY: it is the address of a function in libc's text, which stays mapped and is readable; text goes on for more
    // than 16 bytes behind each of these. Volatile, because a patch is not a write that the compiler knows of.
    (!code.is_null()).then(|| unsafe { std::ptr::read_volatile(code.cast()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_is_found_and_a_changed_one_is_named() {
        let mut before = Beginnings::now();
        assert!(before.0.iter().all(Option::is_some));
        assert_eq!(before.patched(), [""; 0]);
        before.0[1] = Some([0xCC; FIRST_BYTES]);
        assert_eq!(before.patched(), ["munmap"]);
    }
}
