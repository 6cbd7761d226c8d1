//! Status of the ranks of a group, read without waiting for a rank.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gym_core::Incarnation;
use gym_core::group::collective::CollectiveReport;
use gym_core::group::{Rank, RankState, RunningCall};
use gym_core::transport::PathInfo;
use tokio::time::Instant;

use crate::supervise::options::GroupOptions;
use crate::supervise::record::RankRecord;
use crate::usage::gpu::GpuUsage;
use crate::usage::process::ProcessUsage;

/// Status of one rank.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RankStatus {
    /// The rank.
    pub rank: Rank,
    /// Index of its node.
    pub node: u32,
    /// Name of the node on which it runs, if it is not this machine.
    pub node_name: Option<Arc<str>>,
    /// Its GPUs, as in `CUDA_VISIBLE_DEVICES`.
    pub gpus: Vec<String>,
    /// Process id, if the rank has its own process and runs.
    pub pid: Option<u32>,
    /// Health state; see [`crate::health`].
    pub state: RankState,
    /// The current incarnation, or the last one.
    pub incarnation: Incarnation,
    /// Restarts taken from the budget.
    pub restarts_used: u32,
    /// Restarts left in the budget.
    pub restarts_left: u32,
    /// Running calls at the last heartbeat, oldest first.
    pub running: Vec<RunningCall>,
    /// Queued calls at the last heartbeat.
    pub waiting: usize,
    /// Collective operations at the last heartbeat: those that wait, with the ranks that have not called them, and totals.
    pub collectives: CollectiveReport,
    /// Time since the last heartbeat; `None` before the first one.
    pub heartbeat_age: Option<Duration>,
    /// The connection to the rank, if there is one.
    pub path: Option<PathInfo>,
    /// The last error, with the incarnation that ended and the last line of its standard error.
    pub last_error: Option<String>,
}

/// Resource usage of one rank.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RankUsage {
    /// The rank.
    pub rank: Rank,
    /// CPU, memory and GPU memory; `None` for a rank without its own process, and before the first sample.
    pub host: Option<ProcessUsage>,
    /// Memory limit in bytes; `None` without a limit.
    pub memory_limit_bytes: Option<u64>,
    /// Usage of its GPUs by all processes. Empty without GPUs, and on a cluster without `monitor_memory`.
    pub gpus: Vec<GpuUsage>,
}

/// A rank that runs without a heartbeat or without progress.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StuckRank {
    /// The rank.
    pub rank: Rank,
    /// The incarnation.
    pub incarnation: Incarnation,
    /// The method that it ran at the last heartbeat, if any.
    pub method: Option<String>,
    /// The time for which that call has run.
    pub elapsed: Duration,
    /// Time since the last heartbeat or progress.
    pub still: Duration,
    /// The reason.
    pub reason: StuckReason,
}

/// The reason why a rank counts as stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StuckReason {
    /// No heartbeat, although its process exists.
    NoHeartbeat,
    /// No progress of the running call.
    NoProgress,
}

impl fmt::Display for StuckReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoHeartbeat => "no heartbeat",
            Self::NoProgress => "no progress",
        })
    }
}

pub(super) fn status(record: &RankRecord, now: Instant, options: &GroupOptions) -> RankStatus {
    let report = record.report();
    RankStatus {
        rank: record.place.rank,
        node: record.place.node_rank,
        node_name: record.node_name.clone(),
        gpus: record.place.gpus.clone(),
        pid: record.pid,
        state: record.state(),
        incarnation: record.incarnation,
        restarts_used: record.restarts_used(),
        restarts_left: options.max_restarts.saturating_sub(record.restarts_used()),
        waiting: report.as_ref().map_or(0, |report| report.waiting),
        collectives: report.as_ref().map(|report| report.collectives.clone()).unwrap_or_default(),
        running: report.map(|report| report.running).unwrap_or_default(),
        heartbeat_age: record.heartbeat_age(now),
        path: record.channel.as_ref().map(|channel| channel.path().clone()),
        last_error: record.last_error.clone(),
    }
}

/// Returns a report if the rank is stuck. Ended ranks and idle ranks with heartbeats are not stuck.
pub(super) fn stuck(record: &RankRecord, now: Instant, options: &GroupOptions) -> Option<StuckRank> {
    if !matches!(record.state(), RankState::Healthy | RankState::Suspect | RankState::Stale) {
        return None;
    }
    let silent = record.silence(now);
    let running = record.report().into_iter().flat_map(|report| report.running);
    // The rank's report is as old as its last heartbeat.
    let since = |ms: u64| Duration::from_millis(ms) + silent;
    let stillest = running.max_by_key(|call| call.still_ms);
    let method = stillest.as_ref().map(|call| call.method.clone());
    let elapsed = stillest.as_ref().map_or(Duration::ZERO, |call| since(call.elapsed_ms));
    let (still, reason) = if silent > options.silence_max {
        (silent, StuckReason::NoHeartbeat)
    } else {
        let still = since(stillest?.still_ms);
        (still > options.stall).then_some((still, StuckReason::NoProgress))?
    };
    Some(StuckRank { rank: record.place.rank, incarnation: record.incarnation, method, elapsed, still, reason })
}

