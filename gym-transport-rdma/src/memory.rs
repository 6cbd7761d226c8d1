//! Pool of registered memory: payloads are received into its buffers, and senders can write into them to avoid a copy.
//!
//! [`Pool::take`] can be called on any thread and never waits. The fabric registers a buffer when it first uses it. The
//! buffer stays registered when it returns to the pool, and serves later requests of its size. Beyond the limit, the
//! pool returns plain memory and counts it.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use gym_core::{Code, Error, Result};
use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Limits of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolOptions {
    /// Maximum bytes in the pool, in use or free. Beyond it, buffers are plain memory.
    pub bytes_max: usize,
    /// Maximum length of a buffer in the pool. A longer buffer is plain memory.
    pub buffer_bytes_max: usize,
}

impl Default for PoolOptions {
    /// 1 GiB, in buffers of up to 256 MiB. The system provides the memory when it is first written.
    fn default() -> Self {
        Self { bytes_max: 1 << 30, buffer_bytes_max: 256 << 20 }
    }
}

/// Counters of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Bytes in the pool, in use or free.
    pub bytes_kept: usize,
    /// Free bytes among them.
    pub bytes_free: usize,
    /// Buffers returned by [`Pool::take`] that had been used before.
    pub reused: u64,
    /// Buffers that [`Pool::take`] added to the pool.
    pub fresh: u64,
    /// Buffers that were plain memory.
    pub plain: u64,
}

/// Pool of buffers, which return to it when they are dropped. Cheap to clone.
#[derive(Clone)]
pub struct Pool(Arc<PoolShared>);

struct PoolShared {
    options: PoolOptions,
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    /// Free regions by size.
    free: BTreeMap<usize, Vec<Region>>,
    /// Length of every region of the pool, by its start.
    kept: BTreeMap<usize, usize>,
    /// Regions removed in favor of other sizes. The fabric frees them, because it may have registered them.
    retired: Vec<Region>,
    /// The fabric has ended, so returned regions are freed.
    closed: bool,
    stats: PoolStats,
}

impl Pool {
    pub(crate) fn new(options: PoolOptions) -> Self {
        Self(Arc::new(PoolShared { options, state: Mutex::default() }))
    }

    /// Returns a page-aligned buffer of this length; never waits. Its contents are unspecified: zeros, or bytes of an
    /// earlier user of this pool.
    ///
    /// # Errors
    /// `ResourceExhausted` if the system has no memory.
    pub fn take(&self, len: usize) -> Result<Buffer> {
        let size = size_of_class(len);
        let mut state = self.0.state.lock();
        if size > self.0.options.buffer_bytes_max || state.closed {
            state.stats.plain += 1;
            drop(state);
            return Ok(Buffer { region: Some(Region::map(size)?), len, owner: None });
        }
        if let Some(region) = state.free.get_mut(&size).and_then(Vec::pop) {
            state.stats.reused += 1;
            state.stats.bytes_free -= size;
            return Ok(Buffer { region: Some(region), len, owner: Some(Arc::clone(&self.0)) });
        }
        if state.stats.bytes_kept + size > self.0.options.bytes_max {
            state.stats.plain += 1;
            state.retire(size);
            drop(state);
            return Ok(Buffer { region: Some(Region::map(size)?), len, owner: None });
        }
        let region = Region::map(size)?;
        state.stats.fresh += 1;
        state.stats.bytes_kept += size;
        state.kept.insert(region.start.addr().get(), size);
        Ok(Buffer { region: Some(region), len, owner: Some(Arc::clone(&self.0)) })
    }

    /// Copies the bytes into a buffer of the pool.
    ///
    /// # Errors
    /// `ResourceExhausted` if the system has no memory.
    pub(crate) fn copy(&self, bytes: &[u8]) -> Result<Bytes> {
        let mut buffer = self.take(bytes.len())?;
        buffer.copy_from_slice(bytes);
        Ok(buffer.freeze())
    }

    /// Returns the counters.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.0.state.lock().stats
    }

    /// Returns the region of the pool that contains this address. The region stays mapped until [`Pool::retired`]
    /// returns it.
    pub(crate) fn region_of(&self, address: usize) -> Option<Range<usize>> {
        let state = self.0.state.lock();
        let (start, size) = state.kept.range(..=address).next_back()?;
        (address < start + size).then(|| *start..start + size)
    }

    /// Returns the regions that were removed from the pool. The caller unregisters them, then drops them.
    pub(crate) fn retired(&self) -> Vec<Region> {
        let mut state = self.0.state.lock();
        let retired = std::mem::take(&mut state.retired);
        for region in &retired {
            state.kept.remove(&region.start.addr().get());
            state.stats.bytes_kept -= region.size;
        }
        retired
    }

    /// Frees all free regions now and the others when they return. All registrations must have been dropped before.
    pub(crate) fn close(&self) {
        let mut state = self.0.state.lock();
        state.closed = true;
        state.stats.bytes_kept -= state.stats.bytes_free;
        state.stats.bytes_free = 0;
        let freed = (std::mem::take(&mut state.free), std::mem::take(&mut state.retired));
        drop(state);
        drop(freed);
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("options", &self.0.options).field("stats", &self.stats()).finish()
    }
}

impl PoolShared {
    fn return_region(&self, region: Region) {
        let mut state = self.state.lock();
        if state.closed {
            state.stats.bytes_kept -= region.size;
            drop(state);
            drop(region);
            return;
        }
        state.stats.bytes_free += region.size;
        state.free.entry(region.size).or_default().push(region);
    }
}

