//! Virtual clusters: placed before anything starts, shared as their configuration says.

use std::sync::Arc;
use std::time::Duration;

use gym_client::Transports;
use gym_core::transport::InProcess;
use gym_core::{CallContext, Code, Error, Result};
use gym_group::placement::{ClusterSpec, GpuIds};
use gym_group::{Dispatch, FailureKind, WorkerGroupExt};
use gym_group::{Group, GroupOptions};
use gym_group::{GroupRequest, InProcessRanks, VirtualCluster};

use tokio::task::JoinSet;

use super::types::{Describe, Init, Job, Meet, Warm, Work, workers};
use super::{LONG, here, options, stop, until};

fn request(name: &str, options: GroupOptions) -> GroupRequest {
    GroupRequest::new(name, "obedient", &Init::default(), options).expect("JSON")
}

fn cpus(nodes: &[u32]) -> ClusterSpec {
    let mut spec = ClusterSpec::new(nodes);
    spec.use_gpus = false;
    spec
}

pub(crate) async fn a_heterogeneous_cluster_is_placed_on_simulated_nodes_when_asked() {
    let cluster = VirtualCluster::new(ClusterSpec::new([2, 0, 1]), here()).expect("valid").simulate_nodes(&[2, 1]);
    assert_eq!((cluster.world_size(), cluster.node_count()), (3, 2));
    assert_eq!(
        cluster.placement(&CallContext::within(LONG)).await.expect("placed").groups.len(),
        2,
        "empty nodes are left out"
    );
    let cx = CallContext::within(LONG);
    let group = cluster.start(&cx, request("policy", options())).await.expect("starts");
    let ranks = group.call(Describe, ()).deadline(LONG).await.expect("answers").into_values();
    let place = |at: usize| ["RANK", "NODE_RANK", "LOCAL_RANK"].map(|name| ranks[at].variables[name].clone());
    assert_eq!([place(0), place(1), place(2)], [["0", "0", "0"], ["1", "0", "1"], ["2", "1", "0"]]);
    assert!(ranks.iter().all(|rank| rank.variables["CUDA_VISIBLE_DEVICES"].is_empty()), "simulated GPUs are nobody's");
    stop(&group).await;
}

pub(crate) async fn what_is_missing_is_told_before_anything_starts() {
    let start = async |spec: ClusterSpec| -> Result<Group> {
        VirtualCluster::new(spec, here())?.start(&CallContext::within(LONG), request("policy", options())).await
    };
    let error = start(cpus(&[100_000])).await.expect_err("not that many CPUs");
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().contains("100000 CPUs are asked for"), "{error}");
    let mut twice = ClusterSpec::new([2]);
    twice.gpu_ids = GpuIds::Flat(vec![3, 3]);
    assert!(start(twice).await.expect_err("a GPU twice").to_string().contains("names GPU 3 twice"));
    let mut unknown = ClusterSpec::new([1]);
    unknown.gpu_ids = GpuIds::Flat(vec![4_000]);
    start(unknown).await.expect_err("no such GPU");
}

pub(crate) async fn colocation_is_off_open_or_in_turns() {
    for colocation in [Some(false), None, Some(true)] {
        let switchboard = InProcess::new();
        let mut spec = cpus(&[2]);
        spec.enable_colocation = colocation;
        let cluster = VirtualCluster::new(spec, InProcessRanks::new(workers(), switchboard.clone())).expect("valid");
        let cluster = cluster.simulate_nodes(&[2]);
        let cx = CallContext::within(LONG);
        let start = |name: &'static str| {
            let options = GroupOptions::new(Transports::from_features(switchboard.clone()));
            cluster.start(&cx, request(name, options))
        };
        let policy = start("policy").await.expect("starts");
        let second: Result<Group, Error> = start("generation").await;
        if colocation == Some(false) {
            let error = second.expect_err("one group only");
            assert_eq!(error.code(), Code::ResourceExhausted);
            assert!(
                error.to_string().contains("used by policy") && error.to_string().contains("enable_colocation"),
                "{error}"
            );
            stop(&policy).await;
            start("generation").await.expect("the bundles are free again");
            continue;
        }
        let generation = second.expect("admitted");
        let long = Job { ms: 3_600_000, tells: false };
        let training = policy.call(Work, long).deadline(LONG).start().await.expect("started");
        let scored = |time| generation.call(Describe, ()).deadline(time);
        if colocation.is_none() {
            scored(LONG).await.expect("no turns are kept");
            continue;
        }
        let error = scored(Duration::from_millis(200)).await.expect_err("it is not its turn");
        assert_eq!(error.outcomes()[0].kind(), Some(FailureKind::Timeout), "{error:?}");
        assert_eq!(error.execution(), gym_core::Execution::NotStarted, "it never had the bundles: {error:?}");
        let said = error.outcomes()[0].error().expect("it failed").to_string();
        assert!(said.contains("policy has had its bundles for "), "{said}");
        drop(training);
        generation.call(Describe, ()).deadline(LONG).await.expect("its turn");
        policy.call(Describe, ()).deadline(LONG).await.expect("and back");
        let one = Dispatch::rank(0);
        let unread = policy.call(Describe, ()).dispatch(one).deadline(LONG).start().await.expect("started");
        generation.call(Describe, ()).deadline(LONG).await.expect("an answer that nobody reads yet holds no turn");
        unread.await.expect("its answer");
    }
}

