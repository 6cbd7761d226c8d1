//! Reservations that fail, wait or are given up: each says why, and none leaves a job.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use gym_core::{CallContext, Code, Error, Result};
use gym_group::placement::{ClusterSpec, GpuIds, PlacementStrategy};
use gym_group::ray::{Ray, RayDriver, RayOptions};
use gym_group::{Provisioner as _, ReserveRequest, Workers};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::fake::{Answer, Cluster, Fake, GROUPS, Job, LONG, NODES, SUBMIT, VERSION, event, placed, waiting};

/// Options of a program that is on the nodes already, so that no test packs its own file.
pub(crate) fn options() -> RayOptions {
    let mut options = RayOptions::default();
    "trainer".clone_into(&mut options.name);
    options.program = Some("/opt/gym/trainer".into());
    options.placement_attempts = Some(1);
    options
}

pub(crate) fn ray(fake: &Fake, options: RayOptions) -> Ray {
    Ray::at(fake.address(), Workers::new()).with(options)
}

/// Requests two nodes with a bundle each, without GPUs.
pub(crate) fn two_nodes() -> ReserveRequest {
    let mut cluster = ClusterSpec::new([1, 1]);
    cluster.use_gpus = false;
    ReserveRequest::new(cluster)
}

fn cx() -> CallContext {
    CallContext::within(LONG)
}

async fn refused_with(fake: &Fake, cx: &CallContext, options: RayOptions, request: &ReserveRequest) -> Error {
    let error = ray(fake, options).reserve(cx, request).await.map(drop).expect_err("it cannot be reserved");
    let text = error.to_string();
    assert!(text.starts_with(&format!("reserve bundles on the Ray cluster at {}", fake.url())), "{text}");
    error
}

async fn refused(fake: &Fake, request: &ReserveRequest) -> Error {
    refused_with(fake, &cx(), options(), request).await
}

/// Checks that there was one job, and that it was asked to stop once.
async fn assert_stopped(fake: &Fake) {
    let id = fake.job().id();
    let last = format!("{SUBMIT}{id}/stop");
    fake.until("the job is asked to stop", |cluster| cluster.requests.iter().any(|seen| seen.line == last)).await;
    assert_eq!(fake.stops(), [id]);
}

