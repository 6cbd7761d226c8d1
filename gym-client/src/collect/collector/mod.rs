//! Runs a whole collection: materializes the tasks, runs the rollouts, records them and requests the statistics.

mod check;
mod collection;
mod observers;
mod reader;
mod requested;
mod statistics;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_core::base::Files;
use gym_core::{CancelToken, Code, Error, Result, World};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::client::ServerClient;
use crate::collect::collector::collection::Collection;
use crate::collect::collector::requested::{RequestedRows, RowMatcher, RowSink, RowWriter};
use crate::collect::files::chunks::{CHUNKS_AHEAD, ChunkWriter, replace_json_file, write_new_file};
use crate::collect::files::{ExistingOutput, OutputFiles};
use crate::collect::input::places::RowPlaces;
use crate::collect::input::source::InputSource;
use crate::collect::input::{InputError, MaterializeOptions, MaterializeSummary, Materializer};
use crate::collect::names::ServerNames;
use crate::collect::observe::monitor::CollectionMonitor;
use crate::collect::report::read_recorded;
use crate::collect::resume::settings::ChangedSettings;
use crate::collect::run::progress::RequestedTasks;
use crate::collect::run::{
    AgentSummary, CollectProgress, DriverOptions, FailFast, ProgressSnapshot, RunEnd, TaskCoverage,
};
use crate::work::WorkPool;

/// Bytes that one read or write of a file transfers.
const BUFFER_BYTES: usize = 128 << 10;

/// Limit for opening a ledger, which reads its index, or the whole file if there is no index.
const OPEN_TIMEOUT: Duration = Duration::from_secs(600);

/// The input, output and settings of one collection.
///
/// ```
/// use gym_client::collect::{CollectOptions, ExistingOutput};
///
/// let mut options = CollectOptions::new("tasks.jsonl", "results/shop.jsonl");
/// options.existing = ExistingOutput::Resume;
/// options.driver.concurrency = 256;
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CollectOptions {
    /// The tasks: a JSONL file with one JSON object per line; or, with the feature `parquet`, a Parquet file, a directory with Parquet files, or a
    /// pattern such as `data/train-*.parquet`. Shards are read in the order of their names.
    ///
    /// A row of a Parquet file becomes a JSON object. Numbers keep their value, a JSON column is embedded, other binary data is base64, times
    /// are texts in the form of RFC 3339, and floats that are not finite are null. Null members of the row and of its structs are left
    /// out: Parquet and `datasets` give all rows the same members, and fill those that a row does not have with null.
    pub input: PathBuf,
    /// The file for the rollouts. The other files are written to the same directory; see [`OutputFiles`].
    pub output: PathBuf,
    /// The behavior if files of `output` exist. Default: [`ExistingOutput::Reject`].
    pub existing: ExistingOutput,
    /// The behavior if a resumed collection has other settings of its servers than those that made the recorded rewards. Default:
    /// [`ChangedSettings::Reject`].
    pub changed_settings: ChangedSettings,
    /// Settings that turn input rows into rollouts. Default: one rollout per row; see [`MaterializeOptions::new`].
    pub materialize: MaterializeOptions,
    /// Concurrency, attempts and deadlines. Default: [`DriverOptions::default`] with [`FailFast::Alike`].
    pub driver: DriverOptions,
    /// Request statistics from the environment servers at the end. Default: `true`.
    pub aggregate: bool,
    /// A file for events while the collection runs, in JSON lines: a regular file, a FIFO or a path such as `/dev/stderr`. Default: none.
    ///
    /// Every line has `event` and `time` (seconds since the Unix epoch). Lines arrive whole, in order, within 0.2 s.
    /// - `run_started`: `format` (1), `run_id` (as in the failures file), `input`, `output`, `resumed`, `rollouts`, `already_completed`,
    ///   `concurrency`, `attempts_max`.
    /// - `started`, `finished`, `failed`, `unrecorded`: one attempt, by the numbers of its row: `task_index`, `rollout_index`,
    ///   `attempt_index`, and `agent`. A `finished` attempt has its row on the disk, and `reward` (null if there is none), `seconds`,
    ///   `attempts`, `tokens` (`input_tokens`, `output_tokens`; null if unknown), `truncated` (the reason, or null), `tool_failures`, `phases`
    ///   ([`Phases`](gym_core::rollout::Phases) as text, or null). A `failed` one has `class`, `server`, `route`, `cause`, `seconds`, and
    ///   `retried`: whether this run tries again. `unrecorded` means that the environment asked to keep no row. An attempt that exceeded its deadline fails, and may finish later.
    /// - `dropped`: so many `events` are missing here.
    /// - `run_ended`: `end` (`exhausted`, `stopped`, `failed_fast`, `error`), `error`, `rollouts`, `completed`, `already_completed`,
    ///   `failed`, `incomplete`, `mean_reward`, `events_dropped`. A run that was killed has no such line.
    ///
    /// Events are not the ledger, and no rollout waits for them: while the disk is full or the reader of a FIFO stands still, up to
    /// 16,384 events wait, and further ones are dropped and counted ([`CollectSummary::events_dropped`]). [`ExistingOutput::Resume`]
    /// appends to the file; the other values treat it as an output file.
    pub events: Option<PathBuf>,
    /// A directory for a TensorBoard event file with scalars every 10 s and at the end. Default: none.
    ///
    /// The step is the number of completed rollouts. The tags are `reward/mean`, `reward/mean/<agent>`, `rollouts/per_second`,
    /// `rollouts/in_flight`, `rollouts/completed`, `rollouts/failed` and `failed_attempts/<class>`. Rates and failed attempts are those of
    /// this run; means, and completed and failed rollouts, include earlier runs. [`ExistingOutput::Resume`] adds a file, and TensorBoard
    /// shows the files of a directory as one run. The other values reject or replace the files that collections left there; files of
    /// other programs are kept. No rollout waits for the file.
    pub tensorboard: Option<PathBuf>,
}

