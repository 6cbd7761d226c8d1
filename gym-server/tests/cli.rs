//! Tests the commands with running servers, in a program with its own server. This file is also that program: with
//! `GYM_TEST_PROGRAM` in its environment it runs the command line, otherwise the test cases.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

#[path = "cli/summary.rs"]
mod summary;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::time::Duration;

use gym_core::{CallContext, Error, ModelResponse, ResourcesServer, Result, SessionId, Verdict};
use gym_server::Servers;

const PROGRAM: &str = "GYM_TEST_PROGRAM";

/// Scores 1 if the scripted model's digit equals the task's digit. A task can wait for a file, which keeps its rollout in flight as
/// long as the test needs.
struct Digit;

#[derive(serde::Deserialize)]
struct Task {
    digits: String,
    #[serde(default)]
    wait_for: Option<PathBuf>,
    /// The reward is a placeholder.
    #[serde(default)]
    mask: bool,
}

impl ResourcesServer for Digit {
    type Task = Task;

    async fn verify(&self, _: &CallContext, _: &SessionId, task: Task, response: &ModelResponse) -> Result<Verdict> {
        while task.wait_for.as_ref().is_some_and(|file| !file.exists()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if task.digits.is_empty() {
            return Err(Error::internal("the task has no digits to choose from"));
        }
        let verdict = Verdict::correct(task.digits.contains(response.last_text()?.trim()));
        Ok(if task.mask { verdict.with("mask_sample", true) } else { verdict })
    }
}

fn main() -> ExitCode {
    if std::env::var_os(PROGRAM).is_some() {
        return gym_server::cli::main(Servers::stock().resources("digit", |_| Ok(Digit)));
    }
    let wanted = std::env::args().nth(1).filter(|argument| !argument.starts_with('-')).unwrap_or_default();
    let cases: [(&str, fn()); 22] = [
        ("run_announces_serves_and_stops_in_order", run_announces_serves_and_stops_in_order),
        ("a_second_signal_stops_at_once", a_second_signal_stops_at_once),
        ("services_run_in_processes_of_their_own", services_run_in_processes_of_their_own),
        ("ucx_is_chosen_by_configuration_alone", ucx_is_chosen_by_configuration_alone),
        ("servers_of_one_process_call_each_other_over_ucx", servers_of_one_process_call_each_other_over_ucx),
        ("a_required_transport_fails_without_fallback", a_required_transport_fails_without_fallback),
        (
            "doctor_reports_why_a_required_transport_is_unavailable",
            doctor_reports_why_a_required_transport_is_unavailable,
        ),
        ("collect_uses_the_servers_that_run", collect_uses_the_servers_that_run),
        ("collect_brings_its_own_servers", collect_brings_its_own_servers),
        ("collect_takes_a_free_port_for_its_own_head", collect_takes_a_free_port_for_its_own_head),
        ("a_failed_rollout_ends_with_3", a_failed_rollout_ends_with_3),
        (
            "a_collection_in_which_all_fails_alike_stops_and_says_how_to_go_on",
            a_collection_in_which_all_fails_alike_stops_and_says_how_to_go_on,
        ),
        ("a_stopped_collection_goes_on_where_it_was", a_stopped_collection_goes_on_where_it_was),
        ("results_and_inputs_are_replaced_only_if_asked", results_and_inputs_are_replaced_only_if_asked),
        ("a_resumed_collection_may_grow_but_not_change", a_resumed_collection_may_grow_but_not_change),
        (
            "a_dead_model_endpoint_is_named_at_the_start_and_while_rollouts_wait",
            a_dead_model_endpoint_is_named_at_the_start_and_while_rollouts_wait,
        ),
        ("a_command_waits_for_the_model_as_long_as_asked", a_command_waits_for_the_model_as_long_as_asked),
        ("doctor_calls_the_model_endpoints_of_a_configuration", doctor_calls_the_model_endpoints_of_a_configuration),
        ("doctor_tells_a_head_server_from_another_program", doctor_tells_a_head_server_from_another_program),
        ("a_truncated_rollout_is_scored_or_fails", a_truncated_rollout_is_scored_or_fails),
        (
            "the_summary_has_the_figures_of_the_rows_on_the_disk",
            summary::the_summary_has_the_figures_of_the_rows_on_the_disk,
        ),
        ("status_shows_the_oldest_rollout_in_flight", summary::status_shows_the_oldest_rollout_in_flight),
    ];
    for (name, case) in cases {
        if name.contains(&wanted) {
            println!("{name}");
            case();
        }
    }
    ExitCode::SUCCESS
}

const CONFIG: &str = "\
policy_model:
  responses_api_models:
    scripted_model:
      entrypoint: app.py
digit:
  resources_servers:
    digit:
      entrypoint: app.py
      domain: math
digit_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: digit}
      model_server: {type: responses_api_models, name: policy_model}
