//! NCCL as the way of the device memory of one rank in a meeting.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use gym_core::group::Rank;
use gym_core::group::collective::reduction::slice_of;
use gym_core::group::collective::{
    Agreed, Call, Collective, Communicator, DeviceMemory, DevicePath, FirstCause, Meeting, Transfer,
};
use gym_core::{Code, Error, Result};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::nccl::cuda::{CudaDevice, CudaMemory};
use crate::nccl::engine::{Command, Engine, Run};
use crate::nccl::failure::{again, failed};
use crate::nccl::raw::{Communication, Operation, nccl_type};
use crate::nccl::{NcclError, UniqueId};

/// The libraries and the device of a rank, whatever it joins.
#[derive(Debug)]
pub(super) struct RankDevice {
    pub(super) communication: Communication,
    pub(super) device: CudaDevice,
    pub(super) engine: Engine,
    /// The numbers of its communicators.
    pub(super) numbers: AtomicU64,
    /// Those that all ranks must share.
    pub(super) settings: BTreeMap<String, String>,
    /// Whether other ranks may have the same device.
    pub(super) share_gpu: bool,
}

/// One rank of a meeting. The operations of all ranks go over one communicator of NCCL. A send and its receive have one of their own for each pair and direction,
/// so that sends which cross do not wait for each other in one stream.
#[derive(Debug)]
pub(super) struct NcclPath {
    /// Weak, because the communicator of the meeting has this path.
    host: Weak<dyn Communicator>,
    meeting: Meeting,
    rank: Arc<RankDevice>,
    /// The number of the communicator of all ranks at the engine.
    all: u64,
    /// Why the meeting has failed, for the engine.
    cause: Arc<FirstCause>,
    /// By the other rank, and whether this one sends.
    pairs: Mutex<BTreeMap<(Rank, bool), Pair>>,
    to_itself: Mutex<ToItself>,
}

#[derive(Clone, Debug)]
struct Pair {
    /// The number at the engine.
    comm: u64,
    id: UniqueId,
}

/// The sends of a rank to itself, and its receives, of which one side waits.
#[derive(Debug, Default)]
struct ToItself {
    sends: VecDeque<Run>,
    receives: VecDeque<Run>,
}

impl NcclPath {
    /// Begins to join the ranks of a meeting. The receiver gets the result.
    pub(super) fn join(
        host: &Arc<dyn Communicator>,
        rank: &Arc<RankDevice>,
        id: UniqueId,
    ) -> Result<(Arc<Self>, oneshot::Receiver<Result<()>>)> {
        let path = Self {
            host: Arc::downgrade(host),
            meeting: host.meeting().clone(),
            rank: Arc::clone(rank),
            all: rank.numbers.fetch_add(1, Ordering::Relaxed),
            cause: Arc::default(),
            pairs: Mutex::default(),
            to_itself: Mutex::default(),
        };
        let (joined, answer) = oneshot::channel();
        path.tell_to_join(path.all, id, (path.meeting.world_size(), path.meeting.position()), joined)?;
        Ok((Arc::new(path), answer))
    }

    fn tell_to_join(
        &self,
        comm: u64,
        id: UniqueId,
        (world_size, position): (usize, usize),
        joined: oneshot::Sender<Result<()>>,
    ) -> Result<()> {
        let (host, rank) = (Weak::clone(&self.host), self.meeting.rank);
        let on_failure = Box::new(move |error: Error| {
            if let Some(host) = host.upgrade() {
                let why = format!("rank {rank} has failed: {}", error.message());
                host.abort(Error::new(error.code(), error.execution(), why).about(host.meeting().to_string()));
            }
        });
        let (id, cause) = (Box::new(id), Arc::clone(&self.cause));
        let join = Command::Join { comm, id, world_size, position, cause, on_failure, joined };
        self.rank.engine.tell(join).map_err(|(_, error)| error)
    }

    /// Returns the communicator of a pair. The first operation of a pair makes it, from the id that the sender makes.
    fn pair(&self, other: Rank, sends: bool, id: impl FnOnce() -> Result<UniqueId>) -> Result<Pair> {
        let mut pairs = self.pairs.lock();
        if let Some(pair) = pairs.get(&(other, sends)) {
            return Ok(pair.clone());
        }
        let pair = Pair { comm: self.rank.numbers.fetch_add(1, Ordering::Relaxed), id: id()? };
        // Nobody waits for the answer: an operation waits for the communicator at the engine, and a failure ends the meeting.
        let (joined, _) = oneshot::channel();
        self.tell_to_join(pair.comm, pair.id.clone(), (2, usize::from(!sends)), joined)?;
        pairs.insert((other, sends), pair.clone());
        Ok(pair)
    }

