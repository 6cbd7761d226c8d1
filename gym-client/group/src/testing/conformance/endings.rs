//! How calls end when they do not succeed: for the caller, for the ranks that were called, and for those that come after.

use std::sync::Arc;

use gym_core::group::layout::RankLayout;
use gym_core::group::layout::dispatch::Dispatch;
use gym_core::{Code, Execution};

use super::workers::{Echo, EchoShared, FailOn, Hold, HoldShared, Note, Notes, Panic};
use super::{
    GroupFixture, GroupSetup, LONG_TIMEOUT, SHORT_TIMEOUT, TestWorkerKind, far, line, run_cases, start, until,
    until_running,
};
use crate::call::{FailureKind, GroupError, WorkerGroupExt};

pub(super) async fn run(fixture: &dyn GroupFixture) {
    run_cases!(fixture;
        one_failing_rank_ends_the_call_and_the_others_are_told,
        a_caller_that_leaves_is_told_to_every_rank,
        a_dropped_call_is_told_to_every_rank,
        a_deadline_ends_the_call_and_the_ranks_go_on,
        a_passed_deadline_calls_nobody,
        a_shared_call_is_dropped_with_its_caller,
        a_replaced_rank_ends_the_call_that_waits_for_it,
        a_replaced_rank_takes_calls_in_its_new_life,
        a_full_queue_refuses_at_once_without_starting,
        a_call_in_line_is_answered_at_its_deadline_and_leaves_its_place,
        a_call_behind_a_shared_one_is_answered_at_its_deadline_and_leaves_its_place,
        a_call_in_line_leaves_its_place_with_its_caller,
        a_call_that_has_left_the_line_holds_up_nobody,
        a_panic_is_an_error_of_its_rank_and_the_worker_lives_on,
        a_blocking_worker_is_told_and_its_panic_caught,
    );
}

async fn notes(group: &Arc<dyn WorkerGroupExt>) -> Vec<Vec<String>> {
    group.call(Notes, ()).deadline(LONG_TIMEOUT).await.unwrap().into_values()
}

/// Calls with a short deadline a rank that takes three calls at a time. On a busy machine, calls that were given up earlier arrive late, and
/// have a place until they end there.
async fn late_note(group: &Arc<dyn WorkerGroupExt>, number: u64) -> GroupError {
    loop {
        let error = group.call(Note, number).deadline(SHORT_TIMEOUT).await.unwrap_err();
        if error.cause().code() != Code::ResourceExhausted {
            return error;
        }
        until(&**group, |status| status.running.len() + status.waiting < 3).await;
    }
}

fn kinds(error: &GroupError) -> Vec<FailureKind> {
    error.outcomes().iter().filter_map(crate::call::RankOutcome::kind).collect()
}

async fn one_failing_rank_ends_the_call_and_the_others_are_told(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 4).await;
    let group = tested.group();
    let error = group.call(FailOn, 2).deadline(LONG_TIMEOUT).await.unwrap_err();
    let first = error.first().unwrap();
    assert_eq!((first.rank, first.kind()), (2, Some(FailureKind::Exception)));
    assert!(error.to_string().contains("loss is not a number"), "{error}");
    assert_eq!(error.outcomes().len(), 4);
    assert_eq!(kinds(&error).iter().filter(|kind| **kind == FailureKind::Exception).count(), 1, "{error:?}");
    assert!(!error.may_resend(), "three ranks may have run it");
    // The next exclusive call runs after the told ones have ended. Between processes rank 2 may have failed before another
    // rank had its part, or had begun it; that one has nothing to be told.
    let told = notes(&group).await;
    assert!(told.iter().enumerate().all(|(rank, notes)| notes.len() <= usize::from(rank != 2)), "{told:?}: {error:?}");
}

async fn a_caller_that_leaves_is_told_to_every_rank(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 3).await;
    let group = tested.group();
    let cx = far();
    let pending = group.call(Hold, ()).context(&cx).start().await.unwrap();
    until_running(&*group).await;
    cx.cancel.cancel();
    let error = pending.await.unwrap_err();
    assert_eq!(error.cause().code(), Code::Cancelled);
    assert_ne!(error.execution(), Execution::NotStarted, "{error:?}");
    assert_eq!(notes(&group).await, vec![vec!["told"]; 3]);
}

async fn a_dropped_call_is_told_to_every_rank(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 3).await;
    let group = tested.group();
    let pending = group.call(Hold, ()).deadline(LONG_TIMEOUT).start().await.unwrap();
    until_running(&*group).await;
    drop(pending);
    assert_eq!(notes(&group).await, vec![vec!["told"]; 3]);
}

async fn a_deadline_ends_the_call_and_the_ranks_go_on(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 3).await;
    let group = tested.group();
    let error = held_beyond_its_deadline(&group).await;
    assert_eq!((error.cause().code(), error.execution()), (Code::DeadlineExceeded, Execution::Unknown));
    assert_eq!(kinds(&error), [FailureKind::Timeout; 3]);
    all_were_told(&group, 3).await;
}

