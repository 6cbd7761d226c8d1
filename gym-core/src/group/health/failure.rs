//! Whether a failure is the fleet's or the data's, and how often each is tried again.

use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use crate::base::error::{Code, Error, Result};

/// Links of a chain of causes that are looked at: deeper ones are about something else.
const CAUSES_MAX: usize = 8;

/// Whose failure it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureOrigin {
    /// The fleet's: a replica, a connection, a deadline. The same input may succeed elsewhere or later.
    Infrastructure,
    /// The input's or the code's: it is likely to fail again.
    Data,
}

impl FailureOrigin {
    /// The origin of an error by its code, and where that says nothing (`Internal`) by its causes, up to eight links. Unknown: data.
    #[must_use]
    pub fn of(error: &(dyn StdError + 'static)) -> Self {
        let mut link = Some(error);
        let causes = std::iter::from_fn(|| {
            let this = link?;
            link = this.source();
            Some(this)
        });
        causes.take(CAUSES_MAX).find_map(origin_of_cause).unwrap_or(Self::Data)
    }

    /// The origin of an answer with this HTTP status: 5xx, 408 and 429 are the fleet's.
    #[must_use]
    pub fn of_status(status: u16) -> Self {
        match status {
            408 | 429 | 500..=599 => Self::Infrastructure,
            _ => Self::Data,
        }
    }
}

/// What one link of the chain says by itself.
fn origin_of_cause(error: &(dyn StdError + 'static)) -> Option<FailureOrigin> {
    if let Some(error) = error.downcast_ref::<Error>() {
        return match error.code() {
            Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted => Some(FailureOrigin::Infrastructure),
            Code::Internal | Code::Cancelled => None,
            _ => Some(FailureOrigin::Data),
        };
    }
    let infrastructure = matches!(
        error.downcast_ref::<io::Error>()?.kind(),
        io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::NotConnected
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::TimedOut
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::OutOfMemory
    );
    infrastructure.then_some(FailureOrigin::Infrastructure)
}

/// How often one piece of work is tried, by the origin of its failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryBudgets {
    /// Attempts that may fail for the fleet's reasons.
    pub infrastructure_attempts: u32,
    /// Attempts that may fail for the data's reasons.
    pub data_attempts: u32,
    /// Pause after the first failure of the fleet; doubled after each further one. After one of the data there is none.
    pub backoff_min: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
}

impl Default for RetryBudgets {
    /// Five attempts against the fleet, two against the data, 1 to 30 s.
    fn default() -> Self {
        Self {
            infrastructure_attempts: 5,
            data_attempts: 2,
            backoff_min: Duration::from_secs(1),
            backoff_max: Duration::from_secs(30),
        }
    }
}

/// What is left of the budgets of one piece of work.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    budgets: RetryBudgets,
    infrastructure: u32,
    data: u32,
}

/// What follows from a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Try again after this pause, as a new attempt of this number (the first was 1).
    Again {
        /// How long to wait.
        after: Duration,
        /// The number of the next attempt.
        attempt: u32,
    },
    /// The budget for failures of this origin is spent.
    Exhausted(FailureOrigin),
}

impl RetryBudget {
    /// A full budget.
    #[must_use]
    pub fn new(budgets: RetryBudgets) -> Self {
        Self { budgets, infrastructure: 0, data: 0 }
    }

    /// Takes note of a failed attempt.
    pub fn failed(&mut self, origin: FailureOrigin) -> Disposition {
        let (failures, attempts_max) = match origin {
            FailureOrigin::Infrastructure => (&mut self.infrastructure, self.budgets.infrastructure_attempts),
            FailureOrigin::Data => (&mut self.data, self.budgets.data_attempts),
        };
        *failures += 1;
        if *failures >= attempts_max {
            return Disposition::Exhausted(origin);
        }
        let doublings = self.infrastructure.saturating_sub(1).min(20);
        let after = match origin {
            FailureOrigin::Infrastructure => {
                self.budgets.backoff_min.saturating_mul(1 << doublings).min(self.budgets.backoff_max)
            }
            FailureOrigin::Data => Duration::ZERO,
        };
        Disposition::Again { after, attempt: self.infrastructure + self.data + 1 }
    }
}

/// Pieces of work that a run may leave out.
#[derive(Clone, Debug)]
pub struct Skips {
    skipped: u32,
    max: u32,
}

impl Skips {
    /// A run that may leave out this many.
    #[must_use]
    pub fn new(max: u32) -> Self {
        Self { skipped: 0, max }
    }

    /// Leaves out one more.
    ///
    /// # Errors
    /// `cause`, with the budget in it, when as many are left out already as may be.
    pub fn skip(&mut self, cause: Error) -> Result<()> {
        if self.skipped < self.max {
            self.skipped += 1;
            return Ok(());
        }
        let text = format!("the budget of {} skipped prompts is spent", self.max);
        Err(Error::new(cause.code(), cause.execution(), text).about("skip a prompt").caused_by(cause))
    }
}
