//! One connection, as the fabric's thread has it.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use gym_core::{Code, Error, Result};
use tokio::time::Instant;

use super::berth::BerthId;
use super::order::Order;
use super::wire::{Kind, MESSAGE_ID, Prefix};
use super::{ConnectionId, Done, Lane, Link, Parcel, PeerEvents, Token, URGENT_BYTES_MAX};
use crate::ucx::{Announcement, Endpoint, ErrorMode, Memory, Outgoing, Protocol, Worker};

/// What it is doing.
pub(super) enum Phase {
    /// The answering end awaits a hello. The worker and the peer's address are there when it comes by a berth.
    Expecting { token: Token, address: Option<(Rc<Worker>, Bytes)> },
    /// The calling end awaits the welcome.
    Calling,
    /// Both ends know each other.
    Open,
    /// We have said goodbye behind what was posted before, and wait until the peer says that all of it has come.
    Closing { peer: Goodbye },
    /// The peer has said goodbye.
    Left { peer: Goodbye },
    /// It ends as soon as UCX has returned.
    Broken,
}

/// How far the peer's goodbye is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Goodbye {
    /// It has not said it.
    NotYet,
    /// It has, and something that was announced before is still coming in.
    Said,
    /// It has, and we have told it that everything has come.
    Answered,
}

/// A message that has arrived, whose turn it is or not yet.
pub(super) struct Message {
    pub(super) prefix: Prefix,
    pub(super) header: Bytes,
    pub(super) body: Body,
}

impl Message {
    /// What a peer of ours sends outside of the order is short, and comes with its header.
    pub(super) fn may_be_urgent(&self) -> bool {
        matches!(&self.body, Body::Here(bytes) if bytes.len() <= URGENT_BYTES_MAX)
    }
}

pub(super) enum Body {
    Here(Bytes),
    Announced(Announcement),
}

impl Body {
    /// Bytes that it takes here.
    pub(super) fn held_bytes(&self) -> usize {
        match self {
            Self::Here(bytes) => bytes.len(),
            Self::Announced(_) => 0,
        }
    }
}

/// What of the fabric's options concerns one connection.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) held_max: usize,
    pub(super) held_bytes_max: usize,
    pub(super) rendezvous_bytes: Option<usize>,
}

/// Payloads that were announced and are wanted.
#[derive(Default)]
pub(super) struct Landing {
    /// They wait for their turn, with their keys.
    pub(super) announced: VecDeque<(u64, Announcement)>,
    /// On their way into our memory.
    pub(super) under_way: usize,
}

impl Landing {
    pub(super) fn is_over(&self) -> bool {
        self.under_way == 0 && self.announced.is_empty()
    }
}

/// One connection.
pub(super) struct Peer {
    pub(super) link: Arc<Link>,
    pub(super) events: Arc<dyn PeerEvents>,
    pub(super) id: ConnectionId,
    /// Over shared memory: whose worker it has for itself.
    pub(super) berth: Option<BerthId>,
    pub(super) phase: Phase,
    /// When the phase must have ended.
    pub(super) deadline: Option<Instant>,
    pub(super) endpoint: Option<Endpoint>,
    /// Names the endpoint where UCX reports its failure.
    pub(super) serial: u64,
    pub(super) order: Order<Message>,
    pub(super) sending: Rc<Sending>,
    pub(super) landing: Landing,
    limits: Limits,
    next_sequence: u64,
    /// Posted before it was open.
    waiting: VecDeque<Parcel>,
    /// Urgent messages that came before the welcome.
    pub(super) early: Vec<Message>,
}

impl Peer {
    pub(super) fn new(
        link: Arc<Link>,
        events: Arc<dyn PeerEvents>,
        id: ConnectionId,
        phase: Phase,
        deadline: Instant,
        limits: Limits,
    ) -> Self {
        Self {
            link,
            events,
            id,
            berth: None,
            phase,
            deadline: Some(deadline),
            endpoint: None,
            serial: 0,
            limits,
            order: Order::new(limits.held_max, limits.held_bytes_max),
            sending: Rc::default(),
            landing: Landing::default(),
            next_sequence: 0,
            waiting: VecDeque::new(),
            early: Vec::new(),
        }
    }

    /// Sends a parcel, or keeps it until the connection is open. `memory` finds what a payload is registered with.
    pub(super) fn post(&mut self, parcel: Parcel, memory: impl FnOnce(&Bytes) -> Option<Rc<Memory>>) {
        match self.phase {
            Phase::Open => {
                let kind = match parcel.lane {
                    Lane::Ordered => Kind::Parcel,
                    Lane::Urgent => Kind::Urgent,
                };
                let memory = memory(&parcel.payload);
                self.send(kind, &parcel.header, parcel.payload, memory.as_deref(), parcel.done);
            }
            Phase::Expecting { .. } | Phase::Calling => self.waiting.push_back(parcel),
            Phase::Closing { .. } | Phase::Left { .. } | Phase::Broken => finish(parcel.done, Err(ended_before())),
        }
    }

