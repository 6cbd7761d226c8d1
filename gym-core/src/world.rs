//! Everything that is neither time nor network: files, randomness and the wall clock. A simulation hands in its own.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::time::Instant;

use crate::error::Result;

/// The files, the seed and the wall clock of one process. Cheap to clone; clones share them.
#[derive(Clone, Debug)]
pub struct World {
    /// Where things are kept.
    pub files: Arc<dyn Files>,
    seed: Arc<Mutex<fastrand::Rng>>,
    wall: Wall,
}

#[derive(Clone, Debug)]
struct Wall {
    /// Since the Unix epoch, when the world began.
    start: Duration,
    began: Instant,
}

impl World {
    /// A world with the given files, seed and time of day (since the Unix epoch). Time goes on by tokio's clock.
    ///
    /// Must be called within a tokio runtime.
    #[must_use]
    pub fn new(files: Arc<dyn Files>, seed: u64, start: Duration) -> Self {
        let seed = Arc::new(Mutex::new(fastrand::Rng::with_seed(seed)));
        Self { files, seed, wall: Wall { start, began: Instant::now() } }
    }

    /// A source of randomness of its own, derived from the world's seed: the order of these calls decides what each gets.
    #[must_use]
    pub fn rng(&self) -> fastrand::Rng {
        self.seed.lock().unwrap_or_else(PoisonError::into_inner).fork()
    }

    /// 128 random bits, as 32 hexadecimal digits: a session or rollout id.
    #[must_use]
    pub fn unique_id(&self) -> String {
        let id = self.seed.lock().unwrap_or_else(PoisonError::into_inner).u128(..);
        format!("{id:032x}")
    }

    /// The time of day, since the Unix epoch.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.wall.start + self.wall.began.elapsed()
    }
}

/// What a ledger needs of a file system. Paths are files, never folders.
///
/// One writer per file: calls on the same path are made one after the other. An error of `append` leaves the end of the file
/// unknown; the writer reads the length and truncates before it goes on.
#[async_trait]
pub trait Files: fmt::Debug + Send + Sync + 'static {
    /// Length in bytes; `None` when the file is not there.
    async fn length(&self, path: &Path) -> Result<Option<u64>>;

    /// Up to `bytes_max` bytes from an offset; fewer only at the end of the file.
    async fn read(&self, path: &Path, from: u64, bytes_max: usize) -> Result<Bytes>;

    /// Adds the pieces at the end, creating the file (and its folder) if needed. With `durable`, returns after they are on the disk.
    async fn append(&self, path: &Path, pieces: &[Bytes], durable: bool) -> Result<()>;

    /// Cuts the file to a length, durably.
    async fn truncate(&self, path: &Path, length: u64) -> Result<()>;

    /// Puts new contents in place of the file: after a crash it has either the old or the new.
    async fn replace(&self, path: &Path, contents: &[Bytes]) -> Result<()>;

    /// Removes the file; one that is not there is fine.
    async fn remove(&self, path: &Path) -> Result<()>;

    /// Holds the file for this process until the guard is dropped.
    ///
    /// # Errors
    /// `FailedPrecondition` when another process holds it.
    async fn lock(&self, path: &Path) -> Result<Box<dyn FileLock>>;
}

/// A file held for this process; dropping it lets go.
pub trait FileLock: fmt::Debug + Send + Sync {}
