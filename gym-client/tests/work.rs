//! Pulled work over the simulated network: a pool, workers with servers of their own, and the driver on both kinds of dispatch.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::{FutureExt as _, stream};
use gym_client::collect::ledger::MemoryLedger;
use gym_client::collect::{Driver, DriverOptions, ProgressSnapshot, RolloutRow, RunEnd};
use gym_client::work::{
    Dispatch, PoolWatch, PullingMember, WORK_LABEL, WorkKind, WorkPool, WorkPoolOptions, WorkPuller, WorkPullerOptions,
};
use gym_client::{ServerClient, Transports};
use gym_core::registry::{
    Heartbeat, MemberLease, MemberLimits, MemberRegistry, MemberServer, MemberSpec, MemberState, MemberTiming,
    MemoryRegistry, Registration, Registry,
};
use gym_core::rollout::work::WorkQueueOptions;
use gym_core::rollout::{FailureClass, Outcome, TaskKey};
use gym_core::server::ServerKind;
use gym_core::testing::{Faults, SimFiles, SimNet};
use gym_core::transport::{handler_fn, serve};
use gym_core::{
    CallContext, CancelToken, Code, Endpoint, Error, Execution, Handler, Incarnation, RawObject, Request, Response,
    Result, World,
};
use parking_lot::Mutex;

const LONG: Duration = Duration::from_secs(100_000);

fn world(seed: u64) -> World {
    World::new(Arc::new(SimFiles::new(seed)), seed, Duration::from_secs(1))
}

/// Serves a handler as `env` on a simulated host, and returns a client of it.
async fn serve_env(net: &SimNet, host: &str, handler: Arc<dyn Handler>, world: &World) -> ServerClient {
    let sim = net.host(host);
    let listener = Box::new(sim.listen("env").unwrap());
    sim.spawn(serve(listener, handler, CancelToken::new(), LONG).map(drop));
    let registry = MemoryRegistry::default();
    let endpoint = Endpoint::parse(&format!("sim://{host}/env")).unwrap();
    let mut registration = Registration::new("env", ServerKind::Environment, &[endpoint]);
    registration.ttl = LONG;
    registry.register(&CallContext::default(), registration).await.unwrap();
    ServerClient::new(Arc::new(registry), Transports::new().with_connector(Arc::new(sim)), world)
}

/// A pool on the host `collector`.
fn host_pool(net: &SimNet, options: WorkPoolOptions, world: &World) -> WorkPool {
    let pool = WorkPool::new(options, world);
    let host = net.host("collector");
    let listener = Box::new(host.listen("work").unwrap());
    let handler: Arc<dyn Handler> = Arc::new(pool.clone());
    host.spawn(serve(listener, handler, CancelToken::new(), LONG).map(drop));
    pool
}

fn options(name: &str, capacity: u32, world: &World) -> WorkPullerOptions {
    let mut options = WorkPullerOptions::new(name, world);
    options.capacity = capacity;
    options
}

fn pull(client: ServerClient, options: WorkPullerOptions, world: &World) -> WorkPuller {
    WorkPuller::start(&[Endpoint::parse("sim://collector/work").unwrap()], client, options, world)
}