/// A change of a rank that is logged.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum StuckChange {
    Stuck(StuckRank),
    Moves,
}

/// Returns whether the rank has become stuck, or moves again, since the last call. Each change is returned once.
pub(super) fn stuck_change(record: &mut RankRecord, now: Instant, options: &GroupOptions) -> Option<StuckChange> {
    let stuck = stuck(record, now, options);
    let was_stuck = std::mem::replace(&mut record.stuck, stuck.is_some());
    match (stuck, was_stuck) {
        (Some(stuck), false) => Some(StuckChange::Stuck(stuck)),
        (None, true) => Some(StuckChange::Moves),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::health::HealthEvent;

    use super::*;
    use crate::provision::RankPlace;
    use gym_client::transport::Transports;

    fn last_heartbeat(now: Instant, running: &str) -> RankRecord {
        let mut record = RankRecord::new(RankPlace::on_one_node(0, 1));
        let options = GroupOptions::new(Transports::new());
        record.serve(now, &options);
        let text =
            format!(r#"{{"rank":0,"incarnation":1,"waiting":0,"running":[{running}],"succeeded":0,"failed":0}}"#);
        record.probed(Some(serde_json::from_str(&text).expect("a report")), now, &options);
        record
    }

    #[test]
    fn progress_tells_slow_from_stuck_not_age() {
        let (options, now) = (GroupOptions::new(Transports::new()), Instant::now());
        let slow = last_heartbeat(now, r#"{"method":"train","elapsed_ms":9000000,"progress":70,"still_ms":2000}"#);
        assert_eq!(stuck(&slow, now, &options), None);
        let still = last_heartbeat(now, r#"{"method":"train","elapsed_ms":700000,"progress":3,"still_ms":300001}"#);
        let found = stuck(&still, now, &options).expect("stuck");
        assert_eq!((found.method.as_deref(), found.reason), (Some("train"), StuckReason::NoProgress));
        assert_eq!((found.elapsed, found.still), (Duration::from_secs(700), Duration::from_millis(300_001)));
    }

    #[test]
    fn an_idle_rank_is_never_stuck_and_a_silent_one_is() {
        let (options, now) = (GroupOptions::new(Transports::new()), Instant::now());
        let idle = last_heartbeat(now, "");
        assert_eq!(stuck(&idle, now + options.silence_max, &options), None);
        let found = stuck(&idle, now + options.silence_max * 2, &options).expect("stuck");
        assert_eq!((found.method, found.reason), (None, StuckReason::NoHeartbeat));
    }

    #[test]
    fn a_rank_that_becomes_stuck_is_reported_once_and_once_more_when_it_moves() {
        let (options, now) = (GroupOptions::new(Transports::new()), Instant::now());
        let running =
            |still_ms: u64| format!(r#"{{"method":"train","elapsed_ms":700000,"progress":3,"still_ms":{still_ms}}}"#);
        let mut record = last_heartbeat(now, &running(299_000));
        assert_eq!(stuck_change(&mut record, now, &options), None, "five minutes are the default");
        let later = now + Duration::from_secs(2);
        let change = stuck_change(&mut record, later, &options);
        let Some(StuckChange::Stuck(stuck)) = change else { panic!("{change:?}") };
        assert_eq!((stuck.method.as_deref(), stuck.still.as_secs()), (Some("train"), 301));
        assert_eq!(stuck_change(&mut record, later, &options), None);
        let moving = last_heartbeat(later, &running(0)).report();
        record.probed(moving, later, &options);
        assert_eq!(stuck_change(&mut record, later, &options), Some(StuckChange::Moves));
        assert_eq!(stuck_change(&mut record, later, &options), None);
    }

    #[test]
    fn a_dead_rank_is_not_stuck() {
        let (options, now) = (GroupOptions::new(Transports::new()), Instant::now());
        let mut record =
            last_heartbeat(now, r#"{"method":"train","elapsed_ms":700000,"progress":3,"still_ms":700000}"#);
        record.note(HealthEvent::Ended, &options);
        assert_eq!(stuck(&record, now + options.silence_max * 9, &options), None);
    }
}
