//! How an operation ends that does not succeed.

use std::fmt;

use gym_core::group::Rank;
use gym_core::group::collective::{Call, different_calls, has};
use gym_core::{Code, Error};

/// Why an operation has failed. Positions are those of the segment. After every failure but
/// [`Rejected`](Self::Rejected), the segment is aborted.
#[derive(Debug)]
#[non_exhaustive]
pub enum Failure {
    /// The segment was aborted, by this rank or another one. Whoever did so knows the cause.
    Aborted,
    /// The deadline has passed, and these ranks had not come.
    Late {
        /// The positions of the ranks.
        missing: Vec<usize>,
    },
    /// Another rank makes another call at this place of the order.
    Differs {
        /// The position of this rank.
        position: usize,
        /// The call of this rank.
        own: Call,
        /// The position of the other rank, the lowest one that differs.
        other_position: usize,
        /// The call of the other rank; `None` if it is no call of this version.
        other: Option<Call>,
    },
    /// The kernel does not let the rank wait.
    System(Error),
    /// The call is invalid. It has not begun, and the rank may make another one in its place.
    Rejected(Error),
}

impl From<Failure> for Error {
    /// Positions are told as ranks: a caller whose ranks have other numbers makes its own error.
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Aborted => Self::unknown(Code::Unavailable, failure.to_string()),
            Failure::Late { .. } => Self::unknown(Code::DeadlineExceeded, failure.to_string()),
            Failure::Differs { position, own, other_position, other: Some(other) } => {
                different_calls((position as Rank, own), (other_position as Rank, other))
            }
            Failure::Differs { .. } => Self::not_started(Code::FailedPrecondition, failure.to_string()),
            Failure::System(error) | Failure::Rejected(error) => error,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Rejected(error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Aborted => f.write_str("the segment was aborted: a rank is lost, or its operation has failed"),
            Self::Late { missing } => {
                let ranks: Vec<Rank> = missing.iter().map(|position| *position as Rank).collect();
                write!(f, "the deadline has passed; {} not come", has(&ranks))
            }
            Self::Differs { position, own, other_position, other } => {
                write!(f, "rank {position} calls {own}, and rank {other_position} calls ")?;
                match other {
                    Some(call) => call.fmt(f),
                    None => f.write_str("what this version cannot read"),
                }
            }
            Self::System(error) | Self::Rejected(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Failure {}
