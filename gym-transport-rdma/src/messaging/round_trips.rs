//! Round-trip times of heartbeats.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

/// Upper bounds from 1 µs, doubling, up to about 4 s; the last bucket has none.
const BUCKETS: usize = 24;

/// Histogram of the round-trip times of heartbeats: counts below 1, 2, 4, … µs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundTrips {
    counts: [u64; BUCKETS],
}

impl RoundTrips {
    /// Returns the upper bound of every bucket and its count. The bound of the last bucket is `Duration::MAX`.
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let bound = |at: usize| if at + 1 < BUCKETS { Duration::from_micros(1 << at) } else { Duration::MAX };
        self.counts.iter().enumerate().map(move |(at, count)| (bound(at), *count))
    }

    /// Returns the number of round trips.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// Records round-trip times.
#[derive(Debug)]
pub(crate) struct RoundTripHistogram {
    began: Instant,
    counts: [AtomicU64; BUCKETS],
}

impl RoundTripHistogram {
    pub(crate) fn new() -> Self {
        Self { began: Instant::now(), counts: Default::default() }
    }

    /// Returns the time that a heartbeat carries and its echo repeats, in nanoseconds.
    pub(crate) fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Records an echo. An echo with a future time was not sent by this end and is not counted.
    pub(crate) fn echo(&self, sent_at: u64) {
        if let Some(nanos) = self.now().checked_sub(sent_at) {
            let micros = nanos / 1_000;
            let at = (u64::BITS - micros.leading_zeros()) as usize;
            self.counts[at.min(BUCKETS - 1)].fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn round_trips(&self) -> RoundTrips {
        RoundTrips { counts: std::array::from_fn(|at| self.counts[at].load(Relaxed)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_is_counted_in_its_bucket_and_a_time_to_come_in_none() {
        let round_trips =
            RoundTripHistogram { began: Instant::now() - Duration::from_secs(100), counts: Default::default() };
        round_trips.echo(round_trips.now() - 3_000_000);
        round_trips.echo(0);
        round_trips.echo(u64::MAX);
        let counted: Vec<_> = round_trips.round_trips().buckets().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted, [(Duration::from_micros(4_096), 1), (Duration::MAX, 1)]);
        assert_eq!(round_trips.round_trips().count(), 2);
    }
}
