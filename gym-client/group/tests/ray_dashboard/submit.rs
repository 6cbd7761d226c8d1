//! Packages and submissions: each is sent once, also if a response is lost.

use std::ffi::OsStr;
use std::io::{Cursor, Read as _};

use gym_core::{CallContext, Code, Error};
use gym_group::Provisioner as _;
use serde_json::{Value, json};
use tokio::process::Command;
use zip::ZipArchive;

use super::fake::{Answer, Fake, LONG, SUBMIT, Seen, VERSION, no_room};
use super::process::{SENDS, own_program, process};
use super::reserve::{options, ray, two_nodes};

/// Reserves on a cluster without room.
async fn refused(fake: &Fake) -> Error {
    fake.play(no_room);
    let reserved = ray(fake, options()).reserve(&CallContext::within(LONG), &two_nodes()).await;
    reserved.map(drop).expect_err("there is no room")
}

fn submissions(fake: &Fake) -> Vec<Value> {
    let sent = fake.seen(SUBMIT).into_iter().filter(|seen| seen.line == SUBMIT);
    sent.map(|seen| serde_json::from_slice(&seen.body).expect("JSON")).collect()
}

/// Case 9.
#[tokio::test(start_paused = true)]
async fn a_package_is_sent_once_and_is_the_same_for_the_same_files() {
    let fake = Fake::start().await;
    for _ in 0..2 {
        assert_eq!(refused(&fake).await.code(), Code::ResourceExhausted);
    }
    let packages = fake.seen("GET /api/packages/gcs/");
    assert_eq!(packages.len(), 2);
    assert_eq!(packages[0].line, packages[1].line, "the same package");
    let sent = fake.seen("PUT ");
    assert_eq!(sent.len(), 1, "{:?}", fake.lines());
    let name = sent[0].line.strip_prefix("PUT /api/packages/gcs/_ray_pkg_").and_then(|name| name.strip_suffix(".zip"));
    let name = name.expect("a name that Ray accepts");
    assert!(name.len() == 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}");
    let mut zip = ZipArchive::new(Cursor::new(sent[0].body.clone())).expect("a zip");
    assert_eq!(zip.len(), 1, "the program is on the nodes");
    let shim = std::io::read_to_string(zip.by_name("gym_ray.py").expect("the driver")).expect("text");
    assert!(shim.contains("GYM_RAY_SPEC"), "{shim}");
    for job in submissions(&fake) {
        assert_eq!(job["runtime_env"]["working_dir"], format!("gcs://_ray_pkg_{name}.zip"));
    }
}

/// Passwords, regular expressions and shell texts.
#[tokio::test(start_paused = true)]
async fn variables_arrive_as_they_are_although_ray_replaces_names() {
    let values = [
        "p$HOME",
        "${HOME}/x",
        "^a+$",
        "$",
        "$$HOME",
        "a\"b'c",
        "line\nnext\ttab",
        "\\$HOME\\u0024",
        "${UNSET:-x}",
        "ü$é",
        "",
    ];
    let variables: std::collections::BTreeMap<String, String> =
        values.iter().enumerate().map(|(at, value)| (format!("VALUE_{at}"), (*value).to_owned())).collect();
    let fake = Fake::start().await;
    fake.play(no_room);
    let mut options = options();
    options.variables.clone_from(&variables);
    let refused = ray(&fake, options).reserve(&CallContext::within(LONG), &two_nodes()).await;
    refused.map(drop).expect_err("there is no room");
    assert_eq!(fake.job().spec()["variables"], serde_json::json!(variables));
}

/// A cluster whose nodes are not ready yet answers so for some seconds.
#[tokio::test(start_paused = true)]
async fn a_job_is_submitted_again_while_the_cluster_starts() {
    let fake = Fake::start().await;
    let mut starts = [
        Answer::text(500, "Traceback\nRuntimeError: No available agent to submit job, please try again later."),
        Answer::text(503, "starting"),
    ]
    .into_iter();
    fake.before(move |seen| if seen.line == SUBMIT { starts.next() } else { None });
    assert_eq!(refused(&fake).await.code(), Code::ResourceExhausted, "the job has run");
    let sent = submissions(&fake);
    assert_eq!(sent.len(), 3);
    assert!(sent.iter().all(|job| job == &sent[0]), "the same job");
    // Within the deadline.
    let fake = Fake::start().await;
    fake.before(|seen| (seen.line == SUBMIT).then(|| Answer::text(500, "RuntimeError: No available agent")));
    let reserved =
        ray(&fake, options()).reserve(&CallContext::within(std::time::Duration::from_secs(5)), &two_nodes()).await;
    let text = reserved.map(drop).expect_err("it never starts").to_string();
    for part in ["No available agent", "job agent of its head", "--dashboard-agent-listen-port"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!text.contains("does not respond"), "the dashboard does: {text}");
}

/// Case 10, as Ray says it; the limit of the client itself needs a program of more than 100 MiB.
#[tokio::test(start_paused = true)]
async fn a_package_that_ray_finds_too_large_is_explained() {
    let fake = Fake::start().await;
    let too_large = "Maximum request body size 104857600 exceeded.";
    fake.before(move |seen| seen.line.starts_with("PUT ").then(|| Answer::text(413, too_large)));
    let error = refused(&fake).await;
    assert_eq!(error.code(), Code::ResourceExhausted);
    let text = error.to_string();
    assert!(text.contains(too_large) && text.contains("reserve bundles on the Ray cluster"), "{text}");
    assert!(text.contains("fix: "), "{text}");
    assert_eq!((fake.seen("PUT ").len(), submissions(&fake).len()), (1, 0), "not repeated, and no job");
}

