//! The operations of one rank in their order: a lane for the collective ones, and one for the sends to each rank and for the receives from it.

use std::fmt;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::{Bytes, BytesMut};
use gym_core::group::collective::{Call, Collective, Completion, Moved, Moving, OnDevice, Started, different_calls};
use gym_core::{CallContext, Code, Error, Execution, Result};
use gym_segment::Failure;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use super::answers::Answers;
use super::participant::{Participant, Place, State};
use super::pieces::OperationMemory;
use super::shared::{Done, Lent, SharedLane};
use super::wire::Called;
use super::{pair, ring};

/// The time for the answers that are still due when a rank has left.
const ANSWERS_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(1);

/// The time after the deadline of a call in which the rank itself notices that it has passed.
const DEADLINE_MARGIN_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);
/// The time in which a rank that has ended an operation in shared memory tells why.
const TOLD_TIMEOUT: std::time::Duration = std::time::Duration::from_millis(500);

/// Operations of one kind that a rank may have called and not ended.
const OPERATIONS_MAX: usize = 4_096;

/// The memory of a call.
pub(super) enum CallMemory {
    Host(Lent),
    Device(OnDevice),
}

/// A call.
pub(super) struct Operation {
    pub(super) call: Call,
    pub(super) memory: CallMemory,
    pub(super) completion: Completion,
    pub(super) cx: CallContext,
    pub(super) began: Instant,
}

/// The queue of a lane. Its task ends when this is dropped, after the operations in it.
pub(super) struct Lane {
    queue: mpsc::Sender<Queued>,
    waiting: Arc<AtomicUsize>,
}

struct Queued {
    operation: Operation,
    place: Place,
    /// Ends the meeting at the deadline of an operation that waits for those before it.
    _watch: Option<AbortOnDropHandle<()>>,
}

impl Lane {
    /// Starts the task of a lane.
    pub(super) fn new(participant: &Arc<Participant>) -> Self {
        let (queue, operations) = mpsc::channel(OPERATIONS_MAX);
        let waiting = Arc::new(AtomicUsize::new(0));
        participant.runtime().spawn(run(Arc::clone(participant), operations, Arc::clone(&waiting)));
        Self { queue, waiting }
    }

    /// Adds an operation, at the place that `place` takes for it. Rejects it if too many wait; it takes no place then.
    pub(super) fn push(&self, participant: &Arc<Participant>, operation: Operation, place: impl FnOnce() -> Place) {
        let Ok(queued) = self.queue.try_reserve() else {
            let name = operation.call.operation.name();
            let why = format!("{OPERATIONS_MAX} operations of this rank wait; await them before more are called");
            let error =
                Error::not_started(Code::ResourceExhausted, why).about(format!("{name} of {}", participant.meeting));
            let buffer = match operation.memory {
                CallMemory::Host(memory) => memory.into_buffer(operation.call.dtype),
                CallMemory::Device(accepted) => accepted.into_buffer(),
            };
            return operation.completion.finish(buffer, Err(error));
        };
        let place = place();
        let behind_others = self.waiting.fetch_add(1, Ordering::AcqRel) > 0;
        let watch = behind_others.then(|| {
            let (weak, cx, collective) = (Arc::downgrade(participant), operation.cx.clone(), operation.call.operation);
            AbortOnDropHandle::new(participant.runtime().spawn(async move {
                let late = late(&cx).await;
                if let Some(participant) = weak.upgrade() {
                    expire(&participant, collective, place, &late, false).await;
                }
            }))
        });
        queued.send(Queued { operation, place, _watch: watch });
    }
}

/// Waits for the deadline or the cancellation of a call.
async fn late(cx: &CallContext) -> Error {
    // A timer ends no earlier than at the next tick of its clock.
    if let Err(late) = cx.check() {
        return late;
    }
    let ended = cx.bound(Execution::Unknown, pending::<Result<()>>()).await;
    ended.expect_err("only the bounds end this wait")
}

