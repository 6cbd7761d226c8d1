//! The file of an events stream: a regular file, or a pipe whose reader may be slow, missing or replaced.
//!
//! Opened with `O_NONBLOCK`: opening a FIFO without a reader fails instead of waiting, and a full pipe is an answer instead of a wait.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use gym_core::{Error, Result};
use rustix::fs::OFlags;
use rustix::io::Errno;
use tokio::time::Instant;

use crate::collect::files::{ExistingOutput, output_exists};

/// Bytes that one read transfers while the end of a file is searched for its last whole line.
const TAIL_BYTES: usize = 64 << 10;

/// Limit for the reader of a pipe to open it, and the interval at which it is looked for.
const READER_TIMEOUT: Duration = Duration::from_secs(5);
const READER_INTERVAL: Duration = Duration::from_millis(50);

/// A file that takes lines, and the bytes that it has not taken yet.
#[derive(Debug)]
pub(in crate::collect) struct EventTarget {
    file: File,
    /// Whole lines, except that the file may have taken the first part of the first one.
    pending: Vec<u8>,
    /// Whether the file has taken a part of the first line.
    within_line: bool,
}

/// The result of one write.
#[derive(Debug)]
pub(super) enum Written {
    All,
    /// The pipe is full.
    Full,
    /// The pipe has no reader, or the disk fails. A later write may succeed. `lines_lost` of the pending lines will never arrive whole.
    Failed {
        error: io::Error,
        lines_lost: u64,
    },
}

impl EventTarget {
    /// Checks, without changing anything, that the file can be opened and that `existing` allows it.
    ///
    /// # Errors
    /// `InvalidArgument` with the fix.
    pub(in crate::collect) fn check(path: &Path, existing: ExistingOutput) -> Result<()> {
        let metadata = match std::fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(unusable(path, &error)),
        };
        if metadata.is_dir() {
            return Err(Error::invalid("the path is a directory; name a file")
                .about(format!("write events to {}", path.display())));
        }
        if metadata.is_file() && metadata.len() > 0 && existing == ExistingOutput::Reject {
            return Err(output_exists(path));
        }
        // A pipe is opened only once: its reader would see the end of the stream.
        if metadata.is_file() {
            OpenOptions::new().append(true).open(path).map_err(|error| unusable(path, &error))?;
        }
        Ok(())
    }

    /// Checks that the file can be created, if there is none. Its directory is created if needed.
    ///
    /// # Errors
    /// `InvalidArgument` with the fix.
    pub(in crate::collect) fn check_folder(path: &Path) -> Result<()> {
        if path.exists() {
            return Ok(());
        }
        let created = open_now(path).and_then(|_| std::fs::remove_file(path));
        created.map_err(|error| unusable(path, &error))
    }

    /// Opens the file, and creates it and its directory if needed. The contents are not changed. Waits a few seconds for the reader of a
    /// pipe, which a script may start at the same time.
    ///
    /// # Errors
    /// `InvalidArgument` with the fix.
    pub(in crate::collect) async fn open(path: &Path) -> Result<Self> {
        let deadline = Instant::now() + READER_TIMEOUT;
        loop {
            match open_now(path) {
                Ok(file) => return Ok(Self { file, pending: Vec::new(), within_line: false }),
                Err(error) if is_without_reader(&error) && Instant::now() < deadline => {
                    tokio::time::sleep(READER_INTERVAL).await;
                }
                Err(error) => return Err(unusable(path, &error)),
            }
        }
    }

    /// Removes the contents of a regular file. A resumed run keeps its whole lines.
    ///
    /// # Errors
    /// The error of the disk.
    pub(super) fn begin(&mut self, resumes: bool) -> Result<()> {
        let mut cut = || {
            if self.file.metadata()?.is_file() {
                let length = if resumes { whole_lines(&mut self.file)? } else { 0 };
                self.file.set_len(length)?;
            }
            Ok(())
        };
        cut().map_err(|error: io::Error| Error::internal("the events file cannot be cut").caused_by(error))
    }

    /// Returns the lines that wait, to add more.
    pub(super) fn pending(&mut self) -> &mut Vec<u8> {
        &mut self.pending
    }

    /// Returns the number of lines that wait.
    pub(super) fn lines_pending(&self) -> u64 {
        memchr::memchr_iter(b'\n', &self.pending).count() as u64
    }

    /// Writes as much as the file takes now. May block on a disk, but not on a pipe.
    pub(super) fn write(&mut self) -> Written {
        let mut taken = 0;
        let written = loop {
            match self.file.write(&self.pending[taken..]) {
                _ if taken == self.pending.len() => break Written::All,
                Ok(0) => break Written::Failed { error: ErrorKind::WriteZero.into(), lines_lost: 0 },
                Ok(bytes) => taken += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break Written::Full,
                Err(error) => break Written::Failed { error, lines_lost: 0 },
            }
        };
        if taken > 0 {
            self.within_line = self.pending[taken - 1] != b'\n';
            self.pending.drain(..taken);
        }
        match written {
            // The next reader of a pipe must not begin within a line.
            Written::Failed { error, .. } if error.kind() == ErrorKind::BrokenPipe && self.within_line => {
                let rest = memchr::memchr(b'\n', &self.pending).map_or(self.pending.len(), |end| end + 1);
                self.pending.drain(..rest);
                self.within_line = false;
                Written::Failed { error, lines_lost: 1 }
            }
            written => written,
        }
    }
}

