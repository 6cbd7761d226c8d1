//! The backend `host`: ranks in processes, on nodes and on Ray, over the channels of their transports.
//!
//! ```text
//!   join ── each rank connects to every other one; it is answered when the other has joined, too
//!   call ── "I call all_reduce number 7", to every rank; small buffers travel with it
//!   ring ── large buffers, chunk by chunk, from each rank to the next
//!   fail ── the first cause: the lowest rank that lives decides, and tells all
//! ```

mod answers;
mod lane;
mod pair;
mod participant;
mod pieces;
mod ring;
mod shared;
mod wire;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use gym_client::transport::Transports;
use gym_core::base::watch;
use gym_core::group::collective::{
    Buffer, Collective, CollectiveReport, CollectiveTotals, Collectives, Communicator, DevicePath, DevicePathSlot,
    Meeting, Seat, Transfer, has, identities,
};
use gym_core::group::{DType, Rank};
use gym_core::message::Loan;
use gym_core::transport::ConnectOptions;
use gym_core::{CallContext, Channel, Code, Error, Execution, Handler, Incarnation, Request, Response, Result, Route};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::OnceCell;
use tokio::time::Instant;

use lane::{CallMemory, Lane, Operation};
use participant::{Participant, Peer, Place, answer_of, text};
use shared::Lent;
use wire::{BUILD, Cause, Join, Joined, Packet};

/// Joins of other ranks that may wait for this rank.
const JOINS_MAX: usize = 4_096;
/// Meetings that are over and are remembered, so that a rank that joins one late is told.
const OVER_MAX: usize = 64;
/// Pauses between two attempts to reach a rank that has not started to serve.
const RETRY_PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(200)];

/// The backend `host`, for one rank. Ranks reach each other over the transports of their programs, at the endpoints of their seats.
///
/// Its ranks exchange messages at [`COLLECTIVE_ROUTE`](gym_core::group::COLLECTIVE_ROUTE) of each worker's host, which [`Peers`](super::Peers) serves.
/// Every rank connects to every other rank of a meeting, and hears from each of them at every operation: for up to some hundred ranks.
#[derive(Clone)]
pub struct HostCollectives(Arc<Registry>);

/// Whether the ranks of a meeting that are all on one node meet in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// They meet over their transports.
    Never,
    /// They do, if they can. Otherwise they meet over their transports.
    IfPossible,
    /// They do. A meeting that cannot is refused with the reason.
    Always,
}

/// The connection to each incarnation of a rank.
type Channels = BTreeMap<(Rank, Incarnation), Arc<OnceCell<Channel>>>;

struct Registry {
    transports: Transports,
    sharing: Sharing,
    shared_bytes: usize,
    /// Why the ranks of the last meeting that could not share memory did not.
    not_shared: Mutex<Option<String>>,
    /// Answers joins, whichever thread polls the answer.
    runtime: Handle,
    state: Mutex<Meetings>,
    /// Changes with `state`.
    changed: watch::Sender<u64>,
    totals: CollectiveTotals,
    /// The connection to each rank, which its meetings share.
    channels: Mutex<Channels>,
}

#[derive(Default)]
struct Meetings {
    next_id: u64,
    rooms: BTreeMap<u64, Entry>,
    /// The newest epoch that this rank has joined.
    epoch: u64,
    over: VecDeque<(Arc<str>, u64, Error)>,
    /// Joins that wait.
    joins: usize,
}

/// A meeting of this rank. Its participant takes the lock of the registry when it is dropped, and is therefore never held within that lock.
struct Entry {
    name: Arc<str>,
    epoch: u64,
    participant: Weak<Participant>,
}

/// One rank's communicator. Dropping it leaves the meeting.
struct HostCommunicator {
    participant: Arc<Participant>,
    path: DevicePathSlot,
    rounds: Mutex<Option<Lane>>,
    pairs: Mutex<BTreeMap<(Direction, usize), Lane>>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Direction {
    Sends,
    Receives,
}

impl HostCollectives {
    /// Creates the backend of one rank, which reaches the others over these transports.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    #[must_use]
    pub fn new(transports: Transports) -> Self {
        Self::sharing(transports, Sharing::Never, 0)
    }

