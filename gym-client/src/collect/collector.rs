//! The whole of a collection: tasks in, rollouts and statistics out.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt as _};
use gym_core::rollout::TaskKey;
use gym_core::{CallContext, CancelToken, Code, Error, Result, Rope, World};
use tokio::sync::mpsc;

use crate::client::{CallOptions, ServerClient};
use crate::collect::files::OutputFiles;
use crate::collect::input::{
    InputError, MaterializeOptions, MaterializeSummary, MaterializedRow, MaterializedRows, Materializer,
};
use crate::collect::ledger::{JsonlLedger, OpenMode};
use crate::collect::names::ServerNames;
use crate::collect::report::{AggregateRequest, ReportEntry, RolloutsIndex, label_runs, write_report};
use crate::collect::run::{CollectProgress, Driver, DriverOptions, ProgressSnapshot, RolloutRow, RunEnd};

/// Rows that the reader hands over together: waking another thread for each would cost as much as the row itself.
const ROWS_TOGETHER: usize = 64;

/// Times so many rows are read ahead of the window: enough that reading never waits for a rollout, few enough to hold.
const GROUPS_AHEAD: usize = 4;

/// Bytes of a file that are read or written at once.
const BUFFER_BYTES: usize = 128 << 10;

/// Opening a ledger reads its index, or the whole file where there is none.
const OPEN_TIMEOUT: Duration = Duration::from_secs(600);

/// Statistics of a million rollouts take a server seconds.
const AGGREGATE_TIMEOUT: Duration = Duration::from_secs(600);

/// Pieces of an aggregate request are joined to this size before they are sent.
const PIECE_BYTES: usize = 256 << 10;

/// The largest aggregate request, which is held whole until it is answered: some two million rollouts with a dozen fields. A
/// server that is reached over HTTP takes a quarter of it unless its `request_bytes_max` is raised.
const AGGREGATE_BYTES_MAX: usize = 1 << 30;

/// What to collect, and how.
#[derive(Clone, Debug)]
pub struct CollectOptions {
    /// The tasks, one JSON object a line.
    pub input: PathBuf,
    /// The rollouts; the other files are written beside it.
    pub output: PathBuf,
    /// Go on with what the output holds, instead of starting over.
    pub resume: bool,
    /// What to make of the input rows.
    pub materialize: MaterializeOptions,
    /// How the rollouts run.
    pub driver: DriverOptions,
    /// Whether the environment servers are asked for statistics at the end.
    pub aggregate: bool,
}

impl CollectOptions {
    /// One rollout of each row of `input`, into `output`.
    #[must_use]
    pub fn new(input: impl Into<PathBuf>, output: impl Into<PathBuf>) -> Self {
        let input = input.into();
        let materialize = MaterializeOptions::new(input.display().to_string());
        Self {
            input,
            output: output.into(),
            resume: false,
            materialize,
            driver: DriverOptions::default(),
            aggregate: true,
        }
    }
}

/// What a collection came to.
#[derive(Clone, Debug)]
pub struct CollectSummary {
    /// Where it wrote.
    pub files: OutputFiles,
    /// Whether it was stopped early.
    pub ended: RunEnd,
    /// The counters at the end.
    pub snapshot: ProgressSnapshot,
    /// What the user should hear about the input.
    pub warnings: Vec<String>,
    /// Why there is no report of statistics, if there should be one.
    pub aggregate_error: Option<String>,
}

impl CollectSummary {
    /// Whether every wanted rollout has a row.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.snapshot.total == self.snapshot.completed + self.snapshot.already_completed
    }
}

/// Collects rollouts from the servers of one head or stack.
#[derive(Debug)]
pub struct RolloutCollector {
    client: ServerClient,
    names: ServerNames,
    world: World,
    progress: Arc<CollectProgress>,
}

impl RolloutCollector {
    /// A collector that calls with `client` the servers that `names` knows.
    #[must_use]
    pub fn new(client: ServerClient, names: ServerNames, world: World) -> Self {
        Self { client, names, world, progress: Arc::default() }
    }

    /// The counters of the collection under way.
    #[must_use]
    pub fn progress(&self) -> Arc<CollectProgress> {
        Arc::clone(&self.progress)
    }

