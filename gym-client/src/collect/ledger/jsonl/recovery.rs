//! Opens what an earlier collection left behind, however it ended.
//!
//! The rows are the truth. The index says which rollout each line is, and its checksum finds a line that has changed; lines
//! that it does not speak of are parsed. What a kill or a loss of power can leave at the end of a file is cut off: a line
//! without its newline, and lines with holes of zeros where blocks never reached the disk. Anything else that is no row is
//! an error that names the place, because a row that was acknowledged is never dropped in silence.

use std::path::Path;

use bytes::{BufMut as _, Bytes, BytesMut};
use gym_core::base::Files;
use gym_core::rollout::{Attempt, TaskKey};
use gym_core::{Error, RawObject, Result};

use crate::collect::ledger::jsonl::index::{IndexRecord, LedgerFile, RECORD_BYTES, header};
use crate::collect::ledger::jsonl::lines::{LineReader, NextLine, READ_BYTES};
use crate::collect::ledger::jsonl::paths::LedgerPaths;
use crate::collect::ledger::jsonl::writer::{GROUP_BYTES, GROUP_ROWS};
use crate::collect::ledger::states::{KeyStates, OutcomeClass};
use crate::collect::ledger::truth;

/// What a disk writes whole or not at all.
const SECTOR_BYTES: u64 = 512;

/// What opening a ledger found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveryReport {
    /// Rollouts with a row.
    pub completed: u64,
    /// Failed attempts on record.
    pub failed: u64,
    /// Bytes at the ends of the files that were no whole rows and are cut off.
    pub dropped_tail_bytes: u64,
    /// The index lacked lines or did not fit them, and was mended from the rows.
    pub rebuilt_index: bool,
}

/// What a ledger starts from.
#[derive(Debug)]
pub(super) struct RecoveredLedger {
    pub(super) states: KeyStates,
    pub(super) lengths: [u64; 2],
    pub(super) opened: RecoveryReport,
}

/// Reads both files and the index, repairs their ends, and syncs what is believed.
pub(super) async fn recover(files: &dyn Files, paths: &LedgerPaths) -> Result<RecoveredLedger> {
    let mut recovery =
        Recovery { states: KeyStates::new(), opened: RecoveryReport::default(), fresh: BytesMut::new(), suspect: None };
    let mut lengths = [0; 2];
    for file in LedgerFile::ALL {
        lengths[file as usize] = files.length(paths.of(file)).await?.unwrap_or(0);
    }
    let found = lengths;
    let mut parts = LedgerFile::ALL.map(|file| LineReader::new(files, paths.of(file), lengths[file as usize]));
    let index_length = files.length(&paths.index).await?;
    let believed = recovery.follow_index(files, &paths.index, index_length.unwrap_or(0), &mut parts).await?;
    let unknown: u64 = parts.iter().map(LineReader::left).sum();
    let mut ends = [FileEnding::Clean; 2];
    for (file, lines) in LedgerFile::ALL.into_iter().zip(&mut parts) {
        ends[file as usize] = recovery.scan(file, lines, &paths.index).await?;
        lengths[file as usize] = lines.offset();
    }
    drop(parts);
    for file in LedgerFile::ALL {
        let (path, length) = (paths.of(file), &mut lengths[file as usize]);
        match ends[file as usize] {
            // What a killed process wrote may be in the system's memory only: it is synced before it counts. Creates the
            // sidecar, as NeMo Gym does.
            FileEnding::Clean => add(files, path, found[file as usize], b"").await?,
            FileEnding::NoNewline => add(files, path, found[file as usize], b"\n").await?,
            FileEnding::Torn(bytes) => {
                recovery.opened.dropped_tail_bytes += bytes;
                files.truncate(path, *length).await?;
                tracing::warn!(path = %path.display(), bytes, "cut off an unfinished end");
            }
        }
    }
    recovery.mend_index(files, &paths.index, believed, index_length, unknown > 0).await;
    Ok(RecoveredLedger { states: recovery.states, lengths, opened: recovery.opened })
}

/// Adds to a file and syncs it. After an error the file is cut to what it was, so that the next opening can try again.
async fn add(files: &dyn Files, path: &Path, found: u64, ending: &'static [u8]) -> Result<()> {
    let Err(error) = files.append(path, &[Bytes::from_static(ending)], true).await else { return Ok(()) };
    if let Err(error) = files.truncate(path, found).await {
        tracing::warn!(path = %path.display(), %error, "the file could not be cut to what it was");
    }
    Err(error)
}

struct Recovery {
    states: KeyStates,
    opened: RecoveryReport,
    /// Records that the index lacks.
    fresh: BytesMut,
    /// A line that the index knows to be acknowledged, all of whose bytes are there, and that is not what was written. If it
    /// is a row all the same, somebody has written the file anew; if not, it is damaged, not torn.
    suspect: Option<IndexRecord>,
}

/// How a file ends after its last good line.
#[derive(Clone, Copy)]
enum FileEnding {
    Clean,
    /// The last row lacks its newline only.
    NoNewline,
    /// So many bytes are no row.
    Torn(u64),
}

