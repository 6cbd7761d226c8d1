//! One response of the model, and the conversation of all responses, as text.

use std::fmt;
use std::marker::PhantomData;

use bytes::{BufMut, Bytes, BytesMut};
use gym_core::rollout::TURNS_KEY;
use gym_core::server::{ResponseEnd, ResponseOutline};
use gym_core::{Code, Error, ModelResponse, RawObject, Result, Rope};
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
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
}

/// The tokens of one response. A count of another type is no reason to reject the response.
#[derive(Debug, Deserialize)]
pub(super) struct TokenUsage {
    #[serde(default)]
    input_tokens: Lenient<u64>,
    #[serde(default)]
    output_tokens: Lenient<u64>,
}

impl TokenUsage {
    /// Returns the tokens that the model read and wrote, as far as they are known.
    pub(super) fn tokens(&self) -> (Option<u64>, Option<u64>) {
        (self.input_tokens.0, self.output_tokens.0)
    }
}

#[derive(Debug, Deserialize)]
struct TurnItem {
    #[serde(rename = "type")]
    kind: ItemKind,
    #[serde(default)]
    role: Lenient<String>,
    #[serde(default)]
    call_id: Lenient<String>,
    #[serde(default)]
    name: Lenient<String>,
    #[serde(default)]
    arguments: Lenient<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ItemKind {
    Message,
    FunctionCall,
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
        // As the verifier will read it: what it cannot read is the model's fault.
        response.outline::<ResponseOutline>().map_err(|error| invalid(error.to_string()))?;
        let mut calls = Vec::new();
        for item in &mut outline.output {
            if item.kind == ItemKind::FunctionCall {
                let (call_id, name, arguments) = (item.call_id.0.take(), item.name.0.take(), item.arguments.0.take());
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
            item.kind == ItemKind::Message && item.role.0.as_deref().is_some_and(|role| role == "assistant")
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

/// A value of one type, or nothing if the value has another type, because other kinds of items use the same keys for other values.
#[derive(Debug)]
struct Lenient<T>(Option<T>);

/// A type of which [`Lenient`] keeps the values.
trait Scalar: Sized {
    fn of_text(_: &str) -> Option<Self> {
        None
    }

    fn of_number(_: u64) -> Option<Self> {
        None
    }
}

impl Scalar for String {
    fn of_text(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }
}

impl Scalar for u64 {
    fn of_number(number: u64) -> Option<Self> {
        Some(number)
    }
}

impl<T> Default for Lenient<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<'de, T: Scalar> Deserialize<'de> for Lenient<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LenientVisitor(PhantomData))
    }
}

struct LenientVisitor<T>(PhantomData<T>);

impl<'de, T: Scalar> Visitor<'de> for LenientVisitor<T> {
    type Value = Lenient<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }

    fn visit_str<E>(self, text: &str) -> Result<Lenient<T>, E> {
        Ok(Lenient(T::of_text(text)))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Lenient<T>, E> {
        Ok(Lenient(T::of_number(number)))
    }

    fn visit_unit<E>(self) -> Result<Lenient<T>, E> {
        Ok(Lenient(None))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Lenient<T>, E> {
        Ok(Lenient(None))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Lenient<T>, E> {
        Ok(Lenient(None))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Lenient<T>, E> {
        Ok(Lenient(None))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Lenient<T>, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Lenient(None))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Lenient<T>, A::Error> {
        while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Lenient(None))
    }
}
