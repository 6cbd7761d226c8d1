//! The backend `mem` passes the conformance suite of collective operations, and its meetings form, fail and are forgotten as documented.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use futures_util::future::{join_all, try_join_all};
use gym_core::group::collective::{Collectives, CommunicatorExt, InProcessCollectives, Meeting, ReduceOp, Seat};
use gym_core::group::{DType, Tensor};
use gym_core::testing::conformance::{CollectiveFixture, Ranks, collectives};
use gym_core::{CallContext, Incarnation};

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
}
