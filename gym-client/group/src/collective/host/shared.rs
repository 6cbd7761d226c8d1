//! The memory that ranks of one node share: one rank creates it and offers it to the others, and a thread of each rank performs its operations.

use std::fmt;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use bytes::BytesMut;
use gym_core::group::collective::{Call, Collective};
use gym_core::{Error, Result};
use gym_segment::{Failure, FdOffer, Segment, SegmentCommunicator, Sizes, fetch};
use tokio::sync::oneshot;

/// The collective operations of one rank in a segment. Its thread ends when this is dropped.
pub(super) struct SharedLane {
    segment: Arc<Segment>,
    position: usize,
    jobs: mpsc::Sender<Job>,
}

struct Job {
    call: Call,
    /// The position of the root of a broadcast.
    root: usize,
    memory: BytesMut,
    deadline: Instant,
    done: oneshot::Sender<Done>,
}

/// The end of an operation: the memory comes back, whatever has happened.
pub(super) struct Done {
    pub(super) memory: BytesMut,
    pub(super) result: Result<(), Failure>,
}

/// Creates the segment of a meeting. Blocks its thread.
pub(super) fn create(world_size: usize) -> Result<(SharedLane, FdOffer)> {
    let segment = Arc::new(Segment::create(world_size, Sizes::default())?);
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
        let (jobs, queue) = mpsc::channel();
        let thread = std::thread::Builder::new().name("gym-collective".to_owned());
        let started = thread.spawn(move || run(communicator, &queue));
        started.map_err(|error| Error::internal("cannot start a thread for collective operations").caused_by(error))?;
        Ok(Self { segment: Arc::clone(segment), position, jobs })
    }

    /// Begins an operation. One is performed at a time.
    pub(super) fn perform(
        &self,
        call: Call,
        root: usize,
        memory: BytesMut,
        deadline: Instant,
    ) -> oneshot::Receiver<Done> {
        let (done, receiver) = oneshot::channel();
        let job = Job { call, root, memory, deadline, done };
        if let Err(mpsc::SendError(Job { memory, done, .. })) = self.jobs.send(job) {
            // The thread has panicked.
            let result = Err(Failure::Aborted);
            drop(done.send(Done { memory, result }));
        }
        receiver
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
    memory: &mut BytesMut,
    deadline: Instant,
) -> Result<(), Failure> {
    match call.operation {
        Collective::AllReduce(op) => own.all_reduce(call.dtype, op, memory, deadline),
        Collective::ReduceScatter(op) => own.reduce_scatter(call.dtype, op, memory, deadline),
        Collective::Broadcast { .. } => own.broadcast(call.dtype, root, memory, deadline),
        Collective::AllGather => {
            let lengths = own.lengths(call.dtype, memory, deadline)?;
            let mut whole = BytesMut::zeroed(lengths.iter().sum());
            own.all_gather(call.dtype, memory, &lengths, &mut whole, deadline)?;
            *memory = whole;
            Ok(())
        }
        _ => own.barrier(deadline),
    }
}

impl fmt::Debug for SharedLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedLane").field(&self.segment).finish()
    }
}
