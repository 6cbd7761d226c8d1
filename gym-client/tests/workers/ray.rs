//! Ranks on a real Ray cluster, whose nodes are network namespaces: `.ci/ray.py` starts it, and these cases with it. Without it they say so.
//!
//! The numbers in the names are those of the cases in `docs/conformance-ray.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gym_client::group::ray::{Ray, RayAddress, RayDashboard, RayOptions};
use gym_client::group::{
    Group, GroupOptions, GroupRequest, NodesOptions, Provisioner, Reservation, ReserveRequest, VirtualCluster,
};
use gym_core::group::cluster::{ClusterSpec, PlacementStrategy};
use gym_core::group::{RankState, WorkerGroupExt};
use gym_core::{CallContext, Code, Result};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::AsyncBufReadExt as _;
use tokio::time::{Instant, sleep, timeout};

use super::types::{Describe, Init, workers};
use super::{LONG, options, signal, spec, status, stop, transports, until};

/// Shorter than Ray's detection of a lost node, even of a cluster with short intervals.
const LEASE: Duration = Duration::from_secs(3);
/// The command line of an agent contains it.
const AGENT: &str = "--gym-node-agent";

/// Returns the address of the cluster, or says that there is none.
fn cluster_address() -> Option<RayAddress> {
    match std::env::var("GYM_RAY_TEST_ADDRESS") {
        Ok(address) => Some(RayAddress::parse(&address, "GYM_RAY_TEST_ADDRESS").expect("an address")),
        Err(_) => {
            println!("  skipped: no Ray cluster (`.ci/test ray` starts one)");
            None
        }
    }
}

fn ray_options() -> RayOptions {
    let mut options = RayOptions::default();
    // The nodes share the files of this machine, and a test with debug information is large.
    options.program = Some(std::env::current_exe().expect("own path"));
    options.placement_timeout = Duration::from_secs(20);
    options.placement_attempts = 1;
    options.nodes = NodesOptions::default();
    options.nodes.lease = LEASE;
    options.nodes.wait_for_room = LONG;
    options
}

fn ray(address: RayAddress, options: RayOptions) -> Ray {
    Ray::at(address, workers()).with(options)
}

/// The provisioner of all cases with `GYM_WORKERS_ON=ray`.
#[derive(Debug)]
pub(super) struct OnRay;

#[async_trait]
impl Provisioner for OnRay {
    async fn reserve(&self, cx: &CallContext, request: &ReserveRequest) -> Result<Arc<dyn Reservation>> {
        let address = cluster_address().expect("GYM_WORKERS_ON=ray needs a cluster");
        ray(address, ray_options()).reserve(cx, request).await
    }
}

/// Asks the program that runs the cluster to do something with it.
fn control(request: &Value) -> Value {
    let path = std::env::var("GYM_RAY_TEST_CONTROL").expect("a cluster");
    let mut stream = UnixStream::connect(path).expect("the program that runs the cluster");
    stream.set_read_timeout(Some(2 * LONG)).expect("a timeout");
    writeln!(stream, "{request}").expect("sends");
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).expect("a reply");
    let reply: Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(reply["ok"], true, "{request}: {reply}");
    reply
}

/// Returns the processes of a node with this argument.
fn processes(node: &str, argument: &str) -> Vec<i32> {
    let reply = control(&json!({"do": "list_processes", "node": node, "containing": argument}));
    let all = reply["processes"].as_array().expect("a list").clone();
    let named = |process: &&Value| {
        process["command"].as_str().expect("a text").split(' ').any(|given| given.starts_with(argument))
    };
    let pid = |process: &Value| i32::try_from(process["pid"].as_i64().expect("a pid")).expect("fits");
    all.iter().filter(named).map(pid).collect()
}

fn addresses() -> BTreeMap<String, String> {
    let reply = control(&json!({"do": "nodes"}));
    let nodes = reply["nodes"].as_array().expect("a list").clone();
    let text = |node: &Value, key: &str| node[key].as_str().expect("a text").to_owned();
    nodes.iter().map(|node| (text(node, "ip"), text(node, "name"))).collect()
}

