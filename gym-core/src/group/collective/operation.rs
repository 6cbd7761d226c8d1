//! The collective operations, and what the ranks of a meeting compare to notice that they call different ones.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::base::error::{Code, Error};
use crate::group::batch::tensor::DType;
use crate::group::layout::Rank;

/// Most ranks that a text lists one by one.
const NAMED_MAX: usize = 8;

/// An operation of all ranks of a meeting, or of two of them. Ranks are those of the group, not positions in the meeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Collective {
    /// Every rank gets the reduction of all buffers, which have equal lengths.
    AllReduce(ReduceOp),
    /// Every rank gets the elements of the root. All buffers have equal lengths.
    Broadcast {
        /// The rank whose elements are sent.
        root: Rank,
    },
    /// Every rank gets the elements of all ranks, in rank order. The buffers may differ in length.
    AllGather,
    /// The rank at position i of W gets elements [i·n/W, (i+1)·n/W) of the reduction of all buffers, which have n elements each.
    ReduceScatter(ReduceOp),
    /// Sends the buffer to a rank. The k-th send to a rank meets the k-th receive of that rank from this one.
    Send {
        /// The rank that receives.
        to: Rank,
    },
    /// Fills the buffer from a rank. Type and length must be those that the rank sends.
    Receive {
        /// The rank that sends.
        from: Rank,
    },
    /// Ends when every rank has called it. The buffer is empty.
    Barrier,
}

/// How a reduction joins two values. [`reduction`](crate::group::collective::reduction) has the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceOp {
    /// The sum. Integers wrap around.
    Sum,
    /// The sum divided by the number of ranks. Only for float types.
    Mean,
    /// The smallest value; NaN if a value is NaN.
    Min,
    /// The largest value; NaN if a value is NaN.
    Max,
}

/// The call of one rank: the operation, and the type, number and place of its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The operation.
    pub operation: Collective,
    /// The type of the elements.
    pub dtype: DType,
    /// The number of elements of the caller's buffer.
    pub elements: usize,
    /// Whether they are in memory of a device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_device: bool,
}

impl Collective {
    /// Returns the name of the operation, such as `all_reduce`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::Broadcast { .. } => "broadcast",
            Self::AllGather => "all_gather",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::Send { .. } => "send",
            Self::Receive { .. } => "receive",
            Self::Barrier => "barrier",
        }
    }

    /// Returns the rank that the operation names: the root, the receiver or the sender.
    #[must_use]
    pub const fn named_rank(self) -> Option<Rank> {
        match self {
            Self::Broadcast { root: rank } | Self::Send { to: rank } | Self::Receive { from: rank } => Some(rank),
            Self::AllReduce(_) | Self::AllGather | Self::ReduceScatter(_) | Self::Barrier => None,
        }
    }

    /// Returns the arithmetic of the operation, if it has one.
    #[must_use]
    pub const fn reduce_op(self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce(op) | Self::ReduceScatter(op) => Some(op),
            _ => None,
        }
    }
}

impl Call {
    /// Creates a call on host memory.
    #[must_use]
    pub const fn new(operation: Collective, dtype: DType, elements: usize) -> Self {
        Self { operation, dtype, elements, on_device: false }
    }

    /// Returns `true` if two ranks may make these calls at one place of the order; for a send and a receive, if they fit.
    #[must_use]
    pub fn agrees_with(&self, other: &Self) -> bool {
        let same_operation = match (self.operation, other.operation) {
            (Collective::Send { .. }, Collective::Receive { .. })
            | (Collective::Receive { .. }, Collective::Send { .. }) => true,
            (own, others) => own == others,
        };
        let any_length = self.operation == Collective::AllGather;
        let same_elements = any_length || self.elements == other.elements;
        same_operation && same_elements && (self.dtype, self.on_device) == (other.dtype, other.on_device)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Min => "min",
            Self::Max => "max",
        })
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::AllReduce(op) | Self::ReduceScatter(op) => write!(f, "({op})"),
            Self::Broadcast { root } => write!(f, " from rank {root}"),
            Self::Send { to } => write!(f, " to rank {to}"),
            Self::Receive { from } => write!(f, " from rank {from}"),
            Self::AllGather | Self::Barrier => Ok(()),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.operation {
            Collective::Barrier => self.operation.fmt(f),
            operation => {
                let place = if self.on_device { " on a device" } else { "" };
                write!(f, "{operation} of {} {}{place}", self.elements, self.dtype)
            }
        }
    }
}

/// Returns the error of two ranks that make different calls at one place of the order, for backends. It has no subject.
#[must_use]
pub fn different_calls(one: (Rank, Call), other: (Rank, Call)) -> Error {
    let (first, second) = if other.0 < one.0 { (other, one) } else { (one, other) };
    let why = format!(
        "rank {} calls {}, and rank {} calls {}; all ranks must make the same calls in the same order",
        first.0, first.1, second.0, second.1
    );
    Error::not_started(Code::FailedPrecondition, why)
}

/// Returns `rank 3 has` or `ranks 1, 2 have`, for the errors of backends.
#[must_use]
pub fn has(ranks: &[Rank]) -> String {
    format!("{} {}", named(ranks), if ranks.len() == 1 { "has" } else { "have" })
}

/// Returns the text of some ranks: `rank 3`, `ranks 0, 2`, or the first few and the number of the others.
#[must_use]
pub fn named(ranks: &[Rank]) -> String {
    let few: Vec<String> = ranks.iter().take(NAMED_MAX).map(ToString::to_string).collect();
    let (word, few) = (if ranks.len() == 1 { "rank" } else { "ranks" }, few.join(", "));
    match ranks.len().saturating_sub(NAMED_MAX) {
        0 => format!("{word} {few}"),
        more => format!("{word} {few} and {more} more"),
    }
}
