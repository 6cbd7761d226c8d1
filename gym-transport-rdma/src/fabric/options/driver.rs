//! Waiting strategy of the fabric's thread.

use std::time::Duration;

/// Waiting strategy of the fabric's thread. Every sleep has a timeout, because on some devices UCX's events never
/// arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// Never sleeps: the shortest round trip, at the cost of one core.
    Busy,
    /// Polls for `spin` after the last work, then sleeps until an event or a timeout.
    Hybrid {
        /// Time to poll for more work before a sleep.
        spin: Duration,
        /// Timeout of the first sleep after work; later ones double up to `idle_tick`. Also the longest wait while UCX
        /// cannot send.
        tick: Duration,
        /// Longest sleep timeout.
        idle_tick: Duration,
    },
}

impl Default for Driver {
    /// Spin 50 µs, tick 1 ms, idle tick 100 ms.
    fn default() -> Self {
        Self::Hybrid {
            spin: Duration::from_micros(50),
            tick: Duration::from_millis(1),
            idle_tick: Duration::from_millis(100),
        }
    }
}