/// Returns the name, as the cluster's program has it, of the node of each rank.
fn nodes_of(group: &Group) -> Vec<String> {
    let addresses = addresses();
    let node = |name: &str| addresses[name.split_once('@').expect("share@address").1].clone();
    group.worker_status().iter().map(|rank| node(rank.node_name.as_deref().expect("it is on a node"))).collect()
}

async fn no_process_of_ours_within(limit: Duration, what: &str) {
    let begin = Instant::now();
    loop {
        let left: Vec<_> = ["n1", "n2"].iter().flat_map(|node| processes(node, "--gym-")).collect();
        if left.is_empty() {
            println!("    {what}: no process of ours after {:.2} s", begin.elapsed().as_secs_f64());
            return;
        }
        assert!(begin.elapsed() < limit, "{what}: {left:?} are left");
        sleep(Duration::from_millis(50)).await;
    }
}

fn cluster(spec: ClusterSpec, address: &RayAddress) -> VirtualCluster {
    VirtualCluster::new(spec, ray(address.clone(), ray_options())).expect("valid")
}

fn request(options: GroupOptions) -> GroupRequest {
    GroupRequest::new("policy", "obedient", &Init::default(), options).expect("JSON")
}

fn cx() -> CallContext {
    CallContext::within(2 * LONG)
}

async fn start(cluster: &VirtualCluster, options: GroupOptions) -> Group {
    let begin = Instant::now();
    let group = cluster.start(&cx(), request(options)).await.expect("starts");
    println!("    {} ranks registered after {:.2} s", group.worker_status().len(), begin.elapsed().as_secs_f64());
    group
}

fn spread(counts: &[u32]) -> ClusterSpec {
    let mut spec = ClusterSpec::new(counts);
    spec.placement_group_strategy = PlacementStrategy::StrictSpread;
    spec
}

/// Cases 11, 14 and 19: two shares on two nodes, each rank with its own GPU; the same in Ray's own list.
pub(crate) async fn ray_r11_bundles_spread_over_nodes_and_each_rank_has_its_gpu() {
    let Some(address) = cluster_address() else { return };
    let cluster = cluster(spread(&[4, 4]), &address);
    let group = start(&cluster, options()).await;
    let nodes = nodes_of(&group);
    assert_eq!(nodes.iter().collect::<BTreeSet<_>>().len(), 2, "{nodes:?}");
    let ranks = group.call(Describe, ()).deadline(LONG).await.expect("answers").into_values();
    let variables = |name: &str| ranks.iter().map(|rank| rank.variables[name].clone()).collect::<Vec<_>>();
    assert_eq!(variables("RANK"), ["0", "1", "2", "3", "4", "5", "6", "7"]);
    assert_eq!(variables("LOCAL_RANK"), ["0", "1", "2", "3", "0", "1", "2", "3"]);
    let gpus: BTreeSet<_> = nodes.iter().zip(variables("CUDA_VISIBLE_DEVICES")).collect();
    assert_eq!(gpus.len(), 8, "no two ranks of a node have one GPU: {gpus:?}");
    assert_eq!(variables("MASTER_ADDR").iter().collect::<BTreeSet<_>>().len(), 1);
    // Nor do they know the token of the cluster and the join secret of their node.
    let secret = |name: &String| ["RAY_", "GYM_RAY_", "GYM_NODE_"].iter().any(|prefix| name.starts_with(prefix));
    assert!(!ranks[0].variables.keys().any(secret), "{:?}", ranks[0].variables);
    // Ray knows of it as a job with a readable name.
    let (dashboard, _) = RayDashboard::connect(&cx(), &address).await.expect("connects");
    let jobs = dashboard.jobs(&cx()).await.expect("lists");
    let ours: Vec<_> = jobs.iter().filter(|job| job.status == "RUNNING" && job.metadata.is_some()).collect();
    assert_eq!(ours.len(), 1, "{jobs:?}");
    assert!(ours[0].metadata.as_ref().expect("metadata")["name"].starts_with("workers"), "{ours:?}");
    // Ray reports usage with a delay of seconds.
    let used = async { while dashboard.usage(&cx()).await.expect("usage").get("GPU") != Some(&(8.0, 8.0)) {} };
    timeout(LONG, used).await.expect("all GPUs are in use");
    stop(&group).await;
    // Case 22.
    let begin = Instant::now();
    cluster.shutdown(Duration::from_secs(2)).await.expect("stops");
    println!("    stopped after {:.2} s", begin.elapsed().as_secs_f64());
    cluster.shutdown(Duration::from_secs(2)).await.expect("nothing to do");
    no_process_of_ours_within(Duration::from_secs(1), "after the stop").await;
    let job =
        dashboard.job(&cx(), ours[0].submission_id.as_deref().expect("an id")).await.expect("asks").expect("known");
    assert!(job.has_ended(), "{job:?}");
}

