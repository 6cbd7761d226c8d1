//! What is to leave one connection: messages in order, cut into parcels, a few of them in the fabric's hands at a time.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use gym_core::mux::{self, Greeting, Limits, ResponseHeader, Room};
use gym_core::{Code, Message, Result};

use super::inbox::Inbox;
use super::plan::Plan;
use super::pulse::{Pulse, RoundTrips};
use super::wire::{Kind, Wire};
use crate::fabric::{Connection, Done, Lane, Parcel, URGENT_BYTES_MAX};

/// Parcels of one connection that the fabric has at a time: enough to keep any network busy, and few enough that hundreds of
/// connections do not fill the fabric's queue, and that a request which is given up early can be taken back.
pub(crate) const POSTED_MAX: usize = 128;

/// What an ended connection may still say.
const CLOSE_GRACE: Duration = Duration::from_secs(1);

/// What carries parcels: a connection of a fabric.
pub(crate) trait Carrier: fmt::Debug + Send + Sync + 'static {
    fn post(&self, parcel: Parcel) -> Result<()>;

    fn close(&self, grace: Duration);
}

impl Carrier for Connection {
    fn post(&self, parcel: Parcel) -> Result<()> {
        Self::post(self, parcel)
    }

    fn close(&self, grace: Duration) {
        Self::close(self, grace);
    }
}

/// The sending half of a connection. Cheap to clone.
#[derive(Debug)]
pub(crate) struct Outbox<C = Connection>(Arc<Shared<C>>);

impl<C> Clone for Outbox<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// A connection that somebody looks at now and then.
#[derive(Debug)]
pub(crate) struct Watched<C = Connection>(Weak<Shared<C>>);

impl<C> Watched<C> {
    /// None once the connection is gone.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&C, RoundTrips) -> T) -> Option<T> {
        self.0.upgrade().map(|shared| look(&shared.carrier, shared.pulse.round_trips()))
    }
}

#[derive(Debug)]
struct Shared<C> {
    carrier: C,
    /// Where messages are cut.
    cut: usize,
    answers: Answers,
    state: Mutex<State>,
    pulse: Pulse,
}

/// What this end has to do with answers.
#[derive(Debug)]
pub(crate) enum Answers {
    /// It takes them, here: what of one has come is forgotten with its call.
    Taken(Arc<Mutex<Inbox<ResponseHeader>>>),
    /// It gives them.
    Given,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Item>,
    /// Parcels that the fabric has.
    posted: usize,
    /// Somebody is posting.
    posting: bool,
    closed: bool,
    last_call: u64,
}

/// A parcel on its way out.
#[derive(Debug)]
struct Item {
    wire: Wire,
    payload: Bytes,
    /// Given back when all parcels of the message have left.
    room: Room,
}

impl<C: Carrier> Outbox<C> {
    /// `cut`: bytes from which on a segment is sent by itself, from where it lies.
    pub(crate) fn new(carrier: C, cut: usize, answers: Answers) -> Self {
        Self(Arc::new(Shared { carrier, cut, answers, state: Mutex::default(), pulse: Pulse::new() }))
    }

    /// What the answering end says first.
    pub(crate) fn post_greeting(&self, limits: &Limits) {
        let mut payload = BytesMut::with_capacity(Greeting::BYTES);
        Greeting::of(limits).put(&mut payload);
        let wire = Wire::bare(Kind::Greeting, 0);
        self.0.state().queue.push_back(Item { wire, payload: payload.freeze(), room: Room::default() });
        self.0.pump();
    }

    /// Answers a sign of life.
    pub(crate) fn echo(&self, said: u64) {
        self.urgent(Wire::bare(Kind::Pong, said), Bytes::new());
    }

    /// An answer to a sign of life has come.
    pub(crate) fn echoed(&self, said: u64) {
        self.0.pulse.echo(said);
    }

    /// To see it from afar, without keeping it.
    pub(crate) fn watch(&self) -> Watched<C> {
        Watched(Arc::downgrade(&self.0))
    }

