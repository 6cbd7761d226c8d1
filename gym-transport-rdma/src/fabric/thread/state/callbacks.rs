//! Callbacks from UCX.
//!
//! UCX calls back from within `progress`, and from within `send` if a worker sends to itself. A callback only adds to
//! the [`CallbackQueue`], with one exception for the common case. A complete message that is next in order is delivered
//! at once, without a copy, if the state is not borrowed.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use bytes::Bytes;

use crate::fabric::handle::command::FabricShared;
use crate::fabric::handle::peer_worker::PeerWorkerId;
use crate::fabric::protocol::identity::ConnectionId;
use crate::fabric::protocol::prefix::{MessageKind, MessagePrefix};
use crate::fabric::thread::peer::{IncomingMessage, IncomingPayload};
use crate::fabric::thread::state::FabricState;
use crate::memory::Buffer;
use crate::ucx::{Arrival, EndpointKey, RawRequest, Receiver, Status};

/// Callbacks from UCX, processed after UCX has returned.
#[derive(Default)]
pub(crate) struct CallbackQueue(RefCell<VecDeque<Callback>>);

pub(crate) enum Callback {
    Message { message: IncomingMessage, origin: Origin },
    Landed { id: ConnectionId, key: u64, result: Result<Buffer, Status> },
    Failed { serial: u64, status: Status },
    Request(RawRequest),
}

/// The worker at which a message arrived.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    PeerWorker(PeerWorkerId),
    /// The worker for networks, with the endpoint to respond on, if the sender asked for a response.
    Network(Option<EndpointKey>),
}

impl Origin {
    pub(crate) fn peer_worker(self) -> Option<PeerWorkerId> {
        match self {
            Self::PeerWorker(peer_worker) => Some(peer_worker),
            Self::Network(_) => None,
        }
    }
}

impl CallbackQueue {
    pub(crate) fn push(&self, incoming: Callback) {
        self.0.borrow_mut().push_back(incoming);
    }

    pub(crate) fn request(&self, request: RawRequest) {
        self.push(Callback::Request(request));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    pub(crate) fn pop(&self) -> Option<Callback> {
        self.0.borrow_mut().pop_front()
    }
}

/// Receives the messages of one worker.
pub(crate) struct MessageReceiver {
    callbacks: Rc<CallbackQueue>,
    state: Weak<RefCell<FabricState>>,
    shared: Arc<FabricShared>,
    peer_worker: Option<PeerWorkerId>,
}

impl MessageReceiver {
    /// Creates the receiver of a peer worker, or of the worker for networks.
    pub(crate) fn new(
        callbacks: Rc<CallbackQueue>,
        state: Weak<RefCell<FabricState>>,
        shared: Arc<FabricShared>,
        peer_worker: Option<PeerWorkerId>,
    ) -> Self {
        Self { callbacks, state, shared, peer_worker }
    }
}

impl Receiver for MessageReceiver {
    fn receive(&self, header: &[u8], payload: Arrival<'_>, from: Option<EndpointKey>) {
        let origin = self.peer_worker.map_or(Origin::Network(from), Origin::PeerWorker);
        let Some((prefix, header)) = MessagePrefix::decode(header) else {
            self.shared.counters.dropped_malformed.add(1);
            // An announcement must outlive this call.
            if let Arrival::Announced(announcement) = payload {
                let prefix = MessagePrefix { receiver: ConnectionId(0), sequence: 0, kind: MessageKind::Urgent };
                let message =
                    IncomingMessage { prefix, header: Bytes::new(), body: IncomingPayload::Announced(announcement) };
                self.callbacks.push(Callback::Message { message, origin });
            }
            return;
        };
        if let Arrival::Eager(bytes) = payload
            && matches!(prefix.kind, MessageKind::Ordered | MessageKind::Urgent)
            && let Some(state) = self.state.upgrade()
            && let Ok(mut state) = state.try_borrow_mut()
            && state.deliver_at_once(prefix, header, bytes, self.peer_worker)
        {
            return;
        }
        let body = match payload {
            Arrival::Eager(bytes) => IncomingPayload::Eager(Bytes::copy_from_slice(bytes)),
            Arrival::Announced(announcement) => IncomingPayload::Announced(announcement),
        };
        let message = IncomingMessage { prefix, header: Bytes::copy_from_slice(header), body };
        self.callbacks.push(Callback::Message { message, origin });
    }
}
