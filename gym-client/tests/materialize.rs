//! Materialized inputs, held against what NeMo Gym 0.7.0 writes for the same rows and options, and against a plain model.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::collections::{BTreeMap, HashMap};
use std::io::Cursor;

use gym_client::collect::input::PromptTemplate;
use gym_client::collect::input::{AgentNames, MaterializeSummary, Materializer};
use gym_client::collect::input::{InputError, MaterializeOptions, MaterializedRows, Repeats, Routing};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

/// Task sources that are agents themselves, as in the golden script's configuration.
struct Servers;

impl AgentNames for Servers {
    fn agent_of_task_source(&self, task_source: &str) -> Result<String, String> {
        match task_source {
            "alpha" | "beta" => Ok(task_source.to_owned()),
            _ => Err("not in the running config".to_owned()),
        }
    }

    fn agent_of_environment_server(&self, _: &str) -> Option<String> {
        None
    }
}

#[derive(Deserialize)]
struct Case {
    name: String,
    input: String,
    options: Options,
    expected: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    limit: Option<u64>,
    num_repeats: Option<Value>,
    num_repeats_add_seed: bool,
    interleave_repeats: bool,
    responses_create_params: serde_json::Map<String, Value>,
    agent_name: Option<String>,
    agent_map: BTreeMap<String, String>,
    fan_out: BTreeMap<String, Vec<String>>,
    prompt: Option<String>,
    environment_routing_mode: Option<String>,
    environment_server_name: Option<String>,
    environment_server_routes: BTreeMap<String, String>,
}

fn materialize(input: &str, options: Options) -> Result<(Vec<String>, MaterializeSummary), InputError> {
    let mut wanted = MaterializeOptions::new("tasks.jsonl");
    wanted.limit = options.limit;
    wanted.repeats = match options.num_repeats {
        None => Repeats::Each(1),
        Some(Value::Number(repeats)) => Repeats::Each(repeats.as_u64().unwrap() as u32),
        Some(map) => Repeats::PerAgent(serde_json::from_value(map).unwrap()),
    };
    wanted.add_seed = options.num_repeats_add_seed;
    wanted.interleave = options.interleave_repeats;
    wanted.overrides = options.responses_create_params;
    wanted.agent_map = options.agent_map;
    wanted.fan_out = options.fan_out;
    wanted.prompt = options.prompt.map(|text| PromptTemplate::from_yaml(&text, "prompt.yaml").unwrap());
    if options.environment_routing_mode.as_deref() == Some("legacy") {
        wanted.routing = Routing::Legacy(options.environment_server_name.unwrap());
    }
    wanted.environment_server_routes = options.environment_server_routes;
    if let Some(agent) = options.agent_name {
        wanted = wanted.with_agent(&agent)?;
    }
    let mut out = Vec::new();
    let summary = Materializer::new(wanted, Servers)?.write(Cursor::new(input), &mut out)?;
    Ok((String::from_utf8(out).unwrap().lines().map(str::to_owned).collect(), summary))
}

/// A row's value as text: equal texts mean equal values with equal key order.
fn canonical(row: &str) -> String {
    serde_json::from_str::<Value>(row).unwrap().to_string()
}

#[test]
fn rows_equal_nemo_gyms_in_every_golden_case() {
    let cases = include_str!("data/materialize.jsonl");
    let mut compared = 0;
    for case in cases.lines().map(|line| serde_json::from_str::<Case>(line).unwrap()) {
        let name = case.name;
        let got = materialize(&case.input, case.options);
        match (case.expected, got) {
            (Some(expected), Ok((got, summary))) => {
                let got: Vec<_> = got.iter().map(|row| canonical(row)).collect();
                let expected: Vec<_> = expected.iter().map(|row| canonical(row)).collect();
                assert_eq!(got, expected, "case {name}");
                assert_eq!(summary.rows_written, expected.len() as u64, "case {name}");
            }
            (None, Err(_)) => {}
            (Some(_), Err(error)) => panic!("case {name}: {error}"),
            (None, Ok((got, _))) => panic!("case {name} should fail, and gave {got:?}"),
        }
        compared += 1;
    }
    assert_eq!(compared, 39);
}

