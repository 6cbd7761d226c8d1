//! Recovers the files of an earlier collection, however that collection ended.
//!
//! The rows are authoritative. The index maps lines to rollouts, and its checksums detect changed lines. Lines without
//! a record are parsed. A kill or a power loss can leave a line without its newline, or lines with zeros where blocks
//! were not written; recovery cuts these off. Any other invalid line is an error with its position, because an
//! acknowledged row is never dropped silently.
//!
//! Lines without a record may exist only in the page cache, and a sync does not tell: if an earlier one failed, Linux has
//! marked their pages clean, and the next sync succeeds without writing them (`fsync(2)`; Rebello et al., "Can Applications
//! Recover from fsync Failures?", USENIX ATC 2020). Recovery therefore writes these lines again, at their place and from the
//! bytes that it parsed, before they count. A record is written only after the sync of its line, so it confirms the line.
//! Copying the rows to another file would double the space that a collection needs.

use std::path::Path;
use std::task::Poll;

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::future::BoxFuture;
use gym_core::base::Files;
use gym_core::rollout::{Attempt, FailureClass, TaskKey};
use gym_core::{Error, RawObject, Result};

use crate::collect::ledger::jsonl::index::{IndexRecord, LedgerFile, RECORD_BYTES, header};
use crate::collect::ledger::jsonl::lines::{LineReader, NextLine, READ_BYTES};
use crate::collect::ledger::jsonl::paths::LedgerPaths;
use crate::collect::ledger::jsonl::writer::{GROUP_BYTES, GROUP_ROWS};
use crate::collect::ledger::states::{KeyStates, OutcomeClass};
use crate::collect::ledger::truth;

/// The unit that a disk writes atomically.
const SECTOR_BYTES: u64 = 512;

/// Lines are written again in pieces of this size, so that a file without an index needs little memory. Each piece has
/// its own sync, which costs little beside the transfer of as many bytes. The next piece is read meanwhile.
const REWRITE_BYTES: usize = 4 << 20;

/// The state of the files when a ledger was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveryReport {
    /// Rollouts with a row.
    pub completed: u64,
    /// Recorded failed attempts.
    pub failed: u64,
    /// Bytes that were cut off at the ends of the files because they were not complete rows.
    pub dropped_tail_bytes: u64,
    /// `true` if the index was incomplete or did not match the lines, and was repaired from the rows.
    pub rebuilt_index: bool,
}

/// The initial state of a ledger.
#[derive(Debug)]
pub(super) struct RecoveredLedger {
    pub(super) states: KeyStates,
    pub(super) lengths: [u64; 2],
    pub(super) opened: RecoveryReport,
}

/// Reads both files and the index, writes again what the index does not confirm, and repairs the ends of the files.
pub(super) async fn recover(files: &dyn Files, paths: &LedgerPaths) -> Result<RecoveredLedger> {
    let mut recovery =
        Recovery { states: KeyStates::new(), opened: RecoveryReport::default(), fresh: BytesMut::new(), suspect: None };
    let (mut found, mut lengths) = ([None; 2], [0; 2]);
    for file in LedgerFile::ALL {
        found[file as usize] = files.length(paths.of(file)).await?;
        lengths[file as usize] = found[file as usize].unwrap_or(0);
    }
    let mut parts = LedgerFile::ALL.map(|file| LineReader::new(files, paths.of(file), lengths[file as usize]));
    let index_length = files.length(&paths.index).await?;
    let valid_bytes = recovery.follow_index(files, &paths.index, index_length.unwrap_or(0), &mut parts).await?;
    let unknown: u64 = parts.iter().map(LineReader::left).sum();
    let mut ends = [FileEnding::Clean; 2];
    for (file, lines) in LedgerFile::ALL.into_iter().zip(&mut parts) {
        let mut again = LinesAgain::new(files, paths.of(file), lines.offset());
        ends[file as usize] = recovery.scan(file, lines, &paths.index, &mut again).await?;
        again.end().await?;
        lengths[file as usize] = lines.offset();
    }
    drop(parts);
    for file in LedgerFile::ALL {
        let (path, length) = (paths.of(file), lengths[file as usize]);
        if let FileEnding::Torn(bytes) = ends[file as usize] {
            recovery.opened.dropped_tail_bytes += bytes;
            tracing::warn!(path = %path.display(), bytes, "cut off an incomplete line at the end of the file");
        }
        if found[file as usize].is_some() {
            // Also at the same length: after a failed append, further ones are possible only after a truncation.
            files.truncate(path, length).await?;
        } else {
            // NeMo Gym creates the failures file too.
            files.append(path, &[], true).await?;
        }
    }
    recovery.repair_index(files, &paths.index, valid_bytes, index_length, unknown > 0).await;
    Ok(RecoveredLedger { states: recovery.states, lengths, opened: recovery.opened })
}

