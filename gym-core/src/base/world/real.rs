//! The machine's own files, behind [`Files`].
//!
//! File calls block, so each runs on tokio's blocking threads; a caller sees only a future. What makes an append durable is
//! `fdatasync`, and for a new file the `fsync` of its folder: without the latter the file itself may be gone after a crash.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, IoSlice, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;

use super::{FileLock, Files};
use crate::base::error::{Code, Error, Execution, Result};

/// Files kept open for appending. A collector writes three; more are closed, oldest use first, because descriptors are
/// what a machine with a limit of 20,000 runs out of.
const OPEN_MAX: usize = 64;

/// The file system of this machine. Clones share the open files.
#[derive(Clone, Debug, Default)]
pub struct RealFiles {
    handles: Arc<Mutex<Handles>>,
}

#[derive(Debug, Default)]
struct Handles {
    /// Files open for appending, the latest used last.
    open: Vec<(PathBuf, Arc<Mutex<File>>)>,
    /// Files whose end is unknown since an append failed: nothing is added to them before they are cut or replaced.
    broken: BTreeSet<PathBuf>,
}

impl RealFiles {
    /// The file system of this machine.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn handles(&self) -> MutexGuard<'_, Handles> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a blocking piece of work, and says in its error what was being done to which file.
    async fn blocking<T: Send + Sync + 'static>(
        &self,
        doing: &'static str,
        path: &Path,
        work: impl FnOnce(&Self, &Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let (this, owned) = (self.clone(), path.to_owned());
        let done = Arc::new(OnceLock::new());
        let result = Arc::clone(&done);
        // Boxed, so that one type of task is compiled and not one for each piece of work.
        let task: Box<dyn FnOnce() + Send> = Box::new(move || drop(result.set(work(&this, &owned))));
        match tokio::task::spawn_blocking(task).await {
            Ok(()) => Arc::into_inner(done)
                .and_then(OnceLock::into_inner)
                .expect("the task has ended and left its result")
                .map_err(|error| file_error(doing, path, error)),
            Err(stopped) => Err(Error::new(Code::Cancelled, Execution::Unknown, "the runtime stopped meanwhile")
                .about(format!("{doing} {}", path.display()))
                .caused_by(stopped)),
        }
    }

    /// The file, open for appending.
    fn appender(&self, path: &Path) -> io::Result<Arc<Mutex<File>>> {
        let mut handles = self.handles();
        if handles.broken.contains(path) {
            return Err(io::Error::other("an earlier write failed and the end of the file is unknown; cut it first"));
        }
        if let Some(at) = handles.open.iter().position(|(known, _)| known == path) {
            let entry = handles.open.remove(at);
            let file = Arc::clone(&entry.1);
            handles.open.push(entry);
            return Ok(file);
        }
        let file = Arc::new(Mutex::new(open_or_create(path)?));
        if handles.open.len() >= OPEN_MAX {
            handles.open.remove(0);
        }
        handles.open.push((path.to_owned(), Arc::clone(&file)));
        Ok(file)
    }

    fn forget(&self, path: &Path) {
        self.handles().open.retain(|(known, _)| known != path);
    }

    fn append_now(&self, path: &Path, pieces: &[Bytes], durable: bool) -> io::Result<()> {
        let file = self.appender(path)?;
        let written = {
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            write_all(&mut file, pieces).and_then(|()| if durable { file.sync_data() } else { Ok(()) })
        };
        if written.is_err() {
            // After a failed sync the kernel may call the lost pages clean: another sync on this handle would lie.
            let mut handles = self.handles();
            handles.open.retain(|(known, _)| known != path);
            handles.broken.insert(path.to_owned());
        }
        written
    }

    fn read_now(&self, path: &Path, from: u64, bytes_max: usize) -> io::Result<Bytes> {
        let known = {
            let handles = self.handles();
            handles.open.iter().find(|(known, _)| known == path).map(|(_, file)| Arc::clone(file))
        };
        match known {
            Some(file) => read_from(&file.lock().unwrap_or_else(PoisonError::into_inner), from, bytes_max),
            None => read_from(&File::open(path)?, from, bytes_max),
        }
    }

