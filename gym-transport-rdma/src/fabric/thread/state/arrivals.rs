//! Handles messages and other callbacks from UCX.

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use gym_core::{Code, Error};
use tokio::time::Instant;

use crate::fabric::handle::connection::Connection;
use crate::fabric::handle::events::{CloseReason, Disposition, EagerBytes, Payload};
use crate::fabric::handle::peer_worker::PeerWorkerId;
use crate::fabric::lanes::Lanes;
use crate::fabric::protocol::identity::ConnectionId;
use crate::fabric::protocol::prefix::{MessageKind, MessagePrefix, URGENT_BYTES_MAX, read_hello};
use crate::fabric::thread::peer::{IncomingMessage, IncomingPayload, PeerClose, Phase};
use crate::fabric::thread::state::callbacks::{Callback, CallbackQueue, Origin};
use crate::fabric::thread::state::{CloseMode, FabricState, PEER_CLOSE_TIMEOUT, UnidentifiedPeer};
use crate::memory::Buffer;
use crate::ucx::{Announcement, Endpoint, RawRequest, Status};

/// Payloads per peer on this host that are received at a time. This thread copies them itself, one after another.
/// Starting more gains nothing, and uses buffers that are no longer in the cache (a quarter slower at 1 MiB).
const SHARED_MEMORY_LANDINGS_MAX: usize = 1;

impl FabricState {
    /// Called from within UCX: delivers a complete message that is next in order. Returns `false` if it must be queued
    /// instead.
    pub(crate) fn deliver_at_once(
        &mut self,
        prefix: MessagePrefix,
        header: &[u8],
        bytes: &[u8],
        peer_worker: Option<PeerWorkerId>,
    ) -> bool {
        let Some(peer) = self.peers.get_mut(&prefix.receiver) else { return false };
        if !matches!(peer.phase, Phase::Open) || peer.peer_worker != peer_worker {
            return false;
        }
        if prefix.kind == MessageKind::Urgent && bytes.len() > URGENT_BYTES_MAX {
            return false;
        }
        if prefix.kind == MessageKind::Ordered {
            if !peer.reorder.is_next(prefix.sequence) {
                return false;
            }
            peer.reorder.pass();
        }
        self.deliver(prefix.receiver, header, PayloadSource::Borrowed(bytes));
        true
    }

    /// Processes the callbacks from UCX. Returns whether there were any.
    pub(crate) fn process_callbacks(&mut self, callbacks: &CallbackQueue) -> bool {
        let mut worked = false;
        while let Some(incoming) = callbacks.pop() {
            worked = true;
            match incoming {
                Callback::Message { message, origin } => self.message(message, origin),
                Callback::Landed { id, key, result } => self.landed(id, key, result),
                Callback::Failed { serial, status } => self.failed(serial, status),
                Callback::Request(request) => self.request(request),
            }
        }
        for (id, why) in std::mem::take(&mut self.broken) {
            worked = true;
            self.end(id, why, CloseMode::Force);
        }
        if !self.closing.is_empty() {
            self.closing.retain_mut(|closing| !closing.ended());
        }
        self.finish_ended();
        worked
    }

