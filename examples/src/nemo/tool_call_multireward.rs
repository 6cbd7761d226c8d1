//! `example_tool_call_multireward`: one expected call, scored by three independent criteria.

use gym_core::server::{FunctionCall, OutputItem};
use gym_core::{CallContext, ModelResponse, RawObject, ResourcesServer, Response, Result, SessionId, Verdict};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::python_equal;
use gym_core::server::Arguments;

/// Returns the weather, which is sunny. Gives one point each for the right call, for valid arguments, and for exactly one call
/// without a message.
#[derive(Debug, Default)]
pub struct ToolCallMultiReward;

/// The expected call, and the tools of the request.
#[derive(Debug, Deserialize)]
pub struct Task {
    #[serde(default)]
    expected_call: Map<String, Value>,
    responses_create_params: Params,
}

#[derive(Debug, Deserialize)]
struct Params {
    #[serde(default)]
    tools: Option<Vec<Value>>,
}

impl Task {
    fn required(&self, tool: &str) -> Vec<&str> {
        let tools = self.tools();
        let known = tools.iter().find(|known| known["name"] == tool);
        known
            .and_then(|known| known["parameters"]["required"].as_array())
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect()
    }

    fn tools(&self) -> &[Value] {
        self.responses_create_params.tools.as_deref().unwrap_or_default()
    }

    fn expects(&self, call: &FunctionCall) -> bool {
        let arguments = parse(call).unwrap_or_default();
        self.expected_call.get("name").is_some_and(|name| *name == call.name)
            && self.expected_call.get("arguments").and_then(Value::as_object).is_none_or(|expected| {
                // A missing key equals null.
                expected.iter().all(|(key, value)| python_equal(arguments.get(key).unwrap_or(&Value::Null), value))
            })
    }
}

/// Returns the arguments, if they are a JSON object.
fn parse(call: &FunctionCall) -> Option<Map<String, Value>> {
    serde_json::from_str(&call.arguments).ok()
}

impl ResourcesServer for ToolCallMultiReward {
    type Task = Task;

    async fn call_tool(&self, _: &CallContext, _: &SessionId, tool: &str, arguments: &RawObject) -> Result<Response> {
        if tool != "get_weather" {
            return Err(gym_core::server::unknown_tool(tool));
        }
        let mut arguments = Arguments::of(arguments);
        let Some(city) = arguments.take::<String>("city") else { return Ok(arguments.refusal()) };
        let weather = format!("The weather in {city} is sunny.");
        Ok(Response::json(json!({"city": city, "weather_description": weather}).to_string()))
    }

    fn returns(&self, key: &str) -> bool {
        super::declared(key)
    }

    async fn verify(&self, _: &CallContext, _: &SessionId, task: Task, response: &ModelResponse) -> Result<Verdict> {
        let outline = response.outline()?;
        let calls: Vec<&FunctionCall> = outline.function_calls().collect();
        let has_message = outline.output.iter().any(|item| matches!(item, OutputItem::Message(_)));
        let valid = |call: &&FunctionCall| {
            parse(call).is_some_and(|found| task.required(&call.name).iter().all(|key| found.contains_key(*key)))
        };

        let score = |holds: bool| if holds { 1.0 } else { 0.0 };
        let correctness = score(calls.iter().any(|call| task.expects(call)));
        let schema_valid = score(calls.first().is_some_and(valid));
        let format = score(calls.len() == 1 && !has_message);
        let predicted: Vec<Value> =
            calls.iter().map(|call| json!({"name": call.name, "arguments": parse(call).unwrap_or_default()})).collect();
        let components = json!({"correctness": correctness, "schema_valid": schema_valid, "format": format});
        Ok(Verdict::reward(correctness + schema_valid + format)
            .with("reward_components", components)
            .with("correctness", correctness)
            .with("schema_valid", schema_valid)
            .with("format", format)
            .with("predicted_calls", predicted))
    }
}
