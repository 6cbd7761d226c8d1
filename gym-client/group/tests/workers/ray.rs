//! Ranks on a real Ray cluster, whose nodes are network namespaces: `.ci/ray.py` starts it, and these cases with it. Without it they say so.
//!
//! The numbers in the names are those of the cases in `tests/tables/conformance-ray.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt as _;
use gym_core::{CallContext, Code, Result};
use gym_group::placement::{ClusterSpec, PlacementStrategy};
use gym_group::ray::{Ray, RayAddress, RayDashboard, RayDriver, RayOptions};
use gym_group::{Batch, Dispatch, FailureKind, RankState, WorkerGroupExt};
use gym_group::{
    Group, GroupOptions, GroupRequest, NodeEvent, NodesOptions, Provisioner, Reservation, ReserveRequest,
    VirtualCluster,
};
use serde_json::json;
use tokio::io::AsyncBufReadExt as _;
use tokio::time::{Instant, sleep, timeout};

use super::ray_cluster::{
    AGENT, LONG, addresses, cluster_address, control, kill, no_process_of_ours, nodes_of, parents, processes, python,
    until, whole_cluster,
};
use super::types::{Describe, Init, workers};
use super::{options, spec, status, stop, transports, verify};

/// Shorter than Ray's detection of a lost node, even of a cluster with short intervals.
pub(super) const LEASE: Duration = Duration::from_secs(3);

pub(super) fn ray_options() -> RayOptions {
    let mut options = RayOptions::default();
    // The nodes share the files of this machine, and a test with debug information is large.
    options.program = Some(std::env::current_exe().expect("own path"));
    options.placement_timeout = Duration::from_secs(20);
    options.placement_attempts = Some(1);
    options.nodes = NodesOptions::default();
    options.nodes.lease = LEASE;
    options.nodes.wait_for_room = LONG;
    // A program on a node of the cluster can run the driver itself.
    if std::env::var("GYM_RAY_TEST_DRIVER").is_ok_and(|driver| driver == "child") {
        options.driver = RayDriver::Child { python: python() };
    }
    options
}

