//! The state of one meeting: who has joined, which calls wait, and the first failure.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::work::{Deposit, Deposited, Work};
use crate::base::cancel::CancelToken;
use crate::base::error::{Code, Error, Execution, Result};
use crate::group::collective::buffer::Buffer;
use crate::group::collective::cause::FirstCause;
use crate::group::collective::meeting::{Meeting, Seat};
use crate::group::collective::operation::{Call, Collective, different_calls, has};
use crate::group::collective::report::{CollectiveTotals, WaitingOperation};
use crate::group::collective::transfer::{DevicePathSlot, Moved, Transfer};
use crate::group::layout::Rank;
use crate::message::CallContext;

/// One meeting of a process, shared by its ranks. Positions, not ranks, index everything.
pub(super) struct Participants {
    seats: Arc<[Seat]>,
    /// Of the first rank that joined. Threads without a runtime may call operations.
    runtime: Handle,
    formed: CancelToken,
    cause: Arc<FirstCause>,
    state: Mutex<State>,
}

struct State {
    presence: Vec<Presence>,
    /// Facts that each rank has told when it joined.
    facts: Vec<Arc<str>>,
    /// The number of collective operations that each rank has called.
    called: Vec<u64>,
    /// Operations that some ranks have called and others have not, in order. The front has the number `first`.
    rounds: VecDeque<Round>,
    first: u64,
    /// Sends and receives that wait, by (sender, receiver).
    pairs: BTreeMap<(usize, usize), Pair>,
    /// The calls on device memory that are under way, by numbers of their own.
    moving: BTreeMap<u64, Underway>,
    /// How many there were.
    moved: u64,
}

/// A call on device memory that all of its ranks have made.
struct Underway {
    position: usize,
    subject: String,
    began: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Absent,
    Joined,
    /// It has joined, and no longer waits for the others. It may join again.
    GaveUp,
    Left,
}

/// The calls of one collective operation, by position.
struct Round(Vec<Option<Waiting>>);

/// Sends and receives of two ranks. Only one side waits at a time.
#[derive(Default)]
struct Pair {
    sent: u64,
    received: u64,
    sends: VecDeque<Waiting>,
    receives: VecDeque<Waiting>,
}

/// A call that waits for other ranks.
struct Waiting {
    deposit: Deposit,
    position: usize,
    subject: String,
    /// Set if the call waits after it was started.
    bounds: Option<Bounds>,
}

/// The task that ends the meeting at the deadline or the cancellation of a call. Ends with the call.
struct Bounds(AbortHandle);

impl Drop for Bounds {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The place of a call in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Round { number: u64, position: usize },
    Send { number: u64, from: usize, to: usize },
    Receive { number: u64, from: usize, to: usize },
}

impl Participants {
    pub(super) fn new(meeting: &Meeting) -> Self {
        let world_size = meeting.world_size();
        let state = State {
            presence: vec![Presence::Absent; world_size],
            facts: vec!["".into(); world_size],
            called: vec![0; world_size],
            rounds: VecDeque::new(),
            first: 0,
            pairs: BTreeMap::new(),
            moving: BTreeMap::new(),
            moved: 0,
        };
        Self {
            seats: Arc::clone(&meeting.seats),
            runtime: Handle::current(),
            formed: CancelToken::new(),
            cause: Arc::default(),
            state: Mutex::new(state),
        }
    }

    pub(super) fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// Returns `false` if the seat is taken, or was left after the meeting had formed.
    pub(super) fn sit_down(&self, meeting: &Meeting) -> bool {
        let (mut state, position) = (self.state.lock(), meeting.position());
        if matches!(state.presence[position], Presence::Joined | Presence::Left) {
            return false;
        }
        state.presence[position] = Presence::Joined;
        state.facts[position] = Arc::clone(&meeting.facts);
        if state.presence.iter().all(|presence| *presence == Presence::Joined) {
            self.formed.cancel();
        }
        true
    }

    /// Returns what each rank has told, once all have joined.
    pub(super) fn facts(&self) -> Vec<Arc<str>> {
        self.state.lock().facts.clone()
    }

    /// Waits until all ranks have joined.
    pub(super) async fn formed(&self) {
        self.formed.cancelled().await;
    }