    /// Creates the backend of one rank, whose ranks of one node meet in memory that they share. Each rank has `shared_bytes` of it for
    /// [tensors](Communicator::allocate), besides what the operations need.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    #[must_use]
    pub fn sharing(transports: Transports, sharing: Sharing, shared_bytes: usize) -> Self {
        let registry = Registry {
            transports,
            sharing,
            shared_bytes,
            not_shared: Mutex::default(),
            runtime: Handle::current(),
            state: Mutex::default(),
            changed: watch::Sender::new(0),
            totals: CollectiveTotals::default(),
            channels: Mutex::default(),
        };
        Self(Arc::new(registry))
    }

    /// Returns the number of meetings that the rank waits for or takes part in.
    #[must_use]
    pub fn meetings(&self) -> usize {
        self.0.state.lock().rooms.len()
    }
}

#[async_trait]
impl Collectives for HostCollectives {
    fn name(&self) -> &'static str {
        "host"
    }

    async fn join(&self, cx: &CallContext, meeting: Meeting) -> Result<Arc<dyn Communicator>> {
        let subject = format!("join {meeting} as rank {}", meeting.rank);
        match self.0.join(cx, meeting).await {
            Ok(participant) => {
                let (rounds, pairs) = (Mutex::default(), Mutex::default());
                Ok(Arc::new(HostCommunicator { participant, path: DevicePathSlot::default(), rounds, pairs }))
            }
            Err(error) => Err(error.about(subject)),
        }
    }

    fn handler(&self) -> Option<Arc<dyn Handler>> {
        Some(Arc::new(self.clone()))
    }

    fn report(&self, _: Rank) -> CollectiveReport {
        self.0.report()
    }
}

impl Handler for HostCollectives {
    fn handle(&self, mut request: Request) -> BoxFuture<'static, Result<Response>> {
        let packet: Packet = match serde_json::from_slice(&request.message.head.to_bytes()) {
            Ok(packet) => packet,
            Err(error) => {
                let why = format!("not a message of collective operations of build {BUILD}: {error}");
                return Box::pin(async move { Err(Error::invalid(why)) });
            }
        };
        if let Packet::Join(join) = packet {
            return answer_of(&self.0.runtime, Arc::clone(&self.0).answer_join(request.context, join));
        }
        let elements = request.message.segments.pop().unwrap_or_default();
        match self.0.participant_of(&packet).and_then(|participant| participant.accept(packet, elements)) {
            Ok(reply) => reply,
            Err(error) => Box::pin(async move { Err(error) }),
        }
    }

    fn only_waits(&self) -> bool {
        true
    }

    fn place(&self, _: &Route, head: &Bytes, _: usize, _: usize) -> Option<Loan> {
        let packet: Packet = serde_json::from_slice(head).ok()?;
        match (&packet, self.0.participant_of(&packet)) {
            (Packet::Chunk(chunk), Ok(participant)) => participant.place(chunk),
            _ => None,
        }
    }
}

impl Registry {
    fn notify(&self) {
        self.changed.send_modify(|changes| *changes += 1);
    }

    fn participant_of(&self, packet: &Packet) -> Result<Arc<Participant>> {
        let to = match packet {
            Packet::Call(packet) => packet.to,
            Packet::Chunk(packet) => packet.to,
            Packet::Leave(packet) => packet.to,
            Packet::Abort(packet) => packet.to,
            Packet::Offer(packet) => packet.to,
            Packet::Share(packet) => packet.to,
            Packet::Where { to, .. } => *to,
            Packet::Join(_) => return Err(Error::internal("a join names no number")),
        };
        let participant = self.state.lock().rooms.get(&to).and_then(|entry| entry.participant.upgrade());
        participant.ok_or_else(|| {
            Error::not_started(
                Code::FailedPrecondition,
                "the rank takes part in this meeting no more; meet in a newer epoch",
            )
        })
    }

    // ---- what it tells of itself ----

    fn report(&self) -> CollectiveReport {
        let rooms: Vec<Arc<Participant>> =
            self.state.lock().rooms.values().filter_map(|entry| entry.participant.upgrade()).collect();
        let mut report = CollectiveReport::default();
        report.waiting = rooms.iter().flat_map(|participant| participant.waiting()).collect();
        report.waiting.sort_by_key(|waiting| std::cmp::Reverse(waiting.elapsed_ms));
        self.totals.report(&mut report);
        report.not_shared = self.not_shared.lock().clone();
        report
    }

