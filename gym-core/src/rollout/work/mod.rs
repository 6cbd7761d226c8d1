//! The work queue: the rules by which workers take rollouts and verifications when they have capacity.
//!
//! ```text
//!   offer ──► class (server, weight) ──► take (round-robin by weight, longest waiting first) ──► worker
//!                 ▲                                                                                │
//!                 └── handed out again: repeatable items of a lost worker ◄── lost ◄───────────────┴──► finish
//! ```
//!
//! [`WorkQueue`] has neither a clock nor tasks nor sockets: time is handed in, and the host of the queue (`gym_client::work`)
//! sends what it decides.

mod class;
mod queue;
#[cfg(test)]
mod tests;
mod worker;

pub use class::ClassId;
pub use queue::{Assignment, LateWork, LostWork, PollStart, WorkQueue, WorkQueueError, WorkQueueOptions};
pub use worker::{WorkPoll, WorkerId};

use std::fmt;

/// The number of an item of work. A queue gives each item a higher number than the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkId(pub u64);

impl fmt::Display for WorkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
