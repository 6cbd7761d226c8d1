//! The events file, the scalars and the reports of a collection: what a program that reads them learns.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

mod collection;

use std::path::Path;
use std::sync::Arc;

use gym_client::collect::ExistingOutput;
use gym_client::collect::monitor::{AttemptId, CollectionMonitor, CollectionReport, ReportReply, WantedRow};
use gym_core::{CallContext, CancelToken, Code, Error};
use parking_lot::Mutex;
use serde_json::{Value, json};

use collection::Ground;

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.ends_with('\n'), "{text}");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the event, its task and its attempt, and the named fields, of each line about an attempt.
fn attempts(lines: &[Value], fields: &[&str]) -> Vec<Value> {
    let of_attempt = lines.iter().filter(|line| line.get("task_index").is_some());
    let told = of_attempt.map(|line| {
        let id = json!([line["event"], line["task_index"], line["attempt_index"]]);
        let more: Vec<&Value> = fields.iter().filter_map(|field| line.get(*field)).collect();
        json!([id, more])
    });
    told.collect()
}

#[tokio::test]
async fn each_attempt_is_told_with_what_came_of_it() {
    let transient = json!({"_ng_failure_class": "agent_request_failed", "_ng_failure_message": "the model is busy"});
    let terminal =
        json!({"_ng_failure_class": "verifier_error", "_ng_failure_message": "no key", "_ng_failure_terminal": true});
    let response = json!({"usage": {"input_tokens": 7, "output_tokens": 5, "total_tokens": 12},
        "incomplete_details": {"reason": "max_output_tokens"}});
    let ground = Ground::new(&[
        json!([{"reward": 1.0}]),
        json!([transient, {"reward": 0.25, "response": response}]),
        json!([terminal]),
        json!([{"_ng_no_persist": true}]),
        json!([transient, transient, transient]),
    ]);
    let summary = ground.collect(ground.options()).await.unwrap();
    assert_eq!((summary.events_dropped, summary.warnings), (0, Vec::new()));
    let lines = lines(&ground.events());
    let told = attempts(&lines, &["reward", "attempts", "tokens", "truncated", "class", "cause", "retried"]);
    let tokens = json!({"input_tokens": 7, "output_tokens": 5});
    let busy = |retried: bool| json!(["agent_request_failed", "the model is busy", retried]);
    let expected = json!([
        [["started", 0, 0], []],
        [["finished", 0, 0], [1.0, 1, null, null]],
        [["started", 1, 0], []],
        [["failed", 1, 0], busy(true)],
        [["started", 1, 1], []],
        [["finished", 1, 1], [0.25, 2, tokens, "max_output_tokens"]],
        [["started", 2, 0], []],
        [["failed", 2, 0], ["verifier_error", "no key", false]],
        [["started", 3, 0], []],
        [["unrecorded", 3, 0], []],
        [["started", 4, 0], []],
        [["failed", 4, 0], busy(true)],
        [["started", 4, 1], []],
        [["failed", 4, 1], busy(true)],
        [["started", 4, 2], []],
        [["failed", 4, 2], busy(false)],
    ]);
    assert_eq!(json!(told), expected);
    let first = &lines[0];
    assert_eq!(
        (&first["event"], &first["rollouts"], &first["resumed"]),
        (&json!("run_started"), &json!(5), &json!(false))
    );
    let last = &lines[lines.len() - 1];
    let counts = ["completed", "failed", "incomplete", "mean_reward", "events_dropped"].map(|key| last[key].clone());
    assert_eq!((&last["event"], &last["end"]), (&json!("run_ended"), &json!("exhausted")));
    assert_eq!(json!(counts), json!([2, 3, 0, 0.625, 0]));
    let failures = std::fs::read_to_string(&summary.files.failures).unwrap();
    assert!(failures.contains(&format!("\"run_id\":{}", first["run_id"])), "the run of the failures file");
    let times: Vec<f64> = lines.iter().map(|line| line["time"].as_f64().unwrap()).collect();
    assert!(times.is_sorted() && times[0] > 1.7e9, "{times:?}");
}