    // ---- joining ----

    async fn join(self: &Arc<Self>, cx: &CallContext, meeting: Meeting) -> Result<Arc<Participant>> {
        cx.check()?;
        // Each rank knows it by itself. A rank that met first and then left would be the cause that the others get.
        if self.sharing == Sharing::Always
            && let Some(why) = several_nodes(&meeting.seats)
        {
            return Err(memory_is_missing(&why));
        }
        let participant = self.enter(meeting)?;
        let mut joining = Joining { participant: &participant, formed: false };
        let mut meets: FuturesUnordered<_> =
            participant.others().map(|position| self.meet(cx, &participant, position)).collect();
        // One that cannot meet at all ends the wait, and so does the failure of those that have met. The others are awaited, so that the error names
        // every rank that is missing.
        let met = async {
            tokio::select! { biased;
                () = participant.all_met() => Ok(None),
                cause = participant.cause.wait() => Ok(Some(cause)),
                Some(over) = meets.next() => over.map(Some),
            }
        };
        match cx.bound(Execution::NotStarted, met).await {
            Ok(cause) => {
                joining.formed = true;
                drop(joining);
                participant.form();
                match cause {
                    // Who has told it to this rank may count on this rank to tell the others.
                    Some(_) if participant.cause.get().is_some() => participant.tell(None),
                    Some(cause) => participant.fail(cause),
                    None => {}
                }
                drop(meets);
                if participant.cause.get().is_none() {
                    self.share_memory(cx, &participant).await?;
                }
                Ok(participant)
            }
            Err(late) if matches!(late.code(), Code::DeadlineExceeded | Code::Cancelled) => {
                let missing = participant.not_met();
                Err(Error::not_started(late.code(), format!("{}; {} not joined", late.message(), has(&missing))))
            }
            Err(error) => Err(error),
        }
    }

    /// Lets the ranks of one node share memory.
    async fn share_memory(&self, cx: &CallContext, participant: &Arc<Participant>) -> Result<()> {
        if self.sharing == Sharing::Never || participant.world_size() == 1 {
            return Ok(());
        }
        let why = match several_nodes(&participant.meeting.seats) {
            Some(why) => Err(why),
            None => {
                let agreed = async { Ok(participant.agree_on_memory(self.shared_bytes).await) };
                match cx.bound(Execution::NotStarted, agreed).await {
                    Ok(agreed) => agreed,
                    Err(late) => {
                        participant.leave();
                        return Err(late);
                    }
                }
            }
        };
        let Err(why) = why else { return Ok(()) };
        if self.sharing == Sharing::Always {
            // Not `leave`: a rank that has not heard the reason yet would name one that has left.
            participant.fail(memory_is_missing(&why));
            return Err(memory_is_missing(&why));
        }
        tracing::debug!(meeting = %participant.meeting, why, "ranks do not share memory");
        *self.not_shared.lock() = Some(why);
        Ok(())
    }

    /// Meets another rank, and again if it gives up and joins anew. Returns the cause if the meeting is over.
    async fn meet(&self, cx: &CallContext, participant: &Participant, position: usize) -> Result<Error> {
        loop {
            match self.join_peer(cx, participant, &participant.meeting.seats[position]).await? {
                Met::Here(peer, facts) => participant.met(position, peer, &facts),
                Met::Over(cause) => return Ok(cause),
            }
            participant.gave_up(position).await;
        }
    }

    /// Takes the seat of this rank in a meeting.
    fn enter(self: &Arc<Self>, meeting: Meeting) -> Result<Arc<Participant>> {
        let mut state = self.state.lock();
        let same = |name: &Arc<str>, epoch: u64| (name, epoch) == (&meeting.name, meeting.epoch);
        let over = state.over.iter().any(|(name, epoch, _)| same(name, *epoch));
        if over || state.rooms.values().any(|entry| same(&entry.name, entry.epoch)) {
            let why = format!("rank {} has joined before; only a newer epoch has another meeting", meeting.rank);
            return Err(Error::not_started(Code::AlreadyExists, why));
        }
        let id = state.next_id;
        state.next_id += 1;
        if meeting.epoch > state.epoch {
            state.epoch = meeting.epoch;
            state.over.retain(|(_, epoch, _)| *epoch == meeting.epoch);
        }
        let newest: BTreeMap<Rank, Incarnation> = identities(&meeting.seats).into_iter().collect();
        let (name, epoch) = (Arc::clone(&meeting.name), meeting.epoch);
        let participant = Arc::new(Participant::new(id, meeting, Arc::downgrade(self)));
        state.rooms.insert(id, Entry { name, epoch, participant: Arc::downgrade(&participant) });
        drop(state);
        let current =
            |rank: &Rank, incarnation: Incarnation| newest.get(rank).is_none_or(|newest| incarnation >= *newest);
        self.channels.lock().retain(|(rank, incarnation), _| current(rank, *incarnation));
        self.notify();
        Ok(participant)
    }

