//! One peer worker, from its opening until it is destroyed.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::fabric::protocol::identity::ConnectionId;
use crate::fabric::protocol::prefix::{MESSAGE_ID, MessageKind, MessagePrefix};
use crate::fabric::thread::operations::PendingOperations;
use crate::fabric::thread::peer_workers::process::PeerProcess;
use crate::ucx::{Endpoint, Outgoing, Protocol, Worker};

/// Time that a shutdown waits for a closing worker, and that a worker is kept for a peer that never connected.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time that a worker without operations of its own is kept until the peer reports that it has none either.
const FINISH_TIMEOUT: Duration = Duration::from_secs(60);

/// One peer worker.
pub(crate) struct Slot {
    pub(crate) worker: Rc<Worker>,
    pub(crate) process: PeerProcess,
    /// End of the time for which the worker is kept for a connection.
    pub(crate) until: Instant,
    /// The peer may connect to its address.
    pub(crate) advertised: Arc<AtomicBool>,
    /// The peer has reported that it has no operation in flight.
    pub(crate) peer_finished: bool,
    /// The peer's worker is destroyed.
    pub(crate) peer_destroyed: bool,
    pub(crate) stage: SlotStage,
}

/// Stage of a peer worker.
pub(crate) enum SlotStage {
    Free,
    /// No connection of this end will use it.
    Released,
    Taken(ConnectionId),
    Closing(ClosingSlot),
}

/// A peer worker whose connection has ended.
pub(crate) struct ClosingSlot {
    pub(crate) own: ConnectionId,
    pub(crate) endpoint: Option<Endpoint>,
    pub(crate) peer: ConnectionId,
    pub(crate) operations: Rc<PendingOperations>,
    pub(crate) was_open: bool,
    pub(crate) since: Instant,
    pub(crate) final_message: Rc<Cell<FinalMessage>>,
}

/// Progress of the final message of this end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FinalMessage {
    NotSent,
    InFlight,
    Sent,
}

/// Remaining state of a connection that has ended.
pub(crate) struct ClosedConnection {
    pub(crate) endpoint: Option<Endpoint>,
    pub(crate) peer: ConnectionId,
    pub(crate) operations: Rc<PendingOperations>,
    pub(crate) was_open: bool,
}

impl ClosingSlot {
    /// Whether UCX has pending operations. Each of them, in either direction, holds a reference.
    pub(crate) fn has_operations(&self) -> bool {
        Rc::strong_count(&self.operations) > 1
    }

    /// Reports that this end has no operation in flight and starts none. A connection that was never open may have no
    /// peer.
    pub(crate) fn send_final(&self) {
        let Some(endpoint) = self.endpoint.as_ref().filter(|_| self.was_open) else {
            return self.final_message.set(FinalMessage::Sent);
        };
        self.final_message.set(FinalMessage::InFlight);
        let final_message = Rc::clone(&self.final_message);
        endpoint.send(self.message(MessageKind::Finished), None, move |_| final_message.set(FinalMessage::Sent));
    }

    /// Reports that the worker is destroyed next, if the peer's queue has a free slot.
    pub(crate) fn send_destroyed(&self) {
        if let Some(endpoint) = self.endpoint.as_ref().filter(|_| self.was_open) {
            endpoint.send(self.message(MessageKind::WorkerDestroyed), None, |_| {});
        }
    }

    pub(crate) fn message(&self, kind: MessageKind) -> Outgoing {
        let (header, header_bytes) = MessagePrefix { receiver: self.peer, sequence: 0, kind }.encode(&[]);
        let (payload, protocol) = (Bytes::new(), Protocol::Eager);
        Outgoing { id: MESSAGE_ID, header, header_bytes, payload, protocol, reply: false }
    }

    pub(crate) fn has_sent_final(&self) -> bool {
        self.final_message.get() == FinalMessage::Sent
    }
}

impl Slot {
    /// Whether the peer may still connect to the worker's address, unless a connection has opened.
    pub(crate) fn may_be_used_by_peer(&self, now: Instant) -> bool {
        self.advertised.load(Ordering::Relaxed) && now < self.until + CLOSE_TIMEOUT
    }

    /// Whether the peer no longer reads or writes.
    pub(crate) fn peer_is_over(&self) -> bool {
        self.peer_destroyed || self.process.has_ended()
    }

    /// Whether neither end needs the worker any more.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        match &self.stage {
            SlotStage::Free => now >= self.until && !self.may_be_used_by_peer(now),
            SlotStage::Released => !self.may_be_used_by_peer(now),
            SlotStage::Taken(_) => false,
            SlotStage::Closing(closing) => {
                let since = now.duration_since(closing.since);
                let agreed = self.peer_finished && closing.has_sent_final();
                // Only a hello can be in flight to a peer that never connected.
                let without_hello = closing.endpoint.is_none() || since >= CLOSE_TIMEOUT;
                let unused = !closing.was_open && without_hello && !self.may_be_used_by_peer(now);
                agreed || unused || self.peer_is_over() || (!closing.has_operations() && since >= FINISH_TIMEOUT)
            }
        }
    }

    /// Whether the worker's timers are checked and a shutdown waits for it.
    pub(crate) fn is_awaited(&self, now: Instant) -> bool {
        match &self.stage {
            SlotStage::Free => true,
            SlotStage::Released => false,
            SlotStage::Taken(_) => self.process.has_ended(),
            SlotStage::Closing(closing) => self.peer_is_over() || now.duration_since(closing.since) < CLOSE_TIMEOUT,
        }
    }

    /// Whether the worker may be destroyed without agreement at the end of the fabric.
    pub(crate) fn can_be_destroyed(&self) -> bool {
        match &self.stage {
            SlotStage::Free | SlotStage::Released => true,
            SlotStage::Taken(_) => false,
            SlotStage::Closing(closing) => !closing.was_open || !closing.has_operations() || self.peer_is_over(),
        }
    }

    /// Destroys the worker. Call it only if the worker [is over](Slot::is_over) or [can be
    /// destroyed](Slot::can_be_destroyed).
    pub(crate) fn destroy(self) {
        if let SlotStage::Closing(closing) = &self.stage
            && !(self.peer_finished && closing.has_sent_final())
            && !self.peer_is_over()
        {
            closing.send_destroyed();
        }
        let Self { worker, stage, .. } = self;
        // SAFETY: the worker is destroyed only if neither end can still use the memory of its operations. Both ends
        // have reported so, or ours has no operation, or only a hello without a payload was sent. Otherwise, the peer's
        // worker is destroyed, or its process has ended. We trust the peer's reports and its process id. A false report
        // could free payloads that the peer still copies. Only a process that may read and write our memory anyway can
        // copy them.
        unsafe { worker.abandon() };
        if let SlotStage::Closing(ClosingSlot { endpoint: Some(endpoint), .. }) = stage {
            endpoint.free_callback();
        }
    }
}
