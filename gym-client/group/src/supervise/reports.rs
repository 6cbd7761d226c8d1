//! The last heartbeats of a group's ranks: for their records, and for the errors of calls.

use std::sync::Arc;
use std::time::Duration;

use gym_core::Incarnation;
use gym_core::group::{Rank, WorkerStatus};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::call::RankMonitor;

/// The last report of a rank's current incarnation, and that of the one before: a call that was sent to that one may still fail.
#[derive(Debug, Default)]
pub(crate) struct RankReports(Mutex<[Report; 2]>);

#[derive(Debug, Default)]
struct Report {
    /// `None` before the incarnation is known.
    incarnation: Option<Incarnation>,
    /// The time of the last heartbeat, or of the connection.
    heard: Option<Instant>,
    /// Known from the first probe on.
    status: Option<WorkerStatus>,
    /// The process on this machine.
    pid: Option<u32>,
}

impl RankReports {
    /// Records the process of an incarnation on this machine.
    pub(crate) fn started(&self, incarnation: Incarnation, pid: u32) {
        let [current, _] = &mut *self.0.lock();
        (current.incarnation, current.pid) = (Some(incarnation), Some(pid));
    }

    /// Records that the rank is connected, or a heartbeat with its status.
    pub(crate) fn heard(&self, incarnation: Incarnation, now: Instant, status: Option<WorkerStatus>) {
        let [current, _] = &mut *self.0.lock();
        (current.incarnation, current.heard, current.status) = (Some(incarnation), Some(now), status);
    }

    /// Records that the current incarnation has ended.
    pub(crate) fn ended(&self) {
        let [current, before] = &mut *self.0.lock();
        if current.incarnation.is_some() {
            *before = std::mem::take(current);
        }
    }

    /// Moves the last heartbeat by a pause of this process, in which no rank was asked.
    pub(crate) fn forgive(&self, pause: Duration) {
        let [current, _] = &mut *self.0.lock();
        current.heard = current.heard.map(|heard| heard + pause);
    }

    /// Returns the time of the last heartbeat of the current incarnation.
    pub(crate) fn last_heard(&self) -> Option<Instant> {
        self.0.lock()[0].heard
    }

    /// Returns what the last heartbeat of the current incarnation told.
    pub(crate) fn status(&self) -> Option<WorkerStatus> {
        self.0.lock()[0].status.clone()
    }

    fn of<T>(&self, incarnation: Incarnation, read: impl Fn(&Report) -> Option<T>) -> Option<T> {
        self.0.lock().iter().find(|report| report.incarnation == Some(incarnation)).and_then(read)
    }
}

/// The reports of all ranks, from rank 0 on.
#[derive(Debug)]
pub(crate) struct GroupReports(pub(crate) Vec<Arc<RankReports>>);

impl GroupReports {
    fn of<T>(&self, rank: Rank, incarnation: Incarnation, read: impl Fn(&Report) -> Option<T>) -> Option<T> {
        self.0.get(rank as usize)?.of(incarnation, read)
    }
}

impl RankMonitor for GroupReports {
    fn last_status(&self, rank: Rank, incarnation: Incarnation) -> Option<(WorkerStatus, Duration)> {
        self.of(rank, incarnation, |report| Some((report.status.clone()?, report.heard?.elapsed())))
    }

    fn silent_for(&self, rank: Rank, incarnation: Incarnation) -> Option<Duration> {
        self.of(rank, incarnation, |report| Some(report.heard?.elapsed()))
    }

    fn pid(&self, rank: Rank, incarnation: Incarnation) -> Option<u32> {
        self.of(rank, incarnation, |report| report.pid)
    }

    fn restart(&self) -> Option<&'static str> {
        Some("`group.restart_workers(cx, error.unanswered())`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_to_an_incarnation_that_has_ended_still_learns_what_it_did() {
        let reports = GroupReports(vec![Arc::default()]);
        let (first, second, now) = (Incarnation(1), Incarnation(2), Instant::now());
        reports.0[0].started(first, 77);
        reports.0[0].heard(first, now, None);
        assert_eq!((reports.pid(0, first), reports.pid(0, second), reports.pid(1, first)), (Some(77), None, None));
        reports.0[0].ended();
        reports.0[0].ended();
        assert_eq!((reports.0[0].last_heard(), reports.pid(0, first)), (None, Some(77)));
        reports.0[0].started(second, 78);
        assert!(reports.silent_for(0, first).is_some() && reports.silent_for(0, second).is_none());
        assert_eq!((reports.pid(0, first), reports.pid(0, second)), (Some(77), Some(78)));
    }
}
