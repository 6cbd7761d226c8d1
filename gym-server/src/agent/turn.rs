//! One response of the model, and the conversation of all responses, as text.

use std::fmt;
use std::marker::PhantomData;

use bytes::{BufMut, Bytes, BytesMut};
use gym_core::rollout::TURNS_KEY;
use gym_core::server::{IncompleteDetails, ResponseEnd};
use gym_core::{Code, Error, ModelResponse, RawObject, Result, Rope};
use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::agent::reports::{TurnReports, inside};

/// The sentence that NeMo Gym's agent adds to the metadata of a response without message and tool call.
const TERMINATION_MESSAGE: &str = "Ending trajectory: model returned no assistant message or tool calls (reasoning-only or empty output) without reported truncation. This is the stop-token case (finish_reason='stop'), not length truncation (finish_reason='length', handled separately via incomplete_details). This indicates either a badly trained model requiring training-level fixes or a bug in the inference engine.";

/// An episode yields to other tasks each time that it has had this many turns.
const TURNS_PER_YIELD: u32 = 16;

/// Yields if an episode has had many turns since it last did. Calls within the process may never wait, and a task that never yields
/// can be neither cancelled nor stopped. Short episodes, of which one task may run a thousand, do not pay for it.
pub(super) async fn yield_after(turns: u32) {
    if turns > 0 && turns.is_multiple_of(TURNS_PER_YIELD) {
        tokio::task::yield_now().await;
    }
}

/// One response of the model.
#[derive(Debug)]
pub(super) struct Turn {
    response: RawObject,
    outline: TurnOutline,
    calls: Vec<FunctionCall>,
    truncation: Option<String>,
}

/// The step after a response.
#[derive(Debug)]
pub(super) enum NextStep<'a> {
    /// Run these tool calls in order.
    Tools(&'a [FunctionCall]),
    /// End the loop: the model has finished, or has reached its limit of tokens.
    Stop,
    /// End the loop: the response has neither a message nor a tool call. Contains NeMo Gym's name of the reason.
    Nothing(&'static str),
}

/// A tool call of a response.
#[derive(Debug)]
pub(super) struct FunctionCall {
    pub(super) call_id: String,
    pub(super) name: String,
    pub(super) arguments: String,
}

#[derive(Debug, Deserialize)]
struct TurnOutline {
    output: Vec<TurnItem>,
    #[serde(default)]
    usage: Option<TokenUsage>,
    /// Read only because a verifier reads it.
    #[serde(default, rename = "incomplete_details")]
    _incomplete: Option<IncompleteDetails>,
}

/// The tokens of one response. A count of another type is no reason to reject the response.
#[derive(Debug, Deserialize)]
pub(super) struct TokenUsage {
    #[serde(default)]
    input_tokens: Count,
    #[serde(default)]
    output_tokens: Count,
}

impl TokenUsage {
    /// Returns the tokens that the model read and wrote, as far as they are known.
    pub(super) fn tokens(&self) -> (Option<u64>, Option<u64>) {
        (self.input_tokens.0, self.output_tokens.0)
    }
}

/// An item of the output. It can be read exactly if a verifier can read it as [`OutputItem`](gym_core::OutputItem), which costs more: what a verifier
/// cannot read is the model's fault.
#[derive(Debug)]
struct TurnItem {
    kind: ItemKind,
    role: Option<String>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
}

impl<'de> Deserialize<'de> for TurnItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TurnItemVisitor)
    }
}

struct TurnItemVisitor;

