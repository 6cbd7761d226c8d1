//! Replays a complete response as server-sent events for streaming clients, in the order of NeMo Gym's model servers.
//!
//! Responses are not streamed token by token, because a rollout needs the complete response. The events contain the text of that
//! response unchanged.

use bytes::{BufMut, Bytes, BytesMut};
use gym_core::message::ContentType;
use gym_core::{Error, Message, RawObject, Response, Result, Status};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::role::dialect::harness::JoinedNames;

/// Returns the events of a Responses API response: created, each item done, completed.
pub(crate) fn responses(answer: &RawObject, names: &JoinedNames) -> Result<Response> {
    let mut events = EventText::default();
    let created = answer.edit().set("status", r#""in_progress""#).set("output", "[]").to_rope().to_bytes();
    events.response("response.created", &created);
    let output = answer.get("output").unwrap_or_else(|| "[]".into());
    let items: Vec<&RawValue> = serde_json::from_slice(&output)
        .map_err(|error| Error::internal("the answer's `output` is no list").caused_by(error))?;
    let restored: Vec<Option<Bytes>> = items.iter().map(|item| names.restored(item.get())).collect();
    let items: Vec<&[u8]> = items
        .iter()
        .zip(&restored)
        .map(|(item, restored)| restored.as_deref().unwrap_or_else(|| item.get().as_bytes()))
        .collect();
    for (index, item) in items.iter().enumerate() {
        events.open("response.output_item.done");
        events.text(format!(r#","output_index":{index},"item":"#).as_bytes());
        events.one_line(item);
        events.text(b"}\n\n");
    }
    if restored.iter().all(Option::is_none) {
        events.response("response.completed", answer.text());
    } else {
        let output = [b"[".as_slice(), &items.join(b",".as_slice()), b"]"].concat();
        events.response("response.completed", &answer.edit().set("output", output).to_rope().to_bytes());
    }
    Ok(events.response_of(true))
}

/// Returns the events of a request that failed after a stream was promised to the client.
pub(crate) fn responses_failure(error: &Error, id: &str) -> Response {
    let response = |status: &str| {
        json!({
            "id": format!("resp_{id}"), "object": "response", "status": status, "output": [],
            "error": {"code": "server_error", "message": error.to_string()},
        })
        .to_string()
    };
    let mut events = EventText::default();
    events.response("response.created", response("in_progress").as_bytes());
    events.response("response.failed", response("failed").as_bytes());
    events.response_of(false)
}

/// The parts of a streamed chat completion.
#[derive(Deserialize)]
struct ChatCompletion {
    #[serde(default)]
    id: Value,
    #[serde(default)]
    created: Value,
    #[serde(default)]
    model: Value,
    #[serde(default)]
    system_fingerprint: Option<Value>,
    #[serde(default)]
    choices: Vec<ChatChoice>,
}

#[derive(Deserialize)]
struct ChatChoice {
    #[serde(default)]
    message: Value,
    #[serde(default)]
    finish_reason: Value,
}

/// Returns the chunks of a chat completion. With `include_usage`, a last chunk contains the usage.
pub(crate) fn chat(answer: &RawObject, include_usage: bool) -> Result<Response> {
    let completion: ChatCompletion =
        answer.outline().map_err(|error| Error::internal("the answer is no chat completion").caused_by(error))?;
    let mut events = EventText::default();
    for (index, choice) in completion.choices.iter().enumerate() {
        for (delta, finish) in deltas(&choice.message, &choice.finish_reason) {
            let choice = json!([{"index": index, "delta": delta, "finish_reason": finish}]);
            events.chunk(&completion, &choice, None);
        }
    }
    let usage = answer.get("usage").filter(|usage| include_usage && usage != "null");
    if let Some(usage) = usage {
        events.chunk(&completion, &json!([]), Some(&usage));
    }
    events.text(b"data: [DONE]\n\n");
    Ok(events.response_of(true))
}

/// Returns `true` if the client requested a chunk with the usage.
pub(crate) fn wants_usage(body: &RawObject) -> bool {
    let options = body.get_as::<Value>("stream_options").ok().flatten().unwrap_or_default();
    truthy(&options["include_usage"])
}

/// Returns the truth value of Python.
pub(crate) fn truthy(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(is) => *is,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

fn deltas(message: &Value, finish_reason: &Value) -> Vec<(Value, Value)> {
    let text = |key: &str| Some(&message[key]).filter(|value| truthy(value)).cloned();
    let role = text("role").unwrap_or_else(|| "assistant".into());
    let mut deltas = vec![json!({"role": role})];
    if let Some(reasoning) = text("reasoning_content").or_else(|| text("reasoning")) {
        deltas.push(json!({"reasoning_content": reasoning}));
    }
    if let Some(content) = text("content") {
        deltas.push(json!({"content": content}));
    }
    if let Some(refusal) = text("refusal") {
        deltas.push(json!({"refusal": refusal}));
    }
    if let Some(Value::Array(calls)) = text("tool_calls") {
        let calls: Vec<Value> = calls
            .iter()
            .enumerate()
            .map(|(index, call)| {
                let kind = Some(&call["type"]).filter(|kind| truthy(kind)).cloned();
                let arguments = Some(&call["function"]["arguments"]).filter(|text| truthy(text)).cloned();
                json!({
                    "index": index, "id": call["id"], "type": kind.unwrap_or_else(|| "function".into()),
                    "function": {"name": call["function"]["name"], "arguments": arguments.unwrap_or_else(|| "".into())},
                })
            })
            .collect();
        deltas.push(json!({"tool_calls": calls}));
    }
    let mut deltas: Vec<_> = deltas.into_iter().map(|delta| (delta, Value::Null)).collect();
    deltas.push((json!({}), finish_reason.clone()));
    deltas
}

#[derive(Default)]
struct EventText(BytesMut);

impl EventText {
    fn text(&mut self, text: &[u8]) {
        self.0.put_slice(text);
    }

    /// Writes JSON without the line breaks of pretty-printing, which would end the event's data line. A JSON string contains no raw
    /// line break.
    fn one_line(&mut self, json: &[u8]) {
        let from = self.0.len();
        self.0.put_slice(json);
        for byte in &mut self.0[from..] {
            if matches!(byte, b'\n' | b'\r') {
                *byte = b' ';
            }
        }
    }

    fn open(&mut self, kind: &str) {
        self.text(format!("event: {kind}\ndata: {{\"type\":\"{kind}\"").as_bytes());
    }

    fn response(&mut self, kind: &str, response: &[u8]) {
        self.open(kind);
        self.text(br#","response":"#);
        self.one_line(response);
        self.text(b"}\n\n");
    }

    fn chunk(&mut self, completion: &ChatCompletion, choices: &Value, usage: Option<&Bytes>) {
        let ChatCompletion { id, created, model, .. } = completion;
        let object = "chat.completion.chunk";
        let head =
            format!(r#"data: {{"id":{id},"object":"{object}","created":{created},"model":{model},"choices":{choices}"#);
        self.text(head.as_bytes());
        if let Some(fingerprint) = &completion.system_fingerprint {
            self.text(format!(r#","system_fingerprint":{fingerprint}"#).as_bytes());
        }
        if let Some(usage) = usage {
            self.text(br#","usage":"#);
            self.one_line(usage);
        }
        self.text(b"}\n\n");
    }

    fn response_of(self, buffering_matters: bool) -> Response {
        let message =
            Message { content_type: ContentType::EventStream, head: self.0.freeze().into(), segments: Vec::new() };
        let mut response = Response::new(Status::OK, message);
        if buffering_matters {
            response.metadata.push("cache-control", "no-cache");
            response.metadata.push("x-accel-buffering", "no");
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(response: &Response) -> String {
        String::from_utf8(response.message.head.to_bytes().to_vec()).unwrap()
    }

    #[test]
    fn a_response_is_replayed_item_by_item_with_its_own_text() {
        let answer = RawObject::parse(
            "{\"id\":\"r\",\n \"status\":\"completed\",\"output\":[{\"type\":\"message\",\"p\":[1E5,\n2]}],\"usage\":null}",
        )
        .unwrap();
        assert_eq!(
            text(&responses(&answer, &JoinedNames::default()).unwrap()),
            concat!(
                "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",  \"status\":\"in_progress\",\"output\":[],\"usage\":null}}\n\n",
                "event: response.output_item.done\ndata: {\"type\":\"response.output_item.done\",\"output_index\":0,\"item\":{\"type\":\"message\",\"p\":[1E5, 2]}}\n\n",
                "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",  \"status\":\"completed\",\"output\":[{\"type\":\"message\",\"p\":[1E5, 2]}],\"usage\":null}}\n\n",
            )
        );
    }

    #[test]
    fn a_chat_completion_is_replayed_in_deltas() {
        let answer = RawObject::parse(
            r#"{"id":"c","created":7,"model":"m","choices":[{"finish_reason":"tool_calls","message":{"role":"assistant","content":null,"reasoning":"hm","tool_calls":[{"id":"t","function":{"name":"f","arguments":"{}"}}]}}],"usage":{"total_tokens":3}}"#,
        )
        .unwrap();
        let events = text(&chat(&answer, true).unwrap());
        let chunks: Vec<&str> = events.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!(chunks.len(), 6);
        assert!(chunks[0].contains(r#""delta":{"role":"assistant"}"#));
        assert!(chunks[1].contains(r#""delta":{"reasoning_content":"hm"}"#));
        assert!(chunks[2].contains(r#""arguments":"{}""#));
        assert!(chunks[3].contains(r#""delta":{},"finish_reason":"tool_calls""#));
        assert!(chunks[4].contains(r#""choices":[],"usage":{"total_tokens":3}"#));
        assert_eq!(chunks[5], "[DONE]");
        assert!(!text(&chat(&answer, false).unwrap()).contains("usage"));
    }

    #[test]
    fn a_failed_stream_says_so_in_its_last_event() {
        let events = text(&responses_failure(&Error::internal("no engine"), "1"));
        assert!(events.contains("event: response.failed") && events.contains("no engine"));
    }
}
