//! State of one connection on the fabric's thread.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use gym_core::{Code, Error, Result};
use tokio::time::Instant;

use crate::fabric::handle::connection::{ConnectionShared, connection_ended};
use crate::fabric::handle::events::ConnectionEvents;
use crate::fabric::handle::message::{ActiveMessage, Delivery, SentCallback, finish};
use crate::fabric::handle::peer_worker::PeerWorkerId;
use crate::fabric::protocol::identity::{ConnectionId, Token};
use crate::fabric::protocol::prefix::{MESSAGE_ID, MessageKind, MessagePrefix, URGENT_BYTES_MAX};
use crate::fabric::protocol::reorder::ReorderBuffer;
use crate::fabric::thread::operations::PendingOperations;
use crate::ucx::{Announcement, Endpoint, ErrorMode, Memory, Outgoing, Protocol, Worker};

/// Phase of a connection.
pub(crate) enum Phase {
    /// The answering end waits for a hello. Over shared memory, `address` holds our worker and the address of the
    /// peer's worker.
    Expecting { token: Token, address: Option<(Rc<Worker>, Bytes)> },
    /// The calling end waits for the welcome.
    Calling,
    /// The connection is established at both ends.
    Open,
    /// This end has sent `Close`, after everything posted before, and waits until the peer confirms that all of it has
    /// arrived.
    Closing { peer_close: PeerClose },
    /// The peer has sent `Close`.
    PeerClosing { peer_close: PeerClose },
    /// The connection failed and ends as soon as UCX has returned.
    Broken,
}

/// Progress of the peer's `Close`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerClose {
    /// `Close` has not arrived.
    NotReceived,
    /// `Close` has arrived; a payload that was announced before is still being received.
    Received,
    /// This end has confirmed that everything has arrived.
    Acknowledged,
}

/// A message that has arrived, possibly out of order.
pub(crate) struct IncomingMessage {
    pub(crate) prefix: MessagePrefix,
    pub(crate) header: Bytes,
    pub(crate) body: IncomingPayload,
}

impl IncomingMessage {
    /// Whether this can be an urgent message: short, and eager. Peers that run this crate send no others.
    pub(crate) fn may_be_urgent(&self) -> bool {
        matches!(&self.body, IncomingPayload::Eager(bytes) if bytes.len() <= URGENT_BYTES_MAX)
    }
}

pub(crate) enum IncomingPayload {
    Eager(Bytes),
    Announced(Announcement),
}

impl IncomingPayload {
    /// Bytes of memory that the payload occupies here.
    pub(crate) fn held_bytes(&self) -> usize {
        match self {
            Self::Eager(bytes) => bytes.len(),
            Self::Announced(_) => 0,
        }
    }
}

/// Options of the fabric that apply to one connection.
#[derive(Clone, Copy)]
pub(crate) struct ConnectionLimits {
    pub(crate) reorder_max: usize,
    pub(crate) reorder_bytes_max: usize,
    pub(crate) rendezvous_bytes: Option<usize>,
}

/// Announced payloads that are to be received.
#[derive(Default)]
pub(crate) struct PendingLandings {
    /// Payloads that are not being received yet, with their keys.
    pub(crate) announced: VecDeque<(u64, Announcement)>,
    /// Number of payloads that are being received.
    pub(crate) in_flight: usize,
}

impl PendingLandings {
    pub(crate) fn is_over(&self) -> bool {
        self.in_flight == 0 && self.announced.is_empty()
    }
}

/// State of one connection.
pub(crate) struct PeerConnection {
    pub(crate) connection: Arc<ConnectionShared>,
    pub(crate) events: Arc<dyn ConnectionEvents>,
    pub(crate) id: ConnectionId,
    /// Dedicated worker of a connection over shared memory.
    pub(crate) peer_worker: Option<PeerWorkerId>,
    pub(crate) phase: Phase,
    /// Deadline of the phase.
    pub(crate) deadline: Option<Instant>,
    pub(crate) endpoint: Option<Endpoint>,
    /// Identifies the endpoint when UCX reports its failure.
    pub(crate) serial: u64,
    pub(crate) reorder: ReorderBuffer<IncomingMessage>,
    pub(crate) operations: Rc<PendingOperations>,
    pub(crate) landing: PendingLandings,
    limits: ConnectionLimits,
    next_sequence: u64,
    /// Messages posted before the connection was open.
    waiting: VecDeque<ActiveMessage>,
    /// Urgent messages that arrived before the welcome.
    pub(crate) early: Vec<IncomingMessage>,
}

