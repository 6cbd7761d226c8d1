//! The file system of this machine, as an implementation of [`Files`].
//!
//! File operations block, so each runs on tokio's blocking threads. `fdatasync` makes an append durable. A new file
//! also needs an `fsync` of its directory; without it the file may be missing after a crash. An earlier process may have
//! been killed between the two, so the directory is synced whenever a file is opened for appending, not only when it is
//! created.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, IoSlice, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;

use super::{FileLock, Files};
use crate::base::error::{Code, Error, Execution, Result};
use crate::base::is_out_of_descriptors;

/// Files that stay open for appending. A collector writes three. Beyond this number the least recently used file is
/// closed, because file descriptors are limited.
const OPEN_MAX: usize = 64;

/// Spare descriptors: a collector opens its failures file and its index when they get their first line.
const SPARE: usize = 4;

/// The file system of this machine. Clones share the open files.
#[derive(Clone, Debug, Default)]
pub struct RealFiles {
    handles: Arc<Mutex<Handles>>,
}

#[derive(Debug, Default)]
struct Handles {
    /// Files that are open for appending, the most recently used last.
    open: Vec<(PathBuf, Arc<Mutex<File>>)>,
    /// Descriptors for files that are opened when connections have taken all others: rows that cannot be written would end the collection.
    spare: Option<Vec<File>>,
    /// Files whose length is unknown because an append failed. Appends to them fail until they are truncated or
    /// replaced.
    broken: BTreeSet<PathBuf>,
}

impl Handles {
    /// Returns the spare descriptors, which are taken when the first file is opened: before the first connection.
    fn spare(&mut self) -> &mut Vec<File> {
        self.spare.get_or_insert_with(|| (0..SPARE).map_while(|_| File::open("/dev/null").ok()).collect())
    }
}

impl RealFiles {
    /// Creates a handle of this machine's file system.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs blocking work; its error names the operation and the file.
    async fn blocking<T: Send + Sync + 'static>(
        &self,
        doing: &'static str,
        path: &Path,
        work: impl FnOnce(&Self, &Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let (this, owned) = (self.clone(), path.to_owned());
        let done = Arc::new(OnceLock::new());
        let result = Arc::clone(&done);
        // Boxed, so that the compiler builds one type of task, not one for each closure.
        let task: Box<dyn FnOnce() + Send> = Box::new(move || drop(result.set(work(&this, &owned))));
        match tokio::task::spawn_blocking(task).await {
            Ok(()) => Arc::into_inner(done)
                .and_then(OnceLock::into_inner)
                .expect("the task has ended and left its result")
                .map_err(|error| file_error(doing, path, error)),
            Err(stopped) => {
                Err(Error::new(Code::Cancelled, Execution::Unknown, "the runtime shut down during the operation")
                    .about(format!("{doing} {}", path.display()))
                    .caused_by(stopped))
            }
        }
    }

    /// Returns the file, open for appending.
    fn appender(&self, path: &Path) -> io::Result<Arc<Mutex<File>>> {
        let mut handles = self.handles.lock();
        if handles.broken.contains(path) {
            return Err(io::Error::other(
                "the length is unknown because an earlier write failed; truncate the file first",
            ));
        }
        handles.spare();
        if let Some(at) = handles.open.iter().position(|(known, _)| known == path) {
            let entry = handles.open.remove(at);
            let file = Arc::clone(&entry.1);
            handles.open.push(entry);
            return Ok(file);
        }
        let file = loop {
            match open_or_create(path) {
                Err(error) if is_out_of_descriptors(&error) && handles.spare().pop().is_some() => {}
                opened => break Arc::new(Mutex::new(opened?)),
            }
        };
        if handles.open.len() >= OPEN_MAX {
            handles.open.remove(0);
        }
        handles.open.push((path.to_owned(), Arc::clone(&file)));
        Ok(file)
    }

    fn forget(&self, path: &Path) {
        self.handles.lock().open.retain(|(known, _)| known != path);
    }

    fn append_now(&self, path: &Path, pieces: &[Bytes], durable: bool) -> io::Result<()> {
        let file = self.appender(path)?;
        let written = {
            let mut file = file.lock();
            write_all(&mut file, pieces).and_then(|()| if durable { file.sync_data() } else { Ok(()) })
        };
        if written.is_err() {
            // After a failed sync the kernel marks the lost pages as clean, so another sync would succeed.
            let mut handles = self.handles.lock();
            handles.open.retain(|(known, _)| known != path);
            handles.broken.insert(path.to_owned());
        }
        written
    }

