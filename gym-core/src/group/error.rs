//! Why a group call failed: the outcome of every rank, so that nobody has to ask the logs which one it was.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::batch::Payload;
use crate::context::Incarnation;
use crate::error::{Code, Error, Execution};
use crate::group::{ExitCause, RankExit};
use crate::layout::Rank;
use crate::worker::Method;

/// A group call that failed. Nothing of it is retried: whether it may be is for who knows what ran
/// ([`GroupError::may_resend`]).
pub struct GroupError(Box<Inner>);

struct Inner {
    group: String,
    method: &'static str,
    idempotent: bool,
    cause: Error,
    first: Option<Rank>,
    outcomes: Vec<RankOutcome>,
    /// Other items of the list that the call was of have been begun.
    others_begun: bool,
}

/// What a group call came to at one rank.
#[non_exhaustive]
pub struct RankOutcome {
    /// Which rank.
    pub rank: Rank,
    /// Which life of it was called.
    pub incarnation: Incarnation,
    /// How that life ended, if it ended with this call.
    pub exit: Option<Arc<RankExit>>,
    answer: Result<Answer, Error>,
}

/// A reply with its type erased; `None` of a rank that was not asked for one.
pub(crate) type Answer = Option<Arc<dyn Any + Send + Sync>>;

/// Why a rank failed, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// Its process ended.
    Died,
    /// The method returned an error, or panicked. The rank lives on.
    Exception,
    /// The deadline passed before it answered.
    Timeout,
    /// It was ended because it used more memory than it may.
    MemoryLimitExceeded,
    /// It cannot be reached, or takes no calls now.
    Unreachable,
    /// It did not get as far as taking calls.
    StartFailed,
    /// It did not run the call: no room, or the call is wrong.
    Refused,
    /// What it answered is not an answer to the call.
    BadReply,
    /// Another rank failed, or the caller left, before it answered.
    Cancelled,
}

impl RankOutcome {
    pub(crate) fn new(rank: Rank, incarnation: Incarnation, answer: Result<Answer, Error>) -> Self {
        Self { rank, incarnation, exit: None, answer }
    }

    /// What it failed with; `None` if it answered.
    #[must_use]
    pub fn error(&self) -> Option<&Error> {
        self.answer.as_ref().err()
    }

    /// Whether the call can have run at this rank.
    #[must_use]
    pub fn execution(&self) -> Execution {
        self.error().map_or(Execution::Finished, Error::execution)
    }

    /// What it answered, if it did and was asked for it; `M` is the method that was called.
    #[must_use]
    pub fn reply<M: Method>(&self) -> Option<&Payload<M::Reply>> {
        self.answer.as_ref().ok()?.as_ref()?.downcast_ref()
    }

    /// Why it failed; `None` if it answered.
    #[must_use]
    pub fn kind(&self) -> Option<FailureKind> {
        let error = self.error()?;
        if let Some(exit) = &self.exit {
            return Some(match exit.cause {
                ExitCause::Died | ExitCause::Tied | ExitCause::Stopped => FailureKind::Died,
                ExitCause::StartFailed => FailureKind::StartFailed,
                ExitCause::MemoryLimitExceeded => FailureKind::MemoryLimitExceeded,
            });
        }
        Some(match (error.code(), error.execution()) {
            (Code::DataLoss, Execution::Finished | Execution::Unknown) => FailureKind::BadReply,
            (_, Execution::Finished) => FailureKind::Exception,
            (Code::Cancelled, _) => FailureKind::Cancelled,
            (Code::DeadlineExceeded, _) => FailureKind::Timeout,
            (Code::Unavailable, _) => FailureKind::Unreachable,
            _ => FailureKind::Refused,
        })
    }
}

impl fmt::Debug for RankOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (incarnation {}): ", self.rank, self.incarnation)?;
        match (&self.answer, &self.exit) {
            (Ok(_), _) => f.write_str("answered"),
            (Err(error), Some(exit)) => write!(f, "{error:?}; it {exit}"),
            (Err(error), None) => write!(f, "{error:?}"),
        }
    }
}

impl GroupError {
    /// `first`: the rank whose failure ended the call.
    pub(crate) fn new<M: Method>(group: &str, cause: Error, first: Option<Rank>, outcomes: Vec<RankOutcome>) -> Self {
        let (method, idempotent) = (M::NAME, M::IDEMPOTENT);
        let group = group.to_owned();
        Self(Box::new(Inner { group, method, idempotent, cause, first, outcomes, others_begun: false }))
    }

    /// The error of a list, `others` of whose items have been begun beside the one that failed.
    #[must_use]
    pub(crate) fn beside(mut self, others: usize) -> Self {
        self.0.others_begun = others > 0;
        self
    }

    /// The group that was called.
    #[must_use]
    pub fn group(&self) -> &str {
        &self.0.group
    }

    /// The method that was called.
    #[must_use]
    pub fn method(&self) -> &'static str {
        self.0.method
    }

    /// What ended the call: the first rank's failure, a deadline, a caller that left, or a mistake in the call itself.
    #[must_use]
    pub fn cause(&self) -> &Error {
        &self.0.cause
    }

    /// The rank whose failure ended the call; the others were told to stop.
    #[must_use]
    pub fn first(&self) -> Option<&RankOutcome> {
        let first = self.0.first?;
        self.outcome(first)
    }

    /// Every rank that was called, ascending; none when the call was wrong before anybody was called.
    #[must_use]
    pub fn outcomes(&self) -> &[RankOutcome] {
        &self.0.outcomes
    }

    /// The outcome of that rank, if it was called.
    #[must_use]
    pub fn outcome(&self, rank: Rank) -> Option<&RankOutcome> {
        self.0.outcomes.iter().find(|outcome| outcome.rank == rank)
    }

    /// Whether any rank can have run the call: `NotStarted` if none can, `Finished` if every rank answered, else `Unknown`. Of a list of
    /// items ([`Balancer::map`](crate::Balancer::map)): `Unknown` as soon as another item than the one that failed was begun.
    #[must_use]
    pub fn execution(&self) -> Execution {
        if self.0.others_begun {
            return Execution::Unknown;
        }
        let mut executions = self.0.outcomes.iter().map(RankOutcome::execution);
        let Some(first) = executions.next() else { return self.0.cause.execution() };
        if executions.all(|other| other == first) { first } else { Execution::Unknown }
    }

    /// Whether the same call may be made again, by the rule of [`Error::may_resend`].
    #[must_use]
    pub fn may_resend(&self) -> bool {
        Error::new(self.0.cause.code(), self.execution(), "").may_resend(self.0.idempotent)
    }
}

impl fmt::Display for GroupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { group, method, cause, first, outcomes, .. } = &*self.0;
        write!(f, "call {method} of {group}: ")?;
        if let Some(rank) = first {
            write!(f, "rank {rank} failed: ")?;
        }
        write!(f, "{cause}")?;
        if let Some(exit) = self.first().and_then(|outcome| outcome.exit.as_ref()) {
            write!(f, "; it {exit}")?;
        }
        let answered = outcomes.iter().filter(|outcome| outcome.error().is_none()).count();
        match outcomes.len() {
            0 | 1 => Ok(()),
            all => write!(f, " ({answered} of {all} ranks answered)"),
        }
    }
}

impl fmt::Debug for GroupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GroupError").field(&self.to_string()).field(&self.0.outcomes).finish()
    }
}

impl std::error::Error for GroupError {}

impl From<GroupError> for Error {
    fn from(error: GroupError) -> Self {
        let (code, execution) = (error.cause().code(), error.execution());
        Self::new(code, execution, error.to_string())
    }
}
