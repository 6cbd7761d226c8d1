//! Tasks and attempts.

use std::fmt;

/// The key of one rollout: a task (a row of the input) and one of its repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskKey {
    /// The number of the task: `_ng_task_index`.
    pub task_index: u32,
    /// The number of the repeat: `_ng_rollout_index`.
    pub rollout_index: u32,
}

impl TaskKey {
    /// Creates the key of a repeat of a task.
    #[must_use]
    pub fn new(task_index: u32, rollout_index: u32) -> Self {
        Self { task_index, rollout_index }
    }
}

impl fmt::Display for TaskKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.task_index, self.rollout_index)
    }
}

/// One attempt at a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Attempt {
    /// The rollout.
    pub key: TaskKey,
    /// The number of the attempt; the first is 0.
    pub number: u32,
}

impl fmt::Display for Attempt {
    /// Writes NeMo Gym's rollout id: `3-0`, and `3-0-a2` for the third attempt.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            0 => self.key.fmt(f),
            number => write!(f, "{}-a{number}", self.key),
        }
    }
}
