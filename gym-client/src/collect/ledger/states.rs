//! What is known of each rollout, in memory, and the one place that decides whether an attempt is late.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

use gym_core::rollout::{Attempt, KeyState, Outcome, TaskKey};
use gym_core::{Code, Error};

/// What a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum OutcomeClass {
    /// A row of the rollouts file.
    Completed = 1,
    /// A row of the sidecar.
    Failed = 2,
    /// A row of the sidecar after which there is no other attempt.
    Terminal = 3,
    /// A blank line, or one of the sidecar that names no rollout.
    Ignored = 4,
}

impl OutcomeClass {
    pub(super) fn of(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Completed(_) => Self::Completed,
            Outcome::Failed { terminal: true, .. } => Self::Terminal,
            Outcome::Failed { terminal: false, .. } => Self::Failed,
        }
    }
}

/// What is known of every rollout that has been touched. Pure: no clock, no files.
#[derive(Debug)]
pub(super) struct KeyStates {
    /// Looked up by key only, never walked: its order does not matter. 16 bytes an entry and one of control: at most 39 a
    /// rollout, 58 while the table grows.
    keys: HashMap<TaskKey, RolloutState, BuildHasherDefault<KeyHasher>>,
    check_late: bool,
}

/// Two small numbers need no hash that resists an attacker: whoever picks the indices has the collector's user's trust, and
/// this one is looked up four times a row.
#[derive(Debug, Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn write_u32(&mut self, value: u32) {
        // The 64 bits of the golden ratio; the high half, where all bits have met, is folded into the low one.
        let mixed = (self.0.rotate_left(32) ^ u64::from(value)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Eight bytes, because there is one per rollout.
#[derive(Clone, Copy, Debug, Default)]
struct RolloutState {
    failures: u32,
    /// The number that follows the newest attempt begun, below the flags.
    next_and_flags: u32,
}

const COMPLETED: u32 = 1 << 31;
const TERMINAL: u32 = 1 << 30;
/// The newest attempt has begun and has no outcome yet.
const RUNNING: u32 = 1 << 29;
const NUMBER: u32 = RUNNING - 1;

/// Why an attempt does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LateReason {
    Completed,
    Terminal,
    /// This one has begun since.
    Newer(u32),
    /// This very attempt has its outcome.
    Ended,
    NeverBegun,
}

impl RolloutState {
    fn next(self) -> u32 {
        self.next_and_flags & NUMBER
    }

    fn has(self, flag: u32) -> bool {
        self.next_and_flags & flag != 0
    }

    fn over(self) -> Option<LateReason> {
        if self.has(COMPLETED) {
            return Some(LateReason::Completed);
        }
        self.has(TERMINAL).then_some(LateReason::Terminal)
    }
}

impl KeyStates {
    pub(super) fn new() -> Self {
        Self { keys: HashMap::default(), check_late: true }
    }

    /// From now on late attempts count, which is wrong: a simulation shows that it is.
    pub(super) fn without_late_check(&mut self) {
        self.check_late = false;
    }

    pub(super) fn state(&self, key: TaskKey) -> KeyState {
        let known = self.known(key);
        match known.over() {
            Some(LateReason::Completed) => KeyState::Completed,
            Some(_) => KeyState::Terminal,
            None => KeyState::Open { failures: known.failures },
        }
    }

    /// The next attempt: after the newest one begun, and never below the number of failures on record.
    pub(super) fn begin(&mut self, key: TaskKey) -> Result<Attempt, LateReason> {
        let known = self.keys.entry(key).or_default();
        if let Some(late) = known.over() {
            return Err(late);
        }
        let number = known.failures.max(known.next()).min(NUMBER - 1);
        known.next_and_flags = (number + 1) | RUNNING;
        Ok(Attempt { key, number })
    }

