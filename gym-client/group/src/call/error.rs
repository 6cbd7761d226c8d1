//! The error of a group call, with the outcome of every rank.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use gym_core::group::batch::Payload;
use gym_core::group::layout::Rank;
use gym_core::group::worker::Method;
use gym_core::group::{ExitCause, GroupView, RankExit};
use gym_core::message::Incarnation;
use gym_core::{Code, Error, Execution};

use crate::call::monitor::RankMonitor;
use crate::call::reach::is_silent;

/// Maximum late ranks that the text of an error describes.
const LATE_SHOWN: usize = 3;

/// The error of a group call. Failed calls are not retried; [`GroupError::may_resend`] reports whether a caller may retry.
///
/// ```
/// use gym_group::prelude::*;
/// # struct Scorer;
/// # worker! {
/// #     impl Worker for Scorer as scorer {
/// #         fn start(_: WorkerEnv, _: ()) -> Result<Self> { Ok(Self) }
/// #         shared(idempotent) async fn score(&self, _: &CallContext, call: Payload<f32>) -> Result<Payload<f32>> {
/// #             if call.value < 0.0 { return Err(Error::invalid("a negative length")); }
/// #             Ok((call.value * 2.0).into())
/// #         }
/// #     }
/// # }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// let group = InProcessGroup::start::<Scorer>("scorers", RankLayout::line(2)?, ()).await?;
/// let error = group.call(scorer::score, -1.0).await.unwrap_err();
/// assert!(error.to_string().contains("a negative length"));
/// assert!(!error.may_resend());
/// # Ok(()) }
/// ```
pub struct GroupError(Box<Inner>);

struct Inner {
    group: String,
    method: &'static str,
    idempotent: bool,
    cause: Error,
    first: Option<Rank>,
    outcomes: Vec<RankOutcome>,
    /// Other items of the same list have been started.
    others_started: bool,
    /// The call that ends ranks that hang.
    restart: Option<&'static str>,
}

/// The outcome of a group call at one rank.
#[non_exhaustive]
pub struct RankOutcome {
    /// The rank.
    pub rank: Rank,
    /// The called incarnation.
    pub incarnation: Incarnation,
    /// The exit of that incarnation, if it ended with this call.
    pub exit: Option<Arc<RankExit>>,
    /// The rank had been silent for longer than its supervisor waits.
    silent: bool,
    answer: Result<Answer, Error>,
}

/// A reply with its type erased; `None` if the rank's reply was not collected.
pub(crate) type Answer = Option<Arc<dyn Any + Send + Sync>>;

/// The reason why a rank failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// The process ended.
    Died,
    /// The method returned an error or panicked. The rank keeps running.
    Exception,
    /// The deadline passed before the rank replied.
    Timeout,
    /// The rank has sent no heartbeat for so long that it is suspect: it is stopped, hangs, or is cut off.
    Silent,
    /// The rank was ended because it exceeded its memory limit.
    MemoryLimitExceeded,
    /// The rank is unreachable or accepts no calls.
    Unreachable,
    /// The rank failed before it accepted calls.
    StartFailed,
    /// The rank rejected the call: its queue was full, or the call was invalid.
    Refused,
    /// The reply does not match the method.
    BadReply,
    /// Another rank failed, or the caller cancelled the call, before the rank replied.
    Cancelled,
}

impl RankOutcome {
    pub(crate) fn new(rank: Rank, incarnation: Incarnation, answer: Result<Answer, Error>) -> Self {
        Self { rank, incarnation, exit: None, silent: false, answer }
    }

    /// Adds what the view of the group knows of the rank.
    pub(crate) fn seen_in(mut self, view: &GroupView) -> Self {
        let (Some(member), Some(error)) = (view.member(self.rank), self.error()) else { return self };
        let (code, execution) = (error.code(), error.execution());
        if code == Code::Unavailable {
            self.exit = member.exit.clone().filter(|exit| exit.incarnation == self.incarnation.0);
        }
        self.silent = execution != Execution::Finished && is_silent(member, self.incarnation);
        self
    }

    /// Returns the error of the rank; `None` if the rank replied.
    #[must_use]
    pub fn error(&self) -> Option<&Error> {
        self.answer.as_ref().err()
    }

    /// Reports whether the call may have run at this rank.
    #[must_use]
    pub fn execution(&self) -> Execution {
        self.error().map_or(Execution::Finished, Error::execution)
    }

    /// Returns the reply, if the rank replied and its reply was collected. `M` is the called method.
    #[must_use]
    pub fn reply<M: Method>(&self) -> Option<&Payload<M::Reply>> {
        self.answer.as_ref().ok()?.as_ref()?.downcast_ref()
    }