    /// Tells a rank that this one has joined, and waits until it has joined, too.
    async fn join_peer(&self, cx: &CallContext, participant: &Participant, seat: &Seat) -> Result<Met> {
        let meeting = &participant.meeting;
        let join = Join {
            build: BUILD.to_owned(),
            name: meeting.name.to_string(),
            epoch: meeting.epoch,
            from: meeting.rank,
            id: participant.id,
            seats: identities(&meeting.seats),
            facts: meeting.facts.to_string(),
        };
        let packet = Packet::Join(join);
        let mut pauses = RETRY_PAUSES.into_iter();
        let mut pause = RETRY_PAUSES[0];
        loop {
            let error = match self.ask_to_join(cx, meeting, seat, &packet).await {
                Ok(met) => return Ok(met),
                Err(error) => error,
            };
            cx.check()?;
            if !matches!(error.code(), Code::Unavailable | Code::ResourceExhausted | Code::Cancelled) {
                return Err(match error.code() {
                    Code::NotFound | Code::Unimplemented => Error::not_started(
                        Code::Unimplemented,
                        format!(
                            "rank {} takes part in no collective operations: its host does not connect ranks",
                            seat.rank
                        ),
                    )
                    .caused_by(error),
                    _ => error,
                });
            }
            tracing::debug!(meeting = %meeting, rank = seat.rank, %error, "a rank cannot be reached yet");
            pause = pauses.next().unwrap_or(pause);
            tokio::time::sleep(pause).await;
        }
    }

    async fn ask_to_join(&self, cx: &CallContext, meeting: &Meeting, seat: &Seat, packet: &Packet) -> Result<Met> {
        let channel = self.channel(cx, seat).await?;
        let peer = Peer { channel, incarnation: seat.incarnation, id: 0 };
        let answered = peer.channel.call(peer.request(cx, packet, None)).await.and_then(Response::into_result);
        if let Err(error) = &answered
            && error.code() == Code::Unavailable
        {
            self.forget_channel(seat.rank, &peer.channel);
        }
        let answer = answered.map_err(|error| match error.code() {
            code @ (Code::FailedPrecondition | Code::InvalidArgument) => {
                Error::not_started(code, format!("rank {} answers: {}", seat.rank, error.message()))
            }
            _ => error,
        });
        let answer = answer?.message.head.to_bytes();
        match serde_json::from_slice::<Joined>(&answer) {
            Ok(Joined::Here(id, facts)) => Ok(Met::Here(Peer { id, ..peer }, facts)),
            Ok(Joined::Over(cause)) => Ok(Met::Over(cause.into_error())),
            Ok(Joined::Otherwise(seats)) => Err(meeting
                .check_same_seats(&seats)
                .err()
                .unwrap_or_else(|| Error::internal(format!("rank {} rejects the seats that it has", seat.rank)))),
            Err(error) => {
                Err(Error::invalid(format!("rank {} answers a join with something else: {error}", seat.rank)))
            }
        }
    }

    /// Answers the join of another rank when this rank has joined the same meeting.
    async fn answer_join(self: Arc<Self>, cx: CallContext, join: Join) -> Result<Response> {
        if join.build != BUILD {
            let why = format!(
                "this rank has gym {BUILD}, and rank {} has gym {}; start all ranks from one build",
                join.from, join.build
            );
            return Err(Error::not_started(Code::FailedPrecondition, why));
        }
        let _counted = CountedJoin::new(&self)?;
        let mut changes = self.changed.subscribe();
        let joined = async {
            loop {
                if let Some(joined) = self.joined(&join)? {
                    return Ok(Response::json(text(&joined)));
                }
                if changes.changed().await.is_err() {
                    return Err(Error::not_started(Code::Unavailable, "the rank has ended"));
                }
            }
        };
        cx.bound(Execution::NotStarted, joined).await
    }

