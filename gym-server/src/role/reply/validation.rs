//! The problems of a request body, as pydantic and so FastAPI's 422 list them.

use gym_core::message::JsonError;
use gym_core::{Code, Execution, Message, Response, Status};
use serde_json::{Value, json};

/// One problem of a request body, in pydantic's form.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidationProblem {
    kind: &'static str,
    loc: Vec<Value>,
    message: String,
    input: Value,
    context: Option<Value>,
}

impl ValidationProblem {
    /// A key that must be there: `{"type":"missing","loc":["body",…],"msg":"Field required","input":…}`.
    #[must_use]
    pub fn missing(path: &[&str], input: Value) -> Self {
        Self::new("missing", path, "Field required", input)
    }

    /// Any other problem: pydantic's type name, where in the body, and the sentence.
    #[must_use]
    pub fn new(kind: &'static str, path: &[&str], message: impl Into<String>, input: Value) -> Self {
        let loc = std::iter::once("body").chain(path.iter().copied()).map(Value::from).collect();
        Self { kind, loc, message: message.into(), input, context: None }
    }

    /// A body that is not JSON, and where it stops being so.
    #[must_use]
    pub fn json(error: &JsonError) -> Self {
        Self {
            kind: "json_invalid",
            loc: vec!["body".into(), error.offset.into()],
            message: "JSON decode error".into(),
            input: json!({}),
            context: Some(json!({"error": error.message})),
        }
    }

    fn value(self) -> Value {
        let mut value = json!({"type": self.kind, "loc": self.loc, "msg": self.message, "input": self.input});
        if let (Some(context), Some(object)) = (self.context, value.as_object_mut()) {
            object.insert("ctx".into(), context);
        }
        value
    }
}

/// 422 with the problems of the body.
#[must_use]
pub fn unprocessable(details: Vec<ValidationProblem>) -> Response {
    let details: Vec<Value> = details.into_iter().map(ValidationProblem::value).collect();
    let mut response = Response::new(Status(422), Message::json(json!({"detail": details}).to_string()));
    response.metadata.push(gym_core::message::CODE_METADATA, Code::InvalidArgument.as_str());
    response.metadata.push(gym_core::message::EXECUTION_METADATA, Execution::NotStarted.as_str());
    response
}
