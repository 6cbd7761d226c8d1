//! Counts the calls of this client that are in flight at each replica.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of calls of this client in flight at one replica.
#[derive(Clone, Debug, Default)]
pub(crate) struct PendingCalls(Arc<AtomicUsize>);

impl PendingCalls {
    /// Counts a call until the guard is dropped.
    pub(crate) fn begin(&self) -> PendingCallGuard {
        self.0.fetch_add(1, Ordering::Relaxed);
        PendingCallGuard(Arc::clone(&self.0))
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
pub(crate) struct PendingCallGuard(Arc<AtomicUsize>);

impl Drop for PendingCallGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_counts_until_its_guard_is_dropped() {
        let pending = PendingCalls::default();
        let first = pending.begin();
        let second = pending.begin();
        assert_eq!(pending.count(), 2);
        drop((first, second));
        assert_eq!(pending.count(), 0);
    }
}
