//! The end of a collective operation: a future, or a wait of a thread.

mod device;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::base::error::{Error, Result};
use crate::group::collective::buffer::Buffer;

pub use device::{Agreed, DevicePath, DevicePathSlot, OnDevice, Started};

/// An operation that has its place in the order, and runs whether or not anybody waits for it.
///
/// - **Dropping** it gives the buffer up, and changes nothing else. The operation keeps its place, its deadline and its cancellation, and
///   the other ranks get their results.
#[must_use = "the buffer comes back through the transfer"]
#[derive(Debug)]
pub struct Transfer(oneshot::Receiver<Moved>);

/// The end of a [`Transfer`] that its backend holds.
pub struct Completion(oneshot::Sender<Moved>);

/// The buffer of an operation that has ended, and its result. After an error, the contents of the buffer are unspecified.
#[derive(Debug)]
#[must_use]
pub struct Moved {
    /// The buffer.
    pub buffer: Buffer,
    /// The bytes that were moved, or the failure of the operation.
    pub result: Result<Moving>,
}

/// Figures of an operation that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moving {
    /// The bytes of the buffer at the beginning or at the end, whichever are more. Divided by `took`, the algorithm bandwidth of NCCL's tests.
    pub bytes: u64,
    /// The time from the call to the end.
    pub took: Duration,
}

impl Transfer {
    /// Creates a transfer, and the end that completes it.
    pub fn new() -> (Completion, Self) {
        let (sender, receiver) = oneshot::channel();
        (Completion(sender), Self(receiver))
    }

    /// Waits on a thread that may block, such as that of a worker with blocking methods.
    ///
    /// # Panics
    /// On a thread that runs async tasks; await the transfer there.
    pub fn wait(self) -> Moved {
        self.0.blocking_recv().unwrap_or_else(|_| lost())
    }
}

impl Future for Transfer {
    type Output = Moved;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Moved> {
        Pin::new(&mut self.0).poll(cx).map(|moved| moved.unwrap_or_else(|_| lost()))
    }
}

impl Completion {
    /// Completes the transfer. Drops the buffer if the transfer was dropped.
    pub fn finish(self, buffer: Buffer, result: Result<Moving>) {
        drop(self.0.send(Moved { buffer, result }));
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Completion")
    }
}

impl Moving {
    /// Creates the figures of an operation.
    #[must_use]
    pub fn new(bytes: u64, took: Duration) -> Self {
        Self { bytes, took }
    }
}

/// Only a backend that panics drops a completion without finishing it.
fn lost() -> Moved {
    Moved { buffer: Buffer::empty(), result: Err(Error::internal("the backend ended without completing the transfer")) }
}
