//! A group whose ranks run in this process: for tests, small jobs, and workers that are threads.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all, try_join_all};
use tokio::sync::watch;

use crate::base::cancel::CancelToken;
use crate::base::error::{Code, Error, Result};
use crate::group::call::{ExitCause, GroupView, Member, RankExit, WorkerGroup};
use crate::group::health::RankState;
use crate::group::layout::{Rank, RankLayout};
use crate::group::worker::host::{HostOptions, WorkerHost};
use crate::group::worker::{Worker, WorkerEnv};
use crate::message::Incarnation;
use crate::transport::Channel;
use crate::transport::Handler;
use crate::transport::mem::channel_to;

/// Options of an [`InProcessGroup`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct InProcessOptions {
    /// Limits of each rank's host.
    pub host: HostOptions,
    /// Serializes and parses every message, as a wire would: for tests.
    pub faithful: bool,
}

/// A group whose ranks are tasks and threads of this process. Dropping the group ends them.
///
/// ```
/// # use gym_core::{CallContext, Result, group::*};
/// # #[derive(Clone, Copy, Debug)] struct Add;
/// # impl Method for Add { const NAME: &'static str = "add"; type Args = u64; type Reply = u64; }
/// # struct Counter(u64);
/// # impl Worker for Counter {
/// #     type Init = u64;
/// #     fn start(_: WorkerEnv, from: u64) -> Result<Self> { Ok(Self(from)) }
/// #     fn methods(methods: &mut Methods<Self>) { methods.exclusive(Add); }
/// # }
/// # impl Handles<Add> for Counter {
/// #     async fn handle(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
/// #         self.0 += call.value; Ok(self.0.into()) }
/// # }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let counters = InProcessGroup::start::<Counter>("counters", RankLayout::line(4)?, 10).await?;
/// assert_eq!(counters.call(Add, 5).await?.into_values(), [15, 15, 15, 15]);
/// # Ok(()) }
/// ```
pub struct InProcessGroup {
    name: Arc<str>,
    layout: RankLayout,
    start: StartRank,
    options: InProcessOptions,
    ranks: Mutex<Vec<RunningRank>>,
    /// No more ranks are started. Read and written under the lock of `ranks`.
    stopped: AtomicBool,
    view: watch::Sender<Arc<GroupView>>,
}

type StartRank = Box<dyn Fn(WorkerEnv) -> BoxFuture<'static, Result<WorkerHost>> + Send + Sync>;

struct RunningRank {
    rank: Rank,
    incarnation: Incarnation,
    host: WorkerHost,
    /// Breaks the channels to the rank.
    closed: CancelToken,
}

impl RunningRank {
    fn end(self) {
        self.host.kill();
        self.closed.cancel();
    }
}

impl InProcessGroup {
    /// Starts a worker for each rank of the layout, all from the same `init`.
    ///
    /// # Errors
    /// If a rank fails to start; no rank is left running.
    pub async fn start<W>(name: impl Into<Arc<str>>, layout: RankLayout, init: W::Init) -> Result<Self>
    where
        W: Worker,
        W::Init: Clone + Sync,
    {
        Self::start_with::<W>(name, layout, init, InProcessOptions::default()).await
    }

    /// As [`InProcessGroup::start`], with options.
    ///
    /// # Errors
    /// If a rank fails to start; no rank is left running.
    pub async fn start_with<W>(
        name: impl Into<Arc<str>>,
        layout: RankLayout,
        init: W::Init,
        options: InProcessOptions,
    ) -> Result<Self>
    where
        W: Worker,
        W::Init: Clone + Sync,
    {
        let host = options.host.clone();
        let start: StartRank = Box::new(move |env| {
            let (init, host) = (init.clone(), host.clone());
            Box::pin(async move { WorkerHost::start::<W>(env, init, &host).await })
        });
        let group = Self {
            name: name.into(),
            layout,
            start,
            options,
            ranks: Mutex::default(),
            stopped: AtomicBool::new(false),
            view: watch::Sender::new(Arc::default()),
        };
        let mut ranks = group.layout.ranks().to_vec();
        ranks.sort_unstable();
        let starts = ranks.into_iter().map(|rank| group.start_rank(rank, Incarnation(1)));
        let (running, members): (Vec<_>, Vec<_>) = try_join_all(starts).await?.into_iter().unzip();
        *group.ranks() = running;
        group.view.send_replace(Arc::new(GroupView::new(1, members)));
        Ok(group)
    }

    /// Kills a rank, as the end of its process would. Its running calls are lost, and it stays dead until it is restarted. Has no effect on
    /// a group that has stopped.
    ///
    /// # Errors
    /// `NotFound` when the group has no such rank.
    pub fn kill(&self, rank: Rank) -> Result<()> {
        self.end(rank, RankState::Dead, |_| Ok(())).map(drop)
    }