    fn urgent(&self, wire: Wire, payload: Bytes) {
        self.hurry(wire, payload, None);
    }

    fn hurry(&self, wire: Wire, payload: Bytes, done: Option<Done>) {
        if self.0.state().closed {
            return;
        }
        let parcel = Parcel { header: wire.write(), payload, lane: Lane::Urgent, done };
        self.0.settle(self.0.carrier.post(parcel));
    }
}

impl<C: Carrier> Shared<C> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the fabric what it may have. One thread at a time does, so that the order stays; the others leave it to that one.
    fn pump(self: &Arc<Self>) {
        loop {
            let item = {
                let mut state = self.state();
                if state.posting || state.posted >= POSTED_MAX {
                    return;
                }
                let Some(item) = state.queue.pop_front() else { return };
                state.posted += 1;
                state.posting = true;
                item
            };
            let Item { wire, payload, room } = item;
            let shared = Arc::clone(self);
            let done = move |_| {
                drop(room);
                shared.state().posted -= 1;
                shared.pump();
            };
            let parcel = Parcel { header: wire.write(), payload, lane: wire.kind.lane(), done: Some(Box::new(done)) };
            let posted = self.carrier.post(parcel);
            self.state().posting = false;
            self.settle(posted);
        }
    }

    /// A fabric that has no room for what must arrive breaks the connection; one that has ended has told everybody.
    fn settle(&self, posted: Result<()>) {
        if let Err(error) = posted
            && error.code() != Code::Unavailable
        {
            tracing::warn!(%error, "the connection is closed: its fabric takes no more");
            self.carrier.close(Duration::ZERO);
        }
    }
}

impl<C: Carrier> mux::Outbox for Outbox<C> {
    const HEADROOM: usize = 0;

    fn post_request(
        &self,
        header: BytesMut,
        message: &Message,
        room: Room,
        _crowded: bool,
        register: impl FnOnce(u64) -> Result<()>,
    ) -> Result<u64> {
        // Cut before the lock: it copies.
        let cut = Cut::new(Kind::Request, header, message, self.0.cut);
        let call = {
            let mut state = self.0.state();
            let call = state.last_call + 1;
            register(call)?;
            state.last_call = call;
            if !state.closed {
                cut.queue(call, &room, &mut state.queue);
            }
            call
        };
        self.0.pump();
        Ok(call)
    }

    fn post_response(&self, call: u64, header: BytesMut, message: &Message, room: Room, _crowded: bool) {
        let cut = Cut::new(Kind::Response, header, message, self.0.cut);
        {
            let mut state = self.0.state();
            if state.closed {
                return;
            }
            cut.queue(call, &room, &mut state.queue);
        }
        self.0.pump();
    }

    fn post_failed(&self, call: u64, mut reason: BytesMut, room: Room) {
        reason.truncate(URGENT_BYTES_MAX);
        let done = move |_| drop(room);
        self.hurry(Wire::bare(Kind::Failed, call), reason.freeze(), Some(Box::new(done)));
    }

    fn cancel(&self, call: u64, reply: Room) {
        if let Answers::Taken(inbox) = &self.0.answers {
            inbox.lock().unwrap_or_else(PoisonError::into_inner).forget(call, reply);
        }
        let (begun, taken) = {
            let mut state = self.0.state();
            if state.closed {
                return;
            }
            // Requests are queued in the order of their numbers, the parcels of each together.
            let start = state.queue.partition_point(|item| item.wire.call < call);
            let end = state.queue.partition_point(|item| item.wire.call <= call);
            let begun = state.queue.range(start..end).next().is_none_or(|item| item.wire.kind != Kind::Request);
            // A header that has begun must end, for the sake of those behind it.
            let more = state.queue.range(start..end).take_while(|item| item.wire.kind == Kind::Header).count();
            let taken: Vec<_> = state.queue.drain(start + if begun { more } else { 0 }..end).collect();
            (begun, taken)
        };
        drop(taken);
        if begun {
            // It may arrive before the request does: the peer remembers it.
            self.urgent(Wire::bare(Kind::Cancel, call), Bytes::new());
        }
    }

