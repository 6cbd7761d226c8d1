//! The result of a collection for programs: the output of `collect --json`.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use gym_client::collect::{AgentSummary, CollectSummary, RunEnd, TaskCoverage, UnrecordedRollouts};
use gym_core::base::ErrorLink;
use gym_core::rollout::FailureClass;
use serde::Serialize;

use crate::cli::collect::figures::rate;
use crate::cli::collect::summary::{advice, recorded, statistics_file};

/// The object that `collect --json` prints to standard output when the collection has ended. Progress, warnings and errors go to
/// standard error, and nothing is printed if the collection could not begin or was stopped by a second signal. New fields may be added.
#[derive(Debug, Serialize)]
pub(super) struct CollectReport<'a> {
    /// The exit code of the command: 0 if every rollout is recorded, 1 if the statistics are missing, 3 if rollouts failed or are
    /// incomplete.
    exit_code: u8,
    /// The end of the run: `exhausted` (every row was tried), `stopped` (by a signal) or `failed_fast`.
    ended: &'static str,
    /// The next step if rollouts are missing, otherwise `null`.
    advice: Option<String>,
    /// Requested rollouts.
    rollouts: u64,
    /// Rollouts in the rollouts file.
    recorded: u64,
    /// Those of `recorded` that earlier runs recorded.
    recorded_earlier: u64,
    /// Rollouts that failed, in this run or an earlier one, and were not tried again or have no attempts left.
    failed: u64,
    /// The action of --resume on the rollouts of `failed`: it tries those of `attempts_left` again, and the others only with more --attempts
    /// (`attempts_spent`), with more --lost-attempts (`workers_lost`), or never (`terminal`).
    unrecorded: UnrecordedRollouts,
    /// Rollouts that were not tried to their end.
    incomplete: u64,
    /// Duration of the collection.
    seconds: f64,
    /// Rollouts that this run recorded in one second.
    rollouts_per_second: f64,
    /// The figures of each agent, over all recorded rollouts, those of earlier runs included.
    agents: BTreeMap<&'a str, &'a AgentSummary>,
    /// The tasks of each agent with missing rollouts: first those without a single recorded rollout, and at most 1,000 of each agent.
    incomplete_tasks: BTreeMap<&'a str, &'a [TaskCoverage]>,
    /// Failed attempts of this run by class.
    failures: &'a BTreeMap<FailureClass, u64>,
    /// The causes of the failed attempts of this run, the most frequent first.
    causes: Vec<CauseReport<'a>>,
    /// Failed attempts of this run with none of these causes.
    other_causes: u64,
    /// Servers that were reached, by transport.
    transports: BTreeMap<&'static str, usize>,
    /// The files of the collection.
    files: FilesReport<'a>,
    /// Warnings about the input.
    warnings: &'a [String],
    /// The reason why the statistics are missing; `null` if they were written or not requested.
    statistics_error: Option<&'a str>,
}

/// A cause of failed attempts.
#[derive(Debug, Serialize)]
struct CauseReport<'a> {
    /// Number of attempts.
    count: u64,
    /// The class of the failures.
    class: FailureClass,
    /// The innermost server whose call failed.
    server: &'a str,
    /// The route of that call.
    route: &'a str,
    /// The first attempt that failed in this way, as NeMo Gym writes it: `3-0` is repeat 0 of task 3, and `3-0-a1` its second attempt.
    example: String,
    /// The errors of the example, outermost first, each with `subject` and `message`.
    causes: &'a [ErrorLink],
}

/// The files of a collection.
#[derive(Debug, Serialize)]
struct FilesReport<'a> {
    /// The recorded rollouts.
    rollouts: &'a Path,
    /// The failed attempts.
    failures: &'a Path,
    /// The rows as sent.
    inputs: &'a Path,
    /// The settings of the servers that made the rewards.
    settings: &'a Path,
    /// The statistics; `null` if this run did not write them.
    statistics: Option<&'a Path>,
}

impl<'a> CollectReport<'a> {
    pub(super) fn new(
        collected: &'a CollectSummary,
        took: Duration,
        transports: BTreeMap<&'static str, usize>,
        exit_code: u8,
    ) -> Self {
        let (snapshot, files) = (&collected.snapshot, &collected.files);
        let causes = snapshot.causes_by_count().into_iter().map(|cause| CauseReport {
            count: cause.count,
            class: cause.class,
            server: &cause.server,
            route: &cause.route,
            example: cause.example.to_string(),
            causes: &cause.causes,
        });
        Self {
            exit_code,
            ended: match collected.ended {
                RunEnd::Exhausted => "exhausted",
                RunEnd::Stopped => "stopped",
                RunEnd::FailedFast => "failed_fast",
            },
            advice: advice(collected),
            rollouts: snapshot.total,
            recorded: recorded(collected),
            recorded_earlier: snapshot.already_completed,
            failed: snapshot.given_up + snapshot.already_given_up,
            unrecorded: snapshot.unrecorded,
            incomplete: snapshot.total.saturating_sub(snapshot.done()),
            // Milliseconds are exact enough, and print without rounding errors.
            seconds: took.as_millis() as f64 / 1e3,
            rollouts_per_second: rate(snapshot.completed, took),
            agents: collected.agents.iter().map(|(name, agent)| (&**name, agent)).collect(),
            incomplete_tasks: collected.incomplete_tasks.iter().map(|(name, tasks)| (&**name, &**tasks)).collect(),
            failures: &snapshot.failures,
            causes: causes.collect(),
            other_causes: snapshot.other_causes,
            transports,
            files: FilesReport {
                rollouts: &files.rollouts,
                failures: &files.failures,
                inputs: &files.materialized,
                settings: &files.settings,
                statistics: statistics_file(collected),
            },
            warnings: &collected.warnings,
            statistics_error: collected.aggregate_error.as_deref(),
        }
    }
}
