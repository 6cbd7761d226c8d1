//! One rank's side of a meeting: what the other ranks have sent, who has gone, and the first failure.

mod failure;
mod memory;
mod report;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use gym_core::group::collective::{Call, Collective, FirstCause, Meeting, different_calls};
use gym_core::group::{COLLECTIVE_ROUTE, Rank};
use gym_core::message::Loan;
use gym_core::transport::Reply;
use gym_core::{CallContext, Channel, Code, Error, Incarnation, Request, Response, Result, Route};
use parking_lot::{Mutex, MutexGuard};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::Registry;
use super::pieces::Pieces;
use super::shared::SharedLane;
use super::wire::{AbortPacket, CallPacket, Called, Cause, ChunkPacket, LeavePacket, Packet, Stream, chunks_max};

/// After a connection has closed, the time in which its peer, or another rank, may tell why.
const TOLD_TIMEOUT: Duration = Duration::from_millis(5);
/// The time for an answer of a rank that lives: where it is, or which cause was the first.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(100);
/// How long a rank has to answer, each time, to what a rank must be told: that another has left, or that the meeting has failed. It is told again if it does not,
/// because a rank that stood still, or was cut off, would otherwise go on in a meeting that nobody else is in.
const TELL_WITHIN_SECONDS: [u64; 6] = [1, 2, 4, 8, 16, 30];
/// The time in which a rank of the same node gets the memory that all share.
const SHARED_TIMEOUT: Duration = Duration::from_secs(10);
/// Calls of one sender that may wait here. A rank calls an operation when every rank has called the one before it.
const CALLS_MAX: usize = 4;

/// One rank's side of a meeting. Positions, not ranks, index everything.
pub(super) struct Participant {
    pub(super) id: u64,
    pub(super) meeting: Meeting,
    pub(super) cause: FirstCause,
    /// Set when all ranks have joined.
    peers: OnceLock<Vec<Option<Peer>>>,
    facts: OnceLock<Vec<Arc<str>>>,
    /// The memory that all ranks share, if they do.
    shared: OnceLock<SharedLane>,
    /// The tasks that notice closed connections.
    watchers: OnceLock<Vec<AbortOnDropHandle<()>>>,
    runtime: Handle,
    registry: Weak<Registry>,
    state: Mutex<State>,
    changed: Notify,
}

/// The way to another rank.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) channel: Channel,
    pub(super) incarnation: Incarnation,
    /// The number of the meeting at that rank.
    pub(super) id: u64,
}

/// One rank's knowledge of all ranks.
pub(super) struct State {
    pub(super) seats: Vec<SeatState>,
    /// The operations that this rank has called: collective ones, and sends and receives by the position of the other rank.
    pub(super) called: u64,
    pub(super) sent: BTreeMap<usize, u64>,
    pub(super) received: BTreeMap<usize, u64>,
    /// The collective operations that all ranks have been heard to call.
    pub(super) heard: u64,
    /// The operations under way, in the order in which they began.
    running: Vec<Running>,
    /// A failure was found, and the ranks are agreeing on its cause.
    failing: bool,
    /// The ranks that this one has met, until all have joined.
    met: Vec<Option<Peer>>,
    /// The shared memory that this rank has got, until all ranks have.
    offered: Option<SharedLane>,
    /// Why the ranks do not share memory, or that they do.
    sharing: Option<Result<(), String>>,
}

/// Where a call stands in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Round(u64),
    Send { to: usize, number: u64 },
    Receive { from: usize, number: u64 },
}

impl Place {
    pub(super) fn number(self) -> u64 {
        match self {
            Self::Round(number) | Self::Send { number, .. } | Self::Receive { number, .. } => number,
        }
    }
}

/// An operation under way.
#[derive(Clone, Copy)]
struct Running {
    operation: Collective,
    place: Place,
    began: Instant,
    /// All of its ranks have been heard to call it.
    agreed: bool,
}

