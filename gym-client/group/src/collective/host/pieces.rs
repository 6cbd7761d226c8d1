//! The memory of an operation, in pieces that are lent to the transports: sent from, and received into, without a copy.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use gym_core::message::{Lender, Loan};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::wire::CHUNK_BYTES;

/// The time in which the pieces of an operation that has failed come back. A connection to a rank that stands still keeps its own longer.
const BACK_TIMEOUT: Duration = Duration::from_millis(20);

/// The memory of an operation: whole, or in pieces while chunks of it are under way.
#[derive(Debug, Default)]
pub(super) struct OperationMemory {
    pub(super) whole: BytesMut,
    pieces: Option<Pieces>,
}

impl OperationMemory {
    pub(super) fn new(whole: BytesMut) -> Self {
        Self { whole, pieces: None }
    }

    /// Cuts the memory into pieces of these lengths, which are together as long as it.
    pub(super) fn cut(&mut self, lengths: impl IntoIterator<Item = usize>) -> Pieces {
        let pieces = Pieces::cut(std::mem::take(&mut self.whole), lengths);
        self.pieces.insert(pieces).clone()
    }

    /// Waits until all pieces are back, and joins them.
    pub(super) async fn join(&mut self) {
        if let Some(pieces) = &self.pieces {
            pieces.wait_until(|home| home.iter().all(Option::is_some).then_some(())).await;
        }
        self.join_what_is_back();
    }

    /// Gives the memory of an operation that has failed back. What does not come back in time is replaced by zeros: the contents are unspecified.
    pub(super) async fn give_up(mut self) -> BytesMut {
        drop(timeout(BACK_TIMEOUT, self.join()).await);
        self.join_what_is_back();
        self.whole
    }

    fn join_what_is_back(&mut self) {
        let Some(pieces) = self.pieces.take() else { return };
        let mut all = std::mem::take(&mut *pieces.lock());
        for (piece, place) in all.iter_mut().zip(&pieces.0.places) {
            let piece = piece.take().unwrap_or_else(|| BytesMut::zeroed(place.length));
            // Without a copy, if both lie side by side.
            self.whole.unsplit(piece);
        }
    }
}

/// Returns the lengths of the chunks of so many bytes.
pub(super) fn chunks_of(bytes: usize) -> impl Iterator<Item = usize> {
    (0..bytes).step_by(CHUNK_BYTES).map(move |start| CHUNK_BYTES.min(bytes - start))
}

/// The pieces of one memory, in its order. Cheap to clone.
#[derive(Clone)]
pub(super) struct Pieces(Arc<Shared>);

struct Shared {
    /// `None` while a piece is lent, and when all have been joined.
    home: Mutex<Vec<Option<BytesMut>>>,
    changed: Notify,
    places: Vec<Place>,
}

struct Place {
    address: usize,
    length: usize,
}

impl Pieces {
    fn cut(mut memory: BytesMut, lengths: impl IntoIterator<Item = usize>) -> Self {
        let pieces: Vec<BytesMut> = lengths.into_iter().map(|length| memory.split_to(length)).collect();
        let place = |piece: &BytesMut| Place { address: piece.as_ptr().addr(), length: piece.len() };
        let places = pieces.iter().map(place).collect();
        let home = Mutex::new(pieces.into_iter().map(Some).collect());
        Self(Arc::new(Shared { home, changed: Notify::new(), places }))
    }

    /// Returns the length of a piece.
    pub(super) fn length(&self, at: usize) -> usize {
        self.0.places[at].length
    }

    /// Lends a piece to receive into it, if it is not lent.
    pub(super) fn lend(&self, at: usize) -> Option<Loan> {
        self.take(&mut self.lock(), at)
    }

    pub(super) fn count(&self) -> usize {
        self.0.places.len()
    }

    /// Takes a chunk that has arrived: it lies in the piece, or is copied there.
    pub(super) async fn receive(&self, at: usize, chunk: &Bytes) {
        if self.0.places[at].address != chunk.as_ptr().addr() {
            self.change(at, |piece| piece.copy_from_slice(chunk)).await;
        }
    }

    /// Waits until a piece is back, and lends it to be sent.
    pub(super) async fn send(&self, at: usize) -> Bytes {
        self.wait_until(|home| self.take(home, at)).await.into_bytes()
    }

    /// Waits until a piece is back, and changes it.
    pub(super) async fn change(&self, at: usize, change: impl FnOnce(&mut [u8])) {
        let mut piece = self.wait_until(|home| home[at].take()).await;
        change(&mut piece);
        self.0.take_back(at, piece);
    }

    fn take(&self, home: &mut [Option<BytesMut>], at: usize) -> Option<Loan> {
        let piece = home.get_mut(at)?.take()?;
        Some(Loan::new(piece, at, Arc::clone(&self.0) as _))
    }

    /// Waits until `ready` returns a value. It is asked again when a piece comes back.
    async fn wait_until<T>(&self, mut ready: impl FnMut(&mut [Option<BytesMut>]) -> Option<T> + Send) -> T {
        let mut changed = std::pin::pin!(self.0.changed.notified());
        loop {
            changed.as_mut().enable();
            if let Some(value) = ready(&mut self.lock()) {
                return value;
            }
            changed.as_mut().await;
            changed.set(self.0.changed.notified());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<BytesMut>>> {
        self.0.lock()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Vec<Option<BytesMut>>> {
        self.home.lock()
    }
}

impl Lender for Shared {
    fn take_back(&self, number: usize, memory: BytesMut) {
        if let Some(home) = self.lock().get_mut(number) {
            *home = Some(memory);
        }
        self.changed.notify_waiters();
    }
}

impl fmt::Debug for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let home = self.lock().iter().flatten().count();
        write!(f, "Pieces({home} of {} at home)", self.0.places.len())
    }
}
