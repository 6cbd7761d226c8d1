//! Worker groups: typed calls to all ranks of a group, to some of them, or to the least busy one.
//!
//! ```text
//!   group.call(Train, args).batch(b).dispatch(d).deadline(t)
//!        │ Dispatch::plan            ranks, shards, and whose replies to collect; no I/O
//!        │ one GroupView             ranks, incarnations and channels at one moment
//!        ▼
//!   send to every rank and read every reply, concurrently ──► Gathered: in rank order; batches merged in shard order
//!        └── a rank fails, or is replaced ──► cancel the others without waiting ──► GroupError: the outcome of every rank
//! ```
//!
//! A group of one's own implements the three methods of [`WorkerGroup`], and `impl WorkerGroupExt for Mine {}`; callers use [`WorkerGroupExt`].

mod backlog;
mod balance;
mod builder;
mod error;
mod gate;
mod gather;
pub(crate) mod in_process;
mod monitor;
mod reach;
mod single;
mod support;

use std::sync::Arc;

use futures_util::future::{BoxFuture, join_all};

pub use backlog::Backlog;
pub use balance::{Balancer, BatchOptions, ItemError};
pub use builder::{GroupCall, Pending, Submitted};
pub use error::{FailureKind, GroupError, RankOutcome};
pub use gate::{Gate, Permit};
pub use gather::{Gathered, RankReply};
pub use in_process::{InProcessGroup, InProcessOptions};
pub use monitor::RankMonitor;
pub use support::CallSupport;

use gym_core::group::RankState;
use gym_core::group::worker::Method;
use gym_core::group::worker::host::{STATUS_ROUTE, WorkerStatus};
use gym_core::group::{GroupView, WorkerGroup};
use gym_core::message::{CallContext, Request};
use gym_core::transport::Channel;
use gym_core::{Code, Error, Execution, Result};

/// The typed calls of a group. A group of one's own has them by `impl WorkerGroupExt for Mine {}`, unless it [adds](WorkerGroupExt::call_support) to its
/// calls. `Arc<dyn WorkerGroupExt>` holds any group.
///
/// ```
/// use gym_group::prelude::*;
/// # struct Scorer;
/// # worker! {
/// #     impl Worker for Scorer as scorer {
/// #         fn start(_: WorkerEnv, _: ()) -> Result<Self> { Ok(Self) }
/// #         shared(idempotent) async fn score(&self, _: &CallContext, call: Payload<f32>) -> Result<Payload<f32>> {
/// #             if call.value < 0.0 { return Err(Error::invalid("a negative length")); }
/// #             Ok((call.value * 2.0).into())
/// #         }
/// #     }
/// # }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let group = InProcessGroup::start::<Scorer>("scorers", RankLayout::line(2)?, ()).await?;
/// assert_eq!(group.call(scorer::score, 1.5).await?.into_values(), [3.0, 3.0]);
/// assert_eq!(group.call_each(scorer::score, vec![1.0, 2.0]).await?.into_values(), [2.0, 4.0]);
/// # Ok(()) }
/// ```
pub trait WorkerGroupExt: WorkerGroup {
    /// Returns the additions of the group to its calls: admission, submitted calls, and a monitor of its ranks. The default adds nothing. A group that wraps
    /// another one returns those of the wrapped group.
    fn call_support(&self) -> CallSupport {
        CallSupport::default()
    }

    /// Calls a method with the same arguments at every rank.
    fn call<M: Method>(&self, method: M, args: M::Args) -> GroupCall<'_, M>
    where
        Self: Sized,
    {
        GroupCall::same(self, method, args)
    }

    /// Calls a method with separate arguments for each rank: the i-th called rank gets the i-th arguments.
    fn call_each<M: Method>(&self, method: M, args: Vec<M::Args>) -> GroupCall<'_, M>
    where
        Self: Sized,
    {
        GroupCall::each(self, method, args)
    }

    /// Waits until all calls that were [submitted](GroupCall::submit) have ended. Without `async_communication`, there are none.
    ///
    /// # Errors
    /// The errors of submitted calls that nobody has awaited; `DeadlineExceeded` if `cx` ends first.
    fn flush(&self, cx: &CallContext) -> BoxFuture<'static, Result<()>> {
        let (backlog, cx) = (self.call_support().backlog, cx.child());
        let subject = format!("flush the calls of {}", self.name());
        Box::pin(async move {
            match backlog {
                Some(backlog) => backlog.flush(&cx).await.map_err(|error| error.about(subject)),
                None => Ok(()),
            }
        })
    }

    /// Requests the status of every rank, in rank order. Busy ranks respond as well. A rank that misses the deadline yields an
    /// error at its position.
    ///
    /// The supervised group of `gym-client` also reports its own records without a request, and stuck ranks.
    fn ask_hosts(&self, cx: &CallContext) -> BoxFuture<'static, Vec<Result<WorkerStatus>>> {
        let (view, cx) = (Arc::clone(&self.view().borrow()), cx.child());
        Box::pin(async move { request_statuses(&view, &cx).await })
    }

    /// Waits until every rank is healthy.
    ///
    /// # Errors
    /// `FailedPrecondition` if a rank is retired or stopped, `Unavailable` if the group no longer exists, and the errors of the
    /// context.
    fn ready(&self, cx: &CallContext) -> BoxFuture<'static, Result<()>> {
        let (mut view, cx) = (self.view(), cx.child());
        Box::pin(async move {
            let settled = view.wait_for(|view| {
                let states = || view.members().iter().map(|member| member.state);
                let lost = states().any(|state| matches!(state, RankState::Retired | RankState::Stopped));
                lost || (states().all(|state| state == RankState::Healthy) && !view.members().is_empty())
            });
            let settled = async { settled.await.map(|view| Arc::clone(&view)) };
            let gone = |_| Error::not_started(Code::Unavailable, "the group is gone");
            let bounded = cx.bound(Execution::NotStarted, async { settled.await.map_err(gone) });
            let view = bounded.await?;
            match view.members().iter().find(|member| member.state != RankState::Healthy) {
                Some(lost) => Err(Error::not_started(
                    Code::FailedPrecondition,
                    format!("rank {} is {} and will not be healthy again", lost.rank, lost.state),
                )),
                None => Ok(()),
            }
        })
    }
}

/// Any group: its typed calls are those of the group.
impl WorkerGroupExt for Arc<dyn WorkerGroupExt> {
    fn call_support(&self) -> CallSupport {
        (**self).call_support()
    }
}

/// Requests the status of every rank from its host; never waits for a worker.
async fn request_statuses(view: &GroupView, cx: &CallContext) -> Vec<Result<WorkerStatus>> {
    join_all(view.members().iter().map(|member| async {
        match &member.channel {
            Some(channel) => request_status(member.control.as_ref().unwrap_or(channel), cx).await,
            None => {
                let why = format!("rank {} is {} and has no address", member.rank, member.state);
                Err(Error::not_started(Code::Unavailable, why))
            }
        }
    }))
    .await
}

async fn request_status(channel: &Channel, cx: &CallContext) -> Result<WorkerStatus> {
    let response = channel.call(Request::get(cx.child(), STATUS_ROUTE)).await?.into_result()?;
    serde_json::from_slice(&response.message.head.to_bytes())
        .map_err(|error| Error::finished(Code::DataLoss, "no status of a worker").caused_by(error))
}
