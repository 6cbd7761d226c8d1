//! The error type of the SDK. An error reports what failed, and whether the peer may have run the call.
//!
//! The latter decides whether a message may be sent again. [`Error::may_resend`] is the only implementation of that
//! rule. The collector and its ledger decide separately whether an *episode* is attempted again.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::base::failure::FailureClass;

/// The result type of the SDK.
///
/// ```
/// use gym_core::{Error, Result};
///
/// fn port(text: &str) -> Result<u16> {
///     text.parse::<u16>().map_err(|error| Error::invalid(format!("`{text}` is not a port")).caused_by(error))
/// }
/// assert_eq!(port("7000").ok(), Some(7000));
/// assert!(port("70000").unwrap_err().to_string().starts_with("`70000` is not a port: "));
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error: what failed, on which subject, and whether the peer may have acted on it. One pointer wide.
///
/// ```
/// use gym_core::{Code, Error};
///
/// let error = Error::not_started(Code::Unavailable, "connection refused").about("connect to policy");
/// assert_eq!(error.to_string(), "connect to policy: connection refused");
/// assert!(error.may_resend(false), "the peer has not seen the request");
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    code: Code,
    execution: Execution,
    class: Option<FailureClass>,
    /// Of a call that was made to serve a request.
    nested: bool,
    subject: Cow<'static, str>,
    message: Cow<'static, str>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The kind of an error; the codes are those of gRPC.
///
/// ```
/// use gym_core::Code;
///
/// let code = Code::DeadlineExceeded;
/// assert_eq!((code.as_str(), code.status()), ("deadline_exceeded", 504));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Code {
    /// The request is invalid; sending it again cannot succeed.
    InvalidArgument,
    /// There is nothing with this name.
    NotFound,
    /// There is already one with this name, and it differs.
    AlreadyExists,
    /// The state of the peer does not allow the request, as for a lost session or a late attempt.
    FailedPrecondition,
    /// A queue, a limit or a disk is full.
    ResourceExhausted,
    /// The peer cannot be reached, or reports that it cannot serve at the moment.
    Unavailable,
    /// The deadline passed before the call was over.
    DeadlineExceeded,
    /// The caller disconnected or cancelled the call.
    Cancelled,
    /// The peer does not support this operation.
    Unimplemented,
    /// Received or stored data differs from the data that was written.
    DataLoss,
    /// A defect, or a status 500 of a server in another language.
    Internal,
}

/// Whether the peer may have run the request.
///
/// ```
/// use gym_core::{Code, Error, Execution};
///
/// // The message was never sent, so it may be sent again.
/// let refused = Error::not_started(Code::Unavailable, "connection refused");
/// assert!(refused.may_resend(false));
/// // It may have run: it is sent again only if that does no harm.
/// let broken = Error::new(Code::Unavailable, Execution::Unknown, "the connection broke");
/// assert!(broken.may_resend(true) && !broken.may_resend(false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Execution {
    /// The request was rejected before it ran, or was never sent.
    NotStarted,
    /// The request was sent, and no response arrived. It may have run.
    Unknown,
    /// The request ran, and the peer responded.
    Finished,
}

/// One error of a chain of causes. Its text is `subject: message`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ErrorLink {
    /// The operation and its target, such as `POST math/verify`; empty if the error names none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub subject: String,
    /// The failure, without the subject and the cause; empty if the cause tells.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

impl fmt::Display for ErrorLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_link(f, &self.subject, &self.message)
    }
}

/// Writes what an error says without its causes: `subject: message`, or the one of them that is not empty.
fn write_link(f: &mut fmt::Formatter<'_>, subject: &str, message: &str) -> fmt::Result {
    f.write_str(subject)?;
    if !subject.is_empty() && !message.is_empty() {
        f.write_str(": ")?;
    }
    f.write_str(message)
}

