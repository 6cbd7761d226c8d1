//! Checks that the committed tasks equal the generator's output, and that the script plays them as documented.
#![allow(clippy::unwrap_used)] // Also in what the tests share, which the lint does not know for tests.

use std::collections::{BTreeMap, BTreeSet};

use gym_core::{CallContext, ModelResponse, RawObject, ResourcesServer, SessionId};
use gym_examples::choice::Choice;
use gym_examples::math::Math;
use gym_examples::policy::answer;
use gym_examples::tasks::{ENVIRONMENTS, TASKS, jsonl};
use gym_examples::warehouse::Warehouse;
use serde_json::{Value, json};

fn rows(environment: &str) -> Vec<RawObject> {
    jsonl(environment).unwrap().lines().map(|line| RawObject::parse(line.to_owned()).unwrap()).collect()
}

#[test]
fn the_committed_files_are_what_the_generator_writes() {
    for environment in ENVIRONMENTS {
        let path = format!("{}/data/{environment}.jsonl", env!("CARGO_MANIFEST_DIR"));
        let committed = std::fs::read_to_string(&path).unwrap();
        assert!(
            committed == jsonl(environment).unwrap(),
            "{path} differs; run `cargo run -p gym-examples --bin generate-tasks`"
        );
    }
    assert_eq!(jsonl("chess"), None);
}

#[test]
fn every_task_is_another_one_and_names_its_agent() {
    for environment in ENVIRONMENTS {
        let rows = rows(environment);
        let distinct: BTreeSet<_> = rows.iter().map(|row| row.text().clone()).collect();
        assert!(rows.len() >= 200 && distinct.len() == TASKS);
        let agent = json!({"type": "responses_api_agents", "name": format!("{environment}_simple_agent")});
        assert!(rows.iter().all(|row| row.get_as::<Value>("agent_ref").unwrap().as_ref() == Some(&agent)));
    }
}

#[test]
fn right_options_are_spread_over_all_letters_and_orders_change_something() {
    let mut letters = BTreeMap::<String, usize>::new();
    for row in rows("choice") {
        *letters.entry(row.get_as("answer").unwrap().unwrap()).or_default() += 1;
    }
    assert!(letters.len() == 4 && letters.values().all(|count| (TASKS / 8..TASKS / 2).contains(count)), "{letters:?}");
    for row in rows("warehouse") {
        assert_ne!(row.get("initial_stock"), row.get("target_stock"));
    }
}

/// Plays a row to its end as an agent would. Returns the reward and the number of turns.
async fn play<S: ResourcesServer>(server: &S, row: &RawObject, seed: u64) -> (f64, usize) {
    let (cx, session) =
        (CallContext::default(), SessionId::new(format!("{seed} {:?}", row.get("responses_create_params"))));
    server.seed_session(&cx, &session, row).await.unwrap();
    let mut params: Value = row.get_as("responses_create_params").unwrap().unwrap();
    let mut output = Vec::new();
    for turn in 1.. {
        assert!(turn <= 20, "the script does not end: {params}");
        let items = answer(&RawObject::from_value(&params).unwrap(), seed);
        let mut called = false;
        for item in items {
            let mut reply = Vec::from([item.clone()]);
            if item["type"] == "function_call" {
                called = true;
                let text = match RawObject::parse(item["arguments"].as_str().unwrap().to_owned()) {
                    Ok(arguments) => {
                        match server.call_tool(&cx, &session, item["name"].as_str().unwrap(), &arguments).await {
                            Ok(reply) => String::from_utf8(reply.message.head.to_bytes().to_vec()).unwrap(),
                            Err(error) => error.to_string(),
                        }
                    }
                    Err(error) => error.to_string(),
                };
                reply.push(json!({"type": "function_call_output", "call_id": item["call_id"], "output": text}));
            }
            params["input"].as_array_mut().unwrap().extend(reply.clone());
            output.extend(reply);
        }
        if !called {
            let response = ModelResponse(RawObject::from_value(&json!({"output": output})).unwrap());
            let verdict = server.verify(&cx, &session, row.view::<S::Task>().unwrap(), &response).await.unwrap();
            return (verdict.reward, turn);
        }
    }
    unreachable!("the loop returns")
}

async fn mix<S: ResourcesServer>(server: S, environment: &str, turns_max: usize) {
    let (mut right, mut most, mut changed, mut solved) = (0, 0, 0, 0);
    let rows = rows(environment);
    for row in &rows {
        let mut rewards = Vec::new();
        for seed in 0..8 {
            let (reward, turns) = play(&server, row, seed).await;
            rewards.push(reward);
            most = most.max(turns);
        }
        right += rewards.iter().filter(|reward| **reward == 1.0).count();
        changed += usize::from(rewards.iter().any(|reward| *reward != rewards[0]));
        solved += usize::from(rewards.contains(&1.0));
    }
    let share = right as f64 / (rows.len() * 8) as f64;
    // Three in five intend the right answer and give it. A wrong answer is rarely right by chance.
    assert!((0.55..0.67).contains(&share), "{environment}: {share} are right");
    assert!(most == turns_max, "{environment}: {most} turns");
    // A task that no seed solves would be one that the script cannot parse.
    assert!(solved == rows.len() && changed > TASKS / 2, "{environment}: {solved} solved, {changed} uneven");
}

#[tokio::test]
async fn the_script_solves_the_math_it_means_to_solve() {
    mix(Math, "math", 2).await;
}

#[tokio::test]
async fn the_script_carries_out_the_orders_it_means_to_carry_out() {
    mix(Warehouse::default(), "warehouse", 9).await;
}

#[tokio::test]
async fn the_script_chooses_the_options_it_means_to_choose() {
    mix(Choice, "choice", 1).await;
}

#[test]
fn the_same_request_and_seed_give_the_same_turn_and_strange_requests_get_one_too() {
    let row = rows("math").remove(0);
    let request = row.get_object("responses_create_params").unwrap().unwrap();
    assert_eq!(answer(&request, 7), answer(&request, 7));
    for strange in [
        r#"{}"#,
        r#"{"input": null, "tools": 5}"#,
        r#"{"input": "hello"}"#,
        r#"{"input": [1, {"role": "user", "content": [{"type": "input_image"}]}], "tools": [{"name": "list_stock"}]}"#,
        r#"{"input": [{"role": "user", "content": "Convert"}], "tools": [{"name": "calculator"}]}"#,
        r#"{"input": [{"role": "user", "content": "Today is Monday. Which day is it in x days?\n\nA) a"}]}"#,
        r#"{"input": [{"role": "user", "content": "1) 2) 3)\nA) 5"}]}"#,
        r#"{"input": [{"role": "user", "content": "Is 7 the largest?\nA) 7"}]}"#,
        r#"{"input": [{"type": "function_call_output", "output": "{\"stock\": 5}"}], "tools": [{"name": "list_stock"}]}"#,
    ] {
        for seed in 0..50 {
            assert_eq!(answer(&RawObject::parse(strange).unwrap(), seed).len(), 1, "{strange}");
        }
    }
}
