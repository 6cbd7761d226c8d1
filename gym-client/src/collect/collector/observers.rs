//! The observers of a running collection: a file of events, a TensorBoard file, and a monitor.

use std::path::Path;
use std::sync::Arc;

use gym_core::Result;

use crate::collect::collector::{CollectOptions, RolloutCollector};
use crate::collect::files::{ExistingOutput, OutputFiles};
use crate::collect::observe::monitor::{CollectionReporter, ReportedCollection};
use crate::collect::observe::{EventFile, EventTarget, RunEnded, RunStarted, TensorBoardFile};
use crate::collect::run::{CollectProgress, Driver, ProgressSnapshot, RunEnd};

/// The observers of one collection.
pub(super) struct Observers {
    events: Option<EventFile>,
    scalars: Option<TensorBoardFile>,
    reporter: Option<CollectionReporter>,
}

impl Observers {
    /// Starts what the options and the collector ask for. `rollouts` has the requested ones, and those that earlier runs completed.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(super) fn start(
        collector: &RolloutCollector,
        options: &CollectOptions,
        driver: &Driver,
        events: Option<(&Path, EventTarget)>,
        rollouts: (u64, u64),
        files: &OutputFiles,
    ) -> Result<Self> {
        let run = run_started(options, driver, rollouts.0, rollouts.1);
        let events = events.map(|(path, target)| EventFile::start(path, target, &collector.world, &run)).transpose()?;
        let scalars = options.tensorboard.as_deref().map(|folder| {
            TensorBoardFile::start(folder, run.resumed, collector.progress(), &collector.world, &run.run_id)
        });
        let scalars = scalars.transpose()?;
        let reporter = collector.monitor.as_ref().map(|monitor| {
            let (run_id, input) = (run.run_id.clone(), run.input.clone());
            let reported = ReportedCollection { run_id, input, files: files.clone() };
            CollectionReporter::start(Arc::clone(monitor), reported, collector.progress(), &collector.world)
        });
        Ok(Self { events, scalars, reporter })
    }

    /// Adds the observers to a driver.
    pub(super) fn observe(&self, mut driver: Driver) -> Driver {
        if let Some(events) = &self.events {
            driver = driver.observed_by(events.observer());
        }
        if let Some(reporter) = &self.reporter {
            driver = driver.observed_by(reporter.observer());
        }
        driver
    }

    /// Ends the observers, and adds what they could not write to `warnings`. Returns the number of dropped events.
    pub(super) async fn end(
        self,
        ended: &Result<RunEnd>,
        progress: &CollectProgress,
        warnings: &mut Vec<String>,
    ) -> u64 {
        let mut events_dropped = 0;
        if let Some(reporter) = self.reporter {
            reporter.end(end_name(ended)).await;
        }
        if let Some(events) = self.events
            && let Some((dropped, warning)) = events.end(run_ended(ended, &progress.snapshot())).await
        {
            events_dropped = dropped;
            warnings.push(warning);
        }
        if let Some(scalars) = self.scalars {
            warnings.extend(scalars.end().await);
        }
        events_dropped
    }
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
