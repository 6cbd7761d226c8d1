//! The contract of every worker group, wherever its ranks live.
//!
//! A backend implements [`GroupFixture`] and runs [`group`]. One whose ranks are handlers of this process, reached over some
//! transport, says only how a handler is reached: [`ServedGroups`].

mod calls;
mod endings;
mod rogues;
mod workers;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::{BoxFuture, try_join_all};
use gym_core::base::watch;
use gym_core::group::layout::{Rank, RankLayout};
use gym_core::group::worker::WorkerEnv;
use gym_core::group::worker::host::{HostOptions, WorkerHost};
use gym_core::group::{ExitCause, GroupView, RankExit, RankState, RankView, WorkerGroup};
use gym_core::message::{CallContext, Incarnation};
use gym_core::transport::Channel;
use gym_core::transport::Handler;
use gym_core::{Error, Result};
use parking_lot::Mutex;

use crate::call::WorkerGroupExt;

pub use rogues::group_rogues;
pub use workers::{TestBlockingWorker, TestWorker};

/// A deadline that no call is meant to reach.
const LONG_TIMEOUT: Duration = Duration::from_secs(60);
/// A deadline that a call is meant to reach.
const SHORT_TIMEOUT: Duration = Duration::from_millis(100);

/// The requirements of a case for a fresh group.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupSetup {
    /// Its ranks.
    pub layout: RankLayout,
    /// The kind of worker that runs on them, made from `()`.
    pub worker: TestWorkerKind,
    /// [`HostOptions::calls_max`] of each rank.
    pub calls_max: usize,
}

/// Which worker runs on the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestWorkerKind {
    /// [`TestWorker`].
    Async,
    /// [`TestBlockingWorker`].
    Blocking,
}

impl GroupSetup {
    /// Starts the host of one rank: what a child process of a backend under test does.
    ///
    /// # Errors
    /// None of the suite's workers fails to start.
    pub async fn start_host(&self, env: WorkerEnv) -> Result<WorkerHost> {
        let mut options = HostOptions::default();
        options.calls_max = self.calls_max;
        match self.worker {
            TestWorkerKind::Async => WorkerHost::start::<TestWorker>(env, (), &options).await,
            TestWorkerKind::Blocking => WorkerHost::start::<TestBlockingWorker>(env, (), &options).await,
        }
    }
}

/// A backend under test.
#[async_trait(?Send)]
pub trait GroupFixture {
    /// A group whose ranks all take calls.
    async fn start(&self, setup: GroupSetup) -> Box<dyn TestGroup>;
}

/// A group under test. Dropping it ends its ranks.
#[async_trait(?Send)]
pub trait TestGroup: fmt::Debug {
    /// The group.
    fn group(&self) -> Arc<dyn WorkerGroupExt>;

    /// Ends a rank without a farewell, and starts it anew with a higher incarnation. Returns when it takes calls.
    async fn replace(&self, rank: Rank);
}

/// Runs every case. To be called within a tokio runtime with time and, where the backend needs it, I/O.
///
/// # Panics
/// When a case fails; the message names it.
pub async fn group(fixture: &dyn GroupFixture) {
    calls::run(fixture).await;
    endings::run(fixture).await;
}

macro_rules! run_cases {
    ($fixture:expr; $($case:ident),* $(,)?) => {
        $(gym_core::testing::conformance::run_case("group", stringify!($case), $case($fixture)).await;)*
    };
}
use run_cases;

/// Groups whose ranks are hosts of this process, each reached over a channel that `connect` makes.
pub struct ServedGroups<C>(C);

impl<C, Fut> ServedGroups<C>
where
    C: Fn(Arc<dyn Handler>) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Channel> + Send + 'static,
{
    /// `connect` serves a handler and returns a channel to it.
    pub fn over(connect: C) -> Self {
        Self(connect)
    }
}

impl<C> fmt::Debug for ServedGroups<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServedGroups")
    }
}

type Connect = Box<dyn Fn(Arc<dyn Handler>) -> BoxFuture<'static, Channel> + Send + Sync>;

