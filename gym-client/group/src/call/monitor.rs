//! Reports on the ranks of a group, from memory.

use std::fmt;
use std::time::Duration;

use gym_core::group::layout::Rank;
use gym_core::group::worker::host::WorkerStatus;
use gym_core::message::Incarnation;

/// Reports what the ranks of a group are doing, for the errors of calls that they do not answer, and for `stuck`. From memory: it never waits for a rank.
///
/// A group may be asked about an incarnation that has just ended, by a call that was sent to it.
pub trait RankMonitor: fmt::Debug + Send + Sync {
    /// Returns the last known status of the rank, and its age; `None` before the first one.
    fn last_status(&self, rank: Rank, incarnation: Incarnation) -> Option<(WorkerStatus, Duration)>;

    /// Returns the time since the last heartbeat; `None` before the rank was reached. The default is `None`.
    fn silent_for(&self, rank: Rank, incarnation: Incarnation) -> Option<Duration> {
        let _ = (rank, incarnation);
        None
    }

    /// Returns the process of the rank on this machine, if it is known. The default is `None`.
    fn pid(&self, rank: Rank, incarnation: Incarnation) -> Option<u32> {
        let _ = (rank, incarnation);
        None
    }

    /// Returns the call of the group that ends ranks that hang, as the user writes it. The default is `None`: nothing does.
    fn restart(&self) -> Option<&'static str> {
        None
    }
}
