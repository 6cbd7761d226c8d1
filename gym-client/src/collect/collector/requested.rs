//! The rows that a collection requests: where they go while they are materialized, and what is known of them afterwards.

use std::io::Write as _;
use std::path::Path;

use gym_core::Result;

use crate::collect::collector::open;
use crate::collect::files::chunks::ChunkWriter;
use crate::collect::input::places::RowPlaces;
use crate::collect::input::rows::RowKey;
use crate::collect::input::{InputError, MaterializeSummary};
use crate::collect::resume::offsets::{RecordedFile, RecordedText, RowOffsets};
use crate::collect::run::progress::RequestedTasks;

/// The rows that a collection requests.
#[derive(Debug)]
pub(super) struct RequestedRows {
    pub(super) summary: MaterializeSummary,
    /// Their tasks, by agent.
    pub(super) tasks: RequestedTasks,
    /// The places of the rows in the input's files, if its rows are not its lines.
    pub(super) places: Option<RowPlaces>,
    /// Their positions in the file, for a resumed collection.
    pub(super) offsets: Option<RowOffsets>,
    /// The recorded file, if it has the same text; otherwise the rows are in a new file.
    pub(super) recorded: Option<RecordedFile>,
}

/// Receives the rows while they are materialized, on a blocking thread.
pub(super) trait RowSink: Send + 'static {
    /// Receives the next row: one line, with its newline.
    fn row(&mut self, key: RowKey, line: &str) -> Result<(), InputError>;
    /// Called after the last row.
    fn end(&mut self) -> Result<(), InputError>;
}

/// Writes the rows to a new file.
pub(super) struct RowWriter {
    /// Dropped after the last row, which ends the file.
    writer: Option<ChunkWriter>,
    pub(super) offsets: Option<RowOffsets>,
}

impl RowWriter {
    pub(super) fn new(writer: ChunkWriter, keeps_offsets: bool) -> Self {
        Self { writer: Some(writer), offsets: keeps_offsets.then(RowOffsets::default) }
    }
}

impl RowSink for RowWriter {
    fn row(&mut self, key: RowKey, line: &str) -> Result<(), InputError> {
        if let Some(offsets) = &mut self.offsets {
            offsets.push(key, line);
        }
        let writer = self.writer.as_mut().expect("no row follows the end");
        writer.write_all(line.as_bytes()).map_err(unwritten)
    }

    fn end(&mut self) -> Result<(), InputError> {
        self.writer.take().expect("the rows end once").flush().map_err(unwritten)
    }
}

fn unwritten(error: std::io::Error) -> InputError {
    InputError::io("write materialized inputs", error)
}

/// Compares the rows with the recorded ones. After the first difference, rows are only materialized, which checks the input.
pub(super) struct RowMatcher {
    name: String,
    comparing: Option<(RecordedText, RowOffsets)>,
    /// The recorded file and the positions of its rows, if all rows are the same.
    pub(super) matched: Option<(RecordedFile, RowOffsets)>,
}

impl RowMatcher {
    pub(super) fn open(recorded: &Path) -> Result<Self> {
        let comparing = (RecordedText::new(open(recorded)?), RowOffsets::default());
        Ok(Self { name: recorded.display().to_string(), comparing: Some(comparing), matched: None })
    }

    fn unread(&self, error: std::io::Error) -> InputError {
        InputError::io(format!("read {}", self.name), error)
    }
}

impl RowSink for RowMatcher {
    fn row(&mut self, key: RowKey, line: &str) -> Result<(), InputError> {
        let Some((recorded, offsets)) = &mut self.comparing else { return Ok(()) };
        match recorded.continues_with(line) {
            Ok(true) => offsets.push(key, line),
            Ok(false) => self.comparing = None,
            Err(error) => return Err(self.unread(error)),
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), InputError> {
        let Some((recorded, offsets)) = self.comparing.take() else { return Ok(()) };
        self.matched = recorded.ended().map_err(|error| self.unread(error))?.map(|file| (file, offsets));
        Ok(())
    }
}
