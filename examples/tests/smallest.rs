//! Runs the smallest programs: an environment whose tools no row names, and an agent.
#![allow(clippy::unwrap_used)] // Also in what the tests share, which the lint does not know for tests.

mod support;

use std::path::Path;

use gym_core::RawObject;
use gym_server::model::ScriptedItem;
use gym_server::{Servers, StackOptions};
use serde_json::{Value, json};
use support::{WAIT_TIMEOUT, clean, start};
use tokio::process::Command;

/// Adds one pen if the request offers the shop's tools, and then stops.
fn buy(request: &RawObject) -> Vec<ScriptedItem> {
    let request: Value = serde_json::from_slice(request.text()).unwrap();
    let names: Vec<&str> =
        request["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    let add = &request["tools"][1];
    assert_eq!((names, &add["description"]), (vec!["list", "add"], &json!("Puts an item into the cart.")));
    assert_eq!(add["parameters"]["properties"]["item"]["description"], "Its name, in lower case.");
    match request["input"].as_array().map_or(0, Vec::len) {
        0 | 1 => vec![ScriptedItem::tool_call("add", r#"{"item":"pen","quantity":"1"}"#)],
        _ => vec![ScriptedItem::message("done")],
    }
}

async fn collect(program: &str, folder: &Path, config: &str, rows: &[Value]) -> Vec<Value> {
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    std::fs::write(folder.join("stack.yaml"), config).unwrap();
    std::fs::write(folder.join("tasks.jsonl"), lines.join("\n")).unwrap();
    let mut command = Command::new(program);
    clean(&mut command);
    command.current_dir(folder).kill_on_drop(true);
    command
        .args("collect --config stack.yaml --input tasks.jsonl --output rollouts.jsonl +head_server.port=0".split(' '));
    let output = tokio::time::timeout(WAIT_TIMEOUT, command.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rollouts = std::fs::read_to_string(folder.join("rollouts.jsonl")).unwrap();
    rollouts.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_environment_offers_its_tools_and_scores_the_cart() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.yaml");
    std::fs::write(&model, "policy_model: {responses_api_models: {scripted_model: {entrypoint: app.py}}}\n").unwrap();
    let servers = Servers::stock().scripted_policy(|request: &RawObject, _: &mut fastrand::Rng| buy(request));
    let (stack, _) = start(&[model], &[], &servers, StackOptions::default()).await;
    let url = stack.servers().iter().find(|server| server.name == "policy_model").unwrap().url.clone();
    let config = format!(
        "
policy_model:
  responses_api_models:
    openai_model: {{entrypoint: app.py, openai_base_url: {url}/v1, openai_api_key: none, openai_model: scripted}}
shop:
  resources_servers:
    shop: {{entrypoint: app.py, domain: agent}}
shop_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {{type: resources_servers, name: shop}}
      model_server: {{type: responses_api_models, name: policy_model}}
shop_environment:
  environment_servers:
    legacy_agent: {{entrypoint: app.py, agent_server: {{type: responses_api_agents, name: shop_agent}}}}
"
    );
    let row = |wanted: Value| json!({"responses_create_params": {"input": "Buy a pen."}, "wanted": wanted, "agent_ref": {"name": "shop_agent"}});
    let rows = [row(json!([["pen", 1]])), row(json!([["pen", 2]]))];
    let mut rollouts = collect(env!("CARGO_BIN_EXE_shop"), folder.path(), &config, &rows).await;
    rollouts.sort_by_key(|rollout| rollout["_ng_task_index"].as_u64());
    let rewards: Vec<&Value> = rollouts.iter().map(|rollout| &rollout["reward"]).collect();
    assert_eq!(rewards, [&json!(1.0), &json!(0.0)]);
    let offered = |rollout: &Value| rollout["responses_create_params"]["tools"].as_array().map(Vec::len);
    assert!(rollouts.iter().all(|rollout| offered(rollout) == Some(2)), "{rollouts:?}");
    stack.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_calls_the_model_once() {
    let folder = tempfile::tempdir().unwrap();
    let config = "
policy_model: {responses_api_models: {scripted_model: {entrypoint: app.py}}}
math: {resources_servers: {math: {entrypoint: app.py, domain: math}}}
math_agent: {responses_api_agents: {one_turn: {entrypoint: app.py}}}
math_environment:
  environment_servers:
    legacy_agent: {entrypoint: app.py, agent_server: {type: responses_api_agents, name: math_agent}}
";
    let tasks = std::fs::read_to_string(support::examples().join("data/math.jsonl")).unwrap();
    let rows: Vec<Value> = tasks
        .lines()
        .take(8)
        .map(|line| {
            let mut row: Value = serde_json::from_str(line).unwrap();
            row["agent_ref"] = json!({"name": "math_agent"});
            row
        })
        .collect();
    let rollouts = collect(env!("CARGO_BIN_EXE_one_turn"), folder.path(), config, &rows).await;
    assert_eq!(rollouts.len(), 8);
    assert!(rollouts.iter().all(|rollout| rollout["reward"].is_f64()), "{rollouts:?}");
}

#[tokio::test]
async fn the_quickstart_runs_from_any_directory() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_quickstart"));
    clean(&mut command);
    command.current_dir(folder.path()).kill_on_drop(true).args(["--limit", "3"]);
    let output = tokio::time::timeout(WAIT_TIMEOUT, command.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rollouts = std::fs::read_to_string(folder.path().join("results/quickstart.jsonl")).unwrap();
    assert_eq!(rollouts.lines().count(), 6);
}
