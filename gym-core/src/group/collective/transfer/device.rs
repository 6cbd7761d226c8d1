//! The way of device memory: it moves elements, and the communicator that it is set for does the rest.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use super::{Moved, Transfer};
use crate::base::error::{Code, Error, Result};
use crate::group::collective::buffer::{Buffer, DeviceMemory, Memory};
use crate::group::collective::cause::FirstCause;
use crate::group::collective::operation::{Call, Collective};

/// A way of moving memory of devices for one rank of a meeting, such as NCCL. [`Communicator::set_device_path`](crate::group::collective::Communicator::set_device_path)
/// takes it.
///
/// The communicator keeps the order, the deadlines and the failures, for host and device memory alike: it compares the calls of all ranks, and starts a transfer
/// here when all have called it. So no rank begins alone, and a rank that differs or never calls is named as for host memory. It waits for the transfer, and
/// aborts the path when the meeting fails. All methods return at once.
pub trait DevicePath: fmt::Debug + Send + Sync + 'static {
    /// Returns the name, such as `nccl`, for totals and logs.
    fn name(&self) -> &'static str;

    /// Rejects a call that the path cannot make. It takes no place in the order.
    ///
    /// # Errors
    /// `Unimplemented` for memory of another kind or device, and for a type that the path does not have.
    fn check(&self, call: &Call, memory: &dyn DeviceMemory) -> Result<()>;

    /// Returns what the sender of a pair tells its receiver with this call: [`Agreed::note`]. At most 64 KiB. Called for sends only.
    ///
    /// # Errors
    /// The call is rejected with it.
    fn note(&self, call: &Call) -> Result<Bytes>;

    /// Starts an operation on which the ranks have agreed. Operations of all ranks come in their order, as do the sends to one rank, and the receives from one.
    /// The transfer returns the memory when the device no longer uses it, also after an error, which ends the meeting.
    fn start(&self, agreed: Agreed, memory: Box<dyn DeviceMemory>) -> Transfer;

    /// Ends every transfer, because the meeting has failed with this cause. Nothing is started afterwards.
    fn abort(&self, cause: Error);
}

/// A call that all ranks of a meeting have made, or both of a send.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Agreed {
    /// The call of this rank.
    pub call: Call,
    /// The number of elements of each rank, by position; empty for a send and a receive, whose ranks have equal numbers.
    pub elements: Vec<usize>,
    /// The words of the sender, at the receiver of a pair; empty otherwise.
    pub note: Bytes,
}

impl Agreed {
    /// Creates the agreement on a call, for backends.
    #[must_use]
    pub fn new(call: Call, elements: Vec<usize>, note: Bytes) -> Self {
        Self { call, elements, note }
    }
}

/// The path of a communicator, for backends. Empty at first.
#[derive(Debug, Default)]
pub struct DevicePathSlot(OnceLock<Arc<dyn DevicePath>>);

impl DevicePathSlot {
    /// Sets the path.
    ///
    /// # Errors
    /// `AlreadyExists` if there is one.
    pub fn set(&self, path: Arc<dyn DevicePath>) -> Result<()> {
        self.0.set(path).map_err(|path| {
            Error::not_started(
                Code::AlreadyExists,
                format!("the communicator has a path, and takes no path `{}`", path.name()),
            )
        })
    }

    /// Takes a buffer of device memory.
    ///
    /// # Errors
    /// The buffer, if the path rejects the call, or if there is none: `backend` then moves host memory only.
    pub fn accept(&self, backend: &str, call: Call, buffer: Buffer) -> Result<OnDevice, (Buffer, Error)> {
        let (path, memory) = match (self.0.get(), buffer.memory) {
            (Some(path), Memory::Device(memory)) => (Arc::clone(path), memory),
            (_, memory) => {
                let why =
                    format!("the backend `{backend}` moves host memory only, not {memory:?}; copy it to the host");
                return Err((Buffer::new(call.dtype, memory), Error::not_started(Code::Unimplemented, why)));
            }
        };
        let checked = path.check(&call, &*memory).and_then(|()| match call.operation {
            Collective::Send { .. } => path.note(&call),
            _ => Ok(Bytes::new()),
        });
        match checked {
            Ok(note) => Ok(OnDevice { call, memory, path, note }),
            Err(error) => Err((Buffer::new(call.dtype, Memory::Device(memory)), error)),
        }
    }
}

/// A call on device memory that a path has accepted, for backends.
#[derive(Debug)]
pub struct OnDevice {
    /// The call of this rank.
    pub call: Call,
    memory: Box<dyn DeviceMemory>,
    path: Arc<dyn DevicePath>,
    note: Bytes,
}

impl OnDevice {
    /// Returns what the receiver of a send is told with the call.
    #[must_use]
    pub fn note(&self) -> &Bytes {
        &self.note
    }

    /// Returns the buffer of a call that is not started.
    #[must_use]
    pub fn into_buffer(self) -> Buffer {
        Buffer::new(self.call.dtype, Memory::Device(self.memory))
    }

    /// Starts the call, on which all ranks have agreed. `elements` and `note` are those of [`Agreed`].
    #[must_use]
    pub fn start(self, elements: Vec<usize>, note: Bytes) -> Started {
        let agreed = Agreed { call: self.call, elements, note };
        Started { transfer: self.path.start(agreed, self.memory), path: self.path }
    }
}

/// A transfer of a path that is under way, for backends.
#[derive(Debug)]
pub struct Started {
    transfer: Transfer,
    path: Arc<dyn DevicePath>,
}

impl Started {
    /// Returns the name of the path.
    #[must_use]
    pub fn path(&self) -> &'static str {
        self.path.name()
    }

    /// Waits until the transfer ends. If the meeting fails first, which `failing` waits for, aborts the path, and waits until the memory comes back. An error of the
    /// transfer itself is returned while the meeting has no cause: the backend ends the meeting with it.
    pub async fn end(self, cause: &FirstCause, failing: impl Future<Output = ()>) -> Moved {
        let mut transfer = self.transfer;
        tokio::select! {
            biased;
            moved = &mut transfer => return moved,
            () = failing => {}
        }
        self.path.abort(cause.wait().await);
        Moved { buffer: transfer.await.buffer, result: Err(cause.wait().await) }
    }
}
