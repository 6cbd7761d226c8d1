//! Converts an engine's chat completion to the form of NeMo Gym's servers, and to a Responses response. Token ids and
//! log-probabilities are never parsed as numbers: their text is moved.

use bytes::Bytes;
use gym_core::rollout::{PROMPT_KEY, TURNS_KEY};
use gym_core::server::ResponseEnd;
use gym_core::{Code, Error, RawObject, Result, World};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::model::limits::TokenLimits;
use crate::model::vllm::report;
use crate::model::vllm::request::{ObjectText, TOKEN_FIELDS};
use crate::model::vllm::think;

fn broken(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::finished(Code::DataLoss, text)
}

/// A chat completion, parsed as far as it is changed.
#[derive(Debug)]
pub(super) struct Completion {
    whole: RawObject,
    choices: Vec<RawObject>,
    message: RawObject,
}

/// The location of the token fields.
pub(super) enum TokenFields {
    /// On the message, complete.
    Inline,
    /// In the rest of the response. `prompt` is `None` if the engine must be asked for the prompt's ids.
    Apart { prompt: Option<Bytes>, generation: String, log_probs: String },
}

impl Completion {
    pub(super) fn parse(whole: RawObject) -> Result<Self> {
        let choices: Vec<RawObject> = whole
            .get_as("choices")
            .map_err(|error| broken(format!("the engine's `choices`: {error}")))?
            .filter(|choices: &Vec<_>| !choices.is_empty())
            .ok_or_else(|| broken("the engine's answer has no `choices`"))?;
        let message = choices[0]
            .get_object("message")
            .map_err(|error| broken(format!("the engine's message: {error}")))?
            .ok_or_else(|| broken("the engine's first choice has no `message`"))?;
        Ok(Self { whole, choices, message })
    }

    fn message_text(&self, key: &str) -> Result<Option<String>> {
        let text = self.message.get_as::<Option<String>>(key);
        Ok(text.map_err(|error| broken(error.to_string()))?.flatten().filter(|text| !text.is_empty()))
    }

    /// Moves reasoning into the content: in tags, or untagged if the request continued a message.
    pub(super) fn fold_reasoning(&mut self, uses_parser: bool, continued: bool) -> Result<()> {
        let thought = match self.message_text("reasoning_content")? {
            Some(thought) => Some(thought),
            None => self.message_text("reasoning")?,
        };
        let Some(thought) = thought else { return Ok(()) };
        if !uses_parser {
            let text = "the engine answered with reasoning, and `uses_reasoning_parser` is false: have the engine use no reasoning parser, or set it to true";
            return Err(Error::finished(Code::Internal, text));
        }
        let content = self.message_text("content")?.unwrap_or_default();
        let folded = if continued { thought + &content } else { think::wrap([thought.as_str()]) + &content };
        let folded = Value::from(folded).to_string();
        let edit = self.message.edit().remove("reasoning_content").remove("reasoning").set("content", folded);
        self.message = edit.to_object()?;
        Ok(())
    }

    /// Finds and checks the token fields.
    pub(super) fn tokens(&self) -> Result<TokenFields> {
        let known = TOKEN_FIELDS.iter().filter(|key| self.message.contains(key)).count();
        let prompt = self.whole.get("prompt_token_ids").filter(|ids| ids != "null");
        let generation = self.choices[0].get("token_ids").filter(|ids| ids != "null");
        if prompt.is_some() != generation.is_some() {
            let missing = if prompt.is_some() { "choice.token_ids" } else { "prompt_token_ids" };
            return Err(broken(format!("the engine's answer has partial token metadata; missing: {missing}")));
        }
        let same = |a: &[u8], b: &[u8]| digits(a) == digits(b);
        if known > 0 {
            let Some(missing) = TOKEN_FIELDS.iter().find(|key| !self.message.contains(key)) else {
                let field = |key: &str| self.message.get(key).unwrap_or_default();
                for (found, key) in [(&prompt, TOKEN_FIELDS[0]), (&generation, TOKEN_FIELDS[1])] {
                    if found.as_ref().is_some_and(|ids| !same(ids, &field(key))) {
                        return Err(broken("token ids on the message disagree with those of the engine's answer"));
                    }
                }
                counts_agree(&field(TOKEN_FIELDS[1]), &field(TOKEN_FIELDS[2]))?;
                return Ok(TokenFields::Inline);
            };
            return Err(broken(format!("the engine's message has partial token metadata; missing: {missing}")));
        }
        let (ids, log_probs) = log_probs(&self.choices[0])?;
        if generation.is_some_and(|generation| !same(&generation, ids.as_bytes())) {
            return Err(broken("the engine's generation token ids disagree with those of its log-probabilities"));
        }
        Ok(TokenFields::Apart { prompt, generation: ids, log_probs })
    }