async fn run(participant: Arc<Participant>, mut operations: mpsc::Receiver<Queued>, waiting: Arc<AtomicUsize>) {
    let mut answers = Answers::default();
    let mut underway = JoinSet::new();
    loop {
        let queued = tokio::select! { biased;
            queued = operations.recv() => queued,
            () = answers.next(&participant), if !answers.is_empty() => continue,
        };
        let Some(Queued { operation, place, _watch: watch }) = queued else { break };
        drop(watch);
        let (call, number, trace) = (operation.call, place.number(), operation.cx.trace);
        let span = tracing::info_span!("collective", operation = %call, number, meeting = %participant.meeting, trace_id = %trace.trace());
        perform(&participant, operation, place, &mut answers, &mut underway).instrument(span).await;
        waiting.fetch_sub(1, Ordering::AcqRel);
        while underway.try_join_next().is_some() {}
        if underway.len() >= OPERATIONS_MAX {
            underway.join_next().await;
        }
    }
    underway.detach_all();
    // What was sent must arrive, although nobody calls any more.
    drop(timeout(ANSWERS_TIMEOUT, answers.at_most(&participant, 0)).await);
}

/// Performs an operation, within the first cause of a failure and the bounds of its call, and gives its buffer back. One on device memory ends in a task of
/// its own, once all ranks have called it, so that the next one need not wait for the device.
async fn perform(
    participant: &Arc<Participant>,
    operation: Operation,
    place: Place,
    answers: &mut Answers,
    underway: &mut JoinSet<()>,
) {
    let Operation { call, memory, completion, cx, began } = operation;
    participant.begin(call.operation, place, began);
    let mut memory = match memory {
        CallMemory::Host(memory) => memory,
        CallMemory::Device(accepted) => match agree(participant, &cx, call, place, accepted.note(), answers).await {
            Ok((elements, note)) => {
                participant.agreed(place);
                let started = accepted.start(elements, note);
                let ending = on_device(Arc::clone(participant), cx, call, place, started, completion, began);
                underway.spawn_on(ending.in_current_span(), participant.runtime());
                return;
            }
            Err(ended) => {
                let cause = end(participant, call.operation, place, ended).await;
                participant.ended(call.operation, place, None, None);
                return completion.finish(accepted.into_buffer(), Err(cause));
            }
        },
    };
    let bytes = memory.len();
    let moved = match (place, participant.shared()) {
        (Place::Round(number), Some(shared)) => {
            in_shared_memory(participant, shared, &cx, call, number, &mut memory).await.map(drop)
        }
        _ => {
            let (private, shared) = match std::mem::take(&mut memory) {
                Lent::Private(bytes) => (bytes, None),
                Lent::Shared(shared) => (BytesMut::from(&shared[..]), Some(shared)),
            };
            let mut held = OperationMemory::new(private);
            let moved = over_channels(participant, &cx, call, place, &mut held, answers).await;
            let private = if moved.is_ok() { held.whole } else { held.give_up().await };
            memory = match shared {
                Some(mut shared) if shared.len() == private.len() => {
                    shared.copy_from_slice(&private);
                    Lent::Shared(shared)
                }
                _ => Lent::Private(private),
            };
            moved
        }
    };
    let result = match moved {
        Ok(()) => Ok(Moving::new(bytes.max(memory.len()) as u64, began.elapsed())),
        Err(ended) => Err(end(participant, call.operation, place, ended).await),
    };
    participant.ended(call.operation, place, None, result.as_ref().ok());
    completion.finish(memory.into_buffer(call.dtype), result);
}

