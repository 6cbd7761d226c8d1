//! A simulated disk that loses data that was not synced.
//!
//! Latency, full disks, failures and crashes all follow from one seed. Nothing blocks a thread, so a paused clock
//! advances by itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::base::error::{Code, Error, Result};
use crate::base::world::{FileLock, Files};

/// The unit that a disk writes atomically. A hole in a torn tail starts and ends at a sector boundary, or at an end of
/// the unsynced data.
const SECTOR_BYTES: usize = 512;

/// The view that one process has of a simulated disk. Clones are the same process. [`SimFiles::crash`] ends the process
/// and returns the view of the next one.
#[derive(Clone, Debug)]
pub struct SimFiles {
    disk: Arc<Mutex<Disk>>,
    /// The number of the process.
    life: u64,
}

/// A fault of a call to [`Files::append`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFault {
    /// The disk is full after half of the bytes.
    DiskFull,
    /// All bytes are written, the sync fails, and the system discards the unsynced data.
    SyncFailed,
}

/// The calls to a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileCounts {
    /// The number of calls to `append`.
    pub appends: u64,
    /// The number of durable calls to `append`.
    pub syncs: u64,
    /// The number of appended bytes.
    pub bytes: u64,
    /// The number of calls to `read`.
    pub reads: u64,
}

struct Disk {
    rng: fastrand::Rng,
    latency_max: Duration,
    life: u64,
    files: BTreeMap<PathBuf, Content>,
    locked: BTreeSet<PathBuf>,
    /// Free space in bytes.
    room: u64,
    /// The number of appends before the fault, and the fault.
    fault: Option<(u64, FileFault)>,
    counts: FileCounts,
}

#[derive(Clone, Default)]
struct Content {
    bytes: Vec<u8>,
    /// The length that survives a crash.
    synced: usize,
    /// The offset from which the system wrongly treats the data as synced.
    forgotten: Option<usize>,
    /// Whether an append failed, so that the length is unknown.
    broken: bool,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lengths: BTreeMap<_, _> = self.files.iter().map(|(path, content)| (path, content.bytes.len())).collect();
        f.debug_struct("Disk").field("life", &self.life).field("lengths", &lengths).finish_non_exhaustive()
    }
}

impl SimFiles {
    /// Creates an empty disk. Each append takes up to 2 ms, drawn from the seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let disk = Disk {
            rng: fastrand::Rng::with_seed(seed),
            latency_max: Duration::from_millis(2),
            life: 0,
            files: BTreeMap::new(),
            locked: BTreeSet::new(),
            room: u64::MAX,
            fault: None,
            counts: FileCounts::default(),
        };
        Self { disk: Arc::new(Mutex::new(disk)), life: 0 }
    }

    /// Sets the maximum latency of an append. Default: 2 ms.
    pub fn set_latency_max(&self, latency_max: Duration) {
        self.disk().latency_max = latency_max;
    }

    /// Sets the free space in bytes. Default: unlimited.
    pub fn set_room(&self, bytes: u64) {
        self.disk().room = bytes;
    }

    /// Injects a fault into the n-th append from now, counted from 0.
    pub fn fail_append(&self, nth: u64, fault: FileFault) {
        self.disk().fault = Some((nth, fault));
    }

    /// Removes a fault that has not happened yet.
    pub fn clear_fault(&self) {
        self.disk().fault = None;
    }

    /// Returns the calls of all processes so far.
    #[must_use]
    pub fn counts(&self) -> FileCounts {
        self.disk().counts
    }

    /// Returns the contents of a file; empty if it does not exist.
    #[must_use]
    pub fn contents(&self, path: &Path) -> Vec<u8> {
        self.disk().files.get(path).map(|content| content.bytes.clone()).unwrap_or_default()
    }

    /// Replaces the contents of a file, synced, without notifying the process that has it open.
    pub fn set_contents(&self, path: &Path, bytes: impl Into<Vec<u8>>) {
        let bytes = bytes.into();
        let synced = bytes.len();
        self.disk().files.insert(path.to_owned(), Content { bytes, synced, ..Content::default() });
    }

    /// Ends the process as a power failure does, and returns the view of the next process. All further calls of this
    /// one fail, and its locks are released. Each file keeps a random prefix of its unsynced data, which may have a
    /// hole of zeros.
    #[must_use]
    pub fn crash(&self) -> Self {
        let mut disk = self.disk();
        disk.life += 1;
        disk.locked.clear();
        let Disk { rng, files, .. } = &mut *disk;
        for content in files.values_mut() {
            content.tear(rng);
        }
        Self { disk: Arc::clone(&self.disk), life: disk.life }
    }

    /// Ends the process as `kill -9` does, and returns the view of the next process. All further calls of this one
    /// fail, and its locks are released. All written data remains.
    #[must_use]
    pub fn kill(&self) -> Self {
        let mut disk = self.disk();
        disk.life += 1;
        disk.locked.clear();
        disk.files.values_mut().for_each(|content| content.broken = false);
        Self { disk: Arc::clone(&self.disk), life: disk.life }
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the disk if this process has not ended.
    fn alive(&self) -> Result<MutexGuard<'_, Disk>> {
        let disk = self.disk();
        if disk.life == self.life {
            Ok(disk)
        } else {
            Err(Error::finished(Code::Unavailable, "the process has crashed"))
        }
    }

    async fn wait(&self) {
        let latency = {
            let mut disk = self.disk();
            let max = u64::try_from(disk.latency_max.as_micros()).unwrap_or(u64::MAX);
            Duration::from_micros(disk.rng.u64(0..=max))
        };
        tokio::time::sleep(latency).await;
    }
}