    /// Collects until every row has been tried or `stop` fires. Whatever has been recorded by then can be resumed.
    ///
    /// # Errors
    /// `InvalidArgument` for what is wrong with the input or the options, naming file and line; the disk's and the ledger's.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn collect(&self, options: CollectOptions, stop: CancelToken) -> BoxFuture<'_, Result<CollectSummary>> {
        Box::pin(async move {
            let files = OutputFiles::beside(&options.output);
            let resumes = options.resume && goes_on(&files)?;
            let cx = CallContext::within(OPEN_TIMEOUT);
            // All that can be wrong with the input is known before anything of an earlier run is removed. The name is this
            // process's own: a second collector is refused only by the ledger's lock.
            let partial = files.materialized.with_extension(format!("jsonl.{}.partial", std::process::id()));
            let summary = if resumes { None } else { Some(self.materialize(&options, &partial).await?) };
            let start = if resumes { OpenMode::Resume } else { OpenMode::Fresh };
            let opened = JsonlLedger::open(&cx, Arc::clone(&self.world.files), &files.rollouts, start).await;
            let (ledger, opened) = opened.inspect_err(|_| drop(std::fs::remove_file(&partial)))?;
            tracing::info!(?opened, output = %files.rollouts.display(), "the ledger is open");
            let (total, warnings) = match summary {
                None => (count_lines(&files.materialized).await?, Vec::new()),
                Some(summary) => {
                    self.world.files.remove(&files.aggregate).await?;
                    std::fs::rename(&partial, &files.materialized).map_err(|error| {
                        Error::internal("cannot write").about(files.materialized.display().to_string()).caused_by(error)
                    })?;
                    (summary.rows_written, summary.warnings)
                }
            };
            self.progress.set_total(total);
            let ledger = Arc::new(ledger);
            let driver = Driver::new(self.client.clone(), Arc::clone(&ledger) as _, &self.world, options.driver)
                .counting_in(Arc::clone(&self.progress));
            let rows = read_rows(files.materialized.clone(), self.names.clone());
            let ended = Arc::new(driver).run(rows, stop).await;
            ledger.close(&CallContext::within(OPEN_TIMEOUT)).await?;
            let ended = ended?;
            let aggregate_error = match (options.aggregate, ended) {
                (true, RunEnd::Exhausted) => self.aggregate(&files).await.err().map(|error| error.to_string()),
                _ => None,
            };
            Ok(CollectSummary { files, ended, snapshot: self.progress.snapshot(), warnings, aggregate_error })
        })
    }

    /// Writes the rows to dispatch, and checks that each has a server.
    async fn materialize(&self, options: &CollectOptions, partial: &Path) -> Result<MaterializeSummary> {
        let (input, target) = (options.input.clone(), partial.to_owned());
        let materializer =
            Materializer::new(options.materialize.clone(), self.names.clone()).map_err(|error| invalid(&error))?;
        let summary = blocking(move || {
            let reader = File::open(&input).map_err(|error| {
                Error::invalid(format!("cannot read the input: {error}")).about(input.display().to_string())
            })?;
            let write = || -> Result<MaterializeSummary, InputError> {
                let doing = || format!("write {}", target.display());
                if let Some(folder) = target.parent() {
                    std::fs::create_dir_all(folder).map_err(|error| InputError::io(doing(), error))?;
                }
                let file = File::create(&target).map_err(|error| InputError::io(doing(), error))?;
                let mut writer = BufWriter::with_capacity(BUFFER_BYTES, file);
                let summary = materializer.write(BufReader::new(reader), &mut writer)?;
                writer.flush().map_err(|error| InputError::io(doing(), error))?;
                // On the disk before it takes its name: a resumed run believes it.
                writer.get_ref().sync_all().map_err(|error| InputError::io(doing(), error))?;
                Ok(summary)
            };
            write().map_err(|error| {
                // Best effort: the error that matters is the first.
                let _ = std::fs::remove_file(&target);
                invalid(&error)
            })
        })
        .await?;
        for (target, used) in &summary.targets {
            self.names.check_target(target).map_err(|error| {
                // As much as can be undone: the next run starts from nothing.
                let _ = std::fs::remove_file(partial);
                let place = format!("{}, line {}", options.input.display(), used.first_line);
                Error::invalid(error.message().to_owned()).about(place)
            })?;
        }
        Ok(summary)
    }

    /// Asks each environment server for the statistics of its rollouts, and writes the report.
    async fn aggregate(&self, files: &OutputFiles) -> Result<()> {
        let names = self.names.clone();
        let rollouts = files.rollouts.clone();
        let index = Arc::new(
            blocking(move || {
                let file = open(&rollouts)?;
                RolloutsIndex::scan(BufReader::new(file), rollouts.display().to_string(), |agent| {
                    names.server_of_agent(agent).map(|(server, _)| server).map_err(|error| error.to_string())
                })
                .map_err(|error| Error::internal(error.to_string()))
            })
            .await?,
        );
        let agents: BTreeMap<String, Option<String>> =
            index.groups().iter().map(|group| (group.server.clone(), group.agent.clone())).collect();
        let labels = label_runs(&agents);
        let mut replies: Vec<(String, Bytes)> = Vec::new();
        for at in 0..index.groups().len() {
            let (index_of, rollouts) = (Arc::clone(&index), files.rollouts.clone());
            let body = blocking(move || aggregate_body(&index_of, at, &rollouts, AGGREGATE_BYTES_MAX)).await?;
            let server = &index.groups()[at].server;
            let cx = CallContext::within(AGGREGATE_TIMEOUT);
            let response = self.client.post(&cx, server, "/aggregate_metrics", body, CallOptions::idempotent()).await?;
            let response =
                response.into_result().map_err(|error| error.about(format!("POST {server}/aggregate_metrics")))?;
            replies.push((server.clone(), response.message.head.to_bytes()));
        }
        let target = files.aggregate.clone();
        blocking(move || {
            let entries: Result<Vec<ReportEntry<'_>>> = replies
                .iter()
                .map(|(server, reply)| {
                    let reply = std::str::from_utf8(reply)
                        .map_err(|error| Error::finished(Code::DataLoss, "the reply is not UTF-8").caused_by(error))?;
                    Ok(ReportEntry { label: labels[server].clone(), server: server.clone(), reply })
                })
                .collect();
            let mut text = Vec::new();
            write_report(&entries?, &mut text).map_err(|error| Error::internal(error.to_string()))?;
            std::fs::write(&target, text)
                .map_err(|error| Error::internal("cannot write").about(target.display().to_string()).caused_by(error))
        })
        .await
    }
}

