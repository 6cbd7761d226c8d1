//! The place and the arguments of each call, and the order of its replies.

use futures_util::future::join_all;
use gym_core::Code;
use gym_core::group::batch::tensor::Tensor;
use gym_core::group::batch::{Batch, Ragged, Uneven};
use gym_core::group::layout::RankLayout;
use gym_core::group::layout::dispatch::{Dispatch, Free};

use super::workers::{Advance, Echo, EchoShared, Echoed, Figures, Hold, HoldShared, Limit, Measure, Note, Notes};
use super::{
    GroupFixture, GroupSetup, LONG_TIMEOUT, TestWorkerKind, far, line, run_cases, square, start, until, until_running,
};
use crate::call::WorkerGroupExt;

pub(super) async fn run(fixture: &dyn GroupFixture) {
    run_cases!(fixture;
        a_call_reaches_every_rank_and_its_answers_come_in_rank_order,
        arguments_of_its_own_reach_each_rank,
        numbers_that_are_not_finite_arrive_as_they_are_in_both_directions,
        arguments_for_more_or_fewer_ranks_are_refused_before_anybody_is_called,
        a_batch_is_sharded_over_one_axis_and_replicated_over_the_other,
        of_a_free_axis_only_the_first_rank_is_called_or_the_others_without_data,
        collect_once_takes_the_answers_of_one_replica_alone,
        a_call_to_one_rank_leaves_the_others_alone,
        uneven_rows_are_refused_unless_they_are_allowed,
        empty_and_ragged_batches_come_back_as_they_went,
        started_calls_arrive_in_order_even_if_the_first_is_awaited_last,
        sixteen_group_calls_at_once_to_sixty_four_ranks_all_end,
        shared_calls_run_beside_each_other,
        a_blocking_worker_that_is_not_send_stays_on_its_thread,
        a_rank_tells_what_it_runs_and_how_far_it_is,
        an_unknown_axis_or_rank_is_refused_before_anybody_is_called,
    );
}

fn rows(count: i64) -> Batch {
    let ids = Tensor::from_vec([count as usize], (0..count).collect::<Vec<i64>>()).expect("the shape fits");
    Batch::empty().with("id", ids).expect("one column")
}

fn ids(batch: &Batch) -> Vec<i64> {
    let column = batch.column("id").and_then(|column| column.dense()?.view::<i64>().map(|view| view.to_vec()));
    column.expect("the column that was sent")
}

async fn a_call_reaches_every_rank_and_its_answers_come_in_rank_order(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 5).await;
    let answers = tested.group().call(Echo, "hello".to_owned()).deadline(LONG_TIMEOUT).await.unwrap();
    let echoed = |rank| Echoed { rank, world_size: 5, incarnation: 1, text: "hello".to_owned(), rows: 0 };
    assert_eq!(answers.into_values(), (0..5).map(echoed).collect::<Vec<_>>());
}

async fn arguments_of_its_own_reach_each_rank(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 4).await;
    let names: Vec<String> = ["a", "b", "c", "d"].map(String::from).to_vec();
    let answers = tested.group().call_each(Echo, names.clone()).deadline(LONG_TIMEOUT).await.unwrap();
    assert_eq!(answers.into_values().into_iter().map(|echoed| echoed.text).collect::<Vec<_>>(), names);
}

async fn numbers_that_are_not_finite_arrive_as_they_are_in_both_directions(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 3).await;
    let figures = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(|number| {
        // A text that looks like a number of the head's JSON stays a text.
        let word = Limit::Word(format!("\0{number}"));
        let by_name = [("at most", Limit::Number(number)), ("word", word)];
        let by_name = by_name.map(|(name, limit)| (name.to_owned(), (number as f32, limit))).into();
        Figures { loss: number as f32, clip: Some(number), by_name }
    });
    let group = tested.group();
    let own = group.call_each(Measure, figures.to_vec()).deadline(LONG_TIMEOUT).await.unwrap().into_values();
    let same = group.call(Measure, figures[0].clone()).deadline(LONG_TIMEOUT).await.unwrap().into_values();
    let one = group
        .call(Measure, figures[1].clone())
        .dispatch(Dispatch::rank(1))
        .deadline(LONG_TIMEOUT)
        .start()
        .await
        .unwrap();
    let one = one.await.unwrap().into_values();
    let sent = figures.iter().chain([&figures[0]; 3]).chain([&figures[1]]);
    for (sent, (seen, back)) in sent.zip(own.into_iter().chain(same).chain(one)) {
        let sent = format!("{sent:?}");
        assert_eq!((&seen, format!("{back:?}")), (&sent, sent.clone()));
    }
}