#[test]
fn each_rows_own_text_is_kept_bit_for_bit() {
    let input = r#" { "n" : 1E5,"i":12345678901234567890123 , "s":"\u00e9\/", "responses_create_params" : { "t":1.50 }, "agent_ref":{"name":"x" } }"#;
    let (rows, _) = materialize(input, Options { num_repeats_add_seed: true, ..Options::default() }).unwrap();
    assert_eq!(
        rows,
        [
            r#"{ "n" : 1E5,"i":12345678901234567890123 , "s":"\u00e9\/", "responses_create_params" : { "t":1.50,"metadata":{"extra_body":"{\"seed\": 0}"}}, "agent_ref":{"name":"x" },"_ng_task_index":0,"_ng_rollout_index":0}"#
        ]
    );
}

#[test]
fn errors_name_the_file_the_line_and_the_fix() {
    let good = r#"{"responses_create_params":{},"agent_ref":{"name":"x"}}"#;
    for (bad, message) in [
        ("", "line is blank; remove it"),
        ("{\"a\":", "malformed JSON: EOF while parsing"),
        ("[1]", "a JSON array; write one JSON object on each line"),
        ("{", "write each object on one line"),
        (r#"{"agent_ref":{"name":"x"}}"#, "responses_create_params is missing; give"),
        (r#"{"responses_create_params":[],"agent_ref":{"name":"x"}}"#, "responses_create_params is not an object"),
        (r#"{"responses_create_params":{}}"#, "name one with --agent"),
        (r#"{"responses_create_params":{},"agent_ref":"x"}"#, "agent_ref is not an object; expected"),
        (r#"{"responses_create_params":{},"agent_ref":{"name":3}}"#, "agent_ref.name is not a string"),
        (r#"{"responses_create_params":{},"task_source":[1]}"#, "task_source is not a string"),
        (r#"{"responses_create_params":{},"task_source":"gamma"}"#, "not in the running config"),
        (
            r#"{"responses_create_params":{},"agent_ref":{"name":"x"},"_ng_task_index":"a"}"#,
            "_ng_task_index is \"a\"; expected a whole number",
        ),
        (
            r#"{"responses_create_params":{},"agent_ref":{"name":"x"},"_ng_task_index":-1}"#,
            "_ng_task_index is -1; expected a whole number from 0 to 4294967295, or leave it out",
        ),
        (
            r#"{"responses_create_params":{},"agent_ref":{"name":"x"},"_ng_task_index":4294967296}"#,
            "_ng_task_index is 4294967296; expected a whole number from 0 to 4294967295",
        ),
    ] {
        let error = materialize(&format!("{good}\n{bad}\n{good}\n"), Options::default()).unwrap_err().to_string();
        assert!(error.starts_with("tasks.jsonl, line 2: "), "{bad}: {error}");
        assert!(error.contains(message), "{bad}: {error}");
    }
    let seeded = Options { num_repeats_add_seed: true, ..Options::default() };
    let row = r#"{"responses_create_params":{"metadata":{"extra_body":"[1]"}},"agent_ref":{"name":"x"}}"#;
    let error = materialize(row, seeded).unwrap_err().to_string();
    assert_eq!(
        error,
        "tasks.jsonl, line 1: responses_create_params.metadata.extra_body must be a string that holds a JSON object"
    );
}

#[test]
fn bad_options_are_refused_before_anything_is_read() {
    let refused = |change: &dyn Fn(&mut MaterializeOptions)| {
        let mut options = MaterializeOptions::new("tasks.jsonl");
        change(&mut options);
        Materializer::new(options, Servers).map(|_| ()).unwrap_err().to_string()
    };
    let map = |agent: &str, repeats| Repeats::PerAgent([(agent.to_owned(), repeats)].into());
    assert!(refused(&|options| options.repeats = Repeats::Each(0)).starts_with("num_repeats: must be at least 1"));
    assert!(refused(&|options| options.repeats = map("x", 0)).starts_with("num_repeats.x: must be at least 1"));
    assert!(
        refused(&|options| options.fan_out = [("x".to_owned(), vec![])].into())
            .starts_with("fan_out.x: the list of agents is empty")
    );
    let twice = vec!["p".to_owned(), "p".to_owned()];
    assert!(
        refused(&|options| options.fan_out = [("x".to_owned(), twice.clone())].into())
            .contains("\"p\" is listed more than once")
    );
    assert!(refused(&|options| options.routing = Routing::Taskset).starts_with("environment_server_routes: "));
    let mut options = MaterializeOptions::new("tasks.jsonl");
    options.agent_map.insert("_default".to_owned(), "a".to_owned());
    assert!(options.with_agent("b").unwrap_err().to_string().contains("set only one of them"));
}

#[test]
fn the_summary_says_who_gets_what_and_what_looks_wrong() {
    let rows = [
        r#"{"responses_create_params":{},"agent_ref":{"name":"x"}}"#,
        r#"{"responses_create_params":{"a":1},"agent_ref":{"name":"y"}}"#,
    ];
    let options = Options {
        num_repeats: Some(json!({"_default": 2, "typo": 3})),
        agent_map: [("y".to_owned(), "z".to_owned())].into(),
        ..Options::default()
    };
    let (_, summary) = materialize(&rows.join("\n"), options).unwrap();
    assert_eq!((summary.rows_read, summary.rows_written), (2, 4));
    assert_eq!(summary.targets["z"].rows, 2);
    assert_eq!(summary.targets["z"].first_line, 2);
    assert_eq!(summary.warnings.len(), 2);
    assert!(summary.warnings[0].contains("\"y\" go to \"z\""));
    assert!(summary.warnings[1].contains("\"typo\""));
}

#[test]
fn materialized_rows_stream_back_as_written() {
    let input = "{\"responses_create_params\":{},\"agent_ref\":{\"name\":\"x\"},\"n\":1E5}\n";
    let options = Options { num_repeats: Some(json!(2)), ..Options::default() };
    let (rows, _) = materialize(input, options).unwrap();
    let file = rows.join("\n");
    let back: Vec<_> = MaterializedRows::new(file.as_bytes(), "out.jsonl").collect::<Result<_, _>>().unwrap();
    assert_eq!(
        back.iter().map(|row| row.row.text().as_ref()).collect::<Vec<_>>(),
        rows.iter().map(String::as_bytes).collect::<Vec<_>>()
    );
    assert_eq!(back[1].key.rollout_index, 1);
    assert_eq!(back[1].agent.as_deref(), Some("x"));
    assert_eq!(back[1].line, 2);
    let error = MaterializedRows::new(&b"{\"_ng_task_index\":0}\n"[..], "out.jsonl").next().unwrap().unwrap_err();
    assert!(error.to_string().starts_with("out.jsonl, line 1: _ng_rollout_index is not an integer"));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// The rules once more, over rows held in memory: given indices are kept, equal lines share one, rollouts count on.
    #[test]
    fn indices_follow_the_plain_model(
        rows in proptest::collection::vec((0..4_u8, proptest::option::of(prop_oneof![0..6_i64, Just(i64::from(u32::MAX))])), 0..30),
        repeats in 1..4_u32,
        interleave in any::<bool>(),
    ) {
        let lines: Vec<String> = rows.iter().map(|(body, given)| {
            let given = given.map(|given| format!(r#","_ng_task_index":{given}"#)).unwrap_or_default();
            format!(r#"{{"responses_create_params":{{"input":{body}}},"agent_ref":{{"name":"x"}}{given}}}"#)
        }).collect();
        let mut expected = Vec::new();
        let mut by_line: HashMap<&str, i64> = HashMap::new();
        let mut counters: HashMap<i64, i64> = HashMap::new();
        for (line, (_, given)) in lines.iter().zip(&rows) {
            let next = by_line.len() as i64;
            let task = given.unwrap_or_else(|| *by_line.entry(line).or_insert(next));
            for _ in 0..repeats {
                let counter = counters.entry(task).or_insert(0);
                expected.push((task, *counter, line.clone()));
                *counter += 1;
            }
        }
        if interleave {
            expected.sort_by_key(|(_, rollout, _)| *rollout);
        }
        let options = Options { num_repeats: Some(json!(repeats)), interleave_repeats: interleave, ..Options::default() };
        let input: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let (got, _) = materialize(&input, options).unwrap();
        let got: Vec<_> = MaterializedRows::new(got.join("\n").as_bytes(), "out").map(|row| {
            let row = row.unwrap();
            (row.key.task_index, row.key.rollout_index, row.row.into_text())
        }).collect();
        prop_assert_eq!(got.len(), expected.len());
        for ((task, rollout, raw), (expected_task, expected_rollout, line)) in got.iter().zip(&expected) {
            prop_assert_eq!((task, rollout), (expected_task, expected_rollout));
            // The row's own text comes first, untouched.
            prop_assert!(raw.starts_with(&line.as_bytes()[..line.len() - 1]));
        }
    }
}