    fn read_now(&self, path: &Path, from: u64, bytes_max: usize) -> io::Result<Bytes> {
        let known = {
            let handles = self.handles.lock();
            handles.open.iter().find(|(known, _)| known == path).map(|(_, file)| Arc::clone(file))
        };
        match known {
            Some(file) => read_from(&file.lock(), from, bytes_max),
            None => read_from(&File::open(path)?, from, bytes_max),
        }
    }

    fn rewrite_now(&self, path: &Path, from: u64, pieces: &[Bytes]) -> io::Result<()> {
        // Not the handle for appends: with `O_APPEND`, Linux ignores the offset of a write.
        let file = OpenOptions::new().write(true).open(path)?;
        if from > file.metadata()?.len() {
            return Err(shorter());
        }
        let mut at = from;
        for piece in pieces {
            file.write_all_at(piece, at)?;
            at += piece.len() as u64;
        }
        // Also for the same bytes: Linux does not compare, so the pages are dirty.
        file.sync_data()
    }

    fn truncate_now(&self, path: &Path, length: u64) -> io::Result<()> {
        self.forget(path);
        let file = OpenOptions::new().write(true).open(path)?;
        if length > file.metadata()?.len() {
            return Err(shorter());
        }
        file.set_len(length)?;
        file.sync_all()?;
        self.handles.lock().broken.remove(path);
        Ok(())
    }

    fn replace_now(&self, path: &Path, contents: &[Bytes]) -> io::Result<()> {
        let mut name = path.file_name().ok_or(ErrorKind::InvalidInput)?.to_owned();
        name.push(format!(".{}.tmp", std::process::id()));
        let temporary = path.with_file_name(name);
        make_folder(path)?;
        let written = File::create(&temporary).and_then(|mut file| {
            write_all(&mut file, contents)?;
            file.sync_all()?;
            std::fs::rename(&temporary, path)
        });
        if let Err(error) = written {
            // Best effort: the first error is reported.
            let _ = std::fs::remove_file(&temporary);
            return Err(error);
        }
        self.forget_all(&[path]);
        sync_folder(path)
    }

    fn rename_now(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)?;
        self.forget_all(&[from, to]);
        sync_folder(to)
    }

    /// Forgets what was known of files whose names now belong to others.
    fn forget_all(&self, paths: &[&Path]) {
        let mut handles = self.handles.lock();
        for path in paths {
            handles.open.retain(|(known, _)| known != path);
            handles.broken.remove(*path);
        }
    }
}

#[async_trait]
impl Files for RealFiles {
    async fn length(&self, path: &Path) -> Result<Option<u64>> {
        let found = self.blocking("read the length of", path, |_, path| match std::fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => Err(ErrorKind::IsADirectory.into()),
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        });
        found.await
    }

    async fn read(&self, path: &Path, from: u64, bytes_max: usize) -> Result<Bytes> {
        self.blocking("read", path, move |this, path| this.read_now(path, from, bytes_max)).await
    }

    async fn append(&self, path: &Path, pieces: &[Bytes], durable: bool) -> Result<()> {
        let pieces = pieces.to_vec();
        self.blocking("append to", path, move |this, path| this.append_now(path, &pieces, durable)).await
    }

    async fn rewrite(&self, path: &Path, from: u64, pieces: &[Bytes]) -> Result<()> {
        let pieces = pieces.to_vec();
        self.blocking("write again", path, move |this, path| this.rewrite_now(path, from, &pieces)).await
    }

    async fn truncate(&self, path: &Path, length: u64) -> Result<()> {
        self.blocking("cut", path, move |this, path| this.truncate_now(path, length)).await
    }

    async fn replace(&self, path: &Path, contents: &[Bytes]) -> Result<()> {
        let contents = contents.to_vec();
        self.blocking("replace", path, move |this, path| this.replace_now(path, &contents)).await
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let to = to.to_owned();
        self.blocking("rename", from, move |this, from| this.rename_now(from, &to)).await
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        let removed = self.blocking("remove", path, |this, path| {
            this.forget_all(&[path]);
            match std::fs::remove_file(path).and_then(|()| sync_folder(path)) {
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    // An earlier process may have been killed after it removed the file, before it synced the directory.
                    if folder_of(path).is_dir() { sync_folder(path) } else { Ok(()) }
                }
                removed => removed,
            }
        });
        removed.await
    }

    async fn lock(&self, path: &Path) -> Result<Box<dyn FileLock>> {
        let held = self.blocking("lock", path, |_, path| lock_now(path)).await?;
        match held {
            Some(file) => Ok(Box::new(HeldFile { _file: file })),
            None => Err(Error::finished(
                Code::FailedPrecondition,
                "another process, or another part of this one, holds the lock",
            )
            .about(format!("lock {}", path.display()))),
        }
    }
}

