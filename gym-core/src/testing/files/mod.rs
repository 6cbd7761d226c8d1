//! A simulated disk that loses data that was not synced, page by page, as Linux does.
//!
//! Latency, full disks, failures and crashes all follow from one seed. Nothing blocks a thread, so a paused clock
//! advances by itself.

mod names;
mod pages;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};

use crate::base::error::{Code, Error, Result};
use crate::base::world::{FileLock, Files};
use names::Names;
use pages::Pages;

/// The view that one process has of a simulated disk. Clones are the same process. [`SimFiles::crash`] ends the process
/// and returns the view of the next one.
#[derive(Clone, Debug)]
pub struct SimFiles {
    disk: Arc<Mutex<Disk>>,
    /// The number of the process.
    life: u64,
}

/// A fault of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFault {
    /// The disk is full after half of the bytes.
    DiskFull,
    /// All bytes are written, and the sync fails. Some dirty pages do not reach the disk, and the system marks all of
    /// them clean.
    SyncFailed,
    /// A file cannot be opened, for appending, reading, locking or to be replaced: input/output error. A file that is open for appending
    /// stays so.
    OpenFailed,
}

/// The end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileEnd {
    /// A power failure; see [`SimFiles::crash`].
    Crash,
    /// `kill -9`; see [`SimFiles::kill`].
    Kill,
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
    /// The number of bytes that were written again.
    pub rewritten_bytes: u64,
    /// The number of calls to `read`.
    pub reads: u64,
    /// The number of steps of all calls that change files; a process can end in the middle of each.
    pub steps: u64,
}

struct Disk {
    rng: fastrand::Rng,
    latency_max: Duration,
    life: u64,
    names: Names,
    contents: BTreeMap<u64, Pages>,
    locked: BTreeSet<PathBuf>,
    /// Files that the process has open for appending.
    open: BTreeSet<PathBuf>,
    /// Files whose length is unknown because an append failed.
    broken: BTreeSet<PathBuf>,
    /// Free space in bytes.
    room: u64,
    /// The number of writes before the fault, and the fault.
    fault: Option<(u64, FileFault)>,
    /// The number of steps before the process ends, and how it ends.
    end: Option<(u64, FileEnd)>,
    counts: FileCounts,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lengths: BTreeMap<_, _> =
            self.names.iter().map(|(path, file)| (path, self.contents.get(&file).map(Pages::len))).collect();
        f.debug_struct("Disk").field("life", &self.life).field("lengths", &lengths).finish_non_exhaustive()
    }
}

