//! Audio input. The Responses dialect does not support it, so NeMo Gym's rows carry it in the metadata.

use gym_core::{Code, Error, RawObject, Result};
use serde_json::{Map, Value, json};

/// The key of a data URI.
const DATA: &str = "audio_data";
/// The keys of audio files, which NeMo Gym's server reads and this server does not.
const FILES: [&str; 2] = ["audio_path", "audio_paths"];

/// Returns the data URI in the metadata of a request.
pub(super) fn of(metadata: &Map<String, Value>) -> Result<Option<String>> {
    let given = |key: &str| metadata.get(key).filter(|value| is_given(value));
    if let Some(key) = FILES.into_iter().find(|key| given(key).is_some()) {
        let text =
            format!("`metadata.{key}`: this vllm_model reads no audio files; put a data URI into `metadata.{DATA}`");
        return Err(Error::finished(Code::Unimplemented, text));
    }
    match given(DATA) {
        Some(Value::String(uri)) => Ok(Some(uri.clone())),
        Some(_) => {
            Err(Error::finished(Code::InvalidArgument, format!("`metadata.{DATA}` is no text: write a data URI")))
        }
        None => Ok(None),
    }
}

/// Returns `true` if the value is true in Python, as in NeMo Gym's server.
fn is_given(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(value) => value.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(members) => !members.is_empty(),
    }
}

/// Returns the request with the audio before the text of its last user message, and without the data URI in the metadata.
pub(super) fn put(request: &RawObject, uri: &str) -> Result<RawObject> {
    let audio = json!({"type": "audio_url", "audio_url": {"url": uri}});
    let mut messages: Vec<Value> = request.get_as("messages")?.unwrap_or_default();
    match messages.iter_mut().rev().find(|message| message["role"] == "user") {
        Some(message) => {
            let mut parts = vec![audio];
            match message["content"].take() {
                Value::String(text) => parts.push(json!({"type": "text", "text": text})),
                Value::Array(others) => parts.extend(others),
                _ => {}
            }
            message["content"] = parts.into();
        }
        None => messages.push(json!({"role": "user", "content": [audio]})),
    }
    let mut metadata: Map<String, Value> = request.get_as("metadata")?.unwrap_or_default();
    metadata.shift_remove(DATA);
    let edit = request.edit().set("messages", Value::from(messages).to_string());
    let edit = if metadata.is_empty() {
        edit.remove("metadata")
    } else {
        edit.set("metadata", Value::from(metadata).to_string())
    };
    Ok(edit.to_object()?)
}
