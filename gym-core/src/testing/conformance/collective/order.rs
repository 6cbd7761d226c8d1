//! Cases about the order of calls, and about ranks that are not in step.

use std::sync::Arc;
use std::time::Duration;

use super::reference::{DTYPES, buffer, expected, operations};
use super::values::{PERIOD, check_result, inputs};
use super::{CollectiveFixture, all, cx, meeting, ranks, still_waits};
use crate::group::batch::tensor::{DType, Tensor};
use crate::group::collective::{Collective, Communicator, CommunicatorExt, Moved, ReduceOp, Transfer};
use crate::message::CallContext;

/// Yields or sleeps, or neither.
async fn pause(generator: &mut fastrand::Rng) {
    match generator.u8(..4) {
        0 => tokio::time::sleep(Duration::from_micros(generator.u64(..300))).await,
        1 => {
            for _ in 0..generator.u8(..20) {
                tokio::task::yield_now().await;
            }
        }
        _ => {}
    }
}

/// One operation of all ranks: what each gives, and what each must get.
struct Step {
    operation: Collective,
    dtype: DType,
    inputs: Vec<Vec<u8>>,
    expected: Vec<Vec<u8>>,
}

impl Step {
    fn start(&self, cx: &CallContext, rank: &dyn Communicator) -> Transfer {
        rank.start(cx, self.operation, buffer(self.dtype, &self.inputs[rank.meeting().position()]))
    }

    fn check(&self, number: usize, position: usize, moved: Moved) {
        let what = format!("step {number}, {} of {} at position {position}", self.operation, self.dtype);
        check_result(&what, moved, self.dtype, &self.expected[position], self.inputs[position].len());
    }
}

fn script(generator: &mut fastrand::Rng, world_size: usize, steps: usize) -> Vec<Step> {
    let step = |_| {
        let dtype = DTYPES[generator.usize(..DTYPES.len())];
        let operations = operations(dtype, &ranks(world_size), generator.usize(..world_size));
        let operation = operations[generator.usize(..operations.len())];
        let elements = generator.usize(..200);
        let inputs = inputs(generator, operation, dtype, elements, world_size);
        let expected = expected(operation, dtype, &ranks(world_size), &inputs, PERIOD);
        Step { operation, dtype, inputs, expected }
    };
    (0..steps).map(step).collect()
}

/// Plays the part of one rank. Keeps up to `kept_max` transfers before it awaits them, in any order.
async fn play(rank: &dyn Communicator, script: &[Step], kept_max: usize, mut generator: fastrand::Rng) {
    let (cx, position, mut kept) = (cx(), rank.meeting().position(), Vec::new());
    for (number, step) in script.iter().enumerate() {
        pause(&mut generator).await;
        kept.push((number, step.start(&cx, rank)));
        while kept.len() > generator.usize(..=kept_max) {
            let (number, transfer) = kept.swap_remove(generator.usize(..kept.len()));
            script[number].check(number, position, transfer.await);
        }
    }
    for (number, transfer) in kept {
        script[number].check(number, position, transfer.await);
    }
}

pub(super) async fn ranks_that_pause_get_the_same_results(fixture: &dyn CollectiveFixture, seed: u64) {
    let mut generator = fastrand::Rng::with_seed(seed);
    for world_size in [2, 3, 4, 7] {
        let communicators = meeting(fixture, world_size).await;
        let script = script(&mut generator, world_size, 60);
        all(communicators.iter().map(|rank| play(&**rank, &script, 0, generator.fork()))).await;
    }
}

pub(super) async fn two_meetings_do_not_mix(fixture: &dyn CollectiveFixture, seed: u64) {
    let mut generator = fastrand::Rng::with_seed(seed);
    let (first, second) = (meeting(fixture, 4).await, meeting(fixture, 4).await);
    let scripts = [script(&mut generator, 4, 50), script(&mut generator, 4, 50)];
    // Each rank takes part in both, in an interleaving of its own.
    all(first.iter().zip(&second).map(|(first, second)| {
        let parts =
            (play(&**first, &scripts[0], 3, generator.fork()), play(&**second, &scripts[1], 3, generator.fork()));
        async { tokio::join!(parts.0, parts.1) }
    }))
    .await;
}

pub(super) async fn the_place_is_taken_at_the_call(fixture: &dyn CollectiveFixture, seed: u64) {
    let mut generator = fastrand::Rng::with_seed(seed);
    let communicators = meeting(fixture, 3).await;
    let (script, cx) = (script(&mut generator, 3, 100), cx());
    // All calls before the first poll, and the last call is awaited first.
    let mut transfers: Vec<Vec<Transfer>> =
        communicators.iter().map(|rank| script.iter().map(|step| step.start(&cx, &**rank)).collect()).collect();
    for (number, step) in script.iter().enumerate().rev() {
        for (position, transfers) in transfers.iter_mut().enumerate() {
            step.check(number, position, transfers.pop().expect("a transfer for each step").await);
        }
    }
    all(communicators.iter().map(|rank| play(&**rank, &script, 20, generator.fork()))).await;
    // The methods for tensors take their place at the call too.
    let number = |value: i32| Tensor::from_vec([1], vec![value]).expect("one element");
    let calls: Vec<_> = communicators
        .iter()
        .map(|rank| (rank.all_reduce(&cx, number(1), ReduceOp::Sum), rank.all_reduce(&cx, number(5), ReduceOp::Max)))
        .collect();
    for (sum, most) in calls {
        let (most, sum) = (most.await.expect("a maximum"), sum.await.expect("a sum"));
        assert_eq!((sum, most), (number(3), number(5)));
    }
}

