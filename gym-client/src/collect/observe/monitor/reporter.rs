//! The task that reports a collection.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use gym_core::base::host_name;
use gym_core::rollout::Attempt;
use gym_core::{CallContext, Code, World};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::rows::find_row;
use super::{
    AttemptId, CollectionMonitor, CollectionReport, EndedAttempt, ReportedCause, ReportedQueue, ReportedRollout,
    ReportedRow, WantedRow,
};
use crate::collect::files::OutputFiles;
use crate::collect::run::{CollectProgress, RolloutEvent, RolloutEventKind, RolloutObserver};

/// Interval of the reports: short enough for a page, and a thousandth of what a rollout server does in that time.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Limit for one report.
const REPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit for the last report of a run.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of the agents' summaries, which cost time for each task.
const SUMMARIES_INTERVAL: Duration = Duration::from_secs(5);
/// Attempts of one report. An event costs a rollout a few microseconds, so a sample bounds that to 1 % of a core's time.
const ENDED_MAX: u32 = 200;
/// Attempts that wait for a report, while the monitor does not respond.
const WAITING_MAX: usize = 1_000;
/// Rollouts in flight of one report.
const OLDEST_MAX: usize = 50;
/// Rows of one report.
const ROWS_MAX: usize = 4;

/// The facts that do not change while a collection runs.
#[derive(Clone, Debug)]
pub(in crate::collect) struct ReportedCollection {
    pub(in crate::collect) run_id: String,
    pub(in crate::collect) input: String,
    pub(in crate::collect) files: OutputFiles,
}

/// Reports one collection until it ends.
#[derive(Debug)]
pub(in crate::collect) struct CollectionReporter {
    sample: Arc<EndedSample>,
    end: Option<oneshot::Sender<&'static str>>,
    task: JoinSet<()>,
}

/// A sample of the attempts that ended since the last report.
#[derive(Debug)]
struct EndedSample {
    /// Attempts that may still be added before the next report.
    room: AtomicU32,
    ended: Mutex<VecDeque<EndedAttempt>>,
}

impl EndedSample {}

impl RolloutObserver for EndedSample {
    fn wants(&self, _: Attempt) -> bool {
        self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(1)).is_ok()
    }

    fn observe(&self, event: RolloutEvent) {
        let mut ended = EndedAttempt {
            attempt: id(event.attempt),
            agent: event.agent.to_string(),
            ended_ms: millis(event.time),
            seconds: 0.0,
            reward: None,
            class: None,
            tokens: None,
            truncated: None,
            phases: None,
        };
        match event.kind {
            RolloutEventKind::Finished(row) => {
                ended.seconds = row.duration.as_secs_f64();
                (ended.reward, ended.tokens) = (row.reward, row.tokens);
                (ended.truncated, ended.phases) = (row.truncated, row.phases);
            }
            RolloutEventKind::Failed(failed) => {
                (ended.seconds, ended.class) = (failed.duration.as_secs_f64(), Some(failed.class));
            }
            RolloutEventKind::Started | RolloutEventKind::Unrecorded => return,
        }
        let mut waiting = self.ended.lock();
        if waiting.len() >= WAITING_MAX {
            waiting.pop_front();
        }
        waiting.push_back(ended);
    }
}

impl CollectionReporter {
    /// Starts the reports.
    pub(in crate::collect) fn start(
        monitor: Arc<dyn CollectionMonitor>,
        collection: ReportedCollection,
        progress: Arc<CollectProgress>,
        world: &World,
    ) -> Self {
        let sample = Arc::new(EndedSample { room: AtomicU32::new(ENDED_MAX), ended: Mutex::default() });
        let (end, ends) = oneshot::channel();
        let reports = Reports {
            monitor,
            head: CollectionReport {
                id: collection.run_id.clone(),
                host: host_name(),
                pid: std::process::id(),
                input: collection.input.clone(),
                output: collection.files.rollouts.display().to_string(),
                began_ms: millis(world.now()),
                ..CollectionReport::default()
            },
            collection,
            progress,
            sample: Arc::clone(&sample),
            agents: None,
            wanted: Vec::new(),
        };
        let mut task = JoinSet::new();
        task.spawn(reports.run(ends).boxed());
        Self { sample, end: Some(end), task }
    }

    /// Returns the observer for the driver.
    pub(in crate::collect) fn observer(&self) -> Arc<dyn RolloutObserver> {
        Arc::clone(&self.sample) as _
    }

    /// Sends the last report. A monitor that does not respond is given up after 2 s.
    pub(in crate::collect) async fn end(mut self, end: &'static str) {
        if let Some(sender) = self.end.take() {
            // The task may have ended, because the monitor takes no reports.
            let _ = sender.send(end);
        }
        // Dropping the set ends the task.
        let _ = timeout(END_TIMEOUT, self.task.join_next()).await;
    }
}