impl CollectOptions {
    /// Returns the options for one rollout of each row of `input`, recorded in `output`; each field documents its
    /// default.
    #[must_use]
    pub fn new(input: impl Into<PathBuf>, output: impl Into<PathBuf>) -> Self {
        let input = input.into();
        let materialize = MaterializeOptions::new(input.display().to_string());
        Self {
            input,
            output: output.into(),
            existing: ExistingOutput::default(),
            changed_settings: ChangedSettings::default(),
            materialize,
            driver: DriverOptions { fail_fast: FailFast::Alike, ..DriverOptions::default() },
            aggregate: true,
            events: None,
            tensorboard: None,
        }
    }
}

/// The result of a collection.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CollectSummary {
    /// The files that were written.
    pub files: OutputFiles,
    /// The end of the run: all rows were tried, or the collection was stopped early.
    pub ended: RunEnd,
    /// The counters at the end of the collection.
    pub snapshot: ProgressSnapshot,
    /// The figures of each agent, over all rows of the rollouts file, those of earlier runs included.
    pub agents: BTreeMap<Arc<str>, AgentSummary>,
    /// The tasks with missing rollouts, by agent: first those without a single recorded rollout, and at most 1,000 of each agent.
    /// [`AgentSummary::tasks_incomplete`] counts all.
    pub incomplete_tasks: BTreeMap<Arc<str>, Vec<TaskCoverage>>,
    /// The attempts that a rollout had, over all runs: [`DriverOptions::attempts_max`].
    pub attempts_max: u32,
    /// The attempts that a rollout had whose worker was lost: [`DriverOptions::lost_max`].
    pub lost_max: u32,
    /// Warnings for the user, about the input, the settings, the events file and the scalars.
    pub warnings: Vec<String>,
    /// The reason why the statistics are missing; `None` if they were written or not requested.
    pub aggregate_error: Option<String>,
    /// Events that are not in the events file. `warnings` has the reason.
    pub events_dropped: u64,
}

impl CollectSummary {
    /// Creates the summary of a run without agents and warnings.
    #[must_use]
    pub fn new(files: OutputFiles, ended: RunEnd, snapshot: ProgressSnapshot) -> Self {
        Self {
            files,
            ended,
            snapshot,
            agents: BTreeMap::new(),
            incomplete_tasks: BTreeMap::new(),
            attempts_max: 0,
            lost_max: 0,
            warnings: Vec::new(),
            aggregate_error: None,
            events_dropped: 0,
        }
    }

    /// Returns `true` if every rollout has a scored row, from this run or an earlier one.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.snapshot.total == self.snapshot.completed + self.snapshot.already_completed
    }
}

