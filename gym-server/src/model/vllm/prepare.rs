//! Changes a chat completion request before it is sent to the engine.

use gym_core::{Code, Error, RawObject, Result};
use serde_json::{Map, Value};

use crate::model::extra;
use crate::model::vllm::config::{ReasoningField, VllmModelConfig};
use crate::model::vllm::{audio, think};

/// Returns the request for the engine.
pub(super) fn prepare(config: &VllmModelConfig, request: &RawObject) -> Result<RawObject> {
    let metadata: Map<String, Value> =
        request.get_as::<Option<Map<String, Value>>>("metadata")?.flatten().unwrap_or_default();
    let audio = audio::of(&metadata)?;
    let mut edit = request.edit().set("model", Value::from(config.model.as_str()).to_string());
    if let Some(messages) = messages(config, request)? {
        edit = edit.set("messages", messages);
    }
    if !config.keep_strict_tools
        && let Some(tools) = tools_without_strict(request)?
    {
        edit = edit.set("tools", tools);
    }

    let mut template = config.chat_template_kwargs.clone().unwrap_or_default();
    let own = request.get_as::<Option<Map<String, Value>>>("chat_template_kwargs")?.flatten();
    template.extend(own.filter(|_| config.forward_request_chat_template_kwargs).unwrap_or_default());
    template.extend(extra::object_in(request, "chat_template_kwargs")?);
    edit = if template.is_empty() {
        edit.remove("chat_template_kwargs")
    } else {
        edit.set("chat_template_kwargs", Value::from(template).to_string())
    };

    if config.continue_final_assistant_message && last_role(request)?.as_deref() == Some("assistant") {
        edit = edit.set("continue_final_message", "true").set("add_generation_prompt", "false");
    }
    if config.return_token_id_information {
        edit = edit.set("logprobs", "true").set("top_logprobs", "0").set("return_tokens_as_token_ids", "true");
        if config.request_prompt_and_generation_token_ids {
            edit = edit.set("return_token_ids", "true");
        }
    } else if request.get("top_logprobs").is_some_and(|value| value == "null") {
        edit = edit.remove("top_logprobs");
    }
    let prepared = edit.to_object()?;

    let mut edit = prepared.edit();
    for (key, value) in extra::added(config.extra_body.as_ref(), &prepared)? {
        edit = edit.set(key, value.to_string());
    }
    for (key, value) in config.sampling_overrides.iter().flatten() {
        edit = edit.set(key.clone(), value.to_string());
    }
    let prepared = edit.to_object()?;
    let prepared = match audio {
        Some(audio) => audio::put(&prepared, &audio)?,
        None => prepared,
    };
    let several = prepared.get_as::<Value>("n")?.is_some_and(|n| !n.is_null() && n != 1);
    if config.return_token_id_information && several {
        return Err(Error::finished(Code::InvalidArgument, "token ids can be captured only with n=1"));
    }
    Ok(prepared)
}

/// Returns `true` if the request ends in an empty response of the assistant, after which some models must not be called again.
pub(super) fn ends_in_empty_assistant(request: &RawObject) -> Result<bool> {
    let Some(last) = request.get_as::<Vec<RawObject>>("messages")?.and_then(|mut messages| messages.pop()) else {
        return Ok(false);
    };
    let empty = |key: &str| -> Result<bool> {
        Ok(match last.get_as::<Value>(key)?.unwrap_or_default() {
            Value::Null => true,
            Value::String(text) => text.is_empty(),
            Value::Array(items) => items.is_empty(),
            _ => false,
        })
    };
    Ok(role(&last)?.as_deref() == Some("assistant") && empty("content")? && empty("tool_calls")?)
}

fn role(message: &RawObject) -> Result<Option<String>> {
    Ok(message.get_as::<Option<String>>("role")?.flatten())
}

fn last_role(request: &RawObject) -> Result<Option<String>> {
    match request.get_as::<Vec<RawObject>>("messages")?.and_then(|mut messages| messages.pop()) {
        Some(last) => role(&last),
        None => Ok(None),
    }
}

/// Returns the messages with the developer's role replaced and reasoning removed from the assistant's text, or `None` if none
/// changes.
fn messages(config: &VllmModelConfig, request: &RawObject) -> Result<Option<String>> {
    let unfold = config.uses_reasoning_parser && !config.preserve_reasoning_in_assistant_content;
    let Some(messages) = request.get_as::<Vec<RawObject>>("messages")? else { return Ok(None) };
    let mut texts = Vec::with_capacity(messages.len());
    let mut changed = false;
    for message in &messages {
        let mut edit = message.edit();
        match role(message)?.as_deref() {
            Some("developer") if config.replace_developer_role_with_system => {
                edit = edit.set("role", r#""system""#);
                changed = true;
            }
            Some("assistant") if unfold => {
                let (thought, content) = match message.get_as::<Value>("content")?.unwrap_or_default() {
                    Value::String(text) => {
                        let (thoughts, left) = think::split(&text);
                        (thoughts.into_iter().next(), Value::from(left))
                    }
                    Value::Array(mut parts) => {
                        let mut found = None;
                        for part in &mut parts {
                            let (thoughts, left) = think::split(part["text"].as_str().unwrap_or_default());
                            if found.is_some() && !thoughts.is_empty() {
                                let text = "reasoning in several parts of one assistant message";
                                return Err(Error::finished(Code::InvalidArgument, text));
                            }
                            found = found.or_else(|| thoughts.into_iter().next());
                            part["text"] = left.into();
                        }
                        (found, Value::from(parts))
                    }
                    _ => (None, Value::Null),
                };
                if let Some(thought) = thought {
                    changed = true;
                    edit = edit.set("content", content.to_string());
                    let thought = Value::from(thought).to_string();
                    let field = config.reasoning_field.unwrap_or_default();
                    if config.uses_interleaved_reasoning && field != ReasoningField::Reasoning {
                        edit = edit.set("reasoning_content", thought.clone());
                    }
                    if config.uses_interleaved_reasoning && field != ReasoningField::ReasoningContent {
                        edit = edit.set("reasoning", thought);
                    }
                }
            }
            _ => {}
        }
        texts.push(edit.to_rope().to_bytes());
    }
    if !changed {
        return Ok(None);
    }
    let texts: Vec<_> = texts.iter().map(|text| String::from_utf8_lossy(text)).collect();
    Ok(Some(format!("[{}]", texts.join(","))))
}

/// Returns the tools without OpenAI's `strict`, which some chat templates would print into the prompt, or `None` if no tool has it.
fn tools_without_strict(request: &RawObject) -> Result<Option<String>> {
    let Some(text) = request.get("tools") else { return Ok(None) };
    if memchr::memmem::find(&text, b"\"strict\"").is_none() {
        return Ok(None);
    }
    let mut tools: Value = request.get_as("tools")?.unwrap_or_default();
    for tool in tools.as_array_mut().into_iter().flatten().filter(|tool| tool["type"] == "function") {
        if let Some(function) = tool["function"].as_object_mut() {
            function.shift_remove("strict");
        }
    }
    Ok(Some(tools.to_string()))
}