    /// Checks that the ids are as many as the tokens that the engine counted in the prompt.
    pub(super) fn check_prompt(&self, ids: &[u8]) -> Result<()> {
        let usage = self.whole.get_as::<Value>("usage").ok().flatten().unwrap_or_default();
        let Some(counted) = usage["prompt_tokens"].as_u64() else { return Ok(()) };
        let ids = count(ids) as u64;
        if ids == counted {
            return Ok(());
        }
        let text = format!(
            "the engine counts {counted} tokens in the prompt, and there are {ids} prompt token ids: they are those of another prompt; set \
             `request_prompt_and_generation_token_ids: true`, so that the engine returns its own"
        );
        Err(broken(text))
    }

    /// Returns why the response is cut off, although the engine does not say so.
    pub(super) fn reached(&self, limits: TokenLimits) -> Option<String> {
        limits.reached_by_chat(&self.whole, &self.choices[0])
    }

    /// Sets the token fields on the message, and removes the engine's own forms of them.
    pub(super) fn put_tokens(&mut self, fields: Option<(&[u8], &str, &str)>) -> Result<()> {
        let mut choice = self.choices[0].edit().remove("token_ids");
        if let Some((prompt, generation, log_probs)) = fields {
            let edit = self.message.edit().set(TOKEN_FIELDS[0], Bytes::copy_from_slice(prompt));
            let edit = edit.set(TOKEN_FIELDS[1], generation.to_owned()).set(TOKEN_FIELDS[2], log_probs.to_owned());
            self.message = edit.to_object()?;
            choice = choice.remove("logprobs");
        }
        self.choices[0] = choice.to_object()?;
        self.whole = self.whole.edit().remove("prompt_token_ids").to_object()?;
        Ok(())
    }

    /// Removes the engine's token ids, which the client did not ask for.
    pub(super) fn remove_ids(&mut self) -> Result<()> {
        for choice in &mut self.choices {
            *choice = choice.edit().remove("token_ids").to_object()?;
        }
        self.whole = self.whole.edit().remove("prompt_token_ids").to_object()?;
        Ok(())
    }

    /// Returns the completion with its changes.
    pub(super) fn finish(self) -> Result<RawObject> {
        let mut choices = self.choices;
        choices[0] = choices[0].edit().set("message", self.message.into_text()).to_object()?;
        let texts: Vec<_> = choices.iter().map(|choice| String::from_utf8_lossy(choice.text())).collect();
        let choices = format!("[{}]", texts.join(","));
        Ok(self.whole.edit().set("choices", choices).to_object()?)
    }
}

fn digits(text: &[u8]) -> Vec<u8> {
    text.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect()
}

/// Returns the number of items in a list of numbers.
fn count(list: &[u8]) -> usize {
    match digits(list).as_slice() {
        b"[]" => 0,
        list => 1 + list.iter().filter(|byte| **byte == b',').count(),
    }
}

fn counts_agree(ids: &[u8], log_probs: &[u8]) -> Result<()> {
    let list = |text: &[u8]| text.first() == Some(&b'[');
    if !list(ids) || !list(log_probs) {
        return Err(broken("the engine's token metadata are no lists"));
    }
    if count(ids) != count(log_probs) {
        let (ids, log_probs) = (count(ids), count(log_probs));
        return Err(broken(format!("the engine gave {ids} generation token ids and {log_probs} log-probabilities")));
    }
    Ok(())
}

/// Returns the ids, which the engine wrote as `token_id:123`, and their log-probabilities.
fn log_probs(choice: &RawObject) -> Result<(String, String)> {
    #[derive(Deserialize)]
    struct Block<'a> {
        #[serde(borrow)]
        content: Vec<Entry<'a>>,
    }
    #[derive(Deserialize)]
    struct Entry<'a> {
        token: String,
        #[serde(borrow)]
        logprob: &'a RawValue,
    }
    let none = || broken("log-probabilities were asked for (return_token_id_information) and the engine gave none");
    let text = choice.get("logprobs").ok_or_else(none)?;
    let block: Option<Block<'_>> = serde_json::from_slice(&text)
        .map_err(|error| broken(format!("the engine's `choice.logprobs` cannot be read: {error}")))?;
    let block = block.ok_or_else(none)?;
    let (mut ids, mut values) = (String::from("["), String::from("["));
    for (index, entry) in block.content.iter().enumerate() {
        let id = entry.token.strip_prefix("token_id:");
        let id = id.filter(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit())).ok_or_else(|| {
            broken(format!("choice.logprobs.content[{index}].token must use the `token_id:<int>` format"))
        })?;
        let value = entry.logprob.get();
        if !value.starts_with(|c: char| c == '-' || c.is_ascii_digit()) {
            return Err(broken(format!("choice.logprobs.content[{index}].logprob must be numeric")));
        }
        if index > 0 {
            ids.push(',');
            values.push(',');
        }
        // Without leading zeros, as Python parses it.
        let bare = id.trim_start_matches('0');
        ids.push_str(if bare.is_empty() { "0" } else { bare });
        values.push_str(value);
    }
    ids.push(']');
    values.push(']');
    Ok((ids, values))
}