/// The lock of an open file description. The kernel releases it when the descriptor is closed, however the process
/// ends. Child processes do not inherit files that Rust opens.
#[derive(Debug)]
struct HeldFile {
    _file: File,
}

impl FileLock for HeldFile {}

/// Returns `None` if the file is locked elsewhere.
fn lock_now(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file = open_or_create(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // Between opening and locking, the previous holder may have removed or replaced the file: then this one has no
        // name.
        let held = file.metadata()?;
        match std::fs::metadata(path) {
            Ok(named) if (named.dev(), named.ino()) == (held.dev(), held.ino()) => return Ok(Some(file)),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
}

fn open_or_create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).append(true);
    let file = match options.open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            make_folder(path)?;
            options.create(true).open(path)?
        }
        opened => opened?,
    };
    sync_folder(path)?;
    Ok(file)
}

/// Creates the missing directories above a file and syncs the parent of each.
fn make_folder(path: &Path) -> io::Result<()> {
    let folder = folder_of(path);
    if folder.is_dir() {
        return Ok(());
    }
    let missing: Vec<&Path> = folder.ancestors().take_while(|ancestor| !ancestor.exists()).collect();
    std::fs::create_dir_all(folder)?;
    missing.iter().try_for_each(|made| sync_folder(made))
}

fn shorter() -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, "the file is shorter than the requested length")
}

fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(folder_of(path))?.sync_all()
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn write_all(file: &mut File, pieces: &[Bytes]) -> io::Result<()> {
    let mut slices: Vec<IoSlice<'_>> =
        pieces.iter().filter(|piece| !piece.is_empty()).map(|piece| IoSlice::new(piece)).collect();
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        match file.write_vectored(rest) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut rest, written),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn read_from(file: &File, from: u64, bytes_max: usize) -> io::Result<Bytes> {
    let left = file.metadata()?.len().saturating_sub(from);
    let wanted = bytes_max.min(usize::try_from(left).unwrap_or(usize::MAX));
    let mut buffer = vec![0; wanted];
    let mut filled = 0;
    while filled < wanted {
        match file.read_at(&mut buffer[filled..], from + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    buffer.truncate(filled);
    Ok(buffer.into())
}

/// Converts a file error: cause and fix. Never `NotStarted`, because a failed write must not be repeated.
fn file_error(doing: &'static str, path: &Path, error: io::Error) -> Error {
    const MORE_ROOM: &str = "free space on its file system or choose another path, then resume";
    let (code, message) = match error.kind() {
        ErrorKind::StorageFull => (Code::ResourceExhausted, format!("the disk is full; {MORE_ROOM}")),
        ErrorKind::QuotaExceeded => (Code::ResourceExhausted, format!("the disk quota is exceeded; {MORE_ROOM}")),
        ErrorKind::FileTooLarge => (
            Code::ResourceExhausted,
            format!("the file has reached the size limit (`ulimit -f`, or that of the file system); {MORE_ROOM}"),
        ),
        ErrorKind::NotFound => (Code::NotFound, "no such file".to_owned()),
        ErrorKind::PermissionDenied => {
            (Code::InvalidArgument, "permission denied; grant it to this user or choose another path".to_owned())
        }
        ErrorKind::ReadOnlyFilesystem => {
            (Code::InvalidArgument, "the file system is read-only; choose another path".to_owned())
        }
        ErrorKind::IsADirectory => (Code::InvalidArgument, "the path is a directory; name a file in it".to_owned()),
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            (Code::InvalidArgument, "a part of the path is a file, not a directory; choose another path".to_owned())
        }
        ErrorKind::InvalidInput | ErrorKind::InvalidFilename => (Code::InvalidArgument, "rejected".to_owned()),
        _ if is_out_of_descriptors(&error) => {
            (Code::ResourceExhausted, "too many open files; raise the limit (`ulimit -n`)".to_owned())
        }
        _ => (Code::Internal, "failed".to_owned()),
    };
    Error::finished(code, message).about(format!("{doing} {}", path.display())).caused_by(error)
}
