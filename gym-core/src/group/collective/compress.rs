//! Gradient compression: sums of 32-bit floats that travel as bf16.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::BytesMut;
use tokio::runtime::Handle;

use crate::base::error::{Error, Result};
use crate::group::batch::tensor::DType;
use crate::group::collective::buffer::{Buffer, Memory};
use crate::group::collective::communicator::Communicator;
use crate::group::collective::meeting::Meeting;
use crate::group::collective::operation::{Collective, ReduceOp};
use crate::group::collective::reduction::Reduction;
use crate::group::collective::transfer::{DevicePath, Moved, Transfer};
use crate::message::CallContext;

/// A communicator whose sums and means of `F32` travel as `BF16`: half the bytes. Everything else is as in the communicator that it wraps.
///
/// Each rank rounds its values, the sum is made in `F32`, and it is rounded once. With x(p) the values of the W ranks, an element of the result differs
/// from the exact sum by at most 2⁻⁷ · (|x(0)| + … + |x(W−1)|), for values between 2⁻¹²⁶ and 2¹²⁷ / W in magnitude; the mean by that divided by W. All ranks
/// get the same bits. Nothing is carried over from one operation to the next.
///
/// All ranks of a meeting must wrap their communicators, or none: the others see another type.
pub struct CompressedCommunicator {
    inner: Arc<dyn Communicator>,
    runtime: Handle,
}

impl CompressedCommunicator {
    /// Wraps a communicator.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    #[must_use]
    pub fn new(inner: Arc<dyn Communicator>) -> Self {
        Self { inner, runtime: Handle::current() }
    }
}

/// Rounding to bf16 and back is what a sum of one rank does.
fn rounding() -> Reduction {
    Reduction::new(DType::Bf16, ReduceOp::Sum).expect("a type of collective operations")
}

#[async_trait]
impl Communicator for CompressedCommunicator {
    fn meeting(&self) -> &Meeting {
        self.inner.meeting()
    }

    fn start(&self, cx: &CallContext, operation: Collective, buffer: Buffer) -> Transfer {
        let adds = matches!(operation.reduce_op(), Some(ReduceOp::Sum | ReduceOp::Mean));
        let compresses = adds && buffer.dtype == DType::F32 && buffer.bytes().is_multiple_of(size_of::<f32>());
        let mut memory = match buffer.memory {
            Memory::Host(memory) if compresses => memory,
            memory => return self.inner.start(cx, operation, Buffer::new(buffer.dtype, memory)),
        };
        let mut narrow = BytesMut::zeroed(memory.len() / 2);
        rounding().finish(&memory, 1, &mut narrow);
        let moving = self.inner.start(cx, operation, Buffer::host(DType::Bf16, narrow));
        let (completion, transfer) = Transfer::new();
        self.runtime.spawn(async move {
            let Moved { buffer, result } = moving.await;
            if let (Ok(_), Some(narrow)) = (&result, buffer.host_bytes()) {
                // A reduce_scatter returns a slice.
                memory.truncate(narrow.len() * 2);
                rounding().begin(narrow, &mut memory);
            }
            completion.finish(Buffer::host(DType::F32, memory), result);
        });
        transfer
    }

    fn facts(&self) -> &[Arc<str>] {
        self.inner.facts()
    }

    fn set_device_path(&self, path: Arc<dyn DevicePath>) -> Result<()> {
        self.inner.set_device_path(path)
    }

    fn abort(&self, why: Error) {
        self.inner.abort(why);
    }

    async fn closed(&self) -> Error {
        self.inner.closed().await
    }
}

impl fmt::Debug for CompressedCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompressedCommunicator").field(&self.inner).finish()
    }
}
