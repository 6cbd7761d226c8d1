//! One collection, in phases: its files are opened, its rows and settings are compared with those of earlier runs, its rollouts run, and its
//! summary is made.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gym_core::base::raise_descriptors;
use gym_core::{CallContext, CancelToken, Error, Result};

use crate::collect::collector::observers::Observers;
use crate::collect::collector::reader::{OpenRows, read_rows};
use crate::collect::collector::requested::RequestedRows;
use crate::collect::collector::{CollectOptions, CollectSummary, OPEN_TIMEOUT, RolloutCollector, blocking, discard};
use crate::collect::files::{ExistingOutput, OutputFiles, output_exists};
use crate::collect::input::MaterializeSummary;
use crate::collect::ledger::{JsonlLedger, OpenMode};
use crate::collect::names::ServerNames;
use crate::collect::observe::EventTarget;
use crate::collect::resume::compare;
use crate::collect::resume::settings::{AcceptedSettings, first_settings, resumed_settings};
use crate::collect::run::progress::INCOMPLETE_TASKS_MAX;
use crate::collect::run::{Driver, RunEnd};
use crate::work::PulledServers;

/// A collection whose ledger is locked.
pub(super) struct Collection<'a> {
    collector: &'a RolloutCollector,
    options: &'a CollectOptions,
    files: OutputFiles,
    /// The requested rows, until it is clear that they replace the recorded ones.
    partial: PathBuf,
    ledger: JsonlLedger,
    /// The options ask to resume, and there were outcomes before the ledger was locked.
    resumes: bool,
    /// The locked ledger has outcomes.
    is_recorded: bool,
    /// The rollouts that earlier runs completed.
    completed: u64,
}

/// The rows and settings with which a collection runs.
pub(super) struct Accepted {
    rows: RequestedRows,
    settings: AcceptedSettings,
}

/// The requested rows after their comparison with the recorded ones.
struct ComparedRows {
    rows: RequestedRows,
    /// They are in a new file, which replaces the recorded one.
    replace: bool,
}

