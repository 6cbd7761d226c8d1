//! Files, randomness and the wall clock of a process. A simulation replaces them.

mod real;

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::Instant;

use crate::base::error::{Error, Result};
use crate::base::hex;

pub use real::RealFiles;

/// The files, the seed and the wall clock of one process. Cheap to clone; clones share them.
///
/// ```
/// use gym_core::World;
///
/// // Of a program; tests have a simulated one.
/// let world = World::real();
/// assert!(!world.is_simulated());
/// assert_ne!(world.unique_id(), world.unique_id());
/// ```
#[derive(Clone, Debug)]
pub struct World {
    /// The file system.
    pub files: Arc<dyn Files>,
    seed: Arc<Mutex<fastrand::Rng>>,
    wall: Wall,
    simulated: Option<Arc<SimulatedProcess>>,
}

/// A process that is a part of this one.
#[derive(Debug, Default)]
struct SimulatedProcess {
    killed: AtomicBool,
}

#[derive(Clone, Debug)]
struct Wall {
    /// The time of day when the world was created, since the Unix epoch.
    start: Duration,
    began: Instant,
    /// Milliseconds by which the clock was set since then.
    stepped_ms: Arc<AtomicI64>,
}

impl World {
    /// Creates a simulated world with these files, this seed and this time of day (since the Unix epoch). Time advances with
    /// tokio's clock.
    ///
    /// Must be called within a tokio runtime.
    #[must_use]
    pub fn new(files: Arc<dyn Files>, seed: u64, start: Duration) -> Self {
        let seed = Arc::new(Mutex::new(fastrand::Rng::with_seed(seed)));
        let wall = Wall { start, began: Instant::now(), stepped_ms: Arc::default() };
        Self { files, seed, wall, simulated: Some(Arc::default()) }
    }

    /// Creates a world with the files and the time of day of this machine, and an unpredictable seed.
    ///
    /// Must be called within a tokio runtime.
    #[must_use]
    pub fn real() -> Self {
        // std takes the keys of its hasher from the operating system's random numbers.
        let seed = RandomState::new().hash_one(std::process::id());
        Self { simulated: None, ..Self::new(Arc::new(RealFiles::new()), seed, time_of_day()) }
    }

    /// Creates a random number generator from the world's seed. Equal seeds give equal generators to calls in the same
    /// order.
    #[must_use]
    pub fn rng(&self) -> fastrand::Rng {
        self.seed.lock().fork()
    }

    /// Returns 128 random bits as 32 hexadecimal digits, for the id of a session or a rollout.
    #[must_use]
    pub fn unique_id(&self) -> String {
        let id = self.seed.lock().u128(..);
        let mut text = String::with_capacity(32);
        hex::push::<32>(&mut text, id);
        text
    }

    /// Returns the time of day, since the Unix epoch.
    #[must_use]
    pub fn now(&self) -> Duration {
        let now = self.wall.start + self.wall.began.elapsed();
        let stepped_ms = self.wall.stepped_ms.load(Ordering::Relaxed);
        let stepped = Duration::from_millis(stepped_ms.unsigned_abs());
        if stepped_ms < 0 { now.saturating_sub(stepped) } else { now + stepped }
    }

    /// Returns the time of day as this machine has it at this moment, since the Unix epoch: for times that other processes read. The
    /// [`now`](Self::now) of a real world does not notice that the clock was set since its creation.
    #[must_use]
    pub fn machine_time(&self) -> Duration {
        if self.is_simulated() { self.now() } else { time_of_day() }
    }