/// Waits until all ranks have made a call on device memory, or both of a pair. Returns the number of elements of each, and what the sender of a pair tells.
async fn agree(
    participant: &Arc<Participant>,
    cx: &CallContext,
    call: Call,
    place: Place,
    note: &Bytes,
    answers: &mut Answers,
) -> Result<(Vec<usize>, Bytes), Ended> {
    let (no_elements, no_note) = (Vec::new(), Bytes::new());
    match (place, participant.shared()) {
        (Place::Round(number), Some(shared)) => {
            Ok((in_shared_memory(participant, shared, cx, call, number, &mut Lent::default()).await?, no_note))
        }
        (Place::Round(number), None) => {
            Ok((within(participant, cx, ring::agree(participant, cx, call, number, answers)).await?, no_note))
        }
        (Place::Send { to, number }, _) => {
            let mut note = OperationMemory::new(BytesMut::from(&note[..]));
            within(participant, cx, pair::send(participant, cx, call, to, number, &mut note, answers)).await?;
            Ok((no_elements, no_note))
        }
        (Place::Receive { from, number }, _) => {
            Ok((no_elements, within(participant, cx, pair::agree(participant, call, from, number)).await?))
        }
    }
}

/// Waits for the end of an operation on device memory, and gives its buffer back.
async fn on_device(
    participant: Arc<Participant>,
    cx: CallContext,
    call: Call,
    place: Place,
    started: Started,
    completion: Completion,
    began: Instant,
) {
    let path = started.path();
    let needed: Vec<usize> = match place {
        Place::Round(_) => participant.others().collect(),
        Place::Send { to: other, .. } | Place::Receive { from: other, .. } => vec![other],
    };
    let failing = async {
        let lost = participant.wait_until(|state: &mut State| participant.lost_from(state, &needed));
        let ended = tokio::select! { biased;
            cause = participant.cause.wait() => Ended::Failed(cause),
            late = late(&cx) => Ended::Late(late),
            lost = lost => Ended::Own(lost),
        };
        match ended {
            Ended::Late(late) => expire(&participant, call.operation, place, &late, true).await,
            ended => drop(end(&participant, call.operation, place, ended).await),
        }
    };
    let Moved { buffer, result } = started.end(&participant.cause, failing).await;
    let result = match result {
        Ok(moving) => Ok(Moving::new(moving.bytes, began.elapsed())),
        Err(error) => Err(end(&participant, call.operation, place, Ended::Own(error)).await),
    };
    participant.ended(call.operation, place, Some(path), result.as_ref().ok());
    completion.finish(buffer, result);
}

async fn over_channels(
    participant: &Arc<Participant>,
    cx: &CallContext,
    call: Call,
    place: Place,
    memory: &mut OperationMemory,
    answers: &mut Answers,
) -> Result<(), Ended> {
    let moving = async {
        match place {
            Place::Round(number) => ring::round(participant, cx, call, number, memory, answers).await,
            Place::Send { to, number } => pair::send(participant, cx, call, to, number, memory, answers).await,
            Place::Receive { from, number } => pair::receive(participant, call, from, number, memory).await,
        }
    };
    within(participant, cx, moving).await
}

/// Waits within the first cause of a failure and the bounds of a call.
async fn within<T>(
    participant: &Participant,
    cx: &CallContext,
    moving: impl Future<Output = Result<T>>,
) -> Result<T, Ended> {
    tokio::select! { biased;
        cause = participant.cause.wait() => Err(Ended::Failed(cause)),
        late = late(cx) => Err(Ended::Late(late)),
        moved = moving => moved.map_err(Ended::Own),
    }
}