    /// Returns the ranks that have never joined; if all have, those that gave up. Ranks with one deadline give up one after another, and the last
    /// ones must not name the first ones.
    pub(super) fn not_joined(&self) -> Vec<usize> {
        let state = self.state.lock();
        let presence = &state.presence;
        let all = |which| (0..presence.len()).filter(move |at| presence[*at] == which).collect::<Vec<_>>();
        Some(all(Presence::Absent)).filter(|absent| !absent.is_empty()).unwrap_or_else(|| all(Presence::GaveUp))
    }

    /// Gives a seat up. Ends the meeting if another rank waits for this one. Returns `true` if nobody is left.
    pub(super) fn leave(&self, position: usize) -> bool {
        let mut state = self.state.lock();
        let formed = self.formed.is_cancelled();
        state.presence[position] = if formed { Presence::Left } else { Presence::GaveUp };
        let nobody_is_left = state.presence.iter().all(|presence| *presence != Presence::Joined);
        if let Some(error) = self.waits_for_a_rank_that_left(&state) {
            self.fail(state, error);
        }
        nobody_is_left
    }

    /// Returns the calls of a rank that wait.
    pub(super) fn waiting(&self, position: usize) -> Vec<WaitingOperation> {
        let state = self.state.lock();
        let own = state.places().filter_map(|place| {
            let waiting = state.waiting(place).filter(|waiting| waiting.position == position)?;
            let missing = self.ranks_at(state.missing(place));
            Some(WaitingOperation::new(waiting.subject.clone(), waiting.deposit.began.elapsed(), missing))
        });
        let underway = state.moving.values().filter(|moving| moving.position == position);
        let underway =
            underway.map(|moving| WaitingOperation::new(moving.subject.clone(), moving.began.elapsed(), Vec::new()));
        own.chain(underway).collect()
    }

    pub(super) fn abort(&self, why: Error) {
        self.fail(self.state.lock(), why);
    }

    pub(super) async fn closed(&self) -> Error {
        self.cause.wait().await
    }

    pub(super) fn has_failed(&self) -> bool {
        self.cause.get().is_some()
    }

    pub(super) fn start(
        self: &Arc<Self>,
        (meeting, totals): (&Meeting, &Arc<CollectiveTotals>),
        cx: &CallContext,
        operation: Collective,
        (buffer, path): (Buffer, &DevicePathSlot),
    ) -> Transfer {
        let (completion, transfer) = Transfer::new();
        let position = meeting.position();
        let mut state = self.state.lock();
        let place = state.next_place(position, operation, meeting);
        let subject = place.map(|place| meeting.subject(operation, place.number()));
        match self.accept(meeting, operation, buffer, path, cx) {
            Err((buffer, error)) => {
                drop(state);
                let subject = subject.unwrap_or_else(|| format!("{} of {meeting}", operation.name()));
                let named = if error.subject().is_empty() { error.about(subject) } else { error };
                completion.finish(buffer, Err(named));
            }
            Ok((call, memory)) => {
                let (place, subject) = place.zip(subject).expect("an accepted operation names seats of the meeting");
                let totals = Arc::clone(totals);
                let deposit = Deposit { call, memory, completion, began: Instant::now(), totals };
                state.put(place, Waiting { deposit, position, subject, bounds: None });
                let root = operation.named_rank().and_then(|rank| meeting.position_of(rank));
                self.proceed(state, cx, place, root);
            }
        }
        transfer
    }

    /// Returns the call and its memory; the buffer and the error if the meeting has failed, or if the call is invalid.
    fn accept(
        &self,
        meeting: &Meeting,
        operation: Collective,
        buffer: Buffer,
        path: &DevicePathSlot,
        cx: &CallContext,
    ) -> Result<(Call, Deposited), (Buffer, Error)> {
        if let Some(cause) = self.cause.get() {
            return Err((buffer, cause));
        }
        match meeting.check(operation, &buffer) {
            Ok(call) if call.on_device => {
                path.accept("mem", call, buffer).map(|accepted| (call, Deposited::Device(accepted, cx.clone())))
            }
            Ok(call) => buffer.into_host("mem").map(|memory| (call, Deposited::Host(memory))),
            Err(error) => Err((buffer, error)),
        }
    }

