//! Input rows, and options of their collection.

use std::collections::BTreeMap;

use gym_client::collect::CollectOptions;
use gym_client::collect::input::Repeats;

use super::Case;

type Adjust = fn(&mut CollectOptions);

const REFUSED: &str = "refused: invalid_argument";
const GOOD: &str =
    r#"{"responses_create_params":{"input":"2+2?"},"expected_answer":"4","agent_ref":{"name":"a_good"}}"#;

fn row(kind: &'static str, name: &'static str, second: &'static [u8], says: &'static [&'static str]) -> Case {
    with(kind, name, second, |_| {}, REFUSED, says)
}

/// Collects a valid first row and this second one.
fn with(
    kind: &'static str,
    name: &'static str,
    second: &'static [u8],
    adjust: Adjust,
    outcome: &'static str,
    says: &'static [&'static str],
) -> Case {
    Case::new(kind, name, outcome, says, move |ground| {
        let rows = [GOOD.as_bytes(), b"\n", second, b"\n"].concat();
        Box::pin(async move { ground.collect(rows, adjust).await })
    })
}

pub(crate) fn cases() -> Vec<Case> {
    const BROKEN: &str = "broken JSONL line";
    const TYPE: &str = "wrong type in a row";
    const MISSING: &str = "missing field in a row";
    const AGENT: &str = "unknown agent";
    const OPTION: &str = "bad option";
    vec![
        row(BROKEN, "an object without its end", b"{\"a\": 1,", &["tasks.jsonl, line 2: malformed JSON", "column 8"]),
        row(BROKEN, "two objects on a line", b"{} {}", &["tasks.jsonl, line 2: malformed JSON"]),
        row(BROKEN, "a blank line", b"", &["tasks.jsonl, line 2: the line is blank"]),
        row(BROKEN, "a list", b"[1]", &["tasks.jsonl, line 2"]),
        row(BROKEN, "bytes that are not UTF-8", b"{\"a\": \"\xff\"}", &["tasks.jsonl, line 2: not UTF-8"]),
        row(
            TYPE,
            "responses_create_params is a string",
            br#"{"responses_create_params": "2+2?", "agent_ref": {"name": "a_good"}}"#,
            &["tasks.jsonl, line 2: responses_create_params is not an object"],
        ),
        row(
            TYPE,
            "agent_ref is a string",
            br#"{"responses_create_params": {"input": "x"}, "agent_ref": "a_good"}"#,
            &["tasks.jsonl, line 2: agent_ref is not an object"],
        ),
        row(
            TYPE,
            "agent_ref.name is a number",
            br#"{"responses_create_params": {"input": "x"}, "agent_ref": {"name": 5}}"#,
            &["tasks.jsonl, line 2: agent_ref.name is not a string"],
        ),
        row(
            TYPE,
            "_ng_task_index is negative",
            br#"{"responses_create_params": {"input": "x"}, "_ng_task_index": -1, "agent_ref": {"name": "a_good"}}"#,
            &["tasks.jsonl, line 2: _ng_task_index is -1", "from 0 to 4294967295"],
        ),
        row(
            TYPE,
            "input is a number",
            br#"{"responses_create_params": {"input": 5}, "expected_answer": "4", "agent_ref": {"name": "a_good"}}"#,
            &["line 2", "responses_create_params.input is neither a string nor a list"],
        ),
        row(
            TYPE,
            "expected_answer is a list",
            br#"{"responses_create_params": {"input": "x"}, "expected_answer": [4], "agent_ref": {"name": "a_good"}}"#,
            &["tasks.jsonl, line 2: resources server `math`", "`expected_answer`: invalid type: sequence, expected a string"],
        ),
        row(
            TYPE,
            "an unknown parameter",
            br#"{"responses_create_params": {"input": "x", "temperatur": 1}, "expected_answer": "4", "agent_ref": {"name": "a_good"}}"#,
            &["line 2", "responses_create_params.temperatur: unknown key", "`temperature`"],
        ),
        row(
            TYPE,
            "a parameter of chat completions",
            br#"{"responses_create_params": {"input": "x", "stop": ["."]}, "expected_answer": "4", "agent_ref": {"name": "a_good"}}"#,
            &["line 2", "responses_create_params.stop: unknown key; the Responses API has none"],
        ),
        row(
            TYPE,
            "a temperature in words",
            br#"{"responses_create_params": {"input": "x", "temperature": "hot"}, "expected_answer": "4", "agent_ref": {"name": "a_good"}}"#,
            &["line 2", "responses_create_params.temperature is a string", "write a number"],
        ),
        row(
            TYPE,
            "a temperature below zero",
            br#"{"responses_create_params": {"input": "x", "temperature": -5}, "expected_answer": "4", "agent_ref": {"name": "a_good"}}"#,
            &["line 2", "responses_create_params.temperature is a number: -5; write 0 or more"],
        ),
        row(
            TYPE,
            "a content part of chat completions",
            br#"{"responses_create_params": {"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "expected_answer": "4", "agent_ref": {"name": "a_good"}}"#,
            &["line 2", "responses_create_params.input[0].content[0].type is \"text\"; write `input_text`"],
        ),
        row(
            TYPE,
            "a tool in the form of chat completions",
            br#"{"responses_create_params": {"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "expected_answer": "4", "agent_ref": {"name": "a_good"}}"#,
            &["line 2", "responses_create_params.tools[0] has the form of chat completions"],
        ),
        row(
            TYPE,
            "a misspelled tool_choice",
            br#"{"responses_create_params": {"input": "x", "tool_choice": "requird"}, "expected_answer": "4", "agent_ref": {"name": "a_good"}}"#,
            &["line 2", "responses_create_params.tool_choice is", "did you mean `required`?"],
        ),
        row(
            MISSING,
            "no responses_create_params",
            br#"{"agent_ref": {"name": "a_good"}}"#,
            &["tasks.jsonl, line 2: responses_create_params is missing"],
        ),
        row(
            MISSING,
            "no input",
            br#"{"responses_create_params": {}, "expected_answer": "4", "agent_ref": {"name": "a_good"}}"#,
            &["line 2", "responses_create_params.input is missing"],
        ),
        row(
            MISSING,
            "an empty input",
            br#"{"responses_create_params": {"input": []}, "expected_answer": "4", "agent_ref": {"name": "a_good"}}"#,
            &["line 2", "responses_create_params.input is an empty list"],
        ),
        row(
            MISSING,
            "a tool without a name",
            br#"{"responses_create_params": {"input": "x", "tools": [{"type": "function"}]}, "expected_answer": "4", "agent_ref": {"name": "a_good"}}"#,
            &["line 2", "responses_create_params.tools[0] has no name"],
        ),
        row(
            MISSING,
            "no expected_answer",
            br#"{"responses_create_params": {"input": "x"}, "agent_ref": {"name": "a_good"}}"#,
            &["tasks.jsonl, line 2: resources server `math`", "missing field `expected_answer`"],
        ),
        row(
            AGENT,
            "no agent at all",
            br#"{"responses_create_params": {"input": "x"}}"#,
            &["tasks.jsonl, line 2: no agent for 1 row(s)", "--agent"],
        ),
        row(
            AGENT,
            "a misspelled agent",
            br#"{"responses_create_params": {"input": "x"}, "agent_ref": {"name": "math_simple_agnet"}}"#,
            &["tasks.jsonl, line 2", "there is no agent `math_simple_agnet`; did you mean `math_simple_agent`?"],
        ),
        row(
            AGENT,
            "a misspelled task_source",
            br#"{"responses_create_params": {"input": "x"}, "task_source": "mahts"}"#,
            &["tasks.jsonl, line 2: no agent for task_source \"mahts\"", "did you mean `math`?"],
        ),
        with(
            AGENT,
            "a misspelled agent for every row",
            GOOD.as_bytes(),
            |options| options.materialize.agent_map = BTreeMap::from([("_default".into(), "a_god".into())]),
            REFUSED,
            &["tasks.jsonl, line 1", "there is no agent `a_god`; did you mean `a_good`?"],
        ),
        with(
            OPTION,
            "no repeats",
            GOOD.as_bytes(),
            |options| options.materialize.repeats = Repeats::Each(0),
            REFUSED,
            &["num_repeats: must be at least 1, got 0"],
        ),
        with(
            OPTION,
            "repeats for another agent only",
            GOOD.as_bytes(),
            |options| options.materialize.repeats = Repeats::PerAgent(BTreeMap::from([("a_bad".into(), 2)])),
            REFUSED,
            &["tasks.jsonl, line 1: num_repeats has no entry for a_good", "it has a_bad"],
        ),
        with(
            OPTION,
            "a fan-out without agents",
            GOOD.as_bytes(),
            |options| options.materialize.fan_out = BTreeMap::from([("a_good".into(), Vec::new())]),
            REFUSED,
            &["fan_out.a_good: the list of agents is empty"],
        ),
        with(
            OPTION,
            "a seed where extra_body is not JSON",
            br#"{"responses_create_params": {"input": "x", "metadata": {"extra_body": "seed"}}, "agent_ref": {"name": "a_good"}}"#,
            |options| options.materialize.add_seed = true,
            REFUSED,
            &["tasks.jsonl, line 2: responses_create_params.metadata.extra_body must be a string that holds a JSON object"],
        ),
        with(
            OPTION,
            "a missing input file",
            GOOD.as_bytes(),
            |options| options.input = options.input.with_file_name("taks.jsonl"),
            REFUSED,
            &["taks.jsonl", "cannot read the input"],
        ),
        with(
            OPTION,
            "a directory as input",
            GOOD.as_bytes(),
            |options| options.input.clone_from(&options.input.parent().unwrap().to_owned()),
            REFUSED,
            &["no file fits *.parquet in the directory", "name a JSONL file"],
        ),
    ]
}
