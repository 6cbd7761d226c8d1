//! A rank of a segment: its place in the order of barriers, and its operations.

mod copy;
mod reduce;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use gym_core::group::DType;
use gym_core::group::collective::{Call, Collective};
use gym_core::{Code, Error, Result};

use crate::control::Announced;
use crate::failure::Failure;
use crate::layout::{Half, Layout};
use crate::segment::Segment;
use crate::shared::{SharedBuffer, SharedSpace, Space};

/// The operations of one rank. Each blocks its thread until all ranks have called it, and so each rank has a thread.
///
/// All ranks make the same calls in the same order, as with a
/// [`Communicator`](gym_core::group::collective::Communicator): same operation, type and number of elements. The first
/// barrier of an operation compares them. Bytes are row-major, little-endian elements of any alignment.
///
/// - **Deadline.** It bounds each wait of the operation. [`deadline_in`](crate::deadline_in) makes one.
/// - **Errors.** [`Failure`]. After each but `Rejected`, the contents of the buffer are unspecified, and all ranks get
///   [`Failure::Aborted`], or what they noticed themselves. An operation succeeds for all ranks that live, or for none.
/// - **Dropping** it tells nobody that the rank has left.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use gym_core::group::DType;
/// use gym_segment::{Segment, SegmentCommunicator, Sizes, deadline_in};
///
/// # fn main() -> gym_core::Result<()> {
/// let segment = Arc::new(Segment::create(2, Sizes::default())?);
/// let mut ranks = [SegmentCommunicator::join(&segment, 0)?, SegmentCommunicator::join(&segment, 1)?];
/// let mut memory = [vec![7; 3], vec![0; 3]];
/// std::thread::scope(|threads| {
///     for (rank, memory) in ranks.iter_mut().zip(&mut memory) {
///         let deadline = deadline_in(Duration::from_secs(10));
///         threads.spawn(move || rank.broadcast(DType::U8, 0, memory, deadline).expect("both ranks call it"));
///     }
/// });
/// assert_eq!(memory, [[7; 3]; 2]);
/// # Ok(()) }
/// ```
pub struct SegmentCommunicator {
    segment: Arc<Segment>,
    position: usize,
    /// The barriers that this rank has come to.
    barriers: u64,
    space: Arc<Space>,
    /// Parts of the ranks that a small reduction adds.
    scratch: Vec<u8>,
    #[cfg(test)]
    pub(crate) probe: Option<Probe>,
}

/// Called by tests before and after a rank comes to a barrier.
#[cfg(test)]
pub(crate) type Probe = Box<dyn FnMut(At, u64) + Send>;

/// Where a rank is when its probe is called.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// It is about to come to a barrier.
    Before,
    /// It has passed the barrier, or failed at it.
    After,
}

impl SegmentCommunicator {
    /// Takes the place of a rank in a segment, for as long as the segment lives: nobody can take it again, in any
    /// process.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such position; `AlreadyExists` if it is taken.
    pub fn join(segment: &Arc<Segment>, position: usize) -> Result<Self> {
        let world_size = segment.world_size();
        if position >= world_size {
            return Err(Error::invalid(format!("position {position} in a segment of {world_size} ranks")));
        }
        if !segment.control().claim(position) {
            let why = format!("position {position} of the segment is taken; a newer epoch has another segment");
            return Err(Error::not_started(Code::AlreadyExists, why));
        }
        Ok(Self {
            segment: Arc::clone(segment),
            position,
            barriers: 0,
            space: Arc::new(Space::new(segment.sizes().shared_bytes)),
            scratch: Vec::new(),
            #[cfg(test)]
            probe: None,
        })
    }

    /// Returns the segment.
    #[must_use]
    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Returns the position of the rank.
    #[must_use]
    pub fn position(&self) -> usize {
        self.position
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.segment.world_size()
    }

    /// Returns the space of this rank for tensors, for other threads.
    #[must_use]
    pub fn space(&self) -> SharedSpace {
        let (segment, space) = (Arc::clone(&self.segment), Arc::clone(&self.space));
        SharedSpace { segment, space, position: self.position }
    }

    /// Creates a tensor in the space of this rank, which [`Sizes::shared_bytes`](crate::Sizes::shared_bytes) bounds. It
    /// takes whole pages of 4,096 bytes.
    ///
    /// # Errors
    /// `ResourceExhausted` if no free range of the space is long enough.
    pub fn shared_buffer(&self, bytes: usize) -> Result<SharedBuffer> {
        SharedBuffer::new(&self.segment, &self.space, self.position, bytes)
    }