/// A package that was not stored fails the reservation, with the last line of Ray's traceback.
#[tokio::test(start_paused = true)]
async fn a_package_that_ray_cannot_store_is_an_error_with_its_cause() {
    let fake = Fake::start().await;
    let traceback = "Traceback (most recent call last):\n  File \"/ray/job_head.py\", line 393, in upload_package\n    data = await req.read()\n\
                     RuntimeError: Failed to store package in the GCS.\n\n";
    fake.before(move |seen| seen.line.starts_with("PUT ").then(|| Answer::text(500, traceback)));
    let text = refused(&fake).await.to_string();
    assert!(
        text.contains("500: RuntimeError: Failed to store package in the GCS.") && !text.contains("Traceback"),
        "{text}"
    );
    assert_eq!(submissions(&fake).len(), 0);
}

/// Case 18: the request arrives, or does not; its response is lost.
#[tokio::test(start_paused = true)]
async fn a_submission_whose_response_was_lost_is_repeated_under_the_same_name_and_gives_one_job() {
    for arrives in [true, false] {
        let fake = Fake::start().await;
        let mut lost = 0;
        let mut rule = move |seen: &Seen| {
            (seen.line == SUBMIT && lost < 2).then(|| {
                lost += 1;
                Answer::Closed
            })
        };
        if arrives {
            fake.after(rule)
        } else {
            fake.before(move |seen| rule(seen))
        }
        let error = refused(&fake).await;
        assert!(error.to_string().contains("there is no room"), "the job was followed: {error}");
        let sent = submissions(&fake);
        assert_eq!(sent.len(), 3, "{:?}", fake.lines());
        assert!(sent.iter().all(|job| *job == sent[0]), "{sent:?}");
        assert_eq!(fake.stops(), [fake.job().id()]);
    }
}

/// Case 18: the name belongs to a job of somebody else.
#[tokio::test(start_paused = true)]
async fn a_job_of_somebody_else_under_the_same_name_is_an_error() {
    let fake = Fake::start().await;
    fake.before(|seen| (seen.line == SUBMIT).then_some(Answer::Closed));
    // The first attempt gives the name; then somebody else has it.
    let (error, ()) = tokio::join!(refused(&fake), async {
        fake.until("a submission", |cluster| cluster.requests.iter().any(|seen| seen.line == SUBMIT)).await;
        fake.with(|cluster| {
            cluster.before = None;
            cluster.after = None;
            let sent = cluster.requests.iter().rev().find(|seen| seen.line == SUBMIT).expect("it was sent");
            let mut request: Value = serde_json::from_slice(&sent.body).expect("JSON");
            request["metadata"] = json!({"name": "of somebody else"});
            cluster.submit_directly(&request);
        });
    });
    let id = fake.job().id();
    let text = error.to_string();
    assert!(text.contains(&format!("Job with submission_id {id} already exists")), "{text}");
    assert_eq!(fake.stops(), Vec::<String>::new(), "it is not ours");
}

/// Ray's own word for a head that has just started.
#[tokio::test(start_paused = true)]
async fn a_submission_that_ray_rejects_is_an_error_with_the_last_line() {
    let fake = Fake::start().await;
    let traceback = "Traceback (most recent call last):\n  File \"/ray/utils.py\", line 101, in parse_and_validate_request\n\
                     TypeError: metadata must be a dict\n";
    fake.before(move |seen| (seen.line == SUBMIT).then(|| Answer::text(400, traceback)));
    let error = refused(&fake).await;
    let text = error.to_string();
    assert!(text.contains("400: TypeError: metadata must be a dict") && !text.contains("Traceback"), "{text}");
    assert_eq!(submissions(&fake).len(), 1, "the answer would be the same");
}

/// Runs a process that sends its own program. The file is removed as soon as the process runs, if that is requested.
async fn program_arrives(fake: &Fake, removed: bool) {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("program");
    // Debug information would take seconds to pack. Another process writes the file, or a process that another test starts could hold it open.
    let mut strip = Command::new("strip");
    strip.arg("-o").args([&program, &own_program()]);
    assert!(strip.status().await.expect("strip is installed").success());
    let expected = std::fs::read(&program).expect("reads");
    fake.play(no_room);
    if removed {
        let program = program.clone();
        fake.after(move |seen| {
            if seen.line == VERSION {
                // As a new build of the program does it.
                let _ = std::fs::remove_file(&program);
            }
            None
        });
    }
    let said = process(fake, &program, &[(SENDS, OsStr::new("1"))]).await;
    assert!(said.contains("there is no room"), "{said}");
    let sent = fake.seen("PUT ");
    assert_eq!(sent.len(), 1);
    let mut zip = ZipArchive::new(Cursor::new(sent[0].body.clone())).expect("a zip");
    assert_eq!(zip.len(), 2, "the driver and the program");
    let mut packed = zip.by_name("gym_program").expect("the program");
    assert_eq!(packed.unix_mode().map(|mode| mode & 0o777), Some(0o755));
    assert_eq!(packed.size(), expected.len() as u64);
    let mut begin = vec![0; 1 << 20];
    packed.read_exact(&mut begin).expect("unpacks");
    assert!(expected.starts_with(&begin));
}

/// Case 9: the program itself is sent, executable.
#[tokio::test]
async fn the_program_is_sent_with_the_driver_and_stays_executable() {
    let fake = Fake::start().await;
    program_arrives(&fake, false).await;
    assert_eq!(fake.job().spec()["command"], json!(["./gym_program", "--gym-node-agent"]));
}

/// A job may be submitted again after weeks, and the nodes need the program that runs, not a newer build.
#[tokio::test]
async fn the_program_that_is_sent_is_the_one_that_runs() {
    program_arrives(&Fake::start().await, true).await;
}
