//! A host whose worker blocks: the errors of its callers when it is abandoned, and calls that are cancelled while they
//! wait.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use futures_util::FutureExt;
use gym_core::group::{HandlesBlocking, HostOptions, Method, Methods, Payload, Worker, WorkerEnv, WorkerHost};
use gym_core::{CallContext, Code, Execution, Handler, Request, Result};
use parking_lot::Mutex;
use tokio::time::timeout;

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Blocks until the test releases it, even if it is cancelled. Returns whether it was cancelled.
#[derive(Clone, Copy, Debug)]
struct Block;

impl Method for Block {
    const NAME: &'static str = "block";
    type Args = ();
    type Reply = ();
}

#[derive(Clone, Copy, Debug)]
struct Count;

impl Method for Count {
    const NAME: &'static str = "count";
    type Args = ();
    type Reply = ();
}

/// The state that a test shares with its worker, which finds it by the name of its group.
struct Shared {
    go: Mutex<Receiver<()>>,
    told: Mutex<SyncSender<bool>>,
    ended: Mutex<SyncSender<()>>,
    counted: AtomicU32,
}

/// The test's ends of the channels.
struct Strings {
    go: SyncSender<()>,
    told: Receiver<bool>,
    ended: Receiver<()>,
    shared: &'static Shared,
}

static GIVEN_UP: OnceLock<Shared> = OnceLock::new();
static LEFT: OnceLock<Shared> = OnceLock::new();
static LATE: OnceLock<Shared> = OnceLock::new();
static HALF_STOPPED: OnceLock<Shared> = OnceLock::new();
static KILLED: OnceLock<Shared> = OnceLock::new();

fn shared(group: &str) -> &'static OnceLock<Shared> {
    match group {
        "given-up" => &GIVEN_UP,
        "left" => &LEFT,
        "late" => &LATE,
        "killed" => &KILLED,
        _ => &HALF_STOPPED,
    }
}

fn strings(group: &str) -> Strings {
    let ((go, waits), (tells, told), (ends, ended)) = (sync_channel(1), sync_channel(1), sync_channel(1));
    let made =
        Shared { go: Mutex::new(waits), told: Mutex::new(tells), ended: Mutex::new(ends), counted: AtomicU32::new(0) };
    let shared = shared(group).get_or_init(|| made);
    Strings { go, told, ended, shared }
}

