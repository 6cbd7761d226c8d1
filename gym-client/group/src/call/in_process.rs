//! A group whose ranks run in this process: for small jobs, and for workers that are threads.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use gym_core::CancelToken;
use gym_core::Result;
use gym_core::base::watch;
use gym_core::group::RankState;
use gym_core::group::collective::{InProcessCollectives, Peers, Seat, Seats};
use gym_core::group::layout::{Rank, RankLayout};
use gym_core::group::worker::host::{HostOptions, WorkerHost, WorkerStatus};
use gym_core::group::worker::{Worker, WorkerEnv};
use gym_core::group::{GroupView, RankView, WorkerGroup};
use gym_core::message::Incarnation;
use gym_core::transport::mem::channel_to;
use parking_lot::{Mutex, MutexGuard};

use crate::call::{CallSupport, RankMonitor, WorkerGroupExt};

/// Options of an [`InProcessGroup`]. The default has the default limits and is not faithful.
///
/// ```
/// use gym_group::InProcessOptions;
/// use gym_group::prelude::*;
/// # struct Counter(u64);
/// # worker! {
/// #     impl Worker for Counter as counter {
/// #         fn start(_: WorkerEnv, from: u64) -> Result<Self> { Ok(Self(from)) }
/// #         exclusive async fn add(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
/// #             self.0 += call.value;
/// #             Ok(self.0.into())
/// #         }
/// #     }
/// # }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let mut options = InProcessOptions::default();
/// options.faithful = true; // a value that cannot be written as JSON fails in the test, and not later on a wire
/// let layout = RankLayout::line(2)?;
/// let group = InProcessGroup::start_with::<Counter>("counters", layout, 10, options).await?;
/// assert_eq!(group.call(counter::add, 5).await?.into_values(), [15, 15]);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct InProcessOptions {
    /// Limits of each rank's host. The default is [`HostOptions::default`].
    pub host: HostOptions,
    /// Serializes and parses every message, as a wire would, for tests. The default is `false`.
    pub faithful: bool,
    /// Starts [submitted](crate::GroupCall::submit) calls without being awaited. The default is `false`.
    pub async_communication: bool,
}

/// A group whose ranks are tasks and threads of this process. Dropping the group ends them.
///
/// A rank is not restarted; the supervised `Group` of `gym-client` restarts ranks, in processes or in this one.
///
/// ```
/// use gym_group::prelude::*;
///
/// struct Counter(u64);
/// worker! {
///     impl Worker for Counter as counter {
///         fn start(_: WorkerEnv, from: u64) -> Result<Self> { Ok(Self(from)) }
///         exclusive async fn add(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
///             self.0 += call.value;
///             Ok(self.0.into())
///         }
///     }
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let counters = InProcessGroup::start::<Counter>("counters", RankLayout::line(4)?, 10).await?;
/// assert_eq!(counters.call(counter::add, 5).await?.into_values(), [15, 15, 15, 15]);
/// counters.stop(std::time::Duration::from_secs(1)).await
/// # }
/// ```
pub struct InProcessGroup {
    pub(crate) name: Arc<str>,
    pub(crate) layout: RankLayout,
    options: InProcessOptions,
    /// Where the ranks meet.
    collectives: Arc<InProcessCollectives>,
    support: CallSupport,
    ranks: Arc<Mutex<Vec<RunningRank>>>,
    /// No further rank is started. Written under the lock of `ranks`.
    pub(crate) stopped: AtomicBool,
    pub(crate) view: watch::Sender<Arc<GroupView>>,
}

pub(crate) struct RunningRank {
    pub(crate) host: WorkerHost,
    /// Breaks the channels to the rank.
    pub(crate) closed: CancelToken,
}

impl RunningRank {
    pub(crate) fn end(self) {
        self.host.kill();
        self.closed.cancel();
    }
}

impl InProcessGroup {
    /// Starts a worker for each rank of the layout, all from the same `init`.
    ///
    /// # Errors
    /// The error of a rank that fails to start; no rank is left running.
    pub async fn start<W>(name: impl Into<Arc<str>>, layout: RankLayout, init: W::Init) -> Result<Self>
    where
        W: Worker,
        W::Init: Clone + Sync,
    {
        Self::start_with::<W>(name, layout, init, InProcessOptions::default()).await
    }

