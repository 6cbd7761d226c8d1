//! The messages between the ranks of a meeting: a JSON head, and elements as a segment.

use gym_core::group::Rank;
use gym_core::group::collective::Call;
use gym_core::message::{read_failure, write_failure};
use gym_core::{Code, Error, Execution, Incarnation};
use serde::{Deserialize, Serialize};

/// The version of this package and of the messages. Ranks with different ones do not meet: they may add in another order.
pub(super) const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), "/2");

/// Buffers up to this size travel with the call, to every rank.
pub(super) const SMALL_BYTES: usize = 64 << 10;
/// The bytes of a chunk. It must stay in the cache while it is received, added and sent.
pub(super) const CHUNK_BYTES: usize = 256 << 10;
/// The chunks of one slice that are under way together. The second one hides the wait for the first.
pub(super) const GROUP: usize = 2;
/// The chunks that a rank may send ahead where nothing else holds it back.
pub(super) const WINDOW: usize = 8;

/// Returns the number of chunks of one sender that may wait for this rank. In the ring, a rank is at most one step for each other rank ahead of the next.
pub(super) fn chunks_max(world_size: usize) -> usize {
    WINDOW + 2 * GROUP * world_size
}

/// A message. `to` is the number of the meeting at its receiver, which the receiver gave when the sender joined; `from` is the position of the sender.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Packet {
    /// Answered with a [`Joined`] when the receiver has joined the same meeting.
    Join(Join),
    /// The call of the sender, with its elements if they are few.
    Call(CallPacket),
    /// Further elements of a call.
    Chunk(ChunkPacket),
    /// The sender has dropped its communicator, or has given up its join.
    Leave(LeavePacket),
    /// The meeting has failed. Answered with the first cause that the receiver knows.
    Abort(AbortPacket),
    /// The first rank offers memory to the others of its node. Answered with [`Fetched`].
    Offer(OfferPacket),
    /// The first rank says whether all ranks have that memory.
    Share(SharePacket),
    /// Answered with [`Called`].
    Where { to: u64, from: usize },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Join {
    pub(super) build: String,
    pub(super) name: String,
    pub(super) epoch: u64,
    pub(super) from: Rank,
    /// The number of the meeting at the sender. It is higher if the sender has given up a join and joins again.
    pub(super) id: u64,
    pub(super) seats: Vec<(Rank, Incarnation)>,
    /// Facts that the sender tells.
    pub(super) facts: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Joined {
    /// The receiver takes part under this number, and tells this of itself.
    Here(u64, String),
    /// The meeting has failed, or is over.
    Over(Cause),
    /// The receiver expects these seats.
    Otherwise(Vec<(Rank, Incarnation)>),
}

/// Which operations a message belongs to: the collective ones, or the sends to the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Stream {
    Round,
    Pair,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CallPacket {
    pub(super) to: u64,
    pub(super) from: usize,
    pub(super) stream: Stream,
    pub(super) number: u64,
    pub(super) call: Call,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ChunkPacket {
    pub(super) to: u64,
    pub(super) from: usize,
    pub(super) stream: Stream,
    pub(super) number: u64,
    /// The number of the chunk in its operation, from this sender to this receiver.
    pub(super) at: u64,
    /// Whether the answer waits until the chunk was taken, so that a sender cannot run ahead.
    pub(super) waits: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LeavePacket {
    pub(super) to: u64,
    pub(super) from: usize,
    pub(super) called: Called,
    /// The sender has not taken part under this number, and may join again.
    pub(super) gave_up: Option<u64>,
}

/// How many operations of each kind a rank has called.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Called {
    pub(super) rounds: u64,
    /// Sends to the rank that is told, and receives from it.
    pub(super) sends: u64,
    pub(super) receives: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct AbortPacket {
    pub(super) to: u64,
    pub(super) from: usize,
    pub(super) cause: Cause,
    /// Whether the receiver decides which cause was the first, and tells the other ranks.
    pub(super) decide: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct OfferPacket {
    pub(super) to: u64,
    /// The name of the socket at which the memory is.
    pub(super) name: String,
}

/// Whether a rank has got the memory, or why not.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Fetched {
    pub(super) why: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SharePacket {
    pub(super) to: u64,
    /// Why not all have it.
    pub(super) why: Option<String>,
}

/// An error on the wire.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Cause {
    code: String,
    execution: String,
    failure: String,
}

impl Cause {
    pub(super) fn of(error: &Error) -> Self {
        let (code, execution) = (error.code().as_str().to_owned(), error.execution().as_str().to_owned());
        Self { code, execution, failure: write_failure(error) }
    }

    pub(super) fn into_error(self) -> Error {
        let code = Code::from_name(&self.code).unwrap_or(Code::Internal);
        let execution = Execution::from_name(&self.execution).unwrap_or(Execution::Unknown);
        read_failure(&self.failure, code, execution)
            .unwrap_or_else(|| Error::new(code, execution, "a rank has failed, and its cause cannot be read"))
    }
}

#[cfg(test)]
mod tests {
    use gym_core::base::FailureClass;

    use super::*;

    #[test]
    fn a_cause_comes_back_whole() {
        let inner = Error::internal("disk full").about("append");
        let cause = Error::unknown(Code::DataLoss, "rank 1 is lost").about("all_reduce 0").caused_by(inner);
        let cause = cause.with_class(FailureClass::TransportPeerDrop);
        let text = serde_json::to_string(&Cause::of(&cause)).expect("JSON");
        let read = serde_json::from_str::<Cause>(&text).expect("JSON").into_error();
        assert_eq!(read.to_string(), "all_reduce 0: rank 1 is lost: append: disk full");
        assert_eq!((read.code(), read.execution(), read.class()), (cause.code(), cause.execution(), cause.class()));
    }
}
