//! A complete response, and errors as responses.

use std::fmt;

use super::content::Message;
use super::failure::{self, FAILURE_METADATA};
use super::json::Rope;
use super::metadata::Metadata;
use crate::base::error::{Code, Error, Execution, Result};

/// The HTTP status of a response.
///
/// ```
/// use gym_core::{Message, Response, Status};
///
/// let created = Response::new(Status(201), Message::json(r#"{"id": 7}"#));
/// assert!(created.status.is_success());
/// assert!(!Status(404).is_success());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Status(pub u16);

impl Status {
    /// 200.
    pub const OK: Self = Self(200);

    /// Returns `true` for 200 to 299.
    #[must_use]
    pub fn is_success(self) -> bool {
        (200..300).contains(&self.0)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Metadata key for the execution state of an error: whether the request was rejected before it ran.
pub const EXECUTION_METADATA: &str = "x-gym-execution";
/// Metadata key for the code of an error.
pub const CODE_METADATA: &str = "x-gym-code";

/// A complete response with any status, including 404 and 500.
///
/// ```
/// use gym_core::{Code, Error, Response};
///
/// let response = Response::from_error(&Error::not_started(Code::ResourceExhausted, "the queue is full"));
/// assert_eq!(response.status.0, 429);
/// assert_eq!(response.into_result().unwrap_err().code(), Code::ResourceExhausted);
/// ```
#[derive(Clone, Debug)]
pub struct Response {
    /// The HTTP status.
    pub status: Status,
    /// Ordered pairs, such as `set-cookie`.
    pub metadata: Metadata,
    /// The body.
    pub message: Message,
}

impl Response {
    /// Creates a 200 with a JSON text.
    #[must_use]
    pub fn json(head: impl Into<Rope>) -> Self {
        Self::new(Status::OK, Message::json(head))
    }

    /// Creates a 200 with a plain text.
    #[must_use]
    pub fn text(head: impl Into<Rope>) -> Self {
        Self::new(Status::OK, Message::text(head))
    }

    /// Creates a response without metadata.
    #[must_use]
    pub fn new(status: Status, message: Message) -> Self {
        Self { status, metadata: Metadata::new(), message }
    }

    /// Returns the response if its status is a success.
    ///
    /// # Errors
    /// Otherwise, the error of the metadata with its causes and its class. A response of another implementation, without them,
    /// becomes an error that is `Finished`, has the code of its status, and quotes the body in readable form.
    pub fn into_result(self) -> Result<Self> {
        if self.status.is_success() {
            return Ok(self);
        }
        let code = self
            .metadata
            .get(CODE_METADATA)
            .and_then(Code::from_name)
            .unwrap_or_else(|| Code::from_status(self.status.0));
        let execution =
            self.metadata.get(EXECUTION_METADATA).and_then(Execution::from_name).unwrap_or(Execution::Finished);
        if let Some(error) = self.metadata.get(FAILURE_METADATA).and_then(|text| failure::read(text, code, execution)) {
            return Err(error.of_nested_call());
        }
        let said = failure::readable(&self.message.head.to_bytes());
        Err(Error::new(code, execution, format!("answered {}: {said}", self.status)).of_nested_call())
    }

    /// Creates the response of an error, for every transport: status, code and execution, and the message as a JSON string. The
    /// servers of NeMo Gym return a 500 in the same form.
    #[must_use]
    pub fn from_error(error: &Error) -> Self {
        let text = serde_json::to_string(&error.to_string()).unwrap_or_else(|_| "\"\"".into());
        Self::new(Status(error.code().status()), Message::json(text)).with_failure(error)
    }

    /// Adds the class and the causes of an error to a response whose body another protocol defines.
    #[must_use]
    pub fn with_failure(mut self, error: &Error) -> Self {
        self.metadata.retain(|name| ![CODE_METADATA, EXECUTION_METADATA, FAILURE_METADATA].contains(&name));
        self.metadata.push(CODE_METADATA, error.code().as_str());
        self.metadata.push(EXECUTION_METADATA, error.execution().as_str());
        self.metadata.push(FAILURE_METADATA, failure::write(error));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_travels_as_an_answer_and_comes_back_the_same() {
        for code in Code::ALL {
            for execution in [Execution::NotStarted, Execution::Unknown, Execution::Finished] {
                let error = Response::from_error(&Error::new(code, execution, "no room")).into_result().unwrap_err();
                assert_eq!((error.code(), error.execution()), (code, execution));
                assert_eq!(error.to_string(), "no room");
            }
        }
    }
}
