//! Ranks that do not come, calls that differ, and aborts.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use gym_core::group::DType;
use gym_core::group::collective::ReduceOp;
use gym_core::{Code, Error};

use super::{At, SIZES, all_operations, barriers_of_all_operations, far, in_ranks};
use crate::{Failure, Segment, SegmentCommunicator, deadline_in};

/// Generous: it takes less than a millisecond on an idle machine.
const PROMPT_TIMEOUT: Duration = Duration::from_secs(5);

#[test]
fn an_abort_at_any_barrier_wakes_every_rank() {
    let world_size = 4;
    for barrier in 0..barriers_of_all_operations(world_size) {
        let segment = Arc::new(Segment::create(world_size, SIZES).unwrap());
        let late = (barrier % world_size as u64) as usize;
        let ends = in_ranks(&segment, |mut rank| {
            let own = rank.position();
            if own == late {
                let segment = Arc::clone(rank.segment());
                rank.probe = Some(Box::new(move |at, number| {
                    if (at, number) == (At::Before, barrier) {
                        let others = || segment.progress().into_iter().enumerate().filter(|(rank, _)| *rank != own);
                        while others().any(|(_, come)| come <= barrier) {
                            std::thread::yield_now();
                        }
                        segment.abort();
                    }
                }));
            }
            let ended = all_operations(&mut rank, far());
            // Once aborted, it stays so.
            assert!(matches!(rank.barrier(far()), Err(Failure::Aborted)));
            ended
        });
        assert!(ends.iter().all(|end| matches!(end, Err(Failure::Aborted))), "barrier {barrier}: {ends:?}");
        assert!(segment.is_aborted());
    }
}

#[test]
fn an_abort_wakes_ranks_without_waiting_for_their_next_look() {
    let segment = Arc::new(Segment::create(3, SIZES).unwrap());
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for position in 0..2 {
            let (mut rank, sender) = (SegmentCommunicator::join(&segment, position).unwrap(), sender.clone());
            scope.spawn(move || sender.send(rank.barrier(far())).unwrap());
        }
        while segment.progress() != [1, 1, 0] {
            std::thread::yield_now();
        }
        segment.abort();
        for _ in 0..2 {
            assert!(matches!(receiver.recv_timeout(PROMPT_TIMEOUT).unwrap(), Err(Failure::Aborted)));
        }
    });
}

#[test]
fn a_rank_whose_deadline_passes_names_those_that_have_not_come_and_ends_the_others() {
    let segment = Segment::create(4, SIZES).unwrap();
    let ends = in_ranks(&segment, |mut rank| match rank.position() {
        // It comes last of those that come.
        0 => {
            let others = Arc::clone(rank.segment());
            while others.progress() != [0, 1, 0, 1] {
                std::thread::yield_now();
            }
            rank.barrier(deadline_in(Duration::from_millis(30)))
        }
        2 => Ok(()),
        _ => rank.barrier(far()),
    });
    assert!(matches!(&ends[0], Err(Failure::Late { missing }) if *missing == [2]), "{ends:?}");
    assert!([1, 3].iter().all(|rank| matches!(ends[*rank], Err(Failure::Aborted))), "{ends:?}");
    let error = ends.into_iter().next().unwrap().map_err(Error::from).unwrap_err();
    assert_eq!(
        (error.code(), error.to_string().as_str()),
        (Code::DeadlineExceeded, "the deadline has passed; rank 2 has not come")
    );
}

#[test]
fn ranks_that_call_differently_are_told_both_calls() {
    let segment = Segment::create(3, SIZES).unwrap();
    let ends = in_ranks(&segment, |mut rank| match rank.position() {
        1 => rank.all_reduce(DType::I32, ReduceOp::Max, &mut [0; 8], far()),
        _ => rank.all_reduce(DType::I32, ReduceOp::Sum, &mut [0; 8], far()),
    });
    let texts: Vec<String> = ends.into_iter().map(|end| Error::from(end.unwrap_err()).to_string()).collect();
    let calls = |text: &str| text.contains("all_reduce(sum) of 2 I32, and rank 1 calls all_reduce(max) of 2 I32");
    assert!(calls(&texts[0]) && texts[1].starts_with("rank 0 calls") && calls(&texts[1]), "{texts:?}");
    assert!(segment.is_aborted());
}