/// The messages of one rank that were not taken yet, and how the rank has gone.
#[derive(Debug, Default)]
pub(super) struct SeatState {
    rounds: Arrivals,
    pairs: Arrivals,
    left: Option<Called>,
    /// The newest number under which the rank has joined.
    joined: Option<u64>,
    /// Facts that the rank has told, with the newest number that came with them.
    facts: Option<(u64, Arc<str>)>,
    /// The newest number under which the rank has given up its join, before this one has met all.
    gave_up: Option<u64>,
    /// The connection has closed without a word.
    lost: Option<Arc<str>>,
    /// The rank did not answer.
    silent: bool,
}

#[derive(Debug, Default)]
struct Arrivals {
    calls: VecDeque<Announced>,
    chunks: VecDeque<Chunk>,
    /// Where the chunks of the operation under way go.
    expected: Option<Expected>,
}

/// Where the chunks that one rank sends in an operation go.
#[derive(Debug)]
pub(super) struct Expected {
    pub(super) number: u64,
    pub(super) pieces: Pieces,
    /// The piece of each chunk; `None` for a chunk that is added to one.
    pub(super) places: Vec<Option<usize>>,
}

/// While it lives, the transport receives the chunks of a rank in an operation where they belong.
pub(super) struct Expecting<'r> {
    participant: &'r Participant,
    from: usize,
    stream: Stream,
}

impl<'r> Expecting<'r> {
    pub(super) fn new(participant: &'r Participant, from: usize, stream: Stream, expected: Expected) -> Self {
        participant.expect(from, stream, Some(expected));
        Self { participant, from, stream }
    }
}

impl Drop for Expecting<'_> {
    fn drop(&mut self) {
        self.participant.expect(self.from, self.stream, None);
    }
}

/// The call of another rank.
#[derive(Debug)]
pub(super) struct Announced {
    number: u64,
    pub(super) call: Call,
    elements: Bytes,
    /// Tells the sender that this was taken.
    taken: Option<oneshot::Sender<()>>,
}

#[derive(Debug)]
struct Chunk {
    number: u64,
    at: u64,
    elements: Bytes,
    taken: Option<oneshot::Sender<()>>,
}

impl Announced {
    /// Returns the elements that came with the call, and tells the sender that they were taken.
    pub(super) fn take(self) -> Bytes {
        if let Some(taken) = self.taken {
            let _ = taken.send(());
        }
        self.elements
    }
}

impl State {
    /// Returns what this rank has called, as the rank at a position needs to know it.
    fn called_towards(&self, position: usize) -> Called {
        let count = |counts: &BTreeMap<usize, u64>| counts.get(&position).copied().unwrap_or_default();
        Called { rounds: self.called, sends: count(&self.sent), receives: count(&self.received) }
    }
}

impl SeatState {
    /// Takes what the rank tells of itself, unless it has told something later.
    fn tell(&mut self, id: u64, facts: &str) {
        if self.facts.as_ref().is_none_or(|(newest, _)| *newest <= id) {
            self.facts = Some((id, facts.into()));
        }
    }

    fn arrivals_of(&self, stream: Stream) -> &Arrivals {
        match stream {
            Stream::Round => &self.rounds,
            Stream::Pair => &self.pairs,
        }
    }

    fn arrivals(&mut self, stream: Stream) -> &mut Arrivals {
        match stream {
            Stream::Round => &mut self.rounds,
            Stream::Pair => &mut self.pairs,
        }
    }
}

impl Participant {
    pub(super) fn new(id: u64, meeting: Meeting, registry: Weak<Registry>) -> Self {
        let seats = meeting.seats.iter().map(|_| SeatState::default()).collect();
        let state = State {
            seats,
            called: 0,
            sent: BTreeMap::new(),
            received: BTreeMap::new(),
            heard: 0,
            running: Vec::new(),
            failing: false,
            met: meeting.seats.iter().map(|_| None).collect(),
            offered: None,
            sharing: None,
        };
        Self {
            id,
            meeting,
            cause: FirstCause::new(),
            peers: OnceLock::new(),
            facts: OnceLock::new(),
            shared: OnceLock::new(),
            watchers: OnceLock::new(),
            runtime: Handle::current(),
            registry,
            state: Mutex::new(state),
            changed: Notify::new(),
        }
    }

    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(super) fn world_size(&self) -> usize {
        self.meeting.world_size()
    }