    /// Performs the operation of a new call, if it was the last; ends the meeting, if it cannot be; otherwise lets it wait within `cx`.
    fn proceed(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State>,
        cx: &CallContext,
        place: Place,
        root: Option<usize>,
    ) {
        if let Some(error) = self.differs(&state, place) {
            return self.fail(state, error);
        }
        if let Err(error) = cx.check() {
            return self.expire(state, place, &error);
        }
        if let Some(calls) = state.take_complete(place) {
            if calls.iter().any(|waiting| waiting.deposit.call.on_device) {
                return self.hand_over(state, calls);
            }
            drop(state);
            let deposits = calls.into_iter().map(|waiting| waiting.deposit).collect();
            let source = root.filter(|_| matches!(place, Place::Round { .. })).unwrap_or(0);
            return Work { deposits, source }.perform(&self.runtime, Arc::clone(&self.cause));
        }
        if let Some(error) = self.waits_for_a_rank_that_left(&state) {
            return self.fail(state, error);
        }
        // Weak, because the state holds the handle of the task.
        let (participants, cx) = (Arc::downgrade(self), cx.clone());
        let watch = self.runtime.spawn(async move {
            let ended = cx.bound(Execution::Unknown, std::future::pending::<Result<()>>()).await;
            if let (Some(participants), Err(error)) = (participants.upgrade(), ended) {
                participants.expire(participants.state.lock(), place, &error);
            }
        });
        if let Some(waiting) = state.waiting_mut(place) {
            waiting.bounds = Some(Bounds(watch.abort_handle()));
        }
    }

    /// Starts a call on device memory for each of its ranks, in the order of the calls, which the lock keeps.
    fn hand_over(self: &Arc<Self>, mut state: MutexGuard<'_, State>, calls: Vec<Waiting>) {
        let of_pair = |call: &Call| matches!(call.operation, Collective::Send { .. } | Collective::Receive { .. });
        let elements: Vec<usize> = calls
            .iter()
            .map(|waiting| waiting.deposit.call)
            .filter(|call| !of_pair(call))
            .map(|call| call.elements)
            .collect();
        // The sender of a pair comes first.
        let mut note = Bytes::new();
        for Waiting { deposit, position, subject, bounds } in calls {
            drop(bounds);
            let Deposit { call, memory, completion, began, totals } = deposit;
            let Deposited::Device(accepted, cx) = memory else { continue };
            let told = std::mem::replace(&mut note, accepted.note().clone());
            let started = accepted.start(elements.clone(), told);
            let number = state.moved;
            state.moved += 1;
            state.moving.insert(number, Underway { position, subject: subject.clone(), began });
            let participants = Arc::clone(self);
            self.runtime.spawn(async move {
                let path = started.path();
                let Moved { buffer, mut result } =
                    started.end(&participants.cause, participants.ends(&cx, &subject)).await;
                if let Err(error) = result {
                    participants.abort(if error.subject().is_empty() { error.about(subject) } else { error });
                    result = Err(participants.closed().await);
                }
                participants.state.lock().moving.remove(&number);
                if let Ok(moving) = &mut result {
                    moving.took = began.elapsed();
                    totals.count(call.operation.name(), path, moving);
                }
                completion.finish(buffer, result);
            });
        }
    }

    /// Waits until the meeting fails. Ends it itself at the bounds of a call that is under way.
    async fn ends(&self, cx: &CallContext, subject: &str) {
        let failed = async { Ok(self.cause.wait().await) };
        if let Err(late) = cx.bound(Execution::Unknown, failed).await {
            let why = format!("{}; all ranks have called it, and it was not over", late.message());
            self.abort(Error::unknown(late.code(), why).about(subject.to_owned()));
        }
    }

    /// Ends the meeting because a call still waits at its deadline, or was cancelled.
    fn expire(&self, state: MutexGuard<'_, State>, place: Place, bound: &Error) {
        let Some(waiting) = state.waiting(place) else { return };
        let subject = waiting.subject.clone();
        let missing = self.ranks_at(state.missing(place));
        let why = match &missing[..] {
            [] => format!("{} when the last rank called it", bound.message()),
            missing => format!("{}; {} not called it", bound.message(), has(missing)),
        };
        self.fail(state, Error::unknown(bound.code(), why).about(subject));
    }

