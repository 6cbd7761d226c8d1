//! Tensors that live in a segment, and the space of a rank for them.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use gym_core::group::collective::SharedMemory;
use gym_core::{Code, Error, Result};
use parking_lot::Mutex;

use crate::layout::PAGE;
use crate::segment::Segment;

/// Memory of one rank in a segment: its owner reads and writes it as bytes, and an operation of all ranks works on it
/// in place.
///
/// It begins on a page, and is zero where it was not used before. Dropping it gives its space back to the rank. It
/// keeps the segment mapped.
///
/// After an operation on it has failed, other ranks may still write to its place. It then lies in memory of this
/// process alone, is zero, and is no longer [`in_segment`](Self::in_segment).
pub struct SharedBuffer(Place);

enum Place {
    /// The offset counts from the start of the rank's space.
    Segment {
        segment: Arc<Segment>,
        space: Arc<Space>,
        position: usize,
        at: usize,
        bytes: usize,
    },
    Private(Vec<u8>),
}

/// The space of one rank for tensors. Clones share it.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use gym_core::group::DType;
/// use gym_core::group::collective::ReduceOp;
/// use gym_segment::{Segment, SegmentCommunicator, Sizes, deadline_in};
///
/// # fn main() -> gym_core::Result<()> {
/// let sizes = Sizes { shared_bytes: 1 << 20, ..Sizes::default() };
/// let segment = Arc::new(Segment::create(1, sizes)?);
/// let mut only = SegmentCommunicator::join(&segment, 0)?;
/// let mut gradients = only.space().buffer(4)?;
/// gradients.copy_from_slice(&[1, 2, 3, 4]);
/// // In place: the tensor is where all ranks read and write it.
/// only.all_reduce_shared(DType::U8, ReduceOp::Sum, &mut gradients, deadline_in(Duration::from_secs(10)))?;
/// assert_eq!(gradients[..], [1, 2, 3, 4]);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct SharedSpace {
    pub(crate) segment: Arc<Segment>,
    pub(crate) space: Arc<Space>,
    pub(crate) position: usize,
}

impl SharedSpace {
    /// Creates a tensor of zeros. It takes whole pages of 4,096 bytes.
    ///
    /// # Errors
    /// `ResourceExhausted` if no free range of the space is long enough.
    pub fn buffer(&self, bytes: usize) -> Result<SharedBuffer> {
        let mut buffer = SharedBuffer::new(&self.segment, &self.space, self.position, bytes)?;
        buffer.fill(0);
        Ok(buffer)
    }
}

impl SharedMemory for SharedBuffer {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl SharedBuffer {
    /// Takes space of a rank.
    ///
    /// # Errors
    /// `ResourceExhausted` if the rank has no such space left.
    pub(crate) fn new(segment: &Arc<Segment>, space: &Arc<Space>, position: usize, bytes: usize) -> Result<Self> {
        let at = space.take(bytes)?;
        let (segment, space) = (Arc::clone(segment), Arc::clone(space));
        Ok(Self(Place::Segment { segment, space, position, at, bytes }))
    }

    /// Returns `true` while the memory lies in the segment.
    #[must_use]
    pub fn in_segment(&self) -> bool {
        matches!(self.0, Place::Segment { .. })
    }

    /// Returns the offset in the space of the rank, if the buffer is this rank's, of this segment.
    pub(crate) fn offset_in(&self, segment: &Arc<Segment>, own: usize) -> Option<usize> {
        match &self.0 {
            Place::Segment { segment: of, position, at, .. } => {
                (Arc::ptr_eq(of, segment) && *position == own).then_some(*at)
            }
            Place::Private(_) => None,
        }
    }

    /// Leaves the segment, because other ranks may still write to the place. Nobody gets its space again.
    pub(crate) fn leave(&mut self) {
        self.0 = Place::Private(vec![0; self.len()]);
    }

