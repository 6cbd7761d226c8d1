//! Runs a whole collection: materializes the tasks, runs the rollouts, records them and requests the statistics.

mod reader;
mod requested;
mod statistics;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_core::base::{Files, raise_descriptors};
use gym_core::{CallContext, CancelToken, Code, Error, Result, World};
use tokio::sync::mpsc;

use crate::client::ServerClient;
use crate::collect::collector::reader::{OpenRows, read_rows};
use crate::collect::collector::requested::{RequestedRows, RowMatcher, RowSink, RowWriter};
use crate::collect::files::chunks::{CHUNKS_AHEAD, ChunkWriter, replace_json_file, write_new_file};
use crate::collect::files::{ExistingOutput, OutputFiles, output_exists};
use crate::collect::input::places::RowPlaces;
use crate::collect::input::source::InputSource;
use crate::collect::input::{InputError, MaterializeOptions, MaterializeSummary, Materializer};
use crate::collect::ledger::{JsonlLedger, OpenMode};
use crate::collect::names::ServerNames;
use crate::collect::observe::monitor::{CollectionMonitor, CollectionReporter, ReportedCollection};
use crate::collect::observe::{EventFile, EventTarget, RunEnded, RunStarted, TensorBoardFile};
use crate::collect::report::read_recorded;
use crate::collect::resume::compare;
use crate::collect::resume::settings::{AcceptedSettings, ChangedSettings, first_settings, resumed_settings};
use crate::collect::run::progress::{INCOMPLETE_TASKS_MAX, RequestedTasks};
use crate::collect::run::{
    AgentSummary, CollectProgress, Driver, DriverOptions, FailFast, ProgressSnapshot, RunEnd, TaskCoverage,
};
use crate::work::{PulledServers, WorkPool};

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
    /// What happens if files of `output` exist. Default: [`ExistingOutput::Reject`].
    pub existing: ExistingOutput,
    /// What happens if a resumed collection has other settings of its servers than those that made the recorded rewards. Default:
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

    /// Checks the paths, and returns the output files that have content. [`RolloutCollector::collect`] does the same before it opens
    /// a file for writing; call this before servers start.
    ///
    /// # Errors
    /// `InvalidArgument` if the input cannot be used, if two of the files are the same file, if an output exists and `existing` rejects that, or if the events file
    /// or the directory for TensorBoard cannot be written. The errors of
    /// the disk.
    pub async fn check_output(&self, disk: &dyn Files) -> Result<Vec<PathBuf>> {
        let files = OutputFiles::beside(&self.output);
        let source = InputSource::find(&self.input).map_err(|error| invalid(&error))?;
        for input in source.files() {
            files.check_distinct(input, self.events.as_deref())?;
        }
        source.check().map_err(|error| invalid(&error))?;
        self.materialize.check().map_err(|error| invalid(&error))?;
        if let Some(events) = &self.events {
            EventTarget::check(events, self.existing)?;
        }
        if let Some(folder) = &self.tensorboard {
            TensorBoardFile::check(folder, self.existing)?;
        }
        let existing = files.existing(disk).await?;
        match (self.existing, existing.first()) {
            (ExistingOutput::Reject, Some(first)) => Err(output_exists(first)),
            _ => Ok(existing),
        }
    }
}

impl CollectOptions {
    /// Checks the first thousand rows of an input of JSON lines, as [`RolloutCollector::collect`] checks all of them: call this before servers
    /// start, which may take minutes. What only a running server knows, such as the type of its task, is not checked.
    ///
    /// # Errors
    /// `InvalidArgument`, with the file and the line.
    pub async fn check_rows(&self, names: &ServerNames) -> Result<()> {
        let mut options = self.materialize.clone();
        let limit = options.limit.filter(|limit| *limit > 0).unwrap_or(u64::MAX);
        (options.limit, options.interleave) = (Some(limit.min(CHECKED_ROWS)), false);
        let materializer = Materializer::new(options, names.clone()).map_err(|error| invalid(&error))?;
        let input = self.input.clone();
        blocking(move || {
            let source = InputSource::find(&input).map_err(|error| invalid(&error))?;
            // Parquet would be converted into a file first.
            let InputSource::Lines(_) = source else { return Ok(()) };
            let (reader, _) = source.open(Path::new(""), None).map_err(|error| invalid(&error))?;
            materializer.each_row(reader, |_, _, _, _| Ok(())).map(drop).map_err(|error| invalid(&error))
        })
        .await
    }
}