impl<'a> Collection<'a> {
    /// Checks the whole input before any file of an earlier run is changed, and opens the ledger. Returns the requested rows, if they were
    /// compared or written, and the target of events.
    ///
    /// # Errors
    /// Those of [`RolloutCollector::collect`].
    pub(super) async fn open(
        collector: &'a RolloutCollector,
        options: &'a CollectOptions,
    ) -> Result<(Self, RequestedRows, Option<(&'a Path, EventTarget)>)> {
        let files = OutputFiles::beside(&options.output);
        options.check_output(&*collector.world.files).await?;
        let resumes = options.existing == ExistingOutput::Resume && has_outcomes(&files)?;
        let events = match &options.events {
            Some(path) => Some((path.as_path(), EventTarget::open(path).await?)),
            None => None,
        };
        let partial = partial_of(&files);
        let matched = if resumes { options.match_recorded(&collector.names, &files.materialized).await? } else { None };
        let requested = match matched {
            Some(requested) => requested,
            None => options.materialize(&collector.names, &*collector.world.files, &partial).await?,
        };
        let overwrites = options.existing == ExistingOutput::Overwrite;
        // Without leave to overwrite, nothing is removed, even if another collector wrote the files since the check.
        let start = if overwrites { OpenMode::Fresh } else { OpenMode::Resume };
        let cx = CallContext::within(OPEN_TIMEOUT);
        let opened = JsonlLedger::open(&cx, Arc::clone(&collector.world.files), &files.rollouts, start).await;
        let (ledger, opened) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                discard(&*collector.world.files, &partial).await;
                return Err(error);
            }
        };
        tracing::info!(?opened, output = %files.rollouts.display(), "opened the ledger");
        let (is_recorded, completed) = (opened.completed + opened.failed > 0, opened.completed);
        let collection = Self { collector, options, files, partial, ledger, resumes, is_recorded, completed };
        Ok((collection, requested, events))
    }

    /// Compares the rows and the settings with the recorded ones, and makes those of this run durable.
    ///
    /// # Errors
    /// Those of [`RolloutCollector::collect`]. The ledger is closed.
    pub(super) async fn accept(self, requested: RequestedRows) -> Result<(Self, Accepted)> {
        let accepted = async {
            let compared = self.compare(requested).await?;
            let settings = self.settings(&compared.rows).await?;
            Ok::<_, Error>((compared, settings))
        };
        let Self { collector, files, partial, .. } = &self;
        let (rows, settings) = match accepted.await {
            Ok((ComparedRows { rows, replace: true }, settings)) => {
                if !self.resumes {
                    collector.world.files.remove(&files.aggregate).await?;
                }
                // Durable before the first outcome is: outcomes without their inputs cannot be resumed.
                collector.world.files.rename(partial, &files.materialized).await?;
                (rows, settings)
            }
            Ok((ComparedRows { rows, replace: false }, settings)) => {
                discard(&*collector.world.files, partial).await;
                (rows, settings)
            }
            Err(error) => {
                discard(&*collector.world.files, partial).await;
                self.ledger.close(&CallContext::within(OPEN_TIMEOUT)).await?;
                return Err(error);
            }
        };
        if let Some(text) = &settings.text {
            collector.write_settings(&files.settings, text.clone()).await?;
        }
        Ok((self, Accepted { rows, settings }))
    }

    /// Runs the rollouts, and returns the summary.
    ///
    /// # Errors
    /// Those of [`RolloutCollector::collect`]. The ledger is closed.
    pub(super) async fn run(
        self,
        accepted: Accepted,
        events: Option<(&Path, EventTarget)>,
        stop: CancelToken,
    ) -> Result<CollectSummary> {
        let Self { collector, options, files, ledger, is_recorded, completed, .. } = self;
        let (Accepted { rows, settings }, progress) = (accepted, &collector.progress);
        let MaterializeSummary { rows_written: total, mut warnings, .. } = rows.summary;
        warnings.extend(settings.warnings);
        progress.set_total(total);
        progress.expect(rows.tasks);
        progress.set_input(options.input.display().to_string(), rows.places);
        // Before the first rollout of this run, which would be counted twice.
        let recorded_bytes = std::fs::metadata(&files.rollouts).map_or(0, |found| found.len());
        let ledger = Arc::new(ledger);
        let driver = collector.driver(options, &ledger, settings.mark);
        let started = Observers::start(collector, options, &driver, events, (total, completed), &files);
        let observers = match started {
            Ok(observers) => observers,
            Err(error) => {
                ledger.close(&CallContext::within(OPEN_TIMEOUT)).await?;
                return Err(error);
            }
        };
        let driver = Arc::new(observers.observe(driver));
        // The rows of a resumed collection that are done are not read.
        let offsets = rows.offsets.filter(|_| is_recorded);
        let open_rows = offsets.map(|offsets| OpenRows { offsets, driver: Arc::clone(&driver) });
        let rows = read_rows(files.materialized.clone(), collector.names.clone(), open_rows);
        let stop = stop.child_token();
        let running = driver.run(rows, stop.clone());
        let counting = async {
            let counted = match completed {
                0 => Ok(()),
                _ => collector.count_recorded(&files.rollouts, recorded_bytes).await,
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
        let events_dropped = observers.end(&ended, progress, &mut warnings).await;
        let ended = ended?;
        let aggregate_error = match (options.aggregate, ended) {
            (true, RunEnd::Exhausted) => collector.aggregate(&files).await.err().map(|error| error.to_string()),
            _ => None,
        };
        Ok(CollectSummary {
            files,
            ended,
            snapshot: progress.snapshot(),
            agents: progress.agent_summaries(),
            incomplete_tasks: progress.incomplete_tasks(INCOMPLETE_TASKS_MAX),
            attempts_max: options.driver.attempts_max,
            lost_max: options.driver.lost_max,
            warnings,
            aggregate_error,
            events_dropped,
        })
    }

    /// Compares the requested rows with the recorded ones. The ledger is locked.
    async fn compare(&self, requested: RequestedRows) -> Result<ComparedRows> {
        let Self { collector, options, files, partial, .. } = self;
        if self.is_recorded && options.existing == ExistingOutput::Reject {
            return Err(output_exists(&files.rollouts));
        }
        // Without the lock, another collector may have replaced the file since it was compared.
        let is_current = requested.recorded.as_ref().is_none_or(|file| file.is_at(&files.materialized));
        let mut rows = if is_current {
            requested
        } else {
            options.materialize(&collector.names, &*collector.world.files, partial).await?
        };
        let resumes = options.existing == ExistingOutput::Resume && (self.resumes || self.is_recorded);
        let replace = rows.recorded.is_none() && (!resumes || compare_rows(files, partial).await?);
        if rows.recorded.is_none() && !replace {
            // The recorded rows are the same, but their lines end in another way.
            rows.offsets = None;
        }
        Ok(ComparedRows { rows, replace })
    }

    /// Returns the settings of the servers after their comparison with the recorded ones. The ledger is locked.
    async fn settings(&self, requested: &RequestedRows) -> Result<AcceptedSettings> {
        let Self { collector, options, files, completed, .. } = self;
        if self.is_recorded {
            return compare_settings(options, &collector.names, files, requested, *completed).await;
        }
        first_settings(&collector.names.reward_settings(requested.summary.targets.keys().map(String::as_str)))
    }
}

impl RolloutCollector {
    /// Creates the driver of a collection.
    fn driver(&self, options: &CollectOptions, ledger: &Arc<JsonlLedger>, mark: Option<u32>) -> Driver {
        let mut limits = options.driver.clone();
        limits.concurrency = limits.concurrency.min(rollouts_by_descriptors(limits.concurrency));
        let driver = Driver::new(self.client.clone(), Arc::clone(ledger) as _, &self.world, limits)
            .counting_in(Arc::clone(&self.progress))
            .marking(mark);
        match (&self.pool, &self.pulled) {
            (Some(pool), None) => driver.dispatching_over(Arc::new(pool.clone())),
            (Some(pool), Some(servers)) => {
                let (pool, client, servers) = (pool.clone(), self.client.clone(), servers.clone());
                driver.dispatching_over(Arc::new(PulledServers { servers, pool, client }))
            }
            (None, _) => driver,
        }
    }
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

/// Returns `true` if an earlier run left outcomes to resume from.
///
/// # Errors
/// `InvalidArgument` if there are outcomes but no materialized inputs: starting again would remove the outcomes.
pub(super) fn has_outcomes(files: &OutputFiles) -> Result<bool> {
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

/// Compares the settings of the servers with those that made the recorded rewards, of which `completed` rollouts have one.
pub(super) async fn compare_settings(
    options: &CollectOptions,
    names: &ServerNames,
    files: &OutputFiles,
    requested: &RequestedRows,
    completed: u64,
) -> Result<AcceptedSettings> {
    let settings = names.reward_settings(requested.summary.targets.keys().map(String::as_str));
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
        resumed_settings(&path, text.as_deref(), &settings, changed, completed)
    })
    .await
}

/// Returns the name of the requested rows, until it is clear that they replace the recorded ones. It has the process ID because only the
/// ledger's lock, which is taken later, rejects a second collector.
pub(super) fn partial_of(files: &OutputFiles) -> PathBuf {
    files.materialized.with_extension(format!("jsonl.{}.partial", std::process::id()))
}

/// Returns `true` if the materialized inputs must be replaced by the requested rows, which extend them.
pub(super) async fn compare_rows(files: &OutputFiles, requested: &Path) -> Result<bool> {
    let (recorded, requested) = (files.materialized.clone(), requested.to_owned());
    let compared = blocking(move || compare(&recorded, &requested)).await;
    compared.map_err(|error| match error.subject() {
        "" => error.about(format!("resume {}", files.rollouts.display())),
        _ => error,
    })
}
