//! Converts a Responses request to a chat completion request, as NeMo Gym does.

use gym_core::{Code, Error, RawObject, Result};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::model::vllm::think;

/// Keys of a Responses request that have no equivalent in a chat completion.
const UNSUPPORTED: [&str; 8] = [
    "background",
    "context_management",
    "conversation",
    "include",
    "max_tool_calls",
    "previous_response_id",
    "prompt",
    "truncation",
];

/// Keys that are converted; all others pass unchanged.
const CONVERTED: [&str; 7] =
    ["input", "instructions", "max_output_tokens", "reasoning", "text", "tool_choice", "tools"];

pub(super) const TOKEN_FIELDS: [&str; 3] = ["prompt_token_ids", "generation_token_ids", "generation_log_probs"];

#[derive(Deserialize)]
struct InputItem<'a> {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    role: Option<String>,
    #[serde(default, borrow)]
    content: Option<&'a RawValue>,
    #[serde(default)]
    summary: Option<Vec<Summary>>,
    #[serde(default)]
    call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    arguments: Option<Value>,
    #[serde(default, borrow)]
    output: Option<&'a RawValue>,
    #[serde(default)]
    namespace: Option<IgnoredAny>,
    #[serde(default)]
    phase: Option<IgnoredAny>,
    #[serde(default)]
    tool_calls: Option<Vec<Value>>,
    #[serde(default)]
    tool_call_id: Option<String>,
    #[serde(default, borrow)]
    prompt_token_ids: Option<&'a RawValue>,
    #[serde(default, borrow)]
    generation_token_ids: Option<&'a RawValue>,
    #[serde(default, borrow)]
    generation_log_probs: Option<&'a RawValue>,
    #[serde(default, borrow)]
    routed_experts: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Summary {
    text: String,
}

fn unsupported(text: String) -> Error {
    Error::finished(Code::Unimplemented, text)
}

fn wrong(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::finished(Code::InvalidArgument, text)
}

