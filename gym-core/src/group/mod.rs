//! Ranks that work as one: typed calls to all of them, some of them, or the one that is free.
//!
//! ```text
//!   group.call(Train, args).batch(b).dispatch(d).deadline(t)
//!        │ Dispatch::plan            who, which shard, who answers             pure
//!        │ one GroupView             ranks, incarnations and channels of one moment
//!        ▼
//!   send to every rank and read every answer, together ──► Gathered: in rank order; batches put together in shard order
//!        └── a rank fails, or is replaced ──► the others are told and not waited for ──► GroupError: every rank's outcome
//! ```
//!
//! A backend implements [`WorkerGroup`], three methods; everybody calls through [`WorkerGroupExt`].

mod call;
mod error;
mod gather;
mod in_process;
mod view;

use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;

pub use call::{GroupCall, Pending};
pub use error::{FailureKind, GroupError, RankOutcome};
pub use gather::{Gathered, RankReply};
pub use in_process::{InProcessGroup, InProcessOptions};
pub use view::{ExitCause, GroupView, Member, RankExit, RankState};

use crate::layout::RankLayout;
use crate::worker::Method;

/// Ranks that work as one. Object-safe core; call it through [`WorkerGroupExt`].
pub trait WorkerGroup: fmt::Debug + Send + Sync + 'static {
    /// The group's name, as in logs and errors.
    fn name(&self) -> &str;

    /// Its ranks and their axes.
    fn layout(&self) -> &RankLayout;

    /// Who is there now, and every later moment. A call keeps the view it started with, and ends if a rank it waits for is
    /// replaced.
    fn view(&self) -> watch::Receiver<Arc<GroupView>>;
}

/// The typed calls of every group.
pub trait WorkerGroupExt: WorkerGroup {
    /// Calls a method with the same arguments at every rank.
    fn call<M: Method>(&self, method: M, args: M::Args) -> GroupCall<'_, M> {
        GroupCall::same(self, method, args)
    }

    /// Calls a method with arguments of each rank's own: the i-th of them at the i-th rank called.
    fn call_each<M: Method>(&self, method: M, args: Vec<M::Args>) -> GroupCall<'_, M> {
        GroupCall::each(self, method, args)
    }
}

impl<G: WorkerGroup + ?Sized> WorkerGroupExt for G {}