/// Returns the length of the file up to the end of its last whole line. A killed run may have left a part of one.
fn whole_lines(file: &mut File) -> io::Result<u64> {
    let mut end = file.metadata()?.len();
    let mut block = Vec::with_capacity(TAIL_BYTES);
    while end > 0 {
        let start = end.saturating_sub(TAIL_BYTES as u64);
        block.clear();
        file.seek(SeekFrom::Start(start))?;
        io::Read::take(&mut *file, end - start).read_to_end(&mut block)?;
        if let Some(at) = memchr::memrchr(b'\n', &block) {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

fn open_now(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder)?;
    }
    // To find the last whole line. A pipe that is also open for reading would always have a reader.
    let regular = std::fs::metadata(path).map_or(true, |found| found.is_file());
    let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
    OpenOptions::new().append(true).create(true).read(regular).custom_flags(nonblocking).open(path)
}

fn is_without_reader(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::NXIO.raw_os_error())
}

fn unusable(path: &Path, error: &io::Error) -> Error {
    let text = if is_without_reader(error) {
        format!("no program reads the pipe within {} s; start its reader", READER_TIMEOUT.as_secs())
    } else {
        format!("{error}; choose another path")
    };
    Error::invalid(text).about(format!("write events to {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::io::BufRead as _;

    use super::*;

    fn fifo(path: &Path) {
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    }

    /// Opens the reading end without waiting for a writer.
    fn reader(path: &Path) -> File {
        OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path).unwrap()
    }

    #[tokio::test]
    async fn a_resumed_run_appends_after_the_last_whole_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/events.jsonl");
        for (before, after) in [
            ("", "{}\n".to_owned()),
            ("{\"a\":1}\n", "{\"a\":1}\n{}\n".to_owned()),
            ("{\"a\":1}\n{\"b\"", "{\"a\":1}\n{}\n".to_owned()),
            (&format!("{{}}\n{}", "x".repeat(3 * TAIL_BYTES)), "{}\n{}\n".to_owned()),
        ] {
            EventTarget::open(&path).await.unwrap();
            std::fs::write(&path, before).unwrap();
            let mut target = EventTarget::open(&path).await.unwrap();
            target.begin(true).unwrap();
            target.pending().extend_from_slice(b"{}\n");
            assert!(matches!(target.write(), Written::All));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), after);
        }
        EventTarget::open(&path).await.unwrap().begin(false).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pipe_without_a_reader_is_refused_with_the_fix() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        fifo(&path);
        EventTarget::check(&path, ExistingOutput::Reject).unwrap();
        let error = EventTarget::open(&path).await.unwrap_err().to_string();
        assert!(error.contains("start its reader") && error.contains("pipe"), "{error}");
    }

    #[tokio::test]
    async fn a_full_pipe_keeps_the_lines_and_the_next_reader_begins_with_a_whole_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        fifo(&path);
        let first = reader(&path);
        let mut target = EventTarget::open(&path).await.unwrap();
        let line = format!("\"{}\"\n", "x".repeat(5_000));
        let lines = 100;
        target.pending().extend_from_slice(line.repeat(lines).as_bytes());
        assert!(matches!(target.write(), Written::Full));
        assert!(target.within_line, "the test must stop within a line");
        let kept = target.lines_pending();
        drop(first);
        let Written::Failed { error, lines_lost } = target.write() else { panic!("a pipe without a reader") };
        assert_eq!((error.kind(), lines_lost), (ErrorKind::BrokenPipe, 1));
        assert_eq!(target.lines_pending(), kept - 1);
        let second = reader(&path);
        target.write();
        let mut text = Vec::new();
        io::BufReader::new(second).read_until(b'\n', &mut text).unwrap();
        assert_eq!(text, line.as_bytes());
    }

    #[tokio::test]
    async fn a_full_disk_keeps_the_lines() {
        // `/dev/full` fails each write as a full disk does.
        let mut target = EventTarget::open(Path::new("/dev/full")).await.unwrap();
        target.pending().extend_from_slice(b"{}\n");
        let Written::Failed { error, lines_lost: 0 } = target.write() else { panic!("a full disk") };
        assert_eq!((error.kind(), target.lines_pending()), (ErrorKind::StorageFull, 1));
    }
}