    pub(super) fn position(&self) -> usize {
        self.meeting.position()
    }

    pub(super) fn rank_at(&self, position: usize) -> Rank {
        self.meeting.seats[position].rank
    }

    /// Returns the positions of the other ranks, the next one first.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (own, world_size) = (self.position(), self.world_size());
        (1..world_size).map(move |step| (own + step) % world_size)
    }

    /// Returns what each rank has told of itself, once all have joined.
    pub(super) fn facts(&self) -> &[Arc<str>] {
        self.facts.get().map_or(&[], |facts| facts)
    }

    fn is_formed(&self) -> bool {
        self.peers.get().is_some()
    }

    fn peer(&self, position: usize) -> Option<&Peer> {
        self.peers.get()?.get(position)?.as_ref()
    }

    /// Takes the way to a rank that has joined.
    pub(super) fn met(&self, position: usize, mut peer: Peer, facts: &str) {
        {
            let mut state = self.lock();
            state.seats[position].tell(peer.id, facts);
            // It may have given up, and joined again, after it had answered.
            peer.id = peer.id.max(state.seats[position].joined.unwrap_or_default());
            state.met[position] = Some(peer);
        }
        self.changed.notify_waiters();
    }

    /// Waits until every rank has joined and none of them has given up.
    pub(super) async fn all_met(&self) {
        let own = self.position();
        self.wait_until(|state| {
            let here = |(position, met): (usize, &Option<Peer>)| {
                let gave_up = state.seats[position].gave_up;
                position == own || met.as_ref().is_some_and(|peer| Some(peer.id) > gave_up)
            };
            state.met.iter().enumerate().all(here).then_some(())
        })
        .await;
    }

    /// Returns the ranks that have not joined, ascending.
    pub(super) fn not_met(&self) -> Vec<Rank> {
        let (state, own) = (self.lock(), self.position());
        let missing = state.met.iter().enumerate().filter(|(position, met)| *position != own && met.is_none());
        missing.map(|(position, _)| self.rank_at(position)).collect()
    }

    /// Waits until a rank that was met gives up its join.
    pub(super) async fn gave_up(&self, position: usize) {
        self.wait_until(|state| {
            let (met, gave_up) = (&mut state.met[position], state.seats[position].gave_up);
            met.take_if(|peer| Some(peer.id) <= gave_up).map(drop)
        })
        .await;
    }

    /// Tells the ranks that were met that this one has given up its join.
    pub(super) fn give_up(&self) {
        let (from, called) = (self.position(), Called::default());
        let met = std::mem::take(&mut self.lock().met).into_iter().flatten();
        let left = met.map(|peer| {
            let packet = Packet::Leave(LeavePacket { to: peer.id, from, called, gave_up: Some(self.id) });
            (peer, packet)
        });
        tell(&self.runtime, left.collect());
    }

    /// Begins the meeting with those that have joined.
    pub(super) fn form(self: &Arc<Self>) {
        let (peers, facts) = {
            let mut state = self.lock();
            let told = |seat: &SeatState| seat.facts.as_ref().map_or_else(|| "".into(), |(_, facts)| Arc::clone(facts));
            let mut facts: Vec<Arc<str>> = state.seats.iter().map(told).collect();
            facts[self.position()] = Arc::clone(&self.meeting.facts);
            (std::mem::take(&mut state.met), facts)
        };
        drop(self.facts.set(facts));
        let mut watchers = Vec::with_capacity(peers.len());
        for (position, peer) in peers.iter().enumerate() {
            let Some(channel) = peer.as_ref().map(|peer| peer.channel.clone()) else { continue };
            let participant = Arc::downgrade(self);
            watchers.push(AbortOnDropHandle::new(self.runtime.spawn(async move {
                let error = channel.closed().await;
                if let Some(participant) = participant.upgrade() {
                    participant.suspect(position, error);
                }
            })));
        }
        drop((self.peers.set(peers), self.watchers.set(watchers)));
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits until `ready` returns a value. It is asked again after every change.
    pub(super) async fn wait_until<T>(&self, mut ready: impl FnMut(&mut State) -> Option<T> + Send) -> T {
        let mut changed = std::pin::pin!(self.changed.notified());
        loop {
            changed.as_mut().enable();
            if let Some(value) = ready(&mut self.lock()) {
                return value;
            }
            changed.as_mut().await;
            changed.set(self.changed.notified());
        }
    }

    // ---- what other ranks send ----

    /// Accepts a message of another rank, in the order of arrival. The answer may wait until the message was taken.
    pub(super) fn accept(self: &Arc<Self>, packet: Packet, elements: Bytes) -> Result<Reply> {
        match packet {
            Packet::Call(packet) => self.accept_call(&packet, elements),
            Packet::Chunk(packet) => self.accept_chunk(&packet, elements),
            Packet::Leave(packet) => {
                let met = self.peers.get().map(|peers| peers.get(packet.from).and_then(Option::as_ref));
                self.seat(packet.from, |seat| match (packet.gave_up, met) {
                    (Some(id), None) => seat.gave_up = seat.gave_up.max(Some(id)),
                    // It has joined again since.
                    (Some(id), Some(Some(peer))) if peer.id > id => {}
                    _ => seat.left = Some(packet.called),
                })?;
                Ok(answer("null"))
            }
            Packet::Abort(packet) => Ok(self.accept_abort(packet)),
            Packet::Where { from, .. } => Ok(answer(text(&self.lock().called_towards(from)))),
            Packet::Offer(packet) => Ok(self.accept_offer(packet)),
            Packet::Share(packet) => {
                self.share(packet.why.map_or(Ok(()), Err));
                Ok(answer("null"))
            }
            Packet::Join(_) => Err(Error::internal("a join is answered before its meeting is known")),
        }
    }

    fn accept_call(&self, packet: &CallPacket, elements: Bytes) -> Result<Reply> {
        let CallPacket { from, stream, number, call, .. } = *packet;
        // A send ends when it was received.
        let (taken, waiting) = match stream {
            Stream::Round => (None, None),
            Stream::Pair => {
                let (taken, waiting) = oneshot::channel();
                (Some(taken), Some(waiting))
            }
        };
        let put = |seat: &mut SeatState| {
            let calls = &mut seat.arrivals(stream).calls;
            let fits = calls.len() < CALLS_MAX;
            if fits {
                calls.push_back(Announced { number, call, elements, taken });
            }
            fits
        };
        if !self.seat(from, put)? {
            return Err(self.full(from, "calls"));
        }
        Ok(answer_when(waiting))
    }

    fn accept_chunk(&self, packet: &ChunkPacket, elements: Bytes) -> Result<Reply> {
        let ChunkPacket { from, stream, number, at, waits, .. } = *packet;
        let (taken, waiting) = oneshot::channel();
        let chunks_max = chunks_max(self.world_size());
        let put = |seat: &mut SeatState| {
            let chunks = &mut seat.arrivals(stream).chunks;
            let fits = chunks.len() < chunks_max;
            if fits {
                chunks.push_back(Chunk { number, at, elements, taken: waits.then_some(taken) });
            }
            fits
        };
        if !self.seat(from, put)? {
            return Err(self.full(from, "chunks"));
        }
        Ok(answer_when(waits.then_some(waiting)))
    }

    fn expect(&self, from: usize, stream: Stream, expected: Option<Expected>) {
        let before = std::mem::replace(&mut self.lock().seats[from].arrivals(stream).expected, expected);
        // Outside of the lock, because its memory may be freed.
        drop(before);
    }

    /// Returns the memory into which a chunk is received, if it is expected and its place is free.
    pub(super) fn place(&self, packet: &ChunkPacket) -> Option<Loan> {
        let state = self.lock();
        let expected = state.seats.get(packet.from)?.arrivals_of(packet.stream).expected.as_ref()?;
        let piece = expected.places.get(usize::try_from(packet.at).ok()?).copied()??;
        (expected.number == packet.number).then(|| expected.pieces.lend(piece))?
    }

    fn full(&self, from: usize, what: &str) -> Error {
        let (rank, own) = (self.rank_at(from), self.meeting.rank);
        let why = format!("rank {rank} has sent more {what} than rank {own} keeps");
        Error::not_started(Code::ResourceExhausted, why).about(self.meeting.to_string())
    }

    /// Changes what is known of a rank, and wakes those who wait for a change.
    fn seat<T>(&self, position: usize, change: impl FnOnce(&mut SeatState) -> T) -> Result<T> {
        let changed = {
            let mut state = self.lock();
            let seat = state.seats.get_mut(position).ok_or_else(|| {
                Error::invalid(format!("the meeting has no position {position}")).about(self.meeting.to_string())
            })?;
            change(seat)
        };
        self.changed.notify_waiters();
        Ok(changed)
    }

    fn accept_abort(self: &Arc<Self>, packet: AbortPacket) -> Reply {
        let AbortPacket { from, cause, decide, .. } = packet;
        self.adopt(cause.into_error());
        let first = self.cause.get().expect("the cause was set");
        if decide {
            self.tell(Some(from));
        }
        answer(text(&Cause::of(&first)))
    }

    // ---- sending ----

    /// Sends a message to another rank, or puts it into this rank's own place. Returns when the transport has accepted it; `None` if the other rank
    /// cannot be reached any more.
    pub(super) async fn send(
        self: &Arc<Self>,
        cx: &CallContext,
        to: usize,
        packet: impl FnOnce(u64) -> Packet,
        elements: Option<Bytes>,
    ) -> Option<Reply> {
        if to == self.position() {
            return self.accept(packet(self.id), elements.unwrap_or_default()).ok();
        }
        let peer = self.peer(to)?;
        match peer.channel.link().send(peer.request(cx, &packet(peer.id), elements)).await {
            Ok(reply) => Some(reply),
            Err(error) => {
                self.suspect(to, error);
                None
            }
        }
    }

    /// Takes what another rank calls at a place, if it has come.
    pub(super) fn take_call(state: &mut State, from: usize, stream: Stream, number: u64) -> Option<Announced> {
        let calls = &mut state.seats[from].arrivals(stream).calls;
        calls.front().is_some_and(|call| call.number == number).then(|| calls.pop_front())?
    }

    /// Returns what another rank calls at a place, if it has come.
    pub(super) fn call_of(state: &State, from: usize, stream: Stream, number: u64) -> Option<Call> {
        let calls = &state.seats[from].arrivals_of(stream).calls;
        calls.front().filter(|call| call.number == number).map(|call| call.call)
    }

    /// Waits for the next chunk of an operation, which has this length.
    pub(super) async fn chunk(
        &self,
        from: usize,
        stream: Stream,
        number: u64,
        at: u64,
        length: usize,
    ) -> Result<Bytes> {
        let chunk = self
            .wait_until(|state| {
                let seat = &mut state.seats[from];
                if let Some(chunk) = seat.arrivals(stream).chunks.pop_front() {
                    return Some(Ok(chunk));
                }
                seat.lost.as_deref().map(|lost| Err(self.gone(from, Some(lost))))
            })
            .await?;
        let had = (chunk.number, chunk.at, chunk.elements.len());
        if had != (number, at, length) {
            let (rank, (had_number, had_at, had_length)) = (self.rank_at(from), had);
            let why = format!(
                "rank {rank} sent {had_length} bytes as chunk {had_at} of operation {had_number}, and {length} bytes of chunk {at} of {number} were due"
            );
            return Err(Error::unknown(Code::DataLoss, why));
        }
        if let Some(taken) = chunk.taken {
            let _ = taken.send(());
        }
        Ok(chunk.elements)
    }

    // ---- who has gone ----

    /// Returns the error of a rank that will not make the next call of a kind any more. What it has sent before has arrived, and is looked at first.
    pub(super) fn absent(
        &self,
        state: &State,
        position: usize,
        number: u64,
        called: impl Fn(Called) -> u64,
    ) -> Option<Error> {
        let seat = &state.seats[position];
        if let Some(lost) = &seat.lost {
            return Some(self.gone(position, Some(lost)));
        }
        seat.left.filter(|left| called(*left) <= number).map(|_| self.gone(position, None))
    }

    /// Returns the error of a rank that cannot end an operation on device memory, which it has called: its process has gone.
    pub(super) fn lost_from(&self, state: &State, positions: &[usize]) -> Option<Error> {
        let lost = |position: &usize| Some(self.gone(*position, Some(state.seats[*position].lost.as_deref()?)));
        positions.iter().find_map(lost)
    }

    /// Returns the error of a rank that will not come to a collective operation in shared memory. One that has left after it needs no connection.
    pub(super) fn gone_from(&self, state: &State, position: usize, number: u64) -> Option<Error> {
        let seat = &state.seats[position];
        match (seat.left, &seat.lost) {
            (Some(left), _) => (left.rounds <= number).then(|| self.gone(position, None)),
            (None, lost) => lost.as_deref().map(|lost| self.gone(position, Some(lost))),
        }
    }

    fn gone(&self, position: usize, lost: Option<&str>) -> Error {
        let rank = self.rank_at(position);
        let why = match lost {
            Some(lost) => format!("rank {rank} has left the meeting: {lost}"),
            None => format!("rank {rank} has left the meeting"),
        };
        Error::unknown(Code::Unavailable, why)
    }

    /// A message to a rank has failed, or its connection has closed. Waits a moment for somebody to tell why, and then takes the rank for lost.
    pub(super) fn suspect(self: &Arc<Self>, position: usize, error: Error) {
        let participant = Arc::clone(self);
        self.runtime.spawn(async move {
            tokio::time::sleep(TOLD_TIMEOUT).await;
            let lost: Arc<str> = error.to_string().into();
            let _ = participant.seat(position, |seat| seat.lost = Some(seat.lost.take().unwrap_or(lost)));
            participant.forget_channel(position);
        });
    }

    fn forget_channel(&self, position: usize) {
        if let (Some(registry), Some(peer)) = (self.registry.upgrade(), self.peer(position)) {
            registry.forget_channel(self.rank_at(position), &peer.channel);
        }
    }

    // ---- leaving ----

    /// Tells the other ranks that this one makes no further calls.
    pub(super) fn leave(self: &Arc<Self>) {
        let state = self.lock();
        if state.failing {
            return;
        }
        let Some(peers) = self.peers.get() else { return };
        let left: Vec<(Peer, Packet)> = peers
            .iter()
            .enumerate()
            .filter_map(|(position, peer)| {
                let peer = peer.clone()?;
                let (to, from, called) = (peer.id, self.position(), state.called_towards(position));
                Some((peer, Packet::Leave(LeavePacket { to, from, called, gave_up: None })))
            })
            .collect();
        drop(state);
        tell(&self.runtime, left);
    }

    /// A rank joins under a number. Returns what it is told if the meeting is over for it; `None` if it can take part.
    pub(super) fn joined_by(self: &Arc<Self>, position: usize, id: u64, facts: &str) -> Option<Error> {
        let mut state = self.lock();
        if let Some(cause) = self.cause.get() {
            return Some(cause);
        }
        let met = self.peer(position).map(|peer| peer.id);
        let seat = &mut state.seats[position];
        seat.joined = seat.joined.max(Some(id));
        seat.tell(id, facts);
        if met.is_some_and(|met| met < id) {
            // It gave up when this rank had met all.
            seat.left.get_or_insert_default();
        }
        let (gone, lost) = (seat.left.is_some() || seat.lost.is_some(), seat.lost.clone());
        if let Some(peer) = &mut state.met.get_mut(position).and_then(Option::as_mut) {
            peer.id = peer.id.max(id);
        }
        drop(state);
        self.changed.notify_waiters();
        let cause = || self.gone(position, lost.as_deref()).about(self.meeting.to_string());
        if gone && self.is_formed() {
            // It tells those that it has met, and this one tells the others.
            self.fail(cause());
        }
        gone.then(cause)
    }
}