fn rows(count: u32) -> Vec<Result<RolloutRow>> {
    let row = |at| {
        Ok(RolloutRow {
            key: TaskKey::new(at, 0),
            agent: "agent".into(),
            server: "env".into(),
            result_type: None,
            row: RawObject::parse(format!(r#"{{"_ng_task_index":{at},"_ng_rollout_index":0,"big": 1E5}}"#)).unwrap(),
        })
    };
    (0..count).map(row).collect()
}

/// Drives rollouts over a dispatch; returns the rows, without what differs between two runs.
async fn drive(
    dispatch: Arc<dyn Dispatch>,
    count: u32,
    options: DriverOptions,
    world: &World,
) -> (BTreeMap<TaskKey, String>, ProgressSnapshot) {
    let ledger = Arc::new(MemoryLedger::new());
    let unused = ServerClient::new(Arc::new(MemoryRegistry::default()), Transports::new(), world);
    let driver = Driver::new(unused, Arc::clone(&ledger) as _, world, options).dispatching_over(dispatch);
    let driver = Arc::new(driver);
    let ended = driver.run(stream::iter(rows(count)), CancelToken::new()).await.unwrap();
    assert_eq!(ended, RunEnd::Exhausted);
    let text = |outcome: Outcome| {
        let (Outcome::Completed(row) | Outcome::Failed { row, .. }) = outcome;
        let edit = row.edit().remove("_gym_episode").remove("_ng_failure_record").remove("_ng_attempt_index");
        String::from_utf8(edit.to_object().unwrap().text().to_vec()).unwrap()
    };
    let outcomes = ledger.take_outcomes().into_iter().map(|(key, outcome)| (key, text(outcome))).collect();
    (outcomes, driver.progress().snapshot())
}

/// Answers each row by its number: a reward, a response with an error status, an error, a rejected reward, or after a while.
fn scripted() -> Arc<dyn Handler> {
    Arc::new(handler_fn(|request: Request| async move {
        let row = request.message.head.to_object()?;
        let task: u32 = row.get_as("_ng_task_index").unwrap().unwrap();
        match task % 6 {
            0 => Err(Error::internal("the tool is broken").with_class(FailureClass::ToolError).about("POST shop/buy")),
            1 => Ok(Response::new(gym_core::Status(422), gym_core::Message::json(r#"{"detail":"no"}"#))),
            2 => Ok(Response::json(row.edit().set("reward", "\"high\"").to_rope())),
            3 => {
                tokio::time::sleep(Duration::from_secs(u64::from(task % 9))).await;
                Ok(Response::json(row.edit().set("reward", "0.5").to_rope()))
            }
            _ => {
                let mut response = Response::json(row.edit().set("reward", "1E0").set("x", "1E5").to_rope());
                response.metadata.push("x-gym-episode", r#"{"turns":3,"tool_calls":2,"tool_failures":0}"#);
                Ok(response)
            }
        }
    }))
}

#[tokio::test(start_paused = true)]
async fn push_and_pull_give_the_same_outcomes() {
    let world = world(1);
    let net = SimNet::new(1, Faults::calm());
    let pushed = serve_env(&net, "w0", scripted(), &world).await;
    let (by_push, progress) = drive(Arc::new(pushed), 120, DriverOptions::default(), &world).await;
    let pool = host_pool(&net, WorkPoolOptions::default(), &world);
    let mut workers = Vec::new();
    for name in ["w1", "w2", "w3"] {
        let client = serve_env(&net, name, scripted(), &world).await;
        workers.push(pull(client, options(name, 8, &world), &world));
    }
    let (by_pull, pulled) = drive(Arc::new(pool.clone()), 120, DriverOptions::default(), &world).await;
    assert_eq!(by_push, by_pull);
    assert_eq!((progress.completed, &progress.failures), (pulled.completed, &pulled.failures));
    let causes = |progress: &ProgressSnapshot| {
        progress.causes.iter().map(|cause| (cause.class, cause.count)).collect::<BTreeMap<_, _>>()
    };
    assert_eq!(causes(&progress), causes(&pulled));
    assert_eq!((pool.snapshot().waiting, pool.snapshot().held, pool.snapshot().late), (0, 0, 0));
}

/// Counts how often each row ran.
fn counting(runs: &Arc<Mutex<BTreeMap<(u32, u32), u32>>>, takes: Duration) -> Arc<dyn Handler> {
    let runs = Arc::clone(runs);
    Arc::new(handler_fn(move |request: Request| {
        let runs = Arc::clone(&runs);
        async move {
            let row = request.message.head.to_object()?;
            let number = |key: &str| row.get_as::<u32>(key).unwrap().unwrap_or(0);
            *runs.lock().entry((number("_ng_task_index"), number("_ng_attempt_index"))).or_default() += 1;
            tokio::time::sleep(takes).await;
            Ok(Response::json(row.edit().set("reward", "1.0").to_rope()))
        }
    }))
}

fn quick() -> WorkPoolOptions {
    let mut queue = WorkQueueOptions::default();
    queue.silence_max = Duration::from_secs(2);
    let mut options = WorkPoolOptions::default();
    options.queue = queue;
    options
}

/// Collects 200 rollouts of a second each over three workers of 8; `disturb` runs after 3 s.
async fn disturbed(
    disturb: impl FnOnce(&SimNet, &mut Vec<WorkPuller>),
) -> (BTreeMap<TaskKey, String>, ProgressSnapshot, Arc<Mutex<BTreeMap<(u32, u32), u32>>>, Duration, WorkPool) {
    let world = world(2);
    let net = SimNet::new(2, Faults::calm());
    let pool = host_pool(&net, quick(), &world);
    let runs = Arc::default();
    let mut workers = Vec::new();
    for name in ["w1", "w2", "w3"] {
        let client = serve_env(&net, name, counting(&runs, Duration::from_secs(1)), &world).await;
        workers.push(pull(client, options(name, 8, &world), &world));
    }
    let mut options = DriverOptions::default();
    options.attempts_max = 1;
    let began = tokio::time::Instant::now();
    let driving = drive(Arc::new(pool.clone()), 200, options, &world);
    tokio::pin!(driving);
    assert!(tokio::time::timeout(Duration::from_millis(3_500), &mut driving).await.is_err());
    disturb(&net, &mut workers);
    let (rows, progress) = driving.await;
    (rows, progress, runs, began.elapsed(), pool)
}

#[tokio::test(start_paused = true)]
async fn the_rollouts_of_a_dead_worker_run_elsewhere_and_nothing_runs_twice() {
    let (undisturbed, ..) = disturbed(|_, _| {}).await;
    let (rows, progress, runs, took, pool) = disturbed(|net, workers| {
        net.crash("w1");
        drop(workers.remove(0));
    })
    .await;
    assert_eq!(rows, undisturbed);
    assert_eq!((progress.completed, progress.given_up), (200, 0), "{progress:?}");
    let lost = progress.failures[&FailureClass::WorkerLost];
    assert!((1..=8).contains(&lost) && progress.failures.len() == 1, "{progress:?}");
    assert!(runs.lock().values().all(|count| *count == 1), "an attempt ran twice");
    // 200 rollouts over 16 places instead of 24.
    assert!(took < Duration::from_secs(15), "{took:?}");
    assert_eq!(pool.snapshot().workers_lost, 1);
}

#[tokio::test(start_paused = true)]
async fn the_rollouts_of_a_silent_worker_run_elsewhere_and_its_responses_are_late() {
    let (rows, progress, runs, _, pool) = disturbed(|net, _| {
        net.cut("w1", "collector");
        net.cut("collector", "w1");
    })
    .await;
    assert_eq!((rows.len(), progress.completed, progress.given_up), (200, 200, 0), "{progress:?}");
    assert!(progress.failures.keys().eq([&FailureClass::WorkerLost]), "{progress:?}");
    assert!(runs.lock().values().all(|count| *count == 1), "an attempt ran twice");
    assert_eq!(pool.snapshot().workers_lost, 1);
}

#[tokio::test(start_paused = true)]
async fn a_row_that_kills_its_workers_is_given_up() {
    let world = world(3);
    let net = SimNet::new(3, Faults::calm());
    let pool = host_pool(&net, quick(), &world);
    let deaths = Arc::new(AtomicUsize::new(0));
    let (killer, pool_of) = (Arc::clone(&deaths), pool.clone());
    // The members' code tells the pool which worker is gone.
    let handler: Arc<dyn Handler> = Arc::new(handler_fn(move |_: Request| {
        killer.fetch_add(1, Ordering::Relaxed);
        pool_of.worker_lost("w1", None, "its process has exited");
        std::future::pending()
    }));
    let client = serve_env(&net, "w1", handler, &world).await;
    let _worker = pull(client, options("w1", 8, &world), &world);
    let mut options = DriverOptions::default();
    options.lost_max = 3;
    let (_, progress) = drive(Arc::new(pool.clone()), 1, options, &world).await;
    assert_eq!((progress.given_up, progress.failures[&FailureClass::WorkerLost]), (1, 3), "{progress:?}");
    assert_eq!(deaths.load(Ordering::Relaxed), 3);
}

fn post(route: &'static str, body: &'static str) -> Request {
    Request::post(CallContext::within(Duration::from_secs(60)), route, body)
}

#[tokio::test(start_paused = true)]
async fn a_verification_of_a_dead_worker_is_handed_to_another() {
    let world = world(4);
    let net = SimNet::new(4, Faults::calm());
    let pool = host_pool(&net, quick(), &world);
    let stuck: Arc<dyn Handler> = Arc::new(handler_fn(|_: Request| std::future::pending()));
    let first = pull(serve_env(&net, "w1", stuck, &world).await, options("w1", 1, &world), &world);
    let request = post("/verify", "{}");
    let verified = pool.submit(WorkKind::Repeatable, "env", &request);
    tokio::pin!(verified);
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut verified).await.is_err());
    assert_eq!((pool.snapshot().waiting, pool.snapshot().held), (0, 1));
    let answers: Arc<dyn Handler> = Arc::new(handler_fn(|_: Request| async { Ok(Response::json(r#"{"reward":1}"#)) }));
    let _second = pull(serve_env(&net, "w2", answers, &world).await, options("w2", 1, &world), &world);
    net.crash("w1");
    drop(first);
    let response = verified.await.unwrap();
    assert_eq!(&response.message.head.to_bytes()[..], br#"{"reward":1}"#);
}

#[tokio::test(start_paused = true)]
async fn a_worker_stops_what_nobody_waits_for() {
    let world = world(5);
    let net = SimNet::new(5, Faults::calm());
    let pool = host_pool(&net, WorkPoolOptions::default(), &world);
    let running = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&running);
    struct Running(Arc<AtomicUsize>);
    impl Drop for Running {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let stuck: Arc<dyn Handler> = Arc::new(handler_fn(move |_: Request| {
        count.fetch_add(1, Ordering::Relaxed);
        let running = Running(Arc::clone(&count));
        async move {
            let _running = running;
            std::future::pending().await
        }
    }));
    let _worker = pull(serve_env(&net, "w1", stuck, &world).await, options("w1", 4, &world), &world);
    let request = post("/run", "{}");
    let left = tokio::time::timeout(Duration::from_secs(1), pool.submit(WorkKind::Rollout, "env", &request)).await;
    assert!(left.is_err());
    assert_eq!(running.load(Ordering::Relaxed), 1);
    tokio::time::timeout(Duration::from_secs(1), async {
        while running.load(Ordering::Relaxed) > 0 {
            tokio::task::yield_now().await;
            tokio::time::advance(Duration::from_millis(1)).await;
        }
    })
    .await
    .expect("the worker is told at once");
}

#[tokio::test(start_paused = true)]
async fn a_deadline_says_whether_the_rollout_has_begun() {
    let world = world(6);
    let net = SimNet::new(6, Faults::calm());
    let pool = host_pool(&net, WorkPoolOptions::default(), &world);
    let request = Request::post(CallContext::within(Duration::from_secs(2)), "/run", "{}");
    let error = pool.submit(WorkKind::Rollout, "env", &request).await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::DeadlineExceeded, Execution::NotStarted), "{error}");
    let stuck: Arc<dyn Handler> = Arc::new(handler_fn(|_: Request| std::future::pending()));
    let _worker = pull(serve_env(&net, "w1", stuck, &world).await, options("w1", 4, &world), &world);
    let request = Request::post(CallContext::within(Duration::from_secs(2)), "/run", "{}");
    let error = pool.submit(WorkKind::Rollout, "env", &request).await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::DeadlineExceeded, Execution::Unknown), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_full_pool_rejects_a_rollout_before_it_begins() {
    let world = world(7);
    let mut queue = WorkQueueOptions::default();
    queue.items_max = 1;
    let mut options = WorkPoolOptions::default();
    options.queue = queue;
    let pool = WorkPool::new(options, &world);
    let (first, second) = (post("/run", "{}"), post("/run", "{}"));
    let waiting = pool.submit(WorkKind::Rollout, "env", &first);
    tokio::pin!(waiting);
    assert!(waiting.as_mut().now_or_never().is_none());
    let error = pool.submit(WorkKind::Rollout, "env", &second).await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::ResourceExhausted, Execution::NotStarted));
    assert!(error.to_string().contains("POST env/run"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_drained_worker_finishes_what_it_has_and_takes_no_more() {
    let world = world(8);
    let net = SimNet::new(8, Faults::calm());
    let pool = host_pool(&net, WorkPoolOptions::default(), &world);
    let runs = Arc::default();
    let client = serve_env(&net, "w1", counting(&runs, Duration::from_secs(10)), &world).await;
    let worker = pull(client, options("w1", 2, &world), &world);
    let driving = drive(Arc::new(pool.clone()), 6, DriverOptions::default(), &world);
    tokio::pin!(driving);
    assert!(tokio::time::timeout(Duration::from_secs(5), &mut driving).await.is_err());
    let (drained, rest) = tokio::join!(
        worker.drain(Duration::from_secs(60)),
        tokio::time::timeout(Duration::from_secs(20), &mut driving)
    );
    assert!(drained && rest.is_err());
    let left = pool.snapshot();
    assert_eq!((left.waiting, left.held, left.workers.len(), left.workers_lost), (4, 0, 0, 0), "{left:?}");
    assert_eq!(runs.lock().len(), 2);
    let client = serve_env(&net, "w2", counting(&runs, Duration::from_secs(10)), &world).await;
    let _worker = pull(client, options("w2", 2, &world), &world);
    let (_, progress) = driving.await;
    assert_eq!((progress.completed, progress.failures.len()), (6, 0), "{progress:?}");
}

#[tokio::test(start_paused = true)]
async fn a_new_pool_at_the_same_address_gets_no_responses_of_the_old_one() {
    let world = world(9);
    let net = SimNet::new(9, Faults::calm());
    let pool = host_pool(&net, quick(), &world);
    let runs = Arc::default();
    let client = serve_env(&net, "w1", counting(&runs, Duration::from_secs(10)), &world).await;
    let _worker = pull(client, options("w1", 4, &world), &world);
    let request = post("/run", r#"{"_ng_task_index":1,"old":true}"#);
    let old = tokio::time::timeout(Duration::from_secs(2), pool.submit(WorkKind::Rollout, "env", &request)).await;
    assert!(old.is_err());
    net.crash("collector");
    drop(pool);
    let pool = host_pool(&net, quick(), &world);
    let request = post("/run", r#"{"_ng_task_index":2}"#);
    let response = pool.submit(WorkKind::Rollout, "env", &request).await.unwrap();
    assert_eq!(&response.message.head.to_bytes()[..], br#"{"_ng_task_index":2,"reward":1.0}"#);
}

#[tokio::test(start_paused = true)]
async fn over_a_network_that_loses_and_resets_every_rollout_is_recorded_once() {
    for seed in 0..30 {
        let world = world(seed);
        let net = SimNet::new(seed, Faults::calm());
        let pool = host_pool(&net, quick(), &world);
        let runs = Arc::default();
        let mut workers = Vec::new();
        for name in ["w1", "w2"] {
            let client = serve_env(&net, name, counting(&runs, Duration::from_millis(700)), &world).await;
            workers.push(pull(client, options(name, 4, &world), &world));
        }
        net.set_faults(Faults::drawn(&mut fastrand::Rng::with_seed(seed)));
        let calm = async {
            tokio::time::sleep(Duration::from_secs(120)).await;
            net.set_faults(Faults::calm());
            std::future::pending::<()>().await
        };
        // The call of a worker's own server may be lost too.
        let attempt_timeout = Duration::from_secs(60);
        let mut options = DriverOptions::default();
        options.lost_max = 1_000;
        options.attempts_max = 1_000;
        options.attempt_timeout = attempt_timeout;
        let driving = drive(Arc::new(pool.clone()), 60, options, &world);
        let (rows, progress) = tokio::select! {
            ended = tokio::time::timeout(Duration::from_secs(7_200), driving) => ended.unwrap_or_else(|_| panic!("seed {seed}: {:?}", pool.snapshot())),
            () = calm => unreachable!("it never ends"),
        };
        assert_eq!((rows.len(), progress.completed, progress.given_up), (60, 60, 0), "seed {seed}: {progress:?}");
        assert_eq!((pool.snapshot().waiting, pool.snapshot().held), (0, 0), "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn two_workers_of_one_name_do_not_share_items() {
    let world = world(10);
    let net = SimNet::new(10, Faults::calm());
    let pool = host_pool(&net, quick(), &world);
    let runs = Arc::default();
    let older = pull(
        serve_env(&net, "w1", counting(&runs, Duration::from_secs(1)), &world).await,
        {
            let mut options = options("w", 4, &world);
            options.incarnation = Incarnation(1);
            options
        },
        &world,
    );
    let newer = pull(
        serve_env(&net, "w2", counting(&runs, Duration::from_secs(1)), &world).await,
        {
            let mut options = options("w", 4, &world);
            options.incarnation = Incarnation(2);
            options
        },
        &world,
    );
    let (_, progress) = drive(Arc::new(pool.clone()), 20, DriverOptions::default(), &world).await;
    assert_eq!((progress.completed, progress.given_up), (20, 0), "{progress:?}");
    assert_eq!(pool.snapshot().workers.len(), 1);
    let (mut older, mut newer) = (older, newer);
    assert!(older.has_ended() && !newer.has_ended());
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_ends_tells_its_workers_and_callers() {
    let world = world(11);
    let net = SimNet::new(11, Faults::calm());
    let pool = host_pool(&net, WorkPoolOptions::default(), &world);
    let stuck: Arc<dyn Handler> = Arc::new(handler_fn(|_: Request| std::future::pending()));
    let mut worker = pull(serve_env(&net, "w1", stuck, &world).await, options("w1", 4, &world), &world);
    let request = post("/run", "{}");
    let waiting = pool.submit(WorkKind::Rollout, "env", &request);
    tokio::pin!(waiting);
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut waiting).await.is_err());
    pool.close();
    assert_eq!(waiting.await.unwrap_err().code(), Code::Cancelled);
    tokio::time::timeout(Duration::from_secs(1), async {
        while !worker.has_ended() {
            tokio::task::yield_now().await;
            tokio::time::advance(Duration::from_millis(1)).await;
        }
    })
    .await
    .expect("the worker is told at once");
    let error = pool.submit(WorkKind::Rollout, "env", &request).await.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::NotStarted));
}

#[tokio::test(start_paused = true)]
async fn a_worker_finds_the_pools_of_a_registry_and_keeps_them_while_it_is_down() {
    let world = world(12);
    let net = SimNet::new(12, Faults::calm());
    let pool = host_pool(&net, WorkPoolOptions::default(), &world);
    let runs = Arc::default();
    let client = serve_env(&net, "w1", counting(&runs, Duration::from_secs(1)), &world).await;
    let registry = Arc::new(MemoryRegistry::default());
    let watch = PoolWatch::start(Arc::clone(&registry) as _, client, options("w1", 4, &world), &world);
    let driving = drive(Arc::new(pool.clone()), 40, DriverOptions::default(), &world);
    tokio::pin!(driving);
    assert!(tokio::time::timeout(Duration::from_secs(5), &mut driving).await.is_err());
    assert_eq!(pool.snapshot().workers.len(), 0, "nothing names the pool yet");
    let endpoint = Endpoint::parse("sim://collector/work").unwrap();
    let mut registration = Registration::new("my_pool", ServerKind::Environment, [endpoint]);
    registration.ttl = Duration::from_secs(3);
    registration.labels.insert(WORK_LABEL.to_owned(), "1".to_owned());
    registry.register(&CallContext::default(), registration).await.unwrap();
    // The registration expires after 3 s, and the rollouts take 10 s.
    let (_, progress) = driving.await;
    assert_eq!((progress.completed, progress.failures.len()), (40, 0), "{progress:?}");
    let began = tokio::time::Instant::now();
    watch.drain(Duration::from_secs(60)).await;
    assert!(began.elapsed() < Duration::from_secs(1), "an idle worker ends at once");
    assert_eq!((pool.snapshot().workers.len(), pool.snapshot().workers_lost), (0, 0));
}

const TIMING: MemberTiming = MemberTiming {
    heartbeat: Duration::from_secs(1),
    timeout: Duration::from_secs(3),
    reconnect: Duration::from_millis(100),
};

const MARGIN_TIMEOUT: Duration = Duration::from_millis(10);

/// A pool that follows a head server, and workers that are members of it.
struct Cluster {
    world: World,
    net: SimNet,
    head: MemoryRegistry,
    pool: WorkPool,
    workers: Vec<WorkPuller>,
    heartbeats: BTreeMap<&'static str, Heartbeats>,
}

/// The heartbeats of a member. Aborting the task breaks the connection.
struct Heartbeats {
    task: tokio::task::JoinHandle<()>,
    frozen: Arc<AtomicBool>,
}

impl Heartbeats {
    fn begin(head: MemoryRegistry, lease: MemberLease) -> Self {
        let frozen = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&frozen);
        let task = tokio::spawn(async move {
            let mut known = MemberState::Joining;
            for seq in 1.. {
                while stopped.load(Ordering::Relaxed) {
                    tokio::time::sleep(MARGIN_TIMEOUT).await;
                }
                let expected = if known == MemberState::Joining { MemberState::Serving } else { known };
                let (lease, round_trip_us) = (lease.clone(), None);
                let heartbeat =
                    Heartbeat { lease, seq, healthy: true, draining: false, round_trip_us, known: expected };
                let Ok(reply) = head.heartbeat(&CallContext::default(), &heartbeat).await else { return };
                known = reply.state;
            }
        });
        Self { task, frozen }
    }
}

impl Cluster {
    fn new(seed: u64) -> Self {
        let (world, net) = (world(seed), SimNet::new(seed, Faults::calm()));
        let head = MemoryRegistry::with_limits(1, MemberLimits::default());
        let pool = host_pool(&net, WorkPoolOptions::default(), &world);
        pool.follow(Arc::new(head.clone()));
        Self { world, net, head, pool, workers: Vec::new(), heartbeats: BTreeMap::new() }
    }

    /// Starts a worker whose rollouts take this long.
    async fn start(&mut self, name: &'static str, takes: Duration) {
        self.start_with(name, takes, TIMING).await;
    }

    async fn start_with(&mut self, name: &'static str, takes: Duration, timing: MemberTiming) {
        let handler: Arc<dyn Handler> = Arc::new(handler_fn(move |_: Request| async move {
            tokio::time::sleep(takes).await;
            Ok(Response::json(format!("\"{name}\"")))
        }));
        let client = serve_env(&self.net, name, handler, &self.world).await;
        let mut spec = MemberSpec::new(name, Incarnation(1));
        spec.timing = timing;
        let endpoint = Endpoint::parse(&format!("sim://{name}/env")).unwrap();
        spec.servers = vec![MemberServer::new("env", ServerKind::Environment, [endpoint])];
        let joined = self.head.join(&CallContext::default(), spec).await.unwrap();
        self.heartbeats.insert(name, Heartbeats::begin(self.head.clone(), joined.lease));
        let mut options = options(name, 4, &self.world);
        options.member = Some(PullingMember { incarnation: Incarnation(1), timing });
        self.workers.push(pull(client, options, &self.world));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    /// Lets the connection of a worker to the pool carry nothing any more, without breaking it.
    fn silence(&self, name: &str) {
        self.net.cut(name, "collector");
        self.net.cut("collector", name);
    }

    async fn run(&self) -> Result<String> {
        let request = post("/run", "{}");
        let response = self.pool.submit(WorkKind::Rollout, "env", &request).await?;
        Ok(String::from_utf8(response.message.head.to_bytes().to_vec()).unwrap())
    }
}

#[tokio::test(start_paused = true)]
async fn the_work_of_a_killed_member_ends_at_once() {
    let mut cluster = Cluster::new(13);
    cluster.start("w1", LONG).await;
    let began = tokio::time::Instant::now();
    let killed = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        // Only the head server sees that its connection has broken.
        cluster.silence("w1");
        cluster.heartbeats["w1"].task.abort();
        tokio::time::Instant::now()
    };
    let (lost, killed) = tokio::join!(cluster.run(), killed);
    let error = lost.unwrap_err();
    assert_eq!((error.code(), error.execution()), (Code::Unavailable, Execution::Unknown), "{error}");
    assert!(error.to_string().contains("w1 is gone: its connection broke"), "{error}");
    assert!(killed - began >= Duration::from_secs(1) && killed.elapsed() <= Duration::from_millis(250));
}

#[tokio::test(start_paused = true)]
async fn a_suspect_member_gets_no_new_work_and_its_work_ends_with_its_timeout() {
    let mut cluster = Cluster::new(14);
    cluster.start("w1", LONG).await;
    let frozen = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        cluster.heartbeats["w1"].frozen.store(true, Ordering::Relaxed);
        let frozen = tokio::time::Instant::now();
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        assert!(cluster.pool.snapshot().workers[0].paused);
        let later = tokio::time::timeout(Duration::from_secs(30), cluster.run());
        assert!(later.await.is_err(), "a member that is suspect or gone gets no work");
        frozen
    };
    let lost = async { (cluster.run().await, tokio::time::Instant::now()) };
    let ((lost, ended), frozen) = tokio::join!(lost, frozen);
    let error = lost.unwrap_err();
    assert!(error.to_string().contains("w1 is gone: no heartbeat for 3.0 s"), "{error}");
    assert!(ended - frozen <= TIMING.timeout + Duration::from_secs(1), "{:?}", ended - frozen);
}

/// One rule for the collector and the head server: a silent member is suspect after two heartbeats, and gone after its timeout.
#[tokio::test(start_paused = true)]
async fn a_member_whose_polls_no_longer_arrive_is_suspect_and_lost_after_its_timeout() {
    let mut cluster = Cluster::new(18);
    let timing = MemberTiming { heartbeat: Duration::from_secs(10), timeout: Duration::from_secs(50), ..TIMING };
    cluster.start_with("w1", LONG, timing).await;
    let suspect = |cluster: &Cluster| cluster.pool.snapshot().workers.first().and_then(|worker| worker.suspect.clone());
    let cut = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        // Its heartbeats arrive at the head server.
        cluster.silence("w1");
        let cut = tokio::time::Instant::now();
        tokio::time::sleep(Duration::from_secs(17)).await;
        assert_eq!(suspect(&cluster), None, "two heartbeats are not over");
        tokio::time::sleep(Duration::from_secs(5)).await;
        let why = suspect(&cluster).expect("suspect");
        assert!(why.contains("the head server hears it: its way to this process is cut; gone in 2"), "{why}");
        cut
    };
    let lost = async { (cluster.run().await, tokio::time::Instant::now()) };
    let ((lost, ended), cut) = tokio::join!(lost, cut);
    let error = lost.unwrap_err();
    assert!(error.to_string().contains("worker w1 was lost: it did not poll in time"), "{error}");
    let took = ended - cut;
    assert!(took > Duration::from_secs(44) && took <= timing.timeout, "{took:?}");
}

/// A restarted head server knows nobody at first.
#[tokio::test(start_paused = true)]
async fn a_worker_that_a_young_head_does_not_list_goes_on() {
    let mut cluster = Cluster::new(19);
    cluster.start("w1", Duration::from_secs(20)).await;
    let restarted = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        // The head server's second life: it does not wait for the members of the first one.
        cluster.pool.follow(Arc::new(MemoryRegistry::with_limits(2, MemberLimits::default())));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(cluster.pool.snapshot().workers[0].paused, "it gets no new work until it has joined again");
    };
    let (run, ()) = tokio::join!(cluster.run(), restarted);
    assert_eq!(run.expect("its result counts"), "\"w1\"");
    assert_eq!(cluster.pool.snapshot().workers_lost, 0);
}

/// A collector that was killed sends no cancellations.
#[tokio::test(start_paused = true)]
async fn a_worker_drops_the_rollouts_of_a_collector_that_is_gone() {
    struct Running(Arc<std::sync::atomic::AtomicUsize>);
    impl Drop for Running {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let (world, net) = (world(21), SimNet::new(21, Faults::calm()));
    let pool = host_pool(&net, WorkPoolOptions::default(), &world);
    let running = Arc::<std::sync::atomic::AtomicUsize>::default();
    let counted = Arc::clone(&running);
    let handler = Arc::new(handler_fn(move |_: Request| {
        counted.fetch_add(1, Ordering::Relaxed);
        let guard = Running(Arc::clone(&counted));
        async move {
            tokio::time::sleep(LONG).await;
            drop(guard);
            Ok(Response::json("{}"))
        }
    }));
    let client = serve_env(&net, "w1", handler, &world).await;
    let _worker = pull(client, options("w1", 4, &world), &world);
    let request = post("/run", "{}");
    let calls = (0..3).map(|_| pool.submit(WorkKind::Rollout, "env", &request));
    let calls = futures_util::future::join_all(calls);
    assert!(tokio::time::timeout(Duration::from_secs(5), calls).await.is_err());
    // Calls that nobody waits for any more are cancelled as well, but this collector cannot say so.
    let request = post("/run", "{}");
    let lost = pool.submit(WorkKind::Rollout, "env", &request);
    tokio::pin!(lost);
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut lost).await.is_err());
    assert_eq!(running.load(Ordering::Relaxed), 1);
    net.crash("collector");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(running.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn finished_items_are_counted_as_long_as_a_worker_polls() {
    let mut cluster = Cluster::new(20);
    cluster.start("w1", MARGIN_TIMEOUT).await;
    for count in 1..=3 {
        cluster.run().await.unwrap();
        tokio::time::sleep(Duration::from_secs(12)).await;
        assert_eq!(cluster.pool.snapshot().workers[0].finished, count);
    }
}

#[tokio::test(start_paused = true)]
async fn a_member_that_returns_gets_work_again() {
    let mut cluster = Cluster::new(15);
    cluster.start("w1", MARGIN_TIMEOUT).await;
    assert_eq!(cluster.run().await.unwrap(), "\"w1\"");
    let frozen = &cluster.heartbeats["w1"].frozen;
    frozen.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    let waits = cluster.run();
    tokio::pin!(waits);
    assert!(tokio::time::timeout(Duration::from_millis(300), &mut waits).await.is_err());
    frozen.store(false, Ordering::Relaxed);
    let run = tokio::time::timeout(Duration::from_millis(100), waits).await.expect("it serves after a heartbeat");
    assert_eq!(run.unwrap(), "\"w1\"");
    assert_eq!(cluster.pool.snapshot().workers_lost, 0);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_is_no_member_gets_work_from_a_pool_that_follows_a_cluster() {
    let cluster = Cluster::new(16);
    let runs = Arc::default();
    let client = serve_env(&cluster.net, "w1", counting(&runs, MARGIN_TIMEOUT), &cluster.world).await;
    let _worker = pull(client, options("w1", 4, &cluster.world), &cluster.world);
    assert!(cluster.run().await.is_ok());
}

/// Whoever reaches the pool of a collector would otherwise get its rows, and could answer them with any reward.
#[tokio::test(start_paused = true)]
async fn a_pool_that_other_machines_reach_gives_work_only_to_members() {
    let mut cluster = Cluster::new(20);
    cluster.pool.admit_only_members();
    cluster.pool.admit("own".to_owned());
    let handler = Arc::new(handler_fn(|_: Request| async { Ok(Response::json("\"no member\"")) }));
    let client = serve_env(&cluster.net, "stranger", handler, &cluster.world).await;
    let mut stranger = pull(client.clone(), options("stranger", 4, &cluster.world), &cluster.world);
    let claims = PullingMember { incarnation: Incarnation(1), timing: TIMING };
    let mut liar = options("liar", 4, &cluster.world);
    liar.member = Some(claims);
    let _liar = pull(client.clone(), liar, &cluster.world);
    assert!(tokio::time::timeout(Duration::from_secs(30), cluster.run()).await.is_err());
    assert!(cluster.pool.snapshot().workers.is_empty() && stranger.has_ended());
    // What a stranger says of another worker's rollouts counts for nothing, and it learns nothing.
    let post = |text: &str| cluster.pool.handle(Request::post(CallContext::default(), "/work/next", text.to_owned()));
    for poll in [
        r#"{"worker":"w1","incarnation":1,"poll":7,"capacity":1,"wait_ms":0}"#,
        r#"{"worker":"w1","incarnation":1,"poll":1,"capacity":1,"wait_ms":0,"leave":true}"#,
        r#"{"worker":"w1","incarnation":1,"poll":1,"queue":5,"capacity":1,"wait_ms":0}"#,
    ] {
        let error = post(poll).await.expect_err("refused");
        assert!(error.to_string().contains("only to members of its cluster"), "{poll}: {error}");
    }
    let _own = pull(client, options("own", 4, &cluster.world), &cluster.world);
    assert_eq!(cluster.run().await.expect("the collector's own worker"), "\"no member\"");
    cluster.start("w1", MARGIN_TIMEOUT).await;
    let workers: Vec<_> = cluster.pool.snapshot().workers.into_iter().map(|worker| worker.name.to_string()).collect();
    assert_eq!(workers, ["own", "w1"]);
    // A restarted head server lists nobody at first.
    cluster.pool.follow(Arc::new(MemoryRegistry::with_limits(2, MemberLimits::default())));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(cluster.pool.snapshot().workers.len(), 2);
}