#[tokio::test]
async fn a_resumed_run_appends_and_a_new_one_asks_before_it_replaces() {
    let ground = Ground::new(&[json!([{"reward": 1.0}]), json!([{"_ng_no_persist": true}])]);
    ground.collect(ground.options()).await.unwrap();
    let first = lines(&ground.events()).len();
    let mut resumed = ground.options();
    resumed.existing = ExistingOutput::Resume;
    ground.collect(resumed).await.unwrap();
    let all = lines(&ground.events());
    assert_eq!(attempts(&all[first..], &[]), [json!([["started", 1, 0], []]), json!([["unrecorded", 1, 0], []])]);
    let began = &all[first];
    assert_eq!((&began["resumed"], &began["already_completed"]), (&json!(true), &json!(1)));
    // Another output, so that only the events file exists.
    let mut elsewhere = ground.options();
    elsewhere.output = ground.folder.path().join("other.jsonl");
    let refused = ground.collect(elsewhere.clone()).await.unwrap_err().to_string();
    assert!(refused.contains("events.jsonl") && refused.contains("--overwrite"), "{refused}");
    assert_eq!(lines(&ground.events()).len(), all.len());
    let mut options = elsewhere;
    options.existing = ExistingOutput::Overwrite;
    ground.collect(options).await.unwrap();
    assert_eq!(lines(&ground.events()).len(), first);
}

#[tokio::test]
async fn an_events_file_that_cannot_be_written_is_refused_before_a_file_of_an_earlier_run_changes() {
    let ground = Ground::new(&[json!([{"reward": 1.0}])]);
    ground.collect(ground.options()).await.unwrap();
    let recorded = std::fs::read(ground.options().output).unwrap();
    for (events, says) in [(ground.folder.path().to_owned(), "is a directory"), (ground.options().input, "same file")] {
        let mut options = ground.options();
        options.existing = ExistingOutput::Overwrite;
        options.events = Some(events);
        let refused = ground.collect(options).await.unwrap_err().to_string();
        assert!(refused.contains(says), "{refused}");
        assert_eq!(std::fs::read(ground.options().output).unwrap(), recorded);
    }
}

/// Runs only if `GYM_DATA_PYTHON` names an interpreter with TensorBoard.
#[tokio::test]
async fn tensorboards_own_reader_finds_every_scalar() {
    let Some(python) = std::env::var_os("GYM_DATA_PYTHON") else {
        println!("NOT RUN: GYM_DATA_PYTHON names no interpreter");
        return;
    };
    let terminal =
        json!({"_ng_failure_class": "verifier_error", "_ng_failure_message": "no key", "_ng_failure_terminal": true});
    let ground = Ground::new(&[
        json!([{"reward": 1.0}]),
        json!([{"reward": 0.25}]),
        json!([terminal]),
        json!([{"_ng_no_persist": true}, {"reward": 1.0}]),
    ]);
    let folder = ground.folder.path().join("scalars");
    let mut options = ground.options();
    options.tensorboard = Some(folder.clone());
    options.events = None;
    options.materialize.limit = Some(3);
    ground.collect(options.clone()).await.unwrap();
    // The file of a resumed run belongs to the same curve.
    (options.existing, options.materialize.limit) = (ExistingOutput::Resume, None);
    ground.collect(options).await.unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/python/data_peer.py");
    let output = std::process::Command::new(python).arg(script).arg("scalars").arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rates = found.as_object_mut().unwrap().remove("rollouts/per_second").unwrap();
    let [first, second] = &rates.as_array().unwrap()[..] else { panic!("{rates}") };
    assert!(first[0] == 2 && first[1].as_f64().unwrap() > 0.0 && second[0] == 2, "{rates}");
    let expected = json!({
        "reward/mean": [[2, 0.625], [2, 0.625]],
        "reward/mean/agent": [[2, 0.625], [2, 0.625]],
        "rollouts/in_flight": [[2, 0.0], [2, 0.0]],
        "rollouts/completed": [[2, 2.0], [2, 2.0]],
        "rollouts/failed": [[2, 1.0], [2, 2.0]],
        "failed_attempts/verifier_error": [[2, 1.0]],
    });
    assert_eq!(found, expected);
}