";

/// The arguments of a collection in a [`TestFolder`].
const TASKS: [&str; 6] = ["-a", "digit_agent", "-i", "tasks.jsonl", "-o", "out/rollouts.jsonl"];
/// The servers of the configuration, each of which can run in its own process.
const SERVICES: [&str; 4] = ["policy_model", "digit", "digit_agent", "digit_environment_server"];

/// A directory with a configuration and tasks, and a port for its head server.
struct TestFolder {
    directory: tempfile::TempDir,
    head_port: u16,
}

impl TestFolder {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("gym.yaml"), CONFIG).unwrap();
        // The configuration needs the port before the head server listens. If another process takes the port meanwhile, the test
        // fails.
        let head_port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        Self { directory, head_port }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn tasks(&self, rows: impl IntoIterator<Item = serde_json::Value>) {
        let rows: String = rows.into_iter().map(|row| format!("{row}\n")).collect();
        std::fs::write(self.file("tasks.jsonl"), rows).unwrap();
    }

    fn head(&self) -> String {
        format!("http://127.0.0.1:{}", self.head_port)
    }

    /// Returns the option that makes the head server listen on this port.
    fn port(&self) -> String {
        format!("+head_server.port={}", self.head_port)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(arguments).current_dir(self.directory.path()).env(PROGRAM, "1").env_remove("HEAD_SERVER_URL");
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Returns the command `rgym collect` for the tasks.
    fn collect(&self, arguments: &[&str]) -> Command {
        self.command(&[&["collect"], &TASKS[..], arguments].concat())
    }

    /// Runs `rgym collect` to its end, with running servers.
    fn collected(&self, arguments: &[&str]) -> Output {
        self.collect(&[&["--head-url", &self.head()], arguments].concat()).output().unwrap()
    }

    fn status(&self) -> serde_json::Value {
        let (out, _) = ended_with(&self.run(&["status", "--json", "--head-url", &self.head()]), 0);
        serde_json::from_str(&out).unwrap()
    }

    /// Starts `rgym run …` and waits for its ready line.
    fn start(&self, arguments: &[&str]) -> Started {
        let port = self.port();
        let arguments = [&["run", "--config", "gym.yaml", &port][..], arguments].concat();
        let mut child = self.command(&arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut said = Vec::new();
        for line in lines.by_ref() {
            said.push(line.unwrap());
            if said.last().unwrap().starts_with("ready: ") {
                return Started { child, said };
            }
        }
        panic!("{arguments:?} ended before it was ready, with {:?}: {said:?}", child.wait());
    }

    /// Starts each of [`SERVICES`] in its own process; these processes find each other through the head server.
    fn start_services(&self, arguments: &[&str]) -> Vec<Started> {
        let head = self.head();
        let start = |name| self.start(&[&["--serve", name, "--head-url", &head], arguments].concat());
        SERVICES.into_iter().map(start).collect()
    }

    fn rollouts(&self) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(self.file("out/rollouts.jsonl")).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// A running program, which is killed if the test fails.
struct Started {
    child: Child,
    said: Vec<String>,
}

impl Started {
    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Returns `true` if the first server to stop no longer accepts connections.
    fn draining(&self) -> bool {
        let line = self.said.iter().find(|line| line.starts_with("digit_environment_server ")).unwrap();
        let address = line.split_whitespace().find_map(|word| word.strip_prefix("http://")).unwrap();
        TcpStream::connect(address).is_err()
    }

    fn interrupt(mut self) -> Option<i32> {
        self.signal(rustix::process::Signal::INT);
        self.child.wait().unwrap().code()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn get(port: u16, route: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    write!(stream, "GET {route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn row(digits: &str, number: usize) -> serde_json::Value {
    let input = format!("task {number}");
    serde_json::json!({"responses_create_params": {"input": [{"role": "user", "content": input}]}, "digits": digits})
}

#[track_caller]
fn ended_with(output: &Output, code: i32) -> (String, String) {
    let out = String::from_utf8(output.stdout.clone()).unwrap();
    let error = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{out}{error}");
    (out, error)
}

fn run_announces_serves_and_stops_in_order() {
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM] {
        let folder = TestFolder::new();
        let mut started = folder.start(&[]);
        let ready = started.said.last().unwrap();
        assert_eq!(*ready, format!("ready: 4 servers, head {}", folder.head()));
        for name in ["head_server"].into_iter().chain(SERVICES) {
            assert!(started.said.iter().any(|line| line.split_whitespace().next() == Some(name)), "{:?}", started.said);
        }
        let health = get(folder.head_port, "/health");
        assert!(health.starts_with("HTTP/1.1 200") && health.contains(r#"{"status":"ok"}"#), "{health}");

        let status = folder.status();
        let servers = status["servers"].as_array().unwrap();
        assert_eq!(servers.len(), 4);
        assert!(servers.iter().all(|server| server["healthy"] == true && server["in_flight"] == 0), "{status}");
        let (table, _) = ended_with(&folder.run(&["ng_status", &folder.port()]), 0);
        assert!(table.contains("4 of 4 servers healthy"), "{table}");

        started.signal(signal);
        assert_eq!(started.child.wait().unwrap().code(), Some(0));
        assert!(TcpStream::connect(("127.0.0.1", folder.head_port)).is_err(), "the head has gone");
    }
}

fn a_second_signal_stops_at_once() {
    let folder = TestFolder::new();
    let mut started = folder.start(&["--stop-grace", "600"]);
    let mut hanging = row("", 0);
    hanging["wait_for"] = serde_json::json!(folder.file("never"));
    folder.tasks([hanging]);
    let mut collect = folder.collect(&["--head-url", &folder.head()]);
    let _collector = Started { child: collect.stderr(Stdio::null()).spawn().unwrap(), said: Vec::new() };
    let in_flight = || {
        let status = folder.status();
        let servers = status["servers"].as_array().unwrap();
        servers.iter().find(|server| server["name"] == "digit").unwrap()["in_flight"].as_i64()
    };
    wait_until(|| in_flight() == Some(1));
    started.signal(rustix::process::Signal::INT);
    // Draining: the first listener is closed, and the request keeps the process alive.
    wait_until(|| started.draining());
    started.signal(rustix::process::Signal::INT);
    assert_eq!(started.child.wait().unwrap().code(), Some(1));
}

fn services_run_in_processes_of_their_own() {
    let folder = TestFolder::new();
    folder.tasks((0..5).map(|number| row("0123456789", number)));
    let head = folder.start(&["--serve", "head_server"]);
    assert_eq!(*head.said.last().unwrap(), format!("ready: 0 servers, head {}", folder.head()));
    let services = folder.start_services(&[]);
    assert!(services.iter().all(|service| service.said.last().unwrap().starts_with("ready: 1 servers, head ")));
    ended_with(&folder.collected(&[]), 0);
    assert_eq!(folder.rollouts().len(), 5);
    for service in services {
        assert_eq!(service.interrupt(), Some(0));
    }
    let (out, _) = ended_with(&folder.run(&["status", "--head-url", &folder.head()]), 0);
    assert!(out.contains("0 of 0 servers healthy"), "who stops lets go of its lease: {out}");
    assert_eq!(head.interrupt(), Some(0));
}

/// Returns `true` if this machine supports the transport. A missing transport is printed, or fails with `GYM_UCX_REQUIRED=1`.
fn has(folder: &TestFolder, transport: &str) -> bool {
    let doctor = folder.run(&["doctor", "--require-transport", transport]);
    let has = doctor.status.code() != Some(1);
    assert!(has || std::env::var_os("GYM_UCX_REQUIRED").is_none(), "{}", String::from_utf8_lossy(&doctor.stderr));
    if !has {
        eprintln!("NOT RUN: {}", String::from_utf8_lossy(&doctor.stderr));
    }
    has
}

/// Returns the transports and paths from the server of this name to its peers, as `rgym status` reports them.
fn paths(status: &serde_json::Value, name: &str) -> Vec<(String, String)> {
    let server = status["servers"].as_array().unwrap().iter().find(|server| server["name"] == name).unwrap();
    let text = |peer: &serde_json::Value, key: &str| peer[key].as_str().unwrap_or_default().to_owned();
    let peers = server["peers"].as_array().unwrap().iter();
    peers.map(|peer| (text(peer, "transport"), text(peer, "lanes"))).collect()
}

fn ucx_is_chosen_by_configuration_alone() {
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

fn servers_of_one_process_call_each_other_over_ucx() {
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

fn a_required_transport_fails_without_fallback() {
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

fn doctor_reports_why_a_required_transport_is_unavailable() {
    let folder = TestFolder::new();
    let doctor = folder.run(&["doctor", "--json", "--require-transport", "rdma"]);
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

fn collect_uses_the_servers_that_run() {
    let folder = TestFolder::new();
    folder.tasks((0..20).map(|number| row("01234", number)));
    let started = folder.start(&[]);
    let (out, error) = ended_with(
        &folder.run(&[
            "ng_collect_rollouts",
            "+agent_name=digit_agent",
            "+input_jsonl_fpath=tasks.jsonl",
            "+output_jsonl_fpath=out/rollouts.jsonl",
            "+num_repeats=3",
            "+num_repeats_add_seed=true",
            "+num_samples_in_parallel=8",
            "+limit=10",
            &folder.port(),
        ]),
        0,
    );
    assert!(out.contains("30 of 30 rollouts are recorded"), "{out}{error}");
    assert!(out.contains("digit_agent") && out.contains("out/rollouts.jsonl"), "{out}");
    let rollouts = folder.rollouts();
    assert_eq!(rollouts.len(), 30);
    assert!(rollouts.iter().any(|row| row["reward"] == 1.0) && rollouts.iter().any(|row| row["reward"] == 0.0));
    assert!(folder.file("out/rollouts_aggregate_metrics.json").is_file(), "{out}{error}");

    let unknown = ["collect", "-a", "digit_agnet", "-i", "tasks.jsonl", "-o", "o.jsonl", "--head-url", &folder.head()];
    let (_, error) = ended_with(&folder.run(&unknown), 2);
    assert!(error.contains("digit_agent"), "{error}");
    let broken = folder.file("broken.jsonl");
    std::fs::write(&broken, "{}\n{\"a\": \n").unwrap();
    let broken = ["collect", "-a", "digit_agent", "-i", "broken.jsonl", "-o", "o.jsonl", "--head-url", &folder.head()];
    let (_, error) = ended_with(&folder.run(&broken), 2);
    assert!(error.contains("broken.jsonl"), "{error}");
    assert_eq!(started.interrupt(), Some(0));
}

fn collect_brings_its_own_servers() {
    let folder = TestFolder::new();
    folder.tasks((0..10).map(|number| row("0123456789", number)));
    let port = folder.port();
    let arguments = [&["eval", "run", "--config", "gym.yaml", &port], &TASKS[..]].concat();
    let (out, error) = ended_with(&folder.run(&[&arguments[..], &["--progress", "plain"]].concat()), 0);
    assert!(out.contains("10 of 10 rollouts are recorded"), "{out}{error}");
    assert!(folder.rollouts().iter().all(|row| row["reward"] == 1.0));
    assert!(out.contains("transports: mem "), "{out}");
    assert!(error.contains(&format!("started 4 servers for this collection, head {}", folder.head())), "{error}");
    let (out, _) = ended_with(&folder.run(&[&arguments[..], &["--resume"]].concat()), 0);
    assert!(out.contains("(10 of them by earlier runs)"), "{out}");
    assert_eq!(folder.rollouts().len(), 10);
}

fn collect_takes_a_free_port_for_its_own_head() {
    let folder = TestFolder::new();
    folder.tasks([row("0123456789", 0)]);
    let (_, error) = ended_with(&folder.collect(&["--config", "gym.yaml"]).output().unwrap(), 0);
    let head =
        error.lines().find_map(|line| line.strip_prefix("started 4 servers for this collection, head ")).unwrap();
    let port: u16 = head.rsplit_once(':').unwrap().1.parse().unwrap();
    assert!((10_001..=20_000).contains(&port) && port != 11_000, "a port of the range, and not that of `run`: {head}");
}

fn a_failed_rollout_ends_with_3() {
    let folder = TestFolder::new();
    let mut rows: Vec<_> = (0..3).map(|number| row("0123456789", number)).collect();
    // The verifier has an error for this task.
    rows[1] = row("", 1);
    folder.tasks(rows);
    let mut collect = folder.collect(&["--config", "gym.yaml", &folder.port(), "--attempts", "1"]);
    let (out, error) = ended_with(&collect.output().unwrap(), 3);
    assert!(out.contains("2 of 3 rollouts are recorded, 1 failed") && out.contains("verifier_error"), "{out}");
    assert!(error.contains("out/rollouts_failures.jsonl") && error.contains("--resume"), "{error}");
    for words in [
        "1 x verifier_error in digit/verify; the first: task 1, repeat 0",
        "POST digit/verify",
        "the task has no digits to choose from",
    ] {
        assert!(out.contains(words), "{words}: {out}");
    }
    assert!(!out.contains('\\'), "an error in readable form: {out}");
}

fn a_collection_in_which_all_fails_alike_stops_and_says_how_to_go_on() {
    let folder = TestFolder::new();
    folder.tasks((0..50).map(|number| row("", number)));
    let port = folder.port();
    let collect = |options: &[&str]| {
        let options = [&["--config", "gym.yaml", "--concurrency", "2", "--attempts", "1", &port], options].concat();
        ended_with(&folder.collect(&options).output().unwrap(), 3)
    };
    let failures = || std::fs::read_to_string(folder.file("out/rollouts_failures.jsonl")).unwrap().lines().count();
    let (out, error) = collect(&[]);
    let recorded = failures();
    assert!((32..=33).contains(&recorded), "{recorded}: {out}");
    for words in
        [&format!("stopped because {recorded} rollouts failed, all with the same cause"), "--resume --fail-fast 0"]
    {
        assert!(error.contains(words), "{error}");
    }
    let (out, _) = collect(&["--resume", "--fail-fast", "0"]);
    assert!(out.contains("0 of 50 rollouts are recorded, 50 failed"), "{out}");
    assert_eq!(failures(), 50);
    let (_, error) = collect(&["--overwrite", "--fail-fast", "3"]);
    assert!(error.contains("stopped because") && (3..=5).contains(&failures()), "{error}");
}

fn a_stopped_collection_goes_on_where_it_was() {
    let folder = TestFolder::new();
    let gate = folder.file("gate");
    let mut rows: Vec<_> = (0..6).map(|number| row("0123456789", number)).collect();
    for row in &mut rows[3..] {
        row["wait_for"] = serde_json::json!(gate);
    }
    folder.tasks(rows);
    let port = folder.port();
    let collect = || folder.collect(&["--config", "gym.yaml", "--stop-grace", "0.2", "--progress", "plain", &port]);
    let child = collect().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut started = Started { child, said: Vec::new() };
    wait_until(|| folder.rollouts_so_far() == 3);
    started.signal(rustix::process::Signal::INT);
    assert_eq!(started.child.wait().unwrap().code(), Some(3));
    let mut said = String::new();
    started.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("stopping: ") && said.contains("rollouts in flight may take up to 200ms"), "{said}");
    assert!(said.contains("stopped with 3 rollouts incomplete") && said.contains("--resume"), "{said}");

    std::fs::write(&gate, "").unwrap();
    let (out, _) = ended_with(&collect().arg("--resume").output().unwrap(), 0);
    assert!(out.contains("6 of 6 rollouts are recorded (3 of them by earlier runs)"), "{out}");
    assert_eq!(folder.rollouts().len(), 6);
}

fn results_and_inputs_are_replaced_only_if_asked() {
    let folder = TestFolder::new();
    folder.tasks((0..5).map(|number| row("0123456789", number)));
    let port = folder.port();
    let served = ["--config", "gym.yaml", &port];
    ended_with(&folder.collect(&served).output().unwrap(), 0);
    let recorded = folder.contents();

    let (_, error) = ended_with(&folder.collect(&[&served[..], &["--limit", "1"]].concat()).output().unwrap(), 2);
    for words in ["out/rollouts.jsonl exists", "--resume", "--overwrite"] {
        assert!(error.contains(words), "{error}");
    }
    std::fs::hard_link(folder.file("tasks.jsonl"), folder.file("link.jsonl")).unwrap();
    std::fs::copy(folder.file("tasks.jsonl"), folder.file("own_materialized_inputs.jsonl")).unwrap();
    for (input, output) in
        [("tasks.jsonl", "tasks.jsonl"), ("tasks.jsonl", "link.jsonl"), ("own_materialized_inputs.jsonl", "own.jsonl")]
    {
        let line = ["collect", "-a", "digit_agent", "-i", input, "-o", output, "--overwrite"];
        let (_, error) = ended_with(&folder.run(&[&line[..], &served].concat()), 2);
        assert!(error.contains("are the same file") && error.contains(input), "{error}");
        assert_eq!(std::fs::read(folder.file(input)).unwrap(), recorded["tasks.jsonl"]);
    }
    for file in ["link.jsonl", "own_materialized_inputs.jsonl"] {
        std::fs::remove_file(folder.file(file)).unwrap();
    }
    assert!(folder.contents() == recorded, "a rejected collection changed a file");

    let said = "out/rollouts.jsonl: this run replaces the results of an earlier one";
    let (_, error) = ended_with(&folder.run(&[&["eval", "run", "--limit", "2"], &TASKS[..], &served].concat()), 0);
    assert!(error.contains(said), "{error}");
    assert_eq!(folder.rollouts().len(), 2);
    let overwriting = folder.collect(&[&served[..], &["--limit", "1", "--overwrite"]].concat()).output().unwrap();
    assert!(ended_with(&overwriting, 0).1.contains(said));
    assert_eq!(folder.rollouts().len(), 1);
}

fn a_resumed_collection_may_grow_but_not_change() {
    let folder = TestFolder::new();
    folder.tasks((0..5).map(|number| row("0123456789", number)));
    let port = folder.port();
    let resumed = |options: &[&str], status: i32| {
        let options = [&["--config", "gym.yaml", &port], options].concat();
        ended_with(&folder.collect(&options).arg("--resume").output().unwrap(), status)
    };
    // There is nothing to resume yet.
    resumed(&["--limit", "3"], 0);
    let (out, _) = resumed(&["--num-repeats", "2", "--concurrency", "1", "--attempts", "1"], 0);
    assert!(out.contains("10 of 10 rollouts are recorded (3 of them by earlier runs)"), "{out}");
    assert_eq!(folder.rollouts().len(), 10);
    let recorded = folder.contents();

    let all = &["--num-repeats", "2"][..];
    for (options, changed) in [
        (
            &[all, &["--limit", "3"]].concat()[..],
            "fewer tasks: not requested any more are 4 rows, first in line 7: task 3",
        ),
        (&[], "fewer repeats: not requested any more are 5 rows"),
        (
            &[all, &["--temperature", "0.5"]].concat(),
            "responses_create_params.temperature: was absent, is 0.5 (10 rows",
        ),
        (&[all, &["--add-seed"]].concat(), "responses_create_params.metadata: was absent, is {\"extra_body\""),
    ] {
        let (_, error) = resumed(options, 2);
        assert!(error.contains(changed) && error.contains("out/rollouts_materialized_inputs.jsonl"), "{error}");
    }
    assert!(folder.contents() == recorded, "a rejected collection changed a file");
    folder.tasks((0..5).map(|number| row("0123456789", number + 7)));
    let (_, error) = resumed(all, 2);
    assert!(error.contains("task 0, repeat 0"), "{error}");

    folder.tasks((0..5).map(|number| row("0123456789", number)));
    let (out, _) = resumed(&[all, &["--concurrency", "3", "--interleave-repeats"]].concat(), 0);
    assert!(out.contains("10 of 10 rollouts are recorded (10 of them by earlier runs)"), "{out}");
    assert!(folder.contents()["out/rollouts.jsonl"] == recorded["out/rollouts.jsonl"], "a row was added or changed");
}

impl TestFolder {
    /// Returns the text of each file, by its path.
    fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let files = ["", "out"].into_iter().flat_map(|folder| std::fs::read_dir(self.file(folder)).unwrap());
        let files = files.map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
        let named = |path: PathBuf| path.strip_prefix(self.directory.path()).unwrap().display().to_string();
        files.map(|path| (named(path.clone()), std::fs::read(path).unwrap())).collect()
    }

    /// Replaces the model by one with an endpoint on this port.
    fn call_engine(&self, port: u16) {
        let model = format!(
            "vllm_model:\n      entrypoint: app.py\n      base_url: http://127.0.0.1:{port}/v1\n      model: m\n      api_key: none"
        );
        let config = CONFIG.replace("scripted_model:\n      entrypoint: app.py", &model);
        std::fs::write(self.file("gym.yaml"), config).unwrap();
    }

    fn rollouts_so_far(&self) -> usize {
        let text = std::fs::read(self.file("out/rollouts.jsonl")).unwrap_or_default();
        text.iter().filter(|byte| **byte == b'\n').count()
    }
}

/// Returns a port on which nothing listens.
fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

/// Answers requests for the list of models, and all other requests with this status and body, until the program ends.
fn start_engine(port: u16, status: u16, body: &'static str) {
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let (mut head, mut length) = (String::new(), 0);
            while stream.read_line(&mut head).unwrap_or(0) > 0 && !head.ends_with("\r\n\r\n") {}
            for line in head.lines() {
                length = line.strip_prefix("content-length: ").map_or(length, |length| length.parse().unwrap());
            }
            stream.read_exact(&mut vec![0; length]).unwrap();
            let (status, body) =
                if head.starts_with("GET ") { (200, r#"{"data":[{"id":"m"}]}"#) } else { (status, body) };
            let length = body.len();
            let answer = format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
            stream.get_mut().write_all(answer.as_bytes()).unwrap();
        }
    });
}

/// Reads the error output of a program until a line has these words; returns everything until then.
#[track_caller]
fn said_until(lines: &mut impl Iterator<Item = std::io::Result<String>>, words: &str) -> String {
    let mut said = String::new();
    for line in lines {
        said.push_str(&line.unwrap());
        said.push('\n');
        if said.lines().last().unwrap().contains(words) {
            return said;
        }
    }
    panic!("no line has {words:?}: {said}");
}

fn a_dead_model_endpoint_is_named_at_the_start_and_while_rollouts_wait() {
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

fn a_command_waits_for_the_model_as_long_as_asked() {
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

fn doctor_calls_the_model_endpoints_of_a_configuration() {
    let folder = TestFolder::new();
    let port = free_port();
    folder.call_engine(port);
    let finding = |code| {
        let (out, _) = ended_with(&folder.run(&["doctor", "--json", "--config", "gym.yaml"]), code);
        let diagnosis: serde_json::Value = serde_json::from_str(&out).unwrap();
        diagnosis["findings"].as_array().unwrap().iter().find(|row| row["topic"] == "model_endpoint").unwrap().clone()
    };
    let dead = finding(3);
    assert_eq!((&dead["status"], &dead["fix"]), (&"warning".into(), &"start the engine, or correct `base_url`".into()));
    start_engine(port, 500, "{}");
    // Other findings of this machine decide the exit code.
    let out = String::from_utf8(folder.run(&["doctor", "--config", "gym.yaml"]).stdout).unwrap();
    assert!(out.contains(&format!("model endpoint http://127.0.0.1:{port}/v1 (policy_model) responds")), "{out}");
}

fn doctor_tells_a_head_server_from_another_program() {
    let folder = TestFolder::new();
    let finding = |port: u16| {
        let port = format!("++head_server.port={port}");
        let out = folder.run(&["doctor", "--json", "--output", "out/rollouts.jsonl", &port]).stdout;
        let diagnosis: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let findings = diagnosis["findings"].as_array().unwrap().clone();
        for topic in ["head_port", "descriptors", "disk", "clock"] {
            assert_eq!(findings.iter().filter(|row| row["topic"] == topic).count(), 1, "{topic}: {diagnosis}");
        }
        findings.into_iter().find(|row| row["topic"] == "head_port").unwrap()
    };
    let _started = folder.start(&[]);
    let head = finding(folder.head().rsplit_once(':').unwrap().1.parse().unwrap());
    let found = head["found"].as_str().unwrap();
    assert!(head["status"] == "ok" && found.contains("a head server of this SDK listens on 127.0.0.1:"), "{head}");
    let port = free_port();
    start_engine(port, 500, "{}");
    let other = finding(port);
    let (found, fix) = (other["found"].as_str().unwrap(), other["fix"].as_str().unwrap());
    assert!(other["status"] == "warning" && found.contains("which is no head server, listens on"), "{other}");
    assert!(fix.contains("+head_server.port=PORT"), "{other}");
}

fn a_truncated_rollout_is_scored_or_fails() {
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

/// Polls a condition of another process, under a deadline.
#[expect(clippy::disallowed_methods, reason = "another process has no event to wait for")]
fn wait_until(condition: impl Fn() -> bool) {
    let began = std::time::Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(60), "it did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}