/// Lines of one file that are written again.
struct LinesAgain<'a> {
    files: &'a dyn Files,
    path: &'a Path,
    /// Offset of `bytes` in the file.
    from: u64,
    bytes: BytesMut,
    /// The piece that is being written while further lines are read.
    writing: Option<BoxFuture<'a, Result<()>>>,
}

impl<'a> LinesAgain<'a> {
    fn new(files: &'a dyn Files, path: &'a Path, from: u64) -> Self {
        Self { files, path, from, bytes: BytesMut::new(), writing: None }
    }

    /// Adds the next line. A missing newline at the end of the file is added with it.
    async fn push(&mut self, line: &[u8]) -> Result<()> {
        self.bytes.put_slice(line);
        self.bytes.put_u8(b'\n');
        if self.bytes.len() >= REWRITE_BYTES { self.write().await } else { Ok(()) }
    }

    /// Begins to write the lines so far, when those before them are on the disk.
    async fn write(&mut self) -> Result<()> {
        if let Some(writing) = self.writing.take() {
            writing.await?;
        }
        let next = BytesMut::with_capacity(REWRITE_BYTES);
        let piece = std::mem::replace(&mut self.bytes, next).freeze();
        let (files, path, from) = (self.files, self.path, self.from);
        self.from += piece.len() as u64;
        let mut writing: BoxFuture<'a, _> = Box::pin(async move { files.rewrite(path, from, &[piece]).await });
        // The first poll begins it.
        match futures_util::poll!(&mut writing) {
            Poll::Ready(written) => written,
            Poll::Pending => {
                self.writing = Some(writing);
                Ok(())
            }
        }
    }

    /// Returns when all lines are on the disk.
    async fn end(mut self) -> Result<()> {
        if !self.bytes.is_empty() {
            self.write().await?;
        }
        match self.writing {
            Some(writing) => writing.await,
            None => Ok(()),
        }
    }
}

struct Recovery {
    states: KeyStates,
    opened: RecoveryReport,
    /// Records that are missing in the index.
    fresh: BytesMut,
    /// A complete line that the index lists as acknowledged and that does not match its checksum. If it is a valid row,
    /// another program rewrote the file; otherwise the line is damaged, not torn.
    suspect: Option<IndexRecord>,
}

/// The state of a file after its last valid line.
#[derive(Clone, Copy)]
enum FileEnding {
    Clean,
    /// The number of bytes that are not a complete row.
    Torn(u64),
}