    /// Returns the error of a call that differs from that of another rank at its place.
    fn differs(&self, state: &State, place: Place) -> Option<Error> {
        let new = state.waiting(place)?;
        let other = match place {
            Place::Round { number, .. } => {
                state.round(number)?.0.iter().flatten().find(|other| other.position != new.position)?
            }
            Place::Send { .. } | Place::Receive { .. } => state.waiting(place.other_end())?,
        };
        if new.deposit.call.agrees_with(&other.deposit.call) {
            return None;
        }
        let called = |waiting: &Waiting| (self.seats[waiting.position].rank, waiting.deposit.call);
        Some(different_calls(called(other), called(new)).about(new.subject.clone()))
    }

    /// Returns the error of the first call that waits for a rank which has left.
    fn waits_for_a_rank_that_left(&self, state: &State) -> Option<Error> {
        if state.presence.iter().all(|presence| *presence != Presence::Left) {
            return None;
        }
        let left = |missing: Vec<usize>| -> Vec<Rank> {
            self.ranks_at(missing.into_iter().filter(|at| state.presence[*at] == Presence::Left).collect())
        };
        state.places().find_map(|place| {
            let left = left(state.missing(place));
            let subject = state.waiting(place)?.subject.clone();
            let why = || format!("{} left the meeting", has(&left));
            (!left.is_empty()).then(|| Error::unknown(Code::Unavailable, why()).about(subject))
        })
    }

    /// Ends the meeting, and every call that waits.
    fn fail(&self, mut state: MutexGuard<'_, State>, why: Error) {
        self.cause.set(why);
        let waiting = state.drain();
        drop(state);
        for call in waiting {
            let cause = self.cause.get().expect("the cause was set");
            call.deposit.give_back(cause);
        }
    }

    fn ranks_at(&self, positions: Vec<usize>) -> Vec<Rank> {
        positions.into_iter().map(|position| self.seats[position].rank).collect()
    }
}

impl Place {
    fn number(self) -> u64 {
        match self {
            Self::Round { number, .. } | Self::Send { number, .. } | Self::Receive { number, .. } => number,
        }
    }

    /// Returns the receive that meets a send, and the reverse.
    fn other_end(self) -> Self {
        match self {
            Self::Send { number, from, to } => Self::Receive { number, from, to },
            Self::Receive { number, from, to } => Self::Send { number, from, to },
            round @ Self::Round { .. } => round,
        }
    }
}

impl State {
    /// Returns the place of the next call of a rank; `None` if it names a rank without a seat.
    fn next_place(&self, position: usize, operation: Collective, meeting: &Meeting) -> Option<Place> {
        let count = |from, to| self.pairs.get(&(from, to)).map_or((0, 0), |pair| (pair.sent, pair.received));
        Some(match operation {
            Collective::Send { to } => {
                let to = meeting.position_of(to)?;
                Place::Send { number: count(position, to).0, from: position, to }
            }
            Collective::Receive { from } => {
                let from = meeting.position_of(from)?;
                Place::Receive { number: count(from, position).1, from, to: position }
            }
            _ => Place::Round { number: self.called[position], position },
        })
    }

    fn put(&mut self, place: Place, waiting: Waiting) {
        match place {
            Place::Round { number, position } => {
                self.called[position] += 1;
                let at = self.at(number).expect("a rank has called every operation that is over");
                if at == self.rounds.len() {
                    self.rounds.push_back(Round(self.presence.iter().map(|_| None).collect()));
                }
                self.rounds[at].0[position] = Some(waiting);
            }
            Place::Send { from, to, .. } => {
                let pair = self.pairs.entry((from, to)).or_default();
                pair.sent += 1;
                pair.sends.push_back(waiting);
            }
            Place::Receive { from, to, .. } => {
                let pair = self.pairs.entry((from, to)).or_default();
                pair.received += 1;
                pair.receives.push_back(waiting);
            }
        }
    }

