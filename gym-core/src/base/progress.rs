//! Progress reports of a running call, which distinguish a slow call from a stuck one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Counts the work of one call, in units that the worker chooses (micro-batches, tokens). Cheap to clone; counting does
/// nothing unless the call is watched.
#[derive(Clone, Debug, Default)]
pub struct CallProgress(Option<Arc<Meter>>);

#[derive(Debug)]
struct Meter {
    since: Instant,
    units: AtomicU64,
    /// Time of the last progress, in nanoseconds after `since`.
    advanced_ns: AtomicU64,
    /// Begun and ended polls of the call: odd while a thread polls it. Written by that thread only.
    polls: AtomicU64,
}

impl Meter {
    fn new(since: Instant) -> Self {
        Self { since, units: AtomicU64::new(0), advanced_ns: AtomicU64::new(0), polls: AtomicU64::new(0) }
    }
}

impl CallProgress {
    /// Creates a counter that is watched from now on.
    #[must_use]
    pub fn watched() -> Self {
        Self::watched_since(Instant::now())
    }

    pub(crate) fn watched_since(since: Instant) -> Self {
        Self(Some(Arc::new(Meter::new(since))))
    }

    /// Reuses the memory for another call, unless another clone is alive.
    #[must_use]
    pub fn renewed(mut self, since: Instant) -> Option<Self> {
        let meter = Arc::get_mut(self.0.as_mut()?)?;
        *meter = Meter::new(since);
        Some(self)
    }

    /// Reports that `units` more are done. Zero counts as progress too.
    pub fn advance(&self, units: u64) {
        if let Some(meter) = &self.0 {
            meter.units.fetch_add(units, Ordering::Relaxed);
            let now = meter.since.elapsed().as_nanos();
            meter.advanced_ns.store(u64::try_from(now).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }

    /// Begins or ends a poll of the call. Only the thread that polls it calls this.
    #[doc(hidden)]
    pub fn count_poll(&self) {
        if let Some(meter) = &self.0 {
            // Not an atomic addition: no other thread writes.
            meter.polls.store(meter.polls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        }
    }

    /// Returns the number of begun and ended polls. If it is odd and stays the same, the call blocks the thread that polls it.
    #[doc(hidden)]
    #[must_use]
    pub fn polls(&self) -> u64 {
        self.0.as_ref().map_or(0, |meter| meter.polls.load(Ordering::Relaxed))
    }

    /// Units done so far; 0 if the call is not watched.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.0.as_ref().map_or(0, |meter| meter.units.load(Ordering::Relaxed))
    }

    /// The time since the last progress, or since the start of watching if there was none; zero if the call is not
    /// watched.
    #[must_use]
    pub fn still_for(&self) -> Duration {
        self.0.as_ref().map_or(Duration::ZERO, |meter| {
            meter.since.elapsed().saturating_sub(Duration::from_nanos(meter.advanced_ns.load(Ordering::Relaxed)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_call_that_advances_is_not_still() {
        let progress = CallProgress::watched();
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(progress.still_for(), Duration::from_secs(5));
        progress.clone().advance(3);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!((progress.units(), progress.still_for()), (3, Duration::from_secs(2)));
    }

    #[test]
    fn a_counter_with_another_clone_is_not_reused() {
        let progress = CallProgress::watched();
        let held = progress.clone();
        held.advance(3);
        assert!(progress.renewed(Instant::now()).is_none());
        assert_eq!(held.renewed(Instant::now()).unwrap().units(), 0);
    }

    #[test]
    fn counting_without_a_watcher_does_nothing() {
        let progress = CallProgress::default();
        progress.advance(3);
        assert_eq!((progress.units(), progress.still_for()), (0, Duration::ZERO));
    }
}