impl Recovery {
    /// Believes the index as far as it fits the lines; returns how many of its bytes that are.
    async fn follow_index(
        &mut self,
        files: &dyn Files,
        index: &Path,
        length: u64,
        parts: &mut [LineReader<'_>; 2],
    ) -> Result<u64> {
        let mut believed = 0;
        // Whole records only, so that no record is split between two reads.
        let bytes_max = READ_BYTES / RECORD_BYTES * RECORD_BYTES;
        while believed < length {
            let chunk = files.read(index, believed, bytes_max).await?;
            if chunk.is_empty() {
                break;
            }
            for bytes in chunk.chunks(RECORD_BYTES) {
                if believed == 0 {
                    if bytes != header() {
                        return Ok(0);
                    }
                } else {
                    let Some(record) = IndexRecord::decode(bytes) else { return Ok(believed) };
                    if !self.follow(&record, &mut parts[record.file as usize], index).await? {
                        return Ok(believed);
                    }
                }
                believed += RECORD_BYTES as u64;
            }
        }
        Ok(believed)
    }

    /// Whether the record fits the next line of its file.
    async fn follow(&mut self, record: &IndexRecord, lines: &mut LineReader<'_>, index: &Path) -> Result<bool> {
        if record.offset != lines.offset() {
            return Ok(false);
        }
        let Some((line, after)) = lines.peek_bytes(record.length).await? else { return Ok(false) };
        let same = crc32c::crc32c(line) == record.crc;
        if !same && (after != b'\n' || memchr::memchr(b'\n', line).is_some()) {
            // Lines of other lengths: parsing tells what it is.
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

    /// Parses the lines that the index does not speak of; stops before what is no row.
    async fn scan(&mut self, file: LedgerFile, lines: &mut LineReader<'_>, index: &Path) -> Result<FileEnding> {
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
            if !ended {
                return Ok(FileEnding::NoNewline);
            }
        }
    }

    /// Makes the index say what the files say. It is only a cache: an error of the disk here costs time at the next opening.
    async fn mend_index(&mut self, files: &dyn Files, index: &Path, believed: u64, length: Option<u64>, unknown: bool) {
        let fresh = std::mem::take(&mut self.fresh).freeze();
        self.opened.rebuilt_index = unknown || length.is_some_and(|length| length > believed);
        let mended = async {
            if believed == 0 {
                return files.replace(index, &[Bytes::copy_from_slice(&header()), fresh]).await;
            }
            if length.is_some_and(|length| length > believed) {
                files.truncate(index, believed).await?;
            }
            if fresh.is_empty() { Ok(()) } else { files.append(index, &[fresh], false).await }
        };
        if let Err(error) = mended.await {
            tracing::warn!(%error, "the index could not be mended");
        }
    }
}

fn damaged(index: &Path) -> String {
    format!(
        "not what was written (its checksum differs); bring the line back from a copy, or, if it was changed on purpose, \
         remove {} and resume",
        index.display()
    )
}

/// Why a line is no row, and where in it.
struct InvalidLine {
    within: usize,
    message: String,
}

/// What a line is. Blank lines, and lines of the sidecar that name no rollout, are passed over, as NeMo Gym does.
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
        RowIdentity { key: Err(missing), .. } => {
            Err(InvalidLine { within: 0, message: format!("no `{missing}`: is this the output of a collection?") })
        }
    }
}

/// What a row says of itself.
struct RowIdentity {
    /// Or the key that it lacks.
    key: Result<TaskKey, &'static str>,
    /// `None` when it does not say, as a first attempt's row need not.
    number: Option<u32>,
    class: OutcomeClass,
}

fn identify(file: LedgerFile, row: &RawObject) -> Result<RowIdentity, String> {
    let number = |key: &str| {
        row.get_as::<Option<u32>>(key)
            .map(Option::flatten)
            .map_err(|_| format!("`{key}` is not a number from 0 to 4294967295"))
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
        LedgerFile::Failures => OutcomeClass::Failed,
    };
    Ok(RowIdentity { key, number: number("_ng_attempt_index")?, class })
}

/// Refuses a row that would be taken for another outcome when the ledger is opened without its index.
pub(super) fn check_row(attempt: Attempt, class: OutcomeClass, row: &RawObject) -> Result<()> {
    let refuse = |message: String| Err(Error::invalid(message).about(format!("record {attempt}")));
    let file = if class == OutcomeClass::Completed { LedgerFile::Rollouts } else { LedgerFile::Failures };
    let named = match identify(file, row) {
        Ok(named) => named,
        Err(message) => return refuse(message),
    };
    match named.key {
        Err(missing) => return refuse(format!("the row has no `{missing}`")),
        Ok(key) if key != attempt.key => return refuse(format!("the row says that it is rollout {key}")),
        Ok(_) => {}
    }
    if let Some(number) = named.number.filter(|number| *number != attempt.number) {
        return refuse(format!("the row's `_ng_attempt_index` is {number}"));
    }
    if named.class != class {
        return refuse("the row's `_ng_failure_terminal` says otherwise than the outcome".to_owned());
    }
    Ok(())
}

/// Whether the next line has zeros where a loss of power leaves them: from the line's start or a sector's, to a sector's end
/// or the file's, and no further from the end of the file than a group that was never acknowledged reaches.
fn has_hole(text: &[u8], lines: &LineReader<'_>) -> bool {
    // A group is so many bytes and a newline each, or one large row.
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
