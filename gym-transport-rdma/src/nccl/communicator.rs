//! One rank of a meeting whose device memory NCCL moves.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use gym_core::group::collective::{
    Buffer, Call, Collective, Communicator, Meeting, Memory, Moving, Transfer, different_calls, reduction::slice_of,
};
use gym_core::group::{DType, Rank};
use gym_core::{CallContext, Code, Error, Execution, Result};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::nccl::cuda::{CudaDevice, CudaMemory};
use crate::nccl::engine::{Cause, Command, Engine, OnFailure, Run};
use crate::nccl::failure::{again, failed};
use crate::nccl::raw::{Communication, Operation, nccl_type};
use crate::nccl::{UNIQUE_ID_BYTES, UniqueId};

/// Bytes in which a rank tells the others what it calls.
const CALL_BYTES: usize = 192;
/// Calls of the host's meeting before the first one of a rank: its facts, and the id.
const CALLS_OF_JOIN: u64 = 2;
/// Time for the other ranks to say that they live, when an operation did not end by its deadline.
const ANSWER_WITHIN: Duration = Duration::from_millis(100);

/// One rank of a meeting. Host memory goes the way of the host communicator; device memory goes over NCCL, once all ranks have agreed on the call.
#[derive(Debug)]
pub(super) struct NcclCommunicator(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) host: Arc<dyn Communicator>,
    pub(super) rank: Arc<RankDevice>,
    /// The number of the communicator of all ranks at the engine.
    pub(super) all: u64,
    pub(super) runtime: Handle,
    /// Locked while an operation takes its place in the order.
    pub(super) places: Mutex<Places>,
    /// Whether the engine was told to abort.
    pub(super) aborted: AtomicBool,
}

/// What a rank has, whatever it joins.
#[derive(Debug)]
pub(super) struct RankDevice {
    pub(super) communication: Communication,
    pub(super) device: CudaDevice,
    pub(super) engine: Engine,
    pub(super) numbers: AtomicU64,
}

/// The order of a rank's operations on device memory.
///
/// A send and its receive have a communicator of their own for each pair and direction, so that sends which cross do not wait for each other in one stream.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// The calls so far, also on host memory: of all ranks, and by the other rank and whether this one sends.
    calls: Vec<Collective>,
    calls_of_pairs: BTreeMap<(Rank, bool), u64>,
    all: u64,
    /// By the other rank, and whether this one sends.
    pairs: BTreeMap<(Rank, bool), Pair>,
}

#[derive(Clone, Copy, Debug)]
struct Pair {
    comm: u64,
    next: u64,
}

/// The place of an operation: the communicator at the engine, and the number there.
#[derive(Debug)]
struct Place {
    comm: u64,
    number: u64,
    /// The number among all calls of its kind, for errors.
    call: u64,
    /// The first of a pair, whose communicator is yet to be joined.
    first: bool,
}

/// A call, and its memory of the device; a barrier has none.
type Accepted = (Call, Option<Box<CudaMemory>>);

#[async_trait]
impl Communicator for NcclCommunicator {
    fn meeting(&self) -> &Meeting {
        self.0.host.meeting()
    }

    fn start(&self, cx: &CallContext, operation: Collective, buffer: Buffer) -> Transfer {
        // Where one rank calls a barrier, and another one an operation on device memory, both are told by what they call.
        if !matches!(buffer.memory, Memory::Device(_)) && operation != Collective::Barrier {
            let mut places = self.0.places.lock().unwrap_or_else(PoisonError::into_inner);
            // A call that is rejected takes no place.
            if self.meeting().check(operation, &buffer).is_ok() {
                places.count(operation);
            }
            return self.0.host.start(cx, operation, buffer);
        }
        let began = Instant::now();
        let (completion, transfer) = Transfer::new();
        let (call, memory) = match self.accept(operation, buffer) {
            Ok(accepted) => accepted,
            Err((buffer, error)) => {
                let subject = format!("{} of {}", operation.name(), self.meeting());
                completion.finish(buffer, Err(error.about(subject)));
                return transfer;
            }
        };
        let mut places = self.0.places.lock().unwrap_or_else(PoisonError::into_inner);
        let place = places.take(operation, &self.0);
        let told = self.0.tell(cx, &call, &place);
        drop(places);
        let (inner, cx) = (Arc::clone(&self.0), cx.clone());
        self.0.runtime.spawn(async move {
            let subject = inner.subject(operation, place.call);
            let agreed = match told {
                Ok(told) => inner.agree(&call, &place, told, &subject).await,
                Err(error) => {
                    // The place is taken, so the meeting ends.
                    inner.host.abort(again(&error).about(subject.clone()));
                    Err(error)
                }
            };
            let (buffer, result) = match (memory, agreed) {
                (Some(memory), Ok(lengths)) => inner.run(&cx, &call, &lengths, place, memory, began, &subject).await,
                (memory, agreed) => {
                    let memory = memory.map(|memory| Buffer::new(call.dtype, Memory::Device(memory)));
                    (memory.unwrap_or_else(Buffer::empty), agreed.map(|_| Moving::new(0, began.elapsed())))
                }
            };
            completion.finish(buffer, result);
        });
        transfer
    }

