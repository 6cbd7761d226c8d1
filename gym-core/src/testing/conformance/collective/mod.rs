//! The conformance suite of [`Collectives`](crate::group::collective::Collectives), for backends of this and of other crates.

mod failures;
mod joins;
mod order;
mod reference;
mod values;

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;

use super::run_case;
use crate::base::error::Result;
use crate::group::collective::{Collectives, Communicator, Meeting, Seat};
use crate::message::CallContext;

/// The epoch of the last meeting. Every meeting has its own, also if several suites run at once.
static EPOCH: AtomicU64 = AtomicU64::new(0);

/// A meeting under test, with one communicator for each rank.
pub type Ranks = Vec<Arc<dyn Communicator>>;

/// Has the ranks of the suite.
#[async_trait]
pub trait CollectiveFixture: fmt::Debug + Send + Sync {
    /// Returns the backend of a rank and the seat of the rank, the same at each call.
    async fn rank(&self, rank: u32) -> (Arc<dyn Collectives>, Seat);

    /// Ends a rank as a crash would, without a word to the others. The default drops its communicator, which the suite holds no clone of.
    async fn kill(&self, communicator: Arc<dyn Communicator>) {
        drop(communicator);
    }
}

/// Checks a backend. `seed` chooses the values, and where ranks pause.
///
/// The ranks of the suite are futures of one task; a backend of threads or processes runs under them unchanged. Deadlines under test are
/// short: pause the clock if the backend allows it.
///
/// # Panics
/// If the backend violates the contract of [`Communicator`] or [`Collectives`](crate::group::collective::Collectives); the message
/// names the case.
pub async fn collectives(fixture: &dyn CollectiveFixture, seed: u64) {
    macro_rules! cases {
        ($($module:ident :: $case:ident),* $(,)?) => {$(
            let name = format!("{} (seed {seed})", stringify!($case).replace('_', " "));
            run_case("collectives", &name, $module::$case(fixture, seed)).await;
        )*};
    }
    cases!(
        joins::a_meeting_forms_when_all_have_joined_and_each_rank_joins_once,
        joins::a_join_that_fails_names_the_missing_ranks_and_may_be_repeated,
        joins::ranks_with_other_seats_do_not_meet,
        values::every_operation_gives_the_bits_of_the_reference,
        values::large_buffers_give_the_bits_of_the_reference,
        values::allocated_memory_gives_the_bits_of_the_reference,
        values::special_values_are_the_same_on_every_rank,
        values::tensors_keep_their_shapes,
        order::ranks_that_pause_get_the_same_results,
        order::two_meetings_do_not_mix,
        order::the_place_is_taken_at_the_call,
        order::sends_and_receives_cross,
        order::a_dropped_transfer_holds_nobody_up,
        order::a_thread_waits_for_its_transfer,
        failures::different_calls_fail_on_every_rank,
        failures::a_send_that_does_not_fit_fails_on_both_ranks,
        failures::an_invalid_call_is_rejected_and_takes_no_place,
        failures::a_passed_deadline_names_the_ranks_that_did_not_call,
        failures::a_cancelled_call_ends_the_meeting,
        failures::the_first_cause_wins,
        failures::survivors_name_the_killed_rank,
        failures::a_rank_that_left_earlier_holds_nobody_up,
    );
}

/// Longer than any operation takes; only a hang reaches it.
fn cx() -> CallContext {
    CallContext::within(Duration::from_secs(60))
}

/// The ranks of a meeting of a size: ascending, with gaps, so that a rank is not its position.
fn ranks(world_size: usize) -> Vec<u32> {
    (0..world_size as u32).map(|position| position * 3 + 2).collect()
}

/// Ranks that can meet, in an epoch of their own.
struct Gathering {
    epoch: u64,
    backends: Vec<Arc<dyn Collectives>>,
    seats: Arc<[Seat]>,
}

impl Gathering {
    async fn of(fixture: &dyn CollectiveFixture, ranks: &[u32]) -> Self {
        let (mut backends, mut seats) = (Vec::new(), Vec::new());
        for rank in ranks {
            let (backend, seat) = fixture.rank(*rank).await;
            backends.push(backend);
            seats.push(seat);
        }
        Self { epoch: EPOCH.fetch_add(1, Ordering::Relaxed) + 1, backends, seats: seats.into() }
    }

    fn meeting(&self, position: usize) -> Meeting {
        let rank = self.seats[position].rank;
        Meeting::new("policy/data", self.epoch, rank, Arc::clone(&self.seats)).expect("the seats ascend")
    }

    async fn join(&self, cx: &CallContext, position: usize) -> Result<Arc<dyn Communicator>> {
        self.backends[position].join(cx, self.meeting(position)).await
    }
}

async fn meeting(fixture: &dyn CollectiveFixture, world_size: usize) -> Ranks {
    let (gathering, cx) = (Gathering::of(fixture, &ranks(world_size)).await, cx());
    let joined = all((0..world_size).map(|position| gathering.join(&cx, position))).await;
    joined.into_iter().map(|joined| joined.expect("all ranks join")).collect()
}

/// Runs futures at the same time, and returns their outputs in order.
async fn all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    futures_util::future::join_all(futures).await
}

/// Checks that a future still waits after all that is ready has run.
async fn still_waits<F: Future + Unpin>(future: &mut F, what: &str) {
    for _ in 0..32 {
        tokio::task::yield_now().await;
    }
    let mut future = pin!(future);
    let waits = std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_pending())).await;
    assert!(waits, "{what} ended before all ranks had called");
}
