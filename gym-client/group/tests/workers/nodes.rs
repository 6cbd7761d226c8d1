//! Ranks on nodes: agents in this process and in processes of their own, which are killed and stopped.
//!
//! `GYM_NODE_KILLS` says how often a node is killed (6 unless set; the long run has 200), `GYM_KILL_SEED` where the seeds begin.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use gym_client::values::{Values, ValuesOptions};
use gym_core::registry::{MemberRegistry, MemoryRegistry};
use gym_core::testing::free_port;
use gym_core::{CallContext, Code, Endpoint, Result};
use gym_group::placement::{ClusterSpec, NodeResources};
use gym_group::{ExitCause, RankState, WorkerGroup, WorkerGroupExt};
use gym_group::{
    Group, GroupOptions, GroupRequest, NodeAgent, NodeEvent, NodeOptions, NodeState, Nodes, NodesOptions, Provisioner,
    Reservation, ReserveRequest, VirtualCluster,
};
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;
use tokio::sync::{Mutex, OnceCell};
use tokio::time::{Instant, sleep, timeout};

use super::failure::named_pids;
use super::ranks::told_as_it_is;
use super::types::{Describe, Init, Sum, workers};
use super::{LONG, alive, freeze, options, pid, signal, spec, state_of, status, stop, transports, until};

const SECRET: &str = "a secret of the tests";
/// Long enough for a machine that is busy with other builds.
const LEASE: Duration = Duration::from_secs(3);

fn node_options(name: &str) -> NodeOptions {
    let mut options = NodeOptions::new(SECRET);
    options.name = name.to_owned();
    options.resources = {
        let mut resources = NodeResources::new(name, 4, Vec::new());
        resources.cpus = Some(4);
        resources
    };
    options.lines = Arc::new(|_, _, _| {});
    options
}

fn controller(agents: Vec<Endpoint>) -> Nodes {
    let mut options = NodesOptions::default();
    options.lease = LEASE;
    options.wait_for_room = Duration::from_secs(1);
    Nodes::at(agents, transports(), SECRET).with(options)
}

/// Two node agents of this process, which start when they are first asked for room.
#[derive(Debug, Default)]
pub(super) struct TwoNodes(OnceCell<(Nodes, Vec<NodeAgent>)>);

#[async_trait]
impl Provisioner for TwoNodes {
    async fn reserve(&self, cx: &CallContext, request: &ReserveRequest) -> Result<Arc<dyn Reservation>> {
        let started = self.0.get_or_try_init(async || {
            let mut agents = Vec::new();
            for name in ["node-a", "node-b"] {
                agents.push(NodeAgent::start(workers(), node_options(name)).await?);
            }
            let endpoints = agents.iter().map(endpoint).collect();
            Ok::<_, gym_core::Error>((controller(endpoints), agents))
        });
        started.await?.0.reserve(cx, request).await
    }
}

fn endpoint(agent: &NodeAgent) -> Endpoint {
    agent.endpoints().last().expect("it listens").clone()
}

/// The process that gets killed: `be-node NAME PORT [HOST]`. Names its endpoint and waits.
pub(crate) async fn agent(arguments: Vec<String>) {
    let [name, port, host @ ..] = &arguments[..] else { panic!("be-node NAME PORT [HOST]") };
    let mut options = node_options(name);
    options.port = port.parse().expect("a port");
    if let [host] = host {
        options.host.clone_from(host);
    }
    let agent = NodeAgent::start(workers(), options).await.expect("starts");
    println!("agent {}", endpoint(&agent));
    std::future::pending().await
}

/// An agent in a process of its own, whose address stays.
struct AgentProcess {
    name: &'static str,
    /// Where the copies of values of this node are.
    values: Arc<TempDir>,
    endpoint: Endpoint,
    child: Child,
}

impl AgentProcess {
    async fn start(name: &'static str) -> Self {
        Self::start_at(name, &free_port().to_string(), Arc::new(tempfile::tempdir().expect("a directory"))).await
    }