    fn abort(&self, why: Error) {
        self.0.host.abort(why);
    }

    async fn closed(&self) -> Error {
        self.0.closed().await
    }
}

impl NcclCommunicator {
    /// Takes a barrier, or a call on device memory that NCCL can make.
    fn accept(&self, operation: Collective, buffer: Buffer) -> Result<Accepted, (Buffer, Error)> {
        let call = match self.meeting().check(operation, &buffer) {
            Ok(call) if nccl_type(call.dtype).is_some() => call,
            Ok(call) => {
                return Err((buffer, Error::not_started(Code::Unimplemented, format!("NCCL has no {}", call.dtype))));
            }
            Err(error) => return Err((buffer, error)),
        };
        let dtype = buffer.dtype;
        let Memory::Device(memory) = buffer.memory else { return Ok((call, None)) };
        let of_here = (&*memory as &dyn Any).downcast_ref::<CudaMemory>();
        if of_here.is_none_or(|memory| memory.device().number() != self.0.rank.device.number()) {
            let why = format!("the rank moves memory of {:?}, not {memory:?}; copy it there first", self.0.rank.device);
            return Err((Buffer::new(dtype, Memory::Device(memory)), Error::not_started(Code::Unimplemented, why)));
        }
        match (memory as Box<dyn Any>).downcast() {
            Ok(memory) => Ok((call, Some(memory))),
            Err(_) => Err((Buffer::empty(), Error::internal("the memory is of another type"))),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Each operation has a share in it, so this comes after the last one; the engine then ends its communicators.
        for comm in self.comms() {
            let _ = self.rank.engine.tell(Command::Release(comm));
        }
    }
}

impl Places {
    /// Returns the number of a call among those of its kind.
    fn count(&mut self, operation: Collective) -> u64 {
        let Some(pair) = pair(operation) else {
            self.calls.push(operation);
            return self.calls.len() as u64 - 1;
        };
        let calls = self.calls_of_pairs.entry(pair).or_default();
        *calls += 1;
        *calls - 1
    }

    fn take(&mut self, operation: Collective, inner: &Inner) -> Place {
        let call = self.count(operation);
        let Some(pair) = pair(operation) else {
            let number = self.all;
            self.all += u64::from(operation != Collective::Barrier);
            return Place { comm: inner.all, number, call, first: false };
        };
        let new = || Pair { comm: inner.rank.numbers.fetch_add(1, Ordering::Relaxed), next: 0 };
        let pair = self.pairs.entry(pair).or_insert_with(new);
        pair.next += 1;
        Place { comm: pair.comm, number: pair.next - 1, call, first: pair.next == 1 }
    }
}

/// Returns the other rank of a send or receive, and whether this one sends.
fn pair(operation: Collective) -> Option<(Rank, bool)> {
    match operation {
        Collective::Send { to } => Some((to, true)),
        Collective::Receive { from } => Some((from, false)),
        _ => None,
    }
}

impl Inner {
    /// Returns the numbers of all communicators.
    fn comms(&self) -> Vec<u64> {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.pairs.values().map(|pair| pair.comm).chain([self.all]).collect()
    }

    /// Tells the other ranks what this one calls, at its place in the order. The sender of a pair also sends the id of their communicator.
    fn tell(self: &Arc<Self>, cx: &CallContext, call: &Call, place: &Place) -> Result<Transfer> {
        let mut text = written(call);
        let operation = match call.operation {
            Collective::Send { .. } => {
                let mut id = [0; UNIQUE_ID_BYTES];
                if place.first {
                    let made = self.rank.communication.nccl().unique_id().map_err(|error| failed(&error))?;
                    id = *made.as_bytes();
                    self.join_pair(made, place.comm, 0)?;
                }
                text.extend_from_slice(&id);
                call.operation
            }
            Collective::Receive { .. } => {
                text.resize(CALL_BYTES + UNIQUE_ID_BYTES, 0);
                call.operation
            }
            _ => Collective::AllGather,
        };
        Ok(self.host.start(cx, operation, Buffer::host(DType::U8, text)))
    }

