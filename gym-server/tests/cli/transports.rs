//! Cases about transports: chosen by configuration, required, and diagnosed.

use crate::fixture::{CONFIG, TestFolder, ended_with, get, row};

/// Returns `true` if this machine supports the transport. A missing transport is printed, or fails with `GYM_UCX_REQUIRED=1`.
pub(crate) fn has(folder: &TestFolder, transport: &str) -> bool {
    let doctor = folder.run(&["doctor", "--no-self-test", "--require-transport", transport]);
    let has = doctor.status.code() != Some(1);
    assert!(has || std::env::var_os("GYM_UCX_REQUIRED").is_none(), "{}", String::from_utf8_lossy(&doctor.stderr));
    if !has {
        eprintln!("NOT RUN: {}", String::from_utf8_lossy(&doctor.stderr));
    }
    has
}

/// Returns the transports and paths from the server of this name to its peers, as `rgym status` reports them.
pub(crate) fn paths(status: &serde_json::Value, name: &str) -> Vec<(String, String)> {
    let server = status["servers"].as_array().unwrap().iter().find(|server| server["name"] == name).unwrap();
    let text = |peer: &serde_json::Value, key: &str| peer[key].as_str().unwrap_or_default().to_owned();
    let peers = server["peers"].as_array().unwrap().iter();
    peers.map(|peer| (text(peer, "transport"), text(peer, "lanes"))).collect()
}

pub(crate) fn ucx_is_chosen_by_configuration_alone() {
    for (transport, lane) in [("shm", "/memory"), ("ucx_tcp", "tcp/")] {
        let folder = TestFolder::new();
        if !has(&folder, transport) {
            return;
        }
        folder.tasks((0..5).map(|number| row("0123456789", number)));
        let head = folder.start(&["--serve", "head_server"]);
        // The agent's process receives the transport as an option, the others through the file.
        let config = format!("{CONFIG}transport: {transport}\n");
        std::fs::write(folder.file("gym.yaml"), config).unwrap();
        let services = folder.start_services(&["--transport", transport]);
        ended_with(&folder.collected(&["--transport", transport]), 0);
        assert_eq!(folder.rollouts().len(), 5);
        let status = folder.status();
        let reached = paths(&status, "digit_agent");
        assert_eq!(reached.len(), 2, "model and resources: {status}");
        for (name, lanes) in &reached {
            assert!(name == transport && lanes.contains(lane), "{status}");
        }
        for service in services {
            assert_eq!(service.interrupt(), Some(0));
        }
        assert_eq!(head.interrupt(), Some(0));
    }
}