/// Whether an earlier run has left anything to go on with.
///
/// # Errors
/// When there are outcomes without the rows that they are of: starting over would remove them.
fn goes_on(files: &OutputFiles) -> Result<bool> {
    let has = |path: &Path| std::fs::metadata(path).is_ok_and(|found| found.len() > 0);
    let recorded = has(&files.rollouts) || has(&files.failures);
    if recorded && !has(&files.materialized) {
        return Err(Error::invalid(format!(
            "there are rollouts, but {} is not there, which says what they are of; put it back, or collect without --resume \
             into another output",
            files.materialized.display()
        ))
        .about(format!("resume {}", files.rollouts.display())));
    }
    Ok(recorded)
}

/// The request's body in pieces, so that it is never copied into one.
fn aggregate_body(index: &RolloutsIndex, group: usize, rollouts: &Path, bytes_max: usize) -> Result<Rope> {
    let group = &index.groups()[group];
    let mut file = BufReader::new(open(rollouts)?);
    let mut request = AggregateRequest::new(index.rows(group, &mut file));
    let (mut body, mut bytes) = (Rope::new(), 0);
    let mut piece = String::new();
    loop {
        let before = piece.len();
        let more = request.next_piece(&mut piece).map_err(|error| Error::internal(error.to_string()))?;
        bytes += piece.len() - before;
        if bytes > bytes_max {
            let text = format!(
                "the rollouts of {} make an aggregate request of more than {bytes_max} bytes; split the output and have each \
                 part aggregated",
                group.server
            );
            return Err(Error::not_started(Code::ResourceExhausted, text).about(rollouts.display().to_string()));
        }
        if piece.len() >= PIECE_BYTES || !more {
            body.push(std::mem::take(&mut piece).into());
        }
        if !more {
            return Ok(body);
        }
    }
}

/// The rows of a materialized file, each with the server that runs it.
fn read_rows(path: PathBuf, names: ServerNames) -> impl futures_util::Stream<Item = Result<RolloutRow>> + Unpin {
    let (sender, receiver) = mpsc::channel(GROUPS_AHEAD);
    tokio::task::spawn_blocking(move || {
        let mut resolve = RowRouter { names, known: BTreeMap::new() };
        let file = match open(&path) {
            Ok(file) => BufReader::with_capacity(BUFFER_BYTES, file),
            Err(error) => return drop(sender.blocking_send(vec![Err(error)])),
        };
        let mut rows = MaterializedRows::new(file, path.display().to_string())
            .map(|row| row.map_err(|error| invalid(&error)).and_then(|row| resolve.row(row)));
        loop {
            let mut group = Vec::with_capacity(ROWS_TOGETHER);
            // Nothing is read after an error.
            while group.len() < ROWS_TOGETHER && !group.last().is_some_and(Result::is_err) {
                let Some(row) = rows.next() else { break };
                group.push(row);
            }
            let ends = group.len() < ROWS_TOGETHER || group.last().is_some_and(Result::is_err);
            // Nobody reads any more: the run was stopped.
            if sender.blocking_send(group).is_err() || ends {
                return;
            }
        }
    });
    let groups =
        stream::unfold(receiver, |mut receiver| async move { receiver.recv().await.map(|group| (group, receiver)) });
    Box::pin(groups.flat_map(stream::iter))
}

