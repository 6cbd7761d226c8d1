//! The positions of the rows to dispatch in the materialized inputs file, so that a resumed collection reads only the rows that
//! are not done.
//!
//! The positions are those of the requested rows. They are known while these rows are materialized, and hold for the recorded file
//! if it has the same text. Reading a million rows to find the few that are left would take a second.

use std::fs::{File, Metadata};
use std::io::{self, BufReader, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use bytes::Bytes;
use gym_core::rollout::TaskKey;

use crate::collect::input::rows::{RowKey, materialized_row};
use crate::collect::input::{InputError, MaterializedRow};

/// Bytes that one read transfers.
const BUFFER_BYTES: usize = 128 << 10;

/// The rows of a file, in order: 12 bytes for each row.
#[derive(Debug, Default)]
pub(in crate::collect) struct RowOffsets(Vec<RowExtent>);

#[derive(Clone, Copy, Debug)]
struct RowExtent {
    task: u32,
    rollout: u32,
    /// Bytes of the line with its newline.
    length: u32,
}

impl RowOffsets {
    /// Adds the next row of the file.
    pub(in crate::collect) fn push(&mut self, key: RowKey, line: &str) {
        // Materialized indices are in these bounds. A row with others, or a line of 4 GiB, fails when it is read.
        let narrow = |index: i64| u32::try_from(index).unwrap_or(u32::MAX);
        let length = u32::try_from(line.len()).unwrap_or(u32::MAX);
        self.0.push(RowExtent { task: narrow(key.task_index), rollout: narrow(key.rollout_index), length });
    }

    /// Reads the rows of `file`, named `name` in error messages, for which `is_done` is `false`.
    pub(in crate::collect) fn open_rows(
        self,
        file: File,
        name: String,
        is_done: impl FnMut(TaskKey) -> bool,
    ) -> impl Iterator<Item = Result<MaterializedRow, InputError>> {
        let reader = BufReader::with_capacity(BUFFER_BYTES, file);
        OpenRows { places: self.0.into_iter(), reader, name, line: 0, skipped: 0, is_done }
    }
}

struct OpenRows<F> {
    places: std::vec::IntoIter<RowExtent>,
    reader: BufReader<File>,
    name: String,
    line: u64,
    /// Bytes of the rows that were skipped since the last read.
    skipped: i64,
    is_done: F,
}

impl<F: FnMut(TaskKey) -> bool> Iterator for OpenRows<F> {
    type Item = Result<MaterializedRow, InputError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let place = self.places.next()?;
            self.line += 1;
            if !(self.is_done)(TaskKey::new(place.task, place.rollout)) {
                return Some(self.read(place));
            }
            self.skipped += i64::from(place.length);
        }
    }
}

impl<F> OpenRows<F> {
    fn read(&mut self, place: RowExtent) -> Result<MaterializedRow, InputError> {
        let mut raw = vec![0; place.length as usize];
        // Relative, so that a short way keeps the buffer.
        self.reader
            .seek_relative(std::mem::take(&mut self.skipped))
            .and_then(|()| self.reader.read_exact(&mut raw))
            .map_err(|error| InputError::io(format!("read {}", self.name), error))?;
        let changed = || {
            let problem = "the file changed while it was read; resume when no program writes to it".to_owned();
            InputError::line(&self.name, self.line, problem)
        };
        if raw.pop() != Some(b'\n') {
            return Err(changed());
        }
        let row = materialized_row(&Bytes::from(raw), &self.name, self.line)?;
        let key = RowKey { task_index: place.task.into(), rollout_index: place.rollout.into() };
        if row.key == key { Ok(row) } else { Err(changed()) }
    }
}

/// Compares rows with those of a file, one after another.
#[derive(Debug)]
pub(in crate::collect) struct RecordedText {
    reader: BufReader<File>,
    line: Vec<u8>,
}

impl RecordedText {
    /// Compares from the start of `file`.
    pub(in crate::collect) fn new(file: File) -> Self {
        Self { reader: BufReader::with_capacity(BUFFER_BYTES, file), line: Vec::new() }
    }