/// Collects rollouts from the servers of a head server or of a stack in this process.
///
/// ```
/// use gym_client::collect::{CollectOptions, RolloutCollector};
/// use gym_core::{CancelToken, Result};
///
/// async fn collect(collector: &RolloutCollector) -> Result<bool> {
///     let options = CollectOptions::new("tasks.jsonl", "results/shop.jsonl");
///     Ok(collector.collect(options, CancelToken::new()).await?.is_complete())
/// }
/// ```
#[derive(Debug)]
pub struct RolloutCollector {
    client: ServerClient,
    names: ServerNames,
    world: World,
    progress: Arc<CollectProgress>,
    pool: Option<WorkPool>,
    /// The servers whose rollouts come from the pool; `None` for all.
    pulled: Option<BTreeSet<String>>,
    monitor: Option<Arc<dyn CollectionMonitor>>,
}

impl RolloutCollector {
    /// Creates a collector that calls the servers listed in `names` through `client`.
    #[must_use]
    pub fn new(client: ServerClient, names: ServerNames, world: World) -> Self {
        Self { client, names, world, progress: Arc::default(), pool: None, pulled: None, monitor: None }
    }

    /// Lets workers take the rollouts from `pool`, instead of calling the servers by name. The pool's queue must hold
    /// [`DriverOptions::concurrency`] items.
    #[must_use]
    pub fn pulled_from(mut self, pool: WorkPool) -> Self {
        self.progress.set_pool(pool.clone());
        self.pool = Some(pool);
        self
    }

    /// Lets workers take the rollouts of these servers only. Those of all others are sent to the servers by name.
    #[must_use]
    pub fn pulling_only(mut self, servers: BTreeSet<String>) -> Self {
        self.pulled = Some(servers);
        self
    }

    /// Reports the collection to a monitor, such as a head server, so that people can watch it. By default, nothing is reported. No rollout waits for the monitor.
    #[must_use]
    pub fn reporting_to(mut self, monitor: Arc<dyn CollectionMonitor>) -> Self {
        self.monitor = Some(monitor);
        self
    }

    /// Returns the counters of the running collection.
    #[must_use]
    pub fn progress(&self) -> Arc<CollectProgress> {
        Arc::clone(&self.progress)
    }

    /// Collects until every row has been tried or `stop` is cancelled. Recorded rollouts can be resumed later. A collector makes one
    /// collection at a time; [`RolloutCollector::progress`] has the counters of the newest one.
    ///
    /// # Errors
    /// `InvalidArgument`, with the file and line, if the input or the options are invalid; with the difference, if a resumed
    /// collection does not request the recorded rows; the errors of [`CollectOptions::check_output`]. The errors of
    /// [`JsonlLedger::open`](crate::collect::ledger::JsonlLedger::open), of the disk, and of the ledger while it records.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn collect(&self, options: CollectOptions, stop: CancelToken) -> BoxFuture<'_, Result<CollectSummary>> {
        Box::pin(async move {
            self.progress.restart();
            let (collection, requested, events) = Collection::open(self, &options).await?;
            let (collection, accepted) = collection.accept(requested).await?;
            collection.run(accepted, events, stop).await
        })
    }

    async fn write_settings(&self, path: &Path, text: String) -> Result<()> {
        let (chunks, written) = mpsc::channel(CHUNKS_AHEAD);
        let sending = async move {
            // The receiver is gone if a write failed, whose error is returned.
            let _ = chunks.send(text.into()).await;
            Ok(())
        };
        replace_json_file(&*self.world.files, path, written, sending).await
    }

    /// Counts the rollouts that earlier runs recorded: the rows in the first `bytes` of the file.
    async fn count_recorded(&self, rollouts: &Path, bytes: u64) -> Result<()> {
        let (rollouts, progress) = (rollouts.to_owned(), Arc::clone(&self.progress));
        let reading = move || {
            let (file, name) = (open(&rollouts)?, rollouts.display().to_string());
            let file = BufReader::with_capacity(BUFFER_BYTES, file.take(bytes));
            let read = read_recorded(file, &name, |agent, key, rollout| progress.add_recorded(agent, key, rollout));
            read.map_err(|error| Error::internal(error.to_string()))
        };
        blocking(reading).await
    }
}

