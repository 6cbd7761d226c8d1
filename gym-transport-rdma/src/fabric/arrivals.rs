//! What the thread does with what has arrived.

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use gym_core::{Code, Error};
use tokio::time::Instant;

use super::berth::BerthId;
use super::inbox::{Inbox, Incoming, Origin};
use super::peer::{Body, Goodbye, Message, Phase};
use super::state::{How, LEAVE_WITHIN, State, Stranger};
use super::wire::{Kind, Prefix, read_hello};
use super::{Arrived, Connection, ConnectionId, Disposition, End, Lanes, Payload, URGENT_BYTES_MAX};
use crate::pool::Buffer;
use crate::ucx::{Announcement, Endpoint, RawRequest, Status};

/// Payloads of one peer on this host that land at a time. This thread copies them itself, one after another: more of them
/// begun gain nothing, and take buffers that are not in the cache when their turn comes (at a mebibyte, a quarter slower).
const LANDINGS_OF_A_BERTH: usize = 1;

impl State {
    /// From within UCX: hands up what came whole and is next. `false`: it must go the long way.
    pub(super) fn hand_up_at_once(
        &mut self,
        prefix: Prefix,
        header: &[u8],
        bytes: &[u8],
        berth: Option<BerthId>,
    ) -> bool {
        let Some(peer) = self.peers.get_mut(&prefix.receiver) else { return false };
        if !matches!(peer.phase, Phase::Open) || peer.berth != berth {
            return false;
        }
        if prefix.kind == Kind::Urgent && bytes.len() > URGENT_BYTES_MAX {
            return false;
        }
        if prefix.kind == Kind::Parcel {
            if !peer.order.is_next(prefix.sequence) {
                return false;
            }
            peer.order.pass();
        }
        self.hand_up(prefix.receiver, header, Given::Borrowed(bytes));
        true
    }

    /// Works off what UCX has called back with. Returns whether there was anything.
    pub(super) fn work_off(&mut self, inbox: &Inbox) -> bool {
        let mut worked = false;
        while let Some(incoming) = inbox.pop() {
            worked = true;
            match incoming {
                Incoming::Message { message, origin } => self.message(message, origin),
                Incoming::Landed { id, key, result } => self.landed(id, key, result),
                Incoming::Failed { serial, status } => self.failed(serial, status),
                Incoming::Request(request) => self.request(request),
            }
        }
        for (id, why) in std::mem::take(&mut self.broken) {
            worked = true;
            self.end(id, why, How::Force);
        }
        if !self.closing.is_empty() {
            self.closing.retain_mut(|closing| !closing.ended());
        }
        self.finish_ended();
        worked
    }

    fn message(&mut self, message: Message, origin: Origin) {
        let Prefix { receiver: id, sequence, kind } = message.prefix;
        if kind == Kind::Hello {
            return self.hello(&message, origin);
        }
        if let (Kind::Last | Kind::Destroyed, Some(berth)) = (kind, origin.berth()) {
            self.berths.peer_left(berth, id, kind == Kind::Destroyed);
        }
        // Whoever knows the id of a connection can write into it, but not from another's berth.
        let Some(peer) = self.peers.get_mut(&id).filter(|peer| peer.berth == origin.berth()) else {
            return self.shared.counters.dropped_unknown.add(1);
        };
        match peer.phase {
            Phase::Expecting { .. } | Phase::Broken => return self.shared.counters.dropped_unknown.add(1),
            Phase::Calling | Phase::Open if kind == Kind::Urgent && !message.may_be_urgent() => {
                let error = format!("an urgent parcel that is longer than {URGENT_BYTES_MAX} bytes, or announced");
                return self.break_off(id, Error::unknown(Code::DataLoss, error));
            }
            Phase::Calling if kind == Kind::Urgent => {
                if peer.early.len() < self.options.held_max {
                    peer.early.push(message);
                }
                return;
            }
            Phase::Open if kind == Kind::Urgent => return self.hand_up_message(id, message),
            Phase::Closing { .. } | Phase::Left { .. } if matches!(kind, Kind::Urgent | Kind::Last) => return,
            // What it sent to break it off can have been lost with its time.
            _ if matches!(kind, Kind::Broken | Kind::Last | Kind::Destroyed) => {
                let error = Error::unknown(Code::Unavailable, "the peer has broken the connection off");
                return self.end(id, End::Lost(error), How::Force);
            }
            Phase::Calling | Phase::Open | Phase::Closing { .. } | Phase::Left { .. } => {}
        }
        if !peer.order.is_next(sequence) {
            peer.link.counters.held.add(1);
        }
        if let Err(error) = peer.order.hold(sequence, message.body.held_bytes(), message) {
            return self.break_off(id, Error::unknown(Code::DataLoss, error.to_string()));
        }
        while let Some(message) = self.peers.get_mut(&id).and_then(|peer| peer.order.pop()) {
            self.in_turn(id, message);
        }
    }