/// Case 12: what fits one node is packed on one.
pub(crate) async fn ray_r12_bundles_are_packed_on_one_node() {
    let Some(address) = cluster_address() else { return };
    let mut spec = ClusterSpec::new([1, 1]);
    spec.placement_group_strategy = PlacementStrategy::Pack;
    let cluster = cluster(spec, &address);
    let group = start(&cluster, options()).await;
    assert_eq!(nodes_of(&group).into_iter().collect::<BTreeSet<_>>().len(), 1);
    stop(&group).await;
    cluster.shutdown(Duration::from_secs(2)).await.expect("stops");
}

/// Cases 13 and 15: what no node can have is an error that says what was requested and what there is.
pub(crate) async fn ray_r13_what_cannot_be_placed_is_explained() {
    let Some(address) = cluster_address() else { return };
    let refused = async |spec: ClusterSpec, options: RayOptions| {
        let begin = Instant::now();
        let cluster = VirtualCluster::new(spec, ray(address.clone(), options)).expect("valid");
        let error = cluster.start(&cx(), request(super::options())).await.expect_err("there is no room");
        let text = error.to_string();
        println!("    after {:.1} s: {}", begin.elapsed().as_secs_f64(), text.lines().next().expect("a line"));
        assert_eq!(error.code(), Code::ResourceExhausted, "{text}");
        assert!(text.contains("reserve bundles on the Ray cluster") && text.contains("fix: "), "{text}");
        text
    };
    for (spec, why) in
        [(spread(&[1, 1, 1]), "one by one"), (ClusterSpec::new([16]), "16 GPUs are asked for, 8 are there")]
    {
        let text = refused(spec, ray_options()).await;
        assert!(text.contains(why) && text.contains("10.88.0.11 has 4 CPUs, 4 simulated GPUs"), "{text}");
    }
    let mut waits = ray_options();
    (waits.wait_if_infeasible, waits.placement_timeout) = (true, Duration::from_secs(3));
    let text = refused(spread(&[1, 1, 1]), waits).await;
    assert!(
        text.contains("3 × 1 CPU and 1 GPU with STRICT_SPREAD") && text.contains("10.88.0.11 has 4 CPU, 4 GPU"),
        "{text}"
    );
    let mut disks = ray_options();
    disks.resources.insert("disk".to_owned(), 1.0);
    let text = refused(spread(&[1]), disks).await;
    assert!(text.contains("1 CPU and 1 GPU and 1 disk") && text.contains("no node can ever have them"), "{text}");
    no_process_of_ours_within(Duration::from_secs(5), "after the failures").await;
}

/// Case 16: a program that cannot be executed is reported with the error of the operating system.
pub(crate) async fn ray_r16_a_program_that_cannot_run_is_reported() {
    let Some(address) = cluster_address() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("program");
    std::fs::write(&program, "no program").expect("writes");
    for (mode, expected) in [(0o644, "Permission denied"), (0o755, "Exec format error")] {
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(mode)).expect("sets");
        let mut options = ray_options();
        options.program = Some(program.clone());
        options.max_restarts = 1;
        let error = ray(address.clone(), options).reserve(&cx(), &ReserveRequest::for_ranks(1)).await;
        let text = error.expect_err("it cannot run").to_string();
        assert!(text.contains(expected) && text.contains("program"), "{text}");
    }
    // A program that does not call `Workers::enter`.
    let mut options = ray_options();
    options.program = Some("/bin/false".into());
    options.max_restarts = 0;
    let error = ray(address, options).reserve(&cx(), &ReserveRequest::for_ranks(1)).await;
    let text = error.expect_err("it cannot run").to_string();
    assert!(text.contains("exited with status 1"), "{text}");
}

