//! The backend `mem` passes the conformance suite of collective operations, and its meetings form, fail and are forgotten as documented.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use futures_util::FutureExt;
use futures_util::future::{join_all, try_join_all};
use gym_core::group::collective::{
    Buffer, Collective, Collectives, Communicator as _, CommunicatorExt, CompressedCommunicator, InProcessCollectives,
    Meeting, ReduceOp, Seat,
};
use gym_core::group::{DType, Tensor};
use gym_core::testing::conformance::{CollectiveFixture, Ranks, collectives};
use gym_core::{CallContext, Error, Incarnation};

#[derive(Debug, Default)]
struct Fixture(InProcessCollectives);

#[async_trait]
impl CollectiveFixture for Fixture {
    async fn rank(&self, rank: u32) -> (Arc<dyn Collectives>, Seat) {
        (Arc::new(self.0.clone()), Seat::new(rank, Incarnation(1)))
    }
}

fn cx() -> CallContext {
    CallContext::within(Duration::from_secs(60))
}

fn meeting(epoch: u64, ranks: &[u32], rank: u32) -> Meeting {
    let seats: Vec<Seat> = ranks.iter().map(|rank| Seat::new(*rank, Incarnation(1))).collect();
    Meeting::new("policy/data", epoch, rank, seats).unwrap()
}

async fn join(backend: &InProcessCollectives, epoch: u64, ranks: &[u32]) -> Ranks {
    let cx = cx();
    let joins = ranks.iter().map(|rank| backend.join(&cx, meeting(epoch, ranks, *rank)));
    try_join_all(joins).await.unwrap()
}

async fn suite(seed: u64) {
    let fixture = Fixture::default();
    collectives(&fixture, seed).await;
    assert_eq!(fixture.0.meetings(), 0, "every meeting is forgotten");
}