/// Rows that are checked before servers start: few enough that nobody waits for them.
const CHECKED_ROWS: u64 = 1_000;

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
    /// [`JsonlLedger::open`], of the disk, and of the ledger while it records.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn collect(&self, options: CollectOptions, stop: CancelToken) -> BoxFuture<'_, Result<CollectSummary>> {
        Box::pin(async move {
            let files = OutputFiles::beside(&options.output);
            self.progress.restart();
            options.check_output(&*self.world.files).await?;
            let resumes = options.existing == ExistingOutput::Resume && has_outcomes(&files)?;
            let cx = CallContext::within(OPEN_TIMEOUT);
            let events = match &options.events {
                Some(path) => Some((path.as_path(), EventTarget::open(path).await?)),
                None => None,
            };
            // The whole input is checked before any file of an earlier run is changed. The name contains the process ID
            // because only the ledger's lock, which is taken later, rejects a second collector.
            let partial = files.materialized.with_extension(format!("jsonl.{}.partial", std::process::id()));
            let mut requested = if resumes { self.match_recorded(&options, &files.materialized).await? } else { None };
            if requested.is_none() {
                requested = Some(self.materialize(&options, &partial).await?);
            }
            let overwrites = options.existing == ExistingOutput::Overwrite;
            // Without leave to overwrite, nothing is removed, even if another collector wrote the files since the check.
            let start = if overwrites { OpenMode::Fresh } else { OpenMode::Resume };
            let opened = JsonlLedger::open(&cx, Arc::clone(&self.world.files), &files.rollouts, start).await;
            let (ledger, opened) = match opened {
                Ok(opened) => opened,
                Err(error) => {
                    self.discard(&partial).await;
                    return Err(error);
                }
            };
            tracing::info!(?opened, output = %files.rollouts.display(), "opened the ledger");
            let recorded = opened.completed + opened.failed > 0;
            let accepted = async {
                let accepted = self.accept(&options, &files, &partial, requested, (resumes, recorded)).await?;
                let settings = self.accept_settings(&options, &files, &accepted.0, opened.completed, recorded).await?;
                Ok((accepted, settings))
            };
            let (requested, settings) = match accepted.await {
                Ok(((requested, true), settings)) => {
                    if !resumes {
                        self.world.files.remove(&files.aggregate).await?;
                    }
                    // Durable before the first outcome is: outcomes without their inputs cannot be resumed.
                    self.world.files.rename(&partial, &files.materialized).await?;
                    (requested, settings)
                }
                Ok(((requested, false), settings)) => {
                    self.discard(&partial).await;
                    (requested, settings)
                }
                Err(error) => {
                    self.discard(&partial).await;
                    ledger.close(&cx).await?;
                    return Err(error);
                }
            };
            if let Some(text) = settings.text {
                self.write_settings(&files.settings, text).await?;
            }
            let MaterializeSummary { rows_written: total, mut warnings, .. } = requested.summary;
            warnings.extend(settings.warnings);
            self.progress.set_total(total);
            self.progress.expect(requested.tasks);
            self.progress.set_input(options.input.display().to_string(), requested.places);
            // Before the first rollout of this run, which would be counted twice.
            let recorded_bytes = std::fs::metadata(&files.rollouts).map_or(0, |found| found.len());
            let ledger = Arc::new(ledger);
            let mut limits = options.driver.clone();
            limits.concurrency = limits.concurrency.min(rollouts_by_descriptors(limits.concurrency));
            let mut driver = Driver::new(self.client.clone(), Arc::clone(&ledger) as _, &self.world, limits)
                .counting_in(Arc::clone(&self.progress))
                .marking(settings.mark);
            match (&self.pool, &self.pulled) {
                (Some(pool), None) => driver = driver.dispatching_over(Arc::new(pool.clone())),
                (Some(pool), Some(servers)) => {
                    let (pool, client, servers) = (pool.clone(), self.client.clone(), servers.clone());
                    driver = driver.dispatching_over(Arc::new(PulledServers { servers, pool, client }));
                }
                (None, _) => {}
            }
            let run = run_started(&options, &driver, total, opened.completed);
            let observing = || {
                let events = events.map(|(path, target)| EventFile::start(path, target, &self.world, &run));
                let scalars = options.tensorboard.as_deref().map(|folder| {
                    TensorBoardFile::start(folder, run.resumed, self.progress(), &self.world, &run.run_id)
                });
                Ok((events.transpose()?, scalars.transpose()?))
            };
            let (events, scalars) = match observing() {
                Ok(observing) => observing,
                Err(error) => {
                    ledger.close(&cx).await?;
                    return Err(error);
                }
            };
            if let Some(events) = &events {
                driver = driver.observed_by(events.observer());
            }
            let reporter = self.monitor.as_ref().map(|monitor| {
                let (run_id, input) = (run.run_id.clone(), run.input.clone());
                let reported = ReportedCollection { run_id, input, files: files.clone() };
                CollectionReporter::start(Arc::clone(monitor), reported, self.progress(), &self.world)
            });
            if let Some(reporter) = &reporter {
                driver = driver.observed_by(reporter.observer());
            }
            let driver = Arc::new(driver);
            // The rows of a resumed collection that are done are not read.
            let offsets = requested.offsets.filter(|_| recorded);
            let open_rows = offsets.map(|offsets| OpenRows { offsets, driver: Arc::clone(&driver) });
            let rows = read_rows(files.materialized.clone(), self.names.clone(), open_rows);
            let stop = stop.child_token();
            let running = driver.run(rows, stop.clone());
            let counting = async {
                let counted = match opened.completed {
                    0 => Ok(()),
                    _ => self.count_recorded(&files.rollouts, recorded_bytes).await,
                };
                if counted.is_err() {
                    stop.cancel();
                }
                counted
            };
            let (ended, counted) = futures_util::future::join(running, counting).await;
            let ended = ended.and_then(|ended| counted.map(|()| ended));
            let closed = ledger.close(&CallContext::within(OPEN_TIMEOUT)).await;
            let ended = closed.and(ended);
            let mut events_dropped = 0;
            if let Some(reporter) = reporter {
                reporter.end(end_name(&ended)).await;
            }
            if let Some(events) = events
                && let Some((dropped, warning)) = events.end(run_ended(&ended, &self.progress.snapshot())).await
            {
                events_dropped = dropped;
                warnings.push(warning);
            }
            if let Some(scalars) = scalars {
                warnings.extend(scalars.end().await);
            }
            let ended = ended?;
            let aggregate_error = match (options.aggregate, ended) {
                (true, RunEnd::Exhausted) => self.aggregate(&files).await.err().map(|error| error.to_string()),
                _ => None,
            };
            let (snapshot, agents) = (self.progress.snapshot(), self.progress.agent_summaries());
            let incomplete_tasks = self.progress.incomplete_tasks(INCOMPLETE_TASKS_MAX);
            Ok(CollectSummary {
                files,
                ended,
                snapshot,
                agents,
                incomplete_tasks,
                attempts_max: options.driver.attempts_max,
                lost_max: options.driver.lost_max,
                warnings,
                aggregate_error,
                events_dropped,
            })
        })
    }

    /// Returns the requested rows, and whether they replace the recorded ones. The ledger is locked.
    async fn accept(
        &self,
        options: &CollectOptions,
        files: &OutputFiles,
        partial: &Path,
        requested: Option<RequestedRows>,
        (resumes, recorded): (bool, bool),
    ) -> Result<(RequestedRows, bool)> {
        if recorded && options.existing == ExistingOutput::Reject {
            return Err(output_exists(&files.rollouts));
        }
        // Without the lock, another collector may have replaced the file since it was compared.
        let is_current =
            |rows: &RequestedRows| rows.recorded.as_ref().is_none_or(|file| file.is_at(&files.materialized));
        let mut requested = match requested.filter(is_current) {
            Some(requested) => requested,
            None => self.materialize(options, partial).await?,
        };
        let resumes = options.existing == ExistingOutput::Resume && (resumes || recorded);
        let replaces = requested.recorded.is_none() && (!resumes || compare_rows(files, partial).await?);
        if requested.recorded.is_none() && !replaces {
            // The recorded rows are the same, but their lines end in another way.
            requested.offsets = None;
        }
        Ok((requested, replaces))
    }

    /// Compares the settings of the servers with the recorded ones. The ledger is locked.
    async fn accept_settings(
        &self,
        options: &CollectOptions,
        files: &OutputFiles,
        requested: &RequestedRows,
        rollouts: u64,
        recorded: bool,
    ) -> Result<AcceptedSettings> {
        let settings = self.names.reward_settings(requested.summary.targets.keys().map(String::as_str));
        if !recorded {
            return first_settings(&settings);
        }
        let (path, changed) = (files.settings.clone(), options.changed_settings);
        blocking(move || {
            let text = match std::fs::read_to_string(&path) {
                Ok(text) => Some(text),
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => {
                    let doing = format!("read {}", path.display());
                    return Err(Error::invalid("the file cannot be read").about(doing).caused_by(error));
                }
            };
            resumed_settings(&path, text.as_deref(), &settings, changed, rollouts)
        })
        .await
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

    /// Writes the rows to dispatch and checks that each row has a server.
    async fn materialize(&self, options: &CollectOptions, partial: &Path) -> Result<RequestedRows> {
        let (chunks, written) = mpsc::channel(CHUNKS_AHEAD);
        let keeps_offsets = options.existing == ExistingOutput::Resume;
        let reading = self.each_row(options, partial, RowWriter::new(ChunkWriter::new(chunks), keeps_offsets));
        let written = write_new_file(&*self.world.files, partial, written, reading).await;
        let (materialized, RowWriter { offsets, .. }) = written.map_err(|error| match error.code() {
            Code::NotFound => Error::invalid("no file can be created in this folder; choose another path")
                .about(format!("write {}", partial.display()))
                .caused_by(error),
            _ => error,
        })?;
        if let Err(error) = self.check_targets(options, &materialized) {
            self.discard(partial).await;
            return Err(error);
        }
        let Materialized { summary, tasks, places } = materialized;
        Ok(RequestedRows { summary, tasks, places, offsets, recorded: None })
    }

    /// Compares the requested rows with the recorded ones while they are materialized; `None` if their texts differ.
    async fn match_recorded(&self, options: &CollectOptions, recorded: &Path) -> Result<Option<RequestedRows>> {
        let (materialized, matcher) = self.each_row(options, recorded, RowMatcher::open(recorded)?).await?;
        self.check_targets(options, &materialized)?;
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
    async fn each_row<S: RowSink>(
        &self,
        options: &CollectOptions,
        output: &Path,
        mut sink: S,
    ) -> Result<(Materialized, S)> {
        let (input, limit) = (options.input.clone(), options.materialize.limit);
        let folder =
            output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned();
        let materializer =
            Materializer::new(options.materialize.clone(), self.names.clone()).map_err(|error| invalid(&error))?;
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
    fn check_targets(&self, options: &CollectOptions, materialized: &Materialized) -> Result<()> {
        for (target, used) in &materialized.summary.targets {
            if let Err(error) = self.names.check_target(target) {
                let input = options.input.display().to_string();
                let place = RowPlaces::name(materialized.places.as_ref(), &input, used.first_line);
                return Err(Error::invalid(error.message().to_owned()).about(place));
            }
        }
        Ok(())
    }

    /// Removes the rows to dispatch. Best effort: a later run writes the file again.
    async fn discard(&self, partial: &Path) {
        let _ = self.world.files.remove(partial).await;
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

/// The rows of an input, once all of them were materialized.
struct Materialized {
    summary: MaterializeSummary,
    tasks: RequestedTasks,
    /// The places of the rows in the input's files, if its rows are not its lines.
    places: Option<RowPlaces>,
}

/// Descriptors of a process for everything but connections of rollouts: files, listeners, the runtime, child processes.
const DESCRIPTORS_OF_OTHERS: u64 = 128;

/// Descriptors of a rollout: a connection that it uses, and one that the pool of another server keeps.
const DESCRIPTORS_PER_ROLLOUT: u64 = 2;

/// Returns the rollouts in flight for which the hard limit on file descriptors has room, and warns if that is fewer than `wanted`.
fn rollouts_by_descriptors(wanted: usize) -> usize {
    let descriptors = raise_descriptors();
    let room = descriptors.saturating_sub(DESCRIPTORS_OF_OTHERS) / DESCRIPTORS_PER_ROLLOUT;
    let room = usize::try_from(room).unwrap_or(usize::MAX).max(1);
    if room < wanted {
        tracing::warn!(
            wanted,
            room,
            descriptors,
            "the concurrency is reduced: this process may open few files, and each rollout needs two; raise the hard limit (`ulimit -Hn`)"
        );
    }
    room
}

fn run_started(options: &CollectOptions, driver: &Driver, rollouts: u64, already_completed: u64) -> RunStarted {
    RunStarted {
        run_id: driver.run_id().to_string(),
        input: options.input.display().to_string(),
        output: options.output.display().to_string(),
        resumed: options.existing == ExistingOutput::Resume,
        rollouts,
        already_completed,
        concurrency: options.driver.concurrency,
        attempts_max: options.driver.attempts_max,
    }
}

fn end_name(ended: &Result<RunEnd>) -> &'static str {
    match ended {
        Ok(RunEnd::Exhausted) => "exhausted",
        Ok(RunEnd::Stopped) => "stopped",
        Ok(RunEnd::FailedFast) => "failed_fast",
        Err(_) => "error",
    }
}

fn run_ended(ended: &Result<RunEnd>, snapshot: &ProgressSnapshot) -> RunEnded {
    RunEnded {
        end: end_name(ended),
        error: ended.as_ref().err().map(ToString::to_string),
        rollouts: snapshot.total,
        completed: snapshot.completed,
        already_completed: snapshot.already_completed,
        failed: snapshot.given_up + snapshot.already_given_up,
        incomplete: snapshot.total.saturating_sub(snapshot.done()),
        mean_reward: snapshot.mean_reward(),
    }
}

/// Returns `true` if an earlier run left outcomes to resume from.
///
/// # Errors
/// `InvalidArgument` if there are outcomes but no materialized inputs: starting again would remove the outcomes.
fn has_outcomes(files: &OutputFiles) -> Result<bool> {
    let has = |path: &Path| std::fs::metadata(path).is_ok_and(|found| found.len() > 0);
    let recorded = has(&files.rollouts) || has(&files.failures);
    if recorded && !has(&files.materialized) {
        return Err(Error::invalid(format!(
            "there are rollouts, but their inputs file {} is missing; restore it, or collect into another output without \
             --resume",
            files.materialized.display()
        ))
        .about(format!("resume {}", files.rollouts.display())));
    }
    Ok(recorded)
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|error| {
        Error::invalid("the file cannot be opened").about(format!("read {}", path.display())).caused_by(error)
    })
}

/// Returns `true` if the materialized inputs must be replaced by the requested rows, which extend them.
async fn compare_rows(files: &OutputFiles, requested: &Path) -> Result<bool> {
    let (recorded, requested) = (files.materialized.clone(), requested.to_owned());
    let compared = blocking(move || compare(&recorded, &requested)).await;
    compared.map_err(|error| match error.subject() {
        "" => error.about(format!("resume {}", files.rollouts.display())),
        _ => error,
    })
}

/// Runs file work of unknown duration on a blocking thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = Arc::new(Mutex::new(None));
    let result = Arc::clone(&done);
    // Boxed, so that the compiler builds one type of task, not one for each closure.
    let task: Box<dyn FnOnce() + Send> = Box::new(move || {
        let worked = work();
        *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(worked);
    });
    let ended = tokio::task::spawn_blocking(task).await;
    ended.map_err(|error| Error::internal("a file task panicked or was cancelled").caused_by(error))?;
    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
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