impl SimFiles {
    /// Creates an empty disk. Each step of a write takes up to 2 ms, drawn from the seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let disk = Disk {
            rng: fastrand::Rng::with_seed(seed),
            latency_max: Duration::from_millis(2),
            life: 0,
            names: Names::default(),
            contents: BTreeMap::new(),
            locked: BTreeSet::new(),
            open: BTreeSet::new(),
            broken: BTreeSet::new(),
            room: u64::MAX,
            fault: None,
            end: None,
            counts: FileCounts::default(),
        };
        Self { disk: Arc::new(Mutex::new(disk)), life: 0 }
    }

    /// Sets the maximum latency of one step of a write. Default: 2 ms.
    pub fn set_latency_max(&self, latency_max: Duration) {
        self.disk.lock().latency_max = latency_max;
    }

    /// Sets the free space in bytes. Default: unlimited.
    pub fn set_room(&self, bytes: u64) {
        self.disk.lock().room = bytes;
    }

    /// Injects a fault into the n-th write from now, counted from 0. An append and a rewrite are writes; a truncation is
    /// one for a failed sync. [`FileFault::OpenFailed`] counts what opens a file instead.
    pub fn fail_write(&self, nth: u64, fault: FileFault) {
        self.disk.lock().fault = Some((nth, fault));
    }

    /// Removes a fault and an ending that have not happened yet.
    pub fn clear_fault(&self) {
        let mut disk = self.disk.lock();
        disk.fault = None;
        disk.end = None;
    }

    /// Ends the process in the middle of the n-th step from now, counted from 0: see [`FileCounts::steps`]. All further
    /// calls fail. [`SimFiles::next_process`] returns the view of the next process.
    pub fn end_at_step(&self, nth: u64, end: FileEnd) {
        self.disk.lock().end = Some((nth, end));
    }

    /// Returns the view of the process that runs after the last ending.
    #[must_use]
    pub fn next_process(&self) -> Self {
        let life = self.disk.lock().life;
        Self { disk: Arc::clone(&self.disk), life }
    }

    /// Returns `true` if this process has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.disk.lock().life != self.life
    }

    /// Returns the calls of all processes so far.
    #[must_use]
    pub fn counts(&self) -> FileCounts {
        self.disk.lock().counts
    }

    /// Returns the contents of a file as a process reads them; empty if it does not exist.
    #[must_use]
    pub fn contents(&self, path: &Path) -> Vec<u8> {
        self.disk.lock().pages(path).map(|pages| pages.cached().to_vec()).unwrap_or_default()
    }

    /// Replaces the contents of a file, synced, without notifying the process that has it open.
    pub fn set_contents(&self, path: &Path, bytes: impl Into<Vec<u8>>) {
        let mut disk = self.disk.lock();
        disk.put(path, bytes.into());
        disk.names.sync(path);
        disk.broken.remove(path);
    }

    /// Ends the process and the system as a power failure does, and returns the view of the next process. All further
    /// calls of this one fail, and its locks are released.
    ///
    /// Each page that was not synced is on the disk or not, independently of the others. A file that became longer has
    /// its old length or one up to the end of a page that is on the disk; pages below it that are not are zeros. Of the
    /// names that were not synced, a prefix in the order of the changes remains.
    #[must_use]
    pub fn crash(&self) -> Self {
        let mut disk = self.disk.lock();
        disk.crash();
        Self { disk: Arc::clone(&self.disk), life: disk.life }
    }

    /// Ends the process as `kill -9` does, and returns the view of the next process. All further calls of this one
    /// fail, and its locks are released. All written data remains, except that the system may drop pages that it has
    /// marked clean: those are read from the disk again.
    #[must_use]
    pub fn kill(&self) -> Self {
        let mut disk = self.disk.lock();
        disk.kill();
        Self { disk: Arc::clone(&self.disk), life: disk.life }
    }

    /// Draws what happens from now on from another seed.
    pub fn reseed(&self, seed: u64) {
        self.disk.lock().rng = fastrand::Rng::with_seed(seed);
    }

    /// Returns the disk if this process has not ended.
    fn alive(&self) -> Result<MutexGuard<'_, Disk>> {
        let disk = self.disk.lock();
        if disk.life == self.life {
            Ok(disk)
        } else {
            Err(Error::finished(Code::Unavailable, "the process has crashed"))
        }
    }

    /// Waits as long as one step of a write takes.
    async fn step(&self) {
        let latency = {
            let mut disk = self.disk.lock();
            if disk.life == self.life {
                disk.counts.steps += 1;
                match disk.end {
                    Some((0, FileEnd::Crash)) => disk.crash(),
                    Some((0, FileEnd::Kill)) => disk.kill(),
                    Some((left, end)) => disk.end = Some((left - 1, end)),
                    None => {}
                }
            }
            let max = u64::try_from(disk.latency_max.as_micros()).unwrap_or(u64::MAX);
            Duration::from_micros(disk.rng.u64(0..=max))
        };
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
    }

    /// Opens a file for appending, and creates it if needed. As in [`RealFiles`](crate::base::RealFiles), the directory
    /// is synced then, not before each append.
    async fn open(&self, path: &Path) -> Result<()> {
        {
            let mut disk = self.alive()?;
            if disk.open.contains(path) {
                return Ok(());
            }
            disk.may_open(path)?;
            if disk.pages(path).is_none() {
                disk.put(path, Vec::new());
            }
        }
        self.step().await;
        let mut disk = self.alive()?;
        disk.names.sync(path);
        disk.open.insert(path.to_owned());
        Ok(())
    }

    /// Changes the names, and then syncs their directory.
    async fn rename_or_remove(&self, from: &Path, to: Option<&Path>) -> Result<()> {
        {
            let mut disk = self.alive()?;
            for path in [Some(from), to].into_iter().flatten() {
                disk.open.remove(path);
                disk.broken.remove(path);
            }
            match to {
                Some(to) if !disk.names.rename(from, to) => return Err(missing("rename", from)),
                Some(_) => {}
                None => disk.names.remove(from),
            }
        }
        self.step().await;
        self.alive()?.names.sync(to.unwrap_or(from));
        Ok(())
    }
}

