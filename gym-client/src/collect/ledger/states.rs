//! The state of each rollout in memory. This module alone decides whether an attempt is late.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

use gym_core::rollout::{Attempt, KeyState, Outcome, TaskKey};
use gym_core::{Code, Error};

/// The kind of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum OutcomeClass {
    /// A row of the rollouts file.
    Completed = 1,
    /// A row of the failures file.
    Failed = 2,
    /// A row of the failures file after which the rollout is not attempted again.
    Terminal = 3,
    /// A row of the failures file of an attempt whose worker was lost, or which reached no server.
    Lost = 5,
    /// A blank line, or a line of the failures file that names no rollout.
    Ignored = 4,
}

impl OutcomeClass {
    pub(super) fn of(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Completed(_) => Self::Completed,
            Outcome::Failed { terminal: true, .. } => Self::Terminal,
            Outcome::Failed { class, .. } if class.is_of_the_cluster() => Self::Lost,
            Outcome::Failed { .. } => Self::Failed,
        }
    }
}

/// The states of all rollouts that were attempted. Uses neither a clock nor files.
#[derive(Debug)]
pub(super) struct KeyStates {
    /// Accessed by key only and never iterated, so its order does not matter. Each entry takes 16 bytes and one control
    /// byte: at most 39 bytes per rollout, or 58 while the table grows.
    keys: HashMap<TaskKey, RolloutState, BuildHasherDefault<KeyHasher>>,
    check_late: bool,
}

/// A fast hash that does not resist attacks: the user who runs the collector also chooses the indices, and each row
/// needs four lookups.
#[derive(Debug, Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn write_u32(&mut self, value: u32) {
        // Multiplies by the 64 bits of the golden ratio and folds the high half, which depends on all input bits, into
        // the low half.
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
    failures: u16,
    /// Failed attempts whose worker was lost.
    lost: u16,
    /// The number after the newest attempt that began, below the flag bits.
    next_and_flags: u32,
}

const COMPLETED: u32 = 1 << 31;
const TERMINAL: u32 = 1 << 30;
/// The newest attempt has begun and has no outcome yet.
const RUNNING: u32 = 1 << 29;
const NUMBER: u32 = RUNNING - 1;

/// The reason why an attempt does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LateReason {
    Completed,
    Terminal,
    /// The given newer attempt has begun.
    Newer(u32),
    /// This attempt already has an outcome.
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

    /// Disables the late check. Wrong results follow; a simulation uses this to show why the check is needed.
    pub(super) fn without_late_check(&mut self) {
        self.check_late = false;
    }

    pub(super) fn state(&self, key: TaskKey) -> KeyState {
        let known = self.known(key);
        match known.over() {
            Some(LateReason::Completed) => KeyState::Completed,
            Some(_) => KeyState::Terminal,
            None => KeyState::Open { failures: known.failures.into(), lost: known.lost.into() },
        }
    }

    /// Begins the next attempt. Its number follows that of the newest attempt and is at least the number of recorded
    /// failed attempts.
    pub(super) fn begin(&mut self, key: TaskKey) -> Result<Attempt, LateReason> {
        let known = self.keys.entry(key).or_default();
        if let Some(late) = known.over() {
            return Err(late);
        }
        let number = (u32::from(known.failures) + u32::from(known.lost)).max(known.next()).min(NUMBER - 1);
        known.next_and_flags = (number + 1) | RUNNING;
        Ok(Attempt { key, number })
    }

    /// Returns the reason if an outcome of this attempt must not count. Checked when the outcome arrives and, by
    /// [`KeyStates::claim`], when it is added to a group to be written.
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

    /// Decides irrevocably that this attempt's outcome is written; any other outcome of the same attempt is late.
    pub(super) fn claim(&mut self, attempt: Attempt) -> Result<(), LateReason> {
        if let Some(late) = self.late(attempt) {
            return Err(late);
        }
        self.keys.entry(attempt.key).or_default().next_and_flags &= !RUNNING;
        Ok(())
    }

    /// Marks the outcome as written; returns `true` if it is the rollout's first completion.
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
            OutcomeClass::Lost => known.lost = known.lost.saturating_add(1),
            OutcomeClass::Ignored => {}
        }
        // Only relevant for a row that recovery read, whose attempt did not begin in this process.
        if known.next() <= attempt.number {
            known.next_and_flags = known.next_and_flags & !NUMBER | attempt.number.saturating_add(1).min(NUMBER);
        }
        class == OutcomeClass::Completed && first
    }

    fn known(&self, key: TaskKey) -> RolloutState {
        self.keys.get(&key).copied().unwrap_or_default()
    }

    /// Returns the size of the table in bytes: its buckets, with one control byte each.
    pub(super) fn bytes(&self) -> usize {
        // The table is filled to seven eighths.
        (self.keys.capacity() * 8).div_ceil(7) * (size_of::<(TaskKey, RolloutState)>() + 1)
    }
}

impl fmt::Display for LateReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completed => f.write_str("the rollout already has a scored row"),
            Self::Terminal => f.write_str("the rollout has failed permanently"),
            Self::Newer(number) => write!(f, "the newer attempt {number} has begun"),
            Self::Ended => f.write_str("the attempt already has an outcome"),
            Self::NeverBegun => f.write_str("the attempt did not begin in this process"),
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
            // While the table grows, the old and the new table both exist.
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
        assert_eq!(states.state(key), KeyState::Open { failures: 1, lost: 0 });
        assert_eq!(states.late(Attempt { key, number: 4 }), Some(LateReason::Ended));
        assert_eq!(states.begin(key).unwrap().number, 5);
    }

    #[test]
    fn an_attempt_whose_worker_was_lost_is_counted_apart() {
        let mut states = KeyStates::new();
        let key = TaskKey::new(0, 0);
        for class in [OutcomeClass::Lost, OutcomeClass::Failed, OutcomeClass::Lost] {
            let attempt = states.begin(key).unwrap();
            states.claim(attempt).unwrap();
            states.on_disk(attempt, class);
        }
        assert_eq!(states.state(key), KeyState::Open { failures: 1, lost: 2 });
        assert_eq!(states.begin(key).unwrap().number, 3);
    }
}