impl<'de> Visitor<'de> for TurnItemVisitor {
    type Value = TurnItem;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an item of the output")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<TurnItem, A::Error> {
        let (mut kind, mut content_fits) = (None, true);
        let [mut role, mut call_id, mut name, mut arguments] = [const { Word::Absent }; 4];
        while let Some(key) = fields.next_key::<ItemKey>()? {
            match key {
                ItemKey::Type => kind = Some(fields.next_value::<ItemKind>()?),
                ItemKey::Role => role = fields.next_value()?,
                ItemKey::CallId => call_id = fields.next_value()?,
                ItemKey::Name => name = fields.next_value()?,
                ItemKey::Arguments => arguments = fields.next_value()?,
                ItemKey::Content => content_fits = matches!(fields.next_value()?, Kind::Text | Kind::Parts),
                ItemKey::Other => {
                    fields.next_value::<Kind>()?;
                }
            }
        }
        let wrong =
            |what: &str| Err(de::Error::custom(format!("an item's {what} has a type that no verifier can read")));
        let kind = kind.ok_or_else(|| de::Error::missing_field("type"))?;
        let read: &[(&str, &Word)] = match kind {
            ItemKind::Message if !content_fits => return wrong("content"),
            ItemKind::Message => &[("role", &role)],
            ItemKind::FunctionCall => &[("call_id", &call_id), ("name", &name), ("arguments", &arguments)],
            ItemKind::FunctionCallOutput => &[("call_id", &call_id)],
            ItemKind::Other => &[],
        };
        if let Some((what, _)) = read.iter().find(|(_, field)| matches!(field, Word::Wrong)) {
            return wrong(what);
        }
        let [role, call_id, name, arguments] = [role, call_id, name, arguments].map(Word::text);
        Ok(TurnItem { kind, role, call_id, name, arguments })
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum ItemKey {
    Type,
    Role,
    CallId,
    Name,
    Arguments,
    Content,
    #[serde(other)]
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ItemKind {
    Message,
    FunctionCall,
    FunctionCallOutput,
    #[serde(other)]
    Other,
}

impl Turn {
    pub(super) fn parse(text: &Rope) -> Result<Self> {
        let invalid = |why: String| {
            let text = text.to_bytes();
            let shown = String::from_utf8_lossy(&text[..text.len().min(500)]);
            Error::finished(Code::DataLoss, format!("received an invalid response from model server: {why}: {shown}"))
        };
        let response = text.to_object().map_err(|error| invalid(error.to_string()))?;
        let mut outline: TurnOutline = response.outline().map_err(|error| invalid(error.to_string()))?;
        let truncation = ResponseEnd::of_response(&response).truncation()?;
        let mut calls = Vec::new();
        for item in &mut outline.output {
            if item.kind == ItemKind::FunctionCall {
                let (call_id, name, arguments) = (item.call_id.take(), item.name.take(), item.arguments.take());
                let (Some(call_id), Some(name), Some(arguments)) = (call_id, name, arguments) else {
                    return Err(invalid("a function call needs `call_id`, `name` and `arguments`".into()));
                };
                calls.push(FunctionCall { call_id, name, arguments });
            }
        }
        Ok(Self { response, outline, calls, truncation })
    }

    /// Returns the response of the model.
    pub(super) fn response(&self) -> &RawObject {
        &self.response
    }

    /// Returns the tool calls of the response.
    pub(super) fn calls(&self) -> &[FunctionCall] {
        &self.calls
    }

    /// Returns the tokens that the model read and wrote, as far as the response tells them.
    pub(super) fn tokens(&self) -> (Option<u64>, Option<u64>) {
        self.outline.usage.as_ref().map_or((None, None), TokenUsage::tokens)
    }

    /// Returns the reason why the model's response is incomplete, if it is.
    pub(super) fn truncation(&self) -> Option<&str> {
        self.truncation.as_deref()
    }

    pub(super) fn next(&self) -> NextStep<'_> {
        let answered = |item: &TurnItem| {
            item.kind == ItemKind::Message && item.role.as_deref().is_some_and(|role| role == "assistant")
        };
        if self.truncation.is_some() {
            NextStep::Stop
        } else if !self.calls.is_empty() {
            NextStep::Tools(&self.calls)
        } else if self.outline.output.iter().any(answered) {
            NextStep::Stop
        } else if self.outline.output.is_empty() {
            NextStep::Nothing("empty_output")
        } else {
            NextStep::Nothing("incomplete_reasoning")
        }
    }
}

/// The conversation so far: the input of the task, and the items that follow it.
#[derive(Debug)]
pub(super) struct Conversation {
    /// The items of the task, without the brackets around them.
    input: Bytes,
    /// `true` if the task's own `input` is already a list.
    listed: bool,
    /// The items of all turns, without brackets: the outputs of the model and of the tools, and messages of the user.
    said: Vec<Bytes>,
    turns: u32,
    reports: TurnReports,
    /// The usage of all turns so far; parsed only when a second usage is added.
    usage: Option<Bytes>,
}

impl Conversation {
    pub(super) fn new(params: &RawObject) -> Result<Self> {
        let input = params.get("input").unwrap_or_default();
        let (input, listed) = match input.first() {
            Some(b'[') => (inside(&input), true),
            Some(b'"') => {
                let text = std::str::from_utf8(&input).unwrap_or_default();
                (Bytes::from(format!(r#"{{"role":"user","content":{text}}}"#)), false)
            }
            _ => return Err(Error::invalid("`input` is neither a string nor a list of items")),
        };
        Ok(Self { input, listed, said: Vec::new(), turns: 0, reports: TurnReports::default(), usage: None })
    }

    /// Returns the request of the next turn.
    pub(super) fn request(&self, params: &RawObject) -> Rope {
        if self.listed && self.said.is_empty() {
            return params.clone().into();
        }
        params.edit().set("input", list([&self.input].into_iter().chain(&self.said))).to_rope()
    }

    /// Adds a response.
    pub(super) fn answered(&mut self, turn: &Turn) -> Result<()> {
        self.turns += 1;
        self.reports.add(&turn.response);
        self.say(inside(&turn.response.get("output").unwrap_or_default()));
        if turn.outline.usage.is_some() {
            let usage = turn.response.get("usage").unwrap_or_default();
            self.usage = Some(match self.usage.take() {
                None if usage.starts_with(b"{") => usage,
                None => return Err(wrong_usage(&Error::invalid("not a JSON object"))),
                Some(total) => add_usage(&usage_of(total)?, &usage_of(usage)?)?,
            });
        }
        Ok(())
    }

    /// Adds the output of a tool call.
    pub(super) fn tool_answered(&mut self, call_id: &str, output: &str) {
        let (call_id, output) = (Value::from(call_id), Value::from(output));
        let item = format!(r#"{{"type":"function_call_output","call_id":{call_id},"output":{output}}}"#);
        self.say(item.into());
    }

    /// Adds a message of the user.
    pub(super) fn user_said(&mut self, text: &str) {
        self.say(user_message(text).into());
    }

    fn say(&mut self, items: Bytes) {
        if !items.is_empty() {
            self.said.push(items);
        }
    }

    /// Returns the last response, with the items of all turns.
    pub(super) fn finish(self, last: &Turn, nothing: Option<&'static str>) -> Result<ModelResponse> {
        let whole = self.turns == 1 && self.said.len() <= 1;
        if whole && nothing.is_none() {
            return Ok(ModelResponse(last.response.clone()));
        }
        let mut edit = last.response.edit();
        if !whole {
            edit = edit.set("output", list(&self.said));
            if let Some(reports) = self.reports.list() {
                edit = edit.set(TURNS_KEY, reports);
            }
            if let Some(usage) = self.usage {
                edit = edit.set("usage", usage);
            }
        }
        if let Some(reason) = nothing {
            let metadata = match last.response.get("metadata") {
                Some(text) if text.first() == Some(&b'{') => RawObject::parse(text)?,
                _ => RawObject::empty(),
            };
            let metadata = metadata
                .edit()
                .set_value("ng_termination_reason", &reason)?
                .set_value("ng_termination_message", &TERMINATION_MESSAGE)?;
            edit = edit.set("status", r#""incomplete""#).set("metadata", metadata.to_rope().to_bytes());
        }
        Ok(ModelResponse(edit.to_object()?))
    }
}

/// Returns the `input` of a request as a list with one more item, or `None` if that equals the unchanged input.
pub(super) fn items_of(params: &RawObject, more: Option<&str>) -> Result<Option<Bytes>> {
    let conversation = Conversation::new(params)?;
    if conversation.listed && more.is_none() {
        return Ok(None);
    }
    let input = match conversation.listed {
        true => conversation.input,
        false => {
            let text: String = params.get_as("input")?.unwrap_or_default();
            user_message(&text).into()
        }
    };
    Ok(Some(list(&[input, more.unwrap_or_default().to_owned().into()])))
}

/// Returns the input item of a user's message.
pub(super) fn user_message(text: &str) -> String {
    format!(r#"{{"content":{},"role":"user","type":"message"}}"#, Value::from(text))
}

/// Returns a list of the items in the pieces.
fn list<'a>(pieces: impl IntoIterator<Item = &'a Bytes> + Clone) -> Bytes {
    let length: usize = pieces.clone().into_iter().map(|piece| piece.len() + 1).sum();
    let mut text = BytesMut::with_capacity(length + 2);
    text.put_u8(b'[');
    for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
        if text.len() > 1 {
            text.put_u8(b',');
        }
        text.put_slice(piece);
    }
    text.put_u8(b']');
    text.freeze()
}

/// Returns the sum of two usages. A count that one of them lacks is not added; other keys are taken from the first.
fn add_usage(total: &RawObject, more: &RawObject) -> Result<Bytes> {
    let count = |usage: &RawObject, key: &str| {
        usage.get_as::<Option<u64>>(key).map(Option::flatten).map_err(|error| wrong_usage(&error))
    };
    let mut edit = total.edit();
    for key in ["input_tokens", "output_tokens", "total_tokens"] {
        if let (Some(a), Some(b)) = (count(total, key)?, count(more, key)?) {
            edit = edit.set_value(key, &a.saturating_add(b))?;
        }
    }
    for (group, key) in [("input_tokens_details", "cached_tokens"), ("output_tokens_details", "reasoning_tokens")] {
        let details = |usage: &RawObject| {
            usage.get_as::<Option<RawObject>>(group).map(Option::flatten).map_err(|error| wrong_usage(&error))
        };
        if let (Some(a), Some(b)) = (details(total)?, details(more)?) {
            let sum = count(&a, key)?.zip(count(&b, key)?).map(|(a, b)| a.saturating_add(b));
            edit = edit.set(group, a.edit().set_value(key, &sum)?.to_rope().to_bytes());
        }
    }
    Ok(edit.to_rope().to_bytes())
}

fn usage_of(text: Bytes) -> Result<RawObject> {
    RawObject::parse(text).map_err(|error| wrong_usage(&error.into()))
}

fn wrong_usage(error: &Error) -> Error {
    Error::finished(Code::DataLoss, format!("the model's `usage`: {error}"))
}

/// A number of tokens, or nothing if the value is no such number.
#[derive(Debug, Default)]
struct Count(Option<u64>);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let kind = Kind::deserialize(deserializer)?;
        Ok(Self(if let Kind::Number(number) = kind { Some(number) } else { None }))
    }
}

/// The kind of a value. All of the value is read: what a parser of all values rejects is an error, such as a lone surrogate or too many nested lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Null,
    Text,
    Number(u64),
    /// A mapping that can be a part of a content: its `type` is a text, if it has one, and its `text` a text or null.
    Part,
    /// A list of such mappings.
    Parts,
    Other,
}

/// A text, or another value.
#[derive(Debug, Default)]
enum Word {
    #[default]
    Absent,
    Text(String),
    Wrong,
}

impl Word {
    fn text(self) -> Option<String> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }
}

/// The part of a value that is kept.
trait Kept {
    fn of_text(text: &str) -> Self;
    fn of(kind: Kind) -> Self;
}

impl Kept for Kind {
    fn of_text(_: &str) -> Self {
        Self::Text
    }