impl Disk {
    fn pages(&self, path: &Path) -> Option<&Pages> {
        self.contents.get(&self.names.get(path)?)
    }

    fn pages_mut(&mut self, path: &Path) -> Option<(&mut Pages, &mut fastrand::Rng)> {
        Some((self.contents.get_mut(&self.names.get(path)?)?, &mut self.rng))
    }

    /// Gives a name to a new file with synced contents.
    fn put(&mut self, path: &Path, bytes: Vec<u8>) {
        let file = self.names.add(path);
        self.contents.insert(file, Pages::synced(bytes));
    }

    /// Returns the fault of this write.
    fn take_fault(&mut self, may_be_full: bool) -> Option<FileFault> {
        match self.fault {
            Some((_, FileFault::DiskFull)) if !may_be_full => None,
            None | Some((_, FileFault::OpenFailed)) => None,
            Some((0, fault)) => {
                self.fault = None;
                Some(fault)
            }
            Some((left, fault)) => {
                self.fault = Some((left - 1, fault));
                None
            }
        }
    }

    /// Fails if this opening of a file meets its fault.
    fn may_open(&mut self, path: &Path) -> Result<()> {
        match self.fault {
            Some((0, FileFault::OpenFailed)) => {
                self.fault = None;
                Err(io_error("open", path))
            }
            Some((left, FileFault::OpenFailed)) => {
                self.fault = Some((left - 1, FileFault::OpenFailed));
                Ok(())
            }
            Some((_, FileFault::DiskFull | FileFault::SyncFailed)) | None => Ok(()),
        }
    }

    fn end_process(&mut self) {
        self.life += 1;
        self.end = None;
        self.locked.clear();
        self.open.clear();
        self.broken.clear();
    }

    fn crash(&mut self) {
        self.end_process();
        let Self { names, contents, rng, .. } = self;
        names.crash(rng);
        contents.retain(|file, _| names.refers_to(*file));
        contents.values_mut().for_each(|pages| pages.crash(rng));
    }

    fn kill(&mut self) {
        self.end_process();
        let Self { contents, rng, .. } = self;
        contents.values_mut().for_each(|pages| pages.evict(rng));
    }
}

fn full(path: &Path) -> Error {
    Error::finished(
        Code::ResourceExhausted,
        "the disk is full; free space on its file system or choose another path, then resume",
    )
    .about(format!("append to {}", path.display()))
}

/// Returns the error of a write that met a fault.
fn fault_error(fault: Option<FileFault>, doing: &str, path: &Path) -> Result<()> {
    match fault {
        Some(FileFault::DiskFull) => Err(full(path)),
        Some(FileFault::SyncFailed) => Err(io_error(doing, path)),
        Some(FileFault::OpenFailed) | None => Ok(()),
    }
}

fn io_error(doing: &str, path: &Path) -> Error {
    Error::finished(Code::Internal, "failed: input/output error").about(format!("{doing} {}", path.display()))
}