pub(crate) fn settings_of_ucx_neither_end_a_process_nor_change_its_output() {
    let folder = TestFolder::new();
    if !has(&folder, "shm") {
        return;
    }
    folder.tasks((0..2).map(|number| row("0123456789", number)));
    let collect = |output: &str, variable: (&str, &str)| {
        let port = folder.port();
        let arguments = ["--config", "gym.yaml", &port, "--transport", "shm", "--json", "-o", output];
        let arguments = [&["collect", "-a", "digit_agent", "-i", "tasks.jsonl"], &arguments[..]].concat();
        folder.command(&arguments).env(variable.0, variable.1).output().unwrap()
    };
    // UCX logs a warning about a variable that it does not know, by default to standard output.
    let (out, error) = ended_with(&collect("out/unknown.jsonl", ("UCX_UNKNOWN_TO_IT", "1")), 0);
    assert!(serde_json::from_str::<serde_json::Value>(&out).is_ok(), "{out}");
    assert!(error.contains("UCX_UNKNOWN_TO_IT"), "{error}");
    // UCX 1.13 dies of this value.
    let output = collect("out/unreadable.jsonl", ("UCX_MAX_EAGER_LANES", "abc"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code().is_some(), "{output:?}");
    for words in ["UCX_MAX_EAGER_LANES=`abc`", "the environment", "write a number"] {
        assert!(error.contains(words), "{words}: {output:?}");
    }
}

pub(crate) fn doctor_names_the_setting_that_keeps_ucx_from_starting() {
    let folder = TestFolder::new();
    if !has(&folder, "shm") {
        return;
    }
    let doctor = |variable: Option<(&str, &str)>| {
        let output = folder.command(&["doctor", "--json"]).envs(variable).output().unwrap();
        let diagnosis: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let findings = diagnosis["findings"].as_array().unwrap().clone();
        let faulty = |finding: &serde_json::Value| finding["status"] == "error" || finding["status"] == "warning";
        let about_ucx = findings.into_iter().filter(|finding| finding.to_string().contains("UCX_") && faulty(finding));
        (output.status.code(), about_ucx.collect::<Vec<_>>())
    };
    let (_, none) = doctor(None);
    assert_eq!(none, Vec::<serde_json::Value>::new());
    for (name, value, fix) in [
        ("UCX_TLS", "\"rc\"", "without quotes"),
        ("UCX_MAX_EAGER_LANES", "abc", "write a number"),
        ("UCX_NET_DEVICES", "eth9", "write UCX_NET_DEVICES="),
        ("UCX_UNKNOWN_TO_IT", "1", "remove it"),
    ] {
        let (code, found) = doctor(Some((name, value)));
        assert_eq!(found.len(), 1, "each thing is said once: {found:?}");
        let (text, said) = (found[0]["found"].as_str().unwrap(), found[0]["fix"].as_str().unwrap());
        assert!(text.contains(name) && said.contains(fix) && !said.contains("install"), "{found:?}");
        assert_eq!(code, Some(if name == "UCX_UNKNOWN_TO_IT" { 3 } else { 4 }), "{found:?}");
    }
    std::fs::write(folder.file("ucx.conf"), "UCX_TLS=rc\n").unwrap();
    let (code, found) = doctor(None);
    assert_eq!((code, found.len()), (Some(4), 1), "{found:?}");
    assert!(found[0]["found"].as_str().unwrap().contains("/ucx.conf:1"), "{found:?}");
}

pub(crate) fn servers_of_one_process_call_each_other_over_ucx() {
    let folder = TestFolder::new();
    if !has(&folder, "shm") {
        return;
    }
    folder.tasks((0..5).map(|number| row("0123456789", number)));
    let started = folder.start(&["--transport", "shm"]);
    ended_with(&folder.collected(&[]), 0);
    assert_eq!(folder.rollouts().len(), 5);
    let metrics = get(folder.head_port, "/metrics");
    assert!(metrics.contains(r#"gym_transport_connections_total{transport="shm"}"#), "{metrics}");
    assert!(
        metrics.contains("gym_ucx_wakeups_total{source=") && metrics.contains("gym_ucx_bytes_total{peer="),
        "{metrics}"
    );
    let (table, _) = ended_with(&folder.run(&["status", "--head-url", &folder.head()]), 0);
    assert!(table.contains("shm 3"), "environment, model and resources: {table}");
    assert_eq!(started.interrupt(), Some(0));
}

pub(crate) fn a_required_transport_fails_without_fallback() {
    let folder = TestFolder::new();
    folder.tasks([row("0123456789", 0)]);
    let started = folder.start(&[]);
    let (out, error) = ended_with(&folder.collected(&["--require-transport", "rdma", "--attempts", "1"]), 3);
    let failures = std::fs::read_to_string(folder.file("out/rollouts_failures.jsonl")).unwrap();
    for words in ["http: below require_transport rdma", "it offers no ucx endpoint", "the command `doctor`"] {
        assert!(failures.contains(words), "{words}: {failures}{out}{error}");
    }
    assert_eq!(started.interrupt(), Some(0));
}

pub(crate) fn doctor_reports_why_a_required_transport_is_unavailable() {
    let folder = TestFolder::new();
    let doctor = folder.run(&["doctor", "--json", "--no-self-test", "--require-transport", "rdma"]);
    let diagnosis: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let transports = diagnosis["transports"].as_array().unwrap();
    let rdma = transports.iter().find(|row| row["transport"] == "rdma").unwrap();
    let error = String::from_utf8_lossy(&doctor.stderr);
    if rdma["usable"] == true {
        assert!(doctor.status.code() != Some(1) && rdma["fix"].is_null(), "{diagnosis}{error}");
        return;
    }
    assert_eq!(doctor.status.code(), Some(1), "{diagnosis}{error}");
    let said = [&rdma["because"], &rdma["fix"]].map(|text| text.as_str().expect("a text"));
    assert!(said.iter().all(|text| error.contains(text)), "{said:?} in {error}");
}
