//! Waiting, rejection and order of calls when ranks of this process are at capacity.

use std::cell::Cell;
use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use gym_core::base::watch;
use gym_core::registry::Balance;
use gym_core::transport::{Backend, ConnectOptions, Connector, InProcess, ListenOptions};
use gym_core::{CallContext, CancelToken, Code, Execution, Incarnation, Request, Result};
use gym_group::{
    Balancer, Batch, CallSupport, Gate, GroupView, Handles, HostOptions, InProcessGroup, InProcessOptions, Method,
    Methods, Payload, Permit, Rank, RankLayout, RankState, Worker, WorkerEnv, WorkerGroup, WorkerGroupExt, WorkerHost,
};
use parking_lot::Mutex;

/// Runs until its call is cancelled.
#[derive(Clone, Copy, Debug)]
struct Occupy;

impl Method for Occupy {
    const NAME: &'static str = "occupy";
    type Args = ();
    type Reply = ();
}

/// Returns the rank.
#[derive(Clone, Copy, Debug)]
struct Pass;

impl Method for Pass {
    const NAME: &'static str = "pass";
    type Args = ();
    type Reply = Rank;
}

struct BusyWorker(Rank);

impl Worker for BusyWorker {
    type Init = ();

    fn start(env: WorkerEnv, (): ()) -> Result<Self> {
        Ok(Self(env.rank))
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(Occupy).exclusive(Pass);
    }
}

impl Handles<Occupy> for BusyWorker {
    async fn handle(&mut self, cx: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
        cx.cancel.cancelled().await;
        Ok(().into())
    }
}

impl Handles<Pass> for BusyWorker {
    async fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<Rank>> {
        tokio::task::yield_now().await;
        Ok(self.0.into())
    }
}

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Delays the start of later incarnations until the test permits it.
struct Late;

/// Used by one test only.
static GO: Mutex<Option<Receiver<()>>> = Mutex::new(None);

impl Worker for Late {
    type Init = ();

    fn start(env: WorkerEnv, (): ()) -> Result<Self> {
        if env.incarnation > Incarnation(1) {
            let go = GO.lock().take().expect("the test made it");
            go.recv_timeout(WAIT_TIMEOUT).expect("the test lets it go");
        }
        Ok(Self)
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(Pass);
    }
}

impl Handles<Pass> for Late {
    async fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<Rank>> {
        Ok(0.into())
    }
}

/// A group whose calls wait for a turn that never comes.
#[derive(Debug)]
struct GatedGroup(Arc<InProcessGroup>);

impl WorkerGroup for GatedGroup {
    fn name(&self) -> &Arc<str> {
        self.0.name()
    }

    fn layout(&self) -> &RankLayout {
        self.0.layout()
    }

    fn view(&self) -> watch::Receiver<Arc<GroupView>> {
        self.0.view()
    }
}

impl WorkerGroupExt for GatedGroup {
    fn call_support(&self) -> CallSupport {
        let mut support = CallSupport::default();
        support.gate = Some(Arc::new(ClosedGate));
        support
    }
}

#[derive(Debug)]
struct ClosedGate;

impl Gate for ClosedGate {
    fn enter(&self) -> BoxFuture<'static, Permit> {
        Box::pin(std::future::pending())
    }

    fn holder(&self) -> Option<String> {
        Some("another group has had its bundles for ever".into())
    }
}

async fn desks(ranks: usize, calls_max: usize) -> Arc<InProcessGroup> {
    let layout = RankLayout::line(ranks).expect("the test is right");
    let mut options = InProcessOptions::default();
    options.host.calls_max = calls_max;
    Arc::new(InProcessGroup::start_with::<BusyWorker>("desks", layout, (), options).await.expect("the test is right"))
}

fn least_pending(group: &Arc<InProcessGroup>) -> Balancer {
    Balancer::new(Arc::clone(group) as _, Balance::LeastPending).expect("no weights")
}

#[tokio::test(start_paused = true)]
async fn answers_that_nobody_reads_keep_no_room_that_others_wait_for() {
    let group = desks(1, 4).await;
    let mut unread = Vec::new();
    for _ in 0..100 {
        unread.push(group.call(Pass, ()).deadline(WAIT_TIMEOUT).start().await.unwrap());
        // Its response arrives later, so the rank has capacity again.
        group.call(Pass, ()).deadline(WAIT_TIMEOUT).await.unwrap();
    }
    for pending in unread {
        assert_eq!(pending.await.unwrap().into_values(), [0]);
    }
}

