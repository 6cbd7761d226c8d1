//! The memory of a segment in this process. The `unsafe` of the crate is here, and where its bytes are accessed.

use std::fmt;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::io::Result;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A whole file, mapped and shared. Its file cannot shrink, which its seals ensure: each byte stays accessible.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread. Words are atomic, and `bytes` and `bytes_mut` have contracts about others.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a file that has, and keeps, at least this many bytes.
    pub(crate) fn new(file: impl AsFd, bytes: usize) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so that no other memory is affected.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0)? };
        let base = NonNull::new(base.cast::<u8>()).expect("the kernel maps nothing at 0 unless asked to");
        Ok(Self { base, bytes })
    }

    /// Returns the 32-bit word at an offset.
    ///
    /// # Panics
    /// If it is outside the mapping, or not aligned.
    pub(crate) fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: `place` has checked bounds and alignment, and the memory is mapped as long as `self` lives. The
        // layout has a word here, which all ranks access as this atomic type only.
        unsafe { AtomicU32::from_ptr(self.place(at, 4, 4).cast().as_ptr()) }
    }

    /// Returns the 64-bit word at an offset.
    ///
    /// # Panics
    /// If it is outside the mapping, or not aligned.
    pub(crate) fn long_word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: as in `word`.
        unsafe { AtomicU64::from_ptr(self.place(at, 8, 8).cast().as_ptr()) }
    }

    /// Returns bytes of the mapping, to read.
    ///
    /// # Panics
    /// If they are outside the mapping.
    ///
    /// # Safety
    /// As long as the slice lives, nobody writes these bytes, in any process. No word is among them.
    pub(crate) unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        let first = self.place(range.start, range.len(), 1);
        // SAFETY: `place` has checked the bounds, and the memory is mapped as long as `self` lives. Every bit pattern
        // is a byte, and memory of a file is initialized. The caller vouches that nobody writes it.
        unsafe { std::slice::from_raw_parts(first.as_ptr(), range.len()) }
    }

    /// Returns bytes of the mapping, to read and write.
    ///
    /// # Panics
    /// If they are outside the mapping.
    ///
    /// # Safety
    /// As long as the slice lives, nobody else reads or writes these bytes, in any process. No word is among them.
    #[expect(clippy::mut_from_ref, reason = "the memory is shared; the contract above excludes others")]
    pub(crate) unsafe fn bytes_mut(&self, range: Range<usize>) -> &mut [u8] {
        let first = self.place(range.start, range.len(), 1);
        // SAFETY: as in `bytes`, and the caller vouches that nobody else accesses it.
        unsafe { std::slice::from_raw_parts_mut(first.as_ptr(), range.len()) }
    }

    fn place(&self, at: usize, bytes: usize, align: usize) -> NonNull<u8> {
        let fits = at.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(fits && at.is_multiple_of(align), "{bytes} bytes at {at} of a mapping of {}", self.bytes);
        // SAFETY: the offset is within the mapping, which is one object.
        unsafe { self.base.add(at) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` has mapped these bytes, and every reference into them borrows `self`.
        // It fails only for a wrong address.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({} bytes)", self.bytes)
    }
}