impl Content {
    fn tear(&mut self, rng: &mut fastrand::Rng) {
        // Data that the system discarded is lost: the file may have its length, but not its bytes.
        if let Some(from) = self.forgotten.take() {
            let end = self.bytes.len();
            self.bytes[from.min(end)..].fill(0);
            self.synced = self.synced.min(from);
        }
        let kept = rng.usize(self.synced..=self.bytes.len());
        self.bytes.truncate(kept);
        if kept > self.synced && rng.bool() {
            let sectors = self.synced.div_ceil(SECTOR_BYTES)..kept.div_ceil(SECTOR_BYTES);
            let first = rng.usize(sectors.start..=sectors.end) * SECTOR_BYTES;
            let last = rng.usize(sectors.start..=sectors.end) * SECTOR_BYTES;
            let (start, end) = (first.min(last).clamp(self.synced, kept), first.max(last).clamp(self.synced, kept));
            self.bytes[start..end].fill(0);
        }
        self.synced = self.bytes.len();
        self.broken = false;
    }
}

fn full(path: &Path) -> Error {
    Error::finished(
        Code::ResourceExhausted,
        "the disk is full; free space on its file system or choose another path, then resume",
    )
    .about(format!("append to {}", path.display()))
}

fn missing(doing: &str, path: &Path) -> Error {
    Error::finished(Code::NotFound, "no such file").about(format!("{doing} {}", path.display()))
}

#[async_trait]
impl Files for SimFiles {
    async fn length(&self, path: &Path) -> Result<Option<u64>> {
        Ok(self.alive()?.files.get(path).map(|content| content.bytes.len() as u64))
    }

    async fn read(&self, path: &Path, from: u64, bytes_max: usize) -> Result<Bytes> {
        let mut disk = self.alive()?;
        disk.counts.reads += 1;
        let bytes = &disk.files.get(path).ok_or_else(|| missing("read", path))?.bytes;
        let from = usize::try_from(from).unwrap_or(usize::MAX).min(bytes.len());
        let end = from.saturating_add(bytes_max).min(bytes.len());
        Ok(Bytes::copy_from_slice(&bytes[from..end]))
    }

    async fn append(&self, path: &Path, pieces: &[Bytes], durable: bool) -> Result<()> {
        let wanted: usize = pieces.iter().map(Bytes::len).sum();
        let (end, fault) = {
            let mut disk = self.alive()?;
            disk.counts.appends += 1;
            disk.counts.syncs += u64::from(durable);
            let fault = match disk.fault.take() {
                Some((0, fault)) => Some(fault),
                Some((left, fault)) => {
                    disk.fault = Some((left - 1, fault));
                    None
                }
                None => None,
            };
            let room = usize::try_from(disk.room).unwrap_or(usize::MAX);
            let written = if fault == Some(FileFault::DiskFull) { wanted / 2 } else { wanted }.min(room);
            disk.room -= written as u64;
            disk.counts.bytes += written as u64;
            let content = disk.files.entry(path.to_owned()).or_default();
            if content.broken {
                return Err(Error::finished(Code::Internal, "an earlier write failed; truncate the file first")
                    .about(format!("append to {}", path.display())));
            }
            let before = content.bytes.len();
            let mut left = written;
            for piece in pieces {
                let taken = piece.len().min(left);
                content.bytes.extend_from_slice(&piece[..taken]);
                left -= taken;
            }
            if fault == Some(FileFault::SyncFailed) {
                content.broken = true;
                content.forgotten = Some(content.forgotten.unwrap_or(before).min(content.synced));
            } else if written < wanted || fault.is_some() {
                content.broken = true;
            }
            (content.bytes.len(), content.broken.then_some(fault.unwrap_or(FileFault::DiskFull)))
        };
        self.wait().await;
        let mut disk = self.alive()?;
        match fault {
            Some(FileFault::DiskFull) => return Err(full(path)),
            Some(FileFault::SyncFailed) => {
                return Err(Error::finished(Code::Internal, "failed: input/output error")
                    .about(format!("append to {}", path.display())));
            }
            None => {}
        }
        if durable && let Some(content) = disk.files.get_mut(path) {
            content.synced = content.synced.max(end.min(content.bytes.len()));
        }
        Ok(())
    }

