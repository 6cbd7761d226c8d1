//! The public client of the interface: jobs, logs, nodes, and errors as Ray writes them.

use gym_core::{CallContext, Code};
use gym_group::ray::RayDashboard;
use serde_json::json;

use super::fake::{Answer, Fake, Job, LONG, node};

fn cx() -> CallContext {
    CallContext::within(LONG)
}

async fn dashboard(fake: &Fake) -> RayDashboard {
    RayDashboard::connect(&cx(), &fake.address()).await.expect("connects").0
}

/// Submits a job as any other program does.
fn submit(fake: &Fake, id: &str) {
    let job = json!({"entrypoint": "sleep 9", "submission_id": id, "metadata": {"name": "other"}, "runtime_env": {}});
    fake.with(|cluster| cluster.submit_directly(&job));
}

#[tokio::test]
async fn a_job_that_ray_does_not_know_is_none_and_stopping_it_does_nothing() {
    let fake = Fake::start().await;
    let dashboard = dashboard(&fake).await;
    assert_eq!(dashboard.job(&cx(), "gym-0-a1").await.expect("asks"), None);
    assert!(!dashboard.stop(&cx(), "gym-0-a1").await.expect("asks"));
    let error = dashboard.logs(&cx(), "gym-0-a1").await.expect_err("there is none");
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.to_string().contains("Job gym-0-a1 does not exist"), "{error}");
    let lines = ["GET /api/jobs/gym-0-a1", "POST /api/jobs/gym-0-a1/stop", "GET /api/jobs/gym-0-a1/logs"];
    assert_eq!(fake.lines()[1..], lines, "none of them is repeated");
}

#[tokio::test]
async fn a_job_is_read_and_stopped_once() {
    let fake = Fake::start().await;
    fake.play(|job: &mut Job| "line 1\nline 2".clone_into(&mut job.log));
    submit(&fake, "other-1");
    let dashboard = dashboard(&fake).await;
    let job = dashboard.job(&cx(), "other-1").await.expect("asks").expect("known");
    assert_eq!((job.submission_id.as_deref(), &*job.status), (Some("other-1"), "RUNNING"));
    assert_eq!((job.entrypoint.as_deref(), job.driver_exit_code, job.has_ended()), (Some("sleep 9"), None, false));
    assert_eq!(dashboard.logs(&cx(), "other-1").await.expect("reads"), "line 1\nline 2");
    let all = dashboard.jobs(&cx()).await.expect("lists");
    assert_eq!(all.iter().map(|job| job.submission_id.as_deref()).collect::<Vec<_>>(), [None, Some("other-1")]);
    assert!(dashboard.stop(&cx(), "other-1").await.expect("stops"));
    while !dashboard.job(&cx(), "other-1").await.expect("asks").expect("known").has_ended() {}
    assert!(!dashboard.stop(&cx(), "other-1").await.expect("asks"), "it has ended");
}

#[tokio::test]
async fn nodes_are_listed_with_their_labels_and_the_dead_ones_with_the_reason() {
    let fake = Fake::start().await;
    fake.with(|cluster| {
        let mut labelled = node("10.0.0.14", false, "ALIVE", &json!({"CPU": 0.5, "disk": 2.0}));
        labelled["labels"] = json!({"zone": "a", "ray.io/accelerator-type": "H100"});
        labelled["something_new"] = json!([1, 2]);
        cluster.nodes.push(labelled);
    });
    let nodes = dashboard(&fake).await.nodes(&cx()).await.expect("lists");
    let states: Vec<_> = nodes.iter().map(|node| (&*node.node_ip, node.is_head_node, node.is_alive())).collect();
    let others = [("10.0.0.11", false, true), ("10.0.0.12", false, true), ("10.0.0.13", false, false)];
    assert_eq!(states[0], ("10.0.0.1", true, true));
    assert_eq!(states[1..4], others);
    assert!(nodes[3].state_message.as_ref().expect("a reason").contains("missing too many heartbeats"));
    assert_eq!(nodes[1].resources_total["GPU"].to_string(), "4");
    assert_eq!(nodes[4].labels["zone"], "a");
    assert_eq!(nodes[4].resources_total["disk"].to_string(), "2");
}

#[tokio::test]
async fn an_error_of_the_state_api_is_reported_with_its_message() {
    let fake = Fake::start().await;
    let dashboard = dashboard(&fake).await;
    let failed = "Failed to query data from GCS. It is due to (1) GCS is unexpectedly failed.";
    let body = json!({"result": false, "msg": failed, "data": null});
    for status in [200, 500] {
        let body = body.to_string().into_bytes();
        fake.before(move |_| Some(Answer::Reply { status, media_type: "application/json", body: body.clone() }));
        let error = dashboard.nodes(&cx()).await.expect_err("no list");
        assert_eq!(error.code(), Code::Unavailable);
        assert!(error.to_string().contains(failed) && error.to_string().contains("/api/v0/nodes"), "{error}");
    }
}

#[tokio::test]
async fn the_usage_of_the_cluster_is_used_and_total() {
    let fake = Fake::start().await;
    let dashboard = dashboard(&fake).await;
    let usage = dashboard.usage(&cx()).await.expect("reads");
    assert_eq!(usage.get("CPU"), Some(&(3.0, 8.0)));
    // A cluster without an autoscaler has none for the first seconds.
    let none = json!({"result": true, "msg": "Got cluster status.", "data": {"clusterStatus": null}});
    fake.before(move |_| Some(Answer::json(&none)));
    assert!(dashboard.usage(&cx()).await.expect("reads").is_empty());
}
