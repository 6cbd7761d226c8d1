//! The trace of a simulation: a running hash on which two runs of a seed must agree, and the events behind it.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

/// Number of last lines that are kept for printing. The hash covers all lines.
const LINES_MAX: usize = 20_000;

/// The events of one simulation.
#[derive(Clone, Debug)]
pub struct Trace {
    hash: u64,
    events: u64,
    lines: VecDeque<String>,
    faults: BTreeMap<&'static str, u64>,
}

impl Default for Trace {
    fn default() -> Self {
        // FNV-1a's offset basis.
        Self { hash: 0xcbf2_9ce4_8422_2325, events: 0, lines: VecDeque::new(), faults: BTreeMap::new() }
    }
}

impl Trace {
    /// Returns the FNV-1a hash of all lines so far. Equal traces have equal hashes on all machines.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Returns the number of events.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Returns the number of injected faults by kind.
    #[must_use]
    pub fn faults(&self) -> &BTreeMap<&'static str, u64> {
        &self.faults
    }

    /// Returns the last events, each with its time in milliseconds and its actor.
    pub fn lines(&self) -> impl DoubleEndedIterator<Item = &str> + ExactSizeIterator {
        self.lines.iter().map(String::as_str)
    }

    pub(super) fn note(&mut self, at_ms: u128, actor: &str, event: fmt::Arguments<'_>) {
        let line = format!("{at_ms:>8} ms  {actor:<10} {event}");
        for byte in line.bytes().chain([b'\n']) {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        self.events += 1;
        if self.lines.len() == LINES_MAX {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    pub(super) fn fault(&mut self, kind: &'static str) {
        *self.faults.entry(kind).or_default() += 1;
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left_out = self.events - self.lines.len() as u64;
        if left_out > 0 {
            writeln!(f, "({left_out} earlier events)")?;
        }
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}