fn assert_contains(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

/// Case 13.
#[tokio::test(start_paused = true)]
async fn bundles_that_found_no_room_are_explained_with_what_ray_has() {
    let fake = Fake::start().await;
    let why = "the bundles found no room in 1 attempts of 180.0 s";
    fake.play(move |job| job.log = format!("{}{}", waiting(), event(3, "ended", json!({"code": 3, "why": why}))));
    let mut request = two_nodes();
    request.cluster.placement_group_strategy = PlacementStrategy::StrictSpread;
    let error = refused(&fake, &request).await;
    assert_eq!(error.code(), Code::ResourceExhausted);
    let table = ["10.0.0.11 has 4 CPU, 4 GPU; 10.0.0.12 has 4 CPU, 4 GPU\n", "in use: 3 of 8 CPU, 0 of 8 GPU", "fix: "];
    assert_contains(&error, &["Ray has not placed 2 × 1 CPU with STRICT_SPREAD", why]);
    assert_contains(&error, &table);
    let text = error.to_string();
    assert!(!text.contains("10.0.0.13"), "a dead node has nothing: {text}");
    assert!(!text.contains("memory") && !text.contains("node:"), "{text}");
    assert_stopped(&fake).await;
}

/// A driver that fails before it can report anything: its last words are in the log.
#[tokio::test(start_paused = true)]
async fn a_driver_that_fails_is_explained_with_its_last_words() {
    let fake = Fake::start().await;
    fake.play(|job| {
        "Traceback (most recent call last):\n  File \"/tmp/gym_ray.py\", line 23, in <module>\n    import ray\nModuleNotFoundError: No module named 'ray'\n"
            .clone_into(&mut job.log);
        job.fail(1);
    });
    let error = refused(&fake, &two_nodes()).await;
    assert_eq!(error.code(), Code::FailedPrecondition);
    let id = fake.job().id();
    assert_contains(&error, &["ModuleNotFoundError: No module named 'ray'", "failed with exit code 1", &id]);
    assert_stopped(&fake).await;
}

/// Ray puts up to 20,000 characters of the log into the message of such a job.
#[tokio::test(start_paused = true)]
async fn the_error_of_a_driver_that_fails_is_short_however_long_its_log_is() {
    let fake = Fake::start().await;
    fake.play(|job| {
        let noise: String =
            (0..200).map(|line| format!("2026-01-01 INFO something that is not the cause, {line}\n")).collect();
        job.log = format!("{noise}Traceback (most recent call last):\nValueError: the cause\n");
        job.fail(1);
    });
    let text = refused(&fake, &two_nodes()).await.to_string();
    assert_eq!(text.matches("ValueError: the cause").count(), 1, "{text}");
    assert!(text.lines().count() < 15, "{} lines: {text}", text.lines().count());
}

/// Case 16.
#[tokio::test(start_paused = true)]
async fn an_agent_that_cannot_start_is_named_with_the_error_of_the_system() {
    let fake = Fake::start().await;
    let cause = "start /opt/gym/trainer: Permission denied (os error 13)";
    fake.play(move |job| {
        let place = json!({"share": 1, "incarnation": 1, "error": cause, "node_id": "node-10.0.0.12", "ip": "10.0.0.12", "gpus": []});
        let events = [
            event(4, "exited", place),
            event(5, "failed", json!({"share": 1, "why": "its agent has ended 11 times"})),
            event(6, "ended", json!({"code": 1, "why": "share 1 failed"})),
        ];
        job.log = format!("{}{}", placed(), events.concat());
        job.fail(1);
    });
    let error = refused(&fake, &two_nodes()).await;
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert_contains(&error, &["share 1 failed", "share 1: its agent has ended 11 times", cause]);
    assert_stopped(&fake).await;
}

/// The driver reports a failure and ends between the look at the log and the look at the status.
#[tokio::test(start_paused = true)]
async fn the_last_events_of_a_job_are_read_after_its_end() {
    let fake = Fake::start().await;
    let cause = "start /opt/gym/trainer: Exec format error (os error 8)";
    fake.play(move |job| {
        let exited =
            json!({"share": 0, "incarnation": 1, "error": cause, "node_id": "n", "ip": "10.0.0.11", "gpus": []});
        let ended = json!({"code": 1, "why": "share 0 failed"});
        job.log = format!("{}{}{}", placed(), event(4, "exited", exited), event(5, "ended", ended));
        job.fail(1);
    });
    let mut has_ended = false;
    fake.before(move |seen| {
        let is_log = seen.line.ends_with("/logs");
        has_ended |= seen.line.starts_with("GET /api/jobs/gym-") && !is_log;
        (is_log && !has_ended).then(|| Answer::json(&json!({"logs": placed()})))
    });
    let error = refused(&fake, &two_nodes()).await;
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert_contains(&error, &[&format!("share 0: {cause}")]);
    assert!(!error.to_string().contains("@gym "), "{error}");
    assert_stopped(&fake).await;
}

/// Case 35 in part: a reservation ends with its deadline, and the error reports its progress.
#[tokio::test(start_paused = true)]
async fn a_reservation_that_waits_ends_with_its_deadline_and_its_job() {
    let limit = Duration::from_secs(6);
    for (log, parts) in [
        (waiting(), ["its bundles still wait for room", "Ray has not placed 2 × 1 CPU with SPREAD"]),
        (placed(), ["the agents have not all started", "share 0: its agent has not started yet"]),
        (String::new(), ["the agents have not all started", "share 1: its agent has not started yet"]),
    ] {
        let fake = Fake::start().await;
        let played = log.clone();
        fake.play(move |job| job.log.clone_from(&played));
        let begin = Instant::now();
        let error = refused_with(&fake, &CallContext::within(limit), options(), &two_nodes()).await;
        let took = begin.elapsed();
        assert!(took >= limit && took < limit + Duration::from_secs(2), "{took:?}");
        assert_eq!(error.code(), Code::DeadlineExceeded);
        assert_contains(&error, &parts);
        assert_stopped(&fake).await;
    }
}

/// Ray sets up the environment of a job, or waits for a node, before it starts the driver: then there is no log to read.
#[tokio::test(start_paused = true)]
async fn a_job_that_ray_does_not_start_is_explained_with_what_ray_says() {
    let fake = Fake::start().await;
    fake.play(|job| {
        job.status = "PENDING";
        job.message =
            Some("Job has not started yet. It may be waiting for the runtime environment to be set up.".to_owned());
    });
    let error = refused_with(&fake, &CallContext::within(Duration::from_secs(6)), options(), &two_nodes()).await;
    assert_eq!(error.code(), Code::DeadlineExceeded);
    let age = ["is PENDING for 4 s", "is PENDING for 3 s", "is PENDING for 2 s"];
    assert!(age.iter().any(|age| error.to_string().contains(age)), "{error}");
    let said = "Ray says: Job has not started yet. It may be waiting for the runtime environment to be set up.";
    assert_contains(&error, &[&fake.job().id(), said, "10.0.0.11 has 4 CPU", "fix: ", "runtime_env_setup"]);
    assert_stopped(&fake).await;
}

/// The explanation and the end of the job need the head, which has limits of its own.
#[tokio::test(start_paused = true)]
async fn a_reservation_ends_soon_after_its_deadline_though_the_head_hangs() {
    let fake = Fake::start().await;
    let limit = Duration::from_secs(6);
    let (cx, request, begin) = (CallContext::within(limit), two_nodes(), Instant::now());
    let (error, ()) = tokio::join!(refused_with(&fake, &cx, options(), &request), async {
        fake.until("the job is followed", |cluster| cluster.requests.iter().any(|seen| seen.line.ends_with("/logs")))
            .await;
        fake.before(|_| Some(Answer::Never));
    });
    assert!(begin.elapsed() < limit + Duration::from_secs(20), "{:?}", begin.elapsed());
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert_contains(&error, &["still wait for room", &format!("{} does not respond", fake.url())]);
    assert!(!fake.stops().is_empty(), "{:?}", fake.lines());
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_reservation_is_cancelled_and_its_job_is_stopped() {
    let fake = Fake::start().await;
    let (cx, request) = (cx(), two_nodes());
    let cancel = cx.cancel.clone();
    let (error, ()) = tokio::join!(refused_with(&fake, &cx, options(), &request), async {
        fake.until("the job runs", |cluster| cluster.jobs.len() == 1).await;
        cancel.cancel();
    });
    assert_eq!(error.code(), Code::Cancelled, "{error}");
    assert_stopped(&fake).await;
}

/// Runs a reservation until the cluster is so, and drops it.
async fn dropped(fake: &Fake, reached: impl Fn(&Cluster) -> bool) {
    let (ray, cx, request) = (ray(fake, options()), cx(), two_nodes());
    tokio::select! { biased;
        reserved = ray.reserve(&cx, &request) => panic!("it ended: {:?}", reserved.map(drop)),
        () = fake.until("the reservation is so far", reached) => {}
    }
}

#[tokio::test(start_paused = true)]
async fn a_reservation_that_is_dropped_stops_its_job() {
    let fake = Fake::start().await;
    dropped(&fake, |cluster| cluster.requests.iter().any(|seen| seen.line.ends_with("/logs"))).await;
    assert_stopped(&fake).await;
}

/// Ray has the job, and the program does not know it yet.
#[tokio::test(start_paused = true)]
async fn a_reservation_that_is_dropped_while_its_job_is_submitted_stops_it() {
    let fake = Fake::start().await;
    fake.after(|seen| (seen.line == SUBMIT).then_some(Answer::Never));
    dropped(&fake, |cluster| cluster.jobs.len() == 1).await;
    assert_stopped(&fake).await;
}

/// The same if the deadline comes then, or every response is lost.
#[tokio::test(start_paused = true)]
async fn a_job_whose_submission_got_no_response_is_stopped() {
    for (answer, limit, code) in
        [(Answer::Closed, LONG, Code::Unavailable), (Answer::Never, Duration::from_secs(2), Code::DeadlineExceeded)]
    {
        let fake = Fake::start().await;
        fake.after(move |seen| (seen.line == SUBMIT).then(|| answer.clone()));
        let error = refused_with(&fake, &CallContext::within(limit), options(), &two_nodes()).await;
        assert_eq!(error.code(), code);
        assert_stopped(&fake).await;
    }
}

/// Returns what Ray says of the placement group of a job.
fn group(name: &str, state: &str, scheduling: &str) -> Value {
    json!({
        "placement_group_id": "01", "name": name, "creator_job_id": "02000000", "state": state, "is_detached": false,
        "bundles": [{"bundle_id": {"placement_group_id": "01", "bundle_index": 0}, "unit_resources": {"CPU": 1.0}, "node_id": null}],
        "stats": {"scheduling_state": scheduling, "scheduling_attempt": 3.0},
    })
}

/// Answers with groups of which the driver's own is in this state at the n-th look, and an older one of the same name was removed.
fn schedules(fake: &Fake, mut state: impl FnMut(usize) -> &'static str + Send + 'static) {
    let mut looks = 0;
    let mut id = String::new();
    fake.before(move |seen| {
        if seen.line == SUBMIT {
            let request: Value = serde_json::from_slice(&seen.body).expect("JSON");
            request["submission_id"].as_str().expect("a text").clone_into(&mut id);
        }
        if seen.line != GROUPS {
            return None;
        }
        looks += 1;
        let rows = [
            group("gym-of-somebody-else-a1", "PENDING", "INFEASIBLE"),
            group(&id, "REMOVED", "REMOVED"),
            group(&id, "PENDING", state(looks)),
        ];
        let result = json!({"total": 3, "result": rows});
        Some(Answer::json(&json!({"result": true, "msg": "", "data": {"result": result}})))
    });
}

#[tokio::test(start_paused = true)]
async fn bundles_that_no_node_can_ever_have_end_the_wait_at_the_second_look() {
    let fake = Fake::start().await;
    schedules(&fake, |_| "INFEASIBLE");
    let mut disks = options();
    disks.resources = BTreeMap::from([("disk".to_owned(), 2.0)]);
    let begin = Instant::now();
    let error = refused_with(&fake, &cx(), disks, &two_nodes()).await;
    assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert_contains(
        &error,
        &["no node can ever have them", "2 × 1 CPU and 2 disk with SPREAD", "10.0.0.11 has 4 CPU, 4 GPU"],
    );
    assert_eq!(fake.seen(GROUPS).len(), 2);
    assert_stopped(&fake).await;
}

/// A node that is joining makes Ray say so for a moment.
#[tokio::test(start_paused = true)]
async fn bundles_that_no_node_can_have_for_a_moment_are_waited_for() {
    let fake = Fake::start().await;
    schedules(&fake, |look| if look % 2 == 1 { "INFEASIBLE" } else { "PENDING" });
    let cx = CallContext::within(Duration::from_secs(30));
    let error = refused_with(&fake, &cx, options(), &two_nodes()).await;
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert!(fake.seen(GROUPS).len() > 3, "{:?}", fake.seen(GROUPS).len());
    assert_stopped(&fake).await;
}

/// An autoscaler acts on such bundles.
#[tokio::test(start_paused = true)]
async fn bundles_that_no_node_can_have_are_waited_for_if_that_is_requested() {
    let fake = Fake::start().await;
    schedules(&fake, |_| "INFEASIBLE");
    let mut waits = options();
    waits.wait_if_infeasible = true;
    // More than all nodes have: an autoscaler may add some.
    let cx = CallContext::within(Duration::from_secs(30));
    let error = refused_with(&fake, &cx, waits, &ReserveRequest::new(ClusterSpec::new([16]))).await;
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert_contains(&error, &["its bundles still wait for room", "1 × 16 CPU and 16 GPU with SPREAD"]);
    assert!(fake.seen(GROUPS).len() > 1, "{:?}", fake.seen(GROUPS).len());
    assert_stopped(&fake).await;
}

/// Case 15.
#[tokio::test]
async fn what_the_nodes_could_not_have_even_if_they_were_empty_is_rejected_before_a_job_is_submitted() {
    let fake = Fake::start().await;
    let mut spread = ClusterSpec::new([1, 1, 1]);
    spread.placement_group_strategy = PlacementStrategy::StrictSpread;
    let mut unified = ReserveRequest::new(ClusterSpec::new([9]));
    unified.unified = true;
    let mut many = ClusterSpec::new([2]);
    many.max_colocated_worker_groups = NonZeroU32::new(3);
    for (request, why) in [
        (ReserveRequest::new(ClusterSpec::new([16])), "16 GPUs are asked for, 8 are there"),
        (ReserveRequest::new(ClusterSpec::new([5])), "one by one"),
        (ReserveRequest::new(spread), "one by one"),
        (unified, "9 GPUs are asked for, 8 are there"),
        (ReserveRequest::new(many), "one by one"),
    ] {
        let error = refused(&fake, &request).await;
        assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
        assert_contains(&error, &[why, "10.0.0.11 has 4 CPUs", "fix: "]);
        assert!(!error.to_string().contains("10.0.0.13"), "{error}");
    }
    assert_eq!(fake.lines(), [VERSION, NODES].repeat(5), "nothing else was sent");
}

#[tokio::test]
async fn gpus_that_ray_chooses_and_unknown_domains_are_rejected_before_a_job_is_submitted() {
    let fake = Fake::start().await;
    let (mut gpus, mut segments) = (ClusterSpec::new([1]), ClusterSpec::new([4, 4]));
    gpus.gpu_ids = GpuIds::Flat(vec![3]);
    segments.segment_size = NonZeroU32::new(2);
    let error = refused(&fake, &ReserveRequest::new(gpus)).await;
    assert_eq!(error.code(), Code::InvalidArgument);
    assert_contains(&error, &["gpu_ids is set", "fix: leave gpu_ids out"]);
    let segments = ReserveRequest::new(segments);
    let error = refused(&fake, &segments).await;
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert_contains(&error, &["segment_size", "no node announces its NVLink domain", "fix: "]);
    // Two domains of one node each are no segment of two.
    fake.with(|cluster| {
        for (node, domain) in [(1, "a"), (2, "b")] {
            cluster.nodes[node]["labels"]["nvlink_domain"] = json!(domain);
        }
    });
    let error = refused(&fake, &segments).await;
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert_contains(&error, &["cannot form 1 segments of 2 nodes: the domains have [1, 1] nodes"]);
    assert!(fake.lines().iter().all(|line| line == VERSION || line == NODES), "{:?}", fake.lines());
}

#[tokio::test(start_paused = true)]
async fn shares_of_a_segment_are_requested_in_one_domain() {
    let fake = Fake::start().await;
    let mut cluster = ClusterSpec::new([4, 4]);
    cluster.segment_size = NonZeroU32::new(2);
    let request = ReserveRequest::new(cluster);
    fake.with(|cluster| {
        for (node, rank) in [(1, "1"), (2, "2")] {
            cluster.nodes[node]["labels"]["nvlink_domain"] = json!("rack");
            cluster.nodes[node]["labels"]["topo_rank"] = json!(rank);
        }
    });
    let spec = submitted(&fake, options(), &request).await.expect("submitted").spec();
    assert_eq!(spec["selectors"], json!([{"nvlink_domain": "rack"}, {"nvlink_domain": "rack"}]));
    assert_eq!(spec["bundles"], json!([{"CPU": 4.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 4.0}]));
}

/// Case 33 in part: a head that restarted without its state knows no job.
#[tokio::test(start_paused = true)]
async fn a_cluster_that_was_restarted_is_distinguished_from_a_job_that_failed() {
    let fake = Fake::start().await;
    let request = two_nodes();
    let (error, ()) = tokio::join!(refused(&fake, &request), async {
        fake.until("the job is followed", |cluster| cluster.requests.iter().any(|seen| seen.line.ends_with("/logs")))
            .await;
        fake.with(|cluster| cluster.jobs.clear());
    });
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert_contains(&error, &["the cluster was restarted"]);
    assert_eq!(fake.seen(SUBMIT).iter().filter(|seen| seen.line == SUBMIT).count(), 1, "{:?}", fake.lines());
}

/// The node of the driver is lost, which Ray itself notices a minute later.
#[tokio::test(start_paused = true)]
async fn a_job_whose_driver_lost_its_node_has_ended() {
    let fake = Fake::start().await;
    fake.with(|cluster| cluster.nodes[0]["state"] = json!("DEAD"));
    let begin = Instant::now();
    let error = refused(&fake, &two_nodes()).await;
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert_contains(&error, &["the node of its driver is lost"]);
    assert_stopped(&fake).await;
}

/// The state of a job that is submitted.
async fn submitted(fake: &Fake, options: RayOptions, request: &ReserveRequest) -> Result<Job, Error> {
    fake.play(|job| job.log = event(1, "ended", json!({"code": 3, "why": "the test needs no more"})));
    let reserved = timeout(LONG, ray(fake, options).reserve(&cx(), request)).await.expect("in time");
    let error = reserved.map(drop).expect_err("it has ended");
    if error.to_string().contains("the test needs no more") { Ok(fake.job()) } else { Err(error) }
}

#[tokio::test(start_paused = true)]
async fn a_job_is_submitted_as_it_is_documented() {
    let fake = Fake::start().await;
    let mut options = options();
    options.variables = BTreeMap::from([("NCCL_DEBUG".to_owned(), "INFO".to_owned())]);
    options.resources = BTreeMap::from([("disk".to_owned(), 0.5)]);
    options.max_restarts = 7;
    options.placement_timeout = Duration::from_millis(2_500);
    let mut cluster = ClusterSpec::new([4, 2]);
    cluster.max_colocated_worker_groups = NonZeroU32::new(2);
    cluster.placement_group_strategy = PlacementStrategy::StrictSpread;
    let mut request = ReserveRequest::new(cluster);
    fake.with(|cluster| cluster.nodes[1]["resources_total"]["CPU"] = json!(8.0));
    let job = submitted(&fake, options.clone(), &request).await.expect("submitted");
    let id = job.id();
    assert!(id.starts_with("gym-") && id.ends_with("-a1"), "{id}");
    assert_eq!(job.request["metadata"], json!({"name": "trainer", "gym": id}));
    assert_eq!(job.request["entrypoint_resources"], json!({}), "the head runs the driver");
    assert!(job.request["entrypoint"].as_str().expect("a text").ends_with(" gym_ray.py"), "{}", job.request);
    let packages = fake.with(|cluster| cluster.packages.keys().cloned().collect::<Vec<_>>());
    assert_eq!(job.request["runtime_env"]["working_dir"], format!("gcs://{}", packages[0]));
    assert_eq!(job.variable("PYTHONUNBUFFERED"), "1");
    let spec = job.spec();
    assert_eq!((&spec["run"], &spec["strategy"]), (&json!(id), &json!("STRICT_SPREAD")));
    assert_eq!(spec["bundles"], json!([{"CPU": 8.0, "GPU": 4.0, "disk": 2.0}, {"CPU": 4.0, "GPU": 2.0, "disk": 1.0}]));
    assert_eq!((&spec["cpus"], &spec["selectors"]), (&json!([8, 4]), &json!([])));
    assert_eq!(spec["command"], json!(["/opt/gym/trainer", "--gym-node-agent"]));
    assert_eq!(spec["variables"], json!({"NCCL_DEBUG": "INFO"}));
    assert_eq!((&spec["placement_attempts"], &spec["placement_timeout_s"]), (&json!(1), &json!(2.5)));
    assert_eq!((&spec["max_restarts"], &spec["silence_s"]), (&json!(7), &json!(10.0)));
    assert_eq!(spec["agent"]["secret"].as_str().map(str::len), Some(32));
    // The driver must have stopped the ranks before Ray kills it.
    let stop: f64 = job.variable("RAY_JOB_STOP_WAIT_TIME_S").parse().expect("seconds");
    let (driver, ranks) =
        (spec["grace_s"].as_f64().expect("seconds"), spec["agent"]["grace_s"].as_f64().expect("seconds"));
    assert!(stop >= driver + 1.0 && driver >= ranks + 1.0, "{stop} s, {driver} s and {ranks} s");

    // Another run has another secret, and a driver off the head if that is requested.
    fake.with(|cluster| cluster.jobs.clear());
    options.driver = RayDriver::Worker;
    request.unified = true;
    request.cluster.placement_group_strategy = PlacementStrategy::Pack;
    let again = submitted(&fake, options, &request).await.expect("submitted");
    let resources = again.request["entrypoint_resources"].as_object().expect("an object").clone();
    let names: Vec<&str> = resources.keys().map(String::as_str).collect();
    assert!(matches!(names[..], ["node:10.0.0.11" | "node:10.0.0.12"]), "{resources:?}");
    assert_ne!(again.spec()["agent"]["secret"], spec["agent"]["secret"]);
    assert_eq!(again.spec()["strategy"], "PACK");
    assert_eq!(again.spec()["bundles"], Value::Array(vec![json!({"CPU": 2.0, "GPU": 1.0, "disk": 0.5}); 6]));
}

/// Ranks that count nothing get a share on each node that can run something.
#[tokio::test(start_paused = true)]
async fn ranks_without_a_cluster_have_a_share_on_each_living_node_with_cpus() {
    let fake = Fake::start().await;
    let spec = submitted(&fake, options(), &ReserveRequest::for_ranks(7)).await.expect("submitted").spec();
    assert_eq!((&spec["bundles"], &spec["strategy"]), (&json!([{"CPU": 0.01}, {"CPU": 0.01}]), &json!("SPREAD")));
    assert_eq!(spec["cpus"], json!([0, 0]));
}
