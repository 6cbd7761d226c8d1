//! Room: on the calling side a slot, room for the reply, room for the request; on the answering side what waits for the peer.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

use super::limits::{Greeting, Limits};

/// Room is counted in these, because a semaphore hands out at most `u32::MAX` at once.
const ROOM_BYTES: usize = 1 << 10;

/// What a message holds until the last clone of this is dropped. On the caller's side: its call's slot and the bytes of its request,
/// or those of its answer. On the answering side: its place among the answers that wait for the peer. The default holds nothing.
#[derive(Clone, Debug, Default)]
pub struct Room {
    _held: Option<Arc<dyn Held>>,
}

trait Held: fmt::Debug + Send + Sync {}

impl<const N: usize> Held for [OwnedSemaphorePermit; N] {}
impl Held for Place {}

impl Room {
    pub(super) fn of<const N: usize>(permits: [OwnedSemaphorePermit; N]) -> Self {
        Self { _held: Some(Arc::new(permits)) }
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

/// Answers that wait for the peer to take them: of an answering end.
#[derive(Clone, Debug, Default)]
pub(super) struct Unread(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    answers: AtomicUsize,
    bytes: AtomicUsize,
}

/// One of them.
#[derive(Debug)]
struct Place {
    bytes: usize,
    among: Unread,
}

impl Unread {
    /// One more, until its room is dropped.
    pub(super) fn add(&self, bytes: usize) -> Room {
        self.0.answers.fetch_add(1, Relaxed);
        self.0.bytes.fetch_add(bytes, Relaxed);
        Room { _held: Some(Arc::new(Place { bytes, among: self.clone() })) }
    }

    /// How many wait.
    pub(super) fn answers(&self) -> usize {
        self.0.answers.load(Relaxed)
    }

    /// The bytes of those that wait.
    pub(super) fn bytes(&self) -> usize {
        self.0.bytes.load(Relaxed)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.among.0.answers.fetch_sub(1, Relaxed);
        self.among.0.bytes.fetch_sub(self.bytes, Relaxed);
    }
}