#[test]
fn a_length_that_a_rank_does_not_expect_is_a_different_call_of_all() {
    let segment = Segment::create(2, SIZES).unwrap();
    let ends = in_ranks(&segment, |mut rank| {
        let lengths = if rank.position() == 0 { [2, 3] } else { [2, 4] };
        let own = vec![0; lengths[rank.position()]];
        rank.all_gather(DType::U8, &own, &lengths, &mut vec![0; lengths.iter().sum()], far())
    });
    let differs = |end: &Result<(), Failure>| matches!(end, Err(Failure::Differs { .. }));
    assert!(ends.iter().all(differs), "{ends:?}");
}

#[test]
fn an_invalid_call_is_refused_and_changes_nothing() {
    let segment = Segment::create(2, SIZES).unwrap();
    in_ranks(&segment, |mut rank| {
        let foreign = SegmentCommunicator::join(&Arc::new(Segment::create(1, SIZES).unwrap()), 0).unwrap();
        let mut foreign = foreign.shared_buffer(8).unwrap();
        let refused = [
            rank.all_reduce(DType::I32, ReduceOp::Mean, &mut [0; 8], far()),
            rank.all_reduce(DType::Bool, ReduceOp::Sum, &mut [0; 8], far()),
            rank.reduce_scatter(DType::I32, ReduceOp::Sum, &mut [0; 7], far()),
            rank.broadcast(DType::U8, 2, &mut [0; 8], far()),
            rank.all_reduce_shared(DType::U8, ReduceOp::Sum, &mut foreign, far()),
            rank.all_gather(DType::U8, &[0; 8], &[8], &mut [0; 8], far()),
            rank.all_gather(DType::U8, &[0; 8], &[8, 8], &mut [0; 8], far()),
            rank.all_gather(DType::U8, &[0; 8], &[7, 7], &mut [0; 14], far()),
            rank.all_gather(DType::U8, &[0; 8], &[8, usize::MAX], &mut [0; 7], far()),
        ];
        assert!(refused.iter().all(|end| matches!(end, Err(Failure::Rejected(_)))), "{refused:?}");
        rank.barrier(far()).unwrap();
    });
}

#[test]
fn a_shared_tensor_leaves_the_segment_after_a_failure() {
    let segment = Arc::new(Segment::create(2, SIZES).unwrap());
    let mut rank = SegmentCommunicator::join(&segment, 0).unwrap();
    let mut buffer = rank.shared_buffer(100_000).unwrap();
    buffer.fill(1);
    segment.abort();
    assert!(matches!(rank.all_reduce_shared(DType::U8, ReduceOp::Sum, &mut buffer, far()), Err(Failure::Aborted)));
    assert!(!buffer.in_segment() && buffer.len() == 100_000);
    buffer.fill(2);
    assert_eq!(segment.progress(), [0, 0], "an operation after an abort does not begin");
    let full = rank.shared_buffer(SIZES.shared_bytes).unwrap_err();
    assert_eq!(full.code(), Code::ResourceExhausted, "{full}");
}

#[test]
fn a_panic_in_an_operation_aborts_the_segment() {
    let segment = Arc::new(Segment::create(2, SIZES).unwrap());
    let mut rank = SegmentCommunicator::join(&segment, 0).unwrap();
    rank.probe = Some(Box::new(|_, _| panic!("expected by the test")));
    let panicked = std::thread::spawn(move || rank.barrier(far())).join();
    assert!(panicked.is_err() && segment.is_aborted());
}
