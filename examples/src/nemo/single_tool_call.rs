//! `example_single_tool_call`: one tool, and a reward for calling it.

use gym_core::{CallContext, ModelResponse, RawObject, ResourcesServer, Response, Result, SessionId, Verdict};
use serde::Deserialize;
use serde_json::json;

use gym_core::server::Arguments;

/// Returns the weather, which is cold. The reward is 1 if the model called the tool.
#[derive(Debug, Default)]
pub struct SingleToolCall;

/// The task; no key of the row is read.
#[derive(Debug, Deserialize)]
pub struct Task {}

impl ResourcesServer for SingleToolCall {
    type Task = Task;

    async fn call_tool(&self, _: &CallContext, _: &SessionId, tool: &str, arguments: &RawObject) -> Result<Response> {
        if tool != "get_weather" {
            return Err(gym_core::server::unknown_tool(tool));
        }
        let mut arguments = Arguments::of(arguments);
        let Some(city) = arguments.take::<String>("city") else { return Ok(arguments.refusal()) };
        let weather = format!("The weather in {city} is cold.");
        Ok(Response::json(json!({"city": city, "weather_description": weather}).to_string()))
    }

    fn returns(&self, key: &str) -> bool {
        super::declared(key)
    }

    async fn verify(&self, _: &CallContext, _: &SessionId, _: Task, response: &ModelResponse) -> Result<Verdict> {
        Ok(Verdict::correct(response.outline()?.function_calls().any(|call| call.name == "get_weather")))
    }
}