    async fn start_at(name: &'static str, port: &str, values: Arc<TempDir>) -> Self {
        let mut child = tokio::process::Command::new(std::env::current_exe().expect("own path"))
            .args(["be-node", name, port])
            .env("GYM_VALUES_DIR", values.path().join("copies"))
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let line = timeout(LONG, lines.next_line()).await.expect("in time").expect("reads").expect("a line");
        let endpoint = Endpoint::parse(line.strip_prefix("agent ").expect("an endpoint")).expect("an endpoint");
        Self { name, values, endpoint, child }
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id().expect("it runs")).expect("fits")
    }

    async fn kill(&mut self) {
        self.child.start_kill().expect("kill -9");
        timeout(LONG, self.child.wait()).await.expect("in time").expect("waits");
    }

    async fn restart(&mut self) {
        let port = self.endpoint.address().rsplit_once(':').expect("a port").1.to_owned();
        *self = Self::start_at(self.name, &port, Arc::clone(&self.values)).await;
    }
}

/// Returns the node of each rank.
fn nodes_of(group: &Group) -> Vec<String> {
    group.worker_status().into_iter().map(|rank| rank.node_name.expect("it is on a node").to_string()).collect()
}

async fn start_on(nodes: &Nodes, ranks: u32, options: GroupOptions) -> Group {
    Group::start(&CallContext::within(LONG), nodes, spec("obedient", ranks), options).await.expect("starts")
}

pub(crate) async fn a_group_spans_nodes_that_joined_a_cluster() {
    let head = MemoryRegistry::new();
    // The agents of this case join over the head's registry as it is; over HTTP, the tests of the cluster do.
    let mut agents = Vec::new();
    for name in ["node-a", "node-b"] {
        agents.push(NodeAgent::start(workers(), node_options(name)).await.expect("starts"));
    }
    let joined = join_by_hand(&head, &agents).await;
    let nodes = Nodes::of_cluster(Arc::new(head), transports(), SECRET);
    let mut bundles = ClusterSpec::new([2, 2]);
    (bundles.use_gpus, bundles.monitor_memory) = (false, true);
    let cluster = VirtualCluster::new(bundles, nodes).expect("valid");
    let cx = CallContext::within(LONG);
    let request = GroupRequest::new("policy", "obedient", &Init::default(), options()).expect("JSON");
    let group = cluster.start(&cx, request).await.expect("starts");
    assert_eq!(nodes_of(&group), ["node-a", "node-a", "node-b", "node-b"]);
    let ranks = group.call(Describe, ()).deadline(LONG).await.expect("answers").into_values();
    let variable = |at: usize, name: &str| ranks[at].variables[name].clone();
    assert_eq!([0, 1, 2, 3].map(|at| variable(at, "NODE_RANK")), ["0", "0", "1", "1"]);
    assert_eq!([0, 1, 2, 3].map(|at| variable(at, "LOCAL_RANK")), ["0", "1", "0", "1"]);
    assert_eq!([0, 1, 2, 3].map(|at| variable(at, "LOCAL_WORLD_SIZE")), ["2"; 4]);
    told_as_it_is(&group, 3, &ranks[3].variables).await;
    let meeting: BTreeSet<_> = (0..4).map(|at| (variable(at, "MASTER_ADDR"), variable(at, "MASTER_PORT"))).collect();
    assert_eq!(meeting.len(), 1, "one rendezvous: {meeting:?}");
    assert_eq!(variable(0, "AVAILABLE_PORT_LIST").split(',').count(), 4);
    let states: Vec<NodeState> = cluster.nodes(&cx).await.expect("placed").into_iter().map(|node| node.state).collect();
    assert_eq!(states, [NodeState::Serving, NodeState::Serving]);
    until("usage arrives", || group.resource_usage().iter().all(|rank| rank.host.is_some())).await;
    until_sampled(&cluster, &cx).await;
    cluster.shutdown(LONG).await.expect("ends");
    drop(joined);
    for agent in agents {
        agent.stop(LONG).await;
    }
}