pub(super) fn ray(address: RayAddress, options: RayOptions) -> Ray {
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

fn cluster(spec: ClusterSpec, address: &RayAddress) -> VirtualCluster {
    VirtualCluster::new(spec, ray(address.clone(), ray_options())).expect("valid")
}

fn request(options: GroupOptions) -> GroupRequest {
    GroupRequest::new("policy", "obedient", &Init::default(), options).expect("JSON")
}

pub(super) fn cx() -> CallContext {
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
    let Some(address) = whole_cluster() else { return };
    let mut spec = spread(&[4, 4]);
    // The nodes announce their domain by a label.
    spec.segment_size = std::num::NonZeroU32::new(2);
    let cluster = cluster(spec, &address);
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
    cluster.shutdown(LONG).await.expect("stops");
    println!("    stopped after {:.2} s", begin.elapsed().as_secs_f64());
    cluster.shutdown(LONG).await.expect("nothing to do");
    no_process_of_ours("after the stop").await;
    let job =
        dashboard.job(&cx(), ours[0].submission_id.as_deref().expect("an id")).await.expect("asks").expect("known");
    assert!(job.has_ended(), "{job:?}");
}

/// Case 12: what fits one node is packed on one.
pub(crate) async fn ray_r12_bundles_are_packed_on_one_node() {
    let Some(address) = whole_cluster() else { return };
    let mut spec = ClusterSpec::new([1, 1]);
    spec.placement_group_strategy = PlacementStrategy::Pack;
    let cluster = cluster(spec, &address);
    let group = start(&cluster, options()).await;
    assert_eq!(nodes_of(&group).into_iter().collect::<BTreeSet<_>>().len(), 1);
    stop(&group).await;
    cluster.shutdown(LONG).await.expect("stops");
}

/// Cases 13 and 15: what no node can have is an error that says what was requested and what there is.
pub(crate) async fn ray_r13_what_cannot_be_placed_is_explained() {
    let Some(address) = whole_cluster() else { return };
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
    no_process_of_ours("after the failures").await;
}

/// Case 16: a program that cannot be executed is reported with the error of the operating system.
pub(crate) async fn ray_r16_a_program_that_cannot_run_is_reported() {
    let Some(address) = whole_cluster() else { return };
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

/// Case 41: a driver that cannot run as a child of this program, which is on no node of the cluster, is reported with its cause and the fix.
pub(crate) async fn ray_r41_a_driver_that_cannot_run_here_is_reported() {
    let Some(address) = whole_cluster() else { return };
    let refused_within = async |python: PathBuf, limit: Duration| {
        let mut options = ray_options();
        options.driver = RayDriver::Child { python };
        let (begin, cx) = (Instant::now(), CallContext::within(limit));
        let error = ray(address.clone(), options).reserve(&cx, &ReserveRequest::for_ranks(1)).await;
        let text = error.expect_err("it cannot run").to_string();
        println!("    after {:.1} s: {text}", begin.elapsed().as_secs_f64());
        assert!(text.contains("fix: "), "{text}");
        text
    };
    let refused = async |python: PathBuf| refused_within(python, 2 * LONG).await;
    let folder = tempfile::tempdir().expect("a folder");
    let plays = |name: &str, lines: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{lines}\nsleep 60\n")).expect("writes");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("sets");
        path
    };
    let elsewhere =
        r#"echo '@gym {"seq": 1, "t": 1, "kind": "shim", "pid": 1, "ray": "2.60.0", "node_id": "elsewhere"}'"#;
    let text = refused(plays("elsewhere", elsewhere)).await;
    assert!(text.contains("its driver is on node elsewhere of another cluster"), "{text}");
    let silent = plays("silent", "echo 'it waits for the cluster' >&2");
    let text = refused_within(silent, Duration::from_secs(2)).await;
    assert!(text.contains("has not connected to Ray") && text.contains("  | it waits for the cluster"), "{text}");
    let is_on_a_node = std::env::var_os("GYM_RAY_TEST_DRIVER").is_some();
    assert_ne!(text.contains("none of the addresses of the cluster's nodes: 10.88.0."), is_on_a_node, "{text}");
    let text = refused("/nowhere/python".into()).await;
    assert!(text.contains("/nowhere/python") && text.contains("RayDriver::Child"), "{text}");
    let text = refused("/usr/bin/python3".into()).await;
    assert!(text.contains("No module named 'ray'"), "{text}");
}

/// Case 24: a killed rank restarts without Ray.
pub(crate) async fn ray_r24_a_killed_rank_restarts_without_ray() {
    let Some(address) = whole_cluster() else { return };
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
    cluster.shutdown(LONG).await.expect("stops");
}

/// Starts two ranks on two nodes, breaks the node of the second one, and waits until it is back.
async fn broken(what: &str, break_node: impl FnOnce(&str), mend: impl FnOnce(&str)) {
    let Some(address) = whole_cluster() else { return };
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
    cluster.shutdown(LONG).await.expect("stops");
    println!("    {what}: the cluster stopped in {:.2} s", begin.elapsed().as_secs_f64());
}

/// Case 25: the actor that holds an agent is killed: the kernel ends the agent and its rank with it.
pub(crate) async fn ray_r25_a_killed_actor_takes_its_agent_along() {
    let kill = |node: &str| {
        let actors = parents(node, AGENT);
        assert_eq!(actors.len(), 1, "{actors:?}");
        kill(actors[0]);
    };
    broken("an actor is killed", kill, |_| {}).await;
}

/// Case 27: a machine is lost.
pub(crate) async fn ray_r27_ranks_of_a_lost_machine_restart_elsewhere() {
    let kill = |node: &str| drop(control(&json!({"do": "kill_node", "node": node})));
    broken("a machine is lost", kill, |node| drop(control(&json!({"do": "start_node", "node": node})))).await;
}

/// Case 28: a machine is lost, and no other has room. The other ranks serve, and those of the lost machine come back on a machine that is added.
pub(crate) async fn ray_r28_ranks_wait_for_a_machine_that_is_added() {
    let Some(address) = whole_cluster() else { return };
    let cluster = cluster(spread(&[1, 1]), &address);
    let mut options = options();
    options.restart_on_failure = true;
    let group = start(&cluster, options).await;
    let nodes = nodes_of(&group);
    control(&json!({"do": "kill_node", "node": nodes[1]}));
    let begin = Instant::now();
    until("the rank has ended for the group", || status(&group, 1).state != RankState::Healthy).await;
    // Ray needs some seconds to notice it; meanwhile and later, calls to the lost rank fail at once, not at their deadline, and the other one
    // serves.
    while begin.elapsed() < 3 * LEASE {
        let error = group.call(Describe, ()).deadline(Duration::from_secs(30)).await.expect_err("a rank is missing");
        let waited = error.outcomes().iter().any(|outcome| outcome.kind() == Some(FailureKind::Timeout));
        assert!(!waited, "{error}");
        group.call(Describe, ()).dispatch(Dispatch::rank(0)).deadline(LONG).await.expect("it serves");
        sleep(Duration::from_millis(500)).await;
    }
    assert_ne!(status(&group, 1).state, RankState::Healthy);
    let added = Instant::now();
    control(&json!({"do": "start_node", "node": "n3"}));
    println!("    a node is added: alive after {:.2} s", added.elapsed().as_secs_f64());
    until("rank 1 is back", || status(&group, 1).state == RankState::Healthy).await;
    println!("    a node is added: its rank is back after {:.2} s", added.elapsed().as_secs_f64());
    assert_eq!(nodes_of(&group)[1], "n3");
    assert_eq!((status(&group, 0).incarnation.0, status(&group, 1).incarnation.0), (1, 2), "one restart");
    group.call(Describe, ()).deadline(LONG).await.expect("answers");
    stop(&group).await;
    cluster.shutdown(LONG).await.expect("stops");
    control(&json!({"do": "kill_node", "node": "n3"}));
    control(&json!({"do": "start_node", "node": nodes[1]}));
}

/// A machine is drained before it is taken away: balanced calls go elsewhere, the others go on, and its ranks start elsewhere at the end.
pub(crate) async fn ray_ranks_of_a_drained_machine_get_no_balanced_calls() {
    let Some(address) = whole_cluster() else { return };
    let cluster = cluster(ClusterSpec::new([1, 1]), &address);
    let mut options = options();
    options.restart_on_failure = true;
    let group = Arc::new(start(&cluster, options).await);
    let nodes = nodes_of(&group);
    assert_ne!(nodes[0], nodes[1], "spread");
    let mut events = cluster.node_events(&cx()).await.expect("reserved");
    let begin = Instant::now();
    control(&json!({"do": "drain_node", "node": nodes[1], "seconds": 60}));
    let drained = async {
        loop {
            if let NodeEvent::Draining { node, why } = events.next().await.expect("an event") {
                return (node, why);
            }
        }
    };
    let (node, why) = timeout(LONG, drained).await.expect("in time");
    println!("    known after {:.2} s: {node}: {why}", begin.elapsed().as_secs_f64());
    assert!(node.starts_with("share0001@") && why.contains("Ray drains it"), "{node}: {why}");
    let balancer = group.balancer().expect("no weights");
    for _ in 0..20 {
        let reply = balancer.submit(&cx(), Describe, (), Batch::empty()).await.expect("answers");
        assert_eq!(reply.value.variables["RANK"], "0");
    }
    group.call(Describe, ()).deadline(LONG).await.expect("the drained rank serves until the end");
    assert_eq!(status(&group, 1).incarnation.0, 1);
    // Whoever has drained it takes it away.
    let begin = Instant::now();
    control(&json!({"do": "kill_node", "node": nodes[1]}));
    until("rank 1 is elsewhere", || {
        let rank = status(&group, 1);
        rank.incarnation.0 == 2 && rank.state == RankState::Healthy
    })
    .await;
    println!("    its rank serves elsewhere after {:.2} s", begin.elapsed().as_secs_f64());
    assert_eq!(nodes_of(&group)[1], nodes[0]);
    let cx = cx();
    let replies = (0..8).map(|_| balancer.submit(&cx, Describe, (), Batch::empty()));
    let ranks: BTreeSet<String> = futures_util::future::join_all(replies)
        .await
        .into_iter()
        .map(|reply| reply.expect("answers").value.variables["RANK"].clone())
        .collect();
    assert_eq!(ranks.len(), 2, "the new incarnation is on a machine that stays");
    stop(&group).await;
    cluster.shutdown(LONG).await.expect("stops");
    control(&json!({"do": "start_node", "node": nodes[1]}));
}

/// Case 33: the head is lost, without fault tolerance. The ranks serve; when there is a cluster again, the job is submitted again.
pub(crate) async fn ray_r33_ranks_serve_without_a_head_and_return_with_the_next_cluster() {
    let Some(address) = whole_cluster() else { return };
    let cluster = cluster(spread(&[1, 1]), &address);
    let mut options = options();
    options.restart_on_failure = true;
    let group = start(&cluster, options).await;
    control(&json!({"do": "kill_head"}));
    let begin = Instant::now();
    while begin.elapsed() < 2 * LEASE {
        group.call(Describe, ()).deadline(LONG).await.expect("the ranks serve without the head");
        sleep(Duration::from_millis(200)).await;
    }
    println!("    the head is lost: its ranks serve after {:.2} s", begin.elapsed().as_secs_f64());
    control(&json!({"do": "start_head"}));
    // A node that outlives its head ends after a minute; here, it is started again at once.
    for node in ["n1", "n2"] {
        control(&json!({"do": "kill_node", "node": node}));
        control(&json!({"do": "start_node", "node": node}));
    }
    let begin = Instant::now();
    let back = |rank| status(&group, rank).incarnation.0 >= 2 && status(&group, rank).state == RankState::Healthy;
    until("both ranks are back", || back(0) && back(1)).await;
    println!("    a new cluster: both ranks are back after {:.2} s", begin.elapsed().as_secs_f64());
    group.call(Describe, ()).deadline(LONG).await.expect("answers");
    stop(&group).await;
    cluster.shutdown(LONG).await.expect("stops");
    no_process_of_ours("after the stop").await;
}

/// Case 34: a head that keeps its state restarts. No rank does, and no call fails.
pub(crate) async fn ray_ft_r34_nothing_restarts_with_a_head_that_keeps_its_state() {
    let Some(address) = whole_cluster() else { return };
    if std::env::var_os("GYM_RAY_TEST_FAULT_TOLERANT").is_none() {
        println!("NOT RUN: the head of this cluster keeps no state (`.ci/test ray` starts one that does)");
        return;
    }
    let mut on_ray = ray_options();
    on_ray.driver = RayDriver::Worker;
    let cluster = VirtualCluster::new(spread(&[1, 1]), ray(address.clone(), on_ray)).expect("valid");
    let mut options = options();
    options.restart_on_failure = true;
    let group = Arc::new(start(&cluster, options).await);
    let ours = async || {
        let (dashboard, _) = RayDashboard::connect(&cx(), &address).await?;
        let jobs = dashboard.jobs(&cx()).await?;
        Ok::<_, gym_core::Error>(
            jobs.into_iter().filter(|job| job.ours().is_some() && job.status == "RUNNING").collect::<Vec<_>>(),
        )
    };
    let before = ours().await.expect("lists");
    assert_eq!(before.len(), 1, "{before:?}");
    control(&json!({"do": "kill_head"}));
    let begin = Instant::now();
    let calling = tokio::spawn({
        let group = Arc::clone(&group);
        async move {
            loop {
                group
                    .call(Describe, ())
                    .dispatch(Dispatch::rank(0))
                    .deadline(LONG)
                    .await
                    .expect("it serves all the time");
                sleep(Duration::from_millis(100)).await;
            }
        }
    });
    sleep(LEASE).await;
    group.kill(1).await.expect("kills");
    let killed = Instant::now();
    until("rank 1 is back", || status(&group, 1).incarnation.0 == 2 && status(&group, 1).state == RankState::Healthy)
        .await;
    println!("    without a head, a killed rank is back after {:.2} s", killed.elapsed().as_secs_f64());
    control(&json!({"do": "start_head"}));
    let listed = async {
        loop {
            match ours().await {
                Ok(jobs) if !jobs.is_empty() => return jobs,
                _ => sleep(Duration::from_millis(100)).await,
            }
        }
    };
    let after = timeout(LONG, listed).await.expect("the head lists the job");
    println!("    the head is back, with its jobs, {:.2} s after it was killed", begin.elapsed().as_secs_f64());
    assert_eq!(after[0].submission_id, before[0].submission_id, "the same job");
    // The controller looks at the log and at the status of the job again.
    sleep(Duration::from_secs(5)).await;
    assert!(!calling.is_finished(), "a call failed");
    calling.abort();
    assert_eq!(
        (status(&group, 0).incarnation.0, status(&group, 1).incarnation.0),
        (1, 2),
        "none but the killed one restarted"
    );
    stop(&group).await;
    cluster.shutdown(LONG).await.expect("stops");
    no_process_of_ours("after the stop").await;
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

/// Ranks on two machines sum over TCP. The one of a machine that is cut off is named, and shares memory with the others once it is on theirs.
pub(crate) async fn ray_ranks_on_two_nodes_meet_and_name_one_that_is_cut_off() {
    let Some(address) = whole_cluster() else { return };
    let mut cut = None;
    let cut_off = |node: &str| {
        let (_, ip) = node.split_once('@').expect("share@address");
        let node = addresses()[ip].clone();
        control(&json!({"do": "partition", "node": node}));
        cut = Some(node);
    };
    super::collectives::ranks_meet_over_machines(ray(address, ray_options()), cut_off).await;
    let node = cut.expect("it was cut off");
    control(&json!({"do": "heal", "node": node}));
    // Ray gives the node up; it comes back as a new one.
    control(&json!({"do": "kill_node", "node": node}));
    control(&json!({"do": "start_node", "node": node}));
}

/// Case 32: the driver of the job is killed: nothing of it stays, and the job is submitted again.
pub(crate) async fn ray_r32_a_killed_driver_leaves_no_process_and_the_job_is_submitted_again() {
    let Some(address) = whole_cluster() else { return };
    let cluster = cluster(spread(&[1, 1]), &address);
    let mut options = options();
    options.restart_on_failure = true;
    let group = start(&cluster, options).await;
    // Ray lists it with its name, also if its driver was not submitted.
    let (dashboard, _) = RayDashboard::connect(&cx(), &address).await.expect("connects");
    let jobs = dashboard.jobs(&cx()).await.expect("lists");
    let ours: Vec<_> = jobs.iter().filter(|job| job.ours().is_some() && !job.has_ended()).collect();
    assert!(ours.len() == 1 && ours[0].ours().expect("a name").starts_with("workers"), "{jobs:?}");
    assert!(ours[0].id().expect("an identifier").starts_with("gym-"), "{jobs:?}");
    let drivers: Vec<i32> = processes("head", "gym_ray.py");
    assert!(!drivers.is_empty());
    let agents = || ["n1", "n2"].iter().flat_map(|node| processes(node, AGENT)).collect::<Vec<_>>();
    let before = agents();
    assert_eq!(before.len(), 2);
    drivers.into_iter().for_each(kill);
    let begin = Instant::now();
    until("the agents of the job have ended", || !agents().iter().any(|agent| before.contains(agent))).await;
    println!("    the driver is killed: its agents ended after {:.2} s", begin.elapsed().as_secs_f64());
    // A rank whose restart began before the loss of the other node was known starts once more.
    let back = |rank| status(&group, rank).incarnation.0 >= 2 && status(&group, rank).state == RankState::Healthy;
    until("both ranks are back", || back(0) && back(1)).await;
    println!("    the driver is killed: both ranks are back after {:.2} s", begin.elapsed().as_secs_f64());
    stop(&group).await;
    cluster.shutdown(LONG).await.expect("stops");
    no_process_of_ours("after the stop").await;
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
    if whole_cluster().is_none() {
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
    no_process_of_ours("after the controller was killed").await;
}

/// Two verifiers on each of two nodes, and a table that they fetch from this process.
async fn verifiers(address: &RayAddress) -> (VirtualCluster, Arc<Group>, verify::Table) {
    let cluster = cluster(spread(&[2, 2]), address);
    let mut options = options();
    options.restart_on_failure = true;
    let request = GroupRequest::new("verifiers", "verifier", &(), options).expect("JSON");
    let group = Arc::new(cluster.start(&cx(), request).await.expect("starts"));
    // The nodes reach this program here.
    (cluster, group, verify::Table::at("10.88.0.9").await)
}

/// Cases 36, 37 and 39: two nodes share the items of a list in bounded batches, and a panic of the verifier fails one item.
pub(crate) async fn ray_r36_each_node_verifies_its_share_in_batches_and_a_panic_fails_one_item() {
    let Some(address) = whole_cluster() else { return };
    let (cluster, group, table) = verifiers(&address).await;
    let nodes = nodes_of(&group);
    let begin = Instant::now();
    let results = verify::check(&group, &table, verify::answers(1_000)).await;
    println!("    1,000 items of 2 ms on 4 ranks in {:.2} s", begin.elapsed().as_secs_f64());
    let mut by_node: BTreeMap<&str, usize> = BTreeMap::new();
    for (rank, count) in verify::all_checked(&results, 1_000) {
        *by_node.entry(&nodes[rank as usize]).or_default() += count;
    }
    println!("    by node: {by_node:?}; the shared input was fetched {} times", table.fetches());
    assert!(by_node.len() == 2 && by_node.values().all(|count| *count >= 350), "{by_node:?}");
    verify::batches_are_bounded(&results, 4);
    verify::a_panic_names_its_item(&group, &table).await;
    stop(&group).await;
    cluster.shutdown(LONG).await.expect("stops");
}

/// Case 38: a machine is lost in mid-run; its batches are handed out again, and each item has one result.
pub(crate) async fn ray_r38_a_machine_lost_in_mid_run_costs_no_item() {
    let Some(address) = whole_cluster() else { return };
    let (cluster, group, table) = verifiers(&address).await;
    let lost = nodes_of(&group)[2].clone();
    let begin = Instant::now();
    let verified = async {
        let results = verify::check(&group, &table, verify::answers(2_000)).await;
        println!("    2,000 items of 2 ms on 4 ranks, of which 2 were lost, in {:.2} s", begin.elapsed().as_secs_f64());
        results
    };
    let node = lost.clone();
    let kill = async {
        sleep(Duration::from_millis(300)).await;
        let killed = tokio::task::spawn_blocking(move || control(&json!({"do": "kill_node", "node": node})));
        killed.await.expect("kills");
        println!("    {lost} was killed after {:.2} s", begin.elapsed().as_secs_f64());
    };
    let (results, ()) = tokio::join!(verified, kill);
    let by_rank = verify::all_checked(&results, 2_000);
    println!("    by rank: {by_rank:?}");
    assert!(by_rank[&2] > 0 && by_rank[&0] > by_rank[&2], "it was lost in mid-run: {by_rank:?}");
    assert_eq!(status(&group, 0).incarnation.0, 1, "the other node was not touched");
    control(&json!({"do": "start_node", "node": lost}));
    stop(&group).await;
    cluster.shutdown(LONG).await.expect("stops");
}

/// Case 1: without an address nothing of Ray is tried, which the other cases show; a group without a cluster runs on all nodes.
pub(crate) async fn ray_ranks_without_a_cluster_run_on_all_nodes() {
    let Some(address) = whole_cluster() else { return };
    let group =
        Group::start(&cx(), &ray(address, ray_options()), spec("obedient", 4), GroupOptions::new(transports())).await;
    let group = group.expect("starts");
    let nodes = nodes_of(&group);
    assert_eq!(nodes.iter().filter(|node| *node == "n1").count(), 2, "{nodes:?}");
    stop(&group).await;
    drop(group);
    no_process_of_ours("after the group was dropped").await;
}