    async fn truncate(&self, path: &Path, length: u64) -> Result<()> {
        self.wait().await;
        let mut disk = self.alive()?;
        let content = disk.files.get_mut(path).ok_or_else(|| missing("cut", path))?;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > content.bytes.len() {
            return Err(Error::finished(Code::InvalidArgument, "the file is shorter than the requested length")
                .about(format!("cut {}", path.display())));
        }
        content.bytes.truncate(length);
        content.synced = length.min(content.forgotten.unwrap_or(length));
        content.forgotten = content.forgotten.filter(|from| *from < length);
        content.broken = false;
        Ok(())
    }

    async fn replace(&self, path: &Path, contents: &[Bytes]) -> Result<()> {
        self.wait().await;
        let mut disk = self.alive()?;
        let bytes = contents.concat();
        if bytes.len() as u64 > disk.room {
            return Err(full(path));
        }
        disk.room -= bytes.len() as u64;
        let synced = bytes.len();
        disk.files.insert(path.to_owned(), Content { bytes, synced, ..Content::default() });
        Ok(())
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        self.alive()?.files.remove(path);
        Ok(())
    }

    async fn lock(&self, path: &Path) -> Result<Box<dyn FileLock>> {
        let mut disk = self.alive()?;
        if !disk.locked.insert(path.to_owned()) {
            return Err(Error::finished(
                Code::FailedPrecondition,
                "another process, or another part of this one, holds the lock",
            )
            .about(format!("lock {}", path.display())));
        }
        disk.files.entry(path.to_owned()).or_default();
        Ok(Box::new(SimLock { files: self.clone(), path: path.to_owned() }))
    }
}

#[derive(Debug)]
struct SimLock {
    files: SimFiles,
    path: PathBuf,
}

impl FileLock for SimLock {}

impl Drop for SimLock {
    fn drop(&mut self) {
        if let Ok(mut disk) = self.files.alive() {
            disk.locked.remove(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_crash_keeps_what_was_synced_and_a_prefix_of_the_rest() {
        let path = Path::new("out/rollouts.jsonl");
        let (mut torn, mut holes) = (0, 0);
        for seed in 0..200 {
            let files = SimFiles::new(seed);
            files.append(path, &[Bytes::from(vec![b'a'; 700])], true).await.unwrap();
            files.append(path, &[Bytes::from(vec![b'b'; 3000])], false).await.unwrap();
            let after = files.crash();
            assert_eq!(files.length(path).await.unwrap_err().code(), Code::Unavailable, "seed {seed}");
            let contents = after.contents(path);
            assert!(contents.starts_with(&[b'a'; 700]) && contents.len() <= 3700, "seed {seed}");
            assert!(contents[700..].iter().all(|byte| matches!(byte, b'b' | 0)), "seed {seed}");
            torn += u32::from(contents.len() < 3700);
            holes += u32::from(contents.contains(&0));
        }
        assert!(torn > 100 && holes > 40, "{torn} torn, {holes} with holes");
    }

    #[tokio::test(start_paused = true)]
    async fn a_sync_after_a_failed_one_does_not_bring_the_bytes_back() {
        let path = Path::new("f");
        let files = SimFiles::new(1);
        files.append(path, &[Bytes::from_static(b"one")], true).await.unwrap();
        files.fail_append(0, FileFault::SyncFailed);
        files.append(path, &[Bytes::from_static(b"two")], true).await.unwrap_err();
        files.disk().files.get_mut(path).unwrap().broken = false;
        files.append(path, &[], true).await.unwrap();
        let contents = files.crash().contents(path);
        assert!(!contents.ends_with(b"two") && contents.starts_with(b"one"), "{contents:?}");
    }
}
