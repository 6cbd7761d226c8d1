//! Classification of failures by origin, infrastructure or data, with a retry budget for each origin.

use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use gym_core::{Code, Error, Result};

/// Maximum number of causes of an error that are examined; deeper causes concern something else.
const CAUSES_MAX: usize = 8;

/// The origin of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureOrigin {
    /// A replica, a connection or a deadline failed. The same input may succeed on another replica, or later.
    Infrastructure,
    /// The input or the code is wrong: it is likely to fail again.
    Data,
}

impl FailureOrigin {
    /// Determines the origin from the code of the error or, if the code is `Internal` or `Cancelled`, from its causes, up to
    /// eight levels deep. The default is [`FailureOrigin::Data`].
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

    /// Determines the origin of a failure with this HTTP status: infrastructure for 5xx, 408 and 429.
    #[must_use]
    pub fn of_status(status: u16) -> Self {
        match status {
            408 | 429 | 500..=599 => Self::Infrastructure,
            _ => Self::Data,
        }
    }
}

/// Determines the origin from one error of the chain alone.
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

/// Limits on the attempts of one piece of work, by the origin of its failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RetryBudgets {
    /// Attempts that may fail because of the infrastructure. The default is 5.
    pub infrastructure_attempts: u32,
    /// Attempts that may fail because of the data. The default is 2.
    pub data_attempts: u32,
    /// The pause after the first failure of the infrastructure, doubled after each further one. No pause follows a failure of the
    /// data. The default is 1 s.
    pub backoff_min: Duration,
    /// The longest pause. The default is 30 s.
    pub backoff_max: Duration,
}

impl Default for RetryBudgets {
    /// Returns five attempts for infrastructure failures, two for data failures, and pauses of 1 to 30 s.
    fn default() -> Self {
        Self {
            infrastructure_attempts: 5,
            data_attempts: 2,
            backoff_min: Duration::from_secs(1),
            backoff_max: Duration::from_secs(30),
        }
    }
}

/// The remaining budget of one piece of work.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    budgets: RetryBudgets,
    infrastructure: u32,
    data: u32,
}

/// The decision after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Retry after a pause.
    Again {
        /// The pause.
        after: Duration,
        /// The number of the next attempt; the first attempt is 1.
        attempt: u32,
    },
    /// The budget for failures of this origin is spent.
    Exhausted(FailureOrigin),
}

impl RetryBudget {
    /// Creates a full budget.
    #[must_use]
    pub fn new(budgets: RetryBudgets) -> Self {
        Self { budgets, infrastructure: 0, data: 0 }
    }

    /// Records a failed attempt and decides whether to retry.
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

/// A limit on the prompts that a run may skip.
#[derive(Clone, Debug)]
pub struct Skips {
    skipped: u32,
    max: u32,
}

impl Skips {
    /// Creates a limit for a run that may skip this number of prompts.
    #[must_use]
    pub fn new(max: u32) -> Self {
        Self { skipped: 0, max }
    }

    /// Skips one more prompt.
    ///
    /// # Errors
    /// `cause`, with the budget in its text, if the budget is spent.
    pub fn skip(&mut self, cause: Error) -> Result<()> {
        if self.skipped < self.max {
            self.skipped += 1;
            return Ok(());
        }
        let text = format!("the budget of {} skipped prompts is spent", self.max);
        Err(Error::new(cause.code(), cause.execution(), text).about("skip a prompt").caused_by(cause))
    }
}
