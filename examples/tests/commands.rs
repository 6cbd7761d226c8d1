//! The commands of a cluster as they are pasted: workers without files, with files of their own, and with files that name servers of
//! others; and what the head server and the workers say about mistakes.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

mod support;

use std::process::Output;
use std::sync::Arc;

use gym_client::Transports;
use gym_client::registry::{MemberKeeper, MemberOptions, RemoteRegistry};
use gym_client::work::PULLS_LABEL;
use gym_core::registry::{MemberRegistry as _, MemberServer, MemberSpec, Registry as _};
use gym_core::server::ServerKind;
use gym_core::transport::InProcess;
use gym_core::{CallContext, Endpoint, Incarnation, World};
use rustix::process::Signal;
use serde_json::Value;
use support::collections::{Collecting, Server};
use support::{WAIT_TIMEOUT, examples, gym_examples};
use tokio::process::Command;
use tokio::time::timeout;

const MODEL: &str = "policy_model: {responses_api_models: {scripted_model: {entrypoint: app.py}}}\n";

const AGENT: &str = "\
math: {resources_servers: {math: {entrypoint: app.py, domain: math}}}
math_simple_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: math}
      model_server: {type: responses_api_models, name: policy_model}
";

/// A folder for each machine.
struct Machines {
    folder: tempfile::TempDir,
}

impl Machines {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    /// A command line in the folder of a machine.
    fn command(&self, machine: &str) -> Command {
        let folder = self.folder.path().join(machine);
        std::fs::create_dir_all(&folder).unwrap();
        gym_examples(&folder)
    }

    fn run(&self, machine: &str, arguments: &[&str]) -> Server {
        let mut command = self.command(machine);
        command.arg("run").args(arguments);
        Server::logged(&mut command, self.folder.path().join(format!("{machine}.log")))
    }

    /// Starts a head server with these further arguments; returns it with its URL.
    async fn head(&self, arguments: &[&str]) -> (Server, String) {
        let mut head = self.run("head", &[&["--head-only"], arguments].concat());
        let url = head.says("ready: ").await.rsplit(' ').next().unwrap().to_owned();
        (head, url)
    }

    async fn worker(&self, name: &str, url: &str, arguments: &[&str]) -> Server {
        let mut worker = self.run(name, &[&["--worker", "--head-url", url, "--name", name], arguments].concat());
        worker.says("ready: ").await;
        worker
    }

    fn file(&self, machine: &str, name: &str, text: &str) -> String {
        let folder = self.folder.path().join(machine);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(name), text).unwrap();
        folder.join(name).display().to_string()
    }

    /// Runs a command to its end; returns its status and what it printed.
    async fn says(&self, machine: &str, arguments: &[&str]) -> (i32, String) {
        let output: Output =
            timeout(WAIT_TIMEOUT, self.command(machine).args(arguments).output()).await.unwrap().unwrap();
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        (output.status.code().unwrap(), text)
    }

    async fn ends(&self, machine: &str, arguments: &[&str]) -> (i32, String) {
        let output: Output =
            timeout(WAIT_TIMEOUT, self.command(machine).args(arguments).output()).await.unwrap().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    /// The names of the servers of a worker, and its number of ports.
    async fn servers(&self, url: &str, worker: &str) -> Vec<String> {
        let output = self.command("asking").args(["workers", "--json", "--head-url", url]).output().await.unwrap();
        let members: Value = serde_json::from_slice(&output.stdout).unwrap();
        let member = members.as_array().unwrap().iter().find(|member| member["name"] == worker).unwrap().clone();
        let servers = member["servers"].as_array().unwrap().iter();
        servers
            .map(|server| server["name"].as_str().unwrap_or(server.as_str().unwrap_or_default()).to_owned())
            .collect()
    }
}

/// Returns a free port that the kernel gives to nobody: another test's head server must not be at the address of one that is away.
fn port_of_nobody() -> u16 {
    let free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::iter::repeat_with(|| fastrand::u16(21_000..31_000)).find(free).unwrap()
}

fn quickstart() -> String {
    examples().join("configs/quickstart.yaml").display().to_string()
}