#[tokio::test(start_paused = true)]
async fn nor_do_they_over_a_link_to_a_name_of_this_process() {
    let options = HostOptions::default();
    let host = WorkerHost::start::<BusyWorker>(WorkerEnv::new("desks", 0, 1), (), &options).await.unwrap();
    let in_process = InProcess::new().with_calls_max(2);
    let options = ListenOptions::named("desk").bounded_by_handler();
    let mut bound = Backend::listen(&in_process, &options, Arc::new(host)).await.unwrap().unwrap();
    let endpoint = bound.listener.endpoints()[0].clone();
    let serving = tokio::spawn(async move {
        let peer = bound.listener.accept().await.expect("the one below");
        peer.serve(bound.handler, CancelToken::new()).await
    });
    let channel =
        in_process.connect(&CallContext::within(WAIT_TIMEOUT), &endpoint, &ConnectOptions::default()).await.unwrap();
    let pass = || Request::post(CallContext::within(WAIT_TIMEOUT), "/worker/pass", r#"{"value":null}"#);
    let mut unread = Vec::new();
    for _ in 0..10 {
        unread.push(channel.start(pass()).await.unwrap());
    }
    assert!(channel.call(pass()).await.unwrap().status.is_success());
    drop((unread, channel));
    serving.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_call_to_one_rank_that_shares_no_memory_is_handed_over_by_who_starts_it() {
    let mut options = InProcessOptions::default();
    options.faithful = true;
    let layout = RankLayout::line(1).unwrap();
    let group = InProcessGroup::start_with::<BusyWorker>("desks", layout, (), options).await.unwrap();
    let started = group.call(Pass, ()).deadline(WAIT_TIMEOUT).start().now_or_never();
    assert_eq!(started.expect("the rank has room").unwrap().await.unwrap().into_values(), [0]);
}

#[tokio::test(start_paused = true)]
async fn calls_beyond_what_a_rank_takes_are_refused_and_never_wait() {
    let group = desks(1, 4).await;
    let mut started = Vec::new();
    for _ in 0..100 {
        started.push(group.call(Occupy, ()).deadline(WAIT_TIMEOUT).start().await.unwrap());
    }
    for refused in started.drain(4..) {
        let error = refused.await.unwrap_err();
        assert_eq!((error.cause().code(), error.execution()), (Code::ResourceExhausted, Execution::NotStarted));
        assert!(error.to_string().contains("4 calls run or wait at this rank"), "{error}");
    }
}

#[tokio::test]
async fn a_rank_whose_restart_a_stop_overtakes_stays_stopped() {
    let (go, waits) = sync_channel(1);
    *GO.lock() = Some(waits);
    let group = InProcessGroup::start::<Late>("late", RankLayout::line(1).unwrap(), ()).await.unwrap();
    let mut restart = Box::pin(group.restart::<Late>(0, ()));
    assert!(restart.as_mut().now_or_never().is_none(), "its next life waits");
    group.stop(WAIT_TIMEOUT).await.unwrap();
    go.send(()).unwrap();
    for error in [restart.await.unwrap_err(), group.restart::<Late>(0, ()).await.unwrap_err()] {
        assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::NotStarted), "{error}");
    }
    assert_eq!(group.view().borrow().members()[0].state, RankState::Stopped);
}

