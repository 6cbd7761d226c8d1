//! Group commit: one task writes what all attempts hand in, a group at a time, one sync a group and file.
//!
//! While a group is being synced the next one gathers in the queue, so the more hand in at once, the fewer syncs a row costs.
//! A row is acknowledged after its sync, whatever becomes of the index.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use gym_core::base::{FileLock, Files};
use gym_core::rollout::Attempt;
use gym_core::{Code, Error, Execution, Result};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::collect::ledger::jsonl::index::{IndexRecord, LedgerFile, RECORD_BYTES};
use crate::collect::ledger::jsonl::paths::LedgerPaths;
use crate::collect::ledger::states::{KeyStates, OutcomeClass};

/// Rows that wait for the writer. Whoever hands in holds its row anyway, so this bounds only what those who have left leave
/// behind; it is a few groups, so that the writer never waits for a full one.
pub(super) const QUEUE_ROWS: usize = 4_096;

/// Rows in a group: past about a thousand a sync costs so little a row that more only makes the first wait longer.
pub(super) const GROUP_ROWS: usize = 1_024;

/// Bytes in a group, unless its first row alone is larger. Also how far from the end of a file, after a loss of power, lines
/// that were never acknowledged can start.
pub(super) const GROUP_BYTES: u64 = 4 << 20;

/// Rows below this are copied together, larger ones are written from where they are.
const COPY_BYTES_MAX: usize = 16 << 10;

/// Index records are written this many bytes at a time: what a killed process left out is parsed again, which for 1,600 rows
/// takes milliseconds.
const INDEX_BYTES: usize = 64 << 10;

/// A write that takes this long is told of, each time: a sync takes milliseconds, on a busy disk a few seconds.
const STALL_TOLD_EVERY: Duration = Duration::from_secs(30);

/// What the writer is asked to do.
#[derive(Debug)]
pub(super) enum WriterCommand {
    Row(PendingRow),
    /// Everything handed in before is on the disk when this is answered.
    Flush(oneshot::Sender<Result<()>>),
    /// Like a flush; the writer ends after it and lets go of the lock.
    Close(oneshot::Sender<Result<()>>),
}

/// An outcome on its way to the disk.
#[derive(Debug)]
pub(super) struct PendingRow {
    pub(super) attempt: Attempt,
    pub(super) class: OutcomeClass,
    /// One line, without its newline.
    pub(super) text: Bytes,
    pub(super) done: oneshot::Sender<Result<()>>,
}

/// Why the writer stopped: given to everyone who comes later.
#[derive(Clone, Debug)]
pub(super) struct WriterFailure {
    code: Code,
    text: String,
}

impl WriterFailure {
    pub(super) fn error(&self) -> Error {
        let text = format!("nothing counts since an error of the disk; open the ledger again to go on: {}", self.text);
        // Not "not started": sending the same row again cannot help.
        Error::new(self.code, Execution::Finished, text)
    }
}

/// The task's own state.
#[derive(Debug)]
pub(super) struct LedgerWriter {
    pub(super) files: Arc<dyn Files>,
    pub(super) paths: Arc<LedgerPaths>,
    pub(super) states: Arc<Mutex<KeyStates>>,
    pub(super) stopped: Arc<OnceLock<WriterFailure>>,
    /// What each file holds that is acknowledged.
    pub(super) lengths: [u64; 2],
    pub(super) index: BytesMut,
    pub(super) index_works: bool,
    /// Where the small rows of each file are put together, kept from group to group.
    pub(super) small: [BytesMut; 2],
    /// Held until the writer ends.
    pub(super) lock: Box<dyn FileLock>,
}

/// Lines of one file that are written together.
#[derive(Debug)]
struct LineBatch {
    /// Small rows that are not among the pieces yet.
    small: BytesMut,
    pieces: Vec<Bytes>,
    bytes: u64,
    rows: Vec<(PendingRow, IndexRecord)>,
}

impl LedgerWriter {
    /// Runs until the ledger is closed or dropped; what was handed in by then is written.
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
                        // After the queue is closed and empty the loop ends by itself; rows that were in it are written.
                        let _ = done.send(self.flush().await);
                    }
                }
            }
            self.write(&mut rows).await;
        }
        // Nobody is left to tell; the index is only a cache.
        let _ = self.flush().await;
        drop(self.lock);
    }

    /// Writes rows in groups, and answers each.
    async fn write(&mut self, rows: &mut Vec<PendingRow>) {
        let mut rows = rows.drain(..).peekable();
        while rows.peek().is_some() {
            let mut group = LedgerFile::ALL.map(|file| LineBatch::new(std::mem::take(&mut self.small[file as usize])));
            {
                // Held for the whole group, never across an await: this is where late attempts are decided.
                let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
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
        let (rollouts, failures) = told_of_a_stall(&self.paths.rollouts, waiting, appended).await;
        for (file, (mut lines, written)) in LedgerFile::ALL.into_iter().zip(group.into_iter().zip([rollouts, failures]))
        {
            // With the pieces gone the buffer can be filled again from its start.
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
            let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
            for (row, _) in &lines.rows {
                states.on_disk(row.attempt, row.class);
            }
        }
        for (row, record) in lines.rows {
            if self.index_works {
                self.index.put_slice(&record.encode());
            }
            // An error: the caller has left; its row is on the disk all the same.
            let _ = row.done.send(Ok(()));
        }
    }

    /// After an error of the disk nothing is written any more. What was not acknowledged is cut off, so that it is not taken
    /// for written when the ledger is opened again: the system may have it in memory only.
    async fn stop(&mut self, file: LedgerFile, lines: LineBatch, error: &Error) {
        tracing::error!(%error, "the ledger stops");
        let stopped =
            self.stopped.get_or_init(|| WriterFailure { code: error.code(), text: error.to_string() }).clone();
        let path = self.paths.of(file);
        if let Err(error) = self.files.truncate(path, self.lengths[file as usize]).await {
            tracing::warn!(%error, "what was not acknowledged could not be cut off");
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
            // Only a cache: the next opening reads the rows instead.
            tracing::warn!(%error, "the ledger goes on without its index");
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

/// Waits for the disk however long it takes, and says so meanwhile: a write that is under way cannot be taken back.
async fn told_of_a_stall<T>(path: &Path, rollouts: usize, appended: impl Future<Output = T>) -> T {
    let mut appended = std::pin::pin!(appended);
    let began = Instant::now();
    loop {
        if let Ok(done) = tokio::time::timeout(STALL_TOLD_EVERY, &mut appended).await {
            return done;
        }
        let seconds = began.elapsed().as_secs();
        tracing::warn!(
            file = %path.display(), rollouts, seconds,
            "the disk has not taken these rollouts yet; they wait for it: is it full, failing or unreachable?"
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
