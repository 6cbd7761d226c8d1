//! Cases about the summary of a collection and about rollouts in flight.

use std::collections::BTreeMap;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::fixture::{Started, TestFolder, ended_with, open_gate, row};

/// Recomputes the figures of the agent from the rollouts file, and compares them with those of `--json`.
#[track_caller]
fn compare(report: &Value, folder: &TestFolder) {
    let rows = folder.rollouts();
    let agent = &report["agents"]["digit_agent"];
    let mut by_task: BTreeMap<i64, Vec<f64>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row["mask_sample"] != true) {
        by_task.entry(row["_ng_task_index"].as_i64().unwrap()).or_default().push(row["reward"].as_f64().unwrap());
    }
    let rewards: Vec<f64> = by_task.values().flatten().copied().collect();
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    assert_eq!(report["recorded"], rows.len(), "{report}");
    assert_eq!((&agent["rollouts"], &agent["scored"]), (&json!(rows.len()), &json!(rewards.len())), "{report}");
    assert_eq!(agent["unscored"], rows.len() - rewards.len(), "{report}");
    assert!((agent["mean_reward"].as_f64().unwrap() - mean(&rewards)).abs() < 1e-12, "{report}");
    for bin in agent["reward_histogram"].as_array().unwrap() {
        let count = rewards.iter().filter(|reward| bin["from"] == json!(**reward)).count();
        assert_eq!(bin["count"], count, "{report}");
    }
    let counts = agent["reward_histogram"].as_array().unwrap().iter().map(|bin| bin["count"].as_u64().unwrap());
    assert_eq!(counts.sum::<u64>(), rewards.len() as u64, "{report}");

    let k_max = by_task.values().map(Vec::len).max().unwrap();
    let passes = agent["pass_at_k"].as_array().unwrap();
    assert_eq!(passes.is_empty(), k_max < 2, "{report}");
    if let Some(highest) = passes.last() {
        // With as many rollouts as a task has, it passes if one of them does.
        let tasks: Vec<f64> = by_task
            .values()
            .filter(|rewards| rewards.len() == k_max)
            .map(|rewards| if rewards.contains(&1.0) { 1.0 } else { 0.0 })
            .collect();
        assert_eq!((&highest["k"], &highest["tasks"]), (&json!(k_max), &json!(tasks.len())), "{report}");
        assert!((highest["rate"].as_f64().unwrap() - mean(&tasks)).abs() < 1e-12, "{report}");
    }

    let of_episodes =
        |key: &str| -> Vec<f64> { rows.iter().map(|row| row["_gym_episode"][key].as_f64().unwrap()).collect() };
    assert_eq!((&agent["episodes"], &agent["truncated_share"]), (&json!(rows.len()), &json!(0.0)), "{report}");
    assert!((agent["mean_turns"].as_f64().unwrap() - mean(&of_episodes("turns"))).abs() < 1e-12, "{report}");
    let tokens = |key: &str| of_episodes(key).iter().sum::<f64>();
    assert_eq!(agent["tokens"]["episodes"], rows.len(), "{report}");
    assert_eq!(agent["tokens"]["input"].as_f64(), Some(tokens("input_tokens")), "{report}");
    assert_eq!(agent["tokens"]["output"].as_f64(), Some(tokens("output_tokens")), "{report}");
    let longest = of_episodes("seconds").into_iter().fold(0.0, f64::max);
    let latency = &agent["latency"];
    assert!((latency["max_seconds"].as_f64().unwrap() / longest - 1.0).abs() < 0.01, "{report}");
    assert!(latency["p50_seconds"].as_f64().unwrap() <= latency["p99_seconds"].as_f64().unwrap(), "{report}");
}

