//! Word problems with a calculator.
//!
//! The model can evaluate expressions with `calculator`, and states its answer as `\boxed{…}`. The reward is 1 if the answer equals
//! the expected quantity exactly, in any spelling.

pub mod answer;
pub mod arithmetic;

use gym_core::{CallContext, ModelResponse, RawObject, ResourcesServer, Response, Result, SessionId, Verdict};
use serde::Deserialize;
use serde_json::json;

use gym_core::server::Arguments;

/// The environment. It has no state.
#[derive(Debug, Default)]
pub struct Math;

/// The keys that a row must have.
#[derive(Debug, Deserialize)]
pub struct Task {
    /// The expected quantity, such as `3/4`, `1,250`, `12 km` or `5%`.
    pub expected_answer: String,
}

impl ResourcesServer for Math {
    type Task = Task;

    async fn call_tool(&self, _: &CallContext, _: &SessionId, tool: &str, arguments: &RawObject) -> Result<Response> {
        if tool != "calculator" {
            return Err(gym_core::server::unknown_tool(tool));
        }
        let mut arguments = Arguments::of(arguments);
        let Some(expression) = arguments.take::<String>("expression") else { return Ok(arguments.refusal()) };
        // An invalid expression is a result, not a failure: the model reads the message and tries again.
        let reply = match arithmetic::evaluate(&expression) {
            Ok(value) => json!({"result": arithmetic::show(&value), "decimal": arithmetic::show_decimal(&value, 12)}),
            Err(error) => json!({"error": error.to_string()}),
        };
        Ok(Response::json(reply.to_string()))
    }

    async fn verify(&self, _: &CallContext, _: &SessionId, task: Task, response: &ModelResponse) -> Result<Verdict> {
        let expected = answer::expected(&task.expected_answer)?;
        let text = response.last_text()?;
        let stated = answer::final_answer(&text);
        let given = stated.and_then(answer::Quantity::parse);
        let correct = given.is_some_and(|given| expected.equals(&given));
        // An answer that is not a quantity can be long; the row needs enough of it to explain the reward.
        let shown = stated.map(|stated| stated.chars().take(256).collect::<String>());
        Ok(Verdict::correct(correct).with("extracted_answer", shown))
    }
}