    /// Ends a rank if it still runs, and starts it again from the same `init`, with a higher incarnation.
    ///
    /// # Errors
    /// `NotFound` if the group has no such rank; `Unavailable` if the group is stopped before or during the restart; the error of
    /// [`Worker::start`], after which the rank is dead.
    pub async fn restart(&self, rank: Rank) -> Result<()> {
        let last = self.end(rank, RankState::Restarting, Self::check_open)?;
        let incarnation = Incarnation(last.0 + 1);
        let started = self.start_rank(rank, incarnation).await;
        // Held while the view changes: either a concurrent stop finds the new incarnation, or this finds the stop.
        let mut ranks = self.ranks();
        if let Err(error) = self.check_open() {
            if let Ok((running, _)) = started {
                running.end();
            }
            return Err(error);
        }
        match started {
            Ok((running, member)) => {
                if let Some(known) = ranks.iter_mut().find(|known| known.rank == rank) {
                    *known = running;
                }
                let exit = self.view.borrow().member(rank).and_then(|member| member.exit.clone());
                self.change(Member { exit, ..member });
                Ok(())
            }
            Err(error) => {
                let exit = RankExit::new(incarnation, ExitCause::StartFailed);
                self.change(Member::starting(rank, incarnation).in_state(RankState::Dead).ended(exit));
                Err(error)
            }
        }
    }

    /// Rejects new calls, waits up to `grace` for running calls, and ends every rank.
    ///
    /// # Errors
    /// The error of the first rank whose calls were still running after `grace`, or that was killed.
    pub async fn stop(&self, grace: Duration) -> Result<()> {
        let hosts: Vec<WorkerHost> = {
            let ranks = self.ranks();
            self.stopped.store(true, Ordering::Relaxed);
            ranks.iter().map(|running| running.host.clone()).collect()
        };
        let stopped = join_all(hosts.iter().map(|host| host.stop(grace))).await;
        // Held while the view changes, so that a rank that is killed concurrently ends up stopped.
        let _ranks = self.ranks();
        let view = Arc::clone(&self.view.borrow());
        let members = view.members().iter().map(|member| member.clone().in_state(RankState::Stopped));
        self.view.send_replace(Arc::new(view.with(members)));
        stopped.into_iter().collect()
    }

    /// The host of a rank, for its status.
    ///
    /// # Errors
    /// `NotFound` when the group has no such rank.
    pub fn host(&self, rank: Rank) -> Result<WorkerHost> {
        Ok(self.find(&self.ranks(), rank)?.host.clone())
    }

    async fn start_rank(&self, rank: Rank, incarnation: Incarnation) -> Result<(RunningRank, Member)> {
        let world_size = u32::try_from(self.layout.size()).unwrap_or(u32::MAX);
        let env = WorkerEnv { incarnation, ..WorkerEnv::new(Arc::clone(&self.name), rank, world_size) };
        let host = (self.start)(env).await?;
        let closed = CancelToken::new();
        let channel = self.channel(rank, host.clone(), closed.child_token());
        let member = Member::starting(rank, incarnation).in_state(RankState::Healthy).reached_over(channel);
        Ok((RunningRank { rank, incarnation, host, closed }, member))
    }

    fn channel(&self, rank: Rank, host: impl Handler, closed: CancelToken) -> Channel {
        channel_to(&format!("{}/{rank}", self.name), Arc::new(host), self.options.faithful, closed)
    }

    /// Ends the current incarnation of a rank, if `may` allows it, and returns that incarnation.
    fn end(&self, rank: Rank, state: RankState, may: fn(&Self) -> Result<()>) -> Result<Incarnation> {
        let (host, closed, incarnation) = {
            // Held while the view changes, so that a concurrent stop decides the final state.
            let ranks = self.ranks();
            may(self)?;
            let running = self.find(&ranks, rank)?;
            if !self.has_stopped(rank) {
                let exit = RankExit::new(running.incarnation, ExitCause::Died);
                self.change(Member::starting(rank, running.incarnation).in_state(state).ended(exit));
            }
            (running.host.clone(), running.closed.clone(), running.incarnation)
        };
        host.kill();
        closed.cancel();
        Ok(incarnation)
    }

    fn check_open(&self) -> Result<()> {
        if self.stopped.load(Ordering::Relaxed) {
            let error = Error::not_started(Code::Unavailable, "the group is stopped");
            return Err(error.about(self.name.to_string()));
        }
        Ok(())
    }

    fn has_stopped(&self, rank: Rank) -> bool {
        self.view.borrow().member(rank).is_some_and(|member| member.state == RankState::Stopped)
    }

    fn change(&self, member: Member) {
        self.view.send_modify(|view| *view = Arc::new(view.with([member])));
    }

    fn find<'r>(&self, ranks: &'r [RunningRank], rank: Rank) -> Result<&'r RunningRank> {
        ranks.iter().find(|running| running.rank == rank).ok_or_else(|| {
            Error::not_started(Code::NotFound, format!("no rank {rank}; there are {} ranks", self.layout.size()))
                .about(self.name.to_string())
        })
    }

    fn ranks(&self) -> MutexGuard<'_, Vec<RunningRank>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WorkerGroup for InProcessGroup {
    fn name(&self) -> &str {
        &self.name
    }

    fn shared_name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    fn layout(&self) -> &RankLayout {
        &self.layout
    }

    fn view(&self) -> watch::Receiver<Arc<GroupView>> {
        self.view.subscribe()
    }
}

impl Drop for InProcessGroup {
    fn drop(&mut self) {
        self.ranks().drain(..).for_each(RunningRank::end);
    }
}

impl fmt::Debug for InProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InProcessGroup({}, {} ranks)", self.name, self.layout.size())
    }
}