/// Returns an empty completion with this finish reason, for a request that is not answered by the engine.
pub(in crate::model) fn empty(model: &str, finish_reason: &str, world: &World) -> Result<RawObject> {
    RawObject::from_value(&json!({
        "id": "chtcmpl-123", "object": "chat.completion", "created": world.now().as_secs(), "model": model,
        "choices": [{
            "index": 0, "finish_reason": finish_reason,
            "message": {"role": "assistant", "content": null, "tool_calls": null},
        }],
    }))
}

/// Request keys that the response repeats.
const REPEATED: [&str; 16] = [
    "temperature",
    "top_p",
    "background",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt",
    "reasoning",
    "service_tier",
    "text",
    "top_logprobs",
    "truncation",
    "metadata",
    "instructions",
    "user",
    "parallel_tool_calls",
];

/// The finish reasons of OpenAI's reference, which the status of a response or its items tell.
const FINISH_REASONS: [&str; 5] = ["stop", "length", "tool_calls", "function_call", "content_filter"];

/// The settings that a response depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResponseForm<'a> {
    pub(super) model: &'a str,
    pub(super) uses_parser: bool,
    pub(super) tokens: bool,
}

/// Maximum characters of the engine's message in `incomplete_details`.
const MESSAGE_CHARS_MAX: usize = 500;

/// The chat completion of an engine, or one without content for a request that no engine answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) chat: RawObject,
    /// The engine's message if the request did not fit into the model's context.
    pub(super) overflow: Option<String>,
    /// Why the response is cut off, although the engine does not say so.
    pub(super) cut: Option<String>,
    /// The settings that shaped the prompt, as a JSON object.
    pub(super) prompt: Option<String>,
}