/// Case 24: a killed rank restarts without Ray.
pub(crate) async fn ray_r24_a_killed_rank_restarts_without_ray() {
    let Some(address) = cluster_address() else { return };
    let cluster = cluster(spread(&[1, 1]), &address);
    let mut options = options();
    options.restart_on_failure = true;
    let group = start(&cluster, options).await;
    let begin = Instant::now();
    group.kill(1).await.expect("kills");
    until("rank 1 is back", || {
        let rank = status(&group, 1);
        rank.incarnation.0 == 2 && rank.state == RankState::Healthy
    })
    .await;
    println!("    a killed rank is back after {:.2} s", begin.elapsed().as_secs_f64());
    group.call(Describe, ()).deadline(LONG).await.expect("answers");
    stop(&group).await;
    cluster.shutdown(Duration::from_secs(2)).await.expect("stops");
}

/// Starts two ranks on two nodes, breaks the node of the second one, and waits until it is back.
async fn broken(what: &str, break_node: impl FnOnce(&str), mend: impl FnOnce(&str)) {
    let Some(address) = cluster_address() else { return };
    let cluster = cluster(ClusterSpec::new([1, 1]), &address);
    let mut options = options();
    options.restart_on_failure = true;
    let group = start(&cluster, options).await;
    let nodes = nodes_of(&group);
    assert_ne!(nodes[0], nodes[1], "spread");
    let begin = Instant::now();
    break_node(&nodes[1]);
    until("the rank has ended for the group", || status(&group, 1).state != RankState::Healthy).await;
    println!("    {what}: noticed after {:.2} s", begin.elapsed().as_secs_f64());
    until("rank 1 is back", || {
        let rank = status(&group, 1);
        rank.incarnation.0 >= 2 && rank.state == RankState::Healthy
    })
    .await;
    println!("    {what}: back after {:.2} s", begin.elapsed().as_secs_f64());
    assert_eq!(status(&group, 0).incarnation.0, 1, "the other rank was not touched");
    assert_eq!(status(&group, 1).incarnation.0, 2, "one restart");
    group.call(Describe, ()).deadline(LONG).await.expect("answers");
    mend(&nodes[1]);
    let begin = Instant::now();
    stop(&group).await;
    println!("    {what}: the group stopped in {:.2} s", begin.elapsed().as_secs_f64());
    cluster.shutdown(Duration::from_secs(2)).await.expect("stops");
    println!("    {what}: the cluster stopped in {:.2} s", begin.elapsed().as_secs_f64());
}

/// Case 25: the actor that holds an agent is killed: the kernel ends the agent and its rank with it.
pub(crate) async fn ray_r25_a_killed_actor_takes_its_agent_along() {
    let kill = |node: &str| {
        let agents = processes(node, AGENT);
        assert_eq!(agents.len(), 1, "{agents:?}");
        let stat = std::fs::read_to_string(format!("/proc/{}/status", agents[0])).expect("a process");
        let parent = stat.lines().find_map(|line| line.strip_prefix("PPid:")).expect("a parent");
        signal(parent.trim().parse().expect("a pid"), Signal::KILL);
    };
    broken("an actor is killed", kill, |_| {}).await;
}

/// Case 27: a machine is lost.
pub(crate) async fn ray_r27_ranks_of_a_lost_machine_restart_elsewhere() {
    let kill = |node: &str| drop(control(&json!({"do": "kill_node", "node": node})));
    broken("a machine is lost", kill, |node| drop(control(&json!({"do": "start_node", "node": node})))).await;
}