struct Reports {
    monitor: Arc<dyn CollectionMonitor>,
    collection: ReportedCollection,
    /// The part of each report that does not change.
    head: CollectionReport,
    progress: Arc<CollectProgress>,
    sample: Arc<EndedSample>,
    /// The summaries of the agents, and when they were made.
    agents: Option<(Instant, BTreeMap<String, Value>)>,
    wanted: Vec<WantedRow>,
}

impl Reports {
    async fn run(mut self, mut ends: oneshot::Receiver<&'static str>) {
        let mut ticks = interval(REPORT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut warned = false;
        loop {
            let end = tokio::select! {
                biased;
                end = &mut ends => match end {
                    Ok(end) => Some(end),
                    // The collection was dropped.
                    Err(_) => return,
                },
                _ = ticks.tick() => None,
            };
            let report = self.report(end).await;
            self.sample.room.store(ENDED_MAX, Ordering::Relaxed);
            let cx = CallContext::within(REPORT_TIMEOUT);
            match self.monitor.report(&cx, &report).await {
                Ok(reply) => {
                    warned = false;
                    self.wanted = reply.wanted;
                    self.wanted.truncate(ROWS_MAX);
                    if !self.wanted.is_empty() {
                        // A person waits.
                        ticks.reset_immediately();
                    }
                }
                // A head server of NeMo Gym, or an older one of this SDK.
                Err(error) if matches!(error.code(), Code::NotFound | Code::Unimplemented) => {
                    tracing::debug!(%error, "this monitor takes no reports of collections");
                    return;
                }
                Err(error) => {
                    if !std::mem::replace(&mut warned, true) {
                        tracing::info!(%error, "a report of this collection was lost; the rollouts are not affected");
                    }
                    let mut waiting = self.sample.ended.lock();
                    for ended in report.ended.into_iter().rev() {
                        if waiting.len() < WAITING_MAX {
                            waiting.push_front(ended);
                        }
                    }
                }
            }
            if end.is_some() {
                return;
            }
        }
    }

    async fn report(&mut self, end: Option<&'static str>) -> CollectionReport {
        let rows = self.rows().await;
        let snapshot = self.progress.snapshot();
        let old = self.agents.as_ref().is_none_or(|(made, _)| made.elapsed() >= SUMMARIES_INTERVAL);
        if old || end.is_some() {
            let summaries = self.progress.agent_summaries();
            let agents = summaries
                .iter()
                .filter_map(|(name, summary)| Some((name.to_string(), serde_json::to_value(summary).ok()?)));
            self.agents = Some((Instant::now(), agents.collect()));
        }
        let causes = snapshot.causes_by_count().into_iter().map(|cause| ReportedCause {
            count: cause.count,
            class: cause.class,
            server: cause.server.clone(),
            route: cause.route.clone(),
            example: cause.example.to_string(),
            causes: cause.causes.clone(),
        });
        let causes = causes.collect();
        let oldest = self.progress.oldest(OLDEST_MAX).into_iter().map(|rollout| ReportedRollout {
            attempt: id(rollout.attempt),
            agent: rollout.agent.to_string(),
            seconds: rollout.age.as_secs_f64(),
        });
        let queue = snapshot.pool.as_ref().map(|pool| ReportedQueue {
            waiting: pool.waiting,
            held: pool.held,
            workers_lost: pool.workers_lost,
            workers: pool.workers.iter().map(|w| (w.name.to_string(), w.held, w.capacity)).collect(),
        });
        let ended = std::mem::take(&mut *self.sample.ended.lock()).into();
        CollectionReport {
            end: end.map(str::to_owned),
            rollouts: snapshot.total,
            completed: snapshot.completed,
            already_completed: snapshot.already_completed,
            failed: snapshot.given_up + snapshot.already_given_up,
            in_flight: snapshot.in_flight,
            mean_reward: snapshot.mean_reward(),
            agents: self.agents.as_ref().map(|(_, agents)| agents.clone()).unwrap_or_default(),
            causes,
            other_causes: snapshot.other_causes,
            failures: snapshot.failures,
            oldest: oldest.collect(),
            queue,
            ended,
            rows,
            ..self.head.clone()
        }
    }

    /// Reads the rows that the last reply asked for.
    async fn rows(&mut self) -> Vec<ReportedRow> {
        let wanted = std::mem::take(&mut self.wanted);
        if wanted.is_empty() {
            return Vec::new();
        }
        let files = self.collection.files.clone();
        let reading = move || {
            let read = wanted.into_iter().map(|wanted| {
                let path = if wanted.failed { &files.failures } else { &files.rollouts };
                match find_row(path, wanted.attempt, wanted.failed) {
                    Ok(row) => ReportedRow { wanted, row: Some(row), problem: None },
                    Err(problem) => ReportedRow { wanted, row: None, problem: Some(problem) },
                }
            });
            read.collect()
        };
        // The searches have limits.
        tokio::task::spawn_blocking(reading).await.unwrap_or_default()
    }
}

fn id(attempt: Attempt) -> AttemptId {
    AttemptId { task: attempt.key.task_index, repeat: attempt.key.rollout_index, attempt: attempt.number }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
