//! What comes from UCX.
//!
//! UCX calls back from within `progress`, and (where a worker sends to itself) from within `send`. A callback only adds to
//! the [`Inbox`], except for the common case: a message that came whole and is next is handed up at once, without a copy,
//! when the state is free.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use bytes::Bytes;

use super::berth::BerthId;
use super::peer::{Body, Message};
use super::state::State;
use super::wire::{Kind, Prefix};
use super::{ConnectionId, Shared};
use crate::pool::Buffer;
use crate::ucx::{Arrival, EndpointKey, RawRequest, Receiver, Status};

/// What UCX has called back with, to be worked off when it has returned.
#[derive(Default)]
pub(super) struct Inbox(RefCell<VecDeque<Incoming>>);

pub(super) enum Incoming {
    Message { message: Message, origin: Origin },
    Landed { id: ConnectionId, key: u64, result: Result<Buffer, Status> },
    Failed { serial: u64, status: Status },
    Request(RawRequest),
}

/// Where a message came in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// At a peer's own worker.
    Berth(BerthId),
    /// At the worker of the networks: the endpoint to answer on, when the sender asked for that.
    Network(Option<EndpointKey>),
}

impl Origin {
    pub(super) fn berth(self) -> Option<BerthId> {
        match self {
            Self::Berth(berth) => Some(berth),
            Self::Network(_) => None,
        }
    }
}

impl Inbox {
    pub(super) fn push(&self, incoming: Incoming) {
        self.0.borrow_mut().push_back(incoming);
    }

    pub(super) fn request(&self, request: RawRequest) {
        self.push(Incoming::Request(request));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    pub(super) fn pop(&self) -> Option<Incoming> {
        self.0.borrow_mut().pop_front()
    }
}

/// What UCX gives messages to.
pub(super) struct Inbound {
    inbox: Rc<Inbox>,
    state: Weak<RefCell<State>>,
    shared: Arc<Shared>,
    berth: Option<BerthId>,
}

impl Inbound {
    /// Of a berth's worker, or that of the networks.
    pub(super) fn new(
        inbox: Rc<Inbox>,
        state: Weak<RefCell<State>>,
        shared: Arc<Shared>,
        berth: Option<BerthId>,
    ) -> Self {
        Self { inbox, state, shared, berth }
    }
}

impl Receiver for Inbound {
    fn receive(&self, header: &[u8], payload: Arrival<'_>, from: Option<EndpointKey>) {
        let origin = self.berth.map_or(Origin::Network(from), Origin::Berth);
        let Some((prefix, header)) = Prefix::decode(header) else {
            self.shared.counters.dropped_malformed.add(1);
            // An announcement must outlive this call.
            if let Arrival::Announced(announcement) = payload {
                let prefix = Prefix { receiver: ConnectionId(0), sequence: 0, kind: Kind::Urgent };
                let message = Message { prefix, header: Bytes::new(), body: Body::Announced(announcement) };
                self.inbox.push(Incoming::Message { message, origin });
            }
            return;
        };
        if let Arrival::Eager(bytes) = payload
            && matches!(prefix.kind, Kind::Parcel | Kind::Urgent)
            && let Some(state) = self.state.upgrade()
            && let Ok(mut state) = state.try_borrow_mut()
            && state.hand_up_at_once(prefix, header, bytes, self.berth)
        {
            return;
        }
        let body = match payload {
            Arrival::Eager(bytes) => Body::Here(Bytes::copy_from_slice(bytes)),
            Arrival::Announced(announcement) => Body::Announced(announcement),
        };
        let message = Message { prefix, header: Bytes::copy_from_slice(header), body };
        self.inbox.push(Incoming::Message { message, origin });
    }
}