    /// Like [`InProcessGroup::start`], with options.
    ///
    /// # Errors
    /// The error of a rank that fails to start; no rank is left running.
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
        let ranks = Arc::default();
        let support = CallSupport {
            gate: None,
            backlog: options.async_communication.then(Arc::default),
            monitor: Some(Arc::new(HostMonitor(Arc::clone(&ranks)))),
        };
        let group = Self {
            name: name.into(),
            layout,
            support,
            options,
            collectives: Arc::default(),
            ranks,
            stopped: AtomicBool::new(false),
            view: watch::Sender::new(Arc::default()),
        };
        let mut ranks = group.layout.ranks().to_vec();
        ranks.sort_unstable();
        let starts = ranks.into_iter().map(|rank| group.start_rank::<W>(rank, Incarnation(1), init.clone()));
        let (running, members): (Vec<_>, Vec<_>) = try_join_all(starts).await?.into_iter().unzip();
        group.view.send_replace(Arc::new(GroupView::new(1, members)));
        group.seat(&running);
        *group.ranks() = running;
        Ok(group)
    }

    /// Rejects new calls, waits up to `grace` for running calls, and ends every rank.
    ///
    /// # Errors
    /// The error of the first rank whose calls were still running after `grace`.
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

    pub(crate) async fn start_rank<W: Worker>(
        &self,
        rank: Rank,
        incarnation: Incarnation,
        init: W::Init,
    ) -> Result<(RunningRank, RankView)> {
        let world_size = u32::try_from(self.layout.size()).unwrap_or(u32::MAX);
        let mut env = WorkerEnv::new(Arc::clone(&self.name), rank, world_size);
        env.incarnation = incarnation;
        env.peers = Peers::new(Arc::clone(&self.name), rank, self.collectives.clone());
        let host = WorkerHost::start::<W>(env, init, &self.options.host).await?;
        let closed = CancelToken::new();
        let name = format!("{}/{rank}", self.name);
        let channel = channel_to(&name, Arc::new(host.clone()), self.options.faithful, closed.child_token());
        let member = RankView::starting(rank, incarnation).in_state(RankState::Healthy).reached_over(channel);
        Ok((RunningRank { host, closed }, member))
    }

    /// Tells these ranks who meets, after a change of the view.
    pub(crate) fn seat(&self, ranks: &[RunningRank]) {
        let view = Arc::clone(&self.view.borrow());
        let (serving, lost): (Vec<_>, Vec<_>) =
            view.members().iter().partition(|member| member.state == RankState::Healthy);
        let seats = serving.into_iter().map(|member| Seat::new(member.rank, member.incarnation)).collect();
        let why = |member: &RankView| {
            (member.rank, member.exit.as_ref().map_or_else(|| member.state.to_string(), ToString::to_string))
        };
        let seats = Seats::new(view.generation, self.layout.clone(), seats).without(lost.into_iter().map(why));
        for running in ranks {
            running.host.env().peers.seat(seats.clone());
        }
    }

    pub(crate) fn ranks(&self) -> MutexGuard<'_, Vec<RunningRank>> {
        self.ranks.lock()
    }
}

/// Reads the status of the hosts of a group.
struct HostMonitor(Arc<Mutex<Vec<RunningRank>>>);

impl RankMonitor for HostMonitor {
    fn last_status(&self, rank: Rank, incarnation: Incarnation) -> Option<(WorkerStatus, Duration)> {
        let ranks = self.0.lock();
        let is_asked = |env: &WorkerEnv| env.rank == rank && env.incarnation == incarnation;
        let running = ranks.iter().find(|running| is_asked(running.host.env()))?;
        Some((running.host.status(), Duration::ZERO))
    }
}

impl fmt::Debug for HostMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostMonitor")
    }
}

impl WorkerGroup for InProcessGroup {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn layout(&self) -> &RankLayout {
        &self.layout
    }

    fn view(&self) -> watch::Receiver<Arc<GroupView>> {
        self.view.subscribe()
    }
}

impl WorkerGroupExt for InProcessGroup {
    fn call_support(&self) -> CallSupport {
        self.support.clone()
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