#[tokio::test(start_paused = true)]
async fn items_wait_until_their_deadline_for_ranks_that_are_busy_with_calls_of_others() {
    let group = desks(2, 64).await;
    let balancer = least_pending(&group);
    let (near, far) = (CallContext::within(WAIT_TIMEOUT), CallContext::within(WAIT_TIMEOUT * 2));
    let others = join_all((0..2).map(|_| balancer.submit(&far, Occupy, (), Batch::empty())));
    let (others, late) = tokio::join!(others, balancer.map(&near, Pass, vec![(); 3], 1));
    assert!(others.iter().all(Result::is_err), "they end at their deadline");
    let late = late.unwrap_err();
    assert_eq!((late.cause().code(), late.execution()), (Code::DeadlineExceeded, Execution::NotStarted));
    assert!(late.to_string().contains("1 calls under way at each rank"), "{late}");
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_late_after_some_of_its_items_may_have_run() {
    let group = desks(1, 64).await;
    let balancer = least_pending(&group);
    let (near, far) = (CallContext::within(WAIT_TIMEOUT), CallContext::within(WAIT_TIMEOUT * 2));
    // The other caller's call is queued behind the first item, so there is no capacity for the second item.
    let (late, other) =
        tokio::join!(balancer.map(&near, Pass, vec![(); 2], 1), balancer.submit(&far, Occupy, (), Batch::empty()));
    assert!(other.is_err(), "it ends at its deadline");
    let late = late.unwrap_err();
    assert_eq!((late.cause().code(), late.execution()), (Code::DeadlineExceeded, Execution::Unknown), "{late:?}");
    assert!(!late.may_resend(), "the first item has been answered");
}

#[tokio::test(start_paused = true)]
async fn nor_can_a_list_be_repeated_whose_later_item_is_refused() {
    let group = desks(1, 1).await;
    let balancer = least_pending(&group);
    let cx = CallContext::within(WAIT_TIMEOUT);
    let refused = balancer.map(&cx, Pass, vec![(); 2], 2).await.unwrap_err();
    assert_eq!((refused.cause().code(), refused.execution()), (Code::ResourceExhausted, Execution::Unknown));
    let alone = group.call(Occupy, ()).deadline(WAIT_TIMEOUT).start().await.unwrap();
    let refused = balancer.map(&cx, Pass, vec![()], 2).await.unwrap_err();
    assert_eq!((refused.cause().code(), refused.execution()), (Code::ResourceExhausted, Execution::NotStarted));
    drop(alone);
}

#[tokio::test(start_paused = true)]
async fn no_rank_has_run_a_call_that_waited_for_its_turn_when_one_was_replaced() {
    let desks = desks(2, 4).await;
    let group = GatedGroup(Arc::clone(&desks));
    let (error, ()) = tokio::join!(group.call(Pass, ()).deadline(WAIT_TIMEOUT).into_future(), async {
        tokio::task::yield_now().await;
        desks.restart::<BusyWorker>(1, ()).await.unwrap();
    });
    let error = error.unwrap_err();
    assert_eq!((error.cause().code(), error.execution()), (Code::Unavailable, Execution::NotStarted), "{error:?}");
    assert_eq!(error.first().map(|first| (first.rank, first.incarnation)), Some((1, Incarnation(1))));
    assert!(error.may_resend());
}

#[tokio::test(start_paused = true)]
async fn items_go_to_a_rank_as_soon_as_the_calls_of_others_leave_it() {
    let group = desks(1, 64).await;
    let balancer = least_pending(&group);
    let (other, cx) = (CallContext::within(WAIT_TIMEOUT), CallContext::within(WAIT_TIMEOUT));
    let (left, replies, ()) = tokio::join!(
        balancer.submit(&other, Occupy, (), Batch::empty()),
        balancer.map(&cx, Pass, vec![(); 3], 1),
        async {
            tokio::task::yield_now().await;
            other.cancel.cancel();
        },
    );
    assert_eq!(left.unwrap_err().cause().code(), Code::Cancelled);
    assert_eq!(replies.unwrap(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn a_long_list_of_items_lets_a_short_one_pass() {
    let group = desks(2, 64).await;
    let balancer = least_pending(&group);
    let cx = CallContext::within(WAIT_TIMEOUT);
    let (long_ended, passed) = (Cell::new(false), Cell::new(false));
    let long = async {
        balancer.map(&cx, Pass, vec![(); 1_000], 4).await.unwrap();
        long_ended.set(true);
    };
    let short = async {
        balancer.map(&cx, Pass, vec![(); 3], 1).await.unwrap();
        passed.set(!long_ended.get());
    };
    tokio::join!(long, short);
    assert!(passed.get(), "three items waited for a thousand");
}

#[tokio::test(start_paused = true)]
async fn a_kill_ends_a_stop_that_still_waits_and_what_is_stopped_stays_so() {
    let group = desks(2, 4).await;
    let call = group.call(Occupy, ()).deadline(WAIT_TIMEOUT * 90).start().await.unwrap();
    let began = tokio::time::Instant::now();
    let mut stopping = Box::pin(group.stop(WAIT_TIMEOUT * 30));
    assert!(stopping.as_mut().now_or_never().is_none(), "its calls run");
    let state = |rank: usize| group.view().borrow().members()[rank].state;
    group.kill(0).unwrap();
    assert_eq!((state(0), state(1)), (RankState::Dead, RankState::Healthy));
    // Before the stopping future is polled again.
    let error = call.await.unwrap_err();
    assert_eq!(error.cause().code(), Code::Unavailable, "{error:?}");
    group.kill(1).unwrap();
    let error = stopping.await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::Unknown), "{error}");
    assert!(began.elapsed() < WAIT_TIMEOUT, "{:?}", began.elapsed());
    group.kill(0).unwrap();
    assert_eq!((state(0), state(1)), (RankState::Stopped, RankState::Stopped));
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_for_its_turn_in_vain_says_for_whom() {
    let group = GatedGroup(desks(2, 4).await);
    let error = group.call(Pass, ()).deadline(WAIT_TIMEOUT).await.unwrap_err();
    assert_eq!((error.cause().code(), error.execution()), (Code::DeadlineExceeded, Execution::NotStarted), "{error:?}");
    for outcome in error.outcomes() {
        let said = outcome.error().expect("it failed").to_string();
        assert!(said.ends_with("waited for its turn: another group has had its bundles for ever"), "{said}");
    }
}
