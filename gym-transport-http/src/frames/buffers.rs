//! Receive buffers for large segments. They are aligned to 64 bytes and reused, because memory that was written before takes a
//! tenth of the time of fresh memory.
//!
//! The reader of a segment may keep its buffer for as long as it needs; the next segment is then received into new memory.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use gym_core::message::Loan;
use gym_core::{Code, Error, Result};
use parking_lot::Mutex;
use tokio::time::Instant;

/// Alignment in bytes that vector units and typed views require.
const ALIGNMENT: usize = 64;
/// From this size on, the allocator returns memory to the kernel on every free, and the kernel clears it for the next buffer.
const POOLED_BYTES_MIN: usize = 64 << 10;
/// From this size on, the kernel is asked whether the memory is available, because a failed allocation would abort the process.
const PROBED_BYTES_MIN: usize = 16 << 20;

/// Receive buffers of a connector or a listener.
pub(crate) struct ReceiveBufferPool {
    free: Mutex<FreeBuffers>,
    bytes_max: usize,
    /// Bytes of pooled buffers that are being filled or read.
    in_use: AtomicUsize,
}

#[derive(Default)]
struct FreeBuffers {
    buffers: Vec<(Vec<u8>, Instant)>,
    bytes: usize,
}

impl ReceiveBufferPool {
    pub(crate) fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::default(), bytes_max, in_use: AtomicUsize::new(0) })
    }

    /// Returns a buffer for `length` bytes.
    pub(crate) fn buffer(self: &Arc<Self>, length: usize) -> Result<ReceiveBuffer> {
        if length == 0 {
            return Ok(ReceiveBuffer::Own(OwnBuffer { pool: None, buffer: Vec::new(), start: 0, length }));
        }
        let needed = length + ALIGNMENT;
        if needed < POOLED_BYTES_MIN {
            return Ok(ReceiveBuffer::new(None, vec![0; needed], length));
        }
        let buffer = match self.reuse(needed) {
            Some(buffer) => buffer,
            None => fresh(needed)?,
        };
        self.in_use.fetch_add(buffer.len(), Relaxed);
        Ok(ReceiveBuffer::new(Some(Arc::clone(self)), buffer, length))
    }

    /// Returns the smallest free buffer that fits without waste.
    fn reuse(&self, needed: usize) -> Option<Vec<u8>> {
        let mut free = self.free.lock();
        let fits = free.buffers.iter().enumerate().filter(|(_, (kept, _))| (needed..=2 * needed).contains(&kept.len()));
        let (at, _) = fits.min_by_key(|(_, (kept, _))| kept.len())?;
        let (buffer, _) = free.buffers.swap_remove(at);
        free.bytes -= buffer.len();
        Some(buffer)
    }

    fn put_back(&self, buffer: Vec<u8>) {
        self.in_use.fetch_sub(buffer.len(), Relaxed);
        let mut free = self.free.lock();
        if free.bytes + buffer.len() <= self.bytes_max {
            free.bytes += buffer.len();
            free.buffers.push((buffer, Instant::now()));
        }
    }

    /// Frees the buffers that were unused for this long.
    pub(crate) fn trim(&self, unused: Duration) {
        let now = Instant::now();
        let old: Vec<_> = {
            let mut free = self.free.lock();
            let old: Vec<_> = free.buffers.extract_if(.., |(_, since)| *since + unused <= now).collect();
            free.bytes -= old.iter().map(|(buffer, _)| buffer.len()).sum::<usize>();
            old
        };
        // Freeing a gigabyte takes milliseconds, so it happens outside of the lock.
        drop(old);
    }

    /// Returns the bytes of free buffers, and the bytes of buffers in use.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> (usize, usize) {
        (self.free.lock().bytes, self.in_use.load(Relaxed))
    }
}

impl fmt::Debug for ReceiveBufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReceiveBufferPool({} bytes kept, {} in use)", self.free.lock().bytes, self.in_use.load(Relaxed))
    }
}