    /// Runs work that blocks, such as reads of local files, on a thread for such work. In a simulated world it runs at once, so that
    /// the order of events does not depend on threads, and not at all after [`kill`](Self::kill).
    ///
    /// # Errors
    /// `Internal` if the work panicked, if the runtime ends, or after `kill`.
    pub async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        match &self.simulated {
            None => {
                spawn_blocking(work).await.map_err(|error| Error::internal("the work was interrupted").caused_by(error))
            }
            Some(_) if self.is_killed() => Err(Error::internal("the process was killed")),
            Some(_) => Ok(work()),
        }
    }

    /// Returns `true` for a world that was created with [`new`](Self::new).
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.simulated.is_some()
    }

    /// Ends a simulated process as `kill -9` does: what is dropped from now on leaves its files. Does nothing in a real world.
    pub fn kill(&self) {
        if let Some(process) = &self.simulated {
            process.killed.store(true, Ordering::Relaxed);
        }
    }

    /// Returns `true` after [`kill`](Self::kill).
    #[must_use]
    pub fn is_killed(&self) -> bool {
        self.simulated.as_ref().is_some_and(|process| process.killed.load(Ordering::Relaxed))
    }

    /// Sets the time of day forward or back, as an administrator or a time server does. Deadlines and pauses do not follow it.
    pub fn step_clock(&self, by_ms: i64) {
        self.wall.stepped_ms.fetch_add(by_ms, Ordering::Relaxed);
    }
}

/// Reads the wall clock. This is the only place.
#[allow(clippy::disallowed_methods, reason = "a real world has the real time")]
fn time_of_day() -> Duration {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
}

/// The file system operations of a ledger. A path names a file, never a directory.
///
/// - **Order.** Each file has one writer, which makes its calls one after another.
/// - **Failed writes.** After an error of `append`, the length of the file is unknown. Further appends fail until the
///   writer has read the length and truncated the file.
/// - **Failed syncs** are never repeated. Linux marks the pages clean that it could not write, so the next sync succeeds
///   without writing them (`fsync(2)`; Rebello et al., USENIX ATC 2020). Bytes whose sync failed, or may have failed in
///   another process, are made durable only by [`Files::rewrite`].
/// - **Names.** A call that creates, renames or removes a file returns after the directory was synced.
/// - **Errors** contain the path, the operation and the fix: `ResourceExhausted` for a full disk, an exceeded quota and
///   a limit on the file size, `NotFound`, and `InvalidArgument` for an unusable path. No error is `NotStarted`.
#[async_trait]
pub trait Files: fmt::Debug + Send + Sync + 'static {
    /// Returns the length in bytes; `None` if the file does not exist.
    async fn length(&self, path: &Path) -> Result<Option<u64>>;

    /// Reads up to `bytes_max` bytes from offset `from`. Returns fewer only at the end of the file.
    async fn read(&self, path: &Path, from: u64, bytes_max: usize) -> Result<Bytes>;

    /// Appends the pieces, and creates the file and its directory if needed. With `durable`, returns after these and
    /// all earlier pieces are on the disk. An empty list only syncs.
    async fn append(&self, path: &Path, pieces: &[Bytes], durable: bool) -> Result<()>;

    /// Writes the pieces durably at offset `from`, which is at most the length of the file. Bytes that are there already
    /// are written again, even if they are the same. After an error it is unknown which bytes are on the disk.
    async fn rewrite(&self, path: &Path, from: u64, pieces: &[Bytes]) -> Result<()>;

    /// Truncates the file durably to `length`, which is at most its current length.
    async fn truncate(&self, path: &Path, length: u64) -> Result<()>;

    /// Replaces the contents of the file atomically: after a crash it has either the old or the new contents.
    async fn replace(&self, path: &Path, contents: &[Bytes]) -> Result<()>;

    /// Renames the file atomically within its directory, and replaces a file that has the name. The contents become
    /// durable only if they were synced before.
    async fn rename(&self, from: &Path, to: &Path) -> Result<()>;

    /// Removes the file. Succeeds if the file does not exist.
    async fn remove(&self, path: &Path) -> Result<()>;

    /// Locks the file, and creates it if needed, until the guard is dropped or the process exits.
    ///
    /// # Errors
    /// `FailedPrecondition` if another process, or another guard of this process, holds the lock.
    async fn lock(&self, path: &Path) -> Result<Box<dyn FileLock>>;
}

/// The lock of a file, held by this process. Dropping the guard releases the lock.
pub trait FileLock: fmt::Debug + Send + Sync {}