    fn message(&mut self, message: IncomingMessage, origin: Origin) {
        let MessagePrefix { receiver: id, sequence, kind } = message.prefix;
        if kind == MessageKind::Hello {
            return self.hello(&message, origin);
        }
        if let (MessageKind::Finished | MessageKind::WorkerDestroyed, Some(peer_worker)) = (kind, origin.peer_worker())
        {
            self.peer_workers.peer_finished(peer_worker, id, kind == MessageKind::WorkerDestroyed);
        }
        // Any peer that knows the id of a connection can write into it, but not through the peer worker of another
        // connection.
        let Some(peer) = self.peers.get_mut(&id).filter(|peer| peer.peer_worker == origin.peer_worker()) else {
            return self.shared.counters.dropped_unknown.add(1);
        };
        match peer.phase {
            Phase::Expecting { .. } | Phase::Broken => return self.shared.counters.dropped_unknown.add(1),
            Phase::Calling | Phase::Open if kind == MessageKind::Urgent && !message.may_be_urgent() => {
                let error =
                    format!("the peer sent an urgent message longer than {URGENT_BYTES_MAX} bytes, or announced it");
                return self.fail(id, Error::unknown(Code::DataLoss, error));
            }
            Phase::Calling if kind == MessageKind::Urgent => {
                if peer.early.len() < self.options.reorder_max {
                    peer.early.push(message);
                }
                return;
            }
            Phase::Open if kind == MessageKind::Urgent => return self.deliver_message(id, message),
            Phase::Closing { .. } | Phase::PeerClosing { .. }
                if matches!(kind, MessageKind::Urgent | MessageKind::Finished) =>
            {
                return;
            }
            // `Finished` and `WorkerDestroyed` abort too, because the peer's `Aborted` may have been lost.
            _ if matches!(kind, MessageKind::Aborted | MessageKind::Finished | MessageKind::WorkerDestroyed) => {
                let error = Error::unknown(Code::Unavailable, "the peer has aborted the connection");
                return self.end(id, CloseReason::Lost(error), CloseMode::Force);
            }
            Phase::Calling | Phase::Open | Phase::Closing { .. } | Phase::PeerClosing { .. } => {}
        }
        if !peer.reorder.is_next(sequence) {
            peer.connection.counters.out_of_order.add(1);
        }
        if let Err(error) = peer.reorder.hold(sequence, message.body.held_bytes(), message) {
            return self.fail(id, Error::unknown(Code::DataLoss, error.to_string()));
        }
        while let Some(message) = self.peers.get_mut(&id).and_then(|peer| peer.reorder.pop()) {
            self.deliver_in_order(id, message);
        }
    }