fn missing(doing: &str, path: &Path) -> Error {
    Error::finished(Code::NotFound, "no such file").about(format!("{doing} {}", path.display()))
}

#[async_trait]
impl Files for SimFiles {
    async fn length(&self, path: &Path) -> Result<Option<u64>> {
        Ok(self.alive()?.pages(path).map(|pages| pages.len() as u64))
    }

    async fn read(&self, path: &Path, from: u64, bytes_max: usize) -> Result<Bytes> {
        let mut disk = self.alive()?;
        disk.counts.reads += 1;
        if disk.pages(path).is_some() {
            disk.may_open(path)?;
        }
        let (pages, rng) = disk.pages_mut(path).ok_or_else(|| missing("read", path))?;
        let from = usize::try_from(from).unwrap_or(usize::MAX).min(pages.len());
        let end = from.saturating_add(bytes_max).min(pages.len());
        let read = Bytes::copy_from_slice(&pages.cached()[from..end]);
        // Another program needs memory.
        pages.evict(rng);
        Ok(read)
    }

    async fn append(&self, path: &Path, pieces: &[Bytes], durable: bool) -> Result<()> {
        let wanted: usize = pieces.iter().map(Bytes::len).sum();
        if self.alive()?.broken.contains(path) {
            return Err(Error::finished(Code::Internal, "an earlier write failed; truncate the file first")
                .about(format!("append to {}", path.display())));
        }
        self.open(path).await?;
        let failed = {
            let mut disk = self.alive()?;
            disk.counts.appends += 1;
            disk.counts.syncs += u64::from(durable);
            let fault = disk.take_fault(true);
            let room = usize::try_from(disk.room).unwrap_or(usize::MAX);
            let written = if fault == Some(FileFault::DiskFull) { wanted / 2 } else { wanted }.min(room);
            disk.room -= written as u64;
            disk.counts.bytes += written as u64;
            let (pages, rng) = disk.pages_mut(path).ok_or_else(|| missing("append to", path))?;
            pages.write_back_some(rng);
            let mut left = written;
            for piece in pieces {
                let taken = piece.len().min(left);
                pages.write(pages.len(), &piece[..taken]);
                left -= taken;
            }
            if fault == Some(FileFault::SyncFailed) {
                pages.fail_sync(rng);
            }
            let failed = if written < wanted { Some(FileFault::DiskFull) } else { fault };
            if failed.is_some() {
                disk.broken.insert(path.to_owned());
            }
            failed
        };
        self.step().await;
        let mut disk = self.alive()?;
        fault_error(failed, "append to", path)?;
        if durable && let Some((pages, _)) = disk.pages_mut(path) {
            pages.sync();
        }
        Ok(())
    }

    async fn rewrite(&self, path: &Path, from: u64, pieces: &[Bytes]) -> Result<()> {
        let failed = {
            let mut disk = self.alive()?;
            let fault = disk.take_fault(true);
            let wanted: usize = pieces.iter().map(Bytes::len).sum();
            let room = usize::try_from(disk.room).unwrap_or(usize::MAX);
            let (pages, rng) = disk.pages_mut(path).ok_or_else(|| missing("write again", path))?;
            let mut at = usize::try_from(from).unwrap_or(usize::MAX);
            if at > pages.len() {
                return Err(beyond_the_end("write again", path));
            }
            pages.write_back_some(rng);
            // Only what makes the file longer needs room.
            let fits = (pages.len() - at).saturating_add(room);
            let mut left = if fault == Some(FileFault::DiskFull) { wanted / 2 } else { wanted }.min(fits);
            let fault = if left < wanted { Some(FileFault::DiskFull) } else { fault };
            for piece in pieces {
                let taken = piece.len().min(left);
                pages.write(at, &piece[..taken]);
                at += taken;
                left -= taken;
            }
            if fault == Some(FileFault::SyncFailed) {
                pages.fail_sync(rng);
            }
            disk.counts.rewritten_bytes += wanted as u64;
            fault
        };
        self.step().await;
        let mut disk = self.alive()?;
        fault_error(failed, "write again", path)?;
        if let Some((pages, _)) = disk.pages_mut(path) {
            pages.sync();
        }
        Ok(())
    }

