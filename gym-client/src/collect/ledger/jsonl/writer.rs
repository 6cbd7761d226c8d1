//! Group commit: one task writes the rows of all attempts in groups, with one sync per group and file.
//!
//! While a group is synced, the next group collects in the queue. The more rows arrive at once, the fewer syncs each
//! row needs. A row is acknowledged after its sync, even if the index cannot be written.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use gym_core::base::{FileLock, Files};
use gym_core::rollout::Attempt;
use gym_core::{Code, Error, Execution, Result};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::collect::ledger::jsonl::index::{IndexRecord, LedgerFile, RECORD_BYTES};
use crate::collect::ledger::jsonl::paths::LedgerPaths;
use crate::collect::ledger::states::{KeyStates, OutcomeClass};

/// Capacity of the queue of rows. Callers hold their own row while they wait, so the bound limits only rows whose
/// callers were cancelled. It is a few groups long, so that the writer always finds a full one.
pub(super) const QUEUE_ROWS: usize = 4_096;

/// Rows per group. Beyond about a thousand rows the sync cost per row is negligible, and the first row only waits
/// longer.
pub(super) const GROUP_ROWS: usize = 1_024;

/// Bytes per group, unless its first row alone is larger. After a power loss, unacknowledged lines start no further
/// than this from the end of the file.
pub(super) const GROUP_BYTES: u64 = 4 << 20;

/// Smaller rows are copied together; larger rows are written from their own buffers.
const COPY_BYTES_MAX: usize = 16 << 10;

/// Index records are written in chunks of this size. Recovery parses rows whose records were lost in a kill; 1,600 rows
/// take milliseconds.
const INDEX_BYTES: usize = 64 << 10;

/// A write that takes this long is logged, repeatedly. A sync takes milliseconds, or a few seconds on a busy disk.
const STALL_LOG_INTERVAL: Duration = Duration::from_secs(30);

/// A command to the writer.
#[derive(Debug)]
pub(super) enum WriterCommand {
    Row(PendingRow),
    /// Completes when all earlier rows are on disk.
    Flush(oneshot::Sender<Result<()>>),
    /// Like `Flush`; the writer then ends and releases the lock.
    Close(oneshot::Sender<Result<()>>),
}

/// An outcome that waits to be written.
#[derive(Debug)]
pub(super) struct PendingRow {
    pub(super) attempt: Attempt,
    pub(super) class: OutcomeClass,
    /// One line, without its newline.
    pub(super) text: Bytes,
    pub(super) done: oneshot::Sender<Result<()>>,
}

/// The reason why the writer stopped, reported to all later callers.
#[derive(Clone, Debug)]
pub(super) struct WriterFailure {
    code: Code,
    text: String,
}

impl WriterFailure {
    pub(super) fn error(&self) -> Error {
        let text = format!(
            "an earlier disk error stopped the ledger; repair the disk and open the ledger again: {}",
            self.text
        );
        // Not `NotStarted`, because sending the same row again cannot succeed.
        Error::new(self.code, Execution::Finished, text)
    }
}

/// The state of the writer task.
#[derive(Debug)]
pub(super) struct LedgerWriter {
    pub(super) files: Arc<dyn Files>,
    pub(super) paths: Arc<LedgerPaths>,
    pub(super) states: Arc<Mutex<KeyStates>>,
    pub(super) stopped: Arc<OnceLock<WriterFailure>>,
    /// The acknowledged length of each file.
    pub(super) lengths: [u64; 2],
    pub(super) index: BytesMut,
    pub(super) index_works: bool,
    /// Buffers that join the small rows of each file, reused for each group.
    pub(super) small: [BytesMut; 2],
    /// Held until the writer ends.
    pub(super) lock: Box<dyn FileLock>,
}

/// Lines that are written to one file together.
#[derive(Debug)]
struct LineBatch {
    /// Small rows that are not yet in `pieces`.
    small: BytesMut,
    pieces: Vec<Bytes>,
    bytes: u64,
    rows: Vec<(PendingRow, IndexRecord)>,
}

