//! A member of a cluster is everything at once, with one membership: it serves an agent, takes rollouts, and is a node whose ranks belong to a
//! worker group. When it is killed, both its rollouts and its ranks move. The same for `run --worker` of a program with worker types.
//!
//! No test harness: this executable is its own members, ranks, watchdog and command line, so `Workers::enter()` has to be the first line of `main`.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use futures_util::{FutureExt as _, stream};
use gym_client::collect::ledger::MemoryLedger;
use gym_client::collect::{Driver, DriverOptions, RolloutRow, RunEnd};
use gym_client::registry::RemoteRegistry;
use gym_client::work::{Dispatch, PoolHost, WorkPool, WorkPoolOptions, WorkPullerOptions};
use gym_client::{ServerClient, Transports};
use gym_core::registry::{Member, MemberRegistry, MemberState, MemberTiming};
use gym_core::rollout::{Outcome, TaskKey};
use gym_core::{
    AgentServer, CallContext, CancelToken, Endpoint, RawObject, Response, Result, SessionId, World,
    transport::InProcess,
};
use gym_group::placement::{ClusterSpec, NodeResources};
use gym_group::prelude::*;
use gym_group::{
    Group, GroupOptions, GroupRequest, JOIN_SECRET_VARIABLE, NodeAgent, NodeOptions, Nodes, NodesOptions,
    VirtualCluster, WorkerKind, Workers,
};
use gym_server::stack::{HEAD_NAME, JoinOptions};
use gym_server::{Servers, Stack, StackOptions, cli};
use libtest_mimic::{Arguments, Trial};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};
use tokio::runtime::Runtime;
use tokio::time::{interval, timeout};

const SECRET: &str = "a secret of the test";
const AGENT: &str = "gated";
/// Rollouts that a member runs at a time.
const CAPACITY: u32 = 2;
/// Long enough for a machine that is busy with other builds.
const LEASE: Duration = Duration::from_secs(3);
const LONG: Duration = Duration::from_secs(60);
/// The limit of a case, which says so before the test runner kills it.
const CASE: Duration = Duration::from_secs(100);

struct Rank(WorkerEnv);
worker! {
    impl Worker for Rank as rank {
        fn start(env: WorkerEnv, (): ()) -> Result<Self> { Ok(Self(env)) }
        /// Returns the rank's incarnation.
        shared async fn incarnation(&self, _: &CallContext, _: Payload<()>) -> Result<Payload<u64>> {
            let Self(env) = self;
            Ok(env.incarnation.0.into())
        }
        /// Returns a variable of the rank's process.
        shared async fn variable(&self, _: &CallContext, name: Payload<String>) -> Result<Payload<Option<String>>> {
            Ok(std::env::var(name.value).ok().into())
        }
    }
}

fn workers() -> Workers {
    Workers::new().with("rank", WorkerKind::of::<Rank>())
}

fn main() -> ExitCode {
    workers().enter();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|role| role == "rgym") {
        return cli::main_with(Servers::stock().with_workers(workers()), arguments.into_iter().map(Into::into));
    }
    match &arguments[..] {
        [role, name, head, gate] if role == "be-member" => {
            runtime().block_on(member(name, &Endpoint::parse(head).expect("an endpoint"), gate.into()));
        }
        _ => {
            // Each case has members of its own, which compute.
            let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
            return libtest_mimic::run(&arguments, CASES.map(trial).into()).exit_code();
        }
    }
    ExitCode::SUCCESS
}

type Case = fn() -> LocalBoxFuture<'static, ()>;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime")
}

fn trial((name, case): (&str, Case)) -> Trial {
    Trial::test(name, move || {
        runtime().block_on(async { timeout(CASE, case()).await }).expect("the case ends");
        Ok(())
    })
}

const CASES: [(&str, Case); 2] = [
    ("a_member_is_a_worker_and_a_node_with_one_membership", || {
        a_member_is_a_worker_and_a_node_with_one_membership().boxed_local()
    }),
    ("run_worker_is_a_node_if_it_has_the_secret_and_says_how_otherwise", || {
        run_worker_is_a_node_if_it_has_the_secret_and_says_how_otherwise().boxed_local()
    }),
];

