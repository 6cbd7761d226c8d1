//! The parts of a request that the script reads: the question, the tools, and the outputs of tools.

use gym_core::RawObject;
use serde_json::Value;

/// The parts of a request that the script reads.
#[derive(Debug, Default)]
pub(super) struct Conversation {
    question: String,
    tools: Vec<String>,
    outputs: Vec<String>,
}

impl Conversation {
    /// Reads the body of a Responses API request. Parts that are missing or have another type are empty.
    pub(super) fn of(request: &RawObject) -> Self {
        let read = |key| request.get_as::<Value>(key).ok().flatten().unwrap_or_default();
        let (input, tools) = (read("input"), read("tools"));
        let items: &[Value] = input.as_array().map_or(&[], Vec::as_slice);
        let first_user = items.iter().find(|item| item["role"] == "user");
        let question = first_user.map_or_else(|| text(&input), |item| text(&item["content"]));
        let names = tools.as_array().into_iter().flatten().filter_map(|tool| tool["name"].as_str());
        let outputs = items.iter().filter(|item| item["type"] == "function_call_output");
        Self {
            question,
            tools: names.map(str::to_owned).collect(),
            outputs: outputs.map(|item| text(&item["output"])).collect(),
        }
    }

    pub(super) fn question(&self) -> &str {
        &self.question
    }

    pub(super) fn has_tool(&self, name: &str) -> bool {
        self.tools.iter().any(|tool| tool == name)
    }

    /// Returns the outputs of the tools so far, in order.
    pub(super) fn outputs(&self) -> &[String] {
        &self.outputs
    }

    /// Returns the output of a call as JSON; null if it is not JSON, or the call has not been made.
    pub(super) fn output(&self, index: usize) -> Value {
        self.outputs.get(index).and_then(|output| serde_json::from_str(output).ok()).unwrap_or_default()
    }
}

/// Returns the text of a content: a string, or the text of its parts.
fn text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}