pub(crate) async fn groups_in_turns_may_meet_inside_their_calls() {
    let switchboard = InProcess::new();
    let mut spec = cpus(&[16]);
    spec.enable_colocation = Some(true);
    let cluster = VirtualCluster::new(spec, InProcessRanks::new(workers(), switchboard.clone())).expect("valid");
    let cluster = cluster.simulate_nodes(&[16]);
    let mut calls = JoinSet::new();
    for name in ["left", "right"] {
        let mut request = request(name, GroupOptions::new(Transports::from_features(switchboard.clone())));
        request.worker = "meeting".to_owned();
        let group = Arc::new(cluster.start(&CallContext::within(LONG), request).await.expect("starts"));
        for _ in 0..4 {
            let group = Arc::clone(&group);
            calls.spawn(async move {
                for _ in 0..100 {
                    group.call(Meet, ()).deadline(LONG).await.expect("all ranks are there");
                }
            });
        }
    }
    while let Some(called) = calls.join_next().await {
        called.expect("no panic");
    }
}

pub(crate) async fn a_monitored_cluster_tells_the_memory_of_its_node() {
    for monitored in [true, false] {
        let mut spec = cpus(&[1]);
        spec.monitor_memory = monitored;
        let cluster = VirtualCluster::new(spec, here()).expect("valid").simulate_nodes(&[1]);
        assert_eq!(cluster.node_usage(), None, "nothing is looked at before it is used");
        let group = cluster.start(&CallContext::within(LONG), request("policy", options())).await.expect("starts");
        if monitored {
            until("it is sampled", || cluster.node_usage().is_some()).await;
            let usage = cluster.node_usage().expect("just seen");
            assert!(usage.available_bytes <= usage.memory_bytes && usage.available_bytes_min > 0, "{usage:?}");
        }
        assert_eq!(cluster.node_usage().is_some(), monitored);
        assert!(group.resource_usage()[0].gpus.is_empty(), "it has none");
        stop(&group).await;
    }
}

pub(crate) async fn a_cluster_that_is_shut_down_ends_its_groups() {
    let cluster = VirtualCluster::new(cpus(&[1]), here()).expect("valid").simulate_nodes(&[1]);
    let cx = CallContext::within(LONG);
    let group = cluster.start(&cx, request("policy", options())).await.expect("starts");
    cluster.shutdown(LONG).await.expect("ends");
    cluster.shutdown(LONG).await.expect("nothing to do");
    group.call(Describe, ()).await.expect_err("it is stopped");
    drop(group);
    let again = cluster.start(&cx, request("policy", options())).await.expect("placed anew");
    stop(&again).await;
}

pub(crate) async fn the_key_async_communication_starts_calls_that_nobody_awaits() {
    for (config, warmed) in [(r#"{"async_communication": true}"#, 3), ("{}", 0)] {
        let switchboard = InProcess::new();
        let ranks = InProcessRanks::new(workers(), switchboard.clone());
        let cluster = VirtualCluster::new(cpus(&[2]), ranks).expect("valid").simulate_nodes(&[2]);
        let mut request = request("policy", GroupOptions::new(Transports::from_features(switchboard)));
        request.config = Some(serde_json::from_str(config).expect("a configuration"));
        let cx = CallContext::within(LONG);
        let group = cluster.start(&cx, request).await.expect("starts");
        for _ in 0..3 {
            drop(group.call(Warm, true).deadline(LONG).submit());
        }
        group.flush(&cx).await.expect("all succeed");
        let ranks = group.call(Describe, ()).deadline(LONG).await.expect("answers").into_values();
        assert!(ranks.iter().all(|rank| rank.warmed == warmed), "{config}");
        drop(group.call(Warm, false).deadline(LONG).submit());
        let flushed = group.flush(&cx).await;
        assert_eq!(
            flushed.is_err_and(|error| error.to_string().contains("no weights to load")),
            warmed > 0,
            "{config}"
        );
        stop(&group).await;
    }
}