impl Recovery {
    /// Applies the index up to the first record that does not match its line; returns the number of index bytes that
    /// matched.
    async fn follow_index(
        &mut self,
        files: &dyn Files,
        index: &Path,
        length: u64,
        parts: &mut [LineReader<'_>; 2],
    ) -> Result<u64> {
        let mut valid_bytes = 0;
        // Reads whole records only, so that no record is split between two reads.
        let bytes_max = READ_BYTES / RECORD_BYTES * RECORD_BYTES;
        while valid_bytes < length {
            let chunk = files.read(index, valid_bytes, bytes_max).await?;
            if chunk.is_empty() {
                break;
            }
            for bytes in chunk.chunks(RECORD_BYTES) {
                if valid_bytes == 0 {
                    if bytes != header() {
                        return Ok(0);
                    }
                } else {
                    let Some(record) = IndexRecord::decode(bytes) else { return Ok(valid_bytes) };
                    if !self.follow(&record, &mut parts[record.file as usize], index).await? {
                        return Ok(valid_bytes);
                    }
                }
                valid_bytes += RECORD_BYTES as u64;
            }
        }
        Ok(valid_bytes)
    }

    /// Applies a record; returns `false` if it does not match the next line of its file.
    async fn follow(&mut self, record: &IndexRecord, lines: &mut LineReader<'_>, index: &Path) -> Result<bool> {
        if record.offset != lines.offset() {
            return Ok(false);
        }
        let Some((line, after)) = lines.peek_bytes(record.length).await? else { return Ok(false) };
        let same = crc32c::crc32c(line) == record.crc;
        if !same && (after != b'\n' || memchr::memchr(b'\n', line).is_some()) {
            // The line has another length; parsing decides whether it is valid.
            self.suspect = Some(*record);
            return Ok(false);
        }
        if !same || after != b'\n' {
            let within = if same { line.len() } else { 0 };
            return Err(lines.error(within, damaged(index)));
        }
        let length = line.len();
        lines.skip(length);
        self.found(record);
        Ok(true)
    }

    fn found(&mut self, record: &IndexRecord) {
        if record.class == OutcomeClass::Ignored {
            return;
        }
        self.opened.completed += u64::from(self.states.on_disk(record.attempt, record.class));
        self.opened.failed += u64::from(record.file == LedgerFile::Failures);
    }

    /// Parses the lines that have no index record and writes them again; stops at the first incomplete line.
    async fn scan(
        &mut self,
        file: LedgerFile,
        lines: &mut LineReader<'_>,
        index: &Path,
        again: &mut LinesAgain<'_>,
    ) -> Result<FileEnding> {
        loop {
            let (text, ended) = match lines.peek().await? {
                NextLine::Line(text) => (Bytes::copy_from_slice(text), true),
                NextLine::Rest(text) => (Bytes::copy_from_slice(text), false),
                NextLine::End => return Ok(FileEnding::Clean),
            };
            let read = read_line(file, &text);
            let (attempt, class) = match read {
                Ok(row) => row,
                Err(_) if self.suspect.is_some_and(|line| (line.file, line.offset) == (file, lines.offset())) => {
                    return Err(lines.error(0, damaged(index)));
                }
                Err(_) if !ended || has_hole(&text, lines) => return Ok(FileEnding::Torn(lines.left())),
                Err(wrong) => {
                    let message = format!("{}; repair or remove the line, then resume", wrong.message);
                    return Err(lines.error(wrong.within, message));
                }
            };
            let record = IndexRecord {
                attempt,
                class,
                file,
                offset: lines.offset(),
                length: text.len() as u64,
                crc: crc32c::crc32c(&text),
            };
            lines.skip(text.len());
            self.found(&record);
            self.fresh.put_slice(&record.encode());
            again.push(&text).await?;
            if !ended {
                return Ok(FileEnding::Clean);
            }
        }
    }

    /// Brings the index up to date with the files. It is only a cache: an I/O error here makes the next opening slower.
    async fn repair_index(
        &mut self,
        files: &dyn Files,
        index: &Path,
        valid_bytes: u64,
        length: Option<u64>,
        unknown: bool,
    ) {
        let fresh = std::mem::take(&mut self.fresh).freeze();
        self.opened.rebuilt_index = unknown || length.is_some_and(|length| length > valid_bytes);
        let repaired = async {
            if valid_bytes == 0 {
                return files.replace(index, &[Bytes::copy_from_slice(&header()), fresh]).await;
            }
            if length.is_some_and(|length| length > valid_bytes) {
                files.truncate(index, valid_bytes).await?;
            }
            if fresh.is_empty() { Ok(()) } else { files.append(index, &[fresh], false).await }
        };
        if let Err(error) = repaired.await {
            tracing::warn!(%error, "could not repair the index; the next opening parses all rows");
        }
    }
}

fn damaged(index: &Path) -> String {
    format!(
        "the checksum of the line does not match what was written; restore the line from a backup, or, if the change was \
         intended, remove {} and resume",
        index.display()
    )
}

/// The reason why a line is not a row, and the offset of the error in the line.
struct InvalidLine {
    within: usize,
    message: String,
}

/// Identifies a line. Blank lines, and lines of the failures file without a rollout, are ignored, as in NeMo Gym.
fn read_line(file: LedgerFile, text: &Bytes) -> Result<(Attempt, OutcomeClass), InvalidLine> {
    let ignored = (Attempt { key: TaskKey::new(0, 0), number: 0 }, OutcomeClass::Ignored);
    if text.iter().all(u8::is_ascii_whitespace) {
        return Ok(ignored);
    }
    let row = RawObject::parse(text.clone()).map_err(|error| InvalidLine {
        within: error.offset,
        message: format!("not a JSON object: {}", error.message),
    })?;
    match identify(file, &row).map_err(|message| InvalidLine { within: 0, message })? {
        RowIdentity { key: Ok(key), number, class } => Ok((Attempt { key, number: number.unwrap_or(0) }, class)),
        RowIdentity { key: Err(_), .. } if file == LedgerFile::Failures => Ok(ignored),
        RowIdentity { key: Err(missing), .. } => Err(InvalidLine {
            within: 0,
            message: format!("no `{missing}`, so this is not the output of a collection"),
        }),
    }
}

/// The fields of a row that identify it.
struct RowIdentity {
    /// The rollout, or the name of the missing key.
    key: Result<TaskKey, &'static str>,
    /// The attempt number; optional in the row of a first attempt.
    number: Option<u32>,
    class: OutcomeClass,
}

fn identify(file: LedgerFile, row: &RawObject) -> Result<RowIdentity, String> {
    let number = |key: &str| {
        row.get_as::<Option<u32>>(key)
            .map(Option::flatten)
            .map_err(|_| format!("`{key}` is not an integer from 0 to 4294967295"))
    };
    let key = match (number("_ng_task_index")?, number("_ng_rollout_index")?) {
        (Some(task), Some(rollout)) => Ok(TaskKey::new(task, rollout)),
        (None, _) => Err("_ng_task_index"),
        (_, None) => Err("_ng_rollout_index"),
    };
    let class = match file {
        LedgerFile::Rollouts => OutcomeClass::Completed,
        LedgerFile::Failures
            if row.get_as("_ng_failure_terminal").is_ok_and(|value| value.is_some_and(|value| truth(&value))) =>
        {
            OutcomeClass::Terminal
        }
        LedgerFile::Failures if row.get("_ng_failure_class").is_some_and(|class| is_of_the_cluster(&class)) => {
            OutcomeClass::Lost
        }
        LedgerFile::Failures => OutcomeClass::Failed,
    };
    Ok(RowIdentity { key, number: number("_ng_attempt_index")?, class })
}

/// Returns `true` for the JSON text of a class for which the task is not to blame.
fn is_of_the_cluster(class: &[u8]) -> bool {
    serde_json::from_slice::<FailureClass>(class).is_ok_and(FailureClass::is_of_the_cluster)
}

/// Rejects a row that recovery without an index would read as another outcome.
pub(super) fn check_row(attempt: Attempt, class: OutcomeClass, row: &RawObject) -> Result<()> {
    let refuse = |message: String| Err(Error::invalid(message).about(format!("record {attempt}")));
    let file = if class == OutcomeClass::Completed { LedgerFile::Rollouts } else { LedgerFile::Failures };
    let named = match identify(file, row) {
        Ok(named) => named,
        Err(message) => return refuse(message),
    };
    match named.key {
        Err(missing) => return refuse(format!("the row has no `{missing}`")),
        Ok(key) if key != attempt.key => return refuse(format!("the row belongs to rollout {key}")),
        Ok(_) => {}
    }
    if let Some(number) = named.number.filter(|number| *number != attempt.number) {
        return refuse(format!("the row's `_ng_attempt_index` is {number}; expected the number of the attempt"));
    }
    if named.class != class {
        return refuse("the row's `_ng_failure_terminal` or `_ng_failure_class` contradicts the outcome".to_owned());
    }
    Ok(())
}

/// Returns `true` if the next line contains zeros as a power loss leaves them. Such zeros start at the start of the
/// line or of a sector, and end at the end of a sector or of the file. They lie no further from the end of the file
/// than an unacknowledged group can start.
fn has_hole(text: &[u8], lines: &LineReader<'_>) -> bool {
    // A group has at most `GROUP_BYTES` and one newline per row, or it is one large row.
    if lines.left() > GROUP_BYTES + GROUP_ROWS as u64 && lines.left() > text.len() as u64 + 1 {
        return false;
    }
    let mut at = 0;
    while let Some(zero) = memchr::memchr(0, &text[at..]) {
        let start = at + zero;
        let end = start + text[start..].iter().take_while(|byte| **byte == 0).count();
        let starts = start == 0 || (lines.offset() + start as u64).is_multiple_of(SECTOR_BYTES);
        let ends = (lines.offset() + end as u64).is_multiple_of(SECTOR_BYTES) || end as u64 == lines.left();
        if starts && ends {
            return true;
        }
        at = end;
    }
    false
}
