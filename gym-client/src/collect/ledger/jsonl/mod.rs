//! A ledger that uses the user's rollouts file as its log.
//!
//! ```text
//! record ─► late? ─► queue ─► one writer: late? ─► rollouts.jsonl          ─► sync ─► acknowledged
//!                                          └─────► rollouts_failures.jsonl ─► sync ─┘     └─► rollouts.jsonl.index
//! ```
//!
//! A database would store every row twice. This ledger appends rows to the JSONL file itself, in groups with one sync
//! each. The index file is a cache that makes opening fast and detects changed lines.

mod index;
mod lines;
mod paths;
mod recovery;
mod writer;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use gym_core::base::{FileLock, Files};
use gym_core::rollout::{Attempt, KeyState, Ledger, Outcome, TaskKey};
use gym_core::{CallContext, Code, Error, Execution, Result};
use memchr::memchr2;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::collect::ledger::states::{KeyStates, OutcomeClass};
use paths::LedgerPaths;
pub use paths::{failures_path, index_path};
pub use recovery::RecoveryReport;
use writer::{LedgerWriter, PendingRow, QUEUE_ROWS, WriterCommand, WriterFailure};

/// A ledger in `rollouts.jsonl`, its failures file and an index, in the format of NeMo Gym 0.7.0.
///
/// Rows of completed attempts are appended to the output in completion order; rows of failed attempts are appended to
/// `<stem>_failures.jsonl`. Both must contain `_ng_task_index` and `_ng_rollout_index`, which identify the rollout.
/// NeMo Gym's collector and this ledger can open each other's files.
///
/// Dropping the ledger does not cancel writes that were accepted. [`JsonlLedger::close`] waits for them and releases
/// the lock.
pub struct JsonlLedger {
    paths: Arc<LedgerPaths>,
    states: Arc<Mutex<KeyStates>>,
    commands: mpsc::Sender<WriterCommand>,
    stopped: Arc<OnceLock<WriterFailure>>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// Selects whether an earlier collection's files are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// The files are removed.
    Fresh,
    /// The files are kept, and the collection continues.
    Resume,
}

/// Locks an output file.
///
/// # Errors
/// `FailedPrecondition` if another collector has the file open.
pub(in crate::collect) async fn lock_output(files: &dyn Files, rollouts: &Path) -> Result<Box<dyn FileLock>> {
    files.lock(rollouts).await.map_err(|error| match error.code() {
        Code::FailedPrecondition => Error::finished(
            Code::FailedPrecondition,
            "another collector writes to this file; wait until it ends or choose another output",
        )
        .about(format!("open {}", rollouts.display()))
        .caused_by(error),
        _ => error,
    })
}

