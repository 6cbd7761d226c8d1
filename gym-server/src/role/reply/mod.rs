//! The error bodies of NeMo Gym: FastAPI's 404, 405 and 422, and the JSON string of a 500.

pub(crate) mod aggregate;
pub(crate) mod health;
pub(crate) mod runs;

use gym_client::metrics::metrics_response;
use gym_core::server::{ValidationProblem, unprocessable};
use gym_core::{CallContext, Code, Error, Execution, Message, ModelResponse, RawObject, Response, Status};
use serde_json::{Value, json};

use crate::metrics::Metrics;

/// `{"detail":"Not Found"}`.
pub(crate) fn not_found() -> Response {
    Response::new(Status(404), Message::json(r#"{"detail":"Not Found"}"#))
}

/// `{"detail":"Method Not Allowed"}`.
pub(crate) fn method_not_allowed(allow: &'static str) -> Response {
    let mut response = Response::new(Status(405), Message::json(r#"{"detail":"Method Not Allowed"}"#));
    response.metadata.push("allow", allow);
    response
}

/// `{"status":"ok"}`.
pub(crate) fn ok() -> Response {
    Response::json(r#"{"status":"ok"}"#)
}

/// Returns the metrics of the process in the format that the caller accepts.
pub(crate) fn metrics(cx: &CallContext, metrics: &Metrics) -> Response {
    metrics_response(cx, metrics.text())
}

/// Converts an error of a role into a response: 422 and 404 as FastAPI writes them, all others as every transport does.
pub(crate) fn of_error(error: &Error) -> Response {
    match (error.code(), error.execution()) {
        (Code::InvalidArgument, Execution::NotStarted) => {
            unprocessable(&[ValidationProblem::new("value_error", &[], error.to_string(), json!({}))])
                .with_failure(error)
        }
        (Code::NotFound, Execution::NotStarted) if error.subject().is_empty() => not_found().with_failure(error),
        _ => Response::from_error(error),
    }
}

/// Returns the body of a request as an object, or the 422 response that describes the problem.
pub(crate) fn object(message: &Message) -> Result<RawObject, Response> {
    message.head.to_object().map_err(|error| {
        let text = message.head.to_bytes();
        unprocessable(&[match serde_json::from_slice::<Value>(&text) {
            // Valid JSON, but not an object: a list or a number, for example.
            Ok(other) => not_an_object(&[], other),
            Err(_) if text.is_empty() => ValidationProblem::missing(&[], Value::Null),
            Err(_) => ValidationProblem::json(&error),
        }])
    })
}

/// Returns the `response` of a row, which must also have `responses_create_params`, or the 422 response that describes the problem.
pub(crate) fn model_response(row: &RawObject) -> Result<ModelResponse, Response> {
    require(row, &["responses_create_params", "response"])?;
    if let Ok(Some(response)) = row.get_object("response") {
        return Ok(ModelResponse(response));
    }
    let input = row.get_as::<Value>("response").map_err(|error| of_error(&error))?;
    Err(unprocessable(&[not_an_object(&["response"], input.unwrap_or_default())]))
}

/// Checks that a body has these keys; the error is the 422 response that names the missing ones.
pub(crate) fn require(body: &RawObject, keys: &[&str]) -> Result<(), Response> {
    let missing: Vec<_> = keys.iter().filter(|key| !body.contains(key)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let input = body.outline().unwrap_or(Value::Null);
    let problems: Vec<_> = missing.iter().map(|key| ValidationProblem::missing(&[key], input.clone())).collect();
    Err(unprocessable(&problems))
}

fn not_an_object(path: &[&str], input: Value) -> ValidationProblem {
    let message = "Input should be a valid dictionary or object to extract fields from";
    ValidationProblem::new("model_attributes_type", path, message, input)
}
