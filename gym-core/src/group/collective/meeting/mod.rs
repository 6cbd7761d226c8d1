//! The ranks that call collective operations together.

mod seats;

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::base::error::{Code, Error, Result};
use crate::group::collective::buffer::{Buffer, Memory};
use crate::group::collective::operation::{Call, Collective, named};
use crate::group::collective::reduction::{Reduction, check_dtype};
use crate::group::layout::Rank;
use crate::message::Incarnation;
use crate::transport::Endpoint;

pub use seats::Seats;

/// The ranks of one communicator, in one epoch, as one of them sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Meeting {
    /// The name, such as `policy/data[tensor=1]`. The ranks of different meetings of an epoch have different names.
    pub name: Arc<str>,
    /// Increases whenever a rank of the group is replaced. A meeting belongs to one epoch.
    pub epoch: u64,
    /// The rank of the caller, in the group.
    pub rank: Rank,
    /// The ranks, ascending. The index of a seat is the position of its rank.
    pub seats: Arc<[Seat]>,
    /// Facts that the caller tells the other ranks when it joins, for backends on top of another one: [`Communicator::facts`](super::Communicator::facts). Empty at first.
    pub facts: Arc<str>,
    position: usize,
}

/// One rank of a group in one epoch, with what a backend needs to reach it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Seat {
    /// The rank, in the group.
    pub rank: Rank,
    /// The incarnation of the rank.
    pub incarnation: Incarnation,
    /// Where the rank serves; may be empty if the backend needs no address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub endpoints: Vec<Endpoint>,
    /// The name of the rank's machine; empty if it is unknown. Ranks of one machine can share memory.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub node: String,
}

impl Seat {
    /// Creates the seat of a rank, without endpoints and without a node.
    #[must_use]
    pub fn new(rank: Rank, incarnation: Incarnation) -> Self {
        Self { rank, incarnation, endpoints: Vec::new(), node: String::new() }
    }

    /// Sets where the rank serves.
    #[must_use]
    pub fn serving_at(mut self, endpoints: impl IntoIterator<Item = Endpoint>) -> Self {
        self.endpoints = endpoints.into_iter().collect();
        self
    }

    /// Sets the node of the rank.
    #[must_use]
    pub fn on_node(mut self, node: impl Into<String>) -> Self {
        self.node = node.into();
        self
    }
}

impl Meeting {
    /// Creates the meeting of these seats, as `rank` sees it.
    ///
    /// # Errors
    /// `InvalidArgument` if the seats do not ascend by rank, or if `rank` has none.
    pub fn new(name: impl Into<Arc<str>>, epoch: u64, rank: Rank, seats: impl Into<Arc<[Seat]>>) -> Result<Self> {
        let (name, seats) = (name.into(), seats.into());
        let invalid = |why: String| Error::invalid(why).about(format!("meeting {name} (epoch {epoch})"));
        if let Some(pair) = seats.windows(2).find(|pair| pair[0].rank >= pair[1].rank) {
            let (first, second) = (pair[0].rank, pair[1].rank);
            return Err(invalid(format!("rank {second} comes after rank {first}; sort the seats, each rank once")));
        }
        let Ok(position) = seats.binary_search_by_key(&rank, |seat| seat.rank) else {
            let ranks: Vec<Rank> = seats.iter().map(|seat| seat.rank).collect();
            return Err(invalid(format!("rank {rank} has no seat; the meeting has {}", named(&ranks))));
        };
        Ok(Self { name, epoch, rank, seats, facts: "".into(), position })
    }

    /// Sets what the caller tells the other ranks when it joins. At most a few kilobytes.
    #[must_use]
    pub fn telling(mut self, facts: impl Into<Arc<str>>) -> Self {
        self.facts = facts.into();
        self
    }

    /// Returns the position of the caller, from 0: the index of its seat.
    #[must_use]
    pub fn position(&self) -> usize {
        self.position
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.seats.len()
    }

    /// Returns the position of a rank; `None` if it has no seat.
    #[must_use]
    pub fn position_of(&self, rank: Rank) -> Option<usize> {
        self.seats.binary_search_by_key(&rank, |seat| seat.rank).ok()
    }

    /// Returns the subject of the errors of an operation: `all_reduce 3 of meeting policy/data (epoch 2)`.
    #[must_use]
    pub fn subject(&self, operation: Collective, number: u64) -> String {
        match operation {
            Collective::Send { to } => format!("send {number} to rank {to} of {self}"),
            Collective::Receive { from } => format!("receive {number} from rank {from} of {self}"),
            operation => format!("{} {number} of {self}", operation.name()),
        }
    }

    /// Rejects a meeting for which another rank has other seats, given by rank and incarnation.
    ///
    /// # Errors
    /// `FailedPrecondition`; the error names the seats that only one of them has.
    pub fn check_same_seats(&self, others: &[(Rank, Incarnation)]) -> Result<()> {
        fn text(seats: &[(Rank, Incarnation)]) -> String {
            let seats: Vec<String> =
                seats.iter().map(|(rank, incarnation)| format!("rank {rank} (incarnation {incarnation})")).collect();
            if seats.is_empty() { "nobody else".to_owned() } else { seats.join(", ") }
        }
        let own = identities(&self.seats);
        if own == others {
            return Ok(());
        }
        let only = |these: &[(Rank, Incarnation)], those: &[(Rank, Incarnation)]| -> Vec<_> {
            these.iter().copied().filter(|seat| !those.contains(seat)).collect()
        };
        let why = format!(
            "the ranks that joined before have other seats: this rank expects {}, they expect {}; every change of the seats needs a new epoch",
            text(&only(&own, others)),
            text(&only(others, &own)),
        );
        Err(Error::not_started(Code::FailedPrecondition, why))
    }

    /// Returns what the caller calls. Rejects what no backend does, so that all backends reject the same calls.
    ///
    /// # Errors
    /// - `InvalidArgument`: the named rank has no seat; the mean of integers; part of an element; a barrier with elements.
    /// - `Unimplemented`: the type is none of [`DTYPES`](crate::group::collective::reduction::DTYPES).
    pub fn check(&self, operation: Collective, buffer: &Buffer) -> Result<Call> {
        if let Some(rank) = operation.named_rank()
            && self.position_of(rank).is_none()
        {
            let ranks: Vec<Rank> = self.seats.iter().map(|seat| seat.rank).collect();
            return Err(Error::invalid(format!("rank {rank} has no seat; the meeting has {}", named(&ranks))));
        }
        check_dtype(buffer.dtype)?;
        if let Some(op) = operation.reduce_op() {
            Reduction::new(buffer.dtype, op)?;
        }
        let (bytes, size) = (buffer.bytes(), buffer.dtype.size());
        if bytes % size != 0 {
            return Err(Error::invalid(format!(
                "{bytes} bytes are no whole number of {} of {size} bytes",
                buffer.dtype
            )));
        }
        if operation == Collective::Barrier && bytes > 0 {
            return Err(Error::invalid(format!(
                "a barrier moves nothing, and the buffer has {bytes} bytes; pass an empty one"
            )));
        }
        let on_device = matches!(buffer.memory, Memory::Device(_));
        Ok(Call { operation, dtype: buffer.dtype, elements: buffer.elements(), on_device })
    }
}

/// Returns the ranks of seats with their incarnations.
#[must_use]
pub fn identities(seats: &[Seat]) -> Vec<(Rank, Incarnation)> {
    seats.iter().map(|seat| (seat.rank, seat.incarnation)).collect()
}

impl fmt::Display for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "meeting {} (epoch {})", self.name, self.epoch)
    }
}