    /// Returns the answer to a join; `None` while this rank has not joined.
    fn joined(&self, join: &Join) -> Result<Option<Joined>> {
        let state = self.state.lock();
        let same = |name: &str, epoch| (name, epoch) == (join.name.as_str(), join.epoch);
        let participant = state
            .rooms
            .values()
            .find(|entry| same(&entry.name, entry.epoch))
            .and_then(|entry| entry.participant.upgrade());
        let over = state.over.iter().find(|(name, epoch, _)| same(name, *epoch)).map(|(.., cause)| Cause::of(cause));
        let newest = state.epoch;
        drop(state);
        if let Some(cause) = over {
            return Ok(Some(Joined::Over(cause)));
        }
        if let Some(participant) = participant {
            let own = identities(&participant.meeting.seats);
            let (true, Some(from)) = (own == join.seats, participant.meeting.position_of(join.from)) else {
                return Ok(Some(Joined::Otherwise(own)));
            };
            return Ok(Some(match participant.joined_by(from, join.id, &join.facts) {
                Some(cause) => Joined::Over(Cause::of(&cause)),
                None => Joined::Here(participant.id, participant.meeting.facts.to_string()),
            }));
        }
        if newest > join.epoch {
            let why = format!("this rank is in epoch {newest}, and rank {} joins epoch {}", join.from, join.epoch);
            return Err(Error::not_started(Code::FailedPrecondition, why));
        }
        Ok(None)
    }

    // ---- connections ----

    async fn channel(&self, cx: &CallContext, seat: &Seat) -> Result<Channel> {
        let place = Arc::clone(self.channels.lock().entry((seat.rank, seat.incarnation)).or_default());
        let options = ConnectOptions::to_incarnation(seat.incarnation).watched();
        let opened = place.get_or_try_init(|| self.transports.connect_ordered(cx, &seat.endpoints, &options)).await;
        opened.cloned().map_err(|error| error.about(format!("connect to rank {}", seat.rank)))
    }

    /// Lets the next meeting open another connection to a rank.
    fn forget_channel(&self, rank: Rank, channel: &Channel) {
        let is = |place: &Arc<OnceCell<Channel>>| place.get().is_some_and(|opened| opened.is_same(channel));
        self.channels.lock().retain(|(of, _), place| *of != rank || !is(place));
    }

    /// Forgets a meeting whose communicator is gone. With a cause, it had begun, and later joins are told.
    fn end(&self, id: u64, meeting: &Meeting, cause: Option<Error>) {
        let mut state = self.state.lock();
        state.rooms.remove(&id);
        if let Some(cause) = cause.filter(|_| meeting.epoch == state.epoch) {
            state.over.push_back((Arc::clone(&meeting.name), meeting.epoch, cause));
            if state.over.len() > OVER_MAX {
                state.over.pop_front();
            }
        }
        drop(state);
        self.notify();
    }
}

/// Returns two ranks that are on two nodes, and so share no memory.
fn several_nodes(seats: &[Seat]) -> Option<String> {
    let other = seats.iter().find(|seat| seat.node != seats[0].node)?;
    let (first, node) = (seats[0].rank, &seats[0].node);
    Some(format!("ranks {first} and {} are on the nodes `{node}` and `{}`", other.rank, other.node))
}

fn memory_is_missing(why: &str) -> Error {
    let text = format!("communication_backend 'shm' needs memory that all ranks share: {why}");
    Error::not_started(Code::FailedPrecondition, text)
}

/// The answer of a rank to a join.
enum Met {
    Here(Peer, String),
    Over(Error),
}

/// A join in progress. If it is dropped before the meeting has formed, the ranks that count on this one are told.
struct Joining<'j> {
    participant: &'j Arc<Participant>,
    formed: bool,
}

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        if !self.formed {
            self.participant.give_up();
        }
    }
}

/// A join of another rank that waits for this rank.
struct CountedJoin<'r>(&'r Registry);