struct Blocking(&'static Shared);

impl Worker for Blocking {
    type Init = ();

    fn start(env: WorkerEnv, (): ()) -> Result<Self> {
        Ok(Self(shared(&env.group).get().expect("the test made it")))
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.blocking(Block).blocking(Count);
    }
}

impl Drop for Blocking {
    fn drop(&mut self) {
        let _ = self.0.ended.lock().send(());
    }
}

impl HandlesBlocking<Block> for Blocking {
    fn handle(&mut self, cx: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
        let _ = self.0.go.lock().recv();
        let _ = self.0.told.lock().send(cx.cancel.is_cancelled());
        Ok(().into())
    }
}

impl HandlesBlocking<Count> for Blocking {
    fn handle(&mut self, _: &CallContext, _: Payload<()>) -> Result<Payload<()>> {
        self.0.counted.fetch_add(1, Ordering::Relaxed);
        Ok(().into())
    }
}

async fn host(group: &'static str, calls_max: usize) -> WorkerHost {
    let mut options = HostOptions::default();
    options.calls_max = calls_max;
    WorkerHost::start::<Blocking>(WorkerEnv::new(group, 0, 1), (), &options).await.expect("starts")
}

fn post(method: &'static str) -> Request {
    post_within(WAIT_TIMEOUT * 30, method)
}

fn post_within(timeout: Duration, method: &'static str) -> Request {
    Request::post(CallContext::within(timeout), method, r#"{"value":null}"#)
}

async fn until_running(host: &WorkerHost) {
    let running = async {
        while host.status().running.is_empty() {
            tokio::task::yield_now().await;
        }
    };
    timeout(WAIT_TIMEOUT, running).await.expect("it runs");
}

#[tokio::test]
async fn a_worker_that_blocks_beyond_the_grace_keeps_nobody_waiting_and_runs_nothing_more() {
    let strings = strings("given-up");
    let host = host("given-up", 8).await;
    let running = tokio::spawn(host.handle(post("/worker/block")));
    until_running(&host).await;
    let waiting = tokio::spawn(host.handle(post("/worker/count")));
    let error = host.stop(Duration::ZERO).await.expect_err("it blocks");
    assert_eq!(error.code(), Code::DeadlineExceeded);
    for answer in [running, waiting] {
        let error =
            timeout(WAIT_TIMEOUT, answer).await.expect("at once").expect("no panic").expect_err("nobody answers");
        assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::Unknown), "{error}");
    }
    strings.go.send(()).expect("it waits");
    assert_eq!(strings.told.recv_timeout(WAIT_TIMEOUT), Ok(true), "it was told");
    strings.ended.recv_timeout(WAIT_TIMEOUT).expect("the worker ends after the call that it ran");
    assert_eq!(strings.shared.counted.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn those_who_leave_the_line_of_a_worker_that_blocks_keep_no_room() {
    let strings = strings("left");
    let host = host("left", 2).await;
    let running = tokio::spawn(host.handle(post("/worker/block")));
    until_running(&host).await;
    for number in 0..1_000 {
        let mut leaves = host.handle(post("/worker/count"));
        assert!(leaves.as_mut().now_or_never().is_none(), "call {number} has a place");
        drop(leaves);
        assert_eq!(host.status().waiting, 0, "call {number}");
    }
    let stays = tokio::spawn(host.handle(post("/worker/count")));
    strings.go.send(()).expect("it waits");
    for answer in [running, stays] {
        timeout(WAIT_TIMEOUT, answer).await.expect("soon").expect("no panic").expect("an answer");
    }
    assert_eq!(strings.shared.counted.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn those_whose_deadline_passes_in_the_line_of_a_worker_that_blocks_keep_no_room() {
    let strings = strings("late");
    let host = host("late", 2).await;
    let running = tokio::spawn(host.handle(post("/worker/block")));
    until_running(&host).await;
    for number in 0..100 {
        let mut answer = host.handle(post_within(Duration::ZERO, "/worker/count"));
        let error = timeout(WAIT_TIMEOUT, answer.as_mut()).await.expect("at once").expect_err("it is late");
        assert_eq!((error.code(), error.execution()), (Code::DeadlineExceeded, Execution::NotStarted), "call {number}");
        // The reply is not dropped yet.
        assert_eq!(host.status().waiting, 0, "call {number}");
    }
    strings.go.send(()).expect("it waits");
    timeout(WAIT_TIMEOUT, running).await.expect("soon").expect("no panic").expect("an answer");
}

#[tokio::test]
async fn a_stop_that_is_given_up_ends_the_worker() {
    let strings = strings("half-stopped");
    let host = host("half-stopped", 8).await;
    let running = tokio::spawn(host.handle(post("/worker/block")));
    until_running(&host).await;
    assert!(host.stop(WAIT_TIMEOUT * 30).now_or_never().is_none(), "it blocks");
    let error = timeout(WAIT_TIMEOUT, running).await.expect("at once").expect("no panic").expect_err("nobody answers");
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::Unknown), "{error}");
    strings.go.send(()).expect("it waits");
    strings.ended.recv_timeout(WAIT_TIMEOUT).expect("the worker ends after the call that it ran");
}

#[tokio::test]
async fn a_kill_ends_a_stop_that_still_waits() {
    let strings = strings("killed");
    let host = host("killed", 8).await;
    let running = tokio::spawn(host.handle(post("/worker/block")));
    until_running(&host).await;
    let mut stopping = Box::pin(host.stop(WAIT_TIMEOUT * 30));
    assert!(stopping.as_mut().now_or_never().is_none(), "it blocks");
    host.kill();
    let error = timeout(WAIT_TIMEOUT, running).await.expect("at once").expect("no panic").expect_err("nobody answers");
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::Unknown), "{error}");
    let error = timeout(WAIT_TIMEOUT, stopping).await.expect("at once").expect_err("a call was running");
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::Unknown), "{error}");
    strings.go.send(()).expect("it waits");
    strings.ended.recv_timeout(WAIT_TIMEOUT).expect("the worker ends after the call that it ran");
    host.stop(WAIT_TIMEOUT).await.expect("it has ended");
}