    async fn truncate(&self, path: &Path, length: u64) -> Result<()> {
        let failed = {
            let mut disk = self.alive()?;
            let fault = disk.take_fault(false);
            let (pages, rng) = disk.pages_mut(path).ok_or_else(|| missing("cut", path))?;
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            if length > pages.len() {
                return Err(beyond_the_end("cut", path));
            }
            pages.truncate(length);
            if fault.is_some() {
                pages.fail_sync(rng);
            }
            disk.open.remove(path);
            fault.is_some()
        };
        self.step().await;
        let mut disk = self.alive()?;
        if failed {
            return Err(io_error("cut", path));
        }
        disk.broken.remove(path);
        if let Some((pages, _)) = disk.pages_mut(path) {
            pages.sync();
        }
        Ok(())
    }

    async fn replace(&self, path: &Path, contents: &[Bytes]) -> Result<()> {
        self.step().await;
        {
            let mut disk = self.alive()?;
            disk.may_open(path)?;
            let bytes = contents.concat();
            if bytes.len() as u64 > disk.room {
                return Err(full(path));
            }
            disk.room -= bytes.len() as u64;
            // The contents are synced before the file gets its name.
            disk.put(path, bytes);
            disk.open.remove(path);
            disk.broken.remove(path);
        }
        self.step().await;
        self.alive()?.names.sync(path);
        Ok(())
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.rename_or_remove(from, Some(to)).await
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        self.rename_or_remove(path, None).await
    }

    async fn lock(&self, path: &Path) -> Result<Box<dyn FileLock>> {
        {
            let mut disk = self.alive()?;
            if !disk.locked.insert(path.to_owned()) {
                return Err(Error::finished(
                    Code::FailedPrecondition,
                    "another process, or another part of this one, holds the lock",
                )
                .about(format!("lock {}", path.display())));
            }
        }
        let lock = SimLock { files: self.clone(), path: path.to_owned() };
        self.open(path).await?;
        Ok(Box::new(lock))
    }
}