    fn range(segment: &Segment, position: usize, at: usize, bytes: usize) -> Range<usize> {
        let start = segment.layout().shared(position).start + at;
        start..start + bytes
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Place::Segment { segment, position, at, bytes, .. } => {
                // SAFETY: the space belongs to this buffer alone (`Space::take`, and only one process has the seat).
                // Other ranks write to it only during an operation that has the buffer borrowed mutably, and that calls
                // `leave` unless all of them have finished.
                unsafe { segment.mapping().bytes(Self::range(segment, *position, *at, *bytes)) }
            }
            Place::Private(bytes) => bytes,
        }
    }
}

impl DerefMut for SharedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Place::Segment { segment, position, at, bytes, .. } => {
                // SAFETY: as in `deref`, and `self` is borrowed mutably.
                unsafe { segment.mapping().bytes_mut(Self::range(segment, *position, *at, *bytes)) }
            }
            Place::Private(bytes) => bytes,
        }
    }
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        if let Place::Segment { space, at, bytes, .. } = &self.0 {
            space.give_back(*at, *bytes);
        }
    }
}

impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBuffer({} bytes{})", self.len(), if self.in_segment() { "" } else { ", private" })
    }
}

/// The free space of a rank, in whole pages.
#[derive(Debug)]
pub(crate) struct Space {
    total: usize,
    /// In order, and no two of them touch.
    free: Mutex<Vec<Range<usize>>>,
}

impl Space {
    pub(crate) fn new(bytes: usize) -> Self {
        let free = if bytes == 0 { Vec::new() } else { std::iter::once(0..bytes).collect() };
        Self { total: bytes, free: Mutex::new(free) }
    }

    /// Takes the first free range that is long enough.
    fn take(&self, bytes: usize) -> Result<usize> {
        let mut free = self.free.lock();
        let pages = bytes.checked_next_multiple_of(PAGE).unwrap_or(usize::MAX);
        if pages == 0 {
            return Ok(0);
        }
        let Some(index) = free.iter().position(|range| range.len() >= pages) else {
            let most = free.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
            let why = format!(
                "{bytes} bytes in the segment: the rank has {} bytes, at most {most} of them free in one piece; give \
                 `shared_bytes` more",
                self.total
            );
            return Err(Error::not_started(Code::ResourceExhausted, why));
        };
        let at = free[index].start;
        free[index].start += pages;
        if free[index].is_empty() {
            free.remove(index);
        }
        Ok(at)
    }

    fn give_back(&self, at: usize, bytes: usize) {
        let mut free = self.free.lock();
        let mut back = at..at + bytes.next_multiple_of(PAGE);
        if back.is_empty() {
            return;
        }
        let mut index = free.partition_point(|range| range.start < at);
        if free.get(index).is_some_and(|next| next.start == back.end) {
            back.end = free.remove(index).end;
        }
        if index > 0 && free[index - 1].end == back.start {
            index -= 1;
            back.start = free.remove(index).start;
        }
        free.insert(index, back);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_that_are_taken_never_overlap_and_all_come_back(
            steps in prop::collection::vec((any::<bool>(), 0..40_000_usize), 1..60),
        ) {
            let space = Space::new(32 * PAGE);
            let mut taken: Vec<Range<usize>> = Vec::new();
            for (takes, number) in steps {
                if takes {
                    if let Ok(at) = space.take(number) {
                        let range = at..at + number;
                        prop_assert!(range.end <= 32 * PAGE && at.is_multiple_of(PAGE));
                        let apart = |other: &Range<usize>| other.end <= at || range.end <= other.start;
                        prop_assert!(number == 0 || taken.iter().all(apart));
                        taken.push(range);
                    }
                } else if !taken.is_empty() {
                    let range = taken.swap_remove(number % taken.len());
                    space.give_back(range.start, range.len());
                }
            }
            taken.iter().for_each(|range| space.give_back(range.start, range.len()));
            prop_assert_eq!(space.free.lock().clone(), std::iter::once(0..32 * PAGE).collect::<Vec<_>>());
        }
    }
}