#[tokio::test(start_paused = true)]
async fn in_one_thread_under_a_paused_clock() {
    suite(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_two_threads_by_the_real_clock() {
    suite(2).await;
}

#[tokio::test(start_paused = true)]
async fn other_epochs_and_names_are_other_meetings_and_a_failed_join_leaves_nothing() {
    let backend = InProcessCollectives::new();
    let context = cx();
    let mut first = backend.join(&context, meeting(1, &[0, 1], 0));
    assert!((&mut first).now_or_never().is_none());
    assert!(backend.join(&context, meeting(1, &[0, 1, 2], 2)).await.is_err());
    drop(join(&backend, 2, &[0, 1]).await);
    assert_eq!(backend.meetings(), 1);
    let (first, second) = tokio::join!(first, backend.join(&context, meeting(1, &[0, 1], 1)));
    drop((first.unwrap(), second.unwrap()));
    assert_eq!(backend.meetings(), 0);
    let soon = CallContext::within(Duration::from_secs(1));
    assert!(backend.join(&soon, meeting(3, &[0, 1], 0)).await.is_err());
    let mut dropped = backend.join(&context, meeting(3, &[0, 1], 0));
    assert!((&mut dropped).now_or_never().is_none());
    drop(dropped);
    assert_eq!(backend.meetings(), 0);
}

#[test]
fn seats_ascend_and_have_the_rank() {
    let seat = |rank| Seat::new(rank, Incarnation(1));
    let of = |rank, ranks: &[u32]| Meeting::new("data", 1, rank, ranks.iter().copied().map(seat).collect::<Vec<_>>());
    for (rank, ranks, text) in
        [(0, &[0, 0][..], "each rank once"), (1, &[1, 0], "sort the seats"), (2, &[0, 1], "no seat")]
    {
        let error = of(rank, ranks).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
    let seat = seat(3).on_node("a").serving_at([gym_core::Endpoint::parse("mem://rank3").unwrap()]);
    let text = serde_json::to_string(&seat).unwrap();
    assert_eq!(text, r#"{"rank":3,"incarnation":1,"endpoints":["mem://rank3"],"node":"a"}"#);
    assert_eq!(serde_json::from_str::<Seat>(&text).unwrap(), seat);
}

#[tokio::test]
async fn memory_of_its_own_is_moved_and_comes_back_joined() {
    let backend = InProcessCollectives::new();
    let communicators = join(&backend, 1, &[0, 1, 2]).await;
    let context = cx();
    // Below and above the size from which threads divide the work.
    for elements in [5, 1 << 19] {
        let tensors: Vec<Tensor> =
            (0..3).map(|_| Tensor::new(DType::F32, [elements], vec![0; elements * 4].into()).unwrap()).collect();
        let before: Vec<usize> = tensors.iter().map(|tensor| tensor.bytes().as_ptr().addr()).collect();
        let calls = communicators.iter().zip(tensors);
        let sums = join_all(calls.map(|(rank, tensor)| rank.all_reduce(&context, tensor, ReduceOp::Sum))).await;
        let after: Vec<usize> = sums.iter().map(|sum| sum.as_ref().unwrap().bytes().as_ptr().addr()).collect();
        assert_eq!(before, after, "{elements} elements");
    }
    communicators[0].abort(Error::internal("disk full"));
    drop(communicators);
    for rank in 0..3 {
        let report = backend.report(rank);
        let sums: Vec<_> = report
            .totals
            .iter()
            .map(|total| (&*total.operation, &*total.path, total.operations, total.bytes))
            .collect();
        assert_eq!((sums, report.aborts), (vec![("all_reduce", "mem", 2, 20 + (4 << 19))], 1));
    }
    assert!(backend.report(3).is_empty());
}

#[tokio::test]
async fn compressed_gradients_keep_their_bound_and_their_bits() {
    let backend = InProcessCollectives::new();
    let communicators: Vec<CompressedCommunicator> =
        join(&backend, 1, &[0, 1, 2]).await.into_iter().map(CompressedCommunicator::new).collect();
    let (context, mut generator) = (cx(), fastrand::Rng::with_seed(7));
    for op in [ReduceOp::Sum, ReduceOp::Mean] {
        let values: Vec<Vec<f32>> = (0..3)
            .map(|_| (0..10_000).map(|_| (generator.f32() - 0.5) * 2.0_f32.powi(generator.i32(-20..20))).collect())
            .collect();
        let calls = communicators.iter().zip(&values);
        let sums =
            calls.map(|(rank, own)| rank.all_reduce(&context, Tensor::from_vec([100, 100], own.clone()).unwrap(), op));
        let sums: Vec<Tensor> = join_all(sums).await.into_iter().map(Result::unwrap).collect();
        assert!(sums.iter().all(|sum| sum == &sums[0] && sum.shape() == [100, 100]));
        for (at, sum) in sums[0].view::<f32>().unwrap().iter().enumerate() {
            let all = values.iter().map(|own| f64::from(own[at]));
            let part = if op == ReduceOp::Mean { 3.0 } else { 1.0 };
            let (exact, bound) = (all.clone().sum::<f64>() / part, all.map(f64::abs).sum::<f64>() / part / 128.0);
            assert!((f64::from(*sum) - exact).abs() <= bound, "element {at}: {sum} for {exact}");
        }
    }
    // Slices, other operations and other types.
    let slices = communicators.iter().map(|rank| {
        rank.reduce_scatter(
            &context,
            Tensor::from_vec([7], (0..7).map(|at| at as f32).collect()).unwrap(),
            ReduceOp::Sum,
        )
    });
    let slices: Vec<Vec<f32>> =
        join_all(slices).await.into_iter().map(|slice| slice.unwrap().view::<f32>().unwrap().to_vec()).collect();
    assert_eq!(slices.concat(), [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0]);
    let exact = 1.0_f32 / 3.0;
    let most = communicators
        .iter()
        .map(|rank| rank.all_reduce(&context, Tensor::from_vec([1], vec![exact]).unwrap(), ReduceOp::Max));
    assert!(join_all(most).await.iter().all(|most| most.as_ref().unwrap().view::<f32>().unwrap()[0] == exact));
    // An error gives the buffer back as it was typed.
    communicators[0].abort(gym_core::Error::internal("over"));
    let buffer = Buffer::host(DType::F32, BytesMut::zeroed(12));
    let moved = communicators[1].start(&context, Collective::AllReduce(ReduceOp::Sum), buffer).await;
    assert_eq!((moved.buffer.dtype, moved.buffer.bytes(), moved.result.is_err()), (DType::F32, 12, true));
}