    /// Waits until every rank has called it.
    ///
    /// # Errors
    /// As above.
    pub fn barrier(&mut self, deadline: Instant) -> Result<(), Failure> {
        let call = Call::new(Collective::Barrier, DType::U8, 0);
        self.perform(|own| own.begin(call, 0, deadline).map(drop))
    }

    /// Runs an operation, and aborts the segment if it fails: this rank will not come to the barriers that are left.
    fn perform<T>(&mut self, operation: impl FnOnce(&mut Self) -> Result<T, Failure>) -> Result<T, Failure> {
        struct Unfinished(Arc<Segment>);
        impl Drop for Unfinished {
            fn drop(&mut self) {
                self.0.abort();
            }
        }
        // Ranks that have not noticed may still read what this one would write before its next barrier.
        if self.segment.is_aborted() {
            return Err(Failure::Aborted);
        }
        let unfinished = Unfinished(Arc::clone(&self.segment));
        let result = operation(self)?;
        // Dropped in the other cases, also in a panic.
        std::mem::forget(unfinished);
        Ok(result)
    }

    /// The first barrier of an operation: announces the call, and compares it with those of all ranks. What the rank
    /// has written to its piece before is there for the others afterwards. Returns the details that the ranks have
    /// told; those of an all-gather must be the same.
    fn begin(&mut self, call: Call, detail: u64, deadline: Instant) -> Result<Vec<u64>, Failure> {
        self.begin_with(call, detail, call.operation == Collective::AllGather, deadline)
    }

    /// Like `begin`; says whether the details must be the same.
    fn begin_with(
        &mut self,
        call: Call,
        detail: u64,
        same_details: bool,
        deadline: Instant,
    ) -> Result<Vec<u64>, Failure> {
        self.segment.control().announce(self.position, self.half_to_write(), call, detail);
        self.meet(deadline)?;
        let half = self.half_to_read();
        let announced = (0..self.world_size()).map(|position| self.segment.control().announced(position, half));
        let check = |(other_position, Announced { call: other, detail: others })| match other {
            Some(other) if call.agrees_with(&other) && (!same_details || others == detail) => Ok(others),
            other => Err(Failure::Differs { position: self.position, own: call, other_position, other }),
        };
        announced.enumerate().map(check).collect()
    }

    /// Comes to the next barrier, and waits for the other ranks.
    fn meet(&mut self, deadline: Instant) -> Result<(), Failure> {
        let number = self.barriers;
        self.barriers += 1;
        #[cfg(test)]
        self.probe(At::Before, number);
        let met = self.segment.control().arrive(self.position, number, deadline);
        #[cfg(test)]
        self.probe(At::After, number);
        met
    }

    #[cfg(test)]
    fn probe(&mut self, at: At, number: u64) {
        if let Some(probe) = &mut self.probe {
            probe(at, number);
        }
    }

    /// The half that is written before the next barrier.
    fn half_to_write(&self) -> Half {
        Half::before(self.barriers)
    }

    /// The half that was written before the last barrier.
    fn half_to_read(&self) -> Half {
        Half::before(self.barriers - 1)
    }

    /// Writes to the start of a place that is this rank's until the next barrier.
    fn write(&self, place: impl FnOnce(&Layout, Half) -> Range<usize>, elements: &[u8]) {
        let place = first_of(place(self.segment.layout(), self.half_to_write()), elements.len());
        // SAFETY: no rank reads this half before the next barrier (the rule of `Half`), and every place has one rank
        // that writes it: pieces their owner, results the rank at the position of their slice.
        unsafe { self.segment.mapping().bytes_mut(place) }.copy_from_slice(elements);
    }

    /// Reads the start of a place that was written before the last barrier.
    fn read(&self, place: impl FnOnce(&Layout, Half) -> Range<usize>, elements: &mut [u8]) {
        let place = first_of(place(self.segment.layout(), self.half_to_read()), elements.len());
        // SAFETY: no rank writes this half before this rank comes to the next barrier (the rule of `Half`), and the
        // slice is only read.
        elements.copy_from_slice(unsafe { self.segment.mapping().bytes(place) });
    }
}

/// Returns the start of a place.
///
/// # Panics
/// If the place is shorter.
fn first_of(place: Range<usize>, bytes: usize) -> Range<usize> {
    assert!(bytes <= place.len(), "{bytes} bytes in a place of {}", place.len());
    place.start..place.start + bytes
}

/// Returns the number of elements of a buffer.
fn elements_of(memory: &[u8], dtype: DType) -> Result<usize> {
    if !memory.len().is_multiple_of(dtype.size()) {
        return Err(Error::invalid(format!("{} bytes are no whole number of {dtype}", memory.len())));
    }
    Ok(memory.len() / dtype.size())
}

impl fmt::Debug for SegmentCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SegmentCommunicator(position {} of {})", self.position, self.world_size())
    }
}