impl CollectOptions {
    /// Writes the rows to dispatch and checks that each row has a server.
    async fn materialize(&self, names: &ServerNames, disk: &dyn Files, partial: &Path) -> Result<RequestedRows> {
        let (chunks, written) = mpsc::channel(CHUNKS_AHEAD);
        let keeps_offsets = self.existing == ExistingOutput::Resume;
        let reading = self.each_row(names, partial, RowWriter::new(ChunkWriter::new(chunks), keeps_offsets));
        let written = write_new_file(disk, partial, written, reading).await;
        let (materialized, RowWriter { offsets, .. }) = written.map_err(|error| match error.code() {
            Code::NotFound => Error::invalid("no file can be created in this folder; choose another path")
                .about(format!("write {}", partial.display()))
                .caused_by(error),
            _ => error,
        })?;
        if let Err(error) = self.check_targets(names, &materialized.summary, materialized.places.as_ref()) {
            discard(disk, partial).await;
            return Err(error);
        }
        let Materialized { summary, tasks, places } = materialized;
        Ok(RequestedRows { summary, tasks, places, offsets, recorded: None })
    }

    /// Compares the requested rows with the recorded ones while they are materialized; `None` if their texts differ.
    async fn match_recorded(&self, names: &ServerNames, recorded: &Path) -> Result<Option<RequestedRows>> {
        let (materialized, matcher) = self.each_row(names, recorded, RowMatcher::open(recorded)?).await?;
        self.check_targets(names, &materialized.summary, materialized.places.as_ref())?;
        let Materialized { summary, tasks, places } = materialized;
        Ok(matcher.matched.map(|(file, offsets)| RequestedRows {
            summary,
            tasks,
            places,
            offsets: Some(offsets),
            recorded: Some(file),
        }))
    }

    /// Materializes the rows on a blocking thread. Temporary files are written to the folder of `output`.
    async fn each_row<S: RowSink>(&self, names: &ServerNames, output: &Path, mut sink: S) -> Result<(Materialized, S)> {
        let (input, limit) = (self.input.clone(), self.materialize.limit);
        let folder =
            output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned();
        let materializer =
            Materializer::new(self.materialize.clone(), names.clone()).map_err(|error| invalid(&error))?;
        blocking(move || {
            let source = InputSource::find(&input).map_err(|error| invalid(&error))?;
            let (reader, places) = source.open(&folder, limit).map_err(|error| invalid(&error))?;
            let mut tasks = RequestedTasks::default();
            let summary = materializer.each_row(reader, |key, agent, row, line| {
                tasks.add_of_row(key, agent, row);
                sink.row(key, line)
            });
            let summary = summary.and_then(|summary| sink.end().map(|()| summary));
            let summary = summary.map_err(|error| invalid(&error.with_places(places.as_ref())))?;
            Ok((Materialized { summary, tasks, places }, sink))
        })
        .await
    }

    /// Checks that each agent and environment server of the rows can be called.
    fn check_targets(
        &self,
        names: &ServerNames,
        summary: &MaterializeSummary,
        places: Option<&RowPlaces>,
    ) -> Result<()> {
        for (target, used) in &summary.targets {
            if let Err(error) = names.check_target(target) {
                let input = self.input.display().to_string();
                let place = RowPlaces::name(places, &input, used.first_line);
                return Err(Error::invalid(error.message().to_owned()).about(place));
            }
        }
        Ok(())
    }
}

/// Removes the rows to dispatch. Best effort: a later run writes the file again.
async fn discard(disk: &dyn Files, partial: &Path) {
    let _ = disk.remove(partial).await;
}

/// The rows of an input, once all of them were materialized.
struct Materialized {
    summary: MaterializeSummary,
    tasks: RequestedTasks,
    /// The places of the rows in the input's files, if its rows are not its lines.
    places: Option<RowPlaces>,
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|error| {
        Error::invalid("the file cannot be opened").about(format!("read {}", path.display())).caused_by(error)
    })
}

/// Runs file work of unknown duration on a blocking thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = Arc::new(Mutex::new(None));
    let result = Arc::clone(&done);
    // Boxed, so that the compiler builds one type of task, not one for each closure.
    let task: Box<dyn FnOnce() + Send> = Box::new(move || {
        let worked = work();
        *result.lock() = Some(worked);
    });
    let ended = tokio::task::spawn_blocking(task).await;
    ended.map_err(|error| Error::internal("a file task panicked or was cancelled").caused_by(error))?;
    let mut done = done.lock();
    done.take().expect("the task has ended and left its result")
}

fn invalid(error: &InputError) -> Error {
    match error {
        InputError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
            Error::not_started(Code::ResourceExhausted, error.to_string())
        }
        _ => Error::invalid(error.to_string()),
    }
}
