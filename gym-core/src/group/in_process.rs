//! A group whose ranks live in this process: for tests, for small jobs, and for workers that are threads.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all, try_join_all};
use tokio::sync::watch;

use crate::cancel::CancelToken;
use crate::channel::Channel;
use crate::context::Incarnation;
use crate::error::{Code, Error, Result};
use crate::group::{ExitCause, GroupView, Member, RankExit, RankState, WorkerGroup};
use crate::handler::Handler;
use crate::host::{HostOptions, WorkerHost};
use crate::in_process::channel_to;
use crate::layout::{Rank, RankLayout};
use crate::worker::{Worker, WorkerEnv};

/// How the ranks of an [`InProcessGroup`] are run.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct InProcessOptions {
    /// Bounds of each rank's host.
    pub host: HostOptions,
    /// Writes every message out and reads it back, as a wire would: for tests.
    pub faithful: bool,
}

/// Ranks as tasks and threads of this process. Dropping it ends them.
///
/// ```
/// # use gym_core::*;
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
    /// No rank is started any more. Changed and looked at under the lock of `ranks`.
    stopped: AtomicBool,
    view: watch::Sender<Arc<GroupView>>,
}

type StartRank = Box<dyn Fn(WorkerEnv) -> BoxFuture<'static, Result<WorkerHost>> + Send + Sync>;

struct RunningRank {
    rank: Rank,
    incarnation: Incarnation,
    host: WorkerHost,
    /// Breaks the channels to it.
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
    /// When a rank does not start; none is then left.
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
    /// When a rank does not start; none is then left.
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

    /// Ends a rank where it is, as the end of its process would. What runs on it is lost; it stays dead until it is restarted. A rank of a
    /// group that has stopped stays as it is.
    ///
    /// # Errors
    /// `NotFound` when the group has no such rank.
    pub fn kill(&self, rank: Rank) -> Result<()> {
        self.end(rank, RankState::Dead, |_| Ok(())).map(drop)
    }

    /// Ends a rank if it still runs, and starts it anew from the same `init`, with a higher incarnation.
    ///
    /// # Errors
    /// `NotFound` when the group has no such rank; `Unavailable` when the group is stopped, before this or meanwhile; what
    /// [`Worker::start`] says, and the rank is then dead.
    pub async fn restart(&self, rank: Rank) -> Result<()> {
        let last = self.end(rank, RankState::Restarting, Self::check_open)?;
        let incarnation = Incarnation(last.0 + 1);
        let started = self.start_rank(rank, incarnation).await;
        // Over the change of the view, so that whoever stops the group finds the new life or this the stop.
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

    /// Takes no new calls, lets the running ones finish, and ends every rank.
    ///
    /// # Errors
    /// The first rank's error, when calls were still running after `grace` or when it was killed.
    pub async fn stop(&self, grace: Duration) -> Result<()> {
        let hosts: Vec<WorkerHost> = {
            let ranks = self.ranks();
            self.stopped.store(true, Ordering::Relaxed);
            ranks.iter().map(|running| running.host.clone()).collect()
        };
        let stopped = join_all(hosts.iter().map(|host| host.stop(grace))).await;
        // Over the change of the view, so that a rank that is killed meanwhile is stopped too.
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

    /// Ends the present life of a rank, if it `may` be, and says which it was.
    fn end(&self, rank: Rank, state: RankState, may: fn(&Self) -> Result<()>) -> Result<Incarnation> {
        let (host, closed, incarnation) = {
            // Over the change of the view, so that who stops the group has the last word there.
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