    fn join_pair(self: &Arc<Self>, id: UniqueId, comm: u64, position: usize) -> Result<()> {
        // Nobody waits for the answer: an operation waits for the communicator at the engine, and a failure ends the meeting.
        let (joined, _) = oneshot::channel();
        let on_failure = on_failure(&self.host);
        let join = Command::Join { comm, id: Box::new(id), world_size: 2, position, on_failure, joined };
        self.rank.engine.tell(join).map_err(|(_, error)| error)
    }

    /// Waits until all ranks, or both of a pair, have told their calls, and compares them. Returns the number of elements of each.
    async fn agree(self: &Arc<Self>, own: &Call, place: &Place, told: Transfer, subject: &str) -> Result<Vec<usize>> {
        let moved = told.await;
        moved.result.map_err(|error| self.translated(error))?;
        let meeting = self.host.meeting();
        let bytes = moved.buffer.host_bytes().unwrap_or_default();
        let (width, ranks) = match own.operation {
            // What was sent is still here.
            Collective::Send { .. } => return Ok(Vec::new()),
            Collective::Receive { from } => (CALL_BYTES + UNIQUE_ID_BYTES, vec![from]),
            _ => (CALL_BYTES, meeting.seats.iter().map(|seat| seat.rank).collect()),
        };
        let mut lengths = Vec::with_capacity(ranks.len());
        for (rank, told) in ranks.into_iter().zip(bytes.chunks(width)) {
            let call = serde_json::from_slice::<Call>(&told[..CALL_BYTES.min(told.len())]);
            let call =
                call.map_err(|error| Error::internal("a rank tells its call in another form").caused_by(error))?;
            if !own.agrees_with(&call) {
                self.host.abort(different_calls((meeting.rank, *own), (rank, call)).about(subject.to_owned()));
                // Another rank may have found it first.
                return Err(self.closed().await);
            }
            lengths.push(call.elements);
            if place.first
                && let Some(id) = told[CALL_BYTES..].try_into().ok()
            {
                self.join_pair(UniqueId::new(id), place.comm, 1).inspect_err(|error| self.host.abort(again(error)))?;
            }
        }
        Ok(lengths)
    }

    /// Runs an operation on which the ranks have agreed.
    #[allow(clippy::too_many_arguments)]
    async fn run(
        self: &Arc<Self>,
        cx: &CallContext,
        call: &Call,
        lengths: &[usize],
        place: Place,
        memory: Box<CudaMemory>,
        began: Instant,
        subject: &str,
    ) -> (Buffer, Result<Moving>) {
        let (meeting, size) = (self.host.meeting(), call.dtype.size());
        let world_size = meeting.world_size();
        let of_root = |root: Rank| meeting.position_of(root).unwrap_or_default();
        let equal = lengths.iter().all(|length| *length == call.elements);
        let (operation, count, result_elements) = match call.operation {
            Collective::AllReduce(op) => (Operation::AllReduce(op), call.elements, None),
            Collective::Broadcast { root } => (Operation::Broadcast { position: of_root(root) }, call.elements, None),
            Collective::AllGather if equal => (Operation::AllGather, call.elements, Some(call.elements * world_size)),
            Collective::AllGather => {
                let all = lengths.iter().sum();
                (Operation::AllGatherParts(lengths.to_vec()), call.elements, Some(all))
            }
            Collective::ReduceScatter(op) => {
                let part = |position| slice_of(call.elements, world_size, position).len();
                let (parts, own) = ((0..world_size).map(part).collect::<Vec<_>>(), part(meeting.position()));
                let operation = match call.elements % world_size {
                    0 => Operation::ReduceScatter(op),
                    _ => Operation::ReduceScatterParts(op, parts),
                };
                (operation, own, Some(own))
            }
            Collective::Send { .. } => (Operation::Send { position: 1 }, call.elements, None),
            Collective::Receive { .. } => (Operation::Receive { position: 0 }, call.elements, None),
            other => {
                let error = Error::internal(format!("{other} is no operation of NCCL"));
                return (Buffer::new(call.dtype, Memory::Device(memory)), Err(error));
            }
        };
        let result = match result_elements.map(|elements| self.rank.device.allocate(elements * size)).transpose() {
            Ok(result) => result.map(Box::new),
            Err(error) => {
                let error = || Error::not_started(Code::ResourceExhausted, error.to_string());
                self.host.abort(error().about(subject.to_owned()));
                return (Buffer::new(call.dtype, Memory::Device(memory)), Err(error()));
            }
        };
        let (completion, transfer) = Transfer::new();
        let (number, dtype) = (place.number, call.dtype);
        let run = Run { number, operation, count, dtype, memory, result, completion, began };
        if let Err((command, error)) = self.rank.engine.tell(Command::Run(place.comm, Box::new(run))) {
            self.host.abort(again(&error));
            let Command::Run(_, run) = command else { return (Buffer::empty(), Err(error)) };
            return (Buffer::new(dtype, Memory::Device(run.memory)), Err(error));
        }
        let mut transfer = std::pin::pin!(transfer);
        let ended = async {
            tokio::select! {
                biased;
                moved = transfer.as_mut() => Ok(Some(moved)),
                _ = self.host.closed() => Ok(None),
            }
        };
        let moved = match cx.bound(Execution::Unknown, ended).await {
            Ok(Some(moved)) => moved,
            failed => {
                if let Err(late) = failed {
                    self.end(late, subject).await;
                }
                self.abort(self.closed().await).await;
                // The engine returns the memory when NCCL no longer uses it.
                transfer.await
            }
        };
        (moved.buffer, moved.result)
    }

