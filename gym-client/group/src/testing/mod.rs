//! For tests (feature `testing`): the conformance suite of worker groups, and kills of ranks in this process.

#[allow(clippy::unwrap_used, reason = "a suite is a test")]
mod conformance;
mod in_process;

pub use conformance::{
    GroupFixture, GroupSetup, ServedGroups, TestBlockingWorker, TestGroup, TestWorker, TestWorkerKind, group,
    group_rogues,
};
