//! The error type of the SDK. An error reports what failed, and whether the peer may have run the call.
//!
//! The latter decides whether a message may be sent again; [`Error::may_resend`] is the only implementation of that rule. Whether an
//! *episode* is attempted again is a separate decision of the collector and its ledger.

use std::borrow::Cow;
use std::fmt;

/// The result type of the SDK.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error: what failed, on which subject, and whether the peer may have acted on it. One pointer wide.
pub struct Error(Box<Inner>);

struct Inner {
    code: Code,
    execution: Execution,
    subject: Cow<'static, str>,
    message: Cow<'static, str>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The kind of an error; the codes are those of gRPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Code {
    /// The request itself is wrong; sending it again cannot help.
    InvalidArgument,
    /// Nothing of that name is known.
    NotFound,
    /// It is there already, with other contents.
    AlreadyExists,
    /// The state of the peer forbids it (a lost session, a late attempt).
    FailedPrecondition,
    /// No room: a queue, a limit, a disk.
    ResourceExhausted,
    /// The peer cannot be reached, or says that it cannot serve now.
    Unavailable,
    /// The deadline passed.
    DeadlineExceeded,
    /// The caller left, or asked for the end.
    Cancelled,
    /// The peer does not offer this.
    Unimplemented,
    /// What arrived, or what is on disk, is not what was written.
    DataLoss,
    /// A defect, or a foreign server's 500.
    Internal,
}

/// Whether the peer can have run the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Execution {
    /// Refused before running, or never handed over.
    NotStarted,
    /// Handed over; no answer came.
    Unknown,
    /// It ran and answered.
    Finished,
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

    /// The code of that wire name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.as_str() == name)
    }

    /// Every code, in the order of declaration.
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

    /// The code that a complete answer with this HTTP-like status stands for.
    #[must_use]
    pub fn from_status(status: u16) -> Self {
        match status {
            404 => Self::NotFound,
            405 | 501 => Self::Unimplemented,
            408 | 504 => Self::DeadlineExceeded,
            409 => Self::AlreadyExists,
            412 => Self::FailedPrecondition,
            413 | 429 => Self::ResourceExhausted,
            499 => Self::Cancelled,
            502 | 503 => Self::Unavailable,
            400..=499 => Self::InvalidArgument,
            _ => Self::Internal,
        }
    }

    /// The HTTP-like status with which an error of this code travels.
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

    /// The execution of that wire name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::NotStarted, Self::Unknown, Self::Finished].into_iter().find(|known| known.as_str() == name)
    }
}

impl Error {
    /// An error about no particular subject; [`Error::about`] adds one.
    #[must_use]
    pub fn new(code: Code, execution: Execution, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Inner { code, execution, subject: Cow::Borrowed(""), message: message.into(), source: None }))
    }

    /// Never handed over, or refused before running.
    #[must_use]
    pub fn not_started(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(code, Execution::NotStarted, message)
    }

    /// Handed over; no answer came.
    #[must_use]
    pub fn unknown(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(code, Execution::Unknown, message)
    }

    /// It ran and answered with this.
    #[must_use]
    pub fn finished(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(code, Execution::Finished, message)
    }

    /// The request is wrong and was not run.
    #[must_use]
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::not_started(Code::InvalidArgument, message)
    }

    /// A defect on this side, or work that ran and failed for a reason of its own.
    #[must_use]
    pub fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::finished(Code::Internal, message)
    }

    /// Names what was being done and to what: `connect to policy at http://10.0.0.7:7011`.
    #[must_use]
    pub fn about(mut self, subject: impl Into<Cow<'static, str>>) -> Self {
        self.0.subject = subject.into();
        self
    }

    /// Keeps the cause.
    #[must_use]
    pub fn caused_by(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// The same error with another answer to "can the peer have run it".
    #[must_use]
    pub fn with_execution(mut self, execution: Execution) -> Self {
        self.0.execution = execution;
        self
    }

    /// What failed.
    #[must_use]
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// Whether the peer can have run it.
    #[must_use]
    pub fn execution(&self) -> Execution {
        self.0.execution
    }

    /// What was being done and to what; may be empty.
    #[must_use]
    pub fn subject(&self) -> &str {
        &self.0.subject
    }

    /// What went wrong, without the subject and the cause.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The one retry rule: whether the same *message* may be sent again.
    ///
    /// Not started: when the peer was out of reach or had no room. Unknown: when the request is idempotent as well. Finished:
    /// never. Whether an episode is attempted again is the ledger's business.
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
        if !self.0.subject.is_empty() {
            write!(f, "{}: ", self.0.subject)?;
        }
        f.write_str(&self.0.message)?;
        let mut source = std::error::Error::source(self);
        let mut said = String::new();
        while let Some(cause) = source {
            let text = cause.to_string();
            // Wrapping errors often repeat their cause; saying it twice helps nobody.
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

#[cfg(test)]
mod tests {
    use super::*;

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
