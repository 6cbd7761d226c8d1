//! Statistics held against what NeMo Gym 0.7.0 computes from the same rollouts.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::collections::BTreeMap;
use std::io::Cursor;

use gym_client::collect::report::{
    AggregateRequest, ReportEntry, RolloutsIndex, label_runs, write_computed_report, write_report,
};
use gym_core::rollout::metrics::{
    AggregateOptions, Aggregation, BodyRows, MetricsError, Sample, aggregate_metrics, highest_k_metrics, pass_at_k,
    subset_metrics, t_quantile_95,
};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
struct Case {
    name: String,
    rows: Vec<Box<RawValue>>,
    request: Value,
    expected: Option<Value>,
}

fn cases() -> Vec<Case> {
    let cases: Vec<Case> =
        include_str!("data/metrics/aggregate.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(cases.len(), 25);
    cases
}

/// Structure, key order and kind of number are equal, and numbers to 1e-9.
fn assert_same(path: &str, got: &Value, expected: &Value) {
    match (got, expected) {
        (Value::Object(got), Value::Object(expected)) => {
            let keys = |map: &Map<String, Value>| map.keys().cloned().collect::<Vec<_>>();
            assert_eq!(keys(got), keys(expected), "{path}");
            for (key, value) in got {
                assert_same(&format!("{path}.{key}"), value, &expected[key]);
            }
        }
        (Value::Array(got), Value::Array(expected)) => {
            assert_eq!(got.len(), expected.len(), "{path}");
            for (place, (got, expected)) in got.iter().zip(expected).enumerate() {
                assert_same(&format!("{path}[{place}]"), got, expected);
            }
        }
        (Value::Number(got), Value::Number(expected)) => {
            assert_eq!(got.is_f64(), expected.is_f64(), "{path}: {got} and {expected}");
            let (got, expected) = (got.as_f64().unwrap(), expected.as_f64().unwrap());
            let allowed = 1e-9 * expected.abs() + 1e-12;
            assert!((got - expected).abs() <= allowed, "{path}: {got} instead of {expected}");
        }
        _ => assert_eq!(got, expected, "{path}"),
    }
}

fn file_of(rows: &[Box<RawValue>], server: &str) -> Vec<u8> {
    let mut file = Vec::new();
    for row in rows {
        let stamp = format!(",\"_ng_environment_server\":\"{server}\"}}\n");
        file.extend_from_slice(row.get().strip_suffix('}').unwrap().as_bytes());
        file.extend_from_slice(stamp.as_bytes());
    }
    file
}

fn scan(file: &[u8]) -> Result<RolloutsIndex, MetricsError> {
    RolloutsIndex::scan(file, "rollouts.jsonl", |agent| Err(format!("no environment server fronts {agent}")))
}

#[test]
fn replies_equal_nemo_gyms_in_every_golden_case() {
    for case in cases() {
        let reply = aggregate_metrics(case.request.to_string().as_bytes(), usize::MAX);
        match case.expected {
            Some(expected) => assert_same(&case.name, &serde_json::from_slice(&reply.unwrap()).unwrap(), &expected),
            None => {
                assert!(reply.unwrap_err().to_string().contains("_ng_task_index 0, _ng_rollout_index 0 appears more"))
            }
        }
    }
}

#[test]
fn a_reply_that_its_caller_does_not_take_is_an_error_that_names_the_bound() {
    for case in cases() {
        let body = case.request.to_string();
        let Ok(reply) = aggregate_metrics(body.as_bytes(), usize::MAX) else { continue };
        assert_eq!(aggregate_metrics(body.as_bytes(), reply.len()).unwrap(), reply, "{}", case.name);
        for bytes_max in [reply.len() - 1, reply.len() / 2, 0] {
            let error = aggregate_metrics(body.as_bytes(), bytes_max).unwrap_err();
            assert!(matches!(error, MetricsError::ReplyTooLarge { bytes_max: bound } if bound == bytes_max), "{error}");
        }
    }
}

#[test]
fn a_benchmarks_own_metrics_are_merged_as_nemo_gym_does() {
    #[derive(Deserialize)]
    struct Custom {
        request: Value,
        overall: Map<String, Value>,
        per_task: Vec<Map<String, Value>>,
        expected: Value,
    }
    let custom: Custom = serde_json::from_str(include_str!("data/metrics/custom.jsonl")).unwrap();
    let body = custom.request.to_string();
    let mut rows = BodyRows::parse(body.as_bytes()).unwrap();
    let mut aggregation = Aggregation::compute(&mut rows, AggregateOptions::default()).unwrap();
    let per_task = custom.per_task.into_iter().map(|mut own| {
        let task = own.shift_remove("_ng_task_index").unwrap();
        (task.as_i64().unwrap(), own)
    });
    aggregation.add_metrics(&custom.overall, per_task.collect());
    let mut reply = Vec::new();
    aggregation.write_reply(&mut rows, &mut reply).unwrap();
    assert_same("custom", &serde_json::from_slice(&reply).unwrap(), &custom.expected);
}

#[test]
fn one_column_at_a_time_gives_the_same_statistics() {
    for case in cases().into_iter().filter(|case| case.expected.is_some()) {
        let body = case.request.to_string();
        let mut rows = BodyRows::parse(body.as_bytes()).unwrap();
        let mut options = AggregateOptions::default();
        options.column_bytes_max = 1;
        let narrow = Aggregation::compute(&mut rows, options).unwrap();
        let mut reply = Vec::new();
        narrow.write_reply(&mut rows, &mut reply).unwrap();
        assert_eq!(reply, aggregate_metrics(body.as_bytes(), usize::MAX).unwrap(), "{}", case.name);
    }
}

#[test]
fn request_bodies_equal_nemo_gyms_in_every_golden_case() {
    for case in cases() {
        let file = file_of(&case.rows, "env");
        let index = scan(&file).unwrap();
        let Some(group) = index.groups().first() else {
            assert!(case.rows.is_empty());
            continue;
        };
        let mut reader = Cursor::new(&file);
        let length = AggregateRequest::new(index.rows(group, &mut reader)).length().unwrap();
        let mut body = Vec::new();
        AggregateRequest::new(index.rows(group, &mut reader)).write_to(&mut body).unwrap();
        assert_eq!(body.len() as u64, length);
        let mut body: Value = serde_json::from_slice(&body).unwrap();
        for row in body["verify_responses"].as_array_mut().unwrap() {
            row.as_object_mut().unwrap().shift_remove("_ng_environment_server");
        }
        assert_eq!(body.to_string(), case.request.to_string(), "{}", case.name);
    }
}

#[test]
fn the_file_pass_writes_the_report_that_the_servers_reply_gives() {
    for case in cases().into_iter().filter(|case| !case.rows.is_empty()) {
        let file = file_of(&case.rows, "env");
        let index = scan(&file).unwrap();
        let mut computed = Vec::new();
        let written =
            write_computed_report(&index, &mut Cursor::new(&file), AggregateOptions::default(), &mut computed);
        let Some(expected) = case.expected else {
            assert!(matches!(written, Err(MetricsError::Duplicate { task: 0, rollout: 0 })));
            continue;
        };
        written.unwrap();
        let reply = aggregate_metrics(case.request.to_string().as_bytes(), usize::MAX).unwrap();
        let entry = ReportEntry {
            label: "env".to_owned(),
            server: "env".to_owned(),
            reply: std::str::from_utf8(&reply).unwrap(),
        };
        let mut relayed = Vec::new();
        write_report(&[entry], &mut relayed).unwrap();
        assert_eq!(String::from_utf8(computed).unwrap(), String::from_utf8(relayed.clone()).unwrap(), "{}", case.name);

        let mut entry = json!({
            "agent_ref": {"name": "env"},
            "_ng_environment_server": "env",
            "agent_metrics": expected["agent_metrics"],
            "key_metrics": expected["key_metrics"],
            "group_level_metrics": expected["group_level_metrics"],
            "repeat_level_metrics": expected["repeat_level_metrics"],
        });
        if !expected["perf_summary"].is_null() {
            entry["perf_summary"] = expected["perf_summary"].clone();
        }
        assert_same(&case.name, &serde_json::from_slice(&relayed).unwrap(), &json!([entry]));
    }
}

#[test]
fn reports_keep_the_text_of_replies_and_indent_it_by_two() {
    let reply =
        r#"{"agent_metrics":{"a,{\"":1E5},"key_metrics":{},"group_level_metrics":[{"x":[1,[]]}],"perf_summary":null}"#;
    let entry = ReportEntry { label: "l".to_owned(), server: "s".to_owned(), reply };
    let mut report = Vec::new();
    write_report(&[entry], &mut report).unwrap();
    let expected = r#"[
  {
    "agent_ref": {
      "name": "l"
    },
    "_ng_environment_server": "s",
    "agent_metrics": {
      "a,{\"": 1E5
    },
    "key_metrics": {},
    "group_level_metrics": [
      {
        "x": [
          1,
          []
        ]
      }
    ],
    "repeat_level_metrics": []
  }
]"#;
    assert_eq!(String::from_utf8(report).unwrap(), expected);
    let mut none = Vec::new();
    write_report(&[], &mut none).unwrap();
    assert_eq!(none, b"[]");
}

