//! Cases about model endpoints that are down, are awaited, or truncate; and about what `doctor` finds.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use gym_core::testing::free_port;

use crate::fixture::{Started, TestFolder, ended_with, row, said_until, start_engine, until};

pub(crate) fn a_dead_model_endpoint_is_named_at_the_start_and_while_rollouts_wait() {
    let folder = TestFolder::new();
    let port = free_port();
    folder.call_engine(port);
    folder.tasks((0..3).map(|number| row("0", number)));
    let running = folder.start(&[]);
    let (head, own_port) = (folder.head(), format!("+head_server.port={}", free_port()));
    for servers in [["--config", "gym.yaml", &own_port].as_slice(), &["--head-url", &head]] {
        let child = folder
            .collect(&[servers, &["--overwrite", "--progress", "plain"]].concat())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut collect = Started { child, said: Vec::new() };
        let mut lines = BufReader::new(collect.child.stderr.take().unwrap()).lines();
        let said = said_until(&mut lines, "in flight; policy_model: ");
        let endpoint = format!("http://127.0.0.1:{port}/v1");
        for words in [
            format!("warning: model endpoint {endpoint} (policy_model) is unavailable: connection refused"),
            "fix: start the engine, or correct `base_url`; --wait-for-model SECS waits for it".to_owned(),
            format!("0/3 rollouts (0.0%), 0.0/s, 3 in flight; policy_model: {endpoint} is unavailable for "),
            "s: connection refused (fix: start the engine, or correct `base_url`), ".to_owned(),
            "wait up to 300 s".to_owned(),
        ] {
            assert!(said.contains(&words), "{words:?} in {said}");
        }
        // The program with the model server logs the first refusal.
        let logs =
            said.contains("WARN") && said.contains("the model endpoint is unavailable; calls to it are repeated");
        assert_eq!(logs, servers[0] == "--config", "{said}");
    }
    let status = folder.status();
    let model = status["servers"].as_array().unwrap().iter().find(|server| server["name"] == "policy_model").unwrap();
    assert_eq!((&model["endpoints"][0]["state"], &model["healthy"]), (&"unavailable".into(), &true.into()), "{status}");
    let (table, _) = ended_with(&folder.run(&["status", "--head-url", &folder.head()]), 0);
    assert!(table.contains(&format!("policy_model: http://127.0.0.1:{port}/v1 is unavailable for ")), "{table}");
    drop(running);
}

pub(crate) fn a_command_waits_for_the_model_as_long_as_asked() {
    let folder = TestFolder::new();
    let port = free_port();
    folder.call_engine(port);
    let own_port = folder.port();
    let run = |seconds| folder.command(&["run", "--config", "gym.yaml", &own_port, "--wait-for-model", seconds]);
    let (out, error) = ended_with(&run("0").output().unwrap(), 1);
    assert!(error.contains("error: after 0 s (--wait-for-model), model endpoint http://127.0.0.1:"), "{error}");
    assert!(!out.contains("ready: "), "{out}");
    let child = run("600").stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut run = Started { child, said: Vec::new() };
    let mut lines = BufReader::new(run.child.stderr.take().unwrap()).lines();
    said_until(&mut lines, &format!("waiting for http://127.0.0.1:{port}/v1: up to "));
    start_engine(port, 500, "{}");
    said_until(&mut lines, "(policy_model) responds");
    let mut lines = BufReader::new(run.child.stdout.take().unwrap()).lines();
    said_until(&mut lines, "ready: 4 servers");
    assert_eq!(run.interrupt(), Some(0));
}

pub(crate) fn doctor_calls_the_model_endpoints_of_a_configuration() {
    let folder = TestFolder::new();
    let port = free_port();
    folder.call_engine(port);
    let finding = |code| {
        let (out, _) = ended_with(&folder.run(&["doctor", "--json", "--no-self-test", "--config", "gym.yaml"]), code);
        let diagnosis: serde_json::Value = serde_json::from_str(&out).unwrap();
        diagnosis["findings"].as_array().unwrap().iter().find(|row| row["topic"] == "model_endpoint").unwrap().clone()
    };
    let dead = finding(3);
    assert_eq!((&dead["status"], &dead["fix"]), (&"warning".into(), &"start the engine, or correct `base_url`".into()));
    start_engine(port, 500, "{}");
    // Other findings of this machine decide the exit code.
    let responds = format!("model endpoint http://127.0.0.1:{port}/v1 (policy_model) responds");
    until(|| {
        let out = String::from_utf8(folder.run(&["doctor", "--no-self-test", "--config", "gym.yaml"]).stdout).unwrap();
        if out.contains(&responds) { Ok(()) } else { Err(out) }
    });
}

pub(crate) fn doctor_tells_a_head_server_from_another_program() {
    let folder = TestFolder::new();
    let head_port = |port: u16| {
        let port = format!("++head_server.port={port}");
        let out = folder.run(&["doctor", "--json", "--no-self-test", "--output", "out/rollouts.jsonl", &port]).stdout;
        let diagnosis: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let findings = diagnosis["findings"].as_array().unwrap().clone();
        for topic in ["head_port", "descriptors", "disk", "clock"] {
            assert_eq!(findings.iter().filter(|row| row["topic"] == topic).count(), 1, "{topic}: {diagnosis}");
        }
        findings.into_iter().find(|row| row["topic"] == "head_port").unwrap()
    };
    // On a busy machine, who listens there may answer too late.
    let finding = |port: u16, status: &str, words: &str| {
        until(|| {
            let finding = head_port(port);
            let found = finding["status"] == status && finding["found"].as_str().unwrap().contains(words);
            if found { Ok(finding) } else { Err(finding.to_string()) }
        })
    };
    let _started = folder.start(&[]);
    finding(folder.head_port, "ok", "a head server of this SDK listens on 127.0.0.1:");
    let port = free_port();
    start_engine(port, 500, "{}");
    let other = finding(port, "warning", "which is no head server, listens on");
    assert!(other["fix"].as_str().unwrap().contains("+head_server.port=PORT"), "{other}");
}

pub(crate) fn a_truncated_rollout_is_scored_or_fails() {
    let folder = TestFolder::new();
    let port = free_port();
    folder.call_engine(port);
    start_engine(
        port,
        400,
        r#"{"object":"error","message":"The input (9 tokens) is longer than the model's context length (8 tokens).","code":400}"#,
    );
    folder.tasks([row("0", 0)]);
    let collect = |output: &str, truncated: &[&str]| {
        let own_port = folder.port();
        let arguments = ["--config", "gym.yaml", &own_port, "--output", output];
        let mut command = folder.command(&["collect", "-a", "digit_agent", "-i", "tasks.jsonl"]);
        command.args(arguments).args(truncated).output().unwrap()
    };
    ended_with(&collect("out/rollouts.jsonl", &[]), 0);
    let scored = folder.rollouts().remove(0);
    assert!(scored["reward"].is_number(), "{scored}");
    assert_eq!(scored["response"]["incomplete_details"]["code"], "context_length_exceeded", "{scored}");
    let (out, _) = ended_with(&collect("out/strict.jsonl", &["--truncated", "fail"]), 3);
    assert!(out.contains("0 of 1 rollouts are recorded, 1 failed") && out.contains("truncated"), "{out}");
    let failures = std::fs::read_to_string(folder.file("out/strict_failures.jsonl")).unwrap();
    assert!(failures.contains(r#""_ng_failure_class":"truncated""#), "{failures}");
    assert!(failures.contains("context_length_exceeded: The input (9 tokens) is longer"), "{failures}");
}
