//! A row as a person reads it: who said what, which tools ran, and what the verifier found.

use gym_client::collect::TokenUsage;
use gym_core::base::ErrorLink;
use gym_core::rollout::{EPISODE_KEY, Phase, Phases, TURNS_KEY};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::head::page::repair::repaired;

/// One rollout or failed attempt, without the parts that only programs read.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Rollout {
    pub(crate) label: RowLabel,
    /// The conversation in order.
    pub(crate) items: Vec<Item>,
    /// The short keys of the verifier's response, as JSON text.
    pub(crate) facts: Vec<(String, String)>,
    /// The failure, outermost cause first; empty for a rollout.
    pub(crate) causes: Vec<String>,
    #[serde(flatten)]
    pub(crate) course: Course,
}

/// How the attempt went, as the key `_gym_episode` of the row tells it.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Course {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) phases: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) truncated: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tokens: Option<TokenUsage>,
}

/// The fields that identify a row, and those by which rows are filtered.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct RowLabel {
    pub(crate) task: u64,
    pub(crate) repeat: u64,
    pub(crate) attempt: u64,
    pub(crate) agent: String,
    pub(crate) reward: Option<f64>,
    /// The class of a failed attempt.
    pub(crate) class: Option<String>,
}

/// One entry of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Item {
    pub(crate) kind: ItemKind,
    /// The role of a message, or the name of a tool.
    pub(crate) who: String,
    pub(crate) text: String,
    /// The tokens that the model generated for this item; empty if the row does not have them.
    #[serde(skip_serializing_if = "Tokens::is_empty")]
    pub(crate) tokens: Tokens,
}

/// Generated tokens. A row of an inference server that trains has their ids; one of OpenAI's API, their texts.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Tokens {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) ids: Vec<i64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) texts: Vec<String>,
    pub(crate) logprobs: Vec<Option<f32>>,
    /// Tokens after the last one that is shown.
    pub(crate) omitted: usize,
}

impl Tokens {
    fn is_empty(&self) -> bool {
        self.ids.is_empty() && self.texts.is_empty()
    }

