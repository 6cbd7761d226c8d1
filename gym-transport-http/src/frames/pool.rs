//! Where large segments land: buffers aligned to 64 bytes that are used again, because touched memory takes a tenth of the
//! time of fresh.
//!
//! The pool is for landing, not for keeping: whoever reads a segment may keep it for ever, and the next one lands in new memory.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use gym_core::{Code, Error, Result};
use tokio::time::Instant;

/// What vector units and typed views want.
const ALIGNMENT: usize = 64;
/// From here on the allocator gives memory back to the kernel on every free, and the kernel clears it for the next.
const POOLED_BYTES_MIN: usize = 64 << 10;
/// From here on the kernel is asked whether it has the memory, before a refusal would end the process.
const PROBED_BYTES_MIN: usize = 16 << 20;

/// Receive buffers of a connector or a listener.
pub(super) struct LandingPool {
    shelf: Mutex<Shelf>,
    bytes_max: usize,
    /// Bytes of pooled buffers that somebody still reads or writes.
    lent: AtomicUsize,
}

#[derive(Default)]
struct Shelf {
    buffers: Vec<(Vec<u8>, Instant)>,
    bytes: usize,
}

impl LandingPool {
    pub(super) fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self { shelf: Mutex::default(), bytes_max, lent: AtomicUsize::new(0) })
    }

    /// Room for `length` bytes.
    pub(super) fn landing(self: &Arc<Self>, length: usize) -> Result<Landing> {
        if length == 0 {
            return Ok(Landing { pool: None, buffer: Vec::new(), start: 0, length });
        }
        let needed = length + ALIGNMENT;
        if needed < POOLED_BYTES_MIN {
            return Ok(Landing::new(None, vec![0; needed], length));
        }
        let buffer = match self.take(needed) {
            Some(buffer) => buffer,
            None => fresh(needed)?,
        };
        self.lent.fetch_add(buffer.len(), Relaxed);
        Ok(Landing::new(Some(Arc::clone(self)), buffer, length))
    }

    /// The smallest kept buffer that fits without waste.
    fn take(&self, needed: usize) -> Option<Vec<u8>> {
        let mut shelf = self.lock();
        let fits =
            shelf.buffers.iter().enumerate().filter(|(_, (kept, _))| (needed..=2 * needed).contains(&kept.len()));
        let (at, _) = fits.min_by_key(|(_, (kept, _))| kept.len())?;
        let (buffer, _) = shelf.buffers.swap_remove(at);
        shelf.bytes -= buffer.len();
        Some(buffer)
    }

    fn put_back(&self, buffer: Vec<u8>) {
        self.lent.fetch_sub(buffer.len(), Relaxed);
        let mut shelf = self.lock();
        if shelf.bytes + buffer.len() <= self.bytes_max {
            shelf.bytes += buffer.len();
            shelf.buffers.push((buffer, Instant::now()));
        }
    }

    /// Frees the buffers that were not used for that long.
    pub(super) fn trim(&self, unused: Duration) {
        let now = Instant::now();
        let old: Vec<_> = {
            let mut shelf = self.lock();
            let old: Vec<_> = shelf.buffers.extract_if(.., |(_, since)| *since + unused <= now).collect();
            shelf.bytes -= old.iter().map(|(buffer, _)| buffer.len()).sum::<usize>();
            old
        };
        // Freeing a gigabyte takes milliseconds: not under the lock.
        drop(old);
    }

    /// Bytes that are kept for the next, and bytes that somebody holds.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> (usize, usize) {
        (self.lock().bytes, self.lent.load(Relaxed))
    }

    fn lock(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LandingPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LandingPool({} bytes kept, {} lent)", self.lock().bytes, self.lent.load(Relaxed))
    }
}

