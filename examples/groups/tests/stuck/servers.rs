//! Stalls of servers and model endpoints.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::time::Duration;

use gym_core::RawObject;
use gym_core::testing::free_port;
use gym_server::Servers;
use gym_server::model::ScriptedItem;
use gym_server::prelude::*;
use serde_json::json;

use crate::{Ground, stop};

const CONFIG: &str = "\
policy_model: {responses_api_models: {scripted_model: {entrypoint: app.py}}}
room: {resources_servers: {room: {entrypoint: app.py, domain: other}}}
room_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: room}
      model_server: {type: responses_api_models, name: policy_model}
";

/// Has tools that stall as the task asks.
struct Room;

#[derive(serde::Deserialize)]
struct Task {
    #[serde(default)]
    hang: bool,
}

impl ResourcesServer for Room {
    type Task = Task;

    tools! { |self, _cx, _session|
        /// Never answers.
        hang() => std::future::pending::<Result<serde_json::Value>>().await,
        /// Blocks its thread.
        block() => {
            std::thread::sleep(Duration::from_secs(3_600));
            Ok(json!("too late"))
        },
    }

    async fn verify(&self, _: &CallContext, _: &SessionId, task: Task, _: &ModelResponse) -> Result<Verdict> {
        if task.hang {
            std::future::pending::<()>().await;
        }
        Ok(Verdict::correct(true))
    }
}

/// The model calls the tool that the prompt names.
fn act(request: &RawObject, _: &mut fastrand::Rng) -> Vec<ScriptedItem> {
    let text = String::from_utf8_lossy(request.text());
    let tool = ["hang", "block"].into_iter().find(|tool| text.contains(&format!("use {tool}")));
    vec![tool.map_or_else(|| ScriptedItem::message("done"), |tool| ScriptedItem::tool_call(tool, "{}"))]
}

pub(crate) fn servers() -> Servers {
    Servers::stock().resources("room", |_| Ok(Room)).scripted_policy(act)
}

fn row(prompt: &str) -> serde_json::Value {
    json!({"responses_create_params": {"input": prompt}})
}

fn ground() -> Ground {
    let ground = Ground::new();
    std::fs::write(ground.file("gym.yaml"), CONFIG).expect("writes");
    ground
}

pub(crate) fn servers_that_do_not_answer_are_named() {
    let ground = ground();
    let _servers = ground.serve(&[]);
    let mut hangs = row("say something");
    hangs["hang"] = json!(true);
    let collector = ground.collect("stalls", "push", &[row("use hang"), hangs]);
    ground.expect("a tool that never answers", Some("0-0"), &["`room` runs `/hang`"]);
    ground.expect("a verifier that never answers", Some("1-0"), &["`room` runs `/verify`"]);
    drop(collector);
    // By itself, because the thread also holds up the task that it was to run next: tokio lets no other thread take it.
    let _collector = ground.collect("blocks", "push", &[row("use block")]);
    ground.expect("a tool that blocks its thread", Some("0-0"), &["`/block` of server `room` blocks the thread"]);
}

pub(crate) fn stopped_processes_are_named() {
    for (name, call) in [
        ("policy_model", "`/v1/responses` of `policy_model`"),
        ("room", "`/seed_session` of `room`"),
        ("room_agent", "`/run` of `room_agent`"),
        ("room_environment_server", "`/run` of `room_environment_server`"),
    ] {
        let ground = ground();
        let _head = ground.serve(&["--serve", "head_server"]);
        let head = ground.head();
        let names = ["policy_model", "room", "room_agent", "room_environment_server"];
        let services = names.map(|service| (service, ground.serve(&["--serve", service, "--head-url", &head])));
        let stopped = services.iter().find(|(service, _)| *service == name).expect("it runs").1.pid();
        stop(stopped);
        let _collector = ground.collect("stopped", "push", &[row("say something")]);
        let words = [call, &format!("`{name}` (pid {stopped}) does not answer: its process is stopped")];
        ground.expect(&format!("{name} is stopped"), Some("0-0"), &words);
    }
}

/// The head server answers nobody: it is in the process that is to be named.
pub(crate) fn frozen_processes_with_all_servers_are_named() {
    let ground = ground();
    let servers = ground.serve(&[]);
    let _collector = ground.collect("frozen", "push", &[row("use hang")]);
    ground.expect("a tool that never answers", Some("0-0"), &["`room` runs `/hang`"]);
    stop(servers.pid());
    let stopped = format!("`room_environment_server` (pid {}) does not answer: its process is stopped", servers.pid());
    ground.expect("all servers are stopped", Some("0-0"), &[&stopped]);

    let ground = crate::servers::ground();
    let _servers = ground.serve(&[]);
    // Twice as many as there are threads.
    let _collector = ground.collect("blocked", "push", &vec![row("use block"); 8]);
    ground.expect("tools that block all threads", None, &["`/block` of server `room` blocks the thread"]);
}

pub(crate) fn pulled_rollouts_are_followed_to_their_worker() {
    let ground = ground();
    let _head = ground.serve(&["--head-only"]);
    let head = ground.head();
    let worker = ["cli", "run", "--worker", "--name", "gpu-1", "--head-url", &head, "--host", "127.0.0.1"];
    let (worker, _) = ground.start(&[&worker[..], &["--config", "gym.yaml", "--threads", "4"]].concat(), "ready: ");
    let _collector = ground.collect("pulled", "pull", &[row("use hang")]);
    ground.expect("a tool of a worker", Some("0-0"), &["`room` runs `/hang`"]);
    stop(worker.pid());
    let stopped = format!("worker gpu-1 (pid {}) does not answer: its process is stopped", worker.pid());
    ground.expect("a stopped worker", Some("0-0"), &["waits in the work queue for `/run` of ", &stopped]);
}

pub(crate) fn model_endpoints_that_do_not_answer_are_named() {
    let silent = TcpListener::bind(("127.0.0.1", 0)).expect("listens");
    let silent_port = silent.local_addr().expect("a port").port();
    let (refusing, busy) = (free_port(), busy_endpoint());
    for (stall, port, words) in [
        ("an endpoint that refuses", refusing, &["before the endpoint is called again: ", "connection refused"][..]),
        ("an endpoint that is busy", busy, &["before the endpoint is called again: ", "503"]),
        ("an endpoint that never responds", silent_port, &["waits for the response of http://127.0.0.1:"]),
    ] {
        let ground = ground();
        let model = format!(
            "vllm_model: {{entrypoint: app.py, base_url: \"http://127.0.0.1:{port}/v1\", model: m, api_key: none}}"
        );
        let config = CONFIG.replace("scripted_model: {entrypoint: app.py}", &model);
        std::fs::write(ground.file("gym.yaml"), config).expect("writes");
        let _servers = ground.serve(&[]);
        let _collector = ground.collect("endpoint", "push", &[row("say something")]);
        let url = format!("http://127.0.0.1:{port}/v1");
        ground.expect(stall, Some("0-0"), &[words, &[&url]].concat());
    }
}

/// Starts an endpoint that answers 503, and returns its port.
fn busy_endpoint() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("listens");
    let port = listener.local_addr().expect("a port").port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let _ = stream.read(&mut [0; 65_536]);
            let _ = stream.write_all(b"HTTP/1.1 503 busy\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}");
        }
    });
    port
}
