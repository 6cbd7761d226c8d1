//! Room on the calling side: a slot, room for the reply, room for the request.

use std::sync::Arc;

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

use super::limits::{Greeting, Limits};

/// Room is counted in these, because a semaphore hands out at most `u32::MAX` at once.
const ROOM_BYTES: usize = 1 << 10;

/// What a call holds on the caller's side: its slot and the bytes of its request, or those of its answer. The default holds
/// nothing.
#[derive(Clone, Debug, Default)]
pub struct Room {
    _permits: Option<Arc<[OwnedSemaphorePermit]>>,
}

impl Room {
    pub(super) fn of<const N: usize>(permits: [OwnedSemaphorePermit; N]) -> Self {
        Self { _permits: Some(Arc::new(permits)) }
    }
}

/// How much room there is on one connection.
pub(super) struct Rooms {
    slots: Arc<Semaphore>,
    slots_max: usize,
    replies: Arc<Semaphore>,
    replies_max: usize,
    requests: Arc<Semaphore>,
    requests_max: usize,
}

pub(super) fn units(bytes: usize) -> usize {
    bytes.div_ceil(ROOM_BYTES).min(u32::MAX as usize)
}

impl Rooms {
    pub(super) fn new(ours: &Limits, theirs: &Greeting) -> Self {
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

    /// A slot, room for the reply, room for the request: always in this order, so that nobody waits for what a waiter holds.
    pub(super) async fn take(
        &self,
        request_bytes: usize,
        reply_bytes_max: usize,
    ) -> Result<(Room, OwnedSemaphorePermit), AcquireError> {
        let slot = take(&self.slots, 1).await?;
        let reply = take(&self.replies, units(reply_bytes_max).min(self.replies_max)).await?;
        let bytes = take(&self.requests, units(request_bytes).min(self.requests_max)).await?;
        Ok((Room::of([slot, bytes]), reply))
    }

    /// The most that all replies together may take, in bytes.
    pub(super) fn reply_bytes_max(&self) -> usize {
        self.replies_max.saturating_mul(ROOM_BYTES)
    }

    /// Whether so many calls are under way.
    pub(super) fn is_crowded(&self, calls: usize) -> bool {
        self.slots.available_permits() + calls < self.slots_max
    }
}

async fn take(from: &Arc<Semaphore>, count: usize) -> Result<OwnedSemaphorePermit, AcquireError> {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    match Arc::clone(from).try_acquire_many_owned(count) {
        Ok(room) => Ok(room),
        Err(_) => Arc::clone(from).acquire_many_owned(count).await,
    }
}
