//! Groups that are reached by UCX, because their configuration says so. `GYM_UCX_REQUIRED=1` makes a missing UCX a failure.

use std::time::Duration;

use gym_client::launch::ucx_report;
use gym_core::CallContext;
use gym_core::transport::{ListenOptions, Transport};
use gym_group::WorkerGroupExt;
use gym_group::placement::{ClusterSpec, WorkerGroupConfig};
use gym_group::{GroupRequest, VirtualCluster};

#[path = "../collectives/ranked.rs"]
mod ranked;

use super::conformance::Provisioned;
use super::types::{Describe, Init};
use super::{LONG, local, options, stop, transports};

async fn there_is_ucx() -> bool {
    match ucx_report(Duration::from_secs(30)).await {
        Ok(_) => true,
        Err(why) => {
            assert!(std::env::var_os("GYM_UCX_REQUIRED").is_none(), "{why}");
            eprintln!("NOT RUN: {why}");
            false
        }
    }
}

fn cluster() -> VirtualCluster {
    let mut spec = ClusterSpec::new([2]);
    spec.use_gpus = false;
    VirtualCluster::new(spec, local()).expect("valid")
}

fn request(config: &str) -> GroupRequest {
    let mut request = GroupRequest::new("policy", "obedient", &Init::default(), options()).expect("JSON");
    request.config = Some(serde_json::from_str::<WorkerGroupConfig>(config).expect("a configuration"));
    request
}

pub(crate) async fn ucx_is_chosen_by_the_groups_configuration_alone() {
    if !there_is_ucx().await {
        return;
    }
    for (config, level, lane) in [
        (r#"{"transport": "auto", "require_transport": "shm"}"#, gym_client::transport::SHM, "/memory"),
        (r#"{"transport": ["ucx_tcp", "http"]}"#, gym_client::transport::UCX_TCP, "tcp/"),
    ] {
        let group = cluster().start(&CallContext::within(LONG), request(config)).await.expect("starts");
        let ranks = group.call(Describe, ()).deadline(LONG).await.expect("answers").into_values();
        assert!(ranks.iter().all(|rank| rank.variables["UCX_HANDLE_ERRORS"] == "none"), "as UCX wants it at its load");
        for status in group.worker_status() {
            let path = status.path.expect("it is reached");
            assert_eq!((path.scheme, path.transport), ("ucx", Some(level)), "{config}");
            assert!(path.lanes.contains(lane), "{}", path.lanes);
        }
        stop(&group).await;
    }
}

pub(crate) async fn ucx_that_cannot_be_had_as_required_starts_no_group() {
    if !there_is_ucx().await {
        return;
    }
    let report = ucx_report(LONG).await.expect("there is");
    if !report.of(gym_client::transport::RDMA).is_empty() {
        eprintln!("NOT RUN: this machine has RDMA");
        return;
    }
    let error = cluster().start(&CallContext::within(LONG), request(r#"{"transport": "rdma"}"#)).await;
    let text = error.expect_err("no RDMA here").to_string();
    assert!(text.contains("rdma: ") && text.contains("fix: "), "{text}");
}

pub(crate) async fn ucx_shared_memory_passes_the_suite_of_all_groups() {
    suite(gym_client::transport::SHM).await;
}

pub(crate) async fn ucx_tcp_passes_the_suite_of_all_groups() {
    suite(gym_client::transport::UCX_TCP).await;
}

async fn suite(level: Transport) {
    if !there_is_ucx().await {
        return;
    }
    let policy = gym_core::transport::TransportPolicy::of([level]).expect("a rung");
    let transports = transports().with_policy(policy.clone());
    Provisioned::over(Box::new(local()), transports.clone(), Some(policy)).pass().await;
    let paths = transports.paths();
    assert!(!paths.is_empty() && paths.iter().all(|path| path.transport == Some(level)), "{paths:?}");
}

pub(crate) async fn ucx_shared_memory_passes_the_suite_of_collectives() {
    collectives_pass(gym_client::transport::SHM, 5).await;
}

pub(crate) async fn ucx_tcp_passes_the_suite_of_collectives() {
    collectives_pass(gym_client::transport::UCX_TCP, 6).await;
}

/// All ranks of the suite share the UCX of this process.
async fn collectives_pass(level: Transport, seed: u64) {
    if !there_is_ucx().await {
        return;
    }
    let policy = gym_core::transport::TransportPolicy::of([level]).expect("a rung");
    let transports = transports().scoped(&policy, Some([127, 0, 0, 1].into()));
    let paths = transports.clone();
    let ranks = ranked::Ranked::new(transports, |_| ListenOptions::default().at("127.0.0.1".to_owned(), 0));
    ranked::suite(ranks, seed).await;
    let paths = paths.paths();
    assert!(!paths.is_empty() && paths.iter().all(|path| path.transport == Some(level)), "{paths:?}");
}

pub(crate) async fn ucx_ranks_in_processes_meet_and_name_a_killed_one() {
    if !there_is_ucx().await {
        return;
    }
    for level in [gym_client::transport::SHM, gym_client::transport::UCX_TCP] {
        let policy = gym_core::transport::TransportPolicy::of([level]).expect("a rung");
        super::collectives::kill_ranks(3, gym_group::collective::CollectiveOptions::default(), Some(policy)).await;
    }
}

pub(crate) async fn ucx_heartbeats_go_on_while_a_method_computes() {
    if !there_is_ucx().await {
        return;
    }
    for level in [gym_client::transport::SHM, gym_client::transport::UCX_TCP] {
        let policy = gym_core::transport::TransportPolicy::of([level]).expect("a rung");
        super::health::heartbeats_go_on_while_a_method_computes(Some(policy)).await;
    }
}