    /// Reads `generation_token_ids` and `generation_log_probs` of an item, which NeMo Gym's model servers add, or else the `logprobs` of
    /// the parts of its content.
    fn of(item: &Value) -> Self {
        let logprob = |value: &Value| value.as_f64().map(|logprob| logprob as f32);
        let (ids, logprobs) = (list(item.get("generation_token_ids")), list(item.get("generation_log_probs")));
        if !ids.is_empty() {
            return Self {
                ids: ids.iter().take(TOKENS_MAX).map(|id| id.as_i64().unwrap_or(-1)).collect(),
                texts: Vec::new(),
                logprobs: logprobs.iter().take(TOKENS_MAX).map(logprob).collect(),
                omitted: ids.len().saturating_sub(TOKENS_MAX),
            };
        }
        let parts = list(item.get("content")).iter();
        let tokens: Vec<&Value> = parts.flat_map(|part| list(part.get("logprobs"))).collect();
        let shown = || tokens.iter().take(TOKENS_MAX);
        let text = |token: &&Value| token.get("token").and_then(Value::as_str).unwrap_or_default().to_owned();
        Self {
            ids: Vec::new(),
            texts: shown().map(text).collect(),
            logprobs: shown().map(|token| token.get("logprob").and_then(logprob)).collect(),
            omitted: tokens.len().saturating_sub(TOKENS_MAX),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ItemKind {
    Message,
    Reasoning,
    ToolCall,
    ToolOutput,
    Other,
}

/// The keys of a row that label it. All are optional and of any type: a row may come from another program.
#[derive(Deserialize)]
struct LabelKeys {
    #[serde(default, rename = "_ng_task_index")]
    task: Value,
    #[serde(default, rename = "_ng_rollout_index")]
    repeat: Value,
    #[serde(default, rename = "_ng_attempt_index")]
    attempt: Value,
    #[serde(default)]
    agent_ref: Value,
    #[serde(default)]
    reward: Value,
    #[serde(default, rename = "_ng_failure_class")]
    class: Value,
}

/// Reads a line, repaired if it is JSON that cannot be read as it is: one odd row must not hide its file.
fn read_line<T: DeserializeOwned>(line: &[u8]) -> Result<T, serde_json::Error> {
    serde_json::from_slice(line).or_else(|_| serde_json::from_str(&repaired(line)))
}

impl RowLabel {
    /// Reads the label of a line.
    ///
    /// # Errors
    /// The error of the JSON parser.
    pub(crate) fn of(line: &[u8]) -> Result<Self, serde_json::Error> {
        let keys: LabelKeys = read_line(line)?;
        Ok(Self {
            task: keys.task.as_u64().unwrap_or_default(),
            repeat: keys.repeat.as_u64().unwrap_or_default(),
            attempt: keys.attempt.as_u64().unwrap_or_default(),
            agent: keys.agent_ref["name"].as_str().unwrap_or_default().to_owned(),
            reward: match keys.reward {
                Value::Bool(reward) => Some(f64::from(u8::from(reward))),
                other => other.as_f64(),
            },
            class: match keys.class {
                Value::Null => None,
                Value::String(class) => Some(class),
                other => Some(other.to_string()),
            },
        })
    }

    /// Returns NeMo Gym's rollout id, such as `3-0` or `3-0-a2`.
    #[cfg(any(feature = "cli", test))]
    pub(crate) fn id(&self) -> String {
        match self.attempt {
            0 => format!("{}-{}", self.task, self.repeat),
            attempt => format!("{}-{}-a{attempt}", self.task, self.repeat),
        }
    }
}

/// Keys of a row that are shown elsewhere, or that only programs read.
const NOT_FACTS: [&str; 8] = [
    "responses_create_params",
    "response",
    "reward",
    "agent_ref",
    "task_source",
    "skills_ref",
    "mask_sample",
    "resources_session_id",
];

/// Maximum characters of a fact. Longer values are in the file.
const FACT_CHARS_MAX: usize = 300;
/// Maximum tokens of an item that are shown one by one.
const TOKENS_MAX: usize = 8_192;

impl Rollout {
    /// Reads the line that has this label.
    ///
    /// # Errors
    /// The error of the JSON parser.
    pub(crate) fn of(label: RowLabel, line: &[u8]) -> Result<Self, serde_json::Error> {
        let row: Map<String, Value> = read_line(line)?;
        let mut items = Vec::new();
        if let Some(params) = row.get("responses_create_params") {
            if let Some(text) = params.get("instructions").and_then(Value::as_str) {
                items.push(message("system", text.to_owned()));
            }
            match params.get("input") {
                Some(Value::String(text)) => items.push(message("user", text.clone())),
                Some(Value::Array(input)) => items.extend(input.iter().map(item)),
                _ => {}
            }
        }
        if let Some(Value::Array(output)) = row.get("response").and_then(|response| response.get("output")) {
            items.extend(output.iter().map(item));
        }
        let causes = causes(&row);
        let facts = row
            .iter()
            .filter(|(key, value)| {
                !NOT_FACTS.contains(&key.as_str())
                    && !key.starts_with("_ng_failure")
                    && !is_index(key)
                    && !value.is_null()
            })
            .map(|(key, value)| (key.clone(), fact(key, value)))
            .chain(generation(&row))
            .filter(|(_, text)| text.len() <= FACT_CHARS_MAX)
            .collect();
        Ok(Self { label, items, facts, causes, course: Course::of(&row) })
    }
}

/// Returns a value as text. Of the calls of an episode, which can be many, the sum of each phase is left.
fn fact(key: &str, value: &Value) -> String {
    let phases = value.get("phases").filter(|_| key == EPISODE_KEY);
    let Some(phases) = phases.and_then(|phases| Phases::deserialize(phases).ok()) else { return value.to_string() };
    let sums = Phase::ALL.into_iter().map(|phase| (phase, phases.total(phase)));
    let sums = sums.filter(|(_, total)| !total.is_zero());
    let sums: Map<String, Value> =
        sums.map(|(phase, total)| (phase.as_str().to_owned(), total.as_secs_f64().into())).collect();
    let mut value = value.clone();
    value["phases"] = sums.into();
    value.to_string()
}

/// Returns facts of the generation: the tools that the model was offered, and what the engine reported about the turns.
fn generation(row: &Map<String, Value>) -> Vec<(String, String)> {
    let tools = list(row.get("responses_create_params").and_then(|params| params.get("tools")));
    let name = |tool: &Value| tool.get("name").or_else(|| tool.get("type")).map(plain).unwrap_or_default();
    let names: Vec<String> = tools.iter().map(name).collect();
    let turns = list(row.get("response").and_then(|response| response.get(TURNS_KEY)));
    let reported = |key: &str| runs(turns.iter().filter_map(|turn| turn.get(key)).map(plain));
    let facts = [
        ("tools", names.join(", ")),
        ("finish_reason", reported("finish_reason")),
        ("weight_version", reported("weight_version")),
    ];
    let facts = facts.into_iter().filter(|(_, text)| !text.is_empty());
    facts.map(|(key, text)| (key.to_owned(), text)).collect()
}

/// Returns a text without quotation marks, and any other value as JSON.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Returns words in order, with the number of each that follows itself: `tool_calls ×2, stop`.
fn runs(words: impl Iterator<Item = String>) -> String {
    let mut runs: Vec<(String, usize)> = Vec::new();
    for word in words {
        match runs.last_mut() {
            Some((last, times)) if *last == word => *times += 1,
            _ => runs.push((word, 1)),
        }
    }
    let shown = runs.into_iter().map(|(word, times)| match times {
        1 => word,
        _ => format!("{word} ×{times}"),
    });
    shown.collect::<Vec<_>>().join(", ")
}

impl Course {
    fn of(row: &Map<String, Value>) -> Self {
        let Some(course) = row.get(EPISODE_KEY) else { return Self::default() };
        let text = |key: &str| course.get(key).and_then(Value::as_str).map(str::to_owned);
        Self {
            seconds: course.get("seconds").and_then(Value::as_f64),
            phases: course
                .get("phases")
                .and_then(|phases| Phases::deserialize(phases).ok())
                .map(|phases| phases.to_string()),
            truncated: text("truncated"),
            tokens: TokenUsage::deserialize(course).ok(),
        }
    }
}

fn is_index(key: &str) -> bool {
    matches!(key, "_ng_task_index" | "_ng_rollout_index" | "_ng_attempt_index" | "_ng_rollout_id" | "_ng_result_type")
}

/// Returns the causes of a failed attempt, outermost first: the chain if the row has one, else the message.
fn causes(row: &Map<String, Value>) -> Vec<String> {
    if !row.contains_key("_ng_failure_class") {
        return Vec::new();
    }
    if let Some(Value::Array(chain)) = row.get("_ng_failure_causes") {
        let links = chain.iter().map(|link| match link {
            Value::String(text) => text.clone(),
            link => ErrorLink::deserialize(link).map(|link| link.to_string()).unwrap_or_default(),
        });
        let links: Vec<String> = links.filter(|text| !text.is_empty()).collect();
        if !links.is_empty() {
            return links;
        }
    }
    let text = |key: &str| row.get(key).and_then(Value::as_str).map(str::to_owned);
    let shown = [text("_ng_failure_message"), text("_ng_failure_judge_error"), text("_ng_failure_response_body")];
    shown.into_iter().flatten().filter(|text| !text.is_empty()).collect()
}

/// Returns the elements of a list; none of another value.
fn list(value: Option<&Value>) -> &[Value] {
    value.and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn message(role: &str, text: String) -> Item {
    Item { kind: ItemKind::Message, who: role.to_owned(), text, tokens: Tokens::default() }
}

fn item(value: &Value) -> Item {
    let part = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default();
    // An input message needs no `type`.
    let kind = if part("type").is_empty() && !part("role").is_empty() { "message" } else { part("type") };
    let (kind, who, text) = match kind {
        "message" => (ItemKind::Message, part("role"), content(value.get("content"))),
        "function_call" => (ItemKind::ToolCall, part("name"), part("arguments").to_owned()),
        "function_call_output" => (ItemKind::ToolOutput, "", content(value.get("output"))),
        "reasoning" => {
            let texts = [content(value.get("summary")), content(value.get("content"))];
            let text = texts.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n");
            (ItemKind::Reasoning, "", text)
        }
        other => (ItemKind::Other, other, value.to_string()),
    };
    Item { kind, who: who.to_owned(), text, tokens: Tokens::of(value) }
}

/// Returns the text of a `content`: a string, or a list of parts. A part without text is named by its type.
fn content(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let part = |part: &Value| {
                let text = part.get("text").or_else(|| part.get("refusal")).and_then(Value::as_str).map(str::to_owned);
                text.or_else(|| part.as_str().map(str::to_owned)).unwrap_or_else(|| {
                    let kind = part.get("type").and_then(Value::as_str).unwrap_or("part");
                    format!("[{kind}]")
                })
            };
            parts.iter().map(part).collect::<Vec<_>>().join("\n")
        }
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;

    pub(crate) fn read(line: &[u8]) -> Result<Rollout, serde_json::Error> {
        Rollout::of(RowLabel::of(line)?, line)
    }

    #[test]
    fn a_rollout_reads_as_a_conversation() {
        let row = json!({
            "_ng_task_index": 3, "_ng_rollout_index": 1, "agent_ref": {"name": "bank"}, "reward": true, "balance": 7,
            "responses_create_params": {"instructions": "Be brief.", "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hello"}, {"type": "input_image"}]},
            ]},
            "response": {"output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "thinking"}]},
                {"type": "function_call", "name": "transfer", "arguments": "{\"cents\": 5}", "call_id": "c"},
                {"type": "function_call_output", "call_id": "c", "output": "ok"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
                {"type": "web_search_call", "id": "w"},
            ]},
        });
        let rollout = read(row.to_string().as_bytes()).unwrap();
        assert_eq!((rollout.label.id().as_str(), rollout.label.reward), ("3-1", Some(1.0)));
        let items: Vec<_> = rollout.items.iter().map(|item| (item.kind, &*item.who, &*item.text)).collect();
        assert_eq!(
            items[..6],
            [
                (ItemKind::Message, "system", "Be brief."),
                (ItemKind::Message, "user", "hello\n[input_image]"),
                (ItemKind::Reasoning, "", "thinking"),
                (ItemKind::ToolCall, "transfer", "{\"cents\": 5}"),
                (ItemKind::ToolOutput, "", "ok"),
                (ItemKind::Message, "assistant", "done"),
            ]
        );
        assert_eq!((items[6].0, items[6].1), (ItemKind::Other, "web_search_call"));
        assert_eq!(rollout.facts, [("balance".to_owned(), "7".to_owned())]);
        assert!(rollout.causes.is_empty());
    }

    #[test]
    fn a_rollout_has_its_tokens_and_its_course() {
        let row = json!({
            "_gym_episode": {"turns": 2, "input_tokens": 9, "output_tokens": 4, "truncated": null,
                "phases": [{"phase": "model", "start_us": 0, "took_us": 7}], "seconds": 1.5},
            "response": {"output": [
                {"type": "message", "role": "assistant", "content": "hi",
                    "generation_token_ids": [5, 6], "generation_log_probs": [-0.5, null]},
                {"type": "message", "role": "assistant", "content": [
                    {"type": "output_text", "text": "do", "logprobs": [{"token": "d", "logprob": -0.25}]},
                    {"type": "output_text", "text": "ne", "logprobs": [{"token": "ne", "logprob": -2}]},
                ]},
                {"type": "message", "role": "assistant", "content": "-", "generation_token_ids": vec![1; TOKENS_MAX + 3]},
            ]},
        });
        let rollout = read(row.to_string().as_bytes()).unwrap();
        let tokens: Vec<&Tokens> = rollout.items.iter().map(|item| &item.tokens).collect();
        assert_eq!((&tokens[0].ids[..], &tokens[0].logprobs[..]), (&[5, 6][..], &[Some(-0.5), None][..]));
        assert_eq!(
            (&tokens[1].texts[..], &tokens[1].logprobs[..]),
            (&["d".to_owned(), "ne".to_owned()][..], &[Some(-0.25), Some(-2.0)][..])
        );
        assert_eq!((tokens[2].ids.len(), tokens[2].omitted), (TOKENS_MAX, 3));
        let course = &rollout.course;
        assert_eq!(
            (course.seconds, course.phases.as_deref(), &course.truncated),
            (Some(1.5), Some("model 0+7"), &None)
        );
        assert_eq!(course.tokens.map(|tokens| (tokens.input, tokens.output)), Some((9, 4)));
        let page = serde_json::to_value(&rollout).unwrap();
        assert_eq!((&page["phases"], &page["tokens"]["input_tokens"]), (&"model 0+7".into(), &9.into()));
        let [(key, course)] = &rollout.facts[..] else { panic!("{:?}", rollout.facts) };
        assert!(key == EPISODE_KEY && course.contains(r#""phases":{"model":7e-6}"#), "{course}");
    }

    #[test]
    fn a_rollout_shows_its_tools_and_how_its_turns_ended() {
        let facts = |tools: Value, turns: Value| {
            let row = json!({"responses_create_params": {"input": "x", "tools": tools}, "response": {"output": [], TURNS_KEY: turns}});
            let facts = read(row.to_string().as_bytes()).unwrap().facts;
            facts.iter().map(|(key, text)| format!("{key}: {text}")).collect::<Vec<_>>()
        };
        let turn = |reason: &str, version: Value| json!({"finish_reason": reason, "weight_version": version});
        assert_eq!(
            facts(
                json!([{"type": "function", "name": "add"}, {"type": "web_search"}, 3]),
                json!([
                    turn("tool_calls", json!("v1")),
                    turn("tool_calls", json!("v1")),
                    {},
                    turn("stop", json!({"rank": 2}))
                ]),
            ),
            ["tools: add, web_search, ", "finish_reason: tool_calls ×2, stop", r#"weight_version: v1 ×2, {"rank":2}"#]
        );
        for odd in [Value::Null, json!([]), json!(3), json!({}), json!([null, 3, "x"])] {
            assert!(facts(Value::Null, odd.clone()).is_empty(), "{odd}");
        }
    }

    #[test]
    fn a_failure_has_its_causes_from_the_outside_in() {
        let chain = json!({"_ng_failure_class": "tool_error", "_ng_failure_message": "x", "_ng_failure_causes": [
            {"subject": "POST bank/run"}, {"subject": "POST bank/transfer", "message": "panicked"}, "disk full",
        ]});
        let rollout = read(chain.to_string().as_bytes()).unwrap();
        assert_eq!(rollout.causes, ["POST bank/run", "POST bank/transfer: panicked", "disk full"]);
        let message = json!({"_ng_failure_class": "agent_run_error", "_ng_failure_message": "it broke", "_ng_failure_response_body": "why"});
        assert_eq!(read(message.to_string().as_bytes()).unwrap().causes, ["it broke", "why"]);
    }

    #[test]
    fn a_row_of_another_program_is_shown_as_far_as_it_goes() {
        let rollout = read(br#"{"anything": [1], "reward": null, "responses_create_params": 3}"#).unwrap();
        assert_eq!(rollout.label, RowLabel::default());
        assert!(rollout.items.is_empty());
        assert!(read(b"[1]").is_err());
    }
}