/// Waits until the agents of all nodes have reported the usage of their machine.
async fn until_sampled(cluster: &VirtualCluster, cx: &CallContext) {
    let sampled = async {
        loop {
            let nodes = cluster.nodes(cx).await.expect("placed");
            let usage: Vec<_> = nodes.into_iter().filter_map(|node| node.usage).collect();
            if usage.len() == 2 {
                return usage;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    for usage in timeout(LONG, sampled).await.expect("the agents report their usage") {
        assert!(usage.available_bytes_min > 0 && usage.available_bytes <= usage.memory_bytes, "{usage:?}");
    }
}

/// Joins members that run these agents, and keeps them.
async fn join_by_hand(head: &MemoryRegistry, agents: &[NodeAgent]) -> Vec<gym_client::registry::MemberKeeper> {
    let mut keepers = Vec::new();
    for (number, agent) in (1..).zip(agents) {
        let mut spec = gym_core::registry::MemberSpec::new(format!("member-{number}"), gym_core::Incarnation(number));
        spec.node = Some(agent.member_node());
        let (cx, world) = (CallContext::within(LONG), gym_core::World::real());
        let keeper = gym_client::registry::MemberKeeper::join(
            Arc::new(head.clone()),
            &cx,
            spec,
            gym_client::registry::MemberOptions::default(),
            &world,
        );
        keepers.push(keeper.await.expect("joins"));
    }
    let serve = async {
        while head
            .members(&CallContext::default())
            .await
            .expect("lists")
            .iter()
            .any(|member| member.state != gym_core::registry::MemberState::Serving)
        {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, serve).await.expect("they serve");
    keepers
}

pub(crate) async fn a_node_starts_nothing_for_strangers() {
    let mut unsafe_options = node_options("node-a");
    unsafe_options.secret = " ".to_owned();
    let error = NodeAgent::start(workers(), unsafe_options).await.expect_err("no secret");
    assert!(error.to_string().contains("join secret is empty"), "{error}");
    let agent = NodeAgent::start(workers(), node_options("node-a")).await.expect("starts");
    let mut options = NodesOptions::default();
    options.wait_for_room = Duration::ZERO;
    let stranger = Nodes::at(vec![endpoint(&agent)], transports(), "guessed").with(options);
    let error = stranger.reserve(&CallContext::within(LONG), &ReserveRequest::for_ranks(1)).await.expect_err("refused");
    assert!(error.to_string().contains("join secret is missing or wrong"), "{error}");
    agent.stop(LONG).await;
}

pub(crate) async fn what_one_controller_holds_no_other_gets() {
    let agent = NodeAgent::start(workers(), node_options("node-a")).await.expect("starts");
    let nodes = controller(vec![endpoint(&agent)]);
    let bundles = |count| {
        let mut bundles = ClusterSpec::new([count]);
        bundles.use_gpus = false;
        ReserveRequest::new(bundles)
    };
    let cx = CallContext::within(LONG);
    let first = nodes.reserve(&cx, &bundles(3)).await.expect("4 CPUs are free");
    let error = nodes.reserve(&cx, &bundles(2)).await.expect_err("1 CPU is free");
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().contains("2 CPUs are asked for, 1 are there"), "{error}");
    nodes.reserve(&cx, &bundles(1)).await.expect("that one").release(LONG).await.expect("releases");
    first.release(LONG).await.expect("releases");
    nodes.reserve(&cx, &bundles(4)).await.expect("all are free again");
    agent.stop(LONG).await;
}

pub(crate) async fn each_node_fetches_a_large_input_once_for_its_ranks() {
    let (a, b) = (AgentProcess::start("node-a").await, AgentProcess::start("node-b").await);
    let mut bundles = ClusterSpec::new([3, 3]);
    bundles.use_gpus = false;
    let nodes = controller(vec![a.endpoint.clone(), b.endpoint.clone()]);
    let cluster = VirtualCluster::new(bundles, nodes).expect("valid");
    let cx = CallContext::within(LONG);
    let request = GroupRequest::new("policy", "obedient", &Init::default(), options().restarting(3)).expect("JSON");
    let group = cluster.start(&cx, request).await.expect("starts");
    let mut own = ValuesOptions::default();
    own.lease = Duration::from_secs(1);
    let values = Values::new(transports(), own);
    let bytes: Vec<u8> = (0..10_000_000_u32).map(|at| u8::try_from(at % 251).unwrap_or(0)).collect();
    let sum: u64 = bytes.iter().map(|byte| u64::from(*byte)).sum();
    let held = values.put("inputs", bytes).await.expect("held");
    let sums = async || group.call(Sum, held.reference().clone()).deadline(LONG).await.expect("answers").into_values();
    assert_eq!(sums().await, [sum; 6]);
    assert_eq!(held.fetches(), 2, "once for each node");
    let old = pid(&group, 0);
    signal(old, Signal::KILL);
    until("rank 0 is back", || {
        let ranks = group.worker_status();
        ranks[0].incarnation.0 == 2 && ranks.iter().all(|rank| rank.state == RankState::Healthy)
    })
    .await;
    assert_eq!(sums().await, [sum; 6]);
    assert_eq!(held.fetches(), 2, "a restarted rank finds the copy of its node");
    let gone = held.reference().clone();
    held.release();
    let refused = async {
        loop {
            match group.call(Sum, gone.clone()).deadline(LONG).await {
                Ok(_) => sleep(Duration::from_millis(50)).await,
                Err(error) => return error,
            }
        }
    };
    let error = timeout(LONG, refused).await.expect("the leases of the copies end");
    let error = gym_core::Error::from(error);
    assert_eq!(error.code(), Code::NotFound, "{error}");
    assert!(error.to_string().contains("value `inputs`"), "{error}");
    cluster.shutdown(LONG).await.expect("ends");
}

pub(crate) async fn ranks_of_a_killed_node_restart_elsewhere_after_its_lease() {
    let (mut a, b) = (AgentProcess::start("node-a").await, AgentProcess::start("node-b").await);
    let nodes = controller(vec![a.endpoint.clone(), b.endpoint.clone()]);
    let mut bundles = ClusterSpec::new([2, 2]);
    bundles.use_gpus = false;
    let cluster = VirtualCluster::new(bundles, nodes).expect("valid");
    let cx = CallContext::within(LONG);
    let request = GroupRequest::new("policy", "obedient", &Init::default(), options().restarting(3)).expect("JSON");
    let group = cluster.start(&cx, request).await.expect("starts");
    let mut events = cluster.node_events(&cx).await.expect("placed");
    let before = group.call(Describe, ()).deadline(LONG).await.expect("answers").into_values();
    let (old, killed) = (pid(&group, 0), Instant::now());
    a.kill().await;
    until("rank 0 ends with its node", || {
        let exit = group.view().borrow().member(0).and_then(|member| member.exit.clone());
        exit.is_some_and(|exit| {
            assert!(exit.to_string().contains("node-a is lost"), "{exit}");
            exit.cause == ExitCause::NodeLost
        })
    })
    .await;
    until("all serve on the other node", || {
        nodes_of(&group) == ["node-b"; 4] && group.worker_status().iter().all(|rank| rank.state == RankState::Healthy)
    })
    .await;
    assert!(killed.elapsed() >= LEASE - Duration::from_secs(1), "the old ranks could have been alive");
    assert!(!alive(old), "an orphan");
    let after = group.call(Describe, ()).deadline(LONG).await.expect("answers").into_values();
    assert_eq!(after.iter().map(|rank| rank.incarnation).collect::<Vec<_>>(), [2, 2, 1, 1]);
    assert_ne!(after[0].variables["AVAILABLE_PORT_LIST"], before[0].variables["AVAILABLE_PORT_LIST"], "met anew");
    let mut seen = Vec::new();
    while !matches!(seen.last(), Some(NodeEvent::Moved { .. })) {
        seen.push(timeout(LONG, events.next()).await.expect("in time").expect("an event"));
    }
    let lost = |event: &NodeEvent| matches!(event, NodeEvent::Lost { node, .. } if node == "node-a");
    assert!(seen.iter().any(lost), "{seen:?}");
    assert_eq!(
        seen.last(),
        Some(&NodeEvent::Moved { from: "node-a".to_owned(), to: vec!["node-b".to_owned()] }),
        "{seen:?}"
    );
    stop(&group).await;
}

pub(crate) async fn ranks_of_a_stopped_node_are_dead_before_others_start() {
    let (a, b) = (AgentProcess::start("node-a").await, AgentProcess::start("node-b").await);
    let nodes = controller(vec![a.endpoint.clone(), b.endpoint.clone()]);
    let group = start_on(&nodes, 2, options().restarting(3)).await;
    assert_eq!(nodes_of(&group), ["node-a", "node-b"]);
    let old = pid(&group, 0);
    freeze(a.pid()).await;
    until("the rank of the stopped node runs elsewhere", || {
        if status(&group, 0).incarnation.0 == 2 && status(&group, 0).pid.is_some() {
            assert!(!alive(old), "two incarnations of rank 0 are alive");
        }
        nodes_of(&group) == ["node-b"; 2] && status(&group, 0).state == RankState::Healthy
    })
    .await;
    // The agent goes on, and finds that its session is over.
    signal(a.pid(), Signal::CONT);
    let cx = CallContext::within(LONG);
    let again = controller(vec![a.endpoint.clone()]);
    until_reserved(&again, &cx).await;
    stop(&group).await;
}

/// `.ci/nodes` names two agents in `GYM_TEST_NODES`, each in a network of its own, and in `GYM_TEST_CUT` the command that cuts the node `n2` off.
pub(crate) async fn ranks_on_two_nodes_meet_and_name_one_that_is_cut_off() {
    let (Ok(agents), Ok(cut)) = (std::env::var("GYM_TEST_NODES"), std::env::var("GYM_TEST_CUT")) else {
        println!("NOT RUN: no node with a network of its own (`.ci/test nodes` makes two)");
        return;
    };
    let agents = agents.split(' ').map(|agent| Endpoint::parse(agent).expect("an endpoint")).collect();
    let cut_off = |node: &str| {
        assert_eq!(node, "n2");
        assert!(std::process::Command::new("sh").args(["-c", &cut]).status().expect("starts").success());
    };
    super::collectives::ranks_meet_over_machines(controller(agents), cut_off).await;
}

/// Waits until an agent has free CPUs again.
async fn until_reserved(nodes: &Nodes, cx: &CallContext) {
    let mut bundles = ClusterSpec::new([4]);
    bundles.use_gpus = false;
    while nodes.reserve(cx, &ReserveRequest::new(bundles.clone())).await.is_err() {
        cx.check().expect("the agent is free in time");
    }
}

pub(crate) async fn a_node_without_its_controller_ends_its_ranks() {
    let a = AgentProcess::start("node-a").await;
    let mut controller = tokio::process::Command::new(std::env::current_exe().expect("own path"))
        .args(["be-controller", a.endpoint.as_str()])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("starts");
    let pids = named_pids(&mut controller, 2).await;
    assert!(pids.iter().all(|pid| alive(*pid)));
    controller.start_kill().expect("kill -9");
    until("the ranks end with the lease", || !pids.iter().any(|pid| alive(*pid))).await;
    assert!(alive(a.pid()), "the agent lives on");
}

/// The controller that gets killed.
pub(crate) async fn doomed_controller(agent: &str) {
    let nodes = controller(vec![Endpoint::parse(agent).expect("an endpoint")]);
    let group = start_on(&nodes, 2, options()).await;
    (0..2).for_each(|rank| println!("pid {}", pid(&group, rank)));
    std::future::pending().await
}

/// The living worker processes of this test's group, by rank: the pids of each.
pub(super) fn living_ranks(mark: &str) -> BTreeMap<u64, Vec<i32>> {
    let mut ranks: BTreeMap<u64, Vec<i32>> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").expect("lists").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let Ok(environment) = std::fs::read(entry.path().join("environ")) else { continue };
        let variable = |name: &str| {
            let found = environment.split(|byte| *byte == 0).find_map(|pair| pair.strip_prefix(name.as_bytes()));
            found.map(|value| String::from_utf8_lossy(value).into_owned())
        };
        if variable("GYM_TEST_MARK=").as_deref() != Some(mark) || !is_running(pid) {
            continue;
        }
        // The shim has the same environment until it becomes the worker.
        if let Some(rank) = variable("RANK=").and_then(|rank| rank.parse().ok()) {
            ranks.entry(rank).or_default().push(pid);
        }
    }
    ranks
}

/// Looks all the time whether a rank is alive twice, and panics then.
pub(super) fn watch_lives(mark: String) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        let mut looks = 0_u64;
        loop {
            let seen = mark.clone();
            let ranks = tokio::task::spawn_blocking(move || living_ranks(&seen)).await.expect("looks");
            if let Some((rank, pids)) = ranks.iter().find(|(_, pids)| pids.len() > 1) {
                panic!("rank {rank} is alive {} times: {pids:?}", pids.len());
            }
            looks += 1;
            if looks.is_multiple_of(1_000) {
                println!("  {looks} looks, no rank was alive twice");
            }
            sleep(Duration::from_millis(2)).await;
        }
    })
}