    fn post_drain(&self) {
        self.urgent(Wire::bare(Kind::Drain, 0), Bytes::new());
    }

    fn post_heartbeat(&self) {
        self.urgent(Wire::bare(Kind::Ping, self.0.pulse.now()), Bytes::new());
    }

    fn close(&self) {
        let queue = {
            let mut state = self.0.state();
            state.closed = true;
            std::mem::take(&mut state.queue)
        };
        drop(queue);
        self.0.carrier.close(CLOSE_GRACE);
    }
}

/// A message as parcels, not numbered yet.
struct Cut {
    opening: (Wire, Bytes),
    /// What of the header did not fit, and the pieces.
    rest: Vec<(Wire, Bytes)>,
}

impl Cut {
    fn new(kind: Kind, mut header: BytesMut, message: &Message, cut: usize) -> Self {
        let head = message.head.len();
        let opening = Wire {
            first: u32::try_from(header.len()).unwrap_or(u32::MAX),
            second: u32::try_from(cut).unwrap_or(u32::MAX),
            ..Wire::bare(kind, 0)
        };
        if message.segments.is_empty() && header.len() + head < cut {
            // Most messages: the plan would say no more than this.
            message.head.pieces().iter().for_each(|bytes| header.extend_from_slice(bytes));
            return Self { opening: (opening, header.freeze()), rest: Vec::new() };
        }
        let mut pieces = gather(header, message, cut).into_iter();
        let mut header = pieces.next().unwrap_or_default();
        // What is shorter than the cut is never announced, and an opening must not be.
        let first = header.split_to(header.len().min(cut - 1));
        let mut rest = Vec::with_capacity(pieces.len());
        while !header.is_empty() {
            rest.push((Wire::bare(Kind::Header, 0), header.split_to(header.len().min(cut - 1))));
        }
        let piece = |(place, payload)| (Wire { first: place, ..Wire::bare(Kind::Piece, 0) }, payload);
        rest.extend((1..).zip(pieces).map(piece));
        Self { opening: (opening, first), rest }
    }

    fn queue(self, call: u64, room: &Room, queue: &mut VecDeque<Item>) {
        let item = |(wire, payload)| Item { wire: Wire { call, ..wire }, payload, room: room.clone() };
        queue.push_back(item(self.opening));
        queue.extend(self.rest.into_iter().map(item));
    }
}

/// The pieces of a message: large parts as they lie, small ones copied together, those of the first behind the header.
fn gather(header: BytesMut, message: &Message, cut: usize) -> Vec<Bytes> {
    let head = message.head.len();
    let lengths = std::iter::once(head).chain(message.segments.iter().map(Bytes::len));
    let plan = Plan::new(header.len(), lengths, cut);
    let mut gathered = vec![BytesMut::new(); plan.pieces.len()];
    gathered[0] = header;
    let mut alone = vec![None; plan.pieces.len()];
    for (part, &(piece, start)) in plan.spots.iter().enumerate() {
        let bytes = part.checked_sub(1).map(|segment| &message.segments[segment]);
        let length = bytes.map_or(head, Bytes::len);
        if length >= cut {
            alone[piece] = Some(bytes.map_or_else(|| message.head.to_bytes(), Bytes::clone));
            continue;
        }
        let piece = &mut gathered[piece];
        if length > 0 {
            piece.resize(start, 0);
        }
        match bytes {
            Some(bytes) => piece.extend_from_slice(bytes),
            None => message.head.pieces().iter().for_each(|bytes| piece.extend_from_slice(bytes)),
        }
    }
    alone.into_iter().zip(gathered).map(|(alone, gathered)| alone.unwrap_or_else(|| gathered.freeze())).collect()
}