#[tokio::test]
async fn a_worker_without_files_serves_what_its_head_was_given() {
    let machines = Machines::new();
    let (_head, url) = machines.head(&["+head_server.port=0", "--config", &quickstart()]).await;
    // At the same time, so that both try the documented ports. The overrides change keys of the head's files.
    let latency = ["++policy_model.responses_api_models.scripted_model.latency_ms=[1,2]"];
    let (first, second) = tokio::join!(machines.worker("w1", &url, &latency), machines.worker("w2", &url, &[]));
    let given =
        format!("this worker has no configuration of its own; it serves that of the head server {url}: 10 servers");
    for worker in [&first, &second] {
        assert!(worker.log().contains(&given), "{}", worker.log());
    }
    let servers = machines.servers(&url, "w1").await;
    assert!(servers.len() == 10 && servers == machines.servers(&url, "w2").await, "{servers:?}");
    let collecting = Collecting::new(machines.folder.path(), &url, "shared.jsonl");
    let (_, failed) = collecting.run(&[], || {}).await;
    assert!(failed.is_empty(), "{failed:?}");
    // The pasted variable joins too.
    let mut command = machines.command("w3");
    command.args(["run", "--name", "w3"]).env("HEAD_SERVER_URL", &url);
    let mut third = Server::logged(&mut command, machines.folder.path().join("w3.log"));
    third.says("ready: ").await;
    assert!(third.log().contains(&given) && third.log().contains("HEAD_SERVER_URL is set"), "{}", third.log());
}

#[tokio::test]
async fn a_worker_waits_for_its_head_and_joins_without_servers_if_neither_has_a_configuration() {
    let machines = Machines::new();
    let port = port_of_nobody();
    let url = format!("http://127.0.0.1:{port}");
    let mut worker = machines.run("w1", &["--worker", "--head-url", &url, "--name", "w1"]);
    worker.logs(&format!("waiting for the head server {url}")).await;
    let (head, _) = machines.head(&[&format!("+head_server.port={port}")]).await;
    worker.says("ready: 0 servers").await;
    worker.logs("has a configuration: this worker joins without servers").await;
    worker.logs("this worker offers no node: ").await;
    head.logs("worker registered: w1 registered successfully").await;
}

#[tokio::test]
async fn files_may_name_servers_of_other_workers() {
    let machines = Machines::new();
    let (_head, url) = machines.head(&["+head_server.port=0"]).await;
    let agent = machines.file("agents", "agent.yaml", AGENT);
    let model = machines.file("models", "model.yaml", MODEL);
    // Nothing at the head has the model yet, and no name resembles it.
    let mut agents = machines.run("agents", &["--worker", "--head-url", &url, "--name", "agents", "--config", &agent]);
    agents.logs("waiting up to 300s for servers of other workers").await;
    let _models = machines.worker("models", &url, &["--config", &model]).await;
    agents.says("ready: 3 servers").await;
    agents.logs(&format!("policy_model: looked up at the head server {url}")).await;
    // The head has no configuration: the agent that the collector asks for is known from its worker.
    let collecting = Collecting::new(machines.folder.path(), &url, "split.jsonl");
    let (_, failed) = collecting.run(&[], || {}).await;
    assert!(failed.is_empty(), "{failed:?}");

    // A single server of such a file, without a worker.
    let other = machines.file("alone", "agent.yaml", &AGENT.replace("math_simple_agent", "other_agent"));
    let mut alone = machines.run("alone", &["--serve", "other_agent", "--head-url", &url, "--config", &other]);
    alone.says("ready: 1 servers").await;

    // A typing error is found, with the nearest name at the head.
    let mistaken = machines.file("mistaken", "agent.yaml", &AGENT.replace("name: policy_model", "name: polcy_model"));
    for how in [&["--worker"][..], &["--serve", "math_simple_agent"]] {
        let arguments = [&["run", "--head-url", &url, "--config", &mistaken], how].concat();
        let (code, said) = machines.ends("mistaken", &arguments).await;
        assert_eq!(code, 2, "{said}");
        assert!(said.contains("agent.yaml:7") && said.contains("did you mean 'policy_model'?"), "{said}");
        assert!(said.contains("has no such server either"), "{said}");
    }
    // Without a head server elsewhere, it is a mistake at once.
    let (code, said) = machines.ends("mistaken", &["run", "--config", &agent, "+head_server.port=0"]).await;
    assert!(code == 2 && said.contains("which no file defines"), "{code} {said}");
}