/// Allocates new memory, rounded up so that the next segment of about this size fits. The kernel zeroes it as it is touched.
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
pub(crate) enum ReceiveBuffer {
    Own(OwnBuffer),
    /// Memory that the receiver of the message has named.
    Lent(Loan),
}

/// A buffer of this transport.
pub(crate) struct OwnBuffer {
    pool: Option<Arc<ReceiveBufferPool>>,
    buffer: Vec<u8>,
    start: usize,
    length: usize,
}

impl ReceiveBuffer {
    fn new(pool: Option<Arc<ReceiveBufferPool>>, buffer: Vec<u8>, length: usize) -> Self {
        let start = buffer.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self::Own(OwnBuffer { pool, buffer, start, length })
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Own(own) => own.length,
            Self::Lent(loan) => loan.as_ref().len(),
        }
    }

    /// Returns the bytes from `at` on.
    pub(crate) fn from(&mut self, at: usize) -> &mut [u8] {
        match self {
            Self::Own(OwnBuffer { buffer, start, length, .. }) => &mut buffer[*start + at..*start + *length],
            Self::Lent(loan) => &mut loan.as_mut()[at..],
        }
    }

    /// Returns the filled buffer. It goes back to the pool, or to its lender, when its last slice is dropped.
    pub(crate) fn freeze(self) -> Bytes {
        match self {
            Self::Own(own) if own.length == 0 => Bytes::new(),
            Self::Own(own) => Bytes::from_owner(own),
            Self::Lent(loan) => loan.into_bytes(),
        }
    }
}

impl AsRef<[u8]> for OwnBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[self.start..self.start + self.length]
    }
}

impl Drop for OwnBuffer {
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
        let pool = ReceiveBufferPool::new(10 << 20);
        let first = pool.buffer(1 << 20).unwrap().freeze();
        let (place, part) = (first.as_ptr(), first.slice(7..8));
        drop(first);
        assert_ne!(pool.buffer(1 << 20).unwrap().freeze().as_ptr(), place, "a part of the first is still held");
        pool.trim(Duration::ZERO);
        drop(part);
        assert_eq!(pool.buffer(1 << 20).unwrap().freeze().as_ptr(), place);
        assert!(pool.bytes().0 >= 1 << 20 && pool.bytes().1 == 0);
        pool.trim(Duration::from_secs(1));
        assert!(pool.bytes().0 > 0, "used a moment ago");
        tokio::time::advance(Duration::from_secs(1)).await;
        pool.trim(Duration::from_secs(1));
        assert_eq!(pool.bytes(), (0, 0));
    }

    #[test]
    fn every_buffer_is_aligned_and_of_its_length() {
        let pool = ReceiveBufferPool::new(1 << 20);
        for length in [0, 1, 63, 64, 65, 4_095, 65_472, 65_536, 1_000_003] {
            let bytes = pool.buffer(length).unwrap().freeze();
            assert_eq!(bytes.len(), length);
            assert!(length == 0 || bytes.as_ptr().align_offset(ALIGNMENT) == 0, "{length}");
        }
    }

    #[tokio::test]
    async fn what_is_kept_is_bounded() {
        let pool = ReceiveBufferPool::new(3 << 20);
        let held: Vec<_> = (0..10).map(|_| pool.buffer(1 << 20).unwrap()).collect();
        drop(held);
        assert!(pool.bytes().0 <= 3 << 20);
        assert_eq!(pool.bytes().1, 0);
    }

    #[test]
    fn a_gibibyte_lands_again_where_the_last_did() {
        // Never touched, so the kernel allocates no memory for it.
        let pool = ReceiveBufferPool::new(crate::frames::config::FramesConfig::default().pool_bytes_max);
        let place = pool.buffer(1 << 30).unwrap().freeze().as_ptr();
        assert_eq!(pool.buffer(1 << 30).unwrap().freeze().as_ptr(), place);
        assert!(pool.bytes().0 >= 1 << 30, "kept for the next");
    }

    #[test]
    fn memory_that_there_is_none_of_is_an_error() {
        let error = ReceiveBufferPool::new(0).buffer(isize::MAX as usize / 2).err().unwrap();
        assert_eq!(error.code(), Code::ResourceExhausted);
    }
}
