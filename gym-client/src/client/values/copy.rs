//! The copies of values on a node: files that all processes of one user on this machine share.
//!
//! A file `ID.part` is locked exclusively by the process that fetches the value, and becomes `ID` when it is complete. Processes that use
//! a copy lock `ID` shared, so only a copy without users is removed. The kernel releases the locks of a process that dies. The time
//! of the last change of `ID` is the end of its lease.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use gym_core::{Code, Error, Result, World};
use rustix::fs::{FlockOperation, flock};

use crate::client::values::message::ValueRef;

/// The variable that names the directory of the copies.
const DIRECTORY_VARIABLE: &str = "GYM_VALUES_DIR";
const PART: &str = "part";

/// The directory with the copies of one node.
#[derive(Debug)]
pub(super) struct NodeCopies {
    directory: PathBuf,
    bytes_max: u64,
}

/// A complete copy that this process uses. The last user of a node that drops it removes the file.
#[derive(Debug)]
pub(super) struct Copy {
    pub(super) path: PathBuf,
    pub(super) file: File,
}

/// A copy that this process may write.
#[derive(Debug)]
pub(super) struct Part {
    path: PathBuf,
    pub(super) file: File,
}

/// The state of a value on this node.
#[derive(Debug)]
pub(super) enum Found {
    /// A copy, and the time left of its lease.
    Complete(Copy, Duration),
    /// Nobody fetches the value: this process does.
    Mine(Part),
    /// Another process fetches the value.
    Busy,
}

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + World::real().now()
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

/// Opens an existing file with a lock that nothing waits for; `None` if there is none, or if it is locked otherwise.
fn open_locked(path: &Path, operation: FlockOperation) -> io::Result<Option<File>> {
    // A lock on a file that is open for reading; written is only the time of its last change.
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok((locked(&file, operation)? && is_at(&file, path)?).then_some(file))
}

impl Copy {
    /// Lets the copy be used for this long without asking the holder.
    pub(super) fn extend(&self, lease: Duration) -> io::Result<()> {
        self.file.set_modified(now() + lease)
    }
}

impl Drop for Copy {
    /// Removes the copy, unless another process uses it. What processes leave that were killed is removed when there is a next fetch.
    fn drop(&mut self) {
        let removed = locked(&self.file, FlockOperation::NonBlockingLockExclusive).and_then(|alone| {
            if alone && is_at(&self.file, &self.path)? { std::fs::remove_file(&self.path) } else { Ok(()) }
        });
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "the copy of a value could not be removed");
        }
    }
}

impl Part {
    /// Makes the copy visible to all processes of the node.
    pub(super) fn complete(self, lease: Duration) -> io::Result<Copy> {
        self.file.set_modified(now() + lease)?;
        let path = self.path.with_extension("");
        // Before the lock becomes a shared one: whoever gets an exclusive lock in between then finds no part.
        std::fs::rename(&self.path, &path)?;
        flock(&self.file, FlockOperation::LockShared)?;
        if !is_at(&self.file, &path)? {
            return Err(io::Error::other("the copy was removed at once, because the directory is full"));
        }
        Ok(Copy { path, file: self.file.try_clone()? })
    }
}