/// Sends each rank its message, until it answers, and waits for no answer.
fn tell(runtime: &Handle, told: Vec<(Peer, Packet)>) {
    for (peer, packet) in told {
        runtime.spawn(async move {
            for seconds in TELL_WITHIN_SECONDS {
                let cx = CallContext::within(Duration::from_secs(seconds));
                let request = peer.request(&cx, &packet, None);
                match peer.channel.call(request).await {
                    Err(error) if error.code() == Code::DeadlineExceeded => {}
                    _ => break,
                }
            }
        });
    }
}

impl Peer {
    /// Creates a request to the rank.
    pub(super) fn request(&self, cx: &CallContext, packet: &Packet, elements: Option<Bytes>) -> Request {
        let mut context = cx.child();
        context.incarnation = Some(self.incarnation);
        let mut request = Request::post(context, Route::from_static(COLLECTIVE_ROUTE), text(packet));
        request.message.segments.extend(elements);
        request
    }

    /// Sends a message and waits for its answer. Returns `None` if there is none in time, or an error.
    async fn ask(&self, within: Duration, packet: &Packet) -> Option<Bytes> {
        let request = self.request(&CallContext::within(within), packet, None);
        let response = self.channel.call(request).await.and_then(Response::into_result);
        response.ok().map(|response| response.message.head.to_bytes())
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        if let Some(registry) = self.registry.upgrade() {
            let gone = || Error::unknown(Code::Unavailable, format!("rank {} has left the meeting", self.meeting.rank));
            let cause = self.is_formed().then(|| self.cause.get().unwrap_or_else(gone));
            registry.end(self.id, &self.meeting, cause);
        }
    }
}