pub(crate) fn the_summary_has_the_figures_of_the_rows_on_the_disk() {
    let folder = TestFolder::new();
    let mut rows: Vec<Value> = (0..4).map(|number| row("0123456789", number)).collect();
    // No digit of the model is right.
    rows.push(row("none", 4));
    rows.push(row("0123456789", 5));
    rows[5]["mask"] = json!(true);
    // The verifier has an error for this task.
    rows.push(row("", 6));
    folder.tasks(rows);
    let port = folder.port();
    let collect = |options: &[&str], code: i32| {
        let options = [&["--config", "gym.yaml", "--attempts", "1", &port, "--json"], options].concat();
        let (out, error) = ended_with(&folder.collect(&options).output().unwrap(), code);
        let report: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{error}"));
        assert_eq!(report["exit_code"], code, "{report}");
        compare(&report, &folder);
        (report, error)
    };
    let (report, _) = collect(&["--limit", "5"], 0);
    assert_eq!((&report["ended"], &report["advice"]), (&json!("exhausted"), &Value::Null), "{report}");
    assert_eq!((&report["failures"], &report["causes"]), (&json!({}), &json!([])), "{report}");
    assert_eq!(report["agents"]["digit_agent"]["pass_at_k"], json!([]), "no task has two rollouts: {report}");

    // The rest: further tasks, and two further repeats of the recorded ones.
    let (report, error) = collect(&["--resume", "--num-repeats", "3", "--fail-fast", "0"], 3);
    for (key, expected) in
        [("rollouts", 21), ("recorded", 18), ("recorded_earlier", 5), ("failed", 3), ("incomplete", 0)]
    {
        assert_eq!(report[key], expected, "{key}: {report}");
    }
    assert_eq!(report["failures"], json!({"verifier_error": 3}), "{report}");
    let task = json!({"task_index": 6, "expected": 3, "recorded": 0, "missing": 3});
    assert_eq!(report["incomplete_tasks"], json!({"digit_agent": [task]}), "{report}");
    let cause = &report["causes"][0];
    assert_eq!((&cause["count"], &cause["server"], &cause["route"]), (&json!(3), &json!("digit"), &json!("/verify")));
    assert!(cause["causes"].to_string().contains("the task has no digits to choose from"), "{report}");
    assert_eq!(report["transports"]["mem"].as_u64().map(|count| count > 0), Some(true), "{report}");
    for file in ["rollouts", "failures", "inputs", "statistics"] {
        assert!(folder.file(report["files"][file].as_str().unwrap()).exists(), "{file}: {report}");
    }
    let advice = report["advice"].as_str().unwrap();
    assert!(error.contains(advice) && advice.contains("3 rollouts failed"), "{error}");

    // Nothing is left to do, so all figures are of earlier runs, and the table shows the same ones.
    let options = ["--config", "gym.yaml", "--attempts", "1", &port, "--resume", "--num-repeats", "3"];
    let (out, _) = ended_with(&folder.collect(&options).output().unwrap(), 3);
    let words: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(words[0][..9].join(" "), "AGENT ROLLOUTS WITHOUT REWARD MEAN REWARD PASS@3 TURNS TRUNCATED", "{out}");
    let expected = ["digit_agent", "18", "of", "21", "3", "0.8000", "0.8000", "1.0", "0.0%"];
    assert_eq!(words[1][..9], expected, "{out}");
    let missing = "digit_agent: 3 of 21 rollouts are missing, in 1 of 7 tasks; the figures are those of the recorded ones; \
                   task without a recorded rollout: 6";
    assert!(out.contains(missing), "{out}");
    assert!(out.contains("0 ▂█ 1"), "three zeros and twelve ones: {out}");
}

pub(crate) fn status_shows_the_oldest_rollout_in_flight() {
    let folder = TestFolder::new();
    let gate = folder.gate();
    let mut rows: Vec<Value> = (0..2).map(|number| row("0123456789", number)).collect();
    rows[1]["wait_for"] = json!(gate);
    folder.tasks(rows);
    let running = folder.start(&[]);
    let head = folder.head();
    let child = folder.collect(&["--head-url", &head, "--progress", "none"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut collect = Started { child, said: Vec::new() };
    let oldest_of = |status: &Value, name: &str| {
        let servers = status["servers"].as_array().unwrap();
        servers.iter().find(|server| server["name"] == name).unwrap()["oldest"].clone()
    };
    let oldest = |name: &str| oldest_of(&folder.status(), name);
    folder.status_until(|status| {
        ["digit_agent", "digit_environment_server"].iter().all(|name| oldest_of(status, name)["rollout"] == "1-0")
    });
    assert_eq!(oldest("digit_agent")["route"], "/run");
    // Other servers do not run rollouts.
    assert_eq!(oldest("policy_model"), Value::Null);
    let (table, _) = ended_with(&folder.run(&["status", "--head-url", &head]), 0);
    let line = table.lines().find(|line| line.starts_with("digit_agent ")).unwrap();
    assert!(line.contains(" s (1-0)"), "{table}");

    let _open = open_gate(&gate);
    assert_eq!(collect.child.wait().unwrap().code(), Some(0));
    folder.status_until(|status| oldest_of(status, "digit_agent") == Value::Null);
    assert_eq!(running.interrupt(), Some(0));
}
