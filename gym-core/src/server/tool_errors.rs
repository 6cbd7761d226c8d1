//! Errors of tools: which of them the model sees, and which fail the attempt.
//!
//! A model learns from its own mistakes, so it must see them. It must not be scored for a tool that broke: such a rollout has no
//! reward. The rule is written once, for agents, for episodes of other agents and for the test harness.

use serde::Deserialize;
use serde_json::json;

use crate::base::error::{Code, Error, Execution, Result};
use crate::base::failure::FailureClass;
use crate::message::{CODE_METADATA, Message, Response, Status};
use crate::server::validation::{ValidationProblem, unprocessable};

/// The status of a response without a body.
const NO_CONTENT: u16 = 204;

/// The start of the message of an unknown tool, which gets the body of FastAPI's 404.
pub(super) const UNKNOWN_TOOL: &str = "there is no tool `";

/// An agent's treatment of the errors of tools: the key `tool_errors` of its block.
///
/// Errors that the model caused always go to the model: an unknown tool, wrong arguments, and the codes `NotFound`, `InvalidArgument`
/// and `FailedPrecondition` (in other languages the status 404, 412, 422 and most other 4xx). A lost session always fails the attempt.
/// This key decides on all other errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ToolErrors {
    /// Errors and panics of servers of this SDK fail the attempt as `tool_error`. Responses of other servers go to the model,
    /// whatever their status, as in NeMo Gym.
    #[default]
    Auto,
    /// The errors of all servers fail the attempt, also a status 5xx of a Python server.
    Fail,
    /// The errors of all servers go to the model.
    ToModel,
}

/// Who caused an error of a tool that goes to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolErrorCause {
    /// The model, by its choice of tool or arguments.
    Model,
    /// The tool or its server.
    Server,
}

impl ToolErrors {
    /// Returns the response of a tool if it is data for the model, with the cause if it reports an error.
    ///
    /// # Errors
    /// The error of the response if it must fail the attempt.
    pub fn admit(self, response: Response) -> Result<(Response, Option<ToolErrorCause>)> {
        if response.status.is_success() && response.status.0 != NO_CONTENT {
            return Ok((response, None));
        }
        if response.status.0 == NO_CONTENT {
            let text = "answered 204, so there is no output for the model; return a body, such as `null`";
            return Err(Error::finished(Code::DataLoss, text).with_class(FailureClass::ToolError));
        }
        let foreign = response.metadata.get(CODE_METADATA).is_none();
        let Err(error) = response.clone().into_result() else { return Ok((response, None)) };
        let lost = error.class() == Some(FailureClass::SessionLost);
        match self {
            _ if is_of_model(&error) => Ok((response, Some(ToolErrorCause::Model))),
            Self::ToModel if !lost => Ok((response, Some(ToolErrorCause::Server))),
            Self::Auto if foreign => Ok((response, Some(ToolErrorCause::Server))),
            _ => Err(error),
        }
    }
}

/// Returns `true` if the model caused this error of a tool. An error with another class than that of a tool has another cause.
fn is_of_model(error: &Error) -> bool {
    matches!(error.code(), Code::NotFound | Code::InvalidArgument | Code::FailedPrecondition)
        && matches!(error.class(), None | Some(FailureClass::ToolError))
}

/// Converts the error of a tool into a response. Its body is the text that the model sees: FastAPI's 422 and 404 for requests that did
/// not run, a JSON string for all others.
#[must_use]
pub fn tool_error_response(error: &Error) -> Response {
    match (error.code(), error.execution()) {
        (Code::InvalidArgument, Execution::NotStarted) => {
            unprocessable(&[ValidationProblem::new("value_error", &[], error.to_string(), json!({}))])
                .with_failure(error)
        }
        (Code::NotFound, Execution::NotStarted) => {
            let unknown = error.subject().is_empty() && error.message().starts_with(UNKNOWN_TOOL);
            let detail = if unknown { "Not Found".to_owned() } else { error.to_string() };
            Response::new(Status(404), Message::json(json!({"detail": detail}).to_string())).with_failure(error)
        }
        _ => Response::from_error(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::{SessionId, session_lost, unknown_tool};

    fn admitted(rule: ToolErrors, response: Response) -> Result<Option<ToolErrorCause>, Code> {
        rule.admit(response).map(|(_, cause)| cause).map_err(|error| error.code())
    }

    #[test]
    fn mistakes_of_the_model_always_go_to_the_model_and_a_lost_session_never() {
        for rule in [ToolErrors::Auto, ToolErrors::Fail, ToolErrors::ToModel] {
            for code in [Code::NotFound, Code::InvalidArgument, Code::FailedPrecondition] {
                for error in [Error::not_started(code, "no such account"), Error::finished(code, "no such account")] {
                    let error = error.or_class(FailureClass::ToolError);
                    assert_eq!(admitted(rule, tool_error_response(&error)), Ok(Some(ToolErrorCause::Model)));
                }
            }
            for status in [400, 404, 412, 422] {
                let foreign = Response::new(Status(status), Message::json("{}"));
                assert_eq!(admitted(rule, foreign), Ok(Some(ToolErrorCause::Model)));
            }
            let lost = tool_error_response(&session_lost(&SessionId::new("s")));
            assert_eq!(admitted(rule, lost), Err(Code::FailedPrecondition), "{rule:?}");
            assert_eq!(admitted(rule, Response::json("{}")), Ok(None));
        }
    }

    #[test]
    fn the_rule_decides_on_all_other_errors() {
        let server = Ok(Some(ToolErrorCause::Server));
        for code in Code::ALL {
            if matches!(code, Code::NotFound | Code::InvalidArgument | Code::FailedPrecondition) {
                continue;
            }
            let native = || tool_error_response(&Error::finished(code, "broke"));
            assert_eq!(admitted(ToolErrors::Auto, native()), Err(code));
            assert_eq!(admitted(ToolErrors::Fail, native()), Err(code));
            assert_eq!(admitted(ToolErrors::ToModel, native()), server);
        }
        for status in [429, 500, 503] {
            let foreign = || Response::new(Status(status), Message::json("\"Internal Server Error\""));
            assert_eq!(admitted(ToolErrors::Auto, foreign()), server);
            assert!(admitted(ToolErrors::Fail, foreign()).is_err());
            assert_eq!(admitted(ToolErrors::ToModel, foreign()), server);
        }
    }

    #[test]
    fn a_model_reads_its_mistake_as_a_python_server_writes_it() {
        let text = |error: &Error| tool_error_response(error).message.head.to_bytes();
        assert_eq!(text(&unknown_tool("fly")), r#"{"detail":"Not Found"}"#);
        assert_eq!(text(&Error::not_started(Code::NotFound, "no account 7")), r#"{"detail":"no account 7"}"#);
        assert_eq!(
            text(&Error::finished(Code::FailedPrecondition, "the account is closed")),
            r#""the account is closed""#
        );
        assert_eq!(
            text(&Error::invalid("no date")),
            r#"{"detail":[{"type":"value_error","loc":["body"],"msg":"no date","input":{}}]}"#
        );
    }
}