#[tokio::test]
async fn collectors_let_workers_pull_by_default() {
    let machines = Machines::new();
    let (_head, url) = machines.head(&["+head_server.port=0", "--config", &quickstart()]).await;
    let latency = ["++policy_model.responses_api_models.scripted_model.latency_ms=[50,150]", "--pull-capacity", "8"];
    let first = machines.worker("w1", &url, &latency).await;
    let _second = machines.worker("w2", &url, &latency).await;
    let collecting = |name: &'static str| Collecting::new(machines.folder.path(), &url, name);
    let pulls = "2 workers of the cluster take the rollouts from http://127.0.0.1:";

    let (pushed, failed, said) = collecting("pushed.jsonl").run_logged(&["--dispatch", "push"], || {}).await;
    assert!(failed.is_empty() && !said.contains("workers of the cluster"), "{failed:?} {said}");
    let (rows, failed, said) = collecting("pulled.jsonl").run_logged(&["--weight", "math_simple_agent=2"], || {}).await;
    assert_eq!(rows, pushed);
    assert!(failed.is_empty() && said.contains(pulls), "{failed:?} {said}");
    let (rows, failed, said) = collecting("killed.jsonl").run_logged(&[], || first.signal(Signal::KILL)).await;
    assert_eq!(rows, pushed);
    assert!(failed.keys().eq(["worker_lost"]) && said.contains(pulls), "{failed:?} {said}");

    let weight = ["collect", "--head-url", &url, "--agent", "math_simple_agent", "--weight", "maht_simple_agent=2"];
    let files = ["--input", "../tasks.jsonl", "--output", "weighted.jsonl"];
    let (code, said) = machines.ends("asking", &[&weight[..], &files].concat()).await;
    assert!(code == 2 && said.contains("did you mean `math_simple_agent`?"), "{code} {said}");
}

