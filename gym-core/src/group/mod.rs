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
//! A backend implements [`WorkerGroup`], three methods; everybody calls through [`WorkerGroupExt`]. A group whose calls need more than
//! its ranks has a [`Gate`] before them.

mod balance;
mod call;
mod error;
mod gate;
mod gather;
mod in_process;
mod one;
mod status;
mod view;

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use tokio::sync::watch;

pub use balance::Balancer;
pub use call::{GroupCall, Pending};
pub use error::{FailureKind, GroupError, RankOutcome};
pub use gate::{Gate, Leave};
pub use gather::{Gathered, RankReply};
pub use in_process::{InProcessGroup, InProcessOptions};
pub use view::{ExitCause, GroupView, Member, RankExit, RankState};

use crate::context::CallContext;
use crate::error::{Code, Error, Result};
use crate::host::WorkerStatus;
use crate::layout::RankLayout;
use crate::worker::Method;

/// Ranks that work as one. Object-safe core; call it through [`WorkerGroupExt`].
pub trait WorkerGroup: fmt::Debug + Send + Sync + 'static {
    /// The group's name, as in logs and errors.
    fn name(&self) -> &str;

    /// The same to keep: every call keeps it, for its errors. A group that holds its name in an `Arc` gives that.
    fn shared_name(&self) -> Arc<str> {
        self.name().into()
    }

    /// Its ranks and their axes.
    fn layout(&self) -> &RankLayout;

    /// Who is there now, and every later moment. A call keeps the view it started with, and ends if a rank it waits for is
    /// replaced.
    fn view(&self) -> watch::Receiver<Arc<GroupView>>;

    /// What each call passes before the first rank has its part; `None`: nothing.
    fn gate(&self) -> Option<Arc<dyn Gate>> {
        None
    }
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

    /// Asks the host of every rank what it is doing; in rank order. A rank that is busy answers all the same; the error of one that
    /// does not answer by the context's deadline stands in its place.
    ///
    /// For what a group knows without asking, and for who is stuck, see the supervised group of `gym-client`.
    fn ask_hosts(&self, cx: &CallContext) -> impl Future<Output = Vec<Result<WorkerStatus>>> + Send {
        let (view, cx) = (Arc::clone(&self.view().borrow()), cx.child());
        async move { status::ask_all(&view, &cx).await }
    }

    /// Waits until every rank is healthy.
    ///
    /// # Errors
    /// `FailedPrecondition` when a rank is retired or stopped, `Unavailable` when the group is gone, and those of the context.
    fn ready(&self, cx: &CallContext) -> impl Future<Output = Result<()>> + Send {
        let (mut view, cx) = (self.view(), cx.child());
        async move {
            let settled = view.wait_for(|view| {
                let states = || view.members().iter().map(|member| member.state);
                let lost = states().any(|state| matches!(state, RankState::Retired | RankState::Stopped));
                lost || (states().all(|state| state == RankState::Healthy) && !view.members().is_empty())
            });
            let settled = async { settled.await.map(|view| Arc::clone(&view)) };
            let gone = |_| Error::not_started(Code::Unavailable, "the group is gone");
            let bounded = cx.bound(crate::error::Execution::NotStarted, async { settled.await.map_err(gone) });
            let view = bounded.await?;
            match view.members().iter().find(|member| member.state != RankState::Healthy) {
                Some(lost) => Err(Error::not_started(
                    Code::FailedPrecondition,
                    format!("rank {} is {} and will not be healthy again", lost.rank, lost.state),
                )),
                None => Ok(()),
            }
        }
    }
}

impl<G: WorkerGroup + ?Sized> WorkerGroupExt for G {}