/// Ends an episode when a file appears, so that the test decides how long it takes, and says which member ran it.
struct Gated {
    gate: PathBuf,
    member: String,
}

impl AgentServer for Gated {
    async fn run(&self, _: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
        while !self.gate.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let ran_on = serde_json::json!(self.member).to_string();
        Ok(Response::json(row.edit().set("reward", "1.0").set("ran_on", ran_on).to_rope()))
    }
}

fn transports() -> Transports {
    Transports::from_features(InProcess::new())
}

fn registry(head: &Endpoint) -> RemoteRegistry {
    RemoteRegistry::new(head.clone(), transports(), World::real())
}

/// The process that gets killed: a worker with an agent, and a node. Ends when it is asked to drain.
async fn member(name: &str, head: &Endpoint, gate: PathBuf) {
    let mut node = NodeOptions::new(SECRET);
    (node.name, node.head) = (name.to_owned(), Some(head.clone()));
    node.resources = NodeResources::new(name, 2, Vec::new());
    let node = NodeAgent::listen(workers(), node).await.expect("the node listens");
    let timing =
        MemberTiming { heartbeat: Duration::from_secs(1), timeout: Duration::from_secs(30), ..MemberTiming::default() };
    let mut worker = JoinOptions::new(name);
    worker.timing = timing;
    worker.pulls = true;
    worker.node = Some(node.member_node());
    let mut options = StackOptions::default();
    options.head = Some(head.clone());
    options.join = Some(worker);
    let agent = Gated { gate, member: name.to_owned() };
    let stack =
        Stack::builder().agent(AGENT, move |_| agent).options(options).start().await.expect("the worker starts");
    let mut pull = WorkPullerOptions::new(name, &World::real());
    pull.capacity = CAPACITY;
    let pulled = stack.take_work(Arc::new(registry(head)), pull);
    stack.draining().expect("it is a member").cancelled().await;
    pulled.drain(LONG).await;
    node.released().await;
    stack.stop().await;
    node.stop(LONG).await;
}

fn start_member(name: &str, head: &Endpoint, gate: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("own path"));
    command.args(["be-member", name, head.as_str()]).arg(gate).env_remove("HEAD_SERVER_URL").kill_on_drop(true);
    command.spawn().expect("starts")
}

async fn start_head() -> (Stack, Endpoint) {
    let mut options = StackOptions::default();
    options.only = vec![HEAD_NAME.to_owned()];
    let head = Stack::builder().set("+head_server.port=0").options(options).start().await.expect("the head starts");
    let endpoint = Endpoint::parse(&head.servers()[0].url).expect("an endpoint");
    (head, endpoint)
}

async fn members(head: &RemoteRegistry) -> Vec<Member> {
    head.members(&CallContext::within(LONG)).await.expect("lists")
}

async fn state(head: &RemoteRegistry, name: &str) -> Option<MemberState> {
    members(head).await.into_iter().find(|member| member.spec.name == name).map(|member| member.state)
}

/// Looks until `condition` holds.
async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let mut look = interval(Duration::from_millis(10));
    let came = async {
        while !condition().await {
            look.tick().await;
        }
    };
    timeout(LONG, came).await.unwrap_or_else(|_| panic!("never came: {what}"));
}

fn nodes_of(group: &Group) -> Vec<String> {
    group.worker_status().into_iter().map(|rank| rank.node_name.expect("it is on a node").to_string()).collect()
}

async fn incarnations(group: &Group) -> Vec<u64> {
    group.call(rank::incarnation, ()).deadline(LONG).await.expect("answers").into_values()
}