#[test]
fn rows_are_grouped_by_the_server_they_ran_through() {
    let file = concat!(
        "{\"_ng_task_index\":2,\"_ng_rollout_index\":0,\"agent_ref\":{\"name\":\"a\"},\"reward\":1}\n",
        "\n",
        "{\"_ng_task_index\":0,\"_ng_rollout_index\":0,\"agent_ref\":{\"name\":\"b\"},\"reward\":1}\r\n",
        "{\"_ng_task_index\":1,\"_ng_rollout_index\":0,\"_ng_environment_server\":\"env_a\",\"reward\":0}\n",
        "{\"_ng_task_index\":1,\"_ng_rollout_index\":1,\"reward\":0}",
    );
    let index = RolloutsIndex::scan(file.as_bytes(), "rollouts.jsonl", |agent| Ok(format!("env_{agent}"))).unwrap();
    let groups: Vec<_> = index.groups().iter().map(|group| (group.server.as_str(), group.count())).collect();
    assert_eq!(groups, [("env_b", 1), ("env_a", 2)]);
    assert_eq!(index.count(), 3);
}

#[test]
fn broken_rollout_rows_are_named_by_line() {
    for (bad, message) in [
        ("{\"reward\":", "rollouts.jsonl, line 2: malformed JSON"),
        ("{\"_ng_task_index\":\"a\"}", "rollouts.jsonl, line 2: _ng_task_index is \"a\"; expected a whole number"),
        ("{\"agent_ref\":{\"name\":\"q\"}}", "rollouts.jsonl, line 2: no environment server fronts q"),
        ("{\"_ng_environment_server\":3}", "rollouts.jsonl, line 2: _ng_environment_server is not a string"),
    ] {
        let error = scan(format!("{{}}\n{bad}\n").as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
    for (bad, message) in [
        ("[]", "aggregate metrics request: "),
        ("{\"verify_responses\":3}", "aggregate metrics request: "),
        ("{\"verify_responses\":[{},7]}", "verify_responses[1]: "),
        (
            "{\"verify_responses\":[{\"_ng_rollout_index\":0.5}]}",
            "verify_responses[0]: _ng_rollout_index is 0.5; expected",
        ),
    ] {
        let error = aggregate_metrics(bad.as_bytes(), usize::MAX).unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
}

#[test]
fn servers_of_one_agent_are_told_apart() {
    let labels = |agents: &[(&str, Option<&str>)]| {
        let agents: BTreeMap<_, _> =
            agents.iter().map(|(server, agent)| ((*server).to_owned(), agent.map(str::to_owned))).collect();
        label_runs(&agents).into_values().collect::<Vec<_>>()
    };
    assert_eq!(labels(&[("e1", Some("a")), ("e2", Some("b")), ("e3", None)]), ["a", "b", "e3"]);
    assert_eq!(labels(&[("e1", Some("a")), ("e2", Some("a"))]), ["e1", "e2"]);
    assert_eq!(labels(&[("e1", Some("e2")), ("e2", Some("b")), ("e3", Some("b"))]), ["e1", "e2", "e3"]);
}

#[test]
fn t_quantiles_equal_scipys_to_the_twelfth_digit() {
    #[derive(Deserialize)]
    struct Line {
        degrees: u64,
        t: f64,
    }
    for line in include_str!("data/metrics/student_t.jsonl").lines() {
        let Line { degrees, t } = serde_json::from_str(line).unwrap();
        let got = t_quantile_95(degrees);
        assert!((got - t).abs() <= 1e-12 * t, "{degrees}: {got} instead of {t}");
    }
}

#[derive(Deserialize)]
struct PassCase {
    name: String,
    answers: bool,
    tasks: Vec<Vec<Map<String, Value>>>,
    metrics: Value,
    subsets: Value,
    highest: Value,
}

fn sample(row: &Map<String, Value>) -> Sample {
    let number = |value: &Value| value.as_f64().or_else(|| value.as_bool().map(|value| f64::from(u8::from(value))));
    Sample {
        scores: ["reward", "other"]
            .into_iter()
            .filter_map(|name| Some((name.to_owned(), number(row.get(name)?)?)))
            .collect(),
        answer: row["answer"].as_str().map(str::to_owned),
    }
}

#[test]
fn pass_at_k_equals_nemo_gyms_in_every_golden_case() {
    let mut compared = 0;
    for case in include_str!("data/metrics/pass_at_k.jsonl").lines() {
        let case: PassCase = serde_json::from_str(case).unwrap();
        let tasks: Vec<Vec<Sample>> = case.tasks.iter().map(|task| task.iter().map(sample).collect()).collect();
        let result = pass_at_k(&tasks, case.answers).with_sample_deviation();
        let name = format!("{} {}", case.name, case.answers);
        assert_same_but_for_kind(&name, &Value::Object(result.metrics.clone()), &case.metrics);
        let level = |task: usize| {
            let level = |row: &Map<String, Value>| row["level"].as_str().map(str::to_owned);
            case.tasks[task].iter().find_map(level)
        };
        assert_same_but_for_kind(&name, &subset_metrics(&tasks, case.answers, level).into(), &case.subsets);
        let highest = highest_k_metrics(&result.metrics, "pass@1[avg-of-{k}]", None, &["no_answer"]);
        assert_same_but_for_kind(&name, &highest.into(), &case.highest);
        compared += 1;
    }
    assert_eq!(compared, 12);
}

/// As [`assert_same`], where whole floats may be spelled as integers.
fn assert_same_but_for_kind(path: &str, got: &Value, expected: &Value) {
    fn floats(value: &Value) -> Value {
        match value {
            Value::Number(number) => number.as_f64().into(),
            Value::Array(values) => values.iter().map(floats).collect(),
            Value::Object(members) => members.iter().map(|(key, value)| (key.clone(), floats(value))).collect(),
            other => other.clone(),
        }
    }
    assert_same(path, &floats(got), &floats(expected));
}

/// Rows of tasks and repeats, each with a reward, a second metric and its mask. A masked row may have any value.
fn masked_rows() -> impl Strategy<Value = Vec<(i64, i64, f64, u32, bool)>> {
    let row = (prop_oneof![Just(0.0), Just(1.0), -2.0..2.0], 0..9_u32, any::<bool>());
    proptest::collection::vec(proptest::collection::vec(row, 1..5), 1..6).prop_map(|tasks| {
        let numbered = |(task, rows): (usize, Vec<(f64, u32, bool)>)| {
            let row = move |(repeat, (reward, turns, masked))| (task as i64, repeat as i64, reward, turns, masked);
            rows.into_iter().enumerate().map(row)
        };
        tasks.into_iter().enumerate().flat_map(numbered).collect()
    })
}

proptest! {
    #[test]
    fn masked_rollouts_change_no_statistic_of_the_others(rows in masked_rows()) {
        let reply = |rows: &mut dyn Iterator<Item = &(i64, i64, f64, u32, bool)>| {
            let row = |(task, repeat, reward, turns, masked): &(i64, i64, f64, u32, bool)| {
                let mut row = json!({"_ng_task_index": task, "_ng_rollout_index": repeat, "reward": reward, "turns": turns});
                if *masked {
                    row["mask_sample"] = true.into();
                }
                row
            };
            let body = json!({"verify_responses": rows.map(row).collect::<Vec<_>>()}).to_string();
            let reply = aggregate_metrics(body.as_bytes(), 1 << 20).unwrap();
            let mut reply: Value = serde_json::from_slice(&reply).unwrap();
            // The coverage and the number of repeats tell that something was masked.
            for part in ["agent_metrics", "key_metrics"] {
                let metrics = reply[part].as_object_mut().unwrap();
                metrics.retain(|key, _| !key.starts_with("coverage/") && key != "num_repeats");
            }
            reply
        };
        let masked = reply(&mut rows.iter());
        let absent = reply(&mut rows.iter().filter(|row| !row.4));
        prop_assert_eq!(masked, absent);
    }

    #[test]
    fn a_task_whose_rollouts_are_all_missing_changes_no_pass_at_k(
        scores in proptest::collection::vec(proptest::collection::vec((any::<bool>(), 0..3_u8), 0..4), 0..6),
    ) {
        let sample = |(right, answer): &(bool, u8)| Sample { answer: Some(answer.to_string()), ..Sample::accuracy(f64::from(u8::from(*right))) };
        let tasks: Vec<Vec<Sample>> = scores.iter().chain([&vec![(true, 1)]]).map(|task| task.iter().map(sample).collect()).collect();
        let present: Vec<Vec<Sample>> = tasks.iter().filter(|task| !task.is_empty()).cloned().collect();
        prop_assert_eq!(pass_at_k(&tasks, true).metrics, pass_at_k(&present, true).metrics);
    }
}
