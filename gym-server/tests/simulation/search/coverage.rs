//! What a run reached: pairs of successive events of each actor, and how often each fault occurred, in powers of two.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::scenario::Report;

/// What the runs of a search reached.
#[derive(Debug, Default)]
pub(super) struct Coverage(BTreeSet<u64>);

impl Coverage {
    /// Adds what a run reached, and returns how much of it is new.
    pub(super) fn add(&mut self, reached: &BTreeSet<u64>) -> usize {
        reached.iter().filter(|state| self.0.insert(**state)).count()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Returns what a run reached, and the times of its events in milliseconds, of which there is at least one.
pub(super) fn reached(report: &Report) -> (BTreeSet<u64>, Vec<u64>) {
    let mut states = BTreeSet::new();
    let mut last: BTreeMap<u64, u64> = BTreeMap::new();
    let mut times = vec![0];
    for line in report.trace.lines() {
        let mut words = line.split_whitespace();
        let at_ms = words.next().and_then(|at| at.parse().ok()).unwrap_or_default();
        let actor = hash(&words.nth(1).map(without_digits).map(Iterator::collect::<String>));
        let mut event = DefaultHasher::new();
        for word in words {
            // Numbers, times and ids say how often something happened, not what.
            if !word.contains(|char: char| char.is_ascii_digit()) {
                word.hash(&mut event);
            }
        }
        let event = event.finish();
        let before = last.insert(actor, event).unwrap_or_default();
        if states.insert(hash(&(actor, before, event))) {
            times.push(at_ms);
        }
    }
    for (kind, count) in report.trace.faults().iter().chain(&report.counts) {
        states.insert(hash(&(kind, count.checked_ilog2())));
    }
    // Those at which the run reached something last.
    times.drain(..times.len().saturating_sub(40));
    (states, times)
}

fn without_digits(word: &str) -> impl Iterator<Item = char> + '_ {
    word.chars().filter(|char| !char.is_ascii_digit())
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