impl LedgerWriter {
    /// Runs until the ledger is closed or dropped, and writes all rows that were accepted by then.
    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<WriterCommand>) {
        let mut batch = Vec::with_capacity(GROUP_ROWS);
        while commands.recv_many(&mut batch, GROUP_ROWS).await > 0 {
            let mut rows = Vec::with_capacity(batch.len());
            for command in batch.drain(..) {
                match command {
                    WriterCommand::Row(row) => rows.push(row),
                    WriterCommand::Flush(done) => {
                        self.write(&mut rows).await;
                        let _ = done.send(self.flush().await);
                    }
                    WriterCommand::Close(done) => {
                        self.write(&mut rows).await;
                        commands.close();
                        // The loop ends when the queue is closed and empty; the rows in it are still written.
                        let _ = done.send(self.flush().await);
                    }
                }
            }
            self.write(&mut rows).await;
        }
        // No caller is left to report an error to, and the index is only a cache.
        let _ = self.flush().await;
        drop(self.lock);
    }

    /// Writes rows in groups and acknowledges each row.
    async fn write(&mut self, rows: &mut Vec<PendingRow>) {
        let mut rows = rows.drain(..).peekable();
        while rows.peek().is_some() {
            let mut group = LedgerFile::ALL.map(|file| LineBatch::new(std::mem::take(&mut self.small[file as usize])));
            {
                // Held for the whole group, but not across an await: late attempts are rejected here.
                let mut states = self.states.lock();
                let mut bytes = 0;
                while let Some(row) = rows.next_if(|row| bytes == 0 || bytes + row.text.len() as u64 <= GROUP_BYTES) {
                    if let Some(stopped) = self.stopped.get() {
                        let _ = row.done.send(Err(stopped.error()));
                    } else if let Err(late) = states.claim(row.attempt) {
                        let _ = row.done.send(Err(late.into_error("record", &row.attempt)));
                    } else {
                        bytes += row.text.len() as u64;
                        let file = part_of(row.class);
                        group[file as usize].push(row, file, self.lengths[file as usize]);
                    }
                }
            }
            self.commit(group).await;
        }
    }

    async fn commit(&mut self, mut group: [LineBatch; 2]) {
        let [rollouts, failures] = &mut group;
        let waiting = rollouts.rows.len() + failures.rows.len();
        let appended = futures_util::future::join(
            append(&*self.files, &self.paths.rollouts, rollouts),
            append(&*self.files, &self.paths.failures, failures),
        );
        let (rollouts, failures) = warn_of_stalls(&self.paths.rollouts, waiting, appended).await;
        for (file, (mut lines, written)) in LedgerFile::ALL.into_iter().zip(group.into_iter().zip([rollouts, failures]))
        {
            // Once the pieces are dropped, the buffer can be filled from its start again.
            lines.pieces.clear();
            self.small[file as usize] = std::mem::take(&mut lines.small);
            match written {
                Ok(()) => self.acknowledge(file, lines),
                Err(error) => self.stop(file, lines, &error).await,
            }
        }
        if self.index.len() >= INDEX_BYTES {
            self.write_index().await;
        }
    }

    fn acknowledge(&mut self, file: LedgerFile, lines: LineBatch) {
        self.lengths[file as usize] += lines.bytes;
        {
            let mut states = self.states.lock();
            for (row, _) in &lines.rows {
                states.on_disk(row.attempt, row.class);
            }
        }
        for (row, record) in lines.rows {
            if self.index_works {
                self.index.put_slice(&record.encode());
            }
            // Fails if the caller was cancelled; the row is on disk nevertheless.
            let _ = row.done.send(Ok(()));
        }
    }

    /// Stops the ledger after a disk error. Unacknowledged bytes are cut off, because they may exist only in the page
    /// cache and would count when the ledger is opened again.
    async fn stop(&mut self, file: LedgerFile, lines: LineBatch, error: &Error) {
        tracing::error!(%error, "disk error; the ledger accepts no more rows");
        let stopped =
            self.stopped.get_or_init(|| WriterFailure { code: error.code(), text: error.to_string() }).clone();
        let path = self.paths.of(file);
        if let Err(error) = self.files.truncate(path, self.lengths[file as usize]).await {
            tracing::warn!(%error, "could not cut off the unacknowledged rows");
        }
        for (row, _) in lines.rows {
            let _ = row.done.send(Err(stopped.error()));
        }
    }

    async fn flush(&mut self) -> Result<()> {
        if let Some(stopped) = self.stopped.get() {
            return Err(stopped.error());
        }
        self.write_index().await;
        Ok(())
    }

    async fn write_index(&mut self) {
        if self.index.is_empty() || !self.index_works {
            return;
        }
        let records = self.index.split().freeze();
        if let Err(error) = self.files.append(&self.paths.index, &[records], false).await {
            // The index is only a cache: the next opening reads the rows instead.
            tracing::warn!(%error, "could not write the index; the ledger continues without it");
            self.index_works = false;
        }
        self.index.reserve(INDEX_BYTES + GROUP_ROWS * RECORD_BYTES);
    }
}

impl LineBatch {
    fn new(small: BytesMut) -> Self {
        Self { small, pieces: Vec::new(), bytes: 0, rows: Vec::new() }
    }

    fn push(&mut self, row: PendingRow, file: LedgerFile, start: u64) {
        let record = IndexRecord {
            attempt: row.attempt,
            class: row.class,
            file,
            offset: start + self.bytes,
            length: row.text.len() as u64,
            crc: crc32c::crc32c(&row.text),
        };
        self.bytes += record.length + 1;
        if row.text.len() < COPY_BYTES_MAX {
            self.small.put_slice(&row.text);
        } else {
            self.end_piece();
            self.pieces.push(row.text.clone());
        }
        self.small.put_u8(b'\n');
        self.rows.push((row, record));
    }

    fn end_piece(&mut self) {
        if !self.small.is_empty() {
            self.pieces.push(self.small.split().freeze());
        }
    }
}

/// Waits for a write without a limit, because it cannot be undone, and logs a warning at intervals.
async fn warn_of_stalls<T>(path: &Path, rollouts: usize, appended: impl Future<Output = T>) -> T {
    let mut appended = std::pin::pin!(appended);
    let began = Instant::now();
    loop {
        if let Ok(done) = tokio::time::timeout(STALL_LOG_INTERVAL, &mut appended).await {
            return done;
        }
        let seconds = began.elapsed().as_secs();
        tracing::warn!(
            file = %path.display(), rollouts, seconds,
            "rollouts wait for the disk; check whether it is full, failing or unreachable"
        );
    }
}

async fn append(files: &dyn Files, path: &Path, lines: &mut LineBatch) -> Result<()> {
    if lines.rows.is_empty() {
        return Ok(());
    }
    lines.end_piece();
    files.append(path, &lines.pieces, true).await
}

fn part_of(class: OutcomeClass) -> LedgerFile {
    if class == OutcomeClass::Completed { LedgerFile::Rollouts } else { LedgerFile::Failures }
}