/// New memory, rounded up so that the next segment of about the size fits. Zeroed by the kernel as it is touched.
fn fresh(needed: usize) -> Result<Vec<u8>> {
    let step = needed.next_power_of_two() / 8;
    let rounded = needed.next_multiple_of(step);
    if rounded >= PROBED_BYTES_MIN {
        Vec::<u8>::new().try_reserve_exact(rounded).map_err(|error| {
            Error::not_started(Code::ResourceExhausted, format!("no memory for a segment of {needed} bytes"))
                .caused_by(error)
        })?;
    }
    Ok(vec![0; rounded])
}

/// A buffer that is being filled.
pub(super) struct Landing {
    pool: Option<Arc<LandingPool>>,
    buffer: Vec<u8>,
    start: usize,
    length: usize,
}

impl Landing {
    fn new(pool: Option<Arc<LandingPool>>, buffer: Vec<u8>, length: usize) -> Self {
        let start = buffer.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { pool, buffer, start, length }
    }

    pub(super) fn len(&self) -> usize {
        self.length
    }

    /// The bytes from `at` on.
    pub(super) fn from(&mut self, at: usize) -> &mut [u8] {
        &mut self.buffer[self.start + at..self.start + self.length]
    }

    /// The filled buffer; it goes back to the pool when the last part of it is let go.
    pub(super) fn freeze(self) -> Bytes {
        if self.length == 0 { Bytes::new() } else { Bytes::from_owner(self) }
    }
}

impl AsRef<[u8]> for Landing {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[self.start..self.start + self.length]
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.put_back(std::mem::take(&mut self.buffer));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_buffer_comes_back_when_its_last_part_is_let_go_and_is_freed_when_unused() {
        let pool = LandingPool::new(10 << 20);
        let first = pool.landing(1 << 20).unwrap().freeze();
        let (place, part) = (first.as_ptr(), first.slice(7..8));
        drop(first);
        assert_ne!(pool.landing(1 << 20).unwrap().freeze().as_ptr(), place, "a part of the first is still held");
        pool.trim(Duration::ZERO);
        drop(part);
        assert_eq!(pool.landing(1 << 20).unwrap().freeze().as_ptr(), place);
        assert!(pool.bytes().0 >= 1 << 20 && pool.bytes().1 == 0);
        pool.trim(Duration::from_secs(1));
        assert!(pool.bytes().0 > 0, "used a moment ago");
        tokio::time::advance(Duration::from_secs(1)).await;
        pool.trim(Duration::from_secs(1));
        assert_eq!(pool.bytes(), (0, 0));
    }

    #[test]
    fn every_buffer_is_aligned_and_of_its_length() {
        let pool = LandingPool::new(1 << 20);
        for length in [0, 1, 63, 64, 65, 4_095, 65_472, 65_536, 1_000_003] {
            let bytes = pool.landing(length).unwrap().freeze();
            assert_eq!(bytes.len(), length);
            assert!(length == 0 || bytes.as_ptr().align_offset(ALIGNMENT) == 0, "{length}");
        }
    }

    #[tokio::test]
    async fn what_is_kept_is_bounded() {
        let pool = LandingPool::new(3 << 20);
        let held: Vec<_> = (0..10).map(|_| pool.landing(1 << 20).unwrap()).collect();
        drop(held);
        assert!(pool.bytes().0 <= 3 << 20);
        assert_eq!(pool.bytes().1, 0);
    }

    #[test]
    fn a_gibibyte_lands_again_where_the_last_did() {
        // Never touched, so the kernel gives no memory for it.
        let pool = LandingPool::new(super::super::FramesConfig::default().pool_bytes_max);
        let place = pool.landing(1 << 30).unwrap().freeze().as_ptr();
        assert_eq!(pool.landing(1 << 30).unwrap().freeze().as_ptr(), place);
        assert!(pool.bytes().0 >= 1 << 30, "kept for the next");
    }

    #[test]
    fn memory_that_there_is_none_of_is_an_error() {
        let error = LandingPool::new(0).landing(isize::MAX as usize / 2).err().unwrap();
        assert_eq!(error.code(), Code::ResourceExhausted);
    }
}
