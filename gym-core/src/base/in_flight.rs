//! Work in flight, so that a person can see what has been running for the longest time.

pub mod waits;

use std::sync::{Mutex, MutexGuard, PoisonError};

use slab::Slab;
use tokio::time::Instant;

/// The pieces of work in flight, each with the time at which it began. A slot is reused, so that there are never more than were in flight
/// at once. Adding and removing one is a lock and a few instructions; [`InFlight::oldest`] looks at all, because only displays ask.
#[derive(Debug)]
pub struct InFlight<T>(Mutex<Slab<(Instant, T)>>);

impl<T> Default for InFlight<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> InFlight<T> {
    /// Adds a piece of work and returns its slot, which [`InFlight::end`] takes.
    pub fn begin(&self, began: Instant, work: T) -> usize {
        self.slots().insert((began, work))
    }

    /// Changes what is known about a piece of work.
    pub fn update(&self, slot: usize, change: impl FnOnce(&mut T)) {
        if let Some((_, work)) = self.slots().get_mut(slot) {
            change(work);
        }
    }

    /// Removes a piece of work. Its slot must not be used again.
    pub fn end(&self, slot: usize) {
        // Dropped after the lock is released.
        let _ended = self.slots().try_remove(slot);
    }

    /// Returns the number of pieces of work.
    #[must_use]
    pub fn count(&self) -> usize {
        self.slots().len()
    }

    fn slots(&self) -> MutexGuard<'_, Slab<(Instant, T)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Clone> InFlight<T> {
    /// Returns all pieces of work, in no order.
    #[must_use]
    pub fn list(&self) -> Vec<(Instant, T)> {
        self.slots().iter().map(|(_, work)| work.clone()).collect()
    }

    /// Returns the piece of work that began first, and when it began.
    #[must_use]
    pub fn oldest(&self) -> Option<(Instant, T)> {
        let slots = self.slots();
        slots.iter().map(|(_, work)| work).min_by_key(|(began, _)| *began).cloned()
    }

    /// Returns at most `max` pieces of work, those that began first, in this order.
    #[must_use]
    pub fn oldest_of(&self, max: usize) -> Vec<(Instant, T)> {
        if max == 0 {
            return Vec::new();
        }
        let slots = self.slots();
        let mut began: Vec<(Instant, usize)> = slots.iter().map(|(slot, (began, _))| (*began, slot)).collect();
        if began.len() > max {
            began.select_nth_unstable(max - 1);
            began.truncate(max);
        }
        began.sort_unstable();
        began.into_iter().map(|(_, slot)| slots[slot].clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_oldest_is_what_began_first_and_has_not_ended() {
        let (work, start) = (InFlight::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let slots: Vec<usize> = (0..4).map(|n| work.begin(at(n), n)).collect();
        work.end(slots[0]);
        work.update(slots[1], |n| *n = 17);
        // Its slot is reused by something younger.
        let reused = work.begin(at(9), 9);
        assert_eq!((reused, work.count()), (slots[0], 4));
        assert_eq!(work.oldest(), Some((at(1), 17)));
        assert_eq!(work.oldest_of(3), [(at(1), 17), (at(2), 2), (at(3), 3)]);
        assert_eq!((work.oldest_of(9).len(), work.oldest_of(0)), (4, Vec::new()));
        slots[1..].iter().chain([&reused]).for_each(|slot| work.end(*slot));
        assert_eq!((work.oldest(), work.count()), (None, 0));
    }
}