    /// Handles the next ordered message.
    fn deliver_in_order(&mut self, id: ConnectionId, message: IncomingMessage) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        match (message.prefix.kind, &mut peer.phase) {
            (MessageKind::Welcome, Phase::Calling) => self.open(id),
            (MessageKind::Ordered, Phase::Open) => self.deliver_message(id, message),
            (MessageKind::Close, Phase::Open) => {
                peer.phase = Phase::PeerClosing { peer_close: PeerClose::Received };
                peer.deadline = Some(Instant::now() + PEER_CLOSE_TIMEOUT);
                self.settle(id);
            }
            (MessageKind::Close, Phase::Closing { peer_close }) => {
                *peer_close = PeerClose::Received;
                self.settle(id);
            }
            (MessageKind::Closed, Phase::Closing { peer_close }) => {
                // The peer has received everything. If it waits for our `Closed` too, closing the endpoint must not
                // discard it.
                let how = if *peer_close == PeerClose::NotReceived { CloseMode::Agreed } else { CloseMode::Linger };
                self.end(id, CloseReason::Closed, how);
            }
            // This end has sent `Close` or is about to abort, so the message is not wanted any more.
            (MessageKind::Ordered, Phase::Closing { .. } | Phase::Broken) => {}
            (kind, _) => {
                let error = format!("the peer sent an unexpected {kind:?} message");
                self.fail(id, Error::unknown(Code::DataLoss, error));
            }
        }
    }

    /// Handles a hello, from an expected peer or any other.
    fn hello(&mut self, message: &IncomingMessage, origin: Origin) {
        let id = message.prefix.receiver;
        let unidentified = match origin {
            Origin::Network(Some(from)) => {
                self.unidentified_peers.iter().position(|unidentified| unidentified.endpoint.key() == from)
            }
            Origin::Network(None) | Origin::PeerWorker(_) => None,
        };
        let unidentified = unidentified.map(|at| self.unidentified_peers.swap_remove(at));
        let expected = read_hello(&message.header).zip(self.peers.get_mut(&id)).and_then(|((shown, own), peer)| {
            let Phase::Expecting { token, address } = &peer.phase else { return None };
            // A peer with a peer worker connects through it; all others connect through the listener.
            let way = peer.peer_worker == origin.peer_worker() && unidentified.is_some() == peer.peer_worker.is_none();
            // After the deadline, the address of the peer worker may refer to other memory.
            let timely = peer.deadline.is_none_or(|at| Instant::now() < at);
            (token.matches(shown) && own == peer.id && way && timely).then(|| address.clone())
        });
        let Some(address) = expected else {
            self.shared.counters.refused_tokens.add(1);
            if let Some(unidentified) = unidentified {
                self.closing.push(unidentified.endpoint.close());
            }
            return;
        };
        let way = match (unidentified, address) {
            (Some(unidentified), _) => Ok((unidentified.endpoint, unidentified.serial)),
            (None, Some((worker, address))) => {
                let (serial, failed) = self.next_serial();
                Endpoint::to_worker(&worker, &address, failed).map(|endpoint| (endpoint, serial))
            }
            (None, None) => return,
        };
        match way {
            Ok((endpoint, serial)) => {
                if let Some(peer) = self.peers.get_mut(&id) {
                    peer.endpoint = Some(endpoint);
                    peer.serial = serial;
                    peer.send(MessageKind::Welcome, &[], Bytes::new(), None, None);
                }
                self.open(id);
            }
            Err(status) => {
                let error = Error::not_started(Code::Unavailable, format!("connect to the peer's worker: {status}"));
                self.end(id, CloseReason::Lost(error), CloseMode::Force);
            }
        }
    }

    fn open(&mut self, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.phase = Phase::Open;
        peer.deadline = None;
        let description = peer.endpoint.as_ref().map(Endpoint::describe).unwrap_or_default();
        let lanes = peer.connection.lanes.get_or_init(|| Lanes::parse(&description)).clone();
        let connection = Connection(Arc::clone(&peer.connection));
        if let Err(error) = peer.notify(|events| events.opened(&connection, &lanes)) {
            return self.fail(id, error);
        }
        let (waiting, early) = (peer.take_waiting(), std::mem::take(&mut peer.early));
        for message in waiting {
            self.post(id, message);
        }
        for message in early {
            self.deliver_message(id, message);
        }
    }

    fn deliver_message(&mut self, id: ConnectionId, message: IncomingMessage) {
        let source = match message.body {
            IncomingPayload::Eager(bytes) => PayloadSource::Owned(bytes),
            IncomingPayload::Announced(announcement) => PayloadSource::Announced(announcement),
        };
        self.deliver(id, &message.header, source);
    }

    fn deliver(&mut self, id: ConnectionId, header: &[u8], source: PayloadSource<'_>) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let counters = &peer.connection.counters;
        counters.bytes_received.add(source.len() as u64);
        if let PayloadSource::Announced(_) = source { &counters.rendezvous_received } else { &counters.eager_received }
            .add(1);
        let payload = match &source {
            PayloadSource::Borrowed(bytes) => Payload::Eager(EagerBytes::Borrowed(bytes)),
            PayloadSource::Owned(bytes) => Payload::Eager(EagerBytes::Owned(bytes.clone())),
            PayloadSource::Announced(announcement) => Payload::Announced(announcement.length() as u64),
        };
        let disposition = match peer.notify(|events| events.message(header, payload)) {
            Ok(Ok(disposition)) => disposition,
            Ok(Err(error)) | Err(error) => return self.fail(id, error),
        };
        // `Done` drops an announcement, which rejects it.
        let Disposition::Land { key } = disposition else { return };
        let landed = match source {
            PayloadSource::Borrowed(bytes) => self.shared.pool.copy(bytes),
            PayloadSource::Owned(bytes) => self.shared.pool.copy(&bytes),
            PayloadSource::Announced(announcement) => {
                peer.landing.announced.push_back((key, announcement));
                return self.land(id);
            }
        };
        let outcome = landed.and_then(|bytes| peer.notify(|events| events.landed(key, bytes)));
        if let Err(error) = outcome {
            self.fail(id, error);
        }
    }

    /// Starts to receive announced payloads, as many at a time as is useful.
    fn land(&mut self, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let most = if peer.peer_worker.is_some() { SHARED_MEMORY_LANDINGS_MAX } else { usize::MAX };
        while peer.landing.in_flight < most
            && let Some((key, announcement)) = peer.landing.announced.pop_front()
        {
            let buffer = match self.shared.pool.take(announcement.length()) {
                Ok(buffer) => buffer,
                Err(error) => return self.fail(id, error),
            };
            peer.landing.in_flight += 1;
            let memory = if peer.peer_worker.is_some() { None } else { self.registrations.of(&buffer) };
            let (callbacks, operations) = (Rc::clone(&self.callbacks), Rc::clone(&peer.operations));
            announcement.fetch(buffer, memory.as_deref(), move |result| {
                // Released independently of the connection, which may have ended: its endpoint waits for this.
                drop(operations);
                callbacks.push(Callback::Landed { id, key, result });
            });
        }
    }

    fn landed(&mut self, id: ConnectionId, key: u64, result: Result<Buffer, Status>) {
        // A connection that has ended has called `ended` already; the buffer returns to the pool.
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.landing.in_flight -= 1;
        let outcome = match (result, &peer.phase) {
            (Ok(buffer), Phase::Open | Phase::PeerClosing { .. }) => {
                peer.notify(|events| events.landed(key, buffer.freeze()))
            }
            (Ok(_), _) => Ok(()),
            (Err(status), _) => Err(Error::unknown(Code::Unavailable, format!("receive a payload: {status}"))),
        };
        match outcome {
            Ok(()) => {
                // The callback may have returned a buffer to the pool that is still in the cache.
                self.land(id);
                self.settle(id);
            }
            Err(error) => self.fail(id, error),
        }
    }

    fn failed(&mut self, serial: u64, status: Status) {
        if let Some(at) = self.unidentified_peers.iter().position(|unidentified| unidentified.serial == serial) {
            self.closing.push(self.unidentified_peers.swap_remove(at).endpoint.close());
            return;
        }
        if self.stop_lingering(|lingering| lingering.serial == serial) {
            return;
        }
        let Some((id, _)) = self.peers.iter().find(|(_, peer)| peer.serial == serial) else { return };
        let id = *id;
        self.peer_lost(id, &format!("peer lost: {status}"));
    }

    /// Ends a connection whose peer is lost.
    pub(crate) fn peer_lost(&mut self, id: ConnectionId, reason: &str) {
        let Some(peer) = self.peers.get(&id) else { return };
        let lost =
            |execution: fn(Code, String) -> Error| CloseReason::Lost(execution(Code::Unavailable, reason.to_owned()));
        let why = match peer.phase {
            Phase::Expecting { .. } | Phase::Calling => lost(Error::not_started),
            Phase::Closing { .. } => CloseReason::Closed,
            Phase::PeerClosing { .. } if peer.landing.is_over() => CloseReason::ClosedByPeer,
            Phase::Open | Phase::Broken | Phase::PeerClosing { .. } => lost(Error::unknown),
        };
        self.end(id, why, CloseMode::Force);
    }

    fn request(&mut self, request: RawRequest) {
        let Some(listener) = &self.listener else { return };
        let request = listener.request(request);
        if self.unidentified_peers.len() >= self.options.unidentified_peers_max {
            return self.shared.counters.unidentified_refused.add(1);
        }
        let (serial, failed) = self.next_serial();
        let until = Instant::now() + self.options.hello_timeout;
        match Endpoint::to_request(&self.worker, request, failed) {
            Ok(endpoint) => self.unidentified_peers.push(UnidentifiedPeer { endpoint, serial, until }),
            Err(status) => tracing::debug!(%status, "a peer of the listener disconnected"),
        }
    }
}

/// A payload to deliver.
enum PayloadSource<'a> {
    Borrowed(&'a [u8]),
    Owned(Bytes),
    Announced(Announcement),
}

impl PayloadSource<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Borrowed(bytes) => bytes.len(),
            Self::Owned(bytes) => bytes.len(),
            Self::Announced(announcement) => announcement.length(),
        }
    }
}