impl<'r> CountedJoin<'r> {
    fn new(registry: &'r Registry) -> Result<Self> {
        let mut state = registry.state.lock();
        if state.joins >= JOINS_MAX {
            return Err(Error::not_started(Code::ResourceExhausted, format!("{JOINS_MAX} joins wait for this rank")));
        }
        state.joins += 1;
        Ok(Self(registry))
    }
}

impl Drop for CountedJoin<'_> {
    fn drop(&mut self) {
        self.0.state.lock().joins -= 1;
    }
}

#[async_trait]
impl Communicator for HostCommunicator {
    fn meeting(&self) -> &Meeting {
        &self.participant.meeting
    }

    fn start(&self, cx: &CallContext, operation: Collective, buffer: Buffer) -> Transfer {
        let (completion, transfer) = Transfer::new();
        let meeting = &self.participant.meeting;
        let began = Instant::now();
        let accepted = match (self.participant.cause.get(), meeting.check(operation, &buffer)) {
            (Some(cause), _) => Err((buffer, cause)),
            (None, Err(error)) => Err((buffer, self.about(operation, error))),
            (None, Ok(call)) => {
                let accepted = match call.on_device {
                    true => self.path.accept("host", call, buffer).map(CallMemory::Device),
                    false => Lent::of(buffer).map(CallMemory::Host),
                };
                accepted.map(|memory| (call, memory)).map_err(|(buffer, error)| (buffer, self.about(operation, error)))
            }
        };
        match accepted {
            Err((buffer, error)) => completion.finish(buffer, Err(error)),
            Ok((call, memory)) => {
                let operation = Operation { call, memory, completion, cx: cx.clone(), began };
                let other = call.operation.named_rank().and_then(|rank| meeting.position_of(rank));
                // Each lock is held from the place to the queue, so that two threads keep the order of their places.
                match (call.operation, other) {
                    (Collective::Send { .. }, Some(to)) => {
                        let place =
                            || Place::Send { to, number: next(self.participant.lock().sent.entry(to).or_default()) };
                        let mut lanes = self.pairs.lock();
                        let lane = lanes.entry((Direction::Sends, to)).or_insert_with(|| Lane::new(&self.participant));
                        lane.push(&self.participant, operation, place);
                    }
                    (Collective::Receive { .. }, Some(from)) => {
                        let place = || Place::Receive {
                            from,
                            number: next(self.participant.lock().received.entry(from).or_default()),
                        };
                        let mut lanes = self.pairs.lock();
                        let lane =
                            lanes.entry((Direction::Receives, from)).or_insert_with(|| Lane::new(&self.participant));
                        lane.push(&self.participant, operation, place);
                    }
                    _ => {
                        let mut rounds = self.rounds.lock();
                        let lane = rounds.get_or_insert_with(|| Lane::new(&self.participant));
                        lane.push(&self.participant, operation, || {
                            Place::Round(next(&mut self.participant.lock().called))
                        });
                    }
                }
            }
        }
        transfer
    }

    fn allocate(&self, dtype: DType, elements: usize) -> Buffer {
        let bytes = elements * dtype.size();
        match self.participant.shared().and_then(|shared| shared.allocate(bytes)) {
            Some(shared) => Lent::Shared(shared).into_buffer(dtype),
            None => Buffer::host(dtype, BytesMut::zeroed(bytes)),
        }
    }

    fn facts(&self) -> &[Arc<str>] {
        self.participant.facts()
    }

    fn set_device_path(&self, path: Arc<dyn DevicePath>) -> Result<()> {
        self.path.set(path)
    }

    fn abort(&self, why: Error) {
        self.participant.fail(why);
    }

    async fn closed(&self) -> Error {
        self.participant.cause.wait().await
    }
}

impl HostCommunicator {
    fn about(&self, operation: Collective, error: Error) -> Error {
        error.about(format!("{} of {}", operation.name(), self.participant.meeting))
    }
}

/// Returns a number, and counts it up.
fn next(count: &mut u64) -> u64 {
    *count += 1;
    *count - 1
}

impl Drop for HostCommunicator {
    fn drop(&mut self) {
        self.participant.leave();
    }
}

impl fmt::Debug for HostCollectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostCollectives({} meetings)", self.meetings())
    }
}

impl fmt::Debug for HostCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostCommunicator(rank {} of {})", self.participant.meeting.rank, self.participant.meeting)
    }
}

#[cfg(test)]
mod tests;