fn beyond_the_end(doing: &str, path: &Path) -> Error {
    Error::finished(Code::InvalidArgument, "the file is shorter than the requested length")
        .about(format!("{doing} {}", path.display()))
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

    const PAGE: usize = 4096;

    fn bytes(byte: u8, count: usize) -> [Bytes; 1] {
        [Bytes::from(vec![byte; count])]
    }

    #[tokio::test(start_paused = true)]
    async fn a_crash_keeps_what_was_synced_and_loses_each_other_page_on_its_own() {
        let path = Path::new("out/rollouts.jsonl");
        let mut seen = BTreeSet::new();
        for seed in 0..500 {
            let files = SimFiles::new(seed);
            files.append(path, &bytes(b'a', 700), true).await.unwrap();
            files.append(path, &bytes(b'b', 3 * PAGE), false).await.unwrap();
            let after = files.crash();
            assert_eq!(files.length(path).await.unwrap_err().code(), Code::Unavailable, "seed {seed}");
            let contents = after.contents(path);
            assert!(contents.starts_with(&[b'a'; 700]), "seed {seed}");
            let pages: Vec<_> = contents.chunks(PAGE).map(|page| *page.last().unwrap()).collect();
            for (page, last) in contents[700..].chunk_by(|one, other| one == other).map(|same| (same.len(), same[0])) {
                assert!(matches!(last, b'b' | 0), "seed {seed}");
                let whole = [PAGE, 700, PAGE - 700].map(|part| (page % PAGE) % part);
                assert!(whole.contains(&0), "seed {seed}: {page} bytes are not whole pages");
            }
            assert_ne!(pages.last(), Some(&0), "seed {seed}: the length ends at a page that is on the disk");
            seen.insert(pages);
        }
        // Only the synced bytes, or a last page that is there: with it, each page before it is there or not.
        assert_eq!(seen.len(), 1 + 1 + 2 + 4 + 8, "{seen:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_sync_after_a_failed_one_does_not_bring_the_bytes_back_and_a_rewrite_does() {
        let path = Path::new("f");
        for (seed, again) in (0..100).flat_map(|seed| [(seed, false), (seed, true)]) {
            let files = SimFiles::new(seed);
            files.append(path, &bytes(b'1', 3), true).await.unwrap();
            files.fail_write(0, FileFault::SyncFailed);
            files.append(path, &bytes(b'2', 3), true).await.unwrap_err();
            assert_eq!(files.contents(path), b"111222", "seed {seed}: the cache has it");
            let files = files.kill();
            if again {
                files.rewrite(path, 3, &bytes(b'2', 3)).await.unwrap();
            } else {
                files.append(path, &[], true).await.unwrap();
            }
            let wanted: &[u8] = if again { b"111222" } else { b"111\0\0\0" };
            assert_eq!(files.crash().contents(path), wanted, "seed {seed}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_system_may_read_lost_pages_from_the_disk_again() {
        let path = Path::new("f");
        let mut evicted = 0;
        for seed in 0..100 {
            let files = SimFiles::new(seed);
            files.append(path, &bytes(b'1', PAGE), true).await.unwrap();
            files.fail_write(0, FileFault::SyncFailed);
            files.append(path, &bytes(b'2', PAGE), true).await.unwrap_err();
            let contents = files.kill().contents(path);
            assert_eq!(contents.len(), 2 * PAGE, "seed {seed}");
            evicted += u32::from(contents[PAGE..] == [0; PAGE]);
        }
        assert!((10..60).contains(&evicted), "{evicted}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_crash_in_a_truncation_keeps_the_old_length_or_the_new_one() {
        let path = Path::new("f");
        let mut lengths = BTreeMap::new();
        for seed in 0..100 {
            let files = SimFiles::new(seed);
            files.append(path, &bytes(b'1', 2 * PAGE), true).await.unwrap();
            files.end_at_step(0, FileEnd::Crash);
            files.truncate(path, 100).await.unwrap_err();
            assert!(files.has_ended(), "seed {seed}");
            let contents = files.next_process().contents(path);
            assert!(contents.starts_with(&[b'1'; 100]), "seed {seed}");
            *lengths.entry(contents.len()).or_insert(0) += 1;
        }
        assert_eq!(lengths.keys().copied().collect::<Vec<_>>(), [100, 2 * PAGE], "{lengths:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_crash_in_a_rename_keeps_the_old_name_or_the_new_one_and_a_kill_keeps_the_new_one() {
        let (from, to) = (Path::new("d/from"), Path::new("d/to"));
        let mut renamed = BTreeSet::new();
        for seed in 0..50 {
            for end in [FileEnd::Crash, FileEnd::Kill] {
                let files = SimFiles::new(seed);
                files.append(from, &bytes(b'n', 10), true).await.unwrap();
                files.append(to, &bytes(b'o', 10), true).await.unwrap();
                files.end_at_step(0, end);
                files.rename(from, to).await.unwrap_err();
                let files = files.next_process();
                let new = files.contents(to) == [b'n'; 10];
                assert_eq!(files.length(from).await.unwrap().is_none(), new, "seed {seed}, {end:?}");
                assert!(new || files.contents(to) == [b'o'; 10], "seed {seed}, {end:?}");
                renamed.insert((end == FileEnd::Kill, new));
            }
        }
        assert_eq!(renamed.into_iter().collect::<Vec<_>>(), [(false, false), (false, true), (true, true)]);
    }
}