/// Calls [`Hold`] until its deadline, with all ranks running it before. On a busy machine they begin later, so a deadline that is too early is
/// doubled.
async fn held_beyond_its_deadline(group: &Arc<dyn WorkerGroupExt>) -> GroupError {
    let mut time = SHORT_TIMEOUT;
    loop {
        let mut call = group.call(Hold, ()).deadline(time).into_future();
        tokio::select! {
            biased;
            () = until_running(group) => return call.await.unwrap_err(),
            ended = &mut call => assert_eq!(ended.unwrap_err().cause().code(), Code::DeadlineExceeded),
        }
        // An exclusive call is behind those of this try: no rank is seen running one of them in the next.
        notes(group).await;
        time *= 2;
    }
}

/// Checks that every rank was told to end each call that it has begun, and has begun one.
async fn all_were_told(group: &Arc<dyn WorkerGroupExt>, ranks: usize) {
    let notes = notes(group).await;
    assert_eq!(notes.len(), ranks);
    assert!(notes.iter().all(|notes| !notes.is_empty() && notes.iter().all(|note| note == "told")), "{notes:?}");
}

async fn a_passed_deadline_calls_nobody(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 2).await;
    let group = tested.group();
    let error = group.call(Note, 1).deadline(std::time::Duration::ZERO).await.unwrap_err();
    assert_eq!((error.cause().code(), error.execution()), (Code::DeadlineExceeded, Execution::NotStarted));
    assert!(notes(&group).await.iter().all(Vec::is_empty));
}

async fn a_shared_call_is_dropped_with_its_caller(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 2).await;
    let group = tested.group();
    let pending = group.call(HoldShared, ()).deadline(LONG_TIMEOUT).start().await.unwrap();
    until_running(&*group).await;
    drop(pending);
    until(&*group, |status| status.running.is_empty() && status.waiting == 0).await;
    group.call(Echo, String::new()).deadline(LONG_TIMEOUT).await.unwrap();
}

async fn a_replaced_rank_ends_the_call_that_waits_for_it(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 3).await;
    let group = tested.group();
    let pending = group.call(Hold, ()).deadline(LONG_TIMEOUT).start().await.unwrap();
    until_running(&*group).await;
    tested.replace(1).await;
    let error = pending.await.unwrap_err();
    let first = error.first().unwrap();
    assert_eq!((first.rank, first.incarnation.0, first.execution()), (1, 1, Execution::Unknown));
    assert_eq!(first.kind(), Some(FailureKind::Died), "{error:?}");
    assert_eq!(first.exit.as_ref().map(|exit| exit.incarnation), Some(1));
    let told = notes(&group).await;
    assert_eq!(told, [vec!["told"], vec![], vec!["told"]], "the new life has run nothing");
}

async fn a_replaced_rank_takes_calls_in_its_new_life(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 2).await;
    let group = tested.group();
    tested.replace(0).await;
    group.ready(&far()).await.unwrap();
    let answers = group.call(Echo, String::new()).deadline(LONG_TIMEOUT).await.unwrap().into_values();
    assert_eq!(answers.iter().map(|echoed| echoed.incarnation).collect::<Vec<_>>(), [2, 1]);
}

async fn a_full_queue_refuses_at_once_without_starting(fixture: &dyn GroupFixture) {
    let layout = RankLayout::line(1).unwrap();
    let tested = fixture.start(GroupSetup { layout, worker: TestWorkerKind::Async, calls_max: 3 }).await;
    let group = tested.group();
    let held = group.call(Hold, ()).deadline(LONG_TIMEOUT).start().await.unwrap();
    let mut waiting = Vec::new();
    for number in 0..2 {
        waiting.push(group.call(Note, number).deadline(LONG_TIMEOUT).start().await.unwrap());
    }
    until(&*group, |status| status.running.len() == 1 && status.waiting == 2).await;
    let error = group.call(Note, 2).deadline(LONG_TIMEOUT).await.unwrap_err();
    assert_eq!((error.cause().code(), error.execution()), (Code::ResourceExhausted, Execution::NotStarted));
    assert_eq!(kinds(&error), [FailureKind::Refused]);
    assert!(error.may_resend());
    drop(held);
    for pending in waiting {
        pending.await.unwrap();
    }
    assert_eq!(notes(&group).await, [["told", "0", "1"]]);
}