impl Code {
    /// The name used on the wire and in logs, such as `deadline_exceeded`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::NotFound => "not_found",
            Self::AlreadyExists => "already_exists",
            Self::FailedPrecondition => "failed_precondition",
            Self::ResourceExhausted => "resource_exhausted",
            Self::Unavailable => "unavailable",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Cancelled => "cancelled",
            Self::Unimplemented => "unimplemented",
            Self::DataLoss => "data_loss",
            Self::Internal => "internal",
        }
    }

    /// Returns the code with this wire name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.as_str() == name)
    }

    /// All codes, in the order of declaration.
    pub const ALL: [Self; 11] = [
        Self::InvalidArgument,
        Self::NotFound,
        Self::AlreadyExists,
        Self::FailedPrecondition,
        Self::ResourceExhausted,
        Self::Unavailable,
        Self::DeadlineExceeded,
        Self::Cancelled,
        Self::Unimplemented,
        Self::DataLoss,
        Self::Internal,
    ];

    /// Returns the code for a complete response with this HTTP status.
    pub(crate) fn from_status(status: u16) -> Self {
        match status {
            404 => Self::NotFound,
            405 | 501 => Self::Unimplemented,
            408 | 504 => Self::DeadlineExceeded,
            409 => Self::AlreadyExists,
            412 => Self::FailedPrecondition,
            429 => Self::ResourceExhausted,
            499 => Self::Cancelled,
            502 | 503 => Self::Unavailable,
            400..=499 => Self::InvalidArgument,
            _ => Self::Internal,
        }
    }

    /// Returns the code of a request that was served with a call which failed with this code. What the peer rejected is a defect of the server
    /// that sent it, not of the request.
    #[must_use]
    pub fn of_served_request(self) -> Self {
        match self {
            Self::InvalidArgument | Self::NotFound | Self::Unimplemented | Self::AlreadyExists => Self::Internal,
            code => code,
        }
    }

    /// Returns the HTTP status that an error with this code is sent with.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::InvalidArgument => 422,
            Self::NotFound => 404,
            Self::AlreadyExists => 409,
            Self::FailedPrecondition => 412,
            Self::ResourceExhausted => 429,
            Self::Unavailable => 503,
            Self::DeadlineExceeded => 504,
            Self::Cancelled => 499,
            Self::Unimplemented => 501,
            Self::DataLoss | Self::Internal => 500,
        }
    }
}

impl Execution {
    /// The name used on the wire and in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotStarted => "not-started",
            Self::Unknown => "unknown",
            Self::Finished => "finished",
        }
    }

    /// Returns the execution with this wire name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::NotStarted, Self::Unknown, Self::Finished].into_iter().find(|known| known.as_str() == name)
    }
}

impl Error {
    /// Creates an error without a subject; [`Error::about`] adds one.
    #[must_use]
    pub fn new(code: Code, execution: Execution, message: impl Into<Cow<'static, str>>) -> Self {
        let (subject, message) = (Cow::Borrowed(""), message.into());
        Self(Box::new(Inner { code, execution, class: None, nested: false, subject, message, source: None }))
    }

    /// Creates an error of a request that was rejected before it ran, or never sent.
    #[must_use]
    pub fn not_started(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(code, Execution::NotStarted, message)
    }

    /// Creates an error of a request that was sent and got no response.
    #[must_use]
    pub fn unknown(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(code, Execution::Unknown, message)
    }

    /// Creates the error that a request ended with after it ran.
    #[must_use]
    pub fn finished(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(code, Execution::Finished, message)
    }