/// Case 29: a machine is cut off. Its ranks end by themselves before others start.
pub(crate) async fn ray_r29_ranks_of_a_machine_that_was_cut_off_end_before_others_start() {
    let cut = |node: &str| drop(control(&json!({"do": "partition", "node": node})));
    let mend = |node: &str| {
        assert!(processes(node, "--gym-worker").is_empty(), "the old rank has ended by itself");
        control(&json!({"do": "heal", "node": node}));
        // Ray gives the node up; it comes back as a new one.
        control(&json!({"do": "kill_node", "node": node}));
        control(&json!({"do": "start_node", "node": node}));
    };
    broken("a machine is cut off", cut, mend).await;
}

/// Case 32: the driver of the job is killed: nothing of it stays, and the job is submitted again.
pub(crate) async fn ray_r32_a_killed_driver_leaves_no_process_and_the_job_is_submitted_again() {
    let Some(address) = cluster_address() else { return };
    let cluster = cluster(spread(&[1, 1]), &address);
    let mut options = options();
    options.restart_on_failure = true;
    let group = start(&cluster, options).await;
    let drivers: Vec<i32> = processes("head", "gym_ray.py");
    assert!(!drivers.is_empty());
    let agents = || ["n1", "n2"].iter().flat_map(|node| processes(node, AGENT)).collect::<Vec<_>>();
    let before = agents();
    assert_eq!(before.len(), 2);
    drivers.iter().for_each(|driver| signal(*driver, Signal::KILL));
    let begin = Instant::now();
    until("the agents of the job have ended", || !before.iter().any(|agent| super::alive(*agent))).await;
    println!("    the driver is killed: its agents ended after {:.2} s", begin.elapsed().as_secs_f64());
    // A rank whose restart began before the loss of the other node was known starts once more.
    let back = |rank| status(&group, rank).incarnation.0 >= 2 && status(&group, rank).state == RankState::Healthy;
    until("both ranks are back", || back(0) && back(1)).await;
    println!("    the driver is killed: both ranks are back after {:.2} s", begin.elapsed().as_secs_f64());
    stop(&group).await;
    cluster.shutdown(Duration::from_secs(2)).await.expect("stops");
    no_process_of_ours_within(Duration::from_secs(5), "after the stop").await;
}

/// The process that gets killed: `be-ray-controller`.
pub(crate) async fn doomed_controller() {
    let address = cluster_address().expect("a cluster");
    let cluster = cluster(spread(&[1, 1]), &address);
    let _group = start(&cluster, options()).await;
    println!("running");
    std::future::pending().await
}

/// Case 31: the controller is killed: its ranks end with their lease, and then the job.
pub(crate) async fn ray_r31_a_killed_controller_leaves_nothing() {
    if cluster_address().is_none() {
        return;
    }
    let mut child = tokio::process::Command::new(std::env::current_exe().expect("own path"))
        .arg("be-ray-controller")
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("starts");
    let mut lines = tokio::io::BufReader::new(child.stdout.take().expect("piped")).lines();
    let running = async { while lines.next_line().await.expect("reads").expect("a line") != "running" {} };
    timeout(2 * LONG, running).await.expect("in time");
    child.start_kill().expect("kill -9");
    let begin = Instant::now();
    let ranks = || ["n1", "n2"].iter().flat_map(|node| processes(node, "--gym-worker")).count();
    while ranks() > 0 {
        assert!(begin.elapsed() < 4 * LEASE, "ranks without a controller");
        sleep(Duration::from_millis(50)).await;
    }
    println!("    the ranks of a killed controller ended after {:.2} s", begin.elapsed().as_secs_f64());
    no_process_of_ours_within(Duration::from_secs(30), "after the controller was killed").await;
}

/// Case 1: without an address nothing of Ray is tried, which the other cases show; a group without a cluster runs on all nodes.
pub(crate) async fn ray_ranks_without_a_cluster_run_on_all_nodes() {
    let Some(address) = cluster_address() else { return };
    let group =
        Group::start(&cx(), &ray(address, ray_options()), spec("obedient", 4), GroupOptions::new(transports())).await;
    let group = group.expect("starts");
    let nodes = nodes_of(&group);
    assert_eq!(nodes.iter().filter(|node| *node == "n1").count(), 2, "{nodes:?}");
    stop(&group).await;
    drop(group);
    no_process_of_ours_within(Duration::from_secs(15), "after the group was dropped").await;
}