async fn a_call_in_line_is_answered_at_its_deadline_and_leaves_its_place(fixture: &dyn GroupFixture) {
    // Twice as many as the rank takes at a time: those who leave make room for those who come.
    for worker in [TestWorkerKind::Async, TestWorkerKind::Blocking] {
        let tested = fixture.start(GroupSetup { layout: RankLayout::line(1).unwrap(), worker, calls_max: 3 }).await;
        let group = tested.group();
        let held = group.call(Hold, ()).deadline(LONG_TIMEOUT).start().await.unwrap();
        until_running(&*group).await;
        for number in 0..6 {
            let late = late_note(&group, number).await;
            assert_eq!(late.cause().code(), Code::DeadlineExceeded, "{late:?}");
            until(&*group, |status| status.running.len() == 1 && status.waiting == 0).await;
        }
        drop(held);
        assert_eq!(notes(&group).await, [["told"]]);
    }
}

async fn a_call_behind_a_shared_one_is_answered_at_its_deadline_and_leaves_its_place(fixture: &dyn GroupFixture) {
    let layout = RankLayout::line(1).unwrap();
    let tested = fixture.start(GroupSetup { layout, worker: TestWorkerKind::Async, calls_max: 3 }).await;
    let group = tested.group();
    // A shared call holds the first exclusive one up, that one the others.
    let shared = group.call(HoldShared, ()).deadline(LONG_TIMEOUT).start().await.unwrap();
    let held = group.call(Hold, ()).deadline(LONG_TIMEOUT).start().await.unwrap();
    let late = late_note(&group, 1).await;
    assert_eq!(late.cause().code(), Code::DeadlineExceeded);
    until(&*group, |status| status.running.len() == 1 && status.waiting == 1).await;
    drop(shared);
    until(&*group, |status| status.running.iter().any(|call| call.method == "test.hold")).await;
    for late in futures_util::future::join_all([2, 3].map(|number| late_note(&group, number))).await {
        assert_eq!(late.cause().code(), Code::DeadlineExceeded);
    }
    until(&*group, |status| status.running.len() == 1 && status.waiting == 0).await;
    let waits = group.call(Note, 5).deadline(LONG_TIMEOUT).start().await.unwrap();
    drop(held);
    waits.await.unwrap();
    assert_eq!(notes(&group).await, [["told", "5"]]);
}

async fn a_call_in_line_leaves_its_place_with_its_caller(fixture: &dyn GroupFixture) {
    for worker in [TestWorkerKind::Async, TestWorkerKind::Blocking] {
        let tested = fixture.start(GroupSetup { layout: RankLayout::line(1).unwrap(), worker, calls_max: 3 }).await;
        let group = tested.group();
        let held = group.call(Hold, ()).deadline(LONG_TIMEOUT).start().await.unwrap();
        until(&*group, |status| status.running.len() == 1).await;
        let stays = group.call(Note, 1).deadline(LONG_TIMEOUT).start().await.unwrap();
        for number in 2..20 {
            let leaves = group.call(Note, number).deadline(LONG_TIMEOUT).start().await.unwrap();
            until(&*group, |status| status.waiting == 2).await;
            drop(leaves);
            until(&*group, |status| status.waiting == 1).await;
        }
        drop(held);
        stays.await.unwrap();
        assert_eq!(notes(&group).await, [["told", "1"]]);
    }
}

async fn a_call_that_has_left_the_line_holds_up_nobody(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 1).await;
    let group = tested.group();
    let _shared = group.call(HoldShared, ()).deadline(LONG_TIMEOUT).start().await.unwrap();
    until_running(&*group).await;
    // It waits for the shared one, and with it whoever comes after.
    let exclusive = group.call(Note, 1).deadline(LONG_TIMEOUT).start().await.unwrap();
    until(&*group, |status| status.waiting == 1).await;
    let after = group.call(EchoShared, String::new()).deadline(LONG_TIMEOUT).start().await.unwrap();
    drop(exclusive);
    after.await.unwrap();
}

async fn a_panic_is_an_error_of_its_rank_and_the_worker_lives_on(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 1).await;
    let group = tested.group();
    let error = group.call(Panic, ()).dispatch(Dispatch::rank(0)).deadline(LONG_TIMEOUT).await.unwrap_err();
    assert_eq!((error.cause().code(), error.execution()), (Code::Internal, Execution::Finished));
    assert!(error.to_string().contains("the worker lost its mind"), "{error}");
    assert_eq!(kinds(&error), [FailureKind::Exception]);
    group.call(Echo, String::new()).deadline(LONG_TIMEOUT).await.unwrap();
}

async fn a_blocking_worker_is_told_and_its_panic_caught(fixture: &dyn GroupFixture) {
    let tested = start(fixture, RankLayout::line(2).unwrap(), TestWorkerKind::Blocking).await;
    let group = tested.group();
    let error = held_beyond_its_deadline(&group).await;
    assert_eq!(error.cause().code(), Code::DeadlineExceeded);
    let error = group.call(Panic, ()).deadline(LONG_TIMEOUT).await.unwrap_err();
    assert!(error.to_string().contains("the worker lost its mind"), "{error}");
    all_were_told(&group, 2).await;
}