    /// Returns `true` if the file continues with this text.
    pub(in crate::collect) fn continues_with(&mut self, text: &str) -> io::Result<bool> {
        self.line.resize(text.len(), 0);
        match self.reader.read_exact(&mut self.line) {
            Ok(()) => Ok(self.line == text.as_bytes()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns the file if nothing follows.
    pub(in crate::collect) fn ended(mut self) -> io::Result<Option<RecordedFile>> {
        Ok(match self.reader.read(&mut [0])? {
            0 => Some(RecordedFile { was: self.reader.get_ref().metadata()?, _file: self.reader.into_inner() }),
            _ => None,
        })
    }
}

/// A file whose text was compared. It stays open, so that no other file takes its inode.
#[derive(Debug)]
pub(in crate::collect) struct RecordedFile {
    _file: File,
    was: Metadata,
}

impl RecordedFile {
    /// Returns `true` if the file is still at `path` and was not written to. Collections replace the file and do not write to it.
    pub(in crate::collect) fn is_at(&self, path: &Path) -> bool {
        let state = |of: &Metadata| (of.dev(), of.ino(), of.len(), of.mtime(), of.mtime_nsec());
        std::fs::metadata(path).is_ok_and(|is| state(&is) == state(&self.was))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: [&str; 3] = [
        "{\"_ng_task_index\":0,\"_ng_rollout_index\":0}\n",
        "{\"_ng_task_index\":0,\"_ng_rollout_index\":1,\"x\":\"longer\"}\n",
        "{\"_ng_task_index\":7,\"_ng_rollout_index\":0}\n",
    ];
    const KEYS: [(i64, i64); 3] = [(0, 0), (0, 1), (7, 0)];

    fn key((task_index, rollout_index): (i64, i64)) -> RowKey {
        RowKey { task_index, rollout_index }
    }

    fn open_rows(text: &str, done: &[(u32, u32)]) -> Vec<Result<MaterializedRow, String>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        std::fs::write(&path, text).unwrap();
        let mut offsets = RowOffsets::default();
        KEYS.into_iter().zip(LINES).for_each(|(at, line)| offsets.push(key(at), line));
        let done: Vec<TaskKey> = done.iter().map(|(task, rollout)| TaskKey::new(*task, *rollout)).collect();
        let rows = offsets.open_rows(File::open(&path).unwrap(), "rows".to_owned(), move |key| done.contains(&key));
        rows.map(|row| row.map_err(|error| error.to_string())).collect()
    }

    #[test]
    fn every_open_row_is_read_with_its_line_number() {
        for done in 0..8_u32 {
            let is_done = |at: usize| done & (1 << at) != 0;
            let narrow = |(task, rollout): (i64, i64)| (task as u32, rollout as u32);
            let done: Vec<_> = (0..3).filter(|at| is_done(*at)).map(|at| narrow(KEYS[at])).collect();
            let rows = open_rows(&LINES.concat(), &done);
            let read: Vec<_> = rows.into_iter().map(|row| row.unwrap()).map(|row| (row.key, row.line)).collect();
            let open: Vec<_> = (0..3).filter(|at| !is_done(*at)).map(|at| (key(KEYS[at]), at as u64 + 1)).collect();
            assert_eq!(read, open);
        }
    }

    #[test]
    fn a_file_that_changed_is_an_error_with_its_line() {
        let other_row = [LINES[0], LINES[1], "{\"_ng_task_index\":8,\"_ng_rollout_index\":0}\n"].concat();
        let other_length = ["x", LINES[0], LINES[1], LINES[2]].concat();
        for text in [other_row, other_length] {
            let error = open_rows(&text, &[(0, 0), (0, 1)])[0].clone().unwrap_err();
            assert!(error.contains("rows, line 3: the file changed"), "{error}");
        }
        let error = open_rows(LINES[0], &[(0, 0), (0, 1)])[0].clone().unwrap_err();
        assert!(error.contains("read rows"), "{error}");
    }

    #[test]
    fn a_recorded_file_matches_only_the_same_text_and_only_until_it_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        std::fs::write(&path, LINES.concat()).unwrap();
        let matched = |lines: &[&str]| {
            let mut recorded = RecordedText::new(File::open(&path).unwrap());
            let same = lines.iter().all(|line| recorded.continues_with(line).unwrap());
            if same { recorded.ended().unwrap() } else { None }
        };
        assert!(matched(&LINES[..2]).is_none());
        assert!(matched(&[LINES[0], LINES[2]]).is_none());
        assert!(matched(&[LINES[0], LINES[1], LINES[2], LINES[2]]).is_none());
        let recorded = matched(&LINES).unwrap();
        assert!(recorded.is_at(&path));
        std::fs::write(folder.path().join("new"), LINES.concat()).unwrap();
        std::fs::rename(folder.path().join("new"), &path).unwrap();
        assert!(!recorded.is_at(&path));
    }
}
