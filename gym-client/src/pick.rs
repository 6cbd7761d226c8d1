//! Which of several replicas a call goes to.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How a replica is chosen for a call that is not bound to one by its session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Picker {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest calls of this client under way; in turn among equals.
    #[default]
    LeastPending,
}

/// The calls of this client that are under way at one replica.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pending(Arc<AtomicUsize>);

impl Pending {
    /// Counts a call until the guard is dropped.
    pub(crate) fn begin(&self) -> PendingGuard {
        self.0.fetch_add(1, Ordering::Relaxed);
        PendingGuard(Arc::clone(&self.0))
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
pub(crate) struct PendingGuard(Arc<AtomicUsize>);

impl Drop for PendingGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Picker {
    /// The index of the chosen replica among those not excluded; `turn` moves on with every call.
    pub(crate) fn pick<'a>(
        self,
        turn: usize,
        replicas: impl Iterator<Item = (usize, &'a Pending)> + Clone,
    ) -> Option<usize> {
        let from = turn.checked_rem(replicas.clone().count())?;
        let mut in_turn = replicas.clone().skip(from).chain(replicas.take(from));
        let chosen = match self {
            Self::RoundRobin => in_turn.next(),
            Self::LeastPending => in_turn.min_by_key(|(_, pending)| pending.count()),
        };
        chosen.map(|(index, _)| index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_robin_takes_turns_and_least_pending_avoids_the_busy() {
        let pending = [Pending::default(), Pending::default(), Pending::default()];
        let pick = |picker: Picker, turn| picker.pick(turn, pending.iter().enumerate()).unwrap();
        assert_eq!((0..4).map(|turn| pick(Picker::RoundRobin, turn)).collect::<Vec<_>>(), [0, 1, 2, 0]);
        let _busy = (pending[0].begin(), pending[1].begin());
        assert!((0..6).all(|turn| pick(Picker::LeastPending, turn) == 2));
        assert_eq!(Picker::RoundRobin.pick(7, std::iter::empty()), None);
    }
}
