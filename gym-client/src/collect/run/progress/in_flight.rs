//! The rollouts in flight, so that a person can see which one has been running for the longest time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gym_core::rollout::{Attempt, TaskKey};
use slab::Slab;
use tokio::time::Instant;

/// The rollout that has been in flight for the longest time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OldestRollout {
    /// Its newest attempt.
    pub attempt: Attempt,
    /// Its agent.
    pub agent: Arc<str>,
    /// Time since its first attempt in this run began.
    pub age: Duration,
}

/// The rollouts in flight. A slot is reused, so that there are at most as many as the run's concurrency.
#[derive(Debug, Default)]
pub(super) struct InFlightRollouts(Mutex<Slab<InFlightRollout>>);

#[derive(Debug)]
struct InFlightRollout {
    attempt: Attempt,
    agent: Arc<str>,
    began: Instant,
}

impl InFlightRollouts {
    /// Adds a rollout and returns its slot.
    pub(super) fn begin(&self, key: TaskKey, agent: &Arc<str>, began: Instant) -> usize {
        let attempt = Attempt { key, number: 0 };
        self.slots().insert(InFlightRollout { attempt, agent: Arc::clone(agent), began })
    }

    /// Sets the number of the newest attempt.
    pub(super) fn attempt(&self, slot: usize, number: u32) {
        if let Some(rollout) = self.slots().get_mut(slot) {
            rollout.attempt.number = number;
        }
    }

    pub(super) fn end(&self, slot: usize) {
        let _ = self.slots().try_remove(slot);
    }

    pub(super) fn count(&self) -> u64 {
        self.slots().len() as u64
    }

    /// Returns the rollout that began first. Looks at all of them, because only displays ask.
    pub(super) fn oldest(&self, now: Instant) -> Option<OldestRollout> {
        let slots = self.slots();
        let (_, oldest) = slots.iter().min_by_key(|(_, rollout)| (rollout.began, rollout.attempt.key))?;
        let age = now.saturating_duration_since(oldest.began);
        Some(OldestRollout { attempt: oldest.attempt, agent: Arc::clone(&oldest.agent), age })
    }

    fn slots(&self) -> MutexGuard<'_, Slab<InFlightRollout>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_rollout_is_the_one_that_began_first_and_has_not_ended() {
        let (rollouts, start, agent) = (InFlightRollouts::default(), Instant::now(), Arc::from("math"));
        let at = |seconds| start + Duration::from_secs(seconds);
        let slots: Vec<usize> =
            (0..4).map(|task| rollouts.begin(TaskKey::new(task, 1), &agent, at(u64::from(task)))).collect();
        rollouts.attempt(slots[1], 2);
        rollouts.end(slots[0]);
        // Its slot is reused by a rollout that is younger.
        let reused = rollouts.begin(TaskKey::new(9, 0), &agent, at(9));
        assert_eq!((reused, rollouts.count()), (slots[0], 4));
        let oldest = rollouts.oldest(at(61)).unwrap();
        let attempt = Attempt { key: TaskKey::new(1, 1), number: 2 };
        assert_eq!(oldest, OldestRollout { attempt, agent, age: Duration::from_secs(60) });
        slots[1..].iter().chain([&reused]).for_each(|slot| rollouts.end(*slot));
        assert_eq!((rollouts.oldest(at(61)), rollouts.count()), (None, 0));
    }
}