impl JsonlLedger {
    /// Opens the ledger of an output file and reports what it contained. Creates missing files and holds the lock of
    /// the output file.
    ///
    /// # Errors
    /// `FailedPrecondition` if another collector has the file open. `DataLoss`, with file, line and byte, if a line is
    /// not a row or does not match its checksum. The errors of the disk.
    pub fn open(
        cx: &CallContext,
        files: Arc<dyn Files>,
        output: impl Into<PathBuf>,
        start: OpenMode,
    ) -> BoxFuture<'_, Result<(Self, RecoveryReport)>> {
        let output = output.into();
        Box::pin(async move {
            cx.check()?;
            let paths = Arc::new(LedgerPaths::new(output));
            if paths.rollouts.file_name().is_none() {
                return Err(Error::invalid("the output path has no file name; name a file")
                    .about(format!("open {}", paths.rollouts.display())));
            }
            cx.bound(Execution::Unknown, Box::pin(Self::open_unbounded(files, paths, start))).await
        })
    }

    async fn open_unbounded(
        files: Arc<dyn Files>,
        paths: Arc<LedgerPaths>,
        start: OpenMode,
    ) -> Result<(Self, RecoveryReport)> {
        let lock = lock_output(&*files, &paths.rollouts).await?;
        if start == OpenMode::Fresh {
            files.remove(&paths.index).await?;
            files.remove(&paths.failures).await?;
            files.truncate(&paths.rollouts, 0).await?;
        }
        let recovered = recovery::recover(&*files, &paths).await?;
        let states = Arc::new(Mutex::new(recovered.states));
        let stopped = Arc::new(OnceLock::new());
        let (commands, waiting) = mpsc::channel(QUEUE_ROWS);
        let writer = LedgerWriter {
            files,
            paths: Arc::clone(&paths),
            states: Arc::clone(&states),
            stopped: Arc::clone(&stopped),
            lengths: recovered.lengths,
            index: BytesMut::new(),
            index_works: true,
            small: Default::default(),
            lock,
        };
        let writer = Mutex::new(Some(tokio::spawn(writer.run(waiting).boxed())));
        Ok((Self { paths, states, commands, stopped, writer }, recovered.opened))
    }

    /// Returns the path of the rollouts file.
    #[must_use]
    pub fn output(&self) -> &Path {
        &self.paths.rollouts
    }

    /// Waits until all accepted rows are on disk, then closes the files. Later records are rejected.
    ///
    /// # Errors
    /// An error of the disk, including an earlier one.
    pub fn close<'a>(&'a self, cx: &'a CallContext) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let flushed = self.command(cx, WriterCommand::Close).await;
            let writer = self.writer.lock().take();
            if let Some(writer) = writer {
                let ended =
                    async { writer.await.map_err(|error| Error::internal("the writer panicked").caused_by(error)) };
                cx.bound(Execution::Unknown, ended).await?;
            }
            flushed
        })
    }

    /// Returns the number of bytes that the states of the rollouts take.
    #[must_use]
    pub fn state_bytes(&self) -> usize {
        self.states.lock().bytes()
    }

    /// Disables the late check. Wrong results follow; a simulation uses this to show why the check is needed.
    #[doc(hidden)]
    #[must_use]
    pub fn without_late_check(self) -> Self {
        self.states.lock().without_late_check();
        self
    }

    async fn command(
        &self,
        cx: &CallContext,
        command: impl FnOnce(oneshot::Sender<Result<()>>) -> WriterCommand,
    ) -> Result<()> {
        let (done, answer) = oneshot::channel();
        let sent = async { self.commands.send(command(done)).await.map_err(|_| self.ended()) };
        cx.bound(Execution::NotStarted, sent).await.map_err(|error| self.explain_timeout(error))?;
        // An accepted outcome is written even if the caller stops waiting.
        let answered = async { answer.await.unwrap_or_else(|_| Err(self.ended())) };
        cx.bound(Execution::Unknown, answered).await.map_err(|error| self.explain_timeout(error))
    }

    /// Adds the likely cause to an error if the deadline passed while the caller waited for the disk.
    fn explain_timeout(&self, error: Error) -> Error {
        if error.code() != Code::DeadlineExceeded {
            return error;
        }
        let text = "the disk has not written the accepted rows in time; check whether the disk of this file is full, failing or \
                    unreachable, then resume: rows that were acknowledged are safe";
        Error::new(Code::DeadlineExceeded, error.execution(), text)
            .about(format!("write {}", self.paths.rollouts.display()))
            .caused_by(error)
    }

    fn ended(&self) -> Error {
        match self.stopped.get() {
            Some(stopped) => stopped.error(),
            None => Error::finished(Code::Unavailable, "the ledger was closed; open it again")
                .about(self.paths.rollouts.display().to_string()),
        }
    }
}

#[async_trait]
impl Ledger for JsonlLedger {
    fn state(&self, key: TaskKey) -> KeyState {
        self.states.lock().state(key)
    }

    fn begin(&self, key: TaskKey) -> Result<Attempt> {
        let begun = self.states.lock().begin(key);
        begun.map_err(|late| late.into_error("begin an attempt at rollout", &key))
    }

    async fn record(&self, cx: &CallContext, attempt: Attempt, outcome: Outcome) -> Result<()> {
        cx.check()?;
        if let Some(stopped) = self.stopped.get() {
            return Err(stopped.error());
        }
        // Keeps late rows out of the queue. The writer checks again, because a newer attempt may begin meanwhile.
        let late = self.states.lock().late(attempt);
        if let Some(late) = late {
            return Err(late.into_error("record", &attempt));
        }
        let class = OutcomeClass::of(&outcome);
        let (Outcome::Completed(row) | Outcome::Failed { row, .. }) = outcome;
        recovery::check_row(attempt, class, &row)?;
        let text = one_line(row.into_text());
        self.command(cx, |done| WriterCommand::Row(PendingRow { attempt, class, text, done })).await
    }

    async fn flush(&self, cx: &CallContext) -> Result<()> {
        self.command(cx, WriterCommand::Flush).await
    }
}

impl fmt::Debug for JsonlLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JsonlLedger")
            .field("output", &self.paths.rollouts)
            .field("stopped", &self.stopped.get())
            .finish_non_exhaustive()
    }
}

/// Returns the row as one line: line breaks between tokens become spaces. JSON strings cannot contain unescaped line
/// breaks.
pub(in crate::collect::ledger) fn one_line(text: Bytes) -> Bytes {
    let Some(first) = memchr2(b'\n', b'\r', &text) else { return text };
    let mut line = BytesMut::from(&text[..]);
    for byte in &mut line[first..] {
        if matches!(byte, b'\n' | b'\r') {
            *byte = b' ';
        }
    }
    line.freeze()
}