#[async_trait(?Send)]
impl<C, Fut> GroupFixture for ServedGroups<C>
where
    C: Fn(Arc<dyn Handler>) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Channel> + Send + 'static,
{
    async fn start(&self, setup: GroupSetup) -> Box<dyn TestGroup> {
        let connect = self.0.clone();
        let connect: Connect = Box::new(move |handler| Box::pin(connect(handler)));
        let (view, layout) = (watch::Sender::new(Arc::default()), setup.layout.clone());
        let served = Served {
            group: Arc::new(ServedGroup { name: "served".into(), layout, view }),
            hosts: Mutex::default(),
            setup,
            connect,
        };
        let ranks = served.setup.layout.ranks().to_vec();
        let starts = ranks.into_iter().map(async |rank| {
            let host = served.host(rank, Incarnation(1)).await;
            let channel = (served.connect)(Arc::new(host.clone())).await;
            Ok::<_, Error>((host, member(rank, Incarnation(1), channel)))
        });
        let (hosts, members): (Vec<_>, Vec<_>) =
            try_join_all(starts).await.expect("the suite's workers start").into_iter().unzip();
        *served.hosts.lock() = hosts;
        served.group.view.send_replace(Arc::new(GroupView::new(1, members)));
        Box::new(served)
    }
}

fn member(rank: Rank, incarnation: Incarnation, channel: Channel) -> RankView {
    RankView::starting(rank, incarnation).in_state(RankState::Healthy).reached_over(channel)
}

struct Served {
    group: Arc<ServedGroup>,
    hosts: Mutex<Vec<WorkerHost>>,
    setup: GroupSetup,
    connect: Connect,
}

#[derive(Debug)]
struct ServedGroup {
    name: Arc<str>,
    layout: RankLayout,
    view: watch::Sender<Arc<GroupView>>,
}

impl WorkerGroup for ServedGroup {
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

impl WorkerGroupExt for ServedGroup {}

impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.group.fmt(f)
    }
}

impl Served {
    async fn host(&self, rank: Rank, incarnation: Incarnation) -> WorkerHost {
        let world_size = u32::try_from(self.setup.layout.size()).expect("a case has few ranks");
        let mut env = WorkerEnv::new("served", rank, world_size);
        env.incarnation = incarnation;
        self.setup.start_host(env).await.expect("the suite's workers start")
    }
}

#[async_trait(?Send)]
impl TestGroup for Served {
    fn group(&self) -> Arc<dyn WorkerGroupExt> {
        Arc::clone(&self.group) as _
    }

    async fn replace(&self, rank: Rank) {
        let old = {
            let hosts = self.hosts.lock();
            hosts.iter().find(|host| host.env().rank == rank).expect("a rank of the case").clone()
        };
        let incarnation = old.env().incarnation;
        let exit = RankExit::new(incarnation, ExitCause::Died);
        let dead = RankView::starting(rank, incarnation).in_state(RankState::Dead).ended(exit.clone());
        self.group.view.send_modify(|view| *view = Arc::new(view.with([dead])));
        old.kill();
        let incarnation = Incarnation(incarnation.0 + 1);
        let host = self.host(rank, incarnation).await;
        let channel = (self.connect)(Arc::new(host.clone())).await;
        for known in self.hosts.lock().iter_mut() {
            if known.env().rank == rank {
                *known = host.clone();
            }
        }
        let reborn = member(rank, incarnation, channel).ended(exit);
        self.group.view.send_modify(|view| *view = Arc::new(view.with([reborn])));
    }
}

async fn start(fixture: &dyn GroupFixture, layout: RankLayout, worker: TestWorkerKind) -> Box<dyn TestGroup> {
    fixture.start(GroupSetup { layout, worker, calls_max: 64 }).await
}

async fn line(fixture: &dyn GroupFixture, ranks: usize) -> Box<dyn TestGroup> {
    start(fixture, RankLayout::line(ranks).expect("a case has ranks"), TestWorkerKind::Async).await
}

/// Two data replicas of two tensor ranks each: ranks 0 and 1, 2 and 3.
fn square() -> RankLayout {
    RankLayout::new([("data", 2), ("tensor", 2)]).expect("two axes of two")
}

fn far() -> CallContext {
    CallContext::within(LONG_TIMEOUT)
}

/// Asks the hosts until `ready` says so of all of them.
async fn until(group: &dyn WorkerGroupExt, ready: impl Fn(&gym_core::group::WorkerStatus) -> bool) {
    loop {
        let statuses = group.ask_hosts(&far()).await;
        if statuses.iter().all(|status| status.as_ref().is_ok_and(&ready)) {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// Waits until every rank runs a call.
async fn until_running(group: &dyn WorkerGroupExt) {
    until(group, |status| !status.running.is_empty()).await;
}