    /// The late check: whether an outcome of this attempt must not count. Asked when the outcome arrives, and again, with
    /// [`KeyStates::claim`], when it is put into a group to be written.
    pub(super) fn late(&self, attempt: Attempt) -> Option<LateReason> {
        if !self.check_late {
            return None;
        }
        let known = self.known(attempt.key);
        known.over().or_else(|| match attempt.number.saturating_add(1).cmp(&known.next()) {
            std::cmp::Ordering::Less => Some(LateReason::Newer(known.next() - 1)),
            std::cmp::Ordering::Greater => Some(LateReason::NeverBegun),
            std::cmp::Ordering::Equal => (!known.has(RUNNING)).then_some(LateReason::Ended),
        })
    }

    /// Decides for good that this attempt's outcome is written: another outcome of the same attempt is late from here on.
    pub(super) fn claim(&mut self, attempt: Attempt) -> Result<(), LateReason> {
        if let Some(late) = self.late(attempt) {
            return Err(late);
        }
        self.keys.entry(attempt.key).or_default().next_and_flags &= !RUNNING;
        Ok(())
    }

    /// The outcome is on the disk. Whether it is the rollout's first completion.
    pub(super) fn on_disk(&mut self, attempt: Attempt, class: OutcomeClass) -> bool {
        let known = self.keys.entry(attempt.key).or_default();
        let first = !known.has(COMPLETED);
        match class {
            OutcomeClass::Completed => known.next_and_flags |= COMPLETED,
            OutcomeClass::Failed => known.failures = known.failures.saturating_add(1),
            OutcomeClass::Terminal => {
                known.failures = known.failures.saturating_add(1);
                known.next_and_flags |= TERMINAL;
            }
            OutcomeClass::Ignored => {}
        }
        // Matters for a row found on opening, whose attempt did not begin in this process.
        if known.next() <= attempt.number {
            known.next_and_flags = known.next_and_flags & !NUMBER | attempt.number.saturating_add(1).min(NUMBER);
        }
        class == OutcomeClass::Completed && first
    }

    fn known(&self, key: TaskKey) -> RolloutState {
        self.keys.get(&key).copied().unwrap_or_default()
    }

    /// Bytes held, at least: the table's buckets, one control byte each.
    pub(super) fn bytes(&self) -> usize {
        // The table is filled to seven eighths.
        (self.keys.capacity() * 8).div_ceil(7) * (size_of::<(TaskKey, RolloutState)>() + 1)
    }
}

impl fmt::Display for LateReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completed => f.write_str("the rollout has its row already"),
            Self::Terminal => f.write_str("the rollout has failed for good"),
            Self::Newer(number) => write!(f, "attempt {number} has begun since"),
            Self::Ended => f.write_str("the attempt has its outcome already"),
            Self::NeverBegun => f.write_str("the attempt never began here"),
        }
    }
}

impl LateReason {
    pub(super) fn into_error(self, doing: &str, what: &dyn fmt::Display) -> Error {
        Error::not_started(Code::FailedPrecondition, self.to_string()).about(format!("{doing} {what}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollout_takes_at_most_64_bytes_even_while_the_table_grows() {
        let mut states = KeyStates::new();
        let mut before = 0;
        for n in 0..10_000_u32 {
            let attempt = states.begin(TaskKey::new(n / 8, n % 8)).unwrap();
            states.claim(attempt).unwrap();
            states.on_disk(attempt, OutcomeClass::Completed);
            let now = states.bytes();
            // While the table grows the old and the new one exist.
            let peak = if now == before { now } else { now + before };
            if n >= 1_000 {
                assert!(peak <= 64 * (n as usize + 1), "{peak} bytes for {} rollouts", n + 1);
            }
            before = now;
        }
        assert_eq!(size_of::<(TaskKey, RolloutState)>(), 16);
    }

    #[test]
    fn a_failed_attempt_that_was_found_on_the_disk_is_not_begun_again_under_its_number() {
        let mut states = KeyStates::new();
        let key = TaskKey::new(0, 0);
        states.on_disk(Attempt { key, number: 4 }, OutcomeClass::Failed);
        assert_eq!(states.state(key), KeyState::Open { failures: 1 });
        assert_eq!(states.late(Attempt { key, number: 4 }), Some(LateReason::Ended));
        assert_eq!(states.begin(key).unwrap().number, 5);
    }
}