/// A monitor that keeps the reports.
#[derive(Debug, Default)]
struct Kept {
    reports: Mutex<Vec<CollectionReport>>,
    fails: Option<Code>,
}

#[async_trait::async_trait]
impl CollectionMonitor for Kept {
    async fn report(&self, _: &CallContext, report: &CollectionReport) -> gym_core::Result<ReportReply> {
        let mut reports = self.reports.lock();
        reports.push(report.clone());
        match self.fails {
            Some(code) => Err(Error::finished(code, "the monitor fails")),
            None => Ok(ReportReply::default()),
        }
    }
}

#[tokio::test]
async fn the_last_report_has_the_counters_the_causes_and_each_attempt() {
    let terminal =
        json!({"_ng_failure_class": "verifier_error", "_ng_failure_message": "no key", "_ng_failure_terminal": true});
    let ground = Ground::new(&[json!([{"reward": 1.0}]), json!([terminal]), json!([{"reward": 0.5}])]);
    let monitor = Arc::new(Kept::default());
    let collector = ground.collector().reporting_to(Arc::clone(&monitor) as _);
    let summary = collector.collect(ground.options(), CancelToken::new()).await.unwrap();
    let reports = std::mem::take(&mut *monitor.reports.lock());
    let last = reports.last().unwrap();
    assert_eq!((last.rollouts, last.completed, last.failed, last.in_flight), (3, 2, 1, 0));
    assert_eq!((last.end.as_deref(), last.mean_reward), (Some("exhausted"), Some(0.75)));
    assert_eq!(last.output, summary.files.rollouts.display().to_string());
    assert_eq!((last.causes.len(), last.causes[0].count), (1, 1));
    assert_eq!(last.agents["agent"]["scored"], 2);
    let ended = reports.iter().flat_map(|report| &report.ended);
    let ended: Vec<_> = ended.map(|ended| (ended.attempt.task, ended.reward, ended.class.is_some())).collect();
    assert_eq!(ended, [(0, Some(1.0), false), (1, None, true), (2, Some(0.5), false)]);
    // The events file has all events too: one observer takes nothing from the other.
    assert_eq!(attempts(&lines(&ground.events()), &[]).len(), 6);
}

#[tokio::test]
async fn a_monitor_that_fails_costs_no_rollout() {
    for code in [Code::NotFound, Code::Unavailable] {
        let ground = Ground::new(&[json!([{"reward": 1.0}]), json!([{"reward": 0.5}])]);
        let monitor = Arc::new(Kept { fails: Some(code), ..Kept::default() });
        let collector = ground.collector().reporting_to(Arc::clone(&monitor) as _);
        let summary = collector.collect(ground.options(), CancelToken::new()).await.unwrap();
        assert!(summary.is_complete());
        let reports = monitor.reports.lock();
        match code {
            Code::NotFound => assert_eq!(reports.len(), 1, "a monitor that takes no reports is asked once"),
            _ => assert!(reports.last().unwrap().ended.len() == 2, "a lost report is sent again"),
        }
    }
}

#[test]
fn reports_travel_as_json() {
    let wanted = WantedRow { attempt: AttemptId { task: 3, repeat: 1, attempt: 2 }, failed: true };
    let text = serde_json::to_string(&ReportReply { wanted: vec![wanted] }).unwrap();
    assert_eq!(text, r#"{"wanted":[{"task":3,"repeat":1,"attempt":2,"failed":true}]}"#);
    // A report of a newer collector has further keys, and one of an older collector lacks some.
    let report: CollectionReport = serde_json::from_str(r#"{"id":"c","completed":3,"new":1}"#).unwrap();
    assert_eq!((report.completed, report.end), (3, None));
}

#[tokio::test]
async fn rollouts_whose_agent_returns_no_reward_are_counted() {
    let answers = [json!({"text": "x"}), json!({"reward": null}), json!({"mask_sample": true}), json!({"reward": 1.0})];
    let ground = Ground::new(&answers.map(|answer| json!([answer])));
    let collected = ground.collect(ground.options()).await.unwrap();
    assert_eq!((collected.snapshot.completed, collected.snapshot.rewardless), (4, 1));
}