impl PeerConnection {
    pub(crate) fn new(
        connection: Arc<ConnectionShared>,
        events: Arc<dyn ConnectionEvents>,
        id: ConnectionId,
        phase: Phase,
        deadline: Instant,
        limits: ConnectionLimits,
    ) -> Self {
        Self {
            connection,
            events,
            id,
            peer_worker: None,
            phase,
            deadline: Some(deadline),
            endpoint: None,
            serial: 0,
            limits,
            reorder: ReorderBuffer::new(limits.reorder_max, limits.reorder_bytes_max),
            operations: Rc::default(),
            landing: PendingLandings::default(),
            next_sequence: 0,
            waiting: VecDeque::new(),
            early: Vec::new(),
        }
    }

    /// Sends a message, or holds it until the connection is open. `memory` returns the registration of a payload.
    pub(crate) fn post(&mut self, message: ActiveMessage, memory: impl FnOnce(&Bytes) -> Option<Rc<Memory>>) {
        match self.phase {
            Phase::Open => {
                let kind = match message.delivery {
                    Delivery::Ordered => MessageKind::Ordered,
                    Delivery::Urgent => MessageKind::Urgent,
                };
                let memory = memory(&message.payload);
                self.send(kind, &message.header, message.payload, memory.as_deref(), message.done);
            }
            Phase::Expecting { .. } | Phase::Calling => self.waiting.push_back(message),
            Phase::Closing { .. } | Phase::PeerClosing { .. } | Phase::Broken => {
                finish(message.done, Err(connection_ended()))
            }
        }
    }

    /// Number of messages that the peer has not received yet.
    pub(crate) fn unsent(&self) -> usize {
        self.waiting.len() + self.operations.len()
    }

    /// Takes the messages that were posted before the connection was open.
    pub(crate) fn take_waiting(&mut self) -> VecDeque<ActiveMessage> {
        std::mem::take(&mut self.waiting)
    }

    pub(crate) fn send(
        &mut self,
        kind: MessageKind,
        header: &[u8],
        payload: Bytes,
        memory: Option<&Memory>,
        done: Option<SentCallback>,
    ) {
        let Some(endpoint) = &self.endpoint else { return finish(done, Err(connection_ended())) };
        let sequence = match kind {
            MessageKind::Hello
            | MessageKind::Urgent
            | MessageKind::Aborted
            | MessageKind::Finished
            | MessageKind::WorkerDestroyed => 0,
            MessageKind::Welcome | MessageKind::Ordered | MessageKind::Close | MessageKind::Closed => {
                self.next_sequence += 1;
                self.next_sequence - 1
            }
        };
        let (header, header_bytes) = MessagePrefix { receiver: self.id, sequence, kind }.encode(header);
        let message = Outgoing {
            id: MESSAGE_ID,
            header,
            header_bytes,
            protocol: match kind {
                MessageKind::Ordered => self.protocol(payload.len()),
                _ => Protocol::Eager,
            },
            // Through a listener, the answering end responds on the endpoint that received the hello.
            reply: kind == MessageKind::Hello && endpoint.mode() == ErrorMode::Peer,
            payload,
        };
        let message_bytes = matches!(kind, MessageKind::Ordered | MessageKind::Urgent).then_some(message.payload.len());
        let operation = self.operations.begin(done);
        let (operations, connection) = (Rc::clone(&self.operations), Arc::clone(&self.connection));
        endpoint.send(message, memory, move |result| {
            if let (Ok(()), Some(bytes)) = (result, message_bytes) {
                connection.counters.messages_sent.add(1);
                connection.counters.bytes_sent.add(bytes as u64);
            }
            operations
                .end(operation, result.map_err(|status| Error::unknown(Code::Unavailable, format!("send: {status}"))));
        });
    }

    /// Sends a message without header or payload.
    pub(crate) fn send_control(&mut self, kind: MessageKind) {
        self.send(kind, &[], Bytes::new(), None, None);
    }

    /// Selects the protocol by the payload alone. UCX would include the headers, but callers rely on the exact
    /// threshold.
    fn protocol(&self, payload_bytes: usize) -> Protocol {
        match self.limits.rendezvous_bytes {
            None => Protocol::Any,
            Some(edge) if payload_bytes < edge => Protocol::Eager,
            Some(_) => Protocol::Rendezvous,
        }
    }

    /// Stops sending and delivering. Messages that were not sent yet fail.
    pub(crate) fn shut(&mut self) {
        self.connection.ended.store(true, Ordering::Release);
        for message in self.waiting.drain(..) {
            finish(message.done, Err(connection_ended()));
        }
    }

    /// Calls an event. A panic in it becomes an error of the connection.
    ///
    /// # Errors
    /// `Internal` if the event panicked.
    pub(crate) fn notify<T>(&self, event: impl FnOnce(&dyn ConnectionEvents) -> T) -> Result<T> {
        catch_unwind(AssertUnwindSafe(|| event(self.events.as_ref())))
            .map_err(|_| Error::internal("connection event callback panicked"))
    }
}