    /// Returns the communicator of an operation, the operation as NCCL has it, the elements that this rank gives, and those of the result, if it has memory of
    /// its own.
    fn planned(&self, agreed: Agreed) -> Result<(u64, Operation, usize, Option<usize>)> {
        let Agreed { call, elements, note, .. } = agreed;
        let (own, world_size) = (call.elements, self.meeting.world_size());
        let plan = match call.operation {
            Collective::AllReduce(op) => (self.all, Operation::AllReduce(op), own, None),
            Collective::Broadcast { root } => {
                let position = self.meeting.position_of(root).unwrap_or_default();
                (self.all, Operation::Broadcast { position }, own, None)
            }
            Collective::AllGather => {
                let gathered = elements.iter().sum();
                let equal = elements.iter().all(|elements| *elements == own);
                let operation = if equal { Operation::AllGather } else { Operation::AllGatherParts(elements) };
                (self.all, operation, own, Some(gathered))
            }
            Collective::ReduceScatter(op) => {
                let part = |position| slice_of(own, world_size, position).len();
                let result = part(self.meeting.position());
                let operation = match own % world_size {
                    0 => Operation::ReduceScatter(op),
                    _ => Operation::ReduceScatterParts(op, (0..world_size).map(part).collect()),
                };
                (self.all, operation, result, Some(result))
            }
            Collective::Send { to } => {
                let pair = self.pair(to, true, || self.new_id())?;
                (pair.comm, Operation::Send { position: 1 }, own, None)
            }
            Collective::Receive { from } => {
                let id = || note[..].try_into().map(UniqueId::new);
                let id = || id().map_err(|_| Error::internal(format!("rank {from} has sent no id of NCCL")));
                (self.pair(from, false, id)?.comm, Operation::Receive { position: 0 }, own, None)
            }
            other => return Err(Error::internal(format!("{other} is no operation of NCCL"))),
        };
        Ok(plan)
    }

    fn new_id(&self) -> Result<UniqueId> {
        self.rank.communication.nccl().unique_id().map_err(|error: NcclError| failed(&error))
    }

    /// Keeps an operation of this rank with itself until its other end comes. NCCL does not have two ranks on one device.
    fn meet_itself(&self, run: Run, sends: bool) -> Result<(), (Run, Error)> {
        let mut waiting = self.to_itself.lock();
        let ToItself { sends: sent, receives } = &mut *waiting;
        let (own, others) = if sends { (sent, receives) } else { (receives, sent) };
        let Some(other) = others.pop_front() else {
            own.push_back(run);
            return Ok(());
        };
        drop(waiting);
        let (from, to) = if sends { (run, other) } else { (other, run) };
        self.rank.engine.tell(Command::Copy(Box::new(from), Box::new(to))).map_err(|(command, error)| {
            let Command::Copy(from, to) = command else { unreachable!("the engine returns what it was told") };
            let (run, other) = if sends { (from, to) } else { (to, from) };
            other.end(Err(again(&error)));
            (*run, error)
        })
    }
}

impl DevicePath for NcclPath {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn check(&self, call: &Call, memory: &dyn DeviceMemory) -> Result<()> {
        let unfit = |why: String| Err(Error::not_started(Code::Unimplemented, why));
        if nccl_type(call.dtype).is_none() {
            return unfit(format!("NCCL has no {}", call.dtype));
        }
        let own = &self.rank.device;
        match (memory as &dyn Any).downcast_ref::<CudaMemory>() {
            Some(memory) if memory.device().number() == own.number() => Ok(()),
            _ => unfit(format!("the rank moves memory of {own:?}, not {memory:?}; copy it there first")),
        }
    }

    fn note(&self, call: &Call) -> Result<Bytes> {
        match call.operation {
            Collective::Send { to } if to != self.meeting.rank => {
                let pair = self.pair(to, true, || self.new_id())?;
                Ok(Bytes::copy_from_slice(pair.id.as_bytes()))
            }
            _ => Ok(Bytes::new()),
        }
    }

    fn start(&self, agreed: Agreed, memory: Box<dyn DeviceMemory>) -> Transfer {
        let (completion, transfer) = Transfer::new();
        let memory: Box<dyn Any> = memory;
        let memory = memory.downcast::<CudaMemory>().expect("`check` has seen memory of CUDA");
        let (call, began) = (agreed.call, Instant::now());
        let run = |operation, count, result_elements: Option<usize>| {
            let result_bytes = result_elements.map(|elements| elements * call.dtype.size());
            Run { operation, count, dtype: call.dtype, memory, result_bytes, result: None, completion, began }
        };
        let refused = match call.operation {
            Collective::Send { to: other } | Collective::Receive { from: other } if other == self.meeting.rank => {
                let sends = matches!(call.operation, Collective::Send { .. });
                // The operation is not NCCL's: only the two memories and the completion are used.
                self.meet_itself(run(Operation::Send { position: 0 }, call.elements, None), sends)
            }
            _ => match self.planned(agreed) {
                Ok((comm, operation, count, result)) => {
                    let told = self.rank.engine.tell(Command::Run(comm, Box::new(run(operation, count, result))));
                    told.map_err(|(command, error)| {
                        let Command::Run(_, run) = command else { unreachable!("the engine returns what it was told") };
                        (*run, error)
                    })
                }
                Err(error) => Err((run(Operation::AllGather, 0, None), error)),
            },
        };
        if let Err((run, error)) = refused {
            run.end(Err(error));
        }
        transfer
    }

    fn abort(&self, cause: Error) {
        self.cause.set(cause);
        let waiting = std::mem::take(&mut *self.to_itself.lock());
        for run in waiting.sends.into_iter().chain(waiting.receives) {
            let cause = self.cause.get().unwrap_or_else(|| Error::internal("the cause was set"));
            run.end(Err(cause));
        }
        // If it is full of commands, it looks anyway.
        let _ = self.rank.engine.tell(Command::Look);
    }
}

impl Drop for NcclPath {
    fn drop(&mut self) {
        // The communicator of the meeting and each transfer have a share in it, so this comes after the last one; the engine then ends its communicators.
        for comm in self.pairs.lock().values().map(|pair| pair.comm).chain([self.all]) {
            let _ = self.rank.engine.tell(Command::Release(comm));
        }
    }
}