    /// Takes the calls of an operation that all of its ranks have called.
    fn take_complete(&mut self, place: Place) -> Option<Vec<Waiting>> {
        if !self.missing(place).is_empty() {
            return None;
        }
        match place {
            // The calls before it are complete too, so that they have been taken.
            Place::Round { .. } => {
                self.first += 1;
                let round = self.rounds.pop_front()?;
                Some(round.0.into_iter().flatten().collect())
            }
            Place::Send { from, to, .. } | Place::Receive { from, to, .. } => {
                let pair = self.pairs.get_mut(&(from, to))?;
                let (send, receive) = (pair.sends.pop_front()?, pair.receives.pop_front()?);
                Some(vec![send, receive])
            }
        }
    }

    /// Returns the positions that have not made the call of a place.
    fn missing(&self, place: Place) -> Vec<usize> {
        match place {
            Place::Round { number, .. } => {
                let calls = self.round(number).map_or(&[][..], |round| &round.0);
                (0..calls.len()).filter(|position| calls[*position].is_none()).collect()
            }
            Place::Send { to: other, .. } | Place::Receive { from: other, .. } => {
                if self.waiting(place.other_end()).is_some() { Vec::new() } else { vec![other] }
            }
        }
    }

    fn waiting(&self, place: Place) -> Option<&Waiting> {
        match place {
            Place::Round { number, position } => self.round(number)?.0[position].as_ref(),
            Place::Send { number, from, to } => {
                let pair = self.pairs.get(&(from, to))?;
                pair.sends.get(place_in(&pair.sends, pair.sent, number)?)
            }
            Place::Receive { number, from, to } => {
                let pair = self.pairs.get(&(from, to))?;
                pair.receives.get(place_in(&pair.receives, pair.received, number)?)
            }
        }
    }

    fn waiting_mut(&mut self, place: Place) -> Option<&mut Waiting> {
        match place {
            Place::Round { number, position } => {
                let at = self.at(number)?;
                self.rounds.get_mut(at)?.0[position].as_mut()
            }
            Place::Send { number, from, to } => {
                let pair = self.pairs.get_mut(&(from, to))?;
                let at = place_in(&pair.sends, pair.sent, number)?;
                pair.sends.get_mut(at)
            }
            Place::Receive { number, from, to } => {
                let pair = self.pairs.get_mut(&(from, to))?;
                let at = place_in(&pair.receives, pair.received, number)?;
                pair.receives.get_mut(at)
            }
        }
    }

    fn round(&self, number: u64) -> Option<&Round> {
        self.rounds.get(self.at(number)?)
    }

    /// Returns the index of a round, which may be the next one; `None` if the round is over.
    fn at(&self, number: u64) -> Option<usize> {
        number.checked_sub(self.first).map(|at| at as usize)
    }

    /// Returns the place of every call that waits.
    fn places(&self) -> impl Iterator<Item = Place> {
        let rounds = self.rounds.iter().zip(self.first..).flat_map(|(round, number)| {
            (0..round.0.len())
                .filter(|at| round.0[*at].is_some())
                .map(move |position| Place::Round { number, position })
        });
        let pairs = self.pairs.iter().flat_map(|((from, to), pair)| {
            let (from, to) = (*from, *to);
            let sends =
                (pair.sent - pair.sends.len() as u64..pair.sent).map(move |number| Place::Send { number, from, to });
            let receives = (pair.received - pair.receives.len() as u64..pair.received)
                .map(move |number| Place::Receive { number, from, to });
            sends.chain(receives)
        });
        rounds.chain(pairs)
    }

    /// Takes every call that waits.
    fn drain(&mut self) -> Vec<Waiting> {
        let rounds = std::mem::take(&mut self.rounds).into_iter().flat_map(|round| round.0.into_iter().flatten());
        let pairs =
            std::mem::take(&mut self.pairs).into_values().flat_map(|pair| pair.sends.into_iter().chain(pair.receives));
        rounds.chain(pairs).collect()
    }
}

/// Returns the index of a call in the queue of one side, which has had `count` calls.
fn place_in(queue: &VecDeque<Waiting>, count: u64, number: u64) -> Option<usize> {
    let first = count - queue.len() as u64;
    number.checked_sub(first).map(|at| at as usize)
}

impl fmt::Debug for Participants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Participants").field("seats", &self.seats).finish_non_exhaustive()
    }
}