    /// Ends the meeting because an operation did not end in time. A rank that lives says so: the first one that does not is the cause.
    async fn end(&self, late: Error, subject: &str) {
        let cx = CallContext::within(ANSWER_WITHIN);
        let answered = self.host.start(&cx, Collective::Barrier, Buffer::empty()).await.result;
        let why = match answered {
            Ok(_) => format!("{}: all ranks answer, and NCCL does not end the operation", late.message()),
            // The failure of the barrier has ended the meeting already.
            Err(error) => error.message().to_owned(),
        };
        self.host.abort(Error::new(late.code(), Execution::Unknown, why).about(subject.to_owned()));
    }

    async fn closed(&self) -> Error {
        self.translated(self.host.closed().await)
    }

    /// Returns the subject of an operation for the host's meeting, in which an agreement stands for it. All failures pass through that meeting, and each rank
    /// [translates](Self::translated) the first one.
    fn subject(&self, operation: Collective, call: u64) -> String {
        match pair(operation) {
            Some(_) => self.host.meeting().subject(operation, call),
            None => self.host.meeting().subject(Collective::AllGather, call + CALLS_OF_JOIN),
        }
    }

    /// Returns a failure of the host's meeting with the operation for which this rank had called it.
    fn translated(&self, error: Error) -> Error {
        let meeting = self.host.meeting();
        let call = error.subject().strip_suffix(&format!(" of {meeting}")).and_then(|call| call.split_once(' '));
        let Some((name @ ("all_gather" | "barrier"), number)) = call else { return error };
        let number = number.parse().unwrap_or(u64::MAX).saturating_sub(CALLS_OF_JOIN);
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let operation = usize::try_from(number).ok().and_then(|number| places.calls.get(number));
        // The barrier of a passed deadline comes after the operation that did not end.
        let last = || places.calls.last().filter(|_| name == "barrier");
        match (operation, last()) {
            (Some(operation), _) => error.about(meeting.subject(*operation, number)),
            (None, Some(operation)) => error.about(meeting.subject(*operation, places.calls.len() as u64 - 1)),
            (None, None) => error,
        }
    }

    /// Ends the communicator of NCCL with the first cause of the meeting.
    pub(super) async fn abort(&self, cause: Error) {
        if self.aborted.swap(true, Ordering::AcqRel) {
            return;
        }
        let cause: Cause = Arc::new(move || again(&cause));
        for comm in self.comms() {
            // The thread takes commands all the time.
            while let Err((_, error)) = self.rank.engine.tell(Command::Abort(comm, Arc::clone(&cause))) {
                if error.code() != Code::ResourceExhausted {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
}

/// Returns what ends the meeting when a communicator of NCCL fails. It holds no rank in the meeting.
pub(super) fn on_failure(host: &Arc<dyn Communicator>) -> OnFailure {
    let (failing, rank) = (Arc::downgrade(host), host.meeting().rank);
    Box::new(move |error: Error| {
        if let Some(host) = failing.upgrade() {
            let why = format!("rank {rank} has failed: {}", error.message());
            host.abort(Error::new(error.code(), error.execution(), why));
        }
    })
}

/// Returns the text of a call, with spaces up to its fixed length.
fn written(call: &Call) -> BytesMut {
    let mut text = serde_json::to_vec(call).unwrap_or_default();
    text.resize(CALL_BYTES.max(text.len()), b' ');
    BytesMut::from(&text[..])
}