    fn truncate_now(&self, path: &Path, length: u64) -> io::Result<()> {
        self.forget(path);
        let file = OpenOptions::new().write(true).open(path)?;
        if length > file.metadata()?.len() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "the file is shorter than the length to cut it to"));
        }
        file.set_len(length)?;
        file.sync_all()?;
        self.handles().broken.remove(path);
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
            // Best effort: the error that matters is the first.
            let _ = std::fs::remove_file(&temporary);
            return Err(error);
        }
        let mut handles = self.handles();
        handles.open.retain(|(known, _)| known != path);
        handles.broken.remove(path);
        drop(handles);
        sync_folder(path)
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

    async fn truncate(&self, path: &Path, length: u64) -> Result<()> {
        self.blocking("cut", path, move |this, path| this.truncate_now(path, length)).await
    }

    async fn replace(&self, path: &Path, contents: &[Bytes]) -> Result<()> {
        let contents = contents.to_vec();
        self.blocking("replace", path, move |this, path| this.replace_now(path, &contents)).await
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        let removed = self.blocking("remove", path, |this, path| {
            this.forget(path);
            this.handles().broken.remove(path);
            match std::fs::remove_file(path) {
                Ok(()) => sync_folder(path),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
                Err(error) => Err(error),
            }
        });
        removed.await
    }

    async fn lock(&self, path: &Path) -> Result<Box<dyn FileLock>> {
        let held = self.blocking("lock", path, |_, path| lock_now(path)).await?;
        match held {
            Some(file) => Ok(Box::new(HeldFile { _file: file })),
            None => {
                Err(Error::finished(Code::FailedPrecondition, "another process, or another part of this one, holds it")
                    .about(format!("lock {}", path.display())))
            }
        }
    }
}

/// The lock of an open file description: the kernel lets go when the descriptor is closed, however the process ends. Rust
/// opens files so that child processes do not inherit them.
#[derive(Debug)]
struct HeldFile {
    _file: File,
}

impl FileLock for HeldFile {}

/// `None` when somebody else holds it.
fn lock_now(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file = open_or_create(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // Between the opening and the lock its holder may have removed or replaced it: then we hold a file of no name.
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
    match OpenOptions::new().read(true).append(true).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        opened => return opened,
    }
    make_folder(path)?;
    let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
    sync_folder(path)?;
    Ok(file)
}

/// The folder of a file, and what it lies in, down from the first one that was there.
fn make_folder(path: &Path) -> io::Result<()> {
    let folder = folder_of(path);
    if folder.is_dir() {
        return Ok(());
    }
    let missing: Vec<&Path> = folder.ancestors().take_while(|ancestor| !ancestor.exists()).collect();
    std::fs::create_dir_all(folder)?;
    missing.iter().try_for_each(|made| sync_folder(made))
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

/// Says what a file error means and what to do about it. Never "not started": a failed write must not be sent again.
fn file_error(doing: &'static str, path: &Path, error: io::Error) -> Error {
    const MORE_ROOM: &str = "free room on its file system or choose another path, then resume";
    let (code, message) = match error.kind() {
        ErrorKind::StorageFull => (Code::ResourceExhausted, format!("the disk is full; {MORE_ROOM}")),
        ErrorKind::QuotaExceeded => (Code::ResourceExhausted, format!("the disk quota is used up; {MORE_ROOM}")),
        ErrorKind::FileTooLarge => (
            Code::ResourceExhausted,
            format!("the file is as large as the limit allows (`ulimit -f`, or the file system's); {MORE_ROOM}"),
        ),
        ErrorKind::NotFound => (Code::NotFound, "no such file".to_owned()),
        ErrorKind::PermissionDenied => {
            (Code::InvalidArgument, "permission denied; give this user the right or choose another path".to_owned())
        }
        ErrorKind::ReadOnlyFilesystem => {
            (Code::InvalidArgument, "the file system is read-only; choose another path".to_owned())
        }
        ErrorKind::IsADirectory => (Code::InvalidArgument, "it is a folder; name a file in it".to_owned()),
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            (Code::InvalidArgument, "a part of the path is a file, not a folder; choose another path".to_owned())
        }
        ErrorKind::InvalidInput | ErrorKind::InvalidFilename => (Code::InvalidArgument, "refused".to_owned()),
        _ if is_out_of_descriptors(&error) => {
            (Code::ResourceExhausted, "too many open files; raise the limit (`ulimit -n`)".to_owned())
        }
        _ => (Code::Internal, "failed".to_owned()),
    };
    Error::finished(code, message).about(format!("{doing} {}", path.display())).caused_by(error)
}

/// `EMFILE` or `ENFILE`, for which std has no kind of its own.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(23 | 24))
}