/// A stopped process is dead for this purpose only if it never runs again.
fn is_running(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state_of(&stat).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

pub(crate) async fn killed_nodes_leave_no_orphan_and_no_second_incarnation() {
    let number =
        |name: &str, otherwise: u64| std::env::var(name).map_or(otherwise, |text| text.parse().expect("a number"));
    let (kills, first_seed) = (number("GYM_NODE_KILLS", 6), number("GYM_KILL_SEED", 1));
    let agents = [AgentProcess::start("node-a").await, AgentProcess::start("node-b").await];
    let nodes = controller(agents.iter().map(|agent| agent.endpoint.clone()).collect());
    let agents = Arc::new(Mutex::new(agents));
    let mut spec = spec("obedient", 4);
    let mark = format!("{:016x}", fastrand::u64(..));
    spec.variables.insert("GYM_TEST_MARK".to_owned(), mark.clone());
    let budget = u32::try_from(kills * 4 + 4).expect("fits");
    let group =
        Group::start(&CallContext::within(LONG), &nodes, spec, options().restarting(budget)).await.expect("starts");
    let watcher = watch_lives(mark.clone());
    println!("kill  seed  node    how              lost after  serving after");
    for kill in 0..kills {
        let seed = first_seed + kill;
        let mut random = fastrand::Rng::with_seed(seed);
        sleep(Duration::from_millis(random.u64(0..300))).await;
        let drawn = random.usize(0..2);
        // A node without ranks shows nothing.
        let which =
            if nodes_of(&group).iter().any(|node| node == ["node-a", "node-b"][drawn]) { drawn } else { 1 - drawn };
        let (name, how) = (["node-a", "node-b"][which], ["killed", "killed, returns", "stopped"][random.usize(0..3)]);
        let lives: Vec<_> = group.worker_status().into_iter().map(|rank| (rank.rank, rank.incarnation)).collect();
        let hit: Vec<_> =
            nodes_of(&group).iter().zip(&lives).filter(|(node, _)| *node == name).map(|(_, life)| *life).collect();
        let began = Instant::now();
        {
            let mut agents = agents.lock().await;
            match how {
                "stopped" => freeze(agents[which].pid()).await,
                "killed" => agents[which].kill().await,
                _ => {
                    agents[which].kill().await;
                    agents[which].restart().await;
                }
            }
        }
        until("the exits are known", || {
            hit.iter().all(|(rank, life)| {
                let now = status(&group, *rank);
                now.incarnation > *life || now.state == RankState::Dead || now.state == RankState::Restarting
            })
        })
        .await;
        let lost = began.elapsed();
        until("all serve again", || {
            hit.iter().all(|(rank, life)| {
                let now = status(&group, *rank);
                now.incarnation > *life && now.state == RankState::Healthy
            })
        })
        .await;
        let serving = began.elapsed();
        println!(
            "{:>4}  {seed:>4}  {name}  {how:<15}  {:>7} ms  {:>10} ms  {} ranks",
            kill + 1,
            lost.as_millis(),
            serving.as_millis(),
            hit.len()
        );
        // Those that were not hit, too: on a busy machine, a rank may be found silent for a moment.
        until("all ranks serve", || group.worker_status().iter().all(|rank| rank.state == RankState::Healthy)).await;
        let answered = group.call(Describe, ()).deadline(LONG).await.unwrap_or_else(|error| {
            let ends = group.worker_status().into_iter().map(|rank| (rank.rank, rank.incarnation, rank.last_error));
            panic!("seed {seed}: {error}; {:?}", ends.collect::<Vec<_>>())
        });
        assert_eq!(answered.into_values().len(), 4, "seed {seed}");
        let mut agents = agents.lock().await;
        match how {
            "stopped" => signal(agents[which].pid(), Signal::CONT),
            "killed" => agents[which].restart().await,
            _ => {}
        }
        assert!(!watcher.is_finished(), "seed {seed}: a rank was alive twice");
    }
    stop(&group).await;
    drop(group);
    until("no rank is left", || living_ranks(&mark).is_empty()).await;
    if watcher.is_finished() {
        watcher.await.expect("no rank was alive twice");
    } else {
        watcher.abort();
    }
}
