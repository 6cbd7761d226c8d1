//! How the ranks of a group are, read without waiting for any of them.

use std::time::Duration;

use gym_core::Incarnation;
use gym_core::group::{Rank, RankState, RunningCall};
use gym_core::transport::PathInfo;
use tokio::time::Instant;

use crate::group::supervise::options::GroupOptions;
use crate::group::supervise::record::RankRecord;
use crate::group::usage::node::GpuUsage;
use crate::group::usage::process::ProcessUsage;

/// How one rank is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RankStatus {
    /// Which rank.
    pub rank: Rank,
    /// The index of its node.
    pub node: u32,
    /// Its GPUs, as `CUDA_VISIBLE_DEVICES` names them.
    pub gpus: Vec<String>,
    /// Its process, if it has one of its own and lives.
    pub pid: Option<u32>,
    /// How it is.
    pub state: RankState,
    /// Which life of it: the present one, or the last.
    pub incarnation: Incarnation,
    /// Restarts so far.
    pub restarts_used: u32,
    /// Restarts that its budget still allows.
    pub restarts_left: u32,
    /// What it ran when it was last heard, oldest first.
    pub running: Vec<RunningCall>,
    /// Calls that waited for it then.
    pub waiting: usize,
    /// How long ago it was last heard; `None` when it has not been yet.
    pub heartbeat_age: Option<Duration>,
    /// How it is reached, while it is.
    pub path: Option<PathInfo>,
    /// What went wrong last, with the last lines of its standard error.
    pub last_error: Option<String>,
}

/// What one rank uses.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RankUsage {
    /// Which rank.
    pub rank: Rank,
    /// Processor, memory and GPU memory; `None` for a rank without a process of its own, or before its first sample.
    pub host: Option<ProcessUsage>,
    /// The most memory that it may use, in bytes; `None` without a limit.
    pub memory_limit_bytes: Option<u64>,
    /// Its GPUs; empty without, and on a cluster without `monitor_memory`. What others use of them is in it.
    pub gpus: Vec<GpuUsage>,
}

/// A rank that lives and does not move.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StuckRank {
    /// Which rank.
    pub rank: Rank,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// The method that it runs, as last heard; `None` when it was running none then.
    pub method: Option<String>,
    /// How long that call has been running.
    pub elapsed: Duration,
    /// How long nothing has moved.
    pub still: Duration,
    /// What is missing.
    pub reason: StuckReason,
}

/// What a stuck rank does not give.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StuckReason {
    /// A heartbeat, although its process exists.
    NoHeartbeat,
    /// Progress of the call that it runs.
    NoProgress,
}

pub(super) fn status(record: &RankRecord, now: Instant, options: &GroupOptions) -> RankStatus {
    let report = record.report.as_ref();
    RankStatus {
        rank: record.place.rank,
        node: record.place.node_rank,
        gpus: record.place.gpus.clone(),
        pid: record.pid,
        state: record.state(),
        incarnation: record.incarnation,
        restarts_used: record.restarts_used(),
        restarts_left: options.max_restarts.saturating_sub(record.restarts_used()),
        running: report.map(|report| report.running.clone()).unwrap_or_default(),
        waiting: report.map_or(0, |report| report.waiting),
        heartbeat_age: record.last_heartbeat.map(|last_heartbeat| now.duration_since(last_heartbeat)),
        path: record.channel.as_ref().map(|channel| channel.path().clone()),
        last_error: record.last_error.clone(),
    }
}

/// Whether a rank is stuck. A dead one is not, an idle one never.
pub(super) fn stuck(record: &RankRecord, now: Instant, options: &GroupOptions) -> Option<StuckRank> {
    if !matches!(record.state(), RankState::Healthy | RankState::Suspect | RankState::Stale) {
        return None;
    }
    let silent = record.silence(now);
    let running = record.report.as_ref().into_iter().flat_map(|report| &report.running);
    // Its report is as old as its last heartbeat.
    let since = |ms: u64| Duration::from_millis(ms) + silent;
    let stillest = running.max_by_key(|call| call.still_ms);
    let method = stillest.map(|call| call.method.clone());
    let elapsed = stillest.map_or(Duration::ZERO, |call| since(call.elapsed_ms));
    let (still, reason) = if silent > options.silence_max {
        (silent, StuckReason::NoHeartbeat)
    } else {
        let still = since(stillest?.still_ms);
        (still > options.stall).then_some((still, StuckReason::NoProgress))?
    };
    Some(StuckRank { rank: record.place.rank, incarnation: record.incarnation, method, elapsed, still, reason })
}

#[cfg(test)]
mod tests {
    use gym_core::group::health::HealthEvent;

    use super::*;
    use crate::group::provision::RankPlace;
    use crate::transport::Transports;

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
        let still = last_heartbeat(now, r#"{"method":"train","elapsed_ms":700000,"progress":3,"still_ms":600001}"#);
        let found = stuck(&still, now, &options).expect("stuck");
        assert_eq!((found.method.as_deref(), found.reason), (Some("train"), StuckReason::NoProgress));
        assert_eq!((found.elapsed, found.still), (Duration::from_secs(700), Duration::from_millis(600_001)));
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
    fn a_dead_rank_is_not_stuck() {
        let (options, now) = (GroupOptions::new(Transports::new()), Instant::now());
        let mut record =
            last_heartbeat(now, r#"{"method":"train","elapsed_ms":700000,"progress":3,"still_ms":700000}"#);
        record.note(HealthEvent::Ended, &options);
        assert_eq!(stuck(&record, now + options.silence_max * 9, &options), None);
    }
}
