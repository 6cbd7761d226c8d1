//! Work in flight, so that a person can see what has been running for the longest time.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The pieces of work in flight, ordered by the time at which each began. A display that asks for the oldest of a million several times a second
/// must not look at all: whoever begins or ends one waits meanwhile.
#[derive(Debug)]
pub struct InFlight<T>(Mutex<WorkTable<T>>);

#[derive(Debug)]
struct WorkTable<T> {
    works: BTreeMap<WorkKey, T>,
    begun: u64,
}

/// A piece of work in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WorkKey {
    began: Instant,
    /// Distinguishes work that began at the same time.
    number: u64,
}

impl<T> Default for InFlight<T> {
    fn default() -> Self {
        Self(Mutex::new(WorkTable { works: BTreeMap::new(), begun: 0 }))
    }
}

impl<T> InFlight<T> {
    /// Adds a piece of work and returns its key, which [`InFlight::end`] takes.
    pub fn begin(&self, began: Instant, work: T) -> WorkKey {
        let mut table = self.0.lock();
        table.begun += 1;
        let key = WorkKey { began, number: table.begun };
        table.works.insert(key, work);
        key
    }

    /// Changes what is known about a piece of work.
    pub fn update(&self, key: WorkKey, change: impl FnOnce(&mut T)) {
        if let Some(work) = self.0.lock().works.get_mut(&key) {
            change(work);
        }
    }

    /// Removes a piece of work.
    pub fn end(&self, key: WorkKey) {
        // Dropped after the lock is released.
        let _ended = self.0.lock().works.remove(&key);
    }

    /// Returns the number of pieces of work.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.lock().works.len()
    }
}

impl<T: Clone> InFlight<T> {
    /// Returns all pieces of work, the oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<(Instant, T)> {
        self.oldest_of(usize::MAX)
    }

    /// Returns the piece of work that began first, and when it began.
    #[must_use]
    pub fn oldest(&self) -> Option<(Instant, T)> {
        self.0.lock().works.first_key_value().map(|(key, work)| (key.began, work.clone()))
    }

    /// Returns at most `max` pieces of work, those that began first, in this order.
    #[must_use]
    pub fn oldest_of(&self, max: usize) -> Vec<(Instant, T)> {
        self.0.lock().works.iter().take(max).map(|(key, work)| (key.began, work.clone())).collect()
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
        let keys: Vec<WorkKey> = (0..4).map(|n| work.begin(at(n), n)).collect();
        work.end(keys[0]);
        work.end(keys[0]);
        work.update(keys[1], |n| *n = 17);
        // Two that began at the same time, before others that were added earlier.
        let late = [work.begin(at(1), 18), work.begin(at(9), 9)];
        assert_eq!(work.count(), 5);
        assert_eq!(work.oldest(), Some((at(1), 17)));
        assert_eq!(work.oldest_of(3), [(at(1), 17), (at(1), 18), (at(2), 2)]);
        assert_eq!((work.oldest_of(9).len(), work.oldest_of(0)), (5, Vec::new()));
        keys[1..].iter().chain(&late).for_each(|key| work.end(*key));
        assert_eq!((work.oldest(), work.count()), (None, 0));
    }
}
