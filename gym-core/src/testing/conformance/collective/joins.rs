//! Cases about joining: who meets, and what a join that fails leaves behind.

use std::time::Duration;

use super::{CollectiveFixture, Gathering, all, cx, meeting, ranks, still_waits};
use crate::base::error::{Code, Result};
use crate::group::collective::{CommunicatorExt, Meeting};
use crate::message::{CallContext, Incarnation};

/// The deadline of a join that nobody meets. The ranks that join answer each other within it.
const SHORT_TIMEOUT: Duration = Duration::from_secs(1);

fn rejected<T>(joined: Result<T>, code: Code, texts: &[&str]) {
    let Err(error) = joined else { panic!("the join must fail with {code:?}") };
    assert_eq!(error.code(), code, "{error}");
    texts.iter().for_each(|text| assert!(error.to_string().contains(text), "`{error}` must contain `{text}`"));
}

pub(super) async fn a_meeting_forms_when_all_have_joined_and_each_rank_joins_once(
    fixture: &dyn CollectiveFixture,
    _: u64,
) {
    let (numbers, cx) = (ranks(2), cx());
    let gathering = Gathering::of(fixture, &numbers).await;
    let mut first = Box::pin(gathering.join(&cx, 0));
    still_waits(&mut first, "the join of the first rank").await;
    let (first, second) = tokio::join!(first, gathering.join(&cx, 1));
    let (first, second) = (first.expect("a meeting"), second.expect("a meeting"));
    assert_eq!([first.meeting(), second.meeting()].map(Meeting::position), [0, 1]);
    let subject = format!("join {} as rank {}", second.meeting(), numbers[1]);
    rejected(gathering.join(&cx, 1).await, Code::AlreadyExists, &[&subject, "has joined before"]);
    drop(first);
    rejected(gathering.join(&cx, 0).await, Code::AlreadyExists, &["has joined before"]);
}

pub(super) async fn a_join_that_fails_names_the_missing_ranks_and_may_be_repeated(
    fixture: &dyn CollectiveFixture,
    _: u64,
) {
    let numbers = ranks(4);
    // The ranks have met before: a rank is missing because it does not join, not because it is being connected to.
    drop(meeting(fixture, 4).await);
    let gathering = Gathering::of(fixture, &numbers).await;
    let soon = CallContext::within(SHORT_TIMEOUT);
    let missing = format!("ranks {}, {} have not joined", numbers[1], numbers[3]);
    let (first, third) = tokio::join!(gathering.join(&soon, 0), gathering.join(&soon, 2));
    for joined in [first, third] {
        rejected(joined, Code::DeadlineExceeded, &["join meeting", &missing]);
    }
    let cancelled = cx();
    cancelled.cancel.cancel();
    rejected(gathering.join(&cancelled, 0).await, Code::Cancelled, &[]);
    // A dropped join gives its seat up, also while others count on it.
    let cx = cx();
    let mut third = Box::pin(gathering.join(&cx, 2));
    let mut dropped = Box::pin(gathering.join(&cx, 0));
    still_waits(&mut third, "the join of the third rank").await;
    still_waits(&mut dropped, "a join that is dropped later").await;
    still_waits(&mut third, "the join of the third rank").await;
    drop(dropped);
    still_waits(&mut third, "the join of the third rank").await;
    let others = all([0, 1, 3].map(|position| gathering.join(&cx, position)));
    let (third, others) = tokio::join!(third, others);
    let mut communicators = vec![third.expect("a meeting")];
    communicators.extend(others.into_iter().map(|joined| joined.expect("a meeting")));
    let ended = all(communicators.iter().map(|rank| rank.barrier(&cx))).await;
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
}

pub(super) async fn ranks_with_other_seats_do_not_meet(fixture: &dyn CollectiveFixture, _: u64) {
    let (numbers, cx) = (ranks(3), cx());
    let whole = Gathering::of(fixture, &numbers).await;
    let epoch = whole.epoch;
    let pair = Gathering { epoch, seats: whole.seats[..2].into(), backends: whole.backends[..2].to_vec() };
    let mut first = Box::pin(pair.join(&cx, 0));
    still_waits(&mut first, "the join of the first rank").await;
    let third = format!("this rank expects rank {} (incarnation", numbers[2]);
    rejected(whole.join(&cx, 2).await, Code::FailedPrecondition, &[&third, "they expect nobody else"]);
    let mut seats = pair.seats.to_vec();
    seats[0].incarnation = Incarnation(seats[0].incarnation.0 + 1);
    let expects = format!("this rank expects rank {} (incarnation {})", numbers[0], seats[0].incarnation);
    let restarted = Meeting::new("policy/data", epoch, numbers[1], seats).expect("the seats ascend");
    rejected(whole.backends[1].join(&cx, restarted).await, Code::FailedPrecondition, &[&expects]);
}
