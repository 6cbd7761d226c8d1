//! How the thread waits.

use std::time::Duration;

/// When the thread of a fabric sleeps. It always wakes up by itself, because on some devices UCX's event never comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// Never: the shortest round trip, one core.
    Busy,
    /// After a while without work it sleeps until an event.
    Hybrid {
        /// How long it looks for more work before it sleeps.
        spin: Duration,
        /// The longest sleep while something is outstanding.
        tick: Duration,
        /// The longest sleep otherwise.
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