/// Returns the chat completion request. `tokens` keeps the token fields of earlier responses on their messages, with their text
/// unchanged.
pub(super) fn to_chat(params: &RawObject, tokens: bool) -> Result<RawObject> {
    let present = |key: &str| params.get(key).filter(|value| value != "null");
    let refused: Vec<_> = UNSUPPORTED.into_iter().filter(|key| present(key).is_some()).collect();
    if !refused.is_empty() {
        return Err(unsupported(format!(
            "the fields {refused:?} of a Responses request have no Chat Completions representation; route it to a model server that passes Responses through"
        )));
    }
    let mut messages = ChatMessages { tokens, ..ChatMessages::default() };
    let input = present("input").unwrap_or_else(|| "[]".into());
    if input.first() == Some(&b'"') {
        let text = std::str::from_utf8(&input).unwrap_or_default();
        messages.push("user", &format!(r#"[{{"type":"text","text":{text}}}]"#), "");
    } else {
        let items: Vec<InputItem<'_>> = serde_json::from_slice(&input)
            .map_err(|error| wrong(format!("an item of `input` cannot be converted: {error}")))?;
        for item in &items {
            messages.take(item)?;
        }
    }
    messages.flush();
    if let Some(instructions) =
        params.get_as::<Option<String>>("instructions")?.flatten().filter(|text| !text.is_empty())
    {
        messages.lead_with(instructions);
    }

    let mut chat = ObjectText::default();
    chat.add(
        "messages",
        &format!("[{}]", messages.done.iter().map(|message| message.text.as_str()).collect::<Vec<_>>().join(",")),
    );
    let tools = params.get_as::<Option<Vec<Value>>>("tools")?.flatten().filter(|tools| !tools.is_empty());
    for key in params.keys() {
        let dropped = CONVERTED.contains(&key) || (key == "parallel_tool_calls" && tools.is_none());
        if let Some(value) = present(key).filter(|_| !dropped) {
            chat.add(key, std::str::from_utf8(&value).unwrap_or_default());
        }
    }
    if let Some(limit) = present("max_output_tokens") {
        chat.add("max_tokens", std::str::from_utf8(&limit).unwrap_or_default());
    }
    reasoning(params, &mut chat)?;
    text_format(params, &mut chat)?;
    let choice = params.get_as::<Value>("tool_choice")?.filter(|choice| !choice.is_null());
    match tools {
        Some(tools) => {
            let tools: Vec<Value> = tools.into_iter().map(tool_to_chat).collect::<Result<_>>()?;
            chat.add("tools", &Value::from(tools).to_string());
            if let Some(choice) = choice {
                chat.add("tool_choice", &tool_choice_to_chat(choice)?.to_string());
            }
        }
        None => {
            if let Some(choice) = choice.filter(|choice| choice != "auto" && choice != "none") {
                return Err(wrong(format!("tool_choice={choice} requires at least one tool")));
            }
        }
    }
    Ok(RawObject::parse(chat.finish())?)
}

fn reasoning(params: &RawObject, chat: &mut ObjectText) -> Result<()> {
    let Some(Value::Object(reasoning)) = params.get_as::<Value>("reasoning")? else { return Ok(()) };
    let refused: Vec<_> =
        reasoning.iter().filter(|(key, value)| *key != "effort" && !value.is_null()).map(|(key, _)| key).collect();
    if !refused.is_empty() {
        return Err(unsupported(format!("the reasoning fields {refused:?} have no Chat Completions representation")));
    }
    if let Some(effort) = reasoning.get("effort").filter(|effort| !effort.is_null()) {
        chat.add("reasoning_effort", &effort.to_string());
    }
    Ok(())
}

fn text_format(params: &RawObject, chat: &mut ObjectText) -> Result<()> {
    let Some(text) = params.get_as::<Value>("text")?.filter(Value::is_object) else { return Ok(()) };
    let format = &text["format"];
    match format["type"].as_str() {
        _ if format.is_null() => {}
        Some("json_schema") => {
            let mut schema = json!({"name": format["name"], "schema": format["schema"]});
            for key in ["strict", "description"] {
                if !format[key].is_null() {
                    schema[key] = format[key].clone();
                }
            }
            chat.add("response_format", &json!({"type": "json_schema", "json_schema": schema}).to_string());
        }
        Some("json_object") => chat.add("response_format", r#"{"type":"json_object"}"#),
        Some("text") => {}
        _ => return Err(unsupported(format!("text format {} is not supported", format["type"]))),
    }
    if !text["verbosity"].is_null() {
        chat.add("verbosity", &text["verbosity"].to_string());
    }
    Ok(())
}

fn tool_to_chat(tool: Value) -> Result<Value> {
    let Value::Object(mut tool) = tool else { return Err(wrong("a tool is no object")) };
    let kind = tool.remove("type").unwrap_or_default();
    let deferred = tool.remove("defer_loading").is_some_and(|deferred| deferred == true);
    match kind.as_str() {
        Some(kind @ ("function" | "custom")) if deferred => {
            Err(unsupported(format!("{kind} tools with defer_loading enabled have no Chat Completions representation")))
        }
        Some("function") => {
            tool.retain(|_, value| !value.is_null());
            Ok(json!({"type": "function", "function": tool}))
        }
        Some("custom") => {
            if let Some(Value::Object(format)) = tool.get_mut("format")
                && format.get("type").is_some_and(|kind| kind == "grammar")
            {
                format.remove("type");
                let grammar = std::mem::take(format);
                tool.insert("format".into(), json!({"type": "grammar", "grammar": grammar}));
            }
            Ok(json!({"type": "custom", "custom": tool}))
        }
        _ => Err(unsupported(format!("tools of type {kind} have no implemented Chat Completions conversion"))),
    }
}

fn tool_choice_to_chat(choice: Value) -> Result<Value> {
    let reference = |choice: Value| {
        let Value::Object(mut choice) = choice else { return Err(wrong("a tool reference is no object")) };
        let kind = choice.remove("type").unwrap_or_default();
        match kind.as_str() {
            Some(kind @ ("function" | "custom")) => Ok(json!({"type": kind, kind: choice})),
            _ => Err(unsupported(format!("tool references of type {kind} have no Chat representation"))),
        }
    };
    if choice.is_string() {
        return Ok(choice);
    }
    if choice["type"] == "allowed_tools" {
        let tools = choice["tools"].as_array().cloned().unwrap_or_default();
        let tools: Vec<Value> = tools.into_iter().map(reference).collect::<Result<_>>()?;
        return Ok(json!({"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}));
    }
    reference(choice)
}

/// Writes a JSON object key by key.
#[derive(Default)]
pub(super) struct ObjectText(String);

impl ObjectText {
    pub(super) fn add(&mut self, key: &str, json: &str) {
        self.0.push(if self.0.is_empty() { '{' } else { ',' });
        self.0.push_str(&Value::from(key).to_string());
        self.0.push(':');
        self.0.push_str(json);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn finish(mut self) -> String {
        if self.0.is_empty() {
            self.0.push('{');
        }
        self.0.push('}');
        self.0
    }
}

#[derive(Default)]
struct ChatMessages {
    tokens: bool,
    done: Vec<ChatMessage>,
    content: String,
    refusal: String,
    tool_calls: Vec<Value>,
    /// `true` if an item of the assistant has not been written yet.
    assistant: bool,
    token_fields: Option<String>,
}

struct ChatMessage {
    role: String,
    content: String,
    text: String,
}

impl ChatMessages {
    /// Adds a message. `content` and `more` are JSON text; `more` starts with a comma.
    fn push(&mut self, role: &str, content: &str, more: &str) {
        let text = format!(r#"{{"content":{content},"role":"{role}"{more}}}"#);
        self.done.push(ChatMessage { role: role.to_owned(), content: content.to_owned(), text });
    }

    fn flush(&mut self) {
        let token_fields = self.token_fields.take();
        let empty = self.content.is_empty() && self.refusal.is_empty() && self.tool_calls.is_empty();
        if empty && !self.assistant {
            return;
        }
        let content = match std::mem::take(&mut self.content) {
            text if text.is_empty() => Value::Null,
            text => Value::from(text),
        };
        let mut more = String::new();
        if !self.tool_calls.is_empty() {
            more = format!(r#","tool_calls":{}"#, Value::from(std::mem::take(&mut self.tool_calls)));
        }
        if !self.refusal.is_empty() {
            more = format!(r#"{more},"refusal":{}"#, Value::from(std::mem::take(&mut self.refusal)));
        }
        more.push_str(&token_fields.unwrap_or_default());
        self.push("assistant", &content.to_string(), &more);
        self.assistant = false;
    }

    fn take(&mut self, item: &InputItem<'_>) -> Result<()> {
        let kind = match (&item.kind, &item.role) {
            (Some(kind), _) if !kind.is_empty() => kind.as_str(),
            (_, Some(_)) => "message",
            _ => return Err(wrong("an item of `input` has neither a type nor a role")),
        };
        let missing = |key: &str| wrong(format!("a {kind} item of `input` has no `{key}`"));
        match kind {
            "message" => self.take_message(item)?,
            "reasoning" => {
                self.assistant = true;
                let thoughts = item.summary.iter().flatten().map(|summary| summary.text.as_str());
                self.content.push_str(&think::wrap(thoughts));
            }
            "function_call" => {
                if item.namespace.is_some() {
                    return Err(unsupported(
                        "a function call's namespace has no Chat Completions representation".into(),
                    ));
                }
                self.assistant = true;
                let id = item.call_id.as_ref().ok_or_else(|| missing("call_id"))?;
                let name = item.name.as_ref().ok_or_else(|| missing("name"))?;
                let arguments = item.arguments.as_ref().ok_or_else(|| missing("arguments"))?;
                self.tool_call(id, arguments, &Value::from(name.as_str()));
            }
            "function_call_output" => {
                self.flush();
                let id = Value::from(item.call_id.as_deref().ok_or_else(|| missing("call_id"))?);
                let output = item.output.ok_or_else(|| missing("output"))?.get();
                let content = if output.starts_with('[') { tool_parts(output, &id)? } else { output.to_owned() };
                self.push("tool", &content, &format!(r#","tool_call_id":{id}"#));
            }
            other => {
                return Err(unsupported(format!(
                    "items of type {other:?} have no Chat Completions representation; route this rollout to a model server that passes Responses through"
                )));
            }
        }
        if self.tokens {
            self.take_tokens(item)?;
        }
        Ok(())
    }

    fn tool_call(&mut self, id: &str, arguments: &Value, name: &Value) {
        let function = json!({"arguments": arguments, "name": name});
        self.tool_calls.push(json!({"id": id, "function": function, "type": "function"}));
    }

    fn take_tokens(&mut self, item: &InputItem<'_>) -> Result<()> {
        let values = [item.prompt_token_ids, item.generation_token_ids, item.generation_log_probs];
        let known = values.iter().flatten().count();
        if known == 0 {
            return Ok(());
        }
        if known < values.len() {
            return Err(wrong(format!("an item of `input` has some of {TOKEN_FIELDS:?}, and not all")));
        }
        let mut fields = String::new();
        let keys = TOKEN_FIELDS.into_iter().chain(["routed_experts"]);
        for (key, value) in keys.zip(values.into_iter().chain([item.routed_experts])) {
            if let Some(value) = value {
                fields.push_str(&format!(r#","{key}":{}"#, value.get()));
            }
        }
        self.token_fields = Some(fields);
        Ok(())
    }

    fn take_message(&mut self, item: &InputItem<'_>) -> Result<()> {
        if item.phase.is_some() {
            return Err(unsupported("a message's phase has no Chat Completions representation".into()));
        }
        let content = item.content.map(RawValue::get);
        match item.role.as_deref().unwrap_or_default() {
            "assistant" => {
                self.assistant = true;
                let content: Value = serde_json::from_str(content.unwrap_or("null")).unwrap_or_default();
                match content {
                    Value::Null => {}
                    Value::String(text) => self.content.push_str(&text),
                    Value::Array(parts) => {
                        for part in &parts {
                            let (text, refusal) = (part["text"].as_str(), part["refusal"].as_str());
                            if text.is_none() && refusal.is_none() {
                                return Err(unsupported(format!("assistant content part {part} is not supported")));
                            }
                            self.content.push_str(text.unwrap_or_default());
                            self.refusal.push_str(refusal.unwrap_or_default());
                        }
                    }
                    other => return Err(unsupported(format!("assistant content {other} is neither a text nor parts"))),
                }
                for call in item.tool_calls.iter().flatten() {
                    let id = call["id"].as_str().unwrap_or_default().to_owned();
                    self.tool_call(&id, &call["function"]["arguments"], &call["function"]["name"]);
                }
            }
            role @ ("user" | "system" | "developer" | "tool") => {
                self.flush();
                let content = match content {
                    Some(parts) if parts.starts_with('[') => user_parts(parts)?,
                    content => content.unwrap_or("null").to_owned(),
                };
                let id = item.tool_call_id.as_deref().filter(|_| role == "tool");
                let more = id.map(|id| format!(r#","tool_call_id":{}"#, Value::from(id))).unwrap_or_default();
                self.push(role, &content, &more);
            }
            role => return Err(unsupported(format!("messages of the role `{role}` are not supported"))),
        }
        Ok(())
    }

    /// Puts one system message at the beginning: the instructions, and the leading system and developer messages.
    fn lead_with(&mut self, instructions: String) {
        let mut parts = vec![instructions];
        let leading =
            self.done.iter().take_while(|message| matches!(message.role.as_str(), "system" | "developer")).count();
        for message in self.done.drain(..leading) {
            parts.push(match serde_json::from_str(&message.content).unwrap_or_default() {
                Value::String(text) => text,
                Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
                _ => String::new(),
            });
        }
        let rest = std::mem::take(&mut self.done);
        self.push("system", &Value::from(parts.join("\n\n")).to_string(), "");
        self.done.extend(rest);
    }
}

fn tool_parts(output: &str, id: &Value) -> Result<String> {
    let parts: Vec<Value> = serde_json::from_str(output).unwrap_or_default();
    if let Some(part) = parts.iter().find(|part| part["type"] != "input_text") {
        return Err(unsupported(format!(
            "the output of call {id} has a part of type {}, which a Chat Completions tool message cannot represent",
            part["type"]
        )));
    }
    let parts: Vec<Value> = parts.iter().map(|part| json!({"type": "text", "text": part["text"]})).collect();
    Ok(Value::from(parts).to_string())
}

fn user_parts(parts: &str) -> Result<String> {
    let url = |part: &Value, key: &str| match &part[key] {
        Value::Object(nested) => nested.get("url").and_then(Value::as_str).unwrap_or_default().to_owned(),
        other => other.as_str().unwrap_or_default().to_owned(),
    };
    let parts: Vec<Value> = serde_json::from_str(parts).unwrap_or_default();
    let parts: Vec<Value> = parts
        .iter()
        .map(|part| match part["type"].as_str() {
            Some("input_text") => Ok(json!({"type": "text", "text": part["text"]})),
            Some("input_image") => {
                if part["image_url"].is_null() {
                    return Err(unsupported("input images by file_id have no Chat Completions representation".into()));
                }
                let detail = if part["detail"].is_null() { "auto".into() } else { part["detail"].clone() };
                match url(part, "image_url") {
                    _ if detail == "original" => {
                        Err(unsupported("image detail 'original' has no Chat Completions representation".into()))
                    }
                    url if url.is_empty() => Err(wrong("input_image requires a non-empty image_url")),
                    url => Ok(json!({"type": "image_url", "image_url": {"url": url, "detail": detail}})),
                }
            }
            Some("input_video") => {
                let key = if part.get("video_url").is_some() { "video_url" } else { "video" };
                match url(part, key) {
                    url if url.is_empty() => Err(wrong(format!("input_video.{key} requires a non-empty URL"))),
                    url => Ok(json!({"type": "video_url", "video_url": {"url": url}})),
                }
            }
            _ => Err(unsupported(format!("content parts of type {} are not supported", part["type"]))),
        })
        .collect::<Result<_>>()?;
    Ok(Value::from(parts).to_string())
}