    /// Returns the reason why the rank failed; `None` if the rank replied.
    #[must_use]
    pub fn kind(&self) -> Option<FailureKind> {
        let error = self.error()?;
        if let Some(exit) = &self.exit {
            return Some(match exit.cause {
                ExitCause::StartFailed => FailureKind::StartFailed,
                ExitCause::MemoryLimitExceeded => FailureKind::MemoryLimitExceeded,
                // It died, was stopped or ended with others.
                _ => FailureKind::Died,
            });
        }
        if self.silent {
            return Some(FailureKind::Silent);
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
    /// Creates the error of a group call; `first` is the rank whose failure ended the call.
    pub(crate) fn new<M: Method>(group: &str, cause: Error, first: Option<Rank>, outcomes: Vec<RankOutcome>) -> Self {
        let (method, idempotent) = (M::NAME, M::IDEMPOTENT);
        let group = group.to_owned();
        Self(Box::new(Inner {
            group,
            method,
            idempotent,
            cause,
            first,
            outcomes,
            others_started: false,
            restart: None,
        }))
    }

    /// Records that `others` items of the list, besides the failed one, were started.
    #[must_use]
    pub(crate) fn with_others_started(mut self, others: usize) -> Self {
        self.0.others_started = others > 0;
        self
    }

    /// Takes from the monitor of the group which call ends ranks that hang.
    #[must_use]
    pub(crate) fn with_restart(mut self, monitor: Option<&dyn RankMonitor>) -> Self {
        let hangs = self.unanswered().next().is_some();
        self.0.restart = monitor.filter(|_| hangs).and_then(RankMonitor::restart);
        self
    }

    /// Returns the name of the called group.
    #[must_use]
    pub fn group(&self) -> &str {
        &self.0.group
    }

    /// Returns the name of the called method.
    #[must_use]
    pub fn method(&self) -> &'static str {
        self.0.method
    }

    /// Returns the error that ended the call: the failure of the first rank, the deadline, a cancellation, or an invalid call.
    #[must_use]
    pub fn cause(&self) -> &Error {
        &self.0.cause
    }

    /// Returns the outcome of the rank whose failure ended the call. The other ranks were cancelled.
    #[must_use]
    pub fn first(&self) -> Option<&RankOutcome> {
        let first = self.0.first?;
        self.outcome(first)
    }

    /// Returns the outcomes of all called ranks, ascending; empty if the call was invalid and no rank was called.
    #[must_use]
    pub fn outcomes(&self) -> &[RankOutcome] {
        &self.0.outcomes
    }

    /// Returns the outcome of a rank, if it was called.
    #[must_use]
    pub fn outcome(&self, rank: Rank) -> Option<&RankOutcome> {
        self.0.outcomes.iter().find(|outcome| outcome.rank == rank)
    }

    /// Returns the ranks that had not answered when the deadline passed, and those that are silent, ascending. Their process may hang: the supervised
    /// group of `gym-client` kills and restarts them by `Group::restart_workers(cx, error.unanswered())`.
    pub fn unanswered(&self) -> impl Iterator<Item = Rank> {
        let unanswered =
            |outcome: &&RankOutcome| matches!(outcome.kind(), Some(FailureKind::Timeout | FailureKind::Silent));
        self.0.outcomes.iter().filter(unanswered).map(|outcome| outcome.rank)
    }

    /// Reports whether any rank may have run the call: `NotStarted` if none can have, `Finished` if every rank replied, otherwise
    /// `Unknown`. A list of items ([`Balancer::map`](crate::Balancer::map)) is `Unknown` as soon as another item was
    /// started.
    #[must_use]
    pub fn execution(&self) -> Execution {
        if self.0.others_started {
            return Execution::Unknown;
        }
        let mut executions = self.0.outcomes.iter().map(RankOutcome::execution);
        let Some(first) = executions.next() else { return self.0.cause.execution() };
        if executions.all(|other| other == first) { first } else { Execution::Unknown }
    }

    /// Returns `true` if the same call may be made again, by the rule of [`Error::may_resend`].
    #[must_use]
    pub fn may_resend(&self) -> bool {
        Error::new(self.0.cause.code(), self.execution(), "").may_resend(self.0.idempotent)
    }
}

impl fmt::Display for GroupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { group, method, cause, first, outcomes, restart, .. } = &*self.0;
        write!(f, "call {method} of {group}: ")?;
        if let Some(rank) = first {
            write!(f, "rank {rank} failed: ")?;
        }
        write!(f, "{cause}")?;
        if let Some(exit) = self.first().and_then(|outcome| outcome.exit.as_ref()) {
            write!(f, "; it {exit}")?;
        }
        let answered = outcomes.iter().filter(|outcome| outcome.error().is_none()).count();
        if outcomes.len() > 1 {
            write!(f, " ({answered} of {} ranks answered)", outcomes.len())?;
        }
        if first.is_some() || cause.code() != Code::DeadlineExceeded {
            return match restart {
                Some(restart) => write!(f, "; fix: kill and restart what is silent: {restart}"),
                None => Ok(()),
            };
        }
        let late = || outcomes.iter().filter(|outcome| outcome.kind() == Some(FailureKind::Timeout));
        for outcome in late().take(LATE_SHOWN) {
            let said = outcome.error().filter(|error| error.execution() == Execution::Unknown);
            if let Some(said) = said {
                write!(f, "; rank {} (incarnation {}): {}", outcome.rank, outcome.incarnation, said.message())?;
            }
        }
        match late().count().saturating_sub(LATE_SHOWN) {
            0 => {}
            others => write!(f, "; and {others} other ranks")?,
        }
        match restart {
            Some(restart) => write!(f, "; fix: raise the deadline, or kill and restart them: {restart}"),
            None => Ok(()),
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
