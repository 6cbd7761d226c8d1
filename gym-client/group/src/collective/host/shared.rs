//! The memory that ranks of one node share: one rank creates it and offers it to the others, and a thread of each rank performs its operations.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use bytes::BytesMut;
use gym_core::group::collective::{Buffer, Call, Collective, Memory};
use gym_core::group::{DType, Rank};
use gym_core::{Error, Result};
use gym_segment::{Failure, FdOffer, Segment, SegmentCommunicator, SharedBuffer, SharedSpace, Sizes, fetch};
use tokio::sync::oneshot;

/// The collective operations of one rank in a segment. Its thread ends when this is dropped.
pub(super) struct SharedLane {
    segment: Arc<Segment>,
    position: usize,
    space: SharedSpace,
    jobs: mpsc::SyncSender<Job>,
}

/// The memory of an operation.
pub(super) enum Lent {
    Private(BytesMut),
    Shared(SharedBuffer),
}

impl Lent {
    /// Takes the memory out of a buffer.
    ///
    /// # Errors
    /// The buffer, if its memory is not in the host.
    pub(super) fn of(buffer: Buffer) -> Result<Self, (Buffer, Error)> {
        match buffer.memory {
            Memory::Shared(memory) if (&*memory as &dyn Any).is::<SharedBuffer>() => {
                let memory: Box<dyn Any> = memory;
                Ok(Self::Shared(*memory.downcast().expect("the type was looked at")))
            }
            memory => Buffer::new(buffer.dtype, memory).into_host("host").map(Self::Private),
        }
    }

    pub(super) fn into_buffer(self, dtype: DType) -> Buffer {
        match self {
            Self::Private(bytes) => Buffer::host(dtype, bytes),
            Self::Shared(shared) => Buffer::new(dtype, Memory::Shared(Box::new(shared))),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes().len()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Private(bytes) => bytes,
            Self::Shared(shared) => shared,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Private(bytes) => bytes,
            Self::Shared(shared) => shared,
        }
    }
}

impl Default for Lent {
    fn default() -> Self {
        Self::Private(BytesMut::new())
    }
}

struct Job {
    call: Call,
    /// The position of the root of a broadcast.
    root: usize,
    memory: Lent,
    deadline: Instant,
    done: oneshot::Sender<Done>,
}

/// The end of an operation: the memory comes back, whatever has happened.
pub(super) struct Done {
    pub(super) memory: Lent,
    /// The number of elements of each rank, of a call on device memory.
    pub(super) result: Result<Vec<usize>, Failure>,
}

/// Creates the segment of a meeting, with this many bytes for the tensors of each rank. Blocks its thread.
pub(super) fn create(world_size: usize, shared_bytes: usize) -> Result<(SharedLane, FdOffer)> {
    let segment = Arc::new(Segment::create(world_size, Sizes { shared_bytes, ..Sizes::default() })?);
    let offer = FdOffer::new(&segment)?;
    Ok((SharedLane::start(&segment, 0)?, offer))
}

/// Gets the segment that the first rank offers. Blocks its thread.
pub(super) fn fetched(name: &str, world_size: usize, position: usize, deadline: Instant) -> Result<SharedLane> {
    let segment = Arc::new(Segment::open(fetch(name, deadline)?, world_size)?);
    SharedLane::start(&segment, position)
}

impl SharedLane {
    fn start(segment: &Arc<Segment>, position: usize) -> Result<Self> {
        let communicator = SegmentCommunicator::join(segment, position)?;
        // The lane of the rank waits for each operation before the next.
        let (space, (jobs, queue)) = (communicator.space(), mpsc::sync_channel(1));
        let thread = std::thread::Builder::new().name("gym-collective".to_owned());
        let started = thread.spawn(move || run(communicator, &queue));
        started.map_err(|error| Error::internal("cannot start a thread for collective operations").caused_by(error))?;
        Ok(Self { segment: Arc::clone(segment), position, space, jobs })
    }

    /// Begins an operation. One is performed at a time.
    pub(super) fn perform(&self, call: Call, root: usize, memory: Lent, deadline: Instant) -> oneshot::Receiver<Done> {
        let (done, receiver) = oneshot::channel();
        let job = Job { call, root, memory, deadline, done };
        if let Err(mpsc::SendError(Job { memory, done, .. })) = self.jobs.send(job) {
            // The thread has panicked.
            let result = Err(Failure::Aborted);
            drop(done.send(Done { memory, result }));
        }
        receiver
    }

    /// Returns memory for a tensor in the segment, if there is space.
    pub(super) fn allocate(&self, bytes: usize) -> Option<SharedBuffer> {
        self.space.buffer(bytes).ok()
    }

    /// Ends every wait of every rank.
    pub(super) fn abort(&self) {
        self.segment.abort();
    }

    /// Returns the positions that have not come as far as this rank, which it waits for.
    pub(super) fn behind(&self) -> Vec<usize> {
        let progress = self.segment.progress();
        let own = progress.get(self.position).copied().unwrap_or_default();
        progress.iter().enumerate().filter(|(_, barriers)| **barriers < own).map(|(position, _)| position).collect()
    }
}

fn run(mut communicator: SegmentCommunicator, queue: &mpsc::Receiver<Job>) {
    while let Ok(Job { call, root, mut memory, deadline, done }) = queue.recv() {
        let result = perform(&mut communicator, call, root, &mut memory, deadline);
        // Whoever has called may have gone; the other ranks get their results.
        drop(done.send(Done { memory, result }));
    }
}

fn perform(
    own: &mut SegmentCommunicator,
    call: Call,
    root: usize,
    memory: &mut Lent,
    deadline: Instant,
) -> Result<Vec<usize>, Failure> {
    if call.on_device {
        let operation = match call.operation {
            Collective::Broadcast { .. } => Collective::Broadcast { root: root as Rank },
            operation => operation,
        };
        return own.agree(Call { operation, ..call }, deadline);
    }
    match (call.operation, &mut *memory) {
        (Collective::AllReduce(op), Lent::Shared(shared)) => own.all_reduce_shared(call.dtype, op, shared, deadline),
        (Collective::AllReduce(op), Lent::Private(bytes)) => own.all_reduce(call.dtype, op, bytes, deadline),
        (Collective::ReduceScatter(op), memory) => own.reduce_scatter(call.dtype, op, memory.bytes_mut(), deadline),
        (Collective::Broadcast { .. }, memory) => own.broadcast(call.dtype, root, memory.bytes_mut(), deadline),
        (Collective::AllGather, part) => {
            let elements = own.agree(call, deadline)?;
            let lengths: Vec<usize> = elements.into_iter().map(|elements| elements * call.dtype.size()).collect();
            let mut whole = BytesMut::zeroed(lengths.iter().sum());
            own.all_gather(call.dtype, part.bytes(), &lengths, &mut whole, deadline)?;
            *memory = Lent::Private(whole);
            Ok(())
        }
        _ => own.barrier(deadline),
    }?;
    Ok(Vec::new())
}

impl fmt::Debug for SharedLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedLane").field(&self.segment).finish()
    }
}