/// Looks up each agent once.
struct RowRouter {
    names: ServerNames,
    known: BTreeMap<RouteKey, ServerRoute>,
}

/// The agent and the environment server that a row names.
type RouteKey = (Option<String>, Option<String>);

#[derive(Clone)]
struct ServerRoute {
    agent: Arc<str>,
    server: Arc<str>,
    result_type: Arc<str>,
}

impl RowRouter {
    fn row(&mut self, row: MaterializedRow) -> Result<RolloutRow> {
        let place = || format!("materialized row {}", row.line);
        let key = |value: i64| {
            u32::try_from(value)
                .map_err(|_| Error::invalid(format!("an index of {value}; use 0 to {}", u32::MAX)).about(place()))
        };
        let key = TaskKey::new(key(row.key.task_index)?, key(row.key.rollout_index)?);
        let asked = (row.agent, row.environment_server);
        let route = match self.known.get(&asked) {
            Some(route) => route.clone(),
            None => {
                let (server, kind) = match &asked {
                    (_, Some(server)) => (server.clone(), self.names.environment(server)?),
                    (Some(agent), None) => self.names.server_of_agent(agent)?,
                    (None, None) => return Err(Error::invalid("the row names no agent").about(place())),
                };
                let agent = asked.0.as_deref().unwrap_or(&server).into();
                let route = ServerRoute { agent, server: server.as_str().into(), result_type: kind.as_str().into() };
                self.known.insert(asked, route.clone());
                route
            }
        };
        let ServerRoute { agent, server, result_type } = route;
        Ok(RolloutRow { key, agent, server, result_type: Some(result_type), row: row.row })
    }
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|error| Error::invalid("cannot read").about(path.display().to_string()).caused_by(error))
}

async fn count_lines(path: &Path) -> Result<u64> {
    let path = path.to_owned();
    blocking(move || {
        let mut reader = BufReader::with_capacity(1 << 20, open(&path)?);
        let (mut lines, mut open_line) = (0, false);
        loop {
            let buffer = std::io::BufRead::fill_buf(&mut reader)
                .map_err(|error| Error::internal("cannot read").about(path.display().to_string()).caused_by(error))?;
            if buffer.is_empty() {
                return Ok(lines + u64::from(open_line));
            }
            open_line = buffer.last() != Some(&b'\n');
            lines += memchr::memchr_iter(b'\n', buffer).count() as u64;
            let read = buffer.len();
            std::io::BufRead::consume(&mut reader, read);
        }
    })
    .await
}

/// File work of unknown length, off the runtime's threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = Arc::new(Mutex::new(None));
    let result = Arc::clone(&done);
    // Boxed, so that one type of task is compiled and not one for each piece of work.
    let task: Box<dyn FnOnce() + Send> = Box::new(move || {
        let worked = work();
        *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(worked);
    });
    let ended = tokio::task::spawn_blocking(task).await;
    ended.map_err(|error| Error::internal("a file task ended").caused_by(error))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aggregate_request_beyond_its_bound_is_an_error_that_names_the_server() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rollouts.jsonl");
        let rows = (0..3).map(|rollout| {
            format!("{{\"_ng_environment_server\":\"env\",\"_ng_rollout_index\":{rollout},\"reward\":1.0}}\n")
        });
        let text: String = rows.collect();
        std::fs::write(&path, &text).unwrap();
        let index = RolloutsIndex::scan(text.as_bytes(), "rollouts.jsonl", |agent| Err(agent.to_owned())).unwrap();
        let whole = aggregate_body(&index, 0, &path, usize::MAX).unwrap().len();
        assert_eq!(aggregate_body(&index, 0, &path, whole).unwrap().len(), whole);
        let error = aggregate_body(&index, 0, &path, whole - 1).unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
        assert!(
            error
                .to_string()
                .contains(&format!("rollouts of env make an aggregate request of more than {}", whole - 1))
        );
    }
}