async fn arguments_for_more_or_fewer_ranks_are_refused_before_anybody_is_called(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 2).await;
    for count in [0, 1, 3] {
        let error = tested.group().call_each(Note, vec![7; count]).deadline(LONG_TIMEOUT).await.unwrap_err();
        assert_eq!((error.cause().code(), error.outcomes().len()), (Code::InvalidArgument, 0));
    }
    let notes = tested.group().call(Notes, ()).deadline(LONG_TIMEOUT).await.unwrap();
    assert!(notes.into_values().iter().all(Vec::is_empty));
}

async fn a_batch_is_sharded_over_one_axis_and_replicated_over_the_other(fixture: &dyn GroupFixture) {
    let tested = start(fixture, square(), TestWorkerKind::Async).await;
    let dispatch = Dispatch::shard("data").replicate(["tensor"]);
    let group = tested.group();
    let answers =
        group.call(Echo, String::new()).batch(rows(6)).dispatch(dispatch).deadline(LONG_TIMEOUT).await.unwrap();
    let got: Vec<_> = answers.replies().iter().map(|reply| (reply.rank, ids(&reply.batch))).collect();
    let (first, second) = (vec![0, 1, 2], vec![3, 4, 5]);
    assert_eq!(got, [(0, first.clone()), (1, first), (2, second.clone()), (3, second)]);
    assert_eq!(ids(&answers.batch().unwrap()), ids(&rows(6)), "of each shard one answer");
}

async fn of_a_free_axis_only_the_first_rank_is_called_or_the_others_without_data(fixture: &dyn GroupFixture) {
    let tested = start(fixture, square(), TestWorkerKind::Async).await;
    let group = tested.group();
    let call =
        |dispatch: Dispatch| group.call(Echo, String::new()).batch(rows(4)).dispatch(dispatch).deadline(LONG_TIMEOUT);
    let answers = call(Dispatch::shard("tensor")).await.unwrap();
    let got: Vec<_> = answers.replies().iter().map(|reply| (reply.rank, ids(&reply.batch))).collect();
    assert_eq!(got, [(0, vec![0, 1]), (1, vec![2, 3])]);
    let answers = call(Dispatch::shard("tensor").free(Free::Dummy)).await.unwrap();
    assert_eq!(answers.replies().len(), 2, "the answers of ranks without data are dropped");
    let statuses = group.ask_hosts(&far()).await;
    let calls: Vec<u64> = statuses.iter().map(|status| status.as_ref().unwrap().succeeded).collect();
    assert_eq!(calls, [2, 2, 1, 1], "they were called the second time");
}

async fn collect_once_takes_the_answers_of_one_replica_alone(fixture: &dyn GroupFixture) {
    let tested = start(fixture, square(), TestWorkerKind::Async).await;
    let dispatch = Dispatch::shard("data").replicate(["tensor"]).collect_once(["tensor"]);
    let group = tested.group();
    let answers =
        group.call(Echo, String::new()).batch(rows(4)).dispatch(dispatch).deadline(LONG_TIMEOUT).await.unwrap();
    let got: Vec<_> = answers.replies().iter().map(|reply| (reply.rank, ids(&reply.batch))).collect();
    assert_eq!(got, [(0, vec![0, 1]), (2, vec![2, 3])]);
    let statuses = group.ask_hosts(&far()).await;
    assert!(statuses.iter().all(|status| status.as_ref().unwrap().succeeded == 1), "all four worked");
}

async fn a_call_to_one_rank_leaves_the_others_alone(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 3).await;
    let group = tested.group();
    let one = group.call(Echo, "only".to_owned()).dispatch(Dispatch::rank(1)).deadline(LONG_TIMEOUT).await.unwrap();
    assert_eq!(one.into_one().unwrap().value.rank, 1);
    group.call(Note, 1).dispatch(Dispatch::rank(2)).deadline(LONG_TIMEOUT).await.unwrap();
    let notes = group.call(Notes, ()).deadline(LONG_TIMEOUT).await.unwrap().into_values();
    assert_eq!(notes.iter().map(Vec::len).collect::<Vec<_>>(), [0, 0, 1]);
}

async fn uneven_rows_are_refused_unless_they_are_allowed(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 3).await;
    let group = tested.group();
    let call = |uneven| {
        let call = group.call(Echo, String::new()).batch(rows(4)).dispatch(Dispatch::shard("rank"));
        call.uneven(uneven).deadline(LONG_TIMEOUT)
    };
    let error = call(Uneven::Refuse).await.unwrap_err();
    assert_eq!((error.cause().code(), error.outcomes().len()), (Code::InvalidArgument, 0));
    let answers = call(Uneven::Allow).await.unwrap();
    assert_eq!(answers.replies().iter().map(|reply| reply.value.rows).collect::<Vec<_>>(), [2, 2, 0]);
    assert_eq!(ids(&answers.batch().unwrap()), [0, 1, 2, 3]);
}

