//! Everything that is neither time nor network: files, randomness and the wall clock. A simulation hands in its own.

mod real;

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::time::Instant;

use crate::base::error::Result;
use crate::base::hex;

pub use real::RealFiles;

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

    /// This machine's files and time of day, and a seed that nobody knows.
    ///
    /// Must be called within a tokio runtime.
    #[must_use]
    pub fn real() -> Self {
        // The keys of std's hasher are the operating system's random bits.
        let seed = RandomState::new().hash_one(std::process::id());
        Self::new(Arc::new(RealFiles::new()), seed, time_of_day())
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
        let mut text = String::with_capacity(32);
        hex::push::<32>(&mut text, id);
        text
    }

    /// The time of day, since the Unix epoch.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.wall.start + self.wall.began.elapsed()
    }
}

/// The one look at the wall clock: from here on time goes by tokio's clock.
#[allow(clippy::disallowed_methods, reason = "a real world begins at the real time")]
fn time_of_day() -> Duration {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
}

/// What a ledger needs of a file system. Paths are files, never folders.
///
/// One writer per file: calls on the same path are made one after the other. An error of `append` leaves the end of the file
/// unknown; the writer reads the length and truncates before it goes on, and until then further appends are refused. A
/// failed sync is never tried again: the system may have forgotten what it could not write.
///
/// Errors name the path, what was being done and what to do: `ResourceExhausted` for a full disk, a used-up quota and a
/// file-size limit, `NotFound`, `InvalidArgument` for a path that cannot be used. None of them is "not started".
#[async_trait]
pub trait Files: fmt::Debug + Send + Sync + 'static {
    /// Length in bytes; `None` when the file is not there.
    async fn length(&self, path: &Path) -> Result<Option<u64>>;

    /// Up to `bytes_max` bytes from an offset; fewer only at the end of the file.
    async fn read(&self, path: &Path, from: u64, bytes_max: usize) -> Result<Bytes>;

    /// Adds the pieces at the end, creating the file (and its folder) if needed. With `durable`, returns
    /// after they and everything added before are on the disk; no pieces at all is a sync.
    async fn append(&self, path: &Path, pieces: &[Bytes], durable: bool) -> Result<()>;

    /// Cuts the file to a length that it has, durably.
    async fn truncate(&self, path: &Path, length: u64) -> Result<()>;

    /// Puts new contents in place of the file: after a crash it has either the old or the new.
    async fn replace(&self, path: &Path, contents: &[Bytes]) -> Result<()>;

    /// Removes the file; one that is not there is fine.
    async fn remove(&self, path: &Path) -> Result<()>;

    /// Holds the file, creating it if needed, until the guard is dropped or the process is gone.
    ///
    /// # Errors
    /// `FailedPrecondition` when another process, or another guard of this one, holds it.
    async fn lock(&self, path: &Path) -> Result<Box<dyn FileLock>>;
}

/// A file held for this process; dropping it lets go.
pub trait FileLock: fmt::Debug + Send + Sync {}
