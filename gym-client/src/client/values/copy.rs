//! The copies of values on a node: files that all processes of one user on this machine share.
//!
//! A file `ID.part` is locked exclusively by the process that fetches the value, and becomes `ID` when it is complete. Processes that use
//! a copy lock `ID` shared, so only a copy without users is removed. The kernel releases the locks of a process that dies. The times of
//! `ID` are those of its lease: the last access is its begin, the last change its end.

use std::fs::{DirBuilder, File, FileTimes, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use gym_core::base::temporary_folder;
use gym_core::{Code, Error, Execution, Result, World};
use rustix::fs::{FlockOperation, flock};

use crate::client::values::message::{ValueRef, is_id};

/// The variable that names the directory of the copies.
const DIRECTORY_VARIABLE: &str = "GYM_VALUES_DIR";
const PART: &str = "part";
/// The smallest file system in memory that is used without being named: that of a container often has 64 MiB.
const MEMORY_MIN: u64 = 1 << 30;

/// The directory with the copies of one node.
#[derive(Debug)]
pub(super) struct NodeCopies {
    directory: PathBuf,
    bytes_max: u64,
    world: World,
}

/// A complete copy that this process uses.
#[derive(Debug)]
pub(super) struct Copy {
    pub(super) path: PathBuf,
    pub(super) file: File,
    /// The value is gone, so nobody needs the copy.
    gone: AtomicBool,
    world: World,
}

/// A copy that this process may write.
#[derive(Debug)]
pub(super) struct Part {
    path: PathBuf,
    pub(super) file: File,
    world: World,
}

/// The state of a value on this node.
#[derive(Debug)]
pub(super) enum Found {
    /// A copy, and the time left of its lease.
    Complete(Copy, Duration),
    /// Nobody fetches the value: this process does.
    Mine(Part),
    /// Another process fetches the value, or is about to finish.
    Busy,
}

fn now(world: &World) -> SystemTime {
    SystemTime::UNIX_EPOCH + world.machine_time()
}

fn locked(file: &File, operation: FlockOperation) -> io::Result<bool> {
    match flock(file, operation) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns `true` if `path` is still the file that was opened: another process may have renamed or removed it before the lock.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    match path.symlink_metadata() {
        Ok(found) => Ok((found.dev(), found.ino()) == (opened.dev(), opened.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Opens an existing file with a lock; `None` if there is none, or if another process has a lock that excludes this one.
fn open_locked(path: &Path, operation: FlockOperation) -> io::Result<Option<File>> {
    // For writing, because the times of the file change with its lease.
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok((locked(&file, operation)? && is_at(&file, path)?).then_some(file))
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Removes a file that no process uses. Returns `false` if one does.
fn remove_unused(path: &Path) -> io::Result<bool> {
    match open_locked(path, FlockOperation::NonBlockingLockExclusive)? {
        Some(_locked) => remove(path).map(|()| true),
        None => Ok(false),
    }
}

fn begin_lease(file: &File, lease: Duration, world: &World) -> io::Result<()> {
    let now = now(world);
    file.set_times(FileTimes::new().set_accessed(now).set_modified(now + lease))
}

/// Returns what is left of the lease of a copy. Nothing is left if the clock was set back to before its begin.
fn lease_left(copy: &Metadata, world: &World) -> io::Result<Duration> {
    let now = now(world);
    let (begin, end) = (copy.accessed()?, copy.modified()?);
    let (left, whole) = (end.duration_since(now).unwrap_or_default(), end.duration_since(begin).unwrap_or_default());
    Ok(if now < begin { Duration::ZERO } else { left.min(whole) })
}

impl Copy {
    fn new(path: PathBuf, file: File, world: World) -> Self {
        Self { path, file, gone: AtomicBool::new(false), world }
    }

    /// Lets the copy be used for this long without a request to the holder.
    pub(super) fn extend(&self, lease: Duration) -> io::Result<()> {
        begin_lease(&self.file, lease, &self.world)
    }

    /// Notes that the value is gone: the last user of the node removes the copy.
    pub(super) fn gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    fn clean_up(&self) -> io::Result<()> {
        if self.world.is_killed() {
            return Ok(());
        }
        let due = self.gone.load(Ordering::Relaxed) || lease_left(&self.file.metadata()?, &self.world)?.is_zero();
        if due && locked(&self.file, FlockOperation::NonBlockingLockExclusive)? && is_at(&self.file, &self.path)? {
            return remove(&self.path);
        }
        Ok(())
    }
}

impl Drop for Copy {
    /// Removes the copy if its lease has ended and no other process uses it. Otherwise, the next process finds it.
    fn drop(&mut self) {
        if let Err(error) = self.clean_up() {
            tracing::warn!(path = %self.path.display(), %error, "the copy of a value could not be removed");
        }
    }
}

impl Part {
    /// Reserves the bytes of a value, so that a full disk is an error now and not in the middle.
    fn reserve(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)?;
        #[cfg(target_os = "linux")]
        if bytes > 0 {
            use rustix::fs::{FallocateFlags, fallocate};
            match fallocate(&self.file, FallocateFlags::empty(), 0, bytes) {
                // Not every file system can.
                Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Makes the copy visible to all processes of the node. Returns `None` if it was removed at once, to make room.
    pub(super) fn complete(self, lease: Duration) -> io::Result<Option<Copy>> {
        // A machine that loses power must not find a complete copy without its bytes.
        self.file.sync_data()?;
        begin_lease(&self.file, lease, &self.world)?;
        let path = self.path.with_extension("");
        // Before the lock becomes a shared one: whoever gets an exclusive lock in between finds no part.
        std::fs::rename(&self.path, &path)?;
        flock(&self.file, FlockOperation::LockShared)?;
        if !is_at(&self.file, &path)? {
            return Ok(None);
        }
        Ok(Some(Copy::new(path, self.file.try_clone()?, self.world.clone())))
    }
}

impl Drop for Part {
    /// Removes what a failed fetch has written. A complete copy is no longer at this path.
    fn drop(&mut self) {
        if !self.world.is_killed() && is_at(&self.file, &self.path).unwrap_or(false) {
            let _ = remove(&self.path);
        }
    }
}

impl NodeCopies {
    /// Opens the directory: the given one, that of `GYM_VALUES_DIR`, or one of this user in the memory of this machine.
    pub(super) fn open(directory: Option<&Path>, bytes_max: Option<u64>, world: World) -> Result<Self> {
        let user = rustix::process::getuid().as_raw();
        let directory = place(directory, user);
        let failed = |error: io::Error| {
            let message = format!(
                "copies of values cannot be kept in {}\n  fix: name a directory that can be created with {DIRECTORY_VARIABLE}",
                directory.display()
            );
            Error::internal(message).caused_by(error)
        };
        match DirBuilder::new().mode(0o700).create(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            Ok(()) | Err(_) => {}
        }
        let found = directory.symlink_metadata().map_err(failed)?;
        if !found.is_dir() || found.uid() != user || found.mode() & 0o077 != 0 {
            let message = format!(
                "copies of values are not kept in {}: it must be a directory of this user that nobody else can open\n  fix: name \
                 another one with {DIRECTORY_VARIABLE}; it is created",
                directory.display()
            );
            return Err(Error::internal(message));
        }
        let bytes_max = match bytes_max {
            Some(bytes_max) => bytes_max,
            None => capacity(&directory).map_err(failed)? / 2,
        };
        Ok(Self { directory, bytes_max, world })
    }

    fn path(&self, value: &ValueRef) -> PathBuf {
        self.directory.join(&value.id)
    }

    /// Looks for a copy. If there is none and nobody fetches it, the caller does.
    pub(super) fn find(&self, value: &ValueRef) -> io::Result<Found> {
        let path = self.path(value);
        if let Some(file) = open_locked(&path, FlockOperation::NonBlockingLockShared)? {
            let left = lease_left(&file.metadata()?, &self.world)?;
            return Ok(Found::Complete(Copy::new(path, file, self.world.clone()), left));
        }
        let part = path.with_extension(PART);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&part)?;
        if !locked(&file, FlockOperation::NonBlockingLockExclusive)? || !is_at(&file, &part)? {
            return Ok(Found::Busy);
        }
        let part = Part { path: part, file, world: self.world.clone() };
        // Completed between the two looks, or about to be removed; the next look tells. The drop removes the part.
        if path.exists() {
            return Ok(Found::Busy);
        }
        // What a process left that died.
        part.file.set_len(0)?;
        Ok(Found::Mine(part))
    }

    /// Makes room for a value and reserves it: removes copies whose leases ended first, then the others, but none that a process uses.
    /// Returns `false` while another process makes room.
    ///
    /// # Errors
    /// `ResourceExhausted` if the copies that are in use leave too little room.
    pub(super) fn make_room(&self, value: &ValueRef, part: &Part) -> Result<bool> {
        let failed = |error: io::Error| {
            if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
                return self.full(value, "whose disk is full");
            }
            Error::internal(format!("the copies in {} cannot be changed", self.directory.display())).caused_by(error)
        };
        if value.bytes > self.bytes_max {
            return Err(self.full(value, &format!("which may have {} bytes of copies", self.bytes_max)));
        }
        // Two processes that looked at the same time would use the same room.
        let directory = File::open(&self.directory).map_err(failed)?;
        if !locked(&directory, FlockOperation::NonBlockingLockExclusive).map_err(failed)? {
            return Ok(false);
        }
        let mut files = self.files().map_err(failed)?;
        files.sort();
        let mut used: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        for (left, bytes, path) in files {
            let full = used.saturating_add(value.bytes) > self.bytes_max;
            if (full || left.is_zero()) && remove_unused(&path).map_err(failed)? {
                used -= bytes;
            }
        }
        if used.saturating_add(value.bytes) > self.bytes_max {
            let in_use = format!("where copies that are in use have {used} of {} bytes", self.bytes_max);
            return Err(self.full(value, &in_use));
        }
        part.reserve(value.bytes).map_err(failed)?;
        Ok(true)
    }

    fn full(&self, value: &ValueRef, why: &str) -> Error {
        let message = format!(
            "its {} bytes have no room in {}, {why}\n  fix: drop values, raise ValuesOptions::copies_max, or name a larger place with \
             {DIRECTORY_VARIABLE}",
            value.bytes,
            self.directory.display(),
        );
        Error::new(Code::ResourceExhausted, Execution::Finished, message).about(value.subject())
    }

    /// Removes copies whose leases have ended and that no process uses.
    pub(super) fn sweep(&self) -> io::Result<()> {
        for (left, _, path) in self.files()? {
            if left.is_zero() {
                remove_unused(&path)?;
            }
        }
        Ok(())
    }

    /// Returns what is left of the lease, the size and the path of each copy, and of what is being fetched, which has no lease. Other files
    /// are not ours.
    fn files(&self) -> io::Result<Vec<(Duration, u64, PathBuf)>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.directory)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            let (id, complete) = name.strip_suffix(".part").map_or((name, true), |id| (id, false));
            if !is_id(id) {
                continue;
            }
            let is_gone = |found: &io::Result<Metadata>| {
                found.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
            };
            let (mut path, mut complete, mut found) = (entry.path(), complete, entry.metadata());
            if is_gone(&found) && !complete {
                // A part that is gone may have been completed since it was listed, and then has the other name.
                path.set_extension("");
                (complete, found) = (true, path.symlink_metadata());
            }
            match found {
                Ok(found) if found.is_file() => {
                    let left = if complete { lease_left(&found, &self.world)? } else { Duration::ZERO };
                    files.push((left, found.len(), path));
                }
                Ok(_) => {}
                // Removed meanwhile.
                found if is_gone(&found) => {}
                Err(error) => return Err(error),
            }
        }
        // A copy can be listed under both names.
        files.sort_by(|(_, _, one), (_, _, other)| one.cmp(other));
        files.dedup_by(|(_, _, one), (_, _, other)| one == other);
        Ok(files)
    }
}

/// Returns the directory for copies.
fn place(directory: Option<&Path>, user: u32) -> PathBuf {
    let named = directory.map(Path::to_owned).or_else(|| std::env::var_os(DIRECTORY_VARIABLE).map(PathBuf::from));
    named.unwrap_or_else(|| {
        let memory = Path::new("/dev/shm");
        let fits = memory.is_dir() && capacity(memory).is_ok_and(|bytes| bytes >= MEMORY_MIN);
        let parent = if fits { memory.to_owned() } else { temporary_folder(usize::MAX) };
        parent.join(format!("gym-values-{user}"))
    })
}

fn capacity(directory: &Path) -> io::Result<u64> {
    let system = rustix::fs::statvfs(directory)?;
    Ok(system.f_blocks.saturating_mul(system.f_frsize))
}

/// Removes the copies of these values from this node, unless a process uses them: the process that held the values ends.
pub(super) fn forget<'a>(directory: Option<&Path>, ids: impl Iterator<Item = &'a str>) {
    let directory = place(directory, rustix::process::getuid().as_raw());
    for id in ids {
        if let Err(error) = remove_unused(&directory.join(id)) {
            tracing::warn!(id, %error, "the copy of a value could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gym_core::testing::SimFiles;

    use super::*;

    const LEASE: Duration = Duration::from_secs(5);

    fn value() -> ValueRef {
        let endpoints = vec![gym_core::Endpoint::parse("sim://holder/values").expect("an endpoint")];
        ValueRef { name: "corpus".to_owned(), id: format!("{:032x}", 7), bytes: 3, endpoints }
    }

    fn world() -> World {
        World::new(Arc::new(SimFiles::new(1)), 1, Duration::from_secs(1_700_000_000))
    }

    #[test]
    fn copies_that_are_completed_while_the_directory_is_listed_are_counted() {
        const COPIES: usize = 100;
        for _ in 0..30 {
            let directory = tempfile::tempdir().expect("a directory");
            let place = directory.path().join("copies");
            let copies = NodeCopies::open(Some(&place), None, world()).expect("opens");
            let names: Vec<PathBuf> = (0..COPIES).map(|id| place.join(format!("{id:032x}"))).collect();
            for name in &names {
                std::fs::write(name.with_extension(PART), [0; 3]).expect("written");
            }
            let completing = std::thread::spawn(move || {
                for name in names {
                    std::fs::rename(name.with_extension(PART), name).expect("completed");
                }
            });
            let mut ended = false;
            while !std::mem::replace(&mut ended, completing.is_finished()) {
                assert_eq!(copies.files().expect("listed").len(), COPIES);
            }
            completing.join().expect("renames");
        }
    }

    /// A copy that a process leaves which is killed.
    fn left_by_a_dead_process(directory: &Path) {
        let world = world();
        let copies = NodeCopies::open(Some(directory), None, world.clone()).expect("opens");
        let Ok(Found::Mine(part)) = copies.find(&value()) else { panic!("nobody else fetches it") };
        let copy = part.complete(LEASE).expect("completes").expect("stays");
        world.kill();
        drop(copy);
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_without_users_goes_with_its_lease_also_if_the_clock_was_set_back() {
        for (stepped_ms, stays) in [(0, true), (4_999, true), (5_000, false), (-1, false), (-3_600_000, false)] {
            let folder = tempfile::tempdir().expect("a directory");
            let directory = folder.path().join("copies");
            left_by_a_dead_process(&directory);
            let world = world();
            world.step_clock(stepped_ms);
            let copies = NodeCopies::open(Some(&directory), None, world).expect("opens");
            copies.sweep().expect("sweeps");
            assert_eq!(directory.join(value().id).exists(), stays, "{stepped_ms}");
        }
    }
}