    /// An ordered message whose turn it is.
    fn in_turn(&mut self, id: ConnectionId, message: Message) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        match (message.prefix.kind, &mut peer.phase) {
            (Kind::Welcome, Phase::Calling) => self.open(id),
            (Kind::Parcel, Phase::Open) => self.hand_up_message(id, message),
            (Kind::Bye, Phase::Open) => {
                peer.phase = Phase::Left { peer: Goodbye::Said };
                peer.deadline = Some(Instant::now() + LEAVE_WITHIN);
                self.settle(id);
            }
            (Kind::Bye, Phase::Closing { peer: goodbye }) => {
                *goodbye = Goodbye::Said;
                self.settle(id);
            }
            (Kind::Gone, Phase::Closing { peer: goodbye }) => {
                // It has all of ours. If it waits for our answer too, that must not be thrown away with the endpoint.
                let how = if *goodbye == Goodbye::NotYet { How::Done } else { How::Linger };
                self.end(id, End::Closed, how);
            }
            // We have said goodbye, or are about to break it off: nobody wants it any more.
            (Kind::Parcel, Phase::Closing { .. } | Phase::Broken) => {}
            (kind, _) => {
                let error = format!("the peer sent a {kind:?} where none belongs");
                self.break_off(id, Error::unknown(Code::DataLoss, error));
            }
        }
    }

    /// A hello: from one whom we expect, or not.
    fn hello(&mut self, message: &Message, origin: Origin) {
        let id = message.prefix.receiver;
        let stranger = match origin {
            Origin::Network(Some(from)) => self.strangers.iter().position(|stranger| stranger.endpoint.key() == from),
            Origin::Network(None) | Origin::Berth(_) => None,
        };
        let stranger = stranger.map(|at| self.strangers.swap_remove(at));
        let expected = read_hello(&message.header).zip(self.peers.get_mut(&id)).and_then(|((shown, own), peer)| {
            let Phase::Expecting { token, address } = &peer.phase else { return None };
            // Whoever was given a berth comes by it, everybody else by the listener.
            let way = peer.berth == origin.berth() && stranger.is_some() == peer.berth.is_none();
            // Past its time the address of its berth may name something else.
            let timely = peer.deadline.is_none_or(|at| Instant::now() < at);
            (token.matches(shown) && own == peer.id && way && timely).then(|| address.clone())
        });
        let Some(address) = expected else {
            self.shared.counters.refused_tokens.add(1);
            if let Some(stranger) = stranger {
                self.closing.push(stranger.endpoint.close());
            }
            return;
        };
        let way = match (stranger, address) {
            (Some(stranger), _) => Ok((stranger.endpoint, stranger.serial)),
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
                    peer.send(Kind::Welcome, &[], Bytes::new(), None, None);
                }
                self.open(id);
            }
            Err(status) => {
                let error = Error::not_started(Code::Unavailable, format!("connect back to a worker: {status}"));
                self.end(id, End::Lost(error), How::Force);
            }
        }
    }

    fn open(&mut self, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.phase = Phase::Open;
        peer.deadline = None;
        let description = peer.endpoint.as_ref().map(Endpoint::describe).unwrap_or_default();
        let lanes = peer.link.lanes.get_or_init(|| Lanes::parse(&description)).clone();
        let connection = Connection(Arc::clone(&peer.link));
        if let Err(error) = peer.tell(|events| events.opened(&connection, &lanes)) {
            return self.break_off(id, error);
        }
        let (waiting, early) = (peer.take_waiting(), std::mem::take(&mut peer.early));
        for parcel in waiting {
            self.post(id, parcel);
        }
        for message in early {
            self.hand_up_message(id, message);
        }
    }

    fn hand_up_message(&mut self, id: ConnectionId, message: Message) {
        let given = match message.body {
            Body::Here(bytes) => Given::Owned(bytes),
            Body::Announced(announcement) => Given::Announced(announcement),
        };
        self.hand_up(id, &message.header, given);
    }

    fn hand_up(&mut self, id: ConnectionId, header: &[u8], given: Given<'_>) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let counters = &peer.link.counters;
        counters.bytes_received.add(given.len() as u64);
        if let Given::Announced(_) = given { &counters.rendezvous_received } else { &counters.eager_received }.add(1);
        let payload = match &given {
            Given::Borrowed(bytes) => Payload::Here(Arrived::Borrowed(bytes)),
            Given::Owned(bytes) => Payload::Here(Arrived::Owned(bytes.clone())),
            Given::Announced(announcement) => Payload::Announced(announcement.length() as u64),
        };
        let disposition = match peer.tell(|events| events.message(header, payload)) {
            Ok(Ok(disposition)) => disposition,
            Ok(Err(error)) | Err(error) => return self.break_off(id, error),
        };
        // `Done` refuses what was announced, by dropping it.
        let Disposition::Land { key } = disposition else { return };
        let landed = match given {
            Given::Borrowed(bytes) => self.shared.pool.copy(bytes),
            Given::Owned(bytes) => self.shared.pool.copy(&bytes),
            Given::Announced(announcement) => {
                peer.landing.announced.push_back((key, announcement));
                return self.land(id);
            }
        };
        let told = landed.and_then(|bytes| peer.tell(|events| events.landed(key, bytes)));
        if let Err(error) = told {
            self.break_off(id, error);
        }
    }

    /// Has announced payloads land, as many at a time as make sense.
    fn land(&mut self, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let most = if peer.berth.is_some() { LANDINGS_OF_A_BERTH } else { usize::MAX };
        while peer.landing.under_way < most
            && let Some((key, announcement)) = peer.landing.announced.pop_front()
        {
            let buffer = match self.shared.pool.take(announcement.length()) {
                Ok(buffer) => buffer,
                Err(error) => return self.break_off(id, error),
            };
            peer.landing.under_way += 1;
            let memory = if peer.berth.is_some() { None } else { self.registered.of(&buffer) };
            let (inbox, operations) = (Rc::clone(&self.inbox), Rc::clone(&peer.sending));
            announcement.fetch(buffer, memory.as_deref(), move |result| {
                // Told apart from the connection, which may be over: its endpoint waits for this.
                drop(operations);
                inbox.push(Incoming::Landed { id, key, result });
            });
        }
    }

    fn landed(&mut self, id: ConnectionId, key: u64, result: Result<Buffer, Status>) {
        // A connection that is over has told its end; the buffer goes back.
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.landing.under_way -= 1;
        let told = match (result, &peer.phase) {
            (Ok(buffer), Phase::Open | Phase::Left { .. }) => peer.tell(|events| events.landed(key, buffer.freeze())),
            (Ok(_), _) => Ok(()),
            (Err(status), _) => Err(Error::unknown(Code::Unavailable, format!("receive a payload: {status}"))),
        };
        match told {
            Ok(()) => {
                // What was told may have given the buffer back, which is still in the cache.
                self.land(id);
                self.settle(id);
            }
            Err(error) => self.break_off(id, error),
        }
    }

    fn failed(&mut self, serial: u64, status: Status) {
        if let Some(at) = self.strangers.iter().position(|stranger| stranger.serial == serial) {
            self.closing.push(self.strangers.swap_remove(at).endpoint.close());
            return;
        }
        if self.stop_lingering(|lingering| lingering.serial == serial) {
            return;
        }
        let Some((id, _)) = self.peers.iter().find(|(_, peer)| peer.serial == serial) else { return };
        let id = *id;
        self.lose(id, &format!("peer lost: {status}"));
    }

    /// Its peer is not there any more.
    pub(super) fn lose(&mut self, id: ConnectionId, said: &str) {
        let Some(peer) = self.peers.get(&id) else { return };
        let lost = |execution: fn(Code, String) -> Error| End::Lost(execution(Code::Unavailable, said.to_owned()));
        let why = match peer.phase {
            Phase::Expecting { .. } | Phase::Calling => lost(Error::not_started),
            Phase::Closing { .. } => End::Closed,
            Phase::Left { .. } if peer.landing.is_over() => End::ClosedByPeer,
            Phase::Open | Phase::Broken | Phase::Left { .. } => lost(Error::unknown),
        };
        self.end(id, why, How::Force);
    }

    fn request(&mut self, request: RawRequest) {
        let Some(listener) = &self.listener else { return };
        let request = listener.request(request);
        if self.strangers.len() >= self.options.strangers_max {
            return self.shared.counters.refused_strangers.add(1);
        }
        let (serial, failed) = self.next_serial();
        let until = Instant::now() + self.options.hello_within;
        match Endpoint::to_request(&self.worker, request, failed) {
            Ok(endpoint) => self.strangers.push(Stranger { endpoint, serial, until }),
            Err(status) => tracing::debug!(%status, "a peer that came through the listener is gone"),
        }
    }
}

/// A payload on its way up.
enum Given<'a> {
    Borrowed(&'a [u8]),
    Owned(Bytes),
    Announced(Announcement),
}

impl Given<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Borrowed(bytes) => bytes.len(),
            Self::Owned(bytes) => bytes.len(),
            Self::Announced(announcement) => announcement.length(),
        }
    }
}
