//! The backend `mem` passes the conformance suite of collective operations, and its meetings form, fail and are forgotten as documented.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use futures_util::future::{join_all, try_join_all};
use gym_core::group::collective::{
    Buffer, Collective, Collectives, Communicator, CommunicatorExt, InProcessCollectives, Meeting, Seat,
};
use gym_core::testing::conformance::{CollectiveFixture, Ranks, collectives};
use gym_core::{CallContext, Code, Incarnation};

#[derive(Debug, Default)]
struct Fixture {
    backend: InProcessCollectives,
    epoch: AtomicU64,
}

#[async_trait]
impl CollectiveFixture for Fixture {
    async fn meeting(&self, ranks: &[u32]) -> Ranks {
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed);
        join(&self.backend, epoch, ranks).await
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
    assert_eq!(fixture.backend.meetings(), 0, "every meeting is forgotten");
}

#[tokio::test(start_paused = true)]
async fn in_one_thread_under_a_paused_clock() {
    suite(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_two_threads_by_the_real_clock() {
    suite(2).await;
}