    /// Creates an `InvalidArgument` error of a request that did not run.
    #[must_use]
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::not_started(Code::InvalidArgument, message)
    }

    /// Creates an `Internal` error of work that ran and failed, or of a defect in this process.
    #[must_use]
    pub fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::finished(Code::Internal, message)
    }

    /// Sets the subject: the operation and its target, such as `connect to policy at http://10.0.0.7:7011`.
    #[must_use]
    pub fn about(mut self, subject: impl Into<Cow<'static, str>>) -> Self {
        self.0.subject = subject.into();
        self
    }

    /// Sets the cause, which [`std::error::Error::source`] returns and the text of the error ends with.
    #[must_use]
    pub fn caused_by(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Wraps the error of a call within a call: the operation and its target. The code is kept. An error that has this subject already is not
    /// wrapped, because its text would say it twice.
    #[must_use]
    pub fn within(self, execution: Execution, subject: impl Into<Cow<'static, str>>) -> Self {
        let subject = subject.into();
        if self.subject() == subject {
            return self.with_execution(execution);
        }
        Self::new(self.code(), execution, "").about(subject).caused_by(self)
    }

    /// Adds the error of the attempt before, if this one only tells that the deadline has passed: who waited learns for what.
    #[must_use]
    pub fn after_attempt(mut self, before: Option<&Self>) -> Self {
        let before = before.filter(|before| before.code() != Code::DeadlineExceeded);
        if let (Code::DeadlineExceeded, Some(before)) = (self.code(), before) {
            self.innermost(|error| error.message = format!("{}; the attempt before: {before}", error.message).into());
        }
        self
    }

    /// Changes the innermost error, if that is one of the SDK.
    fn innermost(&mut self, change: impl FnOnce(&mut Inner)) {
        match self.0.source.as_mut().map(|source| source.downcast_mut::<Self>()) {
            None => change(&mut self.0),
            Some(Some(source)) => source.innermost(change),
            Some(None) => {}
        }
    }

    /// Replaces the execution.
    #[must_use]
    pub fn with_execution(mut self, execution: Execution) -> Self {
        self.0.execution = execution;
        self
    }

    /// Marks the error as that of a call to a server, as `ServerClient` and [`Response::into_result`](crate::Response::into_result) do. A server
    /// that returns it from its handler has made this call to serve a request; see [`Error::of_served_request`].
    #[must_use]
    pub fn of_nested_call(mut self) -> Self {
        self.0.nested = true;
        self
    }

    /// Converts the error of a nested call to that of the request which was served: that one has run, although the nested call may not have
    /// started, so its sender must not send it again. What the nested call's server rejected is no mistake of that sender: the code is then
    /// `Internal`. Any other error is returned unchanged: a handler may say that it did not start.
    ///
    /// The servers of agents and environments do this to each error that an implementation returns.
    #[must_use]
    pub fn of_served_request(mut self) -> Self {
        let code = self.code().of_served_request();
        if self.0.nested {
            if code != Code::Internal {
                // The class says what did not happen: for example, that a server was not reached.
                let class = self.failure_class();
                self = self.or_class(class);
            }
            (self.0.code, self.0.execution) = (code, Execution::Finished);
        }
        self
    }

    /// Sets the class of the failure, which takes precedence over the classes of the causes.
    #[must_use]
    pub fn with_class(mut self, class: FailureClass) -> Self {
        self.0.class = Some(class);
        self
    }

    /// Sets the class of the failure, unless this error or one of its causes has a class: the innermost server knows best.
    #[must_use]
    pub fn or_class(mut self, class: FailureClass) -> Self {
        if self.class().is_none() {
            self.0.class = Some(class);
        }
        self
    }

    /// Returns the class of the failure that was set on this error or, if there is none, on the nearest cause that has one.
    /// [`Error::failure_class`] also derives a class where none was set.
    #[must_use]
    pub fn class(&self) -> Option<FailureClass> {
        let mut error = self;
        loop {
            if error.0.class.is_some() {
                return error.0.class;
            }
            error = error.0.source.as_ref()?.downcast_ref()?;
        }
    }

    /// Returns the class of an attempt whose call failed with this error: that of [`Error::class`], or else the one that follows
    /// from the code and the execution.
    #[must_use]
    pub fn failure_class(&self) -> FailureClass {
        use Execution::{Finished, NotStarted, Unknown};
        self.class().unwrap_or(match (self.execution(), self.code()) {
            (_, Code::Cancelled) => FailureClass::Cancelled,
            (_, Code::DeadlineExceeded) => FailureClass::TransportTimeout,
            (_, Code::FailedPrecondition) => FailureClass::SessionLost,
            (NotStarted, Code::ResourceExhausted) => FailureClass::TransportLocalResource,
            // It was rejected, for example because of its size, and would be rejected again.
            (NotStarted, Code::InvalidArgument) => FailureClass::AgentRunError,
            (NotStarted, _) => FailureClass::TransportUnreachable,
            (Unknown, _) => FailureClass::TransportPeerDrop,
            (Finished, Code::Unavailable | Code::ResourceExhausted) => FailureClass::AgentRequestFailed,
            (Finished, _) => FailureClass::AgentRunError,
        })
    }

    /// Returns this error and its causes, outermost first. Skips causes whose text the error before them already contains.
    #[must_use]
    pub fn chain(&self) -> Vec<ErrorLink> {
        let mut chain: Vec<ErrorLink> = Vec::new();
        let mut next: Option<&(dyn std::error::Error + 'static)> = Some(self);
        while let Some(error) = next {
            let link = match error.downcast_ref::<Self>() {
                Some(error) => ErrorLink { subject: error.subject().to_owned(), message: error.message().to_owned() },
                None => ErrorLink { subject: String::new(), message: error.to_string() },
            };
            if !chain.last().is_some_and(|before| link.subject.is_empty() && before.message.contains(&link.message)) {
                chain.push(link);
            }
            next = error.source();
        }
        chain
    }

    /// Returns the kind of the error.
    #[must_use]
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// Returns whether the peer may have run the request.
    #[must_use]
    pub fn execution(&self) -> Execution {
        self.0.execution
    }

    /// Returns the operation and its target; empty if there is no subject.
    #[must_use]
    pub fn subject(&self) -> &str {
        &self.0.subject
    }

    /// Returns the message, without the subject and the cause.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Returns `true` if the same *message* may be sent again.
    ///
    /// - `NotStarted`: if the peer could not be reached or had no capacity.
    /// - `Unknown`: if the request is idempotent, and the peer was lost or the deadline passed.
    /// - `Finished`: never.
    ///
    /// The ledger decides separately whether an episode is attempted again.
    #[must_use]
    pub fn may_resend(&self, idempotent: bool) -> bool {
        match self.execution() {
            Execution::NotStarted => matches!(self.code(), Code::Unavailable | Code::ResourceExhausted),
            Execution::Unknown => idempotent && matches!(self.code(), Code::Unavailable | Code::DeadlineExceeded),
            Execution::Finished => false,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_link(f, &self.0.subject, &self.0.message)?;
        let mut source = std::error::Error::source(self);
        let mut said = String::new();
        while let Some(cause) = source {
            let text = cause.to_string();
            // Wrapping errors often repeat the text of their cause.
            if !self.0.message.contains(&text) && !said.contains(&text) {
                write!(f, ": {text}")?;
                said = text;
            }
            source = cause.source();
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({}, {}: {self})", self.code().as_str(), self.execution().as_str())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

/// For a conversion that cannot fail, where one that can fail is taken as well.
impl From<Infallible> for Error {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

/// For errors of libraries that erase their types, such as tower's layers: an SDK error inside is returned unchanged, and any other becomes the
/// cause of an `Internal` error that may have run (`Unknown`).
impl From<Box<dyn std::error::Error + Send + Sync>> for Error {
    fn from(error: Box<dyn std::error::Error + Send + Sync>) -> Self {
        match error.downcast::<Self>() {
            Ok(own) => *own,
            Err(other) => Self::unknown(Code::Internal, "").caused_by(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_class_holds() {
        let inner = Error::internal("the tool broke").or_class(FailureClass::ToolError);
        let outer = Error::internal("the call failed").caused_by(inner).or_class(FailureClass::ModelError);
        assert_eq!(outer.class(), Some(FailureClass::ToolError));
        assert_eq!(outer.failure_class(), FailureClass::ToolError);
        assert_eq!(Error::internal("x").class(), None);
        assert_eq!(Error::internal("x").failure_class(), FailureClass::AgentRunError);
    }

    #[test]
    fn a_request_that_was_served_with_a_failed_call_has_run() {
        let unreachable = || Error::not_started(Code::Unavailable, "connection refused");
        let served = unreachable().of_nested_call().of_served_request();
        assert_eq!((served.code(), served.execution()), (Code::Unavailable, Execution::Finished));
        assert_eq!(served.failure_class(), FailureClass::TransportUnreachable);
        assert!(!served.may_resend(true));
        let served = Error::invalid("a field is missing").of_nested_call().of_served_request();
        assert_eq!((served.code(), served.execution()), (Code::Internal, Execution::Finished));
        assert_eq!(served.failure_class(), FailureClass::AgentRunError);
        let own = unreachable().of_served_request();
        assert_eq!(
            (own.code(), own.execution()),
            (Code::Unavailable, Execution::NotStarted),
            "the handler says so itself"
        );
    }

    #[test]
    fn a_chain_has_each_cause_once() {
        let cause = std::io::Error::other("disk full");
        let error = Error::internal("cannot write: disk full").about("append").caused_by(cause);
        let error = error.within(Execution::Finished, "POST a/run");
        assert_eq!(error.to_string(), "POST a/run: append: cannot write: disk full");
        let link = |subject: &str, message: &str| ErrorLink { subject: subject.into(), message: message.into() };
        assert_eq!(error.chain(), [link("POST a/run", ""), link("append", "cannot write: disk full")]);
    }

    #[test]
    fn an_error_names_its_subject_once() {
        let error = Error::unknown(Code::DeadlineExceeded, "too late").about("POST a/run");
        let error = error.within(Execution::Finished, "POST a/run").within(Execution::Finished, "POST b/run");
        assert_eq!(error.to_string(), "POST b/run: POST a/run: too late");
        assert_eq!((error.code(), error.execution()), (Code::DeadlineExceeded, Execution::Finished));
    }

    #[test]
    fn an_error_is_one_pointer_wide() {
        assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
    }

    #[test]
    fn what_may_be_sent_again_is_decided_by_both_facts() {
        for code in Code::ALL {
            for idempotent in [false, true] {
                let resend = |execution| Error::new(code, execution, "x").may_resend(idempotent);
                assert_eq!(resend(Execution::NotStarted), matches!(code, Code::Unavailable | Code::ResourceExhausted));
                assert_eq!(
                    resend(Execution::Unknown),
                    idempotent && matches!(code, Code::Unavailable | Code::DeadlineExceeded)
                );
                assert!(!resend(Execution::Finished));
            }
        }
    }

    #[test]
    fn names_on_the_wire_come_back_as_they_went() {
        for code in Code::ALL {
            assert_eq!(Code::from_name(code.as_str()), Some(code));
        }
    }

    #[test]
    fn the_text_has_subject_message_and_cause_once() {
        let cause = std::io::Error::other("disk full");
        let error = Error::internal("cannot write").about("append to out.jsonl").caused_by(cause);
        assert_eq!(error.to_string(), "append to out.jsonl: cannot write: disk full");
        assert_eq!(
            Error::internal("stop").caused_by(error).to_string(),
            "stop: append to out.jsonl: cannot write: disk full"
        );
    }
}