    fn of(kind: Kind) -> Self {
        kind
    }
}

impl Kept for Word {
    fn of_text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }

    fn of(_: Kind) -> Self {
        Self::Wrong
    }
}

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(KeptVisitor(PhantomData))
    }
}

impl<'de> Deserialize<'de> for Word {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(KeptVisitor(PhantomData))
    }
}

struct KeptVisitor<T>(PhantomData<T>);

impl<'de, T: Kept> Visitor<'de> for KeptVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }

    fn visit_str<E>(self, text: &str) -> Result<T, E> {
        Ok(T::of_text(text))
    }

    fn visit_u64<E>(self, number: u64) -> Result<T, E> {
        Ok(T::of(Kind::Number(number)))
    }

    fn visit_unit<E>(self) -> Result<T, E> {
        Ok(T::of(Kind::Null))
    }

    fn visit_bool<E>(self, _: bool) -> Result<T, E> {
        Ok(T::of(Kind::Other))
    }

    fn visit_i64<E>(self, _: i64) -> Result<T, E> {
        Ok(T::of(Kind::Other))
    }

    fn visit_f64<E>(self, _: f64) -> Result<T, E> {
        Ok(T::of(Kind::Other))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<T, A::Error> {
        let mut kind = Kind::Parts;
        while let Some(item) = items.next_element::<Kind>()? {
            if item != Kind::Part {
                kind = Kind::Other;
            }
        }
        Ok(T::of(kind))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<T, A::Error> {
        let mut kind = Kind::Part;
        while let Some(key) = fields.next_key::<PartKey>()? {
            let value = fields.next_value::<Kind>()?;
            if !matches!(
                (key, value),
                (PartKey::Type | PartKey::Text, Kind::Text) | (PartKey::Text, Kind::Null) | (PartKey::Other, _)
            ) {
                kind = Kind::Other;
            }
        }
        Ok(T::of(kind))
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum PartKey {
    Type,
    Text,
    #[serde(other)]
    Other,
}

#[cfg(test)]
mod tests {
    use gym_core::server::ResponseOutline;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// Values of an item's keys as JSON: some that fit, and some that no verifier can read.
    fn value() -> impl Strategy<Value = String> {
        let nested = "[".repeat(200) + &"]".repeat(200);
        let values = [
            r#""a""#,
            r#""\u0061""#,
            r#""\ud83d""#,
            "1",
            "-1",
            "1.5",
            "1e400",
            "null",
            "true",
            "[]",
            "{}",
            "[{}]",
            "[1]",
            r#"[{"type":"output_text","text":"a","annotations":[{}]}]"#,
            r#"[{"text":null},{"type":"refusal"}]"#,
            r#"[{"type":1}]"#,
            r#"[{"type":"output_text","text":1}]"#,
            r#"[{"text":"\ud83d"}]"#,
            r#"[{"annotations":"\ud83d"}]"#,
            &nested,
        ];
        prop::sample::select(values.map(str::to_owned).to_vec())
    }

    fn item() -> impl Strategy<Value = String> {
        let kinds = ["message", "function_call", "function_call_output", "reasoning", "web_search_call"];
        let keys = ["role", "content", "call_id", "name", "arguments", "output", "summary", "id"];
        let fields = prop::collection::btree_map(prop::sample::select(keys.to_vec()), value(), 0..4);
        (prop::option::weighted(0.95, prop::sample::select(kinds.to_vec())), fields, any::<bool>()).prop_map(
            |(kind, fields, first)| {
                let kind = kind.map(|kind| format!(r#""type":"{kind}""#));
                let fields = fields.into_iter().map(|(key, value)| format!(r#""{key}":{value}"#));
                let fields: Vec<String> = match first {
                    true => kind.into_iter().chain(fields).collect(),
                    false => fields.chain(kind).collect(),
                };
                format!("{{{}}}", fields.join(","))
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn a_turn_can_be_read_exactly_if_a_verifier_can_read_its_response(
            items in prop::collection::vec(item(), 1..3), details in prop::option::of(value())
        ) {
            let details = details.map(|details| format!(r#","incomplete_details":{details}"#)).unwrap_or_default();
            let text = format!(r#"{{"output":[{}]{details}}}"#, items.join(","));
            let (ours, verifiers) = (serde_json::from_str::<TurnOutline>(&text), serde_json::from_str::<ResponseOutline>(&text));
            prop_assert_eq!(ours.is_ok(), verifiers.is_ok(), "{}: {:?} {:?}", text, ours.err(), verifiers.err());
        }
    }

    #[test]
    fn an_odd_usage_is_no_reason_to_reject_a_response() {
        for (usage, expected) in [
            (json!({"input_tokens": 3, "output_tokens": 4}), (Some(3), Some(4))),
            (json!({"input_tokens": "3", "output_tokens": -4}), (None, None)),
            (json!({"input_tokens": [1], "output_tokens": {"a": 1}}), (None, None)),
            (Value::Null, (None, None)),
        ] {
            let text = json!({"output": [], "status": "completed", "usage": usage}).to_string();
            assert_eq!(Turn::parse(&Rope::from(text)).unwrap().tokens(), expected);
        }
    }
}
