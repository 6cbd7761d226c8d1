//! Tests of ranks: threads of this process, each with a mapping of its own, and processes.

mod exact;
mod failing;
mod offering;
mod opening;
mod processes;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gym_core::group::DType;
use gym_core::group::collective::ReduceOp;

use crate::communicator::At;
use crate::{Failure, Segment, SegmentCommunicator, Sizes, deadline_in};

/// The smallest pieces, and space for some tensors.
const SIZES: Sizes = Sizes { piece_bytes: 64 << 10, shared_bytes: 2 << 20 };

/// A deadline that only ends hangs.
fn far() -> Instant {
    deadline_in(Duration::from_secs(60))
}

/// Ends the other ranks when one panics: they would wait for it until their deadline.
struct AbortInPanic<'s>(&'s Segment);

impl Drop for AbortInPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort();
        }
    }
}

/// Runs a function for each rank, on a thread and a mapping of its own.
fn in_ranks<T: Send>(segment: &Segment, rank: impl Fn(SegmentCommunicator) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let start = |position| {
            let (file, rank, world_size) = (segment.as_fd().try_clone_to_owned().unwrap(), &rank, segment.world_size());
            scope.spawn(move || {
                let abort = AbortInPanic(segment);
                let segment = Arc::new(Segment::open(file, world_size).unwrap());
                let ended = rank(SegmentCommunicator::join(&segment, position).unwrap());
                drop(abort);
                ended
            })
        };
        let threads: Vec<_> = (0..segment.world_size()).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

/// One operation of each kind, small and large, with tensors of some pieces.
fn all_operations(rank: &mut SegmentCommunicator, deadline: Instant) -> Result<(), Failure> {
    let (world_size, position) = (rank.world_size(), rank.position());
    let large = 200_001;
    let memory = || vec![position as u8; large];
    rank.barrier(deadline)?;
    rank.all_reduce(DType::U8, ReduceOp::Sum, &mut [1; 100], deadline)?;
    rank.all_reduce(DType::U8, ReduceOp::Sum, &mut memory(), deadline)?;
    let mut shared = rank.shared_buffer(large).map_err(Failure::from)?;
    rank.all_reduce_shared(DType::U8, ReduceOp::Max, &mut shared, deadline)?;
    rank.reduce_scatter(DType::U8, ReduceOp::Min, &mut memory(), deadline)?;
    rank.broadcast(DType::U8, world_size - 1, &mut memory(), deadline)?;
    let lengths: Vec<usize> = (0..world_size).map(|position| large / (1 + position)).collect();
    let own = &memory()[..lengths[position]];
    rank.all_gather(DType::U8, own, &lengths, &mut vec![0; lengths.iter().sum()], deadline)
}

/// The number of barriers of [`all_operations`].
fn barriers_of_all_operations(world_size: usize) -> u64 {
    let segment = Segment::create(world_size, SIZES).unwrap();
    in_ranks(&segment, |mut rank| all_operations(&mut rank, far()).unwrap());
    segment.progress()[0]
}