/// Converts a chat completion to the Responses response to `params`.
pub(super) fn to_response(
    params: &RawObject,
    answer: Answer,
    form: ResponseForm<'_>,
    world: &World,
) -> Result<RawObject> {
    let Answer { chat, overflow, cut, prompt } = answer;
    let completion = Completion::parse(chat)?;
    let output = output(&completion, form.uses_parser, form.tokens, world)?;
    let choice = &completion.choices[0];
    let incomplete = ResponseEnd::of_choice(choice).truncation()?;
    let incomplete = incomplete.or_else(|| cut.is_some().then(|| "max_output_tokens".to_owned()));
    let text = |bytes: Bytes| String::from_utf8_lossy(&bytes).into_owned();
    let mut answer = ObjectText::default();
    answer.add("id", &format!(r#""resp_{}""#, world.unique_id()));
    answer.add("created_at", &completion.whole.get("created").map_or_else(|| "0".into(), text));
    answer.add("model", &Value::from(form.model).to_string());
    answer.add("object", r#""response""#);
    answer.add("output", &output);
    answer.add("status", if incomplete.is_some() { r#""incomplete""# } else { r#""completed""# });
    let details = incomplete.map(|reason| match &overflow {
        None => match &cut {
            Some(why) => json!({"reason": reason, "message": why}),
            None => json!({"reason": reason}),
        },
        // OpenAI's type allows no other reason, but further keys.
        Some(message) => {
            let message: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
            json!({"reason": reason, "code": "context_length_exceeded", "message": message})
        }
    });
    answer.add("incomplete_details", &details.unwrap_or_default().to_string());
    let given = |key: &str| params.get(key).filter(|value| value != "null").map(text);
    answer.add("tool_choice", &given("tool_choice").unwrap_or_else(|| r#""auto""#.into()));
    answer.add("tools", &given("tools").unwrap_or_else(|| "[]".into()));
    for key in REPEATED {
        match given(key) {
            Some(value) => answer.add(key, &value),
            None if key == "parallel_tool_calls" => answer.add(key, "true"),
            None => {}
        }
    }
    let usage = completion.whole.get_as::<Value>("usage")?.filter(Value::is_object);
    answer.add("usage", &usage.map(|usage| usage_of(&usage)).unwrap_or_default().to_string());
    // The engine's own word, where it says more than the status.
    let native = choice.get_as::<Value>("native_finish_reason")?.filter(|native| !native.is_null());
    let finish_reason =
        choice.get_as::<Value>("finish_reason")?.filter(|reason| !FINISH_REASONS.iter().any(|known| reason == known));
    if let Some(native) = native.or(finish_reason) {
        let native = native.as_str().map_or_else(|| native.to_string(), str::to_owned);
        answer.add("native_finish_reason", &Value::from(native).to_string());
    }
    if let Some(turn) = report::turn(&completion.whole, Some(choice)) {
        answer.add(TURNS_KEY, &turn);
    }
    if let Some(prompt) = prompt {
        answer.add(PROMPT_KEY, &prompt);
    }
    Ok(RawObject::parse(answer.finish())?)
}

/// Returns the items of the response. The last item gets the token fields.
fn output(completion: &Completion, uses_reasoning_parser: bool, tokens: bool, world: &World) -> Result<String> {
    let message = &completion.message;
    let mut content = completion.message_text("content")?.unwrap_or_default();
    let refusal = completion.message_text("refusal")?.unwrap_or_default();
    let mut items: Vec<String> = Vec::new();
    if uses_reasoning_parser {
        let (thoughts, left) = think::split(&content);
        content = left;
        if !thoughts.is_empty() {
            let summary: Vec<Value> =
                thoughts.into_iter().map(|text| json!({"text": text, "type": "summary_text"})).collect();
            let id = format!("rs_{}", world.unique_id());
            items.push(json!({"id": id, "summary": summary, "type": "reasoning"}).to_string());
        }
    }
    let calls: Vec<Value> = message.get_as::<Option<Vec<Value>>>("tool_calls")?.flatten().unwrap_or_default();
    let nothing = items.is_empty() && calls.is_empty() && refusal.is_empty();
    if !content.is_empty() || !refusal.is_empty() || nothing {
        let mut parts = Vec::new();
        if !content.is_empty() || nothing {
            parts.push(json!({"annotations": [], "text": content, "type": "output_text"}));
        }
        if !refusal.is_empty() {
            parts.push(json!({"refusal": refusal, "type": "refusal"}));
        }
        let id = format!("msg_{}", world.unique_id());
        items.push(
            json!({"id": id, "content": parts, "role": "assistant", "status": "completed", "type": "message"})
                .to_string(),
        );
    }
    for call in &calls {
        let part = |value: &Value, name: &str| match value {
            Value::String(text) => Ok(text.clone()),
            Value::Null => Err(broken(format!("the engine's tool call has no {name}: {call}"))),
            // TGI, llama.cpp and Ollama write the arguments as an object.
            arguments @ Value::Object(_) if name == "arguments" => Ok(arguments.to_string()),
            other => Err(broken(format!("the {name} of the engine's tool call are no string, but {other}: {call}"))),
        };
        let function = &call["function"];
        let (id, name) = (part(&call["id"], "id")?, part(&function["name"], "name")?);
        let arguments = part(&function["arguments"], "arguments")?;
        items.push(
            json!({
                "arguments": arguments, "call_id": id, "name": name, "type": "function_call", "id": id,
                "status": "completed",
            })
            .to_string(),
        );
    }
    if let Some(last) = items.last_mut().filter(|_| tokens && message.contains(TOKEN_FIELDS[0])) {
        last.pop();
        for key in TOKEN_FIELDS.into_iter().chain(["routed_experts"]) {
            if let Some(value) = message.get(key).filter(|value| value != "null") {
                last.push_str(&format!(r#","{key}":{}"#, String::from_utf8_lossy(&value)));
            }
        }
        last.push('}');
    }
    Ok(format!("[{}]", items.join(",")))
}

fn usage_of(usage: &Value) -> Value {
    let detail = |group: &str, key: &str, others: &[&str]| {
        let nested = usage[group][key].as_u64();
        nested.or_else(|| others.iter().find_map(|other| usage[*other].as_u64()))
    };
    let cached = detail("prompt_tokens_details", "cached_tokens", &["cached_input_tokens", "cache_read_input_tokens"]);
    let reasoning = detail("completion_tokens_details", "reasoning_tokens", &["reasoning_output_tokens"]);
    json!({
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    })
}
