//! The operations of a communicator, for tensors.

use std::future::Future;

use bytes::BytesMut;

use crate::base::error::{Code, Error, Result};
use crate::group::batch::tensor::{DType, Tensor, bytes_of_shape};
use crate::group::collective::buffer::Buffer;
use crate::group::collective::communicator::Communicator;
use crate::group::collective::operation::{Collective, ReduceOp};
use crate::message::CallContext;

/// Collective operations on tensors in host memory, for every [`Communicator`].
///
/// Each method takes its place in the order when it is called, not when its future is polled. Dropping the future does not cancel it. A tensor
/// whose memory is its own is moved, a shared one copied ([`Buffer::from_tensor`]). After an error, a moved tensor is gone;
/// [`Communicator::start`] returns its buffer. All methods have the errors of [`Communicator`].
pub trait CommunicatorExt: Communicator {
    /// Returns the reduction of the tensors of all ranks, with the shape of this one. All have the same type and number of elements. Every
    /// rank gets the same bits.
    fn all_reduce(
        &self,
        cx: &CallContext,
        tensor: Tensor,
        op: ReduceOp,
    ) -> impl Future<Output = Result<Tensor>> + Send + use<Self> {
        in_place(self, cx, Collective::AllReduce(op), tensor)
    }

    /// Returns the elements of `root`'s tensor, with the shape of this one. All have the same type and number of elements.
    fn broadcast(
        &self,
        cx: &CallContext,
        tensor: Tensor,
        root: u32,
    ) -> impl Future<Output = Result<Tensor>> + Send + use<Self> {
        in_place(self, cx, Collective::Broadcast { root }, tensor)
    }

    /// Returns the rows of the tensors of all ranks, in rank order. The number of rows may differ, the other dimensions may not. A scalar
    /// counts as one row. Rows without elements cannot be counted, so that the result has none.
    fn all_gather(&self, cx: &CallContext, tensor: Tensor) -> impl Future<Output = Result<Tensor>> + Send + use<Self> {
        let (row_bytes, mut shape) = (tensor.row_bytes(), tensor.shape().to_vec());
        if shape.is_empty() {
            shape.push(1);
        }
        let moved = begin(self, cx, Collective::AllGather, Buffer::from_tensor(tensor));
        async move {
            let gathered = moved.await?;
            let bytes = gathered.bytes();
            shape[0] = bytes.checked_div(row_bytes).unwrap_or(0);
            if row_bytes > 0 && bytes % row_bytes != 0 {
                let why = format!(
                    "the ranks gave {bytes} bytes, and a row of this rank has {row_bytes}; only rows may differ"
                );
                return Err(Error::finished(Code::FailedPrecondition, why).about("all_gather"));
            }
            gathered.into_tensor(shape)
        }
    }

    /// Returns this rank's slice of the reduction of the tensors of all ranks, with one dimension: at position i of W, elements
    /// [i·n/W, (i+1)·n/W) of n. A slice may end within a row. [`all_gather`](Self::all_gather) puts the slices together again.
    fn reduce_scatter(
        &self,
        cx: &CallContext,
        tensor: Tensor,
        op: ReduceOp,
    ) -> impl Future<Output = Result<Tensor>> + Send + use<Self> {
        let moved = begin(self, cx, Collective::ReduceScatter(op), Buffer::from_tensor(tensor));
        async move {
            let slice = moved.await?;
            let elements = slice.elements();
            slice.into_tensor([elements])
        }
    }

    /// Sends a tensor to a rank of the meeting. Ends when the rank has received it.
    fn send(&self, cx: &CallContext, tensor: Tensor, to: u32) -> impl Future<Output = Result<()>> + Send + use<Self> {
        let moved = begin(self, cx, Collective::Send { to }, Buffer::from_tensor(tensor));
        async move { moved.await.map(drop) }
    }

    /// Receives a tensor of this type and shape from a rank of the meeting. The sender's has the same type and number of elements.
    fn receive(
        &self,
        cx: &CallContext,
        dtype: DType,
        shape: &[usize],
        from: u32,
    ) -> impl Future<Output = Result<Tensor>> + Send + use<Self> {
        let shape = shape.to_vec();
        let moved = bytes_of_shape(dtype, &shape)
            .map(|bytes| begin(self, cx, Collective::Receive { from }, Buffer::host(dtype, BytesMut::zeroed(bytes))));
        async move { moved?.await?.into_tensor(shape) }
    }

    /// Waits until every rank has called it.
    fn barrier(&self, cx: &CallContext) -> impl Future<Output = Result<()>> + Send + use<Self> {
        let moved = begin(self, cx, Collective::Barrier, Buffer::empty());
        async move { moved.await.map(drop) }
    }
}

impl<C: Communicator + ?Sized> CommunicatorExt for C {}

fn begin<C: Communicator + ?Sized>(
    communicator: &C,
    cx: &CallContext,
    operation: Collective,
    buffer: Buffer,
) -> impl Future<Output = Result<Buffer>> + Send + use<C> {
    let transfer = communicator.start(cx, operation, buffer);
    async move {
        let moved = transfer.await;
        moved.result.map(|_| moved.buffer)
    }
}

fn in_place<C: Communicator + ?Sized>(
    communicator: &C,
    cx: &CallContext,
    operation: Collective,
    tensor: Tensor,
) -> impl Future<Output = Result<Tensor>> + Send + use<C> {
    let (shape, side) = (tensor.shape().to_vec(), tensor.padding_side());
    let moved = begin(communicator, cx, operation, Buffer::from_tensor(tensor));
    async move { Ok(moved.await?.into_tensor(shape)?.with_side(side)) }
}