impl Drop for Part {
    /// Removes what a failed fetch has written. A complete copy is no longer at this path.
    fn drop(&mut self) {
        if is_at(&self.file, &self.path).unwrap_or(false) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl NodeCopies {
    /// Opens the directory: the given one, that of `GYM_VALUES_DIR`, or one of this user in the memory of this machine.
    pub(super) fn open(directory: Option<&Path>, bytes_max: Option<u64>) -> Result<Self> {
        let named = directory.map(Path::to_owned).or_else(|| std::env::var_os(DIRECTORY_VARIABLE).map(PathBuf::from));
        let user = rustix::process::getuid().as_raw();
        let directory = named.unwrap_or_else(|| {
            let memory = Path::new("/dev/shm");
            let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
            parent.join(format!("gym-values-{user}"))
        });
        let failed = |error: io::Error| {
            Error::not_started(
                Code::FailedPrecondition,
                format!("copies of values cannot be kept in {}", directory.display()),
            )
            .caused_by(error)
        };
        match DirBuilder::new().mode(0o700).create(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            Ok(()) | Err(_) => {}
        }
        let found = directory.symlink_metadata().map_err(failed)?;
        if !found.is_dir() || found.uid() != user || found.mode() & 0o077 != 0 {
            let message = format!(
                "copies of values are not kept in {}: it must be a directory of this user that nobody else can open\n  fix: remove \
                 it, or name another one with {DIRECTORY_VARIABLE}",
                directory.display()
            );
            return Err(Error::not_started(Code::FailedPrecondition, message));
        }
        let bytes_max = match bytes_max {
            Some(bytes_max) => bytes_max,
            None => {
                let system = rustix::fs::statvfs(&directory).map_err(|error| failed(error.into()))?;
                system.f_blocks.saturating_mul(system.f_frsize) / 2
            }
        };
        Ok(Self { directory, bytes_max })
    }

    fn path(&self, value: &ValueRef) -> PathBuf {
        self.directory.join(&value.id)
    }

    /// Looks for a copy. If there is none and nobody fetches it, the caller does.
    pub(super) fn find(&self, value: &ValueRef) -> io::Result<Found> {
        let path = self.path(value);
        loop {
            if let Some(file) = open_locked(&path, FlockOperation::NonBlockingLockShared)? {
                let found = file.metadata()?;
                let left = found.modified()?.duration_since(now()).unwrap_or_default();
                return Ok(Found::Complete(Copy { path, file }, left));
            }
            let part = path.with_extension(PART);
            let file =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&part)?;
            if !locked(&file, FlockOperation::NonBlockingLockExclusive)? {
                return Ok(Found::Busy);
            }
            if !is_at(&file, &part)? {
                continue;
            }
            if path.exists() {
                // It was completed between the two looks; or it is being removed, and the next look finds that out.
                std::fs::remove_file(&part)?;
                std::thread::yield_now();
                continue;
            }
            // What a process left that died.
            file.set_len(0)?;
            return Ok(Found::Mine(Part { path: part, file }));
        }
    }

    /// Makes room for a value: removes copies whose leases ended first, then the others, but none that a process uses.
    ///
    /// # Errors
    /// `ResourceExhausted` if the copies that are in use leave too little room.
    pub(super) fn make_room(&self, value: &ValueRef) -> Result<()> {
        let failed = |error: io::Error| {
            Error::internal(format!("the copies in {} cannot be listed", self.directory.display())).caused_by(error)
        };
        let mut files = self.files().map_err(failed)?;
        files.sort();
        let mut used: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        let now = now();
        for (until, bytes, path) in files {
            let full = used.saturating_add(value.bytes) > self.bytes_max;
            let abandoned = path.extension().is_some_and(|extension| extension == PART);
            if (full || abandoned || until <= now) && remove_unused(&path).map_err(failed)? {
                used -= bytes;
            }
        }
        if used.saturating_add(value.bytes) > self.bytes_max {
            let message = format!(
                "its {} bytes have no room in {}, where copies that are in use have {used} of {} bytes\n  fix: drop values, raise \
                 ValuesOptions::copies_max, or name a larger place with {DIRECTORY_VARIABLE}",
                value.bytes,
                self.directory.display(),
                self.bytes_max
            );
            return Err(Error::not_started(Code::ResourceExhausted, message).about(value.subject()));
        }
        Ok(())
    }

    /// Returns the end of the lease, the size and the path of each copy, and of what is being fetched.
    fn files(&self) -> io::Result<Vec<(SystemTime, u64, PathBuf)>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.directory)? {
            let entry = entry?;
            match entry.metadata() {
                Ok(found) if found.is_file() => files.push((found.modified()?, found.len(), entry.path())),
                Ok(_) => {}
                // Removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(files)
    }
}

fn remove_unused(path: &Path) -> io::Result<bool> {
    match open_locked(path, FlockOperation::NonBlockingLockExclusive)? {
        Some(_locked) => std::fs::remove_file(path).map(|()| true),
        None => Ok(false),
    }
}
