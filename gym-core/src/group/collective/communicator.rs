//! The traits of collective operations: the calls of one rank, and a backend.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::BytesMut;

use crate::base::error::{Code, Error, Result};
use crate::group::batch::tensor::DType;
use crate::group::collective::buffer::Buffer;
use crate::group::collective::meeting::Meeting;
use crate::group::collective::operation::Collective;
use crate::group::collective::report::CollectiveReport;
use crate::group::collective::transfer::{DevicePath, Transfer};
use crate::group::layout::Rank;
use crate::message::CallContext;
use crate::transport::Handler;

/// One rank of a meeting. Object-safe, and called through [`CommunicatorExt`](crate::group::collective::CommunicatorExt).
///
/// - **Order.** The k-th collective operation of a rank meets the k-th of every other rank. The k-th send to a rank meets the k-th receive
///   of that rank from this one, and does not count among the collective operations.
/// - **Failure.** The first failure of any rank ends every transfer of every rank with that cause: a call that differs from those of the
///   other ranks (`FailedPrecondition`), a passed deadline (`DeadlineExceeded`), a cancellation (`Cancelled`), a rank that has left or is
///   lost (`Unavailable`), or [`Communicator::abort`]. Some ranks may have finished the operation that failed. The meeting stays aborted;
///   the next epoch has a new one.
/// - **Dropping** a communicator leaves the meeting. Its transfers go on. If another rank waits for one that has left, or begins to,
///   the meeting is aborted, and the cause names the rank that has left.
#[async_trait]
pub trait Communicator: fmt::Debug + Send + Sync + 'static {
    /// Returns the meeting, as this rank sees it.
    fn meeting(&self) -> &Meeting;

    /// Starts an operation on a buffer. It takes its place in the order at this call, not when the transfer is polled. Never blocks.
    ///
    /// The deadline and the cancellation of `cx` end the whole meeting, with the ranks that have not called. The transfer returns the
    /// buffer, also after an error. A call that [`Meeting::check`] or the backend rejects takes no place in the order and aborts nothing.
    fn start(&self, cx: &CallContext, operation: Collective, buffer: Buffer) -> Transfer;

    /// Returns memory of zeros for this meeting. If the ranks share memory, and there is room, it lies there, and a sum needs no copy. The default is private
    /// memory.
    fn allocate(&self, dtype: DType, elements: usize) -> Buffer {
        Buffer::host(dtype, BytesMut::zeroed(elements * dtype.size()))
    }

    /// Returns what each rank has told when it joined ([`Meeting::facts`]), by position. The default is nothing, for a backend that does not carry it.
    fn facts(&self) -> &[Arc<str>] {
        &[]
    }

    /// Sets what moves memory of devices, once, before the first operation. Without it, operations on such memory are rejected.
    ///
    /// # Errors
    /// `Unimplemented`, which is the default, if the backend moves host memory only; `AlreadyExists` if a path is set.
    fn set_device_path(&self, path: Arc<dyn DevicePath>) -> Result<()> {
        let why = format!("this communicator moves host memory only, and takes no path `{}`", path.name());
        Err(Error::not_started(Code::Unimplemented, why))
    }

    /// Ends every transfer of every rank of the meeting with `why`. Later calls end with it at once. Does nothing if the meeting has failed
    /// before: the first cause stays.
    fn abort(&self, why: Error);

    /// Waits until the meeting has failed, and returns the first cause.
    async fn closed(&self) -> Error;
}

/// A way of moving the data of collective operations.
#[async_trait]
pub trait Collectives: fmt::Debug + Send + Sync + 'static {
    /// Returns the name of the backend, such as `mem`.
    fn name(&self) -> &'static str;

    /// Joins a meeting, and waits until all of its ranks have joined. Dropping the future gives the seat up.
    ///
    /// # Errors
    /// - `DeadlineExceeded`, `Cancelled`: the error names the ranks that have not joined. The rank may join again.
    /// - `FailedPrecondition`: another rank has other seats for this name and epoch, is in a newer epoch, or has another build.
    /// - `AlreadyExists`: the rank has joined before.
    async fn join(&self, cx: &CallContext, meeting: Meeting) -> Result<Arc<dyn Communicator>>;

    /// Returns what serves the messages of other ranks at [`COLLECTIVE_ROUTE`](crate::group::COLLECTIVE_ROUTE) of the worker's host. The default is
    /// `None`, for a backend whose ranks exchange no messages.
    fn handler(&self) -> Option<Arc<dyn Handler>> {
        None
    }

    /// Returns what the operations of a rank do, and their totals. The default is an empty report, for a backend that keeps none.
    fn report(&self, _rank: Rank) -> CollectiveReport {
        CollectiveReport::default()
    }
}