fn rows(count: u32) -> Vec<Result<RolloutRow>> {
    let row = |at| {
        Ok(RolloutRow {
            key: TaskKey::new(at, 0),
            agent: AGENT.into(),
            server: AGENT.into(),
            result_type: None,
            row: RawObject::parse(format!(r#"{{"_ng_task_index":{at},"_ng_rollout_index":0}}"#))?,
        })
    };
    (0..count).map(row).collect()
}

async fn a_member_is_a_worker_and_a_node_with_one_membership() {
    let folder = tempfile::tempdir().expect("a folder");
    let (gate, world) = (folder.path().join("gate"), World::real());
    let (stack, endpoint) = start_head().await;
    let head = registry(&endpoint);
    let mut first = start_member("gpu-1", &endpoint, &gate);
    let mut second = start_member("gpu-2", &endpoint, &gate);
    until("both members serve", async || {
        members(&head).await.iter().filter(|member| member.state == MemberState::Serving).count() == 2
    })
    .await;
    // One membership each, with the agent and the node.
    for Member { spec, .. } in members(&head).await {
        let servers: Vec<&str> = spec.servers.iter().map(|server| server.name.as_str()).collect();
        assert!(servers.contains(&AGENT) && spec.node.is_some(), "{spec:?}");
    }

    // A group with a rank on each node.
    let mut options = NodesOptions::default();
    options.lease = LEASE;
    let nodes = Nodes::of_cluster(Arc::new(head.clone()), transports(), SECRET).with(options);
    let mut bundles = ClusterSpec::new([1, 1]);
    bundles.use_gpus = false;
    let cluster = VirtualCluster::new(bundles, nodes).expect("valid");
    let options = GroupOptions::new(transports()).restarting(10);
    let request = GroupRequest::new("group", "rank", &(), options).expect("JSON");
    let group = cluster.start(&CallContext::within(LONG), request).await.expect("starts");
    assert_eq!(nodes_of(&group), ["gpu-1", "gpu-2"]);

    // A collector from which both members pull.
    let client = ServerClient::new(Arc::new(head.clone()), transports(), &world);
    client.follow(Arc::new(head.clone()));
    let pool = WorkPool::new(WorkPoolOptions::default(), &world);
    let host = PoolHost::start(pool.clone(), "collector", "127.0.0.1", &client, &world).await.expect("listens");
    let ledger = Arc::new(MemoryLedger::new());
    let dispatch: Arc<dyn Dispatch> = Arc::new(pool.clone());
    let driver = Driver::new(client, Arc::clone(&ledger) as _, &world, DriverOptions::default());
    let driver = Arc::new(driver.dispatching_over(dispatch));
    let driving = tokio::spawn(async move { driver.run(stream::iter(rows(2 * CAPACITY)), CancelToken::new()).await });
    let held = |name: &str| {
        let workers = pool.snapshot().workers;
        workers.iter().find(|worker| &*worker.name == name).map_or(0, |worker| worker.held)
    };
    until("both members run rollouts", async || ["gpu-1", "gpu-2"].map(held) == [CAPACITY as usize; 2]).await;
    assert_eq!(incarnations(&group).await, [1, 1], "the ranks answer meanwhile");

    first.start_kill().expect("kill -9");
    timeout(LONG, first.wait()).await.expect("in time").expect("waits");
    until("the head knows", async || state(&head, "gpu-1").await == Some(MemberState::Gone)).await;
    until("its rollouts are in the queue", async || pool.snapshot().workers_lost == 1).await;
    until("its rank runs on the other node", async || nodes_of(&group) == ["gpu-2"; 2]).await;
    group.ready(&CallContext::within(LONG)).await.expect("serves again");
    assert_eq!(incarnations(&group).await, [2, 1]);
    assert_eq!(held("gpu-2"), CAPACITY as usize, "it runs rollouts meanwhile");
    std::fs::write(&gate, "").expect("writes");
    let ended = timeout(LONG, driving).await.expect("in time").expect("no panic").expect("drives");
    assert_eq!(ended, RunEnd::Exhausted);
    let outcomes = ledger.take_outcomes();
    assert_eq!(outcomes.len(), 2 * CAPACITY as usize);
    for (key, outcome) in outcomes {
        let Outcome::Completed(row) = outcome else { panic!("{key:?} failed: {outcome:?}") };
        assert_eq!(row.get_as::<String>("ran_on").expect("JSON").as_deref(), Some("gpu-2"), "{key:?}");
    }

    // A member that is asked to drain ends when nothing needs it any more: neither a rollout nor a rank.
    head.drain(&CallContext::within(LONG), "gpu-2").await.expect("asks");
    until("it takes no more rollouts", async || pool.snapshot().workers.is_empty()).await;
    assert_eq!(state(&head, "gpu-2").await, Some(MemberState::Draining));
    assert_eq!(incarnations(&group).await, [2, 1], "its ranks go on");
    cluster.shutdown(LONG).await.expect("ends");
    let status = timeout(LONG, second.wait()).await.expect("in time").expect("waits");
    assert!(status.success(), "{status}");
    let left = members(&head).await.into_iter().find(|member| member.spec.name == "gpu-2").expect("listed");
    assert_eq!((left.state, left.reason.as_str()), (MemberState::Gone, "it left"));
    host.end(LONG).await;
    // It follows the members of the head, which would wait for that.
    drop(pool);
    stack.stop().await;
}

/// A process `rgym run --worker` without files, at a head without a configuration.
struct RunWorker {
    child: Child,
    lines: Lines<BufReader<ChildStderr>>,
}

impl RunWorker {
    fn start(name: &str, head: &Endpoint, folder: &Path, secret: Option<&str>) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("own path"));
        command.args(["rgym", "run", "--worker", "--head-url", head.as_str(), "--name", name]).current_dir(folder);
        command.env_remove("HEAD_SERVER_URL").env_remove(JOIN_SECRET_VARIABLE).kill_on_drop(true);
        command.envs(secret.map(|secret| (JOIN_SECRET_VARIABLE, secret))).stderr(Stdio::piped());
        let mut child = command.spawn().expect("starts");
        let lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        Self { child, lines }
    }

    /// Waits for a line of its standard error.
    async fn says(&mut self, part: &str) -> String {
        let said = async {
            while let Some(line) = self.lines.next_line().await.expect("reads") {
                if line.contains(part) {
                    return line;
                }
            }
            panic!("it ended without the line `{part}`");
        };
        timeout(LONG, said).await.unwrap_or_else(|_| panic!("never said: {part}"))
    }
}