    /// Parcels that the peer has still to take.
    pub(super) fn unsent(&self) -> usize {
        self.waiting.len() + self.sending.len()
    }

    /// What was posted before it was open.
    pub(super) fn take_waiting(&mut self) -> VecDeque<Parcel> {
        std::mem::take(&mut self.waiting)
    }

    pub(super) fn send(
        &mut self,
        kind: Kind,
        header: &[u8],
        payload: Bytes,
        memory: Option<&Memory>,
        done: Option<Done>,
    ) {
        let Some(endpoint) = &self.endpoint else { return finish(done, Err(ended_before())) };
        let sequence = match kind {
            Kind::Hello | Kind::Urgent | Kind::Broken | Kind::Last | Kind::Destroyed => 0,
            Kind::Welcome | Kind::Parcel | Kind::Bye | Kind::Gone => {
                self.next_sequence += 1;
                self.next_sequence - 1
            }
        };
        let (header, header_bytes) = Prefix { receiver: self.id, sequence, kind }.encode(header);
        let message = Outgoing {
            id: MESSAGE_ID,
            header,
            header_bytes,
            protocol: match kind {
                Kind::Parcel => self.protocol(payload.len()),
                _ => Protocol::Eager,
            },
            // On the listener's way the answering end answers on the endpoint that the hello came from.
            reply: kind == Kind::Hello && endpoint.mode() == ErrorMode::Peer,
            payload,
        };
        let parcel_bytes = matches!(kind, Kind::Parcel | Kind::Urgent).then_some(message.payload.len());
        let operation = self.sending.begin(done);
        let (sending, link) = (Rc::clone(&self.sending), Arc::clone(&self.link));
        endpoint.send(message, memory, move |result| {
            if let (Ok(()), Some(bytes)) = (result, parcel_bytes) {
                link.counters.parcels_sent.add(1);
                link.counters.bytes_sent.add(bytes as u64);
            }
            sending
                .end(operation, result.map_err(|status| Error::unknown(Code::Unavailable, format!("send: {status}"))));
        });
    }

    /// Sends a message that is its kind alone.
    pub(super) fn say(&mut self, kind: Kind) {
        self.send(kind, &[], Bytes::new(), None, None);
    }

    /// UCX would count the headers too; a caller that was promised an edge gets it exactly.
    fn protocol(&self, payload_bytes: usize) -> Protocol {
        match self.limits.rendezvous_bytes {
            None => Protocol::Any,
            Some(edge) if payload_bytes < edge => Protocol::Eager,
            Some(_) => Protocol::Rendezvous,
        }
    }

    /// Nothing more is taken or handed up; what waits fails.
    pub(super) fn shut(&mut self) {
        self.link.ended.store(true, Ordering::Release);
        for parcel in self.waiting.drain(..) {
            finish(parcel.done, Err(ended_before()));
        }
    }

    /// Calls an event; a panic in it is the connection's error.
    pub(super) fn tell<T>(&self, event: impl FnOnce(&dyn PeerEvents) -> T) -> Result<T> {
        catch_unwind(AssertUnwindSafe(|| event(self.events.as_ref())))
            .map_err(|_| Error::internal("what handles the connection's messages panicked"))
    }
}

/// The operations of a connection that UCX has not ended.
#[derive(Default)]
pub(super) struct Sending(RefCell<(u64, HashMap<u64, Option<Done>>)>);

impl Sending {
    fn begin(&self, done: Option<Done>) -> u64 {
        let (last, operations) = &mut *self.0.borrow_mut();
        *last += 1;
        operations.insert(*last, done);
        *last
    }

    fn end(&self, operation: u64, result: Result<()>) {
        let done = self.0.borrow_mut().1.remove(&operation).flatten();
        finish(done, result);
    }

    fn len(&self) -> usize {
        self.0.borrow().1.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tells all who still wait. UCX may go on with their memory, which stays with the operations.
    pub(super) fn give_up(&self, error: impl Fn() -> Error) {
        let operations = std::mem::take(&mut self.0.borrow_mut().1);
        for done in operations.into_values() {
            finish(done, Err(error()));
        }
    }
}

/// Calls a `done`. It may be called from within UCX, which no panic may cross.
pub(super) fn finish(done: Option<Done>, result: Result<()>) {
    if let Some(done) = done
        && catch_unwind(AssertUnwindSafe(|| done(result))).is_err()
    {
        tracing::error!("what was to be told of a sent parcel panicked");
    }
}

pub(super) fn ended_before() -> Error {
    Error::not_started(Code::Unavailable, "the connection has ended")
}