/// Returns the error of two ranks that call differently.
pub(super) fn differ(participant: &Participant, own: Call, position: usize, call: Call) -> Error {
    different_calls((participant.meeting.rank, own), (participant.rank_at(position), call))
}

pub(super) fn text(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("messages have no map with other keys than texts")
}

pub(super) fn answer(text: impl Into<Bytes>) -> Reply {
    let response = Response::json(text.into());
    Box::pin(async move { Ok(response) })
}

/// Answers with what a task returns, whichever thread polls the answer. Dropping the answer ends the task.
pub(super) fn answer_of(runtime: &Handle, task: impl Future<Output = Result<Response>> + Send + 'static) -> Reply {
    let answering = AbortOnDropHandle::new(runtime.spawn(task));
    let ended = |_| Error::not_started(Code::Unavailable, "the rank is ending");
    Box::pin(async move { answering.await.map_err(ended)? })
}

/// Answers at once, or when what was sent has been taken.
fn answer_when(taken: Option<oneshot::Receiver<()>>) -> Reply {
    Box::pin(async move {
        if let Some(taken) = taken
            && taken.await.is_err()
        {
            return Err(Error::unknown(Code::FailedPrecondition, "the rank has not taken what was sent to it"));
        }
        Ok(Response::json(Bytes::from_static(b"null")))
    })
}

impl fmt::Debug for Participant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Participant({} of rank {})", self.meeting, self.meeting.rank)
    }
}