async fn run_worker_is_a_node_if_it_has_the_secret_and_says_how_otherwise() {
    let folder = tempfile::tempdir().expect("a folder");
    let (stack, endpoint) = start_head().await;
    let head = registry(&endpoint);
    let mut node = RunWorker::start("gpu-1", &endpoint, folder.path(), Some(SECRET));
    let mut other = RunWorker::start("plain", &endpoint, folder.path(), None);
    assert!(node.says("this worker is a node").await.contains("can start rank here"));
    let said = other.says("offers no node").await;
    assert!(said.contains("GYM_JOIN_SECRET is not set; set it to the secret"), "{said}");
    for worker in [&mut node, &mut other] {
        worker.says("joined the cluster of").await;
    }
    let mut known: Vec<(String, bool)> =
        members(&head).await.into_iter().map(|member| (member.spec.name, member.spec.node.is_some())).collect();
    known.sort();
    assert_eq!(known, [("gpu-1".to_owned(), true), ("plain".to_owned(), false)]);

    let nodes = Nodes::of_cluster(Arc::new(head.clone()), transports(), SECRET);
    let mut bundles = ClusterSpec::new([1]);
    bundles.use_gpus = false;
    let cluster = VirtualCluster::new(bundles, nodes).expect("valid");
    let request = GroupRequest::new("group", "rank", &(), GroupOptions::new(transports())).expect("JSON");
    let group = cluster.start(&CallContext::within(LONG), request).await.expect("starts");
    assert_eq!((nodes_of(&group), incarnations(&group).await), (vec!["gpu-1".to_owned()], vec![1]));
    let secret = group.call(rank::variable, JOIN_SECRET_VARIABLE.to_owned()).deadline(LONG).await.expect("answers");
    assert_eq!(secret.into_values(), [None], "a rank does not know the secret of its node");

    // A worker that drains keeps its ranks until their group has ended.
    head.drain(&CallContext::within(LONG), "gpu-1").await.expect("asks");
    node.says("it ends when no worker group has ranks on it").await;
    assert_eq!(incarnations(&group).await, [1], "its ranks go on");
    cluster.shutdown(LONG).await.expect("ends");
    let status = timeout(LONG, node.child.wait()).await.expect("in time").expect("waits");
    assert!(status.success(), "{status}");
    drop(other);
    stack.stop().await;
}
