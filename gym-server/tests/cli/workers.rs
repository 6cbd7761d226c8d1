//! Cases about the start of a worker: its checks, and what its head compares.

use std::io::{BufRead, BufReader, Lines};
use std::process::{ChildStderr, Stdio};

use serde_json::Value;

use crate::fixture::{Started, TestFolder, ended_with, said_until};

/// Starts a command, and returns the lines of its log.
fn started(
    folder: &TestFolder,
    arguments: &[&str],
    variables: &[(&str, &str)],
) -> (Started, Lines<BufReader<ChildStderr>>) {
    let mut command = folder.command(arguments);
    command.envs(variables.iter().copied()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    (Started { child, said: Vec::new() }, lines)
}

pub(crate) fn the_head_names_what_differs_between_its_workers() {
    let folder = TestFolder::new();
    let (head_url, port) = (folder.head(), folder.port());
    let (_head, mut head) = started(&folder, &["run", "--head-only", &port], &[]);
    let join = |name: &str, class: &str| {
        let arguments = ["run", "--worker", "--head-url", &head_url, "--name", name, "--checks", "warn"];
        let (worker, mut lines) = started(&folder, &arguments, &[("NCCL_IB_TC", class)]);
        let said = said_until(&mut lines, "joined the cluster of");
        (worker, said, lines)
    };
    let (_first, said, _lines) = join("worker-1", "106");
    assert!(said.contains("configuration: NCCL_IB_TC=106  the environment"), "{said}");
    assert!(said.contains(" as worker-1, with the tuning ") && !said.contains("differs"), "{said}");
    let (_second, said, _lines) = join("worker-2", "106");
    assert!(!said.contains("differs"), "{said}");
    let (_third, said, _lines) = join("worker-3", "104");
    let differs = "NCCL_IB_TC differs between workers: `104` on worker-3; `106` on worker-1, worker-2; set the same value on all workers";
    assert!(said.contains(differs), "{said}");
    let said = said_until(&mut head, "differs between workers");
    assert!(said.contains(differs) && said.matches("differs").count() == 1, "{said}");
    let (out, _) = ended_with(&folder.run(&["workers", "--json", "--head-url", &head_url]), 0);
    let members: Vec<Value> = serde_json::from_str(&out).unwrap();
    let told: Vec<(&str, &str)> = members
        .iter()
        .map(|member| (member["name"].as_str().unwrap(), member["tuning"]["settings"]["NCCL_IB_TC"].as_str().unwrap()))
        .collect();
    assert_eq!(told, [("worker-1", "106"), ("worker-2", "106"), ("worker-3", "104")]);
    let digest = |at: usize| members[at]["tuning"]["digest"].as_str().unwrap();
    assert!(digest(0) == digest(1) && digest(0) != digest(2), "{members:?}");
}

pub(crate) fn a_wrong_setting_ends_a_worker_before_it_waits() {
    let folder = TestFolder::new();
    let head = folder.head();
    let start = |more: &[&str], variables: &[(&str, &str)]| {
        let arguments = [&["run", "--worker", "--head-url", &head, "--join-timeout", "0.2"], more].concat();
        folder.command(&arguments).envs(variables.iter().copied()).output().unwrap()
    };
    let wrong = [("NCCL_SOCKET_IFNAME", "absent0"), ("NCCL_IB_RETRY_CNT", "15")];
    let (_, error) = ended_with(&start(&[], &wrong), 2);
    assert!(error.contains("\nNCCL_SOCKET_IFNAME: ") && error.contains("absent0"), "{error}");
    assert!(error.contains("\nNCCL_IB_RETRY_CNT: ") && error.contains("\n  fix: "), "{error}");
    assert!(!error.contains("waiting for the head server"), "{error}");
    // It goes on, and finds no head server.
    for (checks, variables) in [("warn", &[][..]), ("off", &[]), ("fail", &[("WORKER_CHECKS", "off")])] {
        let variables: Vec<(&str, &str)> = wrong.iter().chain(variables).copied().collect();
        let more: &[&str] = if checks == "fail" { &[] } else { &["--checks", checks] };
        let (_, error) = ended_with(&start(more, &variables), 1);
        assert!(error.contains("cannot connect"), "{checks}: {error}");
        assert_eq!(error.contains("checks: warning: NCCL_SOCKET_IFNAME: "), checks == "warn", "{checks}: {error}");
    }
    // Nothing is asked, so nothing is said.
    let (_, error) = ended_with(&start(&[], &[("NCCL_VERSION", "2.27.3-1")]), 1);
    assert!(!error.lines().any(|line| line.starts_with("checks:") || line.starts_with("configuration:")), "{error}");
    let (_, error) = ended_with(&folder.run(&["run", "--checks", "warn", "--config", "gym.yaml"]), 2);
    assert!(error.contains("--checks is an option of a worker"), "{error}");
}

pub(crate) fn the_configuration_tells_who_has_won() {
    let folder = TestFolder::new();
    std::fs::write(folder.file("nccl.conf"), "NCCL_IB_TC=96\nNCCL_IB_SL=3\n").unwrap();
    let conf = folder.file("nccl.conf");
    let variables = [("NCCL_CONF_FILE", conf.to_str().unwrap()), ("NCCL_IB_TC", "106")];
    let show = |more: &[&str]| {
        let arguments = [&["config", "show", "gym.yaml"], more].concat();
        ended_with(&folder.command(&arguments).envs(variables).output().unwrap(), 0).0
    };
    let place = conf.display();
    let text = show(&[]);
    assert!(text.contains(&format!("\n# NCCL_IB_TC=106  the environment; hides `96` of {place}:1")), "{text}");
    assert!(text.contains(&format!("\n# NCCL_IB_SL=3  {place}:2")), "{text}");
    assert!(text.starts_with("policy_model:"), "{text}");
    serde_json::from_str::<Value>(&show(&["--format", "json"])).unwrap();
    let settings: Vec<Value> = serde_json::from_str(&show(&["--settings", "--format", "json"])).unwrap();
    let of = |name: &str| settings.iter().find(|one| one["name"] == name).unwrap();
    assert_eq!(of("NCCL_IB_TC")["hides"][0]["value"], "96");
    assert!(show(&["--settings"]).contains("NCCL_IB_SL: \"3\"  # "), "{}", show(&["--settings"]));
}