async fn empty_and_ragged_batches_come_back_as_they_went(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 2).await;
    let group = tested.group();
    let answers =
        group.call(Echo, String::new()).dispatch(Dispatch::shard("rank")).deadline(LONG_TIMEOUT).await.unwrap();
    assert!(answers.batch().unwrap().is_empty());
    let tokens = Ragged::from_rows(&[vec![1_i32, 2, 3], vec![], vec![4], vec![5, 6]]);
    let batch = rows(4).with("tokens", tokens).unwrap();
    let call = group.call(Echo, String::new()).batch(batch.clone()).dispatch(Dispatch::shard("rank"));
    assert_eq!(call.deadline(LONG_TIMEOUT).await.unwrap().batch().unwrap(), batch);
}

async fn started_calls_arrive_in_order_even_if_the_first_is_awaited_last(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 3).await;
    let group = tested.group();
    let mut pending = Vec::new();
    for number in 0..50 {
        pending.push(group.call(Note, number).deadline(LONG_TIMEOUT).start().await.unwrap());
    }
    while let Some(last) = pending.pop() {
        last.await.unwrap();
    }
    let expected: Vec<String> = (0..50).map(|number: u64| number.to_string()).collect();
    for notes in group.call(Notes, ()).deadline(LONG_TIMEOUT).await.unwrap().into_values() {
        assert_eq!(notes, expected);
    }
}

async fn sixteen_group_calls_at_once_to_sixty_four_ranks_all_end(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 64).await;
    let group = tested.group();
    let batch = rows(640);
    let calls = (0..16).map(|number: u64| {
        let call = group.call(Echo, number.to_string()).batch(batch.clone()).dispatch(Dispatch::shard("rank"));
        async move { call.deadline(LONG_TIMEOUT).await.unwrap() }
    });
    for (number, answers) in join_all(calls).await.into_iter().enumerate() {
        assert_eq!(ids(&answers.batch().unwrap()), ids(&batch));
        assert!(answers.replies().iter().all(|reply| reply.value.text == number.to_string()));
    }
}

async fn shared_calls_run_beside_each_other(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 1).await;
    let group = tested.group();
    let held = group.call(HoldShared, ()).deadline(LONG_TIMEOUT).start().await.unwrap();
    until_running(&*group).await;
    group.call(EchoShared, String::new()).deadline(LONG_TIMEOUT).await.unwrap();
    drop(held);
    // An exclusive call waits for the shared ones; that it runs says that the held one was dropped.
    group.call(Echo, String::new()).deadline(LONG_TIMEOUT).await.unwrap();
}

async fn a_blocking_worker_that_is_not_send_stays_on_its_thread(fixture: &dyn GroupFixture) {
    let layout = RankLayout::line(2).unwrap();
    let tested = start(fixture, layout, TestWorkerKind::Blocking).await;
    let group = tested.group();
    for number in 0..10 {
        group.call(Note, number).deadline(LONG_TIMEOUT).await.unwrap();
    }
    let call = group.call(Echo, "blocking".to_owned()).batch(rows(2)).dispatch(Dispatch::shard("rank"));
    assert_eq!(ids(&call.deadline(LONG_TIMEOUT).await.unwrap().batch().unwrap()), [0, 1]);
    let notes = group.call(Notes, ()).deadline(LONG_TIMEOUT).await.unwrap().into_values();
    assert!(notes.iter().all(|notes| notes.len() == 10));
}

async fn a_rank_tells_what_it_runs_and_how_far_it_is(fixture: &dyn GroupFixture) {
    let layout = RankLayout::line(2).unwrap();
    let tested = fixture.start(GroupSetup { layout, worker: TestWorkerKind::Async, calls_max: 8 }).await;
    let group = tested.group();
    let moving = group.call(Advance, 7).dispatch(Dispatch::rank(0)).deadline(LONG_TIMEOUT).start().await.unwrap();
    let waiting = group.call(Hold, ()).dispatch(Dispatch::rank(0)).deadline(LONG_TIMEOUT).start().await.unwrap();
    let seen = |status: &gym_core::group::WorkerStatus| {
        let told = status.running.iter().any(|call| call.method == "test.advance" && call.progress == 7);
        status.rank == 1 || (told && status.waiting == 1)
    };
    until(&*group, seen).await;
    drop((moving, waiting));
    until(&*group, |status| status.running.is_empty() && status.waiting == 0).await;
}

async fn an_unknown_axis_or_rank_is_refused_before_anybody_is_called(fixture: &dyn GroupFixture) {
    let tested = line(fixture, 2).await;
    let group = tested.group();
    for dispatch in [Dispatch::shard("pipeline"), Dispatch::rank(2), Dispatch::shard("rank").replicate(["rank"])] {
        let error = group.call(Note, 1).dispatch(dispatch).deadline(LONG_TIMEOUT).await.unwrap_err();
        assert_eq!((error.cause().code(), error.outcomes().len()), (Code::InvalidArgument, 0));
    }
}