pub(super) async fn sends_and_receives_cross(fixture: &dyn CollectiveFixture, seed: u64) {
    let mut generator = fastrand::Rng::with_seed(seed);
    let (communicators, cx, numbers) = (meeting(fixture, 3).await, cx(), ranks(3));
    let large = (2 << 20) + 6;
    // Every ordered pair, itself included, many at once; a collective operation between them counts separately.
    for elements in [0, 1, 1_000, large] {
        let payload = |from: u32, to: u32, number: u32| {
            let seed = seed ^ u64::from(from << 16 | to << 8 | number);
            let mut bytes = vec![0; elements];
            fastrand::Rng::with_seed(seed).fill(&mut bytes);
            bytes
        };
        let rounds = if elements == large { 1 } else { 5 };
        let ends = all(communicators.iter().map(|rank| {
            let (own, cx, numbers, mut generator) = (rank.meeting().rank, &cx, &numbers, generator.fork());
            async move {
                let (mut sends, mut receives) = (Vec::new(), Vec::new());
                for number in 0..rounds {
                    for peer in numbers.iter().copied() {
                        pause(&mut generator).await;
                        let sent = buffer(DType::U8, &payload(own, peer, number));
                        let place = buffer(DType::U8, &vec![0; elements]);
                        let send = Collective::Send { to: peer };
                        if generator.bool() {
                            sends.push((peer, number, rank.start(cx, send, sent)));
                            receives.push((peer, number, rank.start(cx, Collective::Receive { from: peer }, place)));
                        } else {
                            receives.push((peer, number, rank.start(cx, Collective::Receive { from: peer }, place)));
                            sends.push((peer, number, rank.start(cx, send, sent)));
                        }
                    }
                }
                rank.barrier(cx).await.expect("a barrier");
                for (peer, number, transfer) in sends {
                    let moved = transfer.await;
                    moved.result.expect("a send");
                    assert_eq!(moved.buffer.host_bytes(), Some(&payload(own, peer, number)[..]), "what was sent stays");
                }
                for (peer, number, transfer) in receives {
                    let moved = transfer.await;
                    moved.result.expect("a receive");
                    let same = moved.buffer.host_bytes() == Some(&payload(peer, own, number)[..]);
                    assert!(same, "message {number} from rank {peer} to {own}, of {elements} bytes");
                }
            }
        }));
        ends.await;
    }
    let sent = Tensor::from_vec([2, 2], vec![1_i64, 2, 3, 4]).expect("a shape");
    let (sending, receiving) = tokio::join!(
        communicators[0].send(&cx, sent.clone(), numbers[2]),
        communicators[2].receive(&cx, DType::I64, &[2, 2], numbers[0])
    );
    sending.expect("a send");
    assert_eq!(receiving.expect("a receive"), sent);
}

pub(super) async fn a_dropped_transfer_holds_nobody_up(fixture: &dyn CollectiveFixture, _: u64) {
    let (communicators, cx) = (meeting(fixture, 2).await, cx());
    let number = |value: i32| Tensor::from_vec([1], vec![value]).expect("one element");
    drop(communicators[0].all_reduce(&cx, number(1), ReduceOp::Sum));
    let mut waiting = Box::pin(communicators[0].all_reduce(&cx, number(10), ReduceOp::Sum));
    still_waits(&mut waiting, "the second operation").await;
    let sum = communicators[1].all_reduce(&cx, number(2), ReduceOp::Sum).await;
    assert_eq!(sum.expect("the first rank has called"), number(3));
    let other = communicators[1].all_reduce(&cx, number(20), ReduceOp::Sum);
    let (first, second) = tokio::join!(waiting, other);
    assert_eq!((first.expect("a sum"), second.expect("a sum")), (number(30), number(30)));
}

pub(super) async fn a_thread_waits_for_its_transfer(fixture: &dyn CollectiveFixture, _: u64) {
    let (communicators, cx) = (meeting(fixture, 2).await, cx());
    let number = |value: u8| buffer(DType::U8, &[value]);
    let blocking = Arc::clone(&communicators[0]);
    let context = cx.clone();
    let thread = tokio::task::spawn_blocking(move || {
        let moved = blocking.start(&context, Collective::AllReduce(ReduceOp::Max), number(7)).wait();
        moved.result.map(|_| moved.buffer)
    });
    let other = communicators[1].start(&cx, Collective::AllReduce(ReduceOp::Max), number(3)).await;
    let own = thread.await.expect("the thread ends").expect("a maximum");
    assert_eq!((own.host_bytes(), other.buffer.host_bytes()), (Some(&[7][..]), Some(&[7][..])));
}
