//! Commands from other threads to the fabric's thread, and the state that they share.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gym_core::{Code, Error, Result};
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::fabric::handle::connection::{ConnectionShared, connection_ended};
use crate::fabric::handle::events::{CloseReason, ConnectionEvents};
use crate::fabric::handle::message::{ActiveMessage, finish};
use crate::fabric::handle::peer_worker::{PeerWorker, PeerWorkerId};
use crate::fabric::handle::queue::{CommandQueue, PushError};
use crate::fabric::handle::stats::FabricCounters;
use crate::fabric::handle::target::{Connect, Expect};
use crate::fabric::options::FabricOptions;
use crate::fabric::protocol::identity::ConnectionId;
use crate::memory::Pool;
use crate::sys::LibraryInfo;

/// State that the thread and the handles share.
pub(crate) struct FabricShared {
    pub(crate) queue: CommandQueue<Command>,
    pub(crate) pool: Pool,
    pub(crate) counters: FabricCounters,
    pub(crate) ready: OnceLock<FabricInfo>,
    /// The process is exiting: the thread must not touch UCX any more.
    pub(crate) stopped: AtomicBool,
    ended: (Mutex<Option<bool>>, Condvar),
}

/// Properties of a running fabric.
pub(crate) struct FabricInfo {
    pub(crate) listen_address: Option<SocketAddr>,
    pub(crate) library: LibraryInfo,
    pub(crate) devices: Vec<String>,
}

pub(crate) enum Command {
    Open(Box<(OpenRequest, Arc<ConnectionShared>, Arc<dyn ConnectionEvents>)>),
    OpenPeerWorker(Duration, oneshot::Sender<Result<PeerWorker>>),
    /// Releases a worker that no connection will use.
    ReleasePeerWorker(PeerWorkerId),
    Post(ConnectionId, ActiveMessage),
    Close(ConnectionId, Duration),
    Shutdown(Duration),
}

/// A connection to open, and its deadline, which starts with the call.
pub(crate) enum OpenRequest {
    Expect(Expect, Instant),
    Connect(Connect, Instant),
}

impl FabricShared {
    /// Creates the state of a fabric that is about to start.
    ///
    /// # Errors
    /// If the system has no descriptor for the queue's wake-up.
    pub(crate) fn new(options: &FabricOptions) -> std::io::Result<Self> {
        Ok(Self {
            queue: CommandQueue::new(options.commands_max)?,
            pool: Pool::new(options.pool.clone()),
            counters: FabricCounters::default(),
            ready: OnceLock::new(),
            stopped: AtomicBool::new(false),
            ended: Default::default(),
        })
    }

    /// Makes the thread finish without closing anything.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.queue.wake();
    }

    /// Waits for the thread to finish. Returns whether it released everything; `None` if it is still running after
    /// `within`.
    pub(crate) fn wait_for_end(&self, within: Duration) -> Option<bool> {
        let (ended, changed) = &self.ended;
        let mut ended = ended.lock();
        changed.wait_while_for(&mut ended, |ended| ended.is_none(), within);
        *ended
    }

    /// Records that the thread has finished; `clean` if it released everything.
    pub(crate) fn end(&self, clean: bool) {
        *self.ended.0.lock() = Some(clean);
        self.ended.1.notify_all();
    }
}

impl PushError {
    pub(crate) fn into_error(self) -> Error {
        match self {
            Self::Full => Error::not_started(Code::ResourceExhausted, "the fabric's queue is full"),
            Self::Closed => Error::not_started(Code::Unavailable, "the fabric has ended"),
        }
    }
}

impl Command {
    /// Rejects the command, because the fabric has ended.
    pub(crate) fn refuse(self) {
        match self {
            Self::Post(_, message) => finish(message.done, Err(connection_ended())),
            Self::Open(open) => {
                let (_, connection, events) = *open;
                connection.ended.store(true, Ordering::Release);
                // A panicking callback must not prevent the others.
                let result = catch_unwind(AssertUnwindSafe(|| events.ended(CloseReason::Closed)));
                if result.is_err() {
                    tracing::error!("connection close callback panicked");
                }
            }
            // Dropping the reply sender notifies the caller that waits for a peer worker.
            Self::OpenPeerWorker(..) | Self::ReleasePeerWorker(_) | Self::Close(..) | Self::Shutdown(_) => {}
        }
    }
}
