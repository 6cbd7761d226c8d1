//! Capacity of one connection: call slots and bytes on the calling side, unread replies on the answering side.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

use super::limits::{ConnectionLimits, Handshake};

/// Number of bytes of one unit of capacity: a semaphore grants at most `u32::MAX` permits at once.
const UNIT_BYTES: usize = 1 << 10;

/// Capacity that a message occupies until the last clone of this permit is dropped.
///
/// On the calling side a permit holds the call's slot and the bytes of its request, or the bytes of its response. On the answering
/// side it counts a reply that the peer has not read. The default permit holds nothing.
#[derive(Clone, Debug, Default)]
pub struct CapacityPermit {
    _held: Option<Arc<dyn Held>>,
}

trait Held: fmt::Debug + Send + Sync {}

impl<const N: usize> Held for [OwnedSemaphorePermit; N] {}
impl Held for UnreadReply {}

impl CapacityPermit {
    pub(super) fn of<const N: usize>(permits: [OwnedSemaphorePermit; N]) -> Self {
        Self { _held: Some(Arc::new(permits)) }
    }
}

/// The capacity of one connection on the calling side.
pub(super) struct ConnectionCapacity {
    slots: Arc<Semaphore>,
    slots_max: usize,
    replies: Arc<Semaphore>,
    replies_max: usize,
    requests: Arc<Semaphore>,
    requests_max: usize,
}

pub(super) fn units(bytes: usize) -> usize {
    bytes.div_ceil(UNIT_BYTES).min(u32::MAX as usize)
}

impl ConnectionCapacity {
    pub(super) fn new(ours: &ConnectionLimits, theirs: &Handshake) -> Self {
        let replies_max = units(ours.reply_bytes_in_flight_max);
        let requests_max = units(ours.request_bytes_in_flight_max.min(theirs.request_bytes_in_flight_max));
        let slots_max = ours.calls_max.min(theirs.calls_max).clamp(1, Semaphore::MAX_PERMITS);
        Self {
            slots: Arc::new(Semaphore::new(slots_max)),
            slots_max,
            replies: Arc::new(Semaphore::new(replies_max)),
            replies_max,
            requests: Arc::new(Semaphore::new(requests_max)),
            requests_max,
        }
    }

    /// Acquires a slot, the reply's bytes and the request's bytes: always in this order, so that no call waits for capacity that
    /// another waiting call holds.
    pub(super) async fn acquire(
        &self,
        request_bytes: usize,
        reply_bytes_max: usize,
    ) -> Result<(CapacityPermit, OwnedSemaphorePermit), AcquireError> {
        let slot = acquire(&self.slots, 1).await?;
        let reply = acquire(&self.replies, units(reply_bytes_max).min(self.replies_max)).await?;
        let bytes = acquire(&self.requests, units(request_bytes).min(self.requests_max)).await?;
        Ok((CapacityPermit::of([slot, bytes]), reply))
    }

    /// Returns the maximum bytes of all replies together.
    pub(super) fn reply_bytes_max(&self) -> usize {
        self.replies_max.saturating_mul(UNIT_BYTES)
    }

    /// Returns `true` if more than `calls` calls hold a slot.
    pub(super) fn is_crowded(&self, calls: usize) -> bool {
        self.slots.available_permits() + calls < self.slots_max
    }
}

async fn acquire(from: &Arc<Semaphore>, count: usize) -> Result<OwnedSemaphorePermit, AcquireError> {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    match Arc::clone(from).try_acquire_many_owned(count) {
        Ok(permit) => Ok(permit),
        Err(_) => Arc::clone(from).acquire_many_owned(count).await,
    }
}

/// Replies of an answering end that the peer has not read yet.
#[derive(Clone, Debug, Default)]
pub(super) struct UnreadReplies(Arc<UnreadCounts>);

#[derive(Debug, Default)]
struct UnreadCounts {
    replies: AtomicUsize,
    bytes: AtomicUsize,
}

#[derive(Debug)]
struct UnreadReply {
    bytes: usize,
    among: UnreadReplies,
}

impl UnreadReplies {
    /// Counts one more reply until its permit is dropped.
    pub(super) fn add(&self, bytes: usize) -> CapacityPermit {
        self.0.replies.fetch_add(1, Relaxed);
        self.0.bytes.fetch_add(bytes, Relaxed);
        CapacityPermit { _held: Some(Arc::new(UnreadReply { bytes, among: self.clone() })) }
    }

    /// Returns the number of unread replies.
    pub(super) fn count(&self) -> usize {
        self.0.replies.load(Relaxed)
    }

    /// Returns the number of bytes of all unread replies.
    pub(super) fn bytes(&self) -> usize {
        self.0.bytes.load(Relaxed)
    }
}

impl Drop for UnreadReply {
    fn drop(&mut self) {
        self.among.0.replies.fetch_sub(1, Relaxed);
        self.among.0.bytes.fetch_sub(self.bytes, Relaxed);
    }
}