/// Performs a collective operation on the thread of the rank. It has the memory until the operation ends, and every failure ends it at once.
async fn in_shared_memory(
    participant: &Arc<Participant>,
    shared: &SharedLane,
    cx: &CallContext,
    call: Call,
    number: u64,
    memory: &mut Lent,
) -> Result<Vec<usize>, Ended> {
    // The thread would come to an operation that is over for this rank.
    if let Err(late) = cx.check() {
        return Err(Ended::Late(late));
    }
    let root = call.operation.named_rank().and_then(|rank| participant.meeting.position_of(rank)).unwrap_or_default();
    // The bounds of the call are looked at here, where the error can name the ranks.
    let last = cx.deadline.into_std() + DEADLINE_MARGIN_TIMEOUT;
    let mut done = shared.perform(call, root, std::mem::take(memory), last);
    let absent = participant.wait_until(|state: &mut State| {
        participant.others().find_map(|other| participant.gone_from(state, other, number))
    });
    let ended = tokio::select! { biased;
        done = &mut done => Ok(done),
        cause = participant.cause.wait() => Err(Ended::Failed(cause)),
        late = late(cx) => Err(Ended::Late(late)),
        absent = absent => Err(Ended::Own(absent)),
    };
    let (done, ended) = match ended {
        Ok(done) => (done, Ok(())),
        Err(ended) => {
            // An abort hides which ranks are behind this one, so it comes after the cause.
            let cause = end(participant, call.operation, Place::Round(number), ended).await;
            shared.abort();
            (done.await, Err(Ended::Failed(cause)))
        }
    };
    let Ok(Done { memory: back, result }) = done else {
        return Err(Ended::Own(Error::internal("the thread for collective operations has ended")));
    };
    *memory = back;
    ended?;
    match result {
        Ok(elements) => {
            participant.lock().heard = number + 1;
            if let (Collective::ReduceScatter(_), false) = (call.operation, call.on_device) {
                let slice = ring::bytes_of(call, participant.world_size(), participant.position());
                *memory = Lent::Private(BytesMut::from(&memory.bytes()[slice]));
            }
            Ok(elements)
        }
        Err(Failure::Aborted) => {
            // Whoever has ended it tells why, unless it ends itself at that moment.
            let told = timeout(TOLD_TIMEOUT, participant.cause.wait()).await;
            let why = || Error::unknown(Code::Unavailable, "another rank has ended the meeting, and has not said why");
            Err(told.map_or_else(|_| Ended::Own(why()), Ended::Failed))
        }
        Err(Failure::Differs { position, own, other_position, other: Some(other) }) => {
            // The segment knows positions only.
            let of_ranks = |position: usize, call: Call| {
                let operation = match call.operation {
                    Collective::Broadcast { root } => {
                        Collective::Broadcast { root: participant.rank_at(root as usize) }
                    }
                    operation => operation,
                };
                (participant.rank_at(position), Call { operation, ..call })
            };
            Err(Ended::Own(different_calls(of_ranks(position, own), of_ranks(other_position, other))))
        }
        Err(Failure::Late { .. }) => Err(Ended::Late(late(cx).await)),
        Err(failure) => Err(Ended::Own(failure.into())),
    }
}

/// Ends the meeting because of an operation. Returns the first cause.
async fn end(participant: &Arc<Participant>, operation: Collective, place: Place, ended: Ended) -> Error {
    match ended {
        Ended::Failed(cause) => return cause,
        Ended::Late(late) => expire(participant, operation, place, &late, false).await,
        Ended::Own(error) => participant.fail(error.about(participant.meeting.subject(operation, place.number()))),
    }
    participant.cause.wait().await
}

/// Why an operation did not succeed.
enum Ended {
    Failed(Error),
    Late(Error),
    Own(Error),
}

/// Ends the meeting because the bounds of a call have passed. `agreed` says whether all of its ranks have called it.
async fn expire(participant: &Arc<Participant>, operation: Collective, place: Place, late: &Error, agreed: bool) {
    let subject = participant.meeting.subject(operation, place.number());
    let has_called = move |called: Called| match place {
        _ if agreed => true,
        Place::Round(number) => called.rounds > number,
        Place::Send { number, .. } => called.receives > number,
        Place::Receive { number, .. } => called.sends > number,
    };
    participant.expire(late, subject, place, has_called).await;
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lane({} operations)", self.waiting.load(Ordering::Acquire))
    }
}
