//! Problems of a request body, in the form of pydantic and FastAPI's 422, and of a row that does not fit its environment.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::base::FailureClass;
use crate::base::error::{Code, Error, Execution, Result};
use crate::message::{
    CODE_METADATA, EXECUTION_METADATA, JsonError, Message, RawObject, Response, Status, push_json_string,
};

/// The keys of `responses_create_params` in NeMo Gym 0.7.0, sorted: its servers reject all others.
pub const RESPONSES_KEYS: &[&str] = &[
    "background",
    "context_management",
    "conversation",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "model",
    "moderation",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
];

/// Checks that a row fits the task of an environment, before anything runs.
#[derive(Clone, Copy, Debug)]
pub struct TaskCheck(fn(&RawObject) -> Result<()>);

impl TaskCheck {
    /// Creates the check of an environment's `Task`.
    #[must_use]
    pub fn of<T: DeserializeOwned>() -> Self {
        Self(|row| {
            let problem = match row.view::<T>() {
                Ok(_) => return Ok(()),
                Err(error) => std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string),
            };
            let text = format!("the row does not fit the task of this environment: {problem}");
            Err(Error::invalid(text).with_class(FailureClass::RowInvalid))
        })
    }

    /// Checks a row.
    ///
    /// # Errors
    /// `InvalidArgument` of the class [`FailureClass::RowInvalid`], with the key that is missing or has another type.
    pub fn check(&self, row: &RawObject) -> Result<()> {
        (self.0)(row)
    }
}

/// One problem of a request body, written as an entry of pydantic's `detail`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidationProblem(String);

impl ValidationProblem {
    /// Creates the problem of a missing required key: `{"type":"missing","loc":["body",…],"msg":"Field required","input":…}`.
    #[must_use]
    pub fn missing(path: &[&str], input: Value) -> Self {
        Self::new("missing", path, "Field required", input)
    }

    /// Creates any other problem from pydantic's name of its type, the path of keys in the body, the message, and the value at that
    /// path.
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "callers build the value for this call")]
    pub fn new(kind: &str, path: &[&str], message: impl AsRef<str>, input: Value) -> Self {
        let steps = path.iter().map(|step| Value::from(*step).to_string());
        Self::at(kind, steps, message.as_ref(), &input.to_string(), None)
    }

    /// Creates the problem of a body that is not JSON, with the position and the cause.
    #[must_use]
    pub fn json(error: &JsonError) -> Self {
        let context = json!({"error": error.message}).to_string();
        Self::at("json_invalid", [error.offset.to_string()], "JSON decode error", "{}", Some(&context))
    }

    /// Creates a problem. The steps below `body`, the input and the context are JSON text.
    pub(crate) fn at(
        kind: &str,
        steps: impl IntoIterator<Item = impl AsRef<str>>,
        message: &str,
        input: &str,
        context: Option<&str>,
    ) -> Self {
        let mut text = String::from("{\"type\":");
        push_json_string(&mut text, kind);
        text.push_str(",\"loc\":[\"body\"");
        for step in steps {
            text.push(',');
            text.push_str(step.as_ref());
        }
        text.push_str("],\"msg\":");
        push_json_string(&mut text, message);
        text.push_str(",\"input\":");
        text.push_str(input);
        if let Some(context) = context {
            text.push_str(",\"ctx\":");
            text.push_str(context);
        }
        text.push('}');
        Self(text)
    }

    /// Returns the 422 response of a Python server, without metadata.
    pub(crate) fn response(problems: &[Self]) -> Response {
        let details: Vec<&str> = problems.iter().map(|problem| problem.0.as_str()).collect();
        Response::new(Status(422), Message::json(format!("{{\"detail\":[{}]}}", details.join(","))))
    }
}

/// Returns the 422 response that lists the problems of a body, with the metadata of a request that was rejected before it ran.
#[must_use]
pub fn unprocessable(problems: &[ValidationProblem]) -> Response {
    let mut response = ValidationProblem::response(problems);
    response.metadata.push(CODE_METADATA, Code::InvalidArgument.as_str());
    response.metadata.push(EXECUTION_METADATA, Execution::NotStarted.as_str());
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(problem: ValidationProblem) -> String {
        String::from_utf8(unprocessable(&[problem]).message.head.to_bytes().to_vec()).unwrap()
    }

    #[test]
    fn a_problem_is_written_as_pydantic_writes_it() {
        let offset = JsonError { offset: 7, message: "expected `,` or \"}\"".into() };
        assert_eq!(
            text(ValidationProblem::json(&offset)),
            r#"{"detail":[{"type":"json_invalid","loc":["body",7],"msg":"JSON decode error","input":{},"ctx":{"error":"expected `,` or \"}\""}}]}"#
        );
        assert_eq!(
            text(ValidationProblem::missing(&["a\"b", "é"], json!({"x": [1, null]}))),
            r#"{"detail":[{"type":"missing","loc":["body","a\"b","é"],"msg":"Field required","input":{"x":[1,null]}}]}"#
        );
        assert_eq!(
            text(ValidationProblem::new("value_error", &[], "a \"quote\"\n", Value::Null)),
            r#"{"detail":[{"type":"value_error","loc":["body"],"msg":"a \"quote\"\n","input":null}]}"#
        );
    }
}