impl PoolState {
    /// Removes free regions of other sizes, so that a buffer of this size fits next time.
    fn retire(&mut self, wanted: usize) {
        let mut gained: usize = self.retired.iter().map(|region| region.size).sum();
        for regions in self.free.values_mut().rev() {
            while gained < wanted
                && let Some(region) = regions.pop()
            {
                gained += region.size;
                self.stats.bytes_free -= region.size;
                self.retired.push(region);
            }
        }
    }
}

/// Rounds up to a size class: four classes per doubling, in whole pages, so at most a quarter is unused.
fn size_of_class(len: usize) -> usize {
    const PAGE: usize = 4096;
    let step = (len.max(1).next_power_of_two() / 8).max(PAGE);
    len.max(1).checked_next_multiple_of(step).unwrap_or(len)
}

/// Pages that were mapped for one buffer.
pub(crate) struct Region {
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: a region is the only owner of its pages, which are plain memory and not bound to a thread.
unsafe impl Send for Region {}
// SAFETY: a shared region exposes only its address.
unsafe impl Sync for Region {}

impl Region {
    fn map(size: usize) -> Result<Self> {
        let refused = |what: &dyn fmt::Display| {
            Error::not_started(Code::ResourceExhausted, format!("map a buffer of {size} bytes: {what}"))
        };
        // SAFETY: maps new pages at an address that the kernel chooses, so it touches no existing mapping.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let start = start.map_err(|error| refused(&error))?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| refused(&"the kernel returned null"))?;
        // UCX receives addresses as integers, and the pool finds regions by address.
        start.as_ptr().expose_provenance();
        Ok(Self { start, size })
    }

    pub(crate) fn start(&self) -> usize {
        self.start.addr().get()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this size and unmapped once. No slice of it exists, because a buffer owns its
        // region. An error would mean that the region is not mapped, which is impossible.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.size) };
    }
}

/// A buffer with a single owner, which can write into it.
pub struct Buffer {
    /// `None` only during `drop`.
    region: Option<Region>,
    len: usize,
    /// The pool that the region returns to; `None` for plain memory.
    owner: Option<Arc<PoolShared>>,
}

impl Buffer {
    /// Makes the buffer shareable. The memory returns to the pool with the last slice of it.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }

    fn region(&self) -> &Region {
        self.region.as_ref().expect("only drop takes the region")
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the region is mapped, at least `len` bytes long, and initialized: the kernel maps zeroed pages.
        unsafe { std::slice::from_raw_parts(self.region().start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; this buffer is the only owner of the region.
        unsafe { std::slice::from_raw_parts_mut(self.region().start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let (Some(owner), Some(region)) = (self.owner.take(), self.region.take()) {
            owner.return_region(region);
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes{})", self.len, if self.owner.is_some() { "" } else { ", plain" })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pool(bytes_max: usize, buffer_bytes_max: usize) -> Pool {
        Pool::new(PoolOptions { bytes_max, buffer_bytes_max })
    }

    #[test]
    fn a_buffer_comes_back_with_the_last_slice_of_it() {
        let pool = pool(1 << 20, 1 << 20);
        let mut buffer = pool.take(10_000).unwrap();
        buffer[9_999] = 7;
        let start = buffer.as_ptr();
        let bytes = buffer.freeze();
        let slice = bytes.slice(9_990..);
        drop(bytes);
        assert_ne!(pool.take(10_000).unwrap().as_ptr(), start);
        assert_eq!(slice[9], 7);
        drop(slice);
        assert_eq!(pool.take(9_000).unwrap().as_ptr(), start, "the same class of size");
        assert_eq!(pool.stats().fresh, 2);
    }

    #[test]
    fn beyond_the_bound_memory_is_plain_and_unused_buffers_make_room() {
        let pool = pool(64 << 10, 64 << 10);
        let held = pool.take(32 << 10).unwrap();
        drop(pool.take(16 << 10).unwrap());
        assert!(pool.take(24 << 10).unwrap().owner.is_none(), "16 + 32 + 24 KiB are too many");
        assert_eq!(pool.retired().len(), 1, "the unused 16 KiB");
        assert!(pool.take(24 << 10).unwrap().owner.is_some());
        assert!(pool.take((64 << 10) + 1).unwrap().owner.is_none(), "longer than any that is kept");
        assert_eq!(pool.stats().plain, 2);
        drop(held);
    }

    #[test]
    fn a_region_is_found_by_any_address_in_it_until_it_is_retired() {
        let pool = pool(16 << 10, 16 << 10);
        let buffer = pool.take(8 << 10).unwrap();
        let start = buffer.as_ptr().addr();
        assert_eq!(pool.region_of(start + 8191), Some(start..start + 8192));
        assert_eq!(pool.region_of(start + 8192).filter(|range| range.start == start), None);
        drop(buffer);
        drop(pool.take(12 << 10).unwrap());
        drop(pool.retired());
        assert_eq!(pool.region_of(start), None);
    }

    #[test]
    fn after_closing_nothing_is_kept() {
        let pool = pool(1 << 20, 1 << 20);
        let held = pool.take(5000).unwrap();
        drop(pool.take(5000).unwrap());
        pool.close();
        drop(held);
        assert_eq!((pool.stats().bytes_kept, pool.stats().bytes_free), (0, 0));
        assert!(pool.take(5000).unwrap().owner.is_none());
    }

    #[test]
    fn no_memory_is_an_error() {
        let error = pool(1 << 20, 1 << 20).take(1 << 50).unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
    }

    proptest! {
        #[test]
        fn a_class_fits_and_wastes_a_quarter_and_a_page_at_most(len in 0_usize..1 << 40) {
            let size = size_of_class(len);
            prop_assert!(size >= len && size.is_multiple_of(4096));
            prop_assert!(size - len <= len / 4 + 4096);
            prop_assert_eq!(size_of_class(size), size);
        }
    }
}