/// The agent runs on one worker, and its verifications on the others. Losing one of those costs no attempt.
#[tokio::test]
async fn verifications_of_an_agent_run_on_any_worker() {
    let machines = Machines::new();
    let (_head, url) = machines.head(&["+head_server.port=0"]).await;
    let verifier = machines.file(
        "v1",
        "choice.yaml",
        "choice: {resources_servers: {choice: {entrypoint: app.py, domain: knowledge}}}\n",
    );
    let first = machines.worker("v1", &url, &["--config", &verifier]).await;
    let _second = machines.worker("v2", &url, &["--config", &verifier]).await;
    let text =
        AGENT.replace("name: math}", "name: choice_anywhere}").replace("math_simple_agent", "choice_simple_agent");
    let text = text.replace(
        "math: {resources_servers: {math: {entrypoint: app.py, domain: math}}}",
        "choice_anywhere: {resources_servers: {pool: {entrypoint: app.py, domain: knowledge, worker_timeout_seconds: 10, \
         resources_server: {type: resources_servers, name: choice}}}}",
    );
    let agent = machines.file("agents", "agent.yaml", &format!("{MODEL}{text}"));
    let slow = "+policy_model.responses_api_models.scripted_model.latency_ms=[20,60]";
    let _agents = machines.worker("agents", &url, &["--config", &agent, slow]).await;

    let (input, output) = (examples().join("data/choice.jsonl"), machines.folder.path().join("choice.jsonl"));
    let mut command = machines.command("asking");
    command.args([
        "collect",
        "--head-url",
        &url,
        "--agent",
        "choice_simple_agent",
        "--num-repeats",
        "4",
        "--concurrency",
        "32",
    ]);
    command.arg("--input").arg(input).arg("--output").arg(&output).args(["--progress", "none"]);
    let log = machines.folder.path().join("collect.log");
    let mut collecting = command.stderr(std::fs::File::create(&log).unwrap()).kill_on_drop(true).spawn().unwrap();
    let killing = async {
        let rows = || std::fs::read_to_string(&output).map_or(0, |text| text.lines().count());
        while rows() < 200 {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        first.signal(Signal::KILL);
    };
    let said = || std::fs::read_to_string(&log).unwrap();
    let Ok((ended, ())) = timeout(WAIT_TIMEOUT, async { tokio::join!(collecting.wait(), killing) }).await else {
        let (_, stuck) = machines.says("asking", &["stuck", "--head-url", &url, "--older", "0.5"]).await;
        let (_, workers) = machines.says("asking", &["workers", "--head-url", &url]).await;
        panic!("the collection does not end: {}\n{workers}\n{stuck}", said());
    };
    assert!(ended.unwrap().success(), "{}", said());
    let rows = std::fs::read_to_string(&output).unwrap();
    assert_eq!(rows.lines().count(), 960);
    assert!(rows.lines().all(|row| row.contains("\"reward\":")), "a row without a verdict");
    let failures = std::fs::read_to_string(machines.folder.path().join("choice_failures.jsonl")).unwrap();
    assert_eq!(failures, "", "a lost verification cost an attempt");
}

#[tokio::test]
async fn mistakes_with_heads_and_workers_are_named() {
    let machines = Machines::new();
    let (head, url) = machines.head(&["+head_server.port=0", "--config", &quickstart()]).await;
    let port = url.rsplit(':').next().unwrap();

    // Two heads: on one port, and one beside the head that the variable names.
    let (code, said) = machines.ends("second", &["run", "--head-only", &format!("+head_server.port={port}")]).await;
    assert!(code != 0 && said.contains(&format!("to join it, add --worker --head-url {url}")), "{code} {said}");
    let mut command = machines.command("beside");
    command.args(["run", "--head-only", "+head_server.port=0"]).env("HEAD_SERVER_URL", &url);
    let mut beside = Server::logged(&mut command, machines.folder.path().join("beside.log"));
    beside.says("ready: ").await;
    assert!(beside.log().contains("starts one of its own"), "{}", beside.log());

    // Two stacks with one name.
    let _first = machines.worker("twin", &url, &[]).await;
    let second = machines.run("other", &["--worker", "--head-url", &url, "--name", "twin"]);
    second.logs("waiting for the name of this worker").await;
    let said = second.log();
    assert!(said.contains("has this name at host `127.0.0.1`") && said.contains("another name with --name"), "{said}");

    // Another build, and a clock that is an hour off: both sides are told.
    let transports = Transports::from_features(InProcess::new());
    let registry = RemoteRegistry::new(Endpoint::parse(&url).unwrap(), transports, World::real());
    let mut spec = MemberSpec::new("odd", Incarnation(1));
    spec.build = "gym-server 0.0.1".to_owned();
    spec.clock_ms = u64::try_from(World::real().now().as_millis()).unwrap() + 3_600_000;
    let joined = registry.join(&CallContext::within(WAIT_TIMEOUT), spec).await.unwrap();
    let [clock, build] = joined.warnings.as_slice() else { panic!("{:?}", joined.warnings) };
    assert!(
        clock.contains("the worker's clock differs") && clock.contains(" 3600 s") || clock.contains(" 3599 s"),
        "{clock}"
    );
    assert!(build.contains("another build") && build.contains("gym-server 0.0.1, not gym-server"), "{build}");
    head.logs(clock).await;
    head.logs(build).await;
}

/// The collector does not know the environment; the worker does, and asks no model about a row that does not fit.
#[tokio::test]
async fn rows_that_do_not_fit_are_named_with_their_line_by_a_cluster() {
    let machines = Machines::new();
    let (_head, url) = machines.head(&["+head_server.port=0", "--config", &quickstart()]).await;
    let _worker = machines.worker("w1", &url, &[]).await;
    let row = |answer: &str| format!("{{\"responses_create_params\":{{\"input\":\"What is 1 + 1?\"}}{answer}}}\n");
    let rows = [row(r#","expected_answer":"2""#), row(""), row(r#","expected_answer":["2"]"#)].concat();
    machines.file("collector", "tasks.jsonl", &rows);
    for dispatch in ["push", "pull"] {
        let output = format!("{dispatch}.jsonl");
        let to = ["--agent", "math_simple_agent", "--head-url", &url, "--dispatch", dispatch, "--num-repeats", "2"];
        let files = ["collect", "--input", "tasks.jsonl", "--output", &output];
        let (code, said) = machines.says("collector", &[&files[..], &to].concat()).await;
        assert_eq!(code, 3, "{said}");
        for (words, line) in [("missing field `expected_answer`", 2), ("`expected_answer`: invalid type", 3)] {
            assert!(said.contains(words) && said.contains(&format!(" (tasks.jsonl, line {line})")), "{said}");
        }
        assert!(
            said.contains("4 attempts had a row that does not fit")
                && !said.contains("have attempts left")
                && said.contains("_ng_failure_input"),
            "{said}"
        );
        let failures = machines.folder.path().join(format!("collector/{dispatch}_failures.jsonl"));
        let failures: Vec<Value> =
            std::fs::read_to_string(failures).unwrap().lines().map(|row| serde_json::from_str(row).unwrap()).collect();
        assert_eq!(failures.len(), 4);
        for row in failures {
            let line = row["_ng_task_index"].as_u64().unwrap() + 1;
            assert_eq!(row["_ng_failure_input"], format!("tasks.jsonl, line {line}"), "{row}");
            assert_eq!(
                (&row["_ng_failure_class"], &row["_ng_failure_server"]),
                (&"row_invalid".into(), &"math".into())
            );
        }
    }
}

/// `/health` of a head server that was told nothing waits for one worker, and the process for none.
#[tokio::test]
async fn a_head_without_servers_is_healthy_once_a_worker_serves() {
    let machines = Machines::new();
    let (head, url) = machines.head(&["+head_server.port=0", "--join-timeout", "0.2"]).await;
    assert!(health(&url).await.contains("503") && health(&url).await.contains(r#""expected":1"#));
    // Longer than the time for which it would wait for workers that it was told to expect.
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    let mut worker = machines.run("w1", &["--worker", "--head-url", &url, "--name", "w1"]);
    worker.says("ready: ").await;
    let healthy = async {
        while !health(&url).await.contains(r#"{"status":"ok"}"#) {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    timeout(WAIT_TIMEOUT, healthy).await.unwrap_or_else(|_| panic!("{}", head.log()));

    // A number that was given keeps its meaning.
    let (mut unjoined, _) =
        machines.head(&["+head_server.port=0", "--expected-workers", "1", "--join-timeout", "0.2"]).await;
    unjoined.logs("fix: start the missing workers with").await;
    assert!(!unjoined.ended().await.success());
    let (_none, url) = machines.head(&["+head_server.port=0", "--expected-workers", "0"]).await;
    assert!(health(&url).await.contains(r#"{"status":"ok"}"#));
    let mut all = machines.run("all", &["+head_server.port=0", "--config", &quickstart()]);
    let url = all.says("ready: ").await.rsplit(' ').next().unwrap().to_owned();
    assert!(health(&url).await.contains(r#"{"status":"ok"}"#));
}

/// Asks a head server for its health: the status and the body of its response.
async fn health(url: &str) -> String {
    let transports = Transports::from_features(InProcess::new());
    let (cx, head) = (CallContext::within(WAIT_TIMEOUT), Endpoint::parse(url).unwrap());
    let response = transports.ask(&cx, &head, "/health").await.unwrap();
    format!("{} {}", response.status.0, String::from_utf8_lossy(&response.message.head.to_bytes()))
}

/// As in a container, whose ports are published: nobody connects to `0.0.0.0`.
#[tokio::test]
async fn servers_that_bind_all_addresses_tell_one_that_others_reach() {
    let machines = Machines::new();
    let everywhere = ["++head_server.host=0.0.0.0", "++default_host=0.0.0.0"];
    let mut all = machines.run("all", &[&["+head_server.port=0", "--config", &quickstart()][..], &everywhere].concat());
    let url = all.says("ready: ").await.rsplit(' ').next().unwrap().to_owned();
    let (code, listed) = machines.says("asking", &["status", "--json", "--head-url", &url]).await;
    assert!(code == 0 && listed.contains("math_simple_agent") && !listed.contains("0.0.0.0"), "{listed}");
    let transports = Transports::from_features(InProcess::new());
    let head = RemoteRegistry::new(Endpoint::parse(&url).unwrap(), transports, World::real());
    let text = head.global_configuration(&CallContext::within(WAIT_TIMEOUT)).await.unwrap();
    let hosts: Vec<&str> = text.lines().filter(|line| line.trim_start().starts_with("host:")).collect();
    assert!(hosts.len() > 10 && !hosts.iter().any(|host| host.contains("0.0.0.0")), "{text}");
    let collecting = Collecting::new(machines.folder.path(), &url, "everywhere.jsonl");
    let (_, failed) = collecting.run(&["--dispatch", "push"], || {}).await;
    assert!(failed.is_empty(), "{failed:?}");
}

/// A member that could pull and cannot reach the collector, such as one behind a firewall.
#[tokio::test]
async fn a_collector_that_no_worker_reaches_pushes() {
    let machines = Machines::new();
    let mut all = machines.run("all", &["+head_server.port=0", "--config", &quickstart()]);
    let url = all.says("ready: ").await.rsplit(' ').next().unwrap().to_owned();
    let transports = Transports::from_features(InProcess::new());
    let head = RemoteRegistry::new(Endpoint::parse(&url).unwrap(), transports, World::real());
    let cx = CallContext::within(WAIT_TIMEOUT);
    let mut spec = MemberSpec::new("silent", Incarnation(1));
    spec.servers = head
        .list(&cx)
        .await
        .unwrap()
        .into_iter()
        .filter(|server| server.kind == ServerKind::Environment)
        .map(|server| MemberServer {
            implementation: server.implementation,
            labels: [(PULLS_LABEL.to_owned(), "1".to_owned())].into(),
            ..MemberServer::new(server.name, server.kind, server.endpoints)
        })
        .collect();
    let joined = MemberKeeper::join(Arc::new(head.clone()), &cx, spec, MemberOptions::default(), &World::real());
    let _silent = joined.await.unwrap();
    let collecting = Collecting::new(machines.folder.path(), &url, "unreached.jsonl");
    let (_, failed, said) = collecting.run_logged(&[], || {}).await;
    assert!(failed.is_empty() && said.contains("no worker reached this collector at http://127.0.0.1:"), "{said}");
}
